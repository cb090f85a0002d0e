"""The audit of a run that is about to start, or to go on: its own program, on generated rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable
from typing import Any

import jax

from dpsgd.audit.checks import UNSEEN, AuditReport
from dpsgd.audit.coupled import coupled_audit
from dpsgd.runs.task import Trainable, arrays_digest
from dpsgd.training.algorithm import Algorithm, TrainState
from dpsgd.training.loop import Layout
from dpsgd.training.mechanism import Mechanism
from dpsgd.training.programs import compilation
from samplers import BatchSampler

ROWS = 64
"""Examples that are generated for an audit, or blocks of rows where these are clipped as one."""

_KNOWN = 2**26  # bytes of a state, at most, whose audit is remembered
_passed: dict[Hashable, AuditReport] = {}


def audit_run(
    task: Trainable,
    algorithm: Algorithm,
    mechanism: Mechanism,
    state: TrainState,
    layout: Layout,
    progress: Callable[[str], None] = lambda line: None,
) -> str:
    """Audits the program and the sampler of a run that begins or goes on; says what was checked.

    All is the run's own, the compiled program included, but rows and keys: the audit tells nothing
    about anybody. A process audits equal runs once.

    Args:
      task: What is trained.
      algorithm: Of the run.
      mechanism: Sampler, sigma and C.
      state: Where the run begins or goes on.
      layout: Of its blocks.
      progress: Called with one line of text.

    Raises:
      ValueError: if the run is not what its guarantee assumes; it must not be trained.
    """
    if not mechanism.noise_multiplier:
        return "not made: there is no noise"
    progress("auditing the program and the sampler")
    found = _remembered(task, algorithm, mechanism, state, layout)
    found.require_passed()
    kept = "program and sampler keep" if found.sampler_audited else "the program keeps"
    line = f"passed: {kept} what the guarantee assumes, on generated rows"
    if not found.sampler_audited:
        line = f"SAMPLER NOT AUDITED; {line}"
    for why, names in found.reasons.items():
        others = f" and {len(names) - 2} more (`dpsgd audit` lists them)" if names[2:] else ""
        line += f". Not checked, as {why}: {', '.join(names[:2])}{others}"
    return f"{line}. {UNSEEN}"


def audit_program(
    task: Trainable,
    algorithm: Algorithm,
    mechanism: Mechanism,
    state: TrainState,
    layout: Layout | None = None,
    *,
    claimed: BatchSampler | None = None,
) -> AuditReport:
    """Audits the program that trains a task.

    Args:
      task: What is trained.
      algorithm: Of the run.
      mechanism: Sampler, sigma and C.
      state: Where the run begins or goes on.
      layout: Of its blocks, if it is known.
      claimed: Sampler whose guarantee is claimed, if not the mechanism's own.
    """
    block = 1
    for size in mechanism.sampler.clipped_shape:
        block *= size
    rows = task.generated(ROWS * block)
    return coupled_audit(
        algorithm, mechanism, state.params, rows, state=state, layout=layout, claimed=claimed
    )


def _remembered(task: Trainable, *run: Any) -> AuditReport:
    """Returns the audit of a run; a process makes it once for equal ones of small states."""
    algorithm, mechanism, state, layout = run
    if sum(leaf.nbytes for leaf in jax.tree.leaves(state)) > _KNOWN:
        return audit_program(task, *run)
    settings = json.dumps(compilation())  # another program under others
    key: Any = task, algorithm, mechanism, layout, arrays_digest(state), settings
    try:
        if (known := _passed.get(key)) is not None:
            return known
    except TypeError:  # a part of it has no hash
        return audit_program(task, *run)
    found = audit_program(task, *run)
    if found.passed:
        if len(_passed) == 256:
            _passed.clear()
        _passed[key] = found
    return found
