"""The audit of a run that is about to start or resume: its own program, on generated rows."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Hashable
from typing import Any

import jax

from dpsgd.audit.audit import audit_program
from dpsgd.audit.report import UNSEEN, AuditReport
from dpsgd.core.algorithm import Algorithm
from dpsgd.core.mechanism import Mechanism
from dpsgd.core.state import TrainState
from dpsgd.engine.feed import Layout
from dpsgd.engine.programs import Parts, compilation
from dpsgd.noise.keys import RootKey
from dpsgd.runs.task import arrays_digest
from samplers import BatchSampler

PyTree = Any

ROWS = 64
"""Examples that are generated for an audit, or blocks of rows where these are clipped as one."""

NOT_MADE = (
    "not made: that the compiled program and the draws are what is claimed was not tested in this "
    "run"
)
"""What is said of a run that was not to be audited."""

_KNOWN = 2**26  # bytes of a state, at most, whose audit is remembered
_passed: dict[Hashable, AuditReport] = {}


def verdict(found: AuditReport, parts: list[str]) -> str:
    """Returns the verdict of an audit in a line, or raises ValueError if it failed.

    Args:
      found: Report of the audit.
      parts: Names of what was audited.
    """
    found.require_passed()
    made = len(found.checks) - len(found.left_out)
    *first, last = parts
    line = f"{', '.join(first)} and {last}" if first else last
    keep = "keeps" if parts == ["the compiled program"] else "keep"
    line = f"passed: {line} {keep} what the guarantee assumes"
    line = f"{line}, by {made} checks on generated rows"
    if not found.sampler_audited:
        line = f"SAMPLER NOT AUDITED; {line}"
    for why, names in found.reasons.items():
        others = f" and {len(names) - 2} more" if names[2:] else ""
        line += f". Not tested, as {why}: {', '.join(names[:2])}{others}"
    return f"{line}. {UNSEEN}"


def audit_synthetic(
    algorithm: Algorithm,
    mechanism: Mechanism,
    state: TrainState,
    layout: Layout | None,
    synthetic: Callable[[int], PyTree],
    *,
    claimed: BatchSampler | None = None,
    laws: bool = False,
) -> AuditReport:
    """Audits the program that trains, on synthetic rows, in all processes that train it.

    Args:
      algorithm: Algorithm of the run.
      mechanism: Sampler, sigma and C.
      state: State with which the run begins or resumes.
      layout: Layout of its blocks, if known.
      synthetic: Function of a count that makes as many synthetic rows.
      claimed: Sampler whose guarantee is claimed, see `audit_program`.
      laws: True to test the law of the draws, see `audit_program`.
    """
    return audit_program(
        algorithm,
        mechanism,
        state.params,
        synthetic(probe_rows(mechanism)),
        state=state,
        layout=layout,
        claimed=claimed,
        root=RootKey.shared(),
        laws=laws,
    )


def probe_rows(mechanism: Mechanism) -> int:
    """Returns how many rows are generated for an audit."""
    return ROWS * math.prod(mechanism.sampler.clipped_shape)


def once(make: Callable[[], AuditReport], state: PyTree, key: tuple[Any, ...]) -> AuditReport:
    """Returns an audit, if it passed before the one that was made of an equal key and state."""
    small = sum(leaf.nbytes for leaf in jax.tree.leaves(state)) <= _KNOWN
    if key[0] is None or not small:
        return make()
    # Another program under other settings.
    key = Parts(*key), arrays_digest(state), json.dumps(compilation())
    if (known := _passed.get(key)) is not None:
        return known
    found = make()
    if found.passed:
        if len(_passed) == 256:
            _passed.clear()
        _passed[key] = found
    return found
