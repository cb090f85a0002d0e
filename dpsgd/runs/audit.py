"""The audit of a run that is about to start, or to go on: its own program, on generated rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable
from typing import Any

import jax

from dpsgd.audit.audit import audit_program, audit_queries
from dpsgd.audit.report import AuditReport, CheckResult
from dpsgd.core.algorithm import Algorithm
from dpsgd.core.mechanism import Mechanism
from dpsgd.core.state import TrainState
from dpsgd.engine.feed import Layout
from dpsgd.engine.programs import compilation
from dpsgd.engine.queries import Refinement
from dpsgd.runs.processes import Processes
from dpsgd.runs.task import Trainable, arrays_digest
from samplers import BatchSampler

PyTree = Any

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
    refinement: Refinement | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> str:
    """Audits what is left of a run, its program and sampler and sums; says what was checked.

    All is the run's own, the compiled program included, but rows and keys: the audit tells nothing
    about anybody. A process audits equal runs once.

    Args:
      task: What is trained.
      algorithm: Of the run.
      mechanism: Sampler, sigma and C.
      state: Where the run begins or goes on.
      layout: Of its blocks.
      refinement: What is made of the sums over all rows that it ends in, if any.
      progress: Called with one line of text.

    Raises:
      ValueError: if the run is not what its guarantee assumes; it must not be trained.
    """
    if not mechanism.noise_multiplier:
        return "not made: there is no noise"
    checks: tuple[CheckResult, ...] = ()
    parts = []
    if int(state.step) < mechanism.sampler.num_steps:
        progress("auditing the program and the sampler")
        found = _remembered(task, algorithm, mechanism, state, layout)
        checks += found.checks
        parts += ["program", "sampler"] if found.sampler_audited else ["the program"]
    if refinement is not None:
        progress("auditing the sums over all rows")
        checks += _remembered_sums(task, refinement, mechanism, state.params).checks
        parts.append("sums over all rows")
    found = AuditReport(checks)
    found.require_passed()
    *first, last = parts
    audited = f"{', '.join(first)} and {last}" if first else last
    keep = "keeps" if parts == ["the program"] else "keep"
    line = f"passed: {audited} {keep} what the guarantee assumes, on generated rows"
    if not found.sampler_audited:
        line = f"SAMPLER NOT AUDITED; {line}"
    for why, names in found.reasons.items():
        others = f" and {len(names) - 2} more (`dpsgd audit` lists them)" if names[2:] else ""
        line += f". Not checked, as {why}: {', '.join(names[:2])}{others}"
    return f"{line}. {found.limits}"


def audit_task(
    task: Trainable,
    algorithm: Algorithm,
    mechanism: Mechanism,
    state: TrainState,
    layout: Layout | None = None,
    *,
    claimed: BatchSampler | None = None,
) -> AuditReport:
    """Audits the program that trains a task, in all processes that train it.

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
    return audit_program(
        algorithm,
        mechanism,
        state.params,
        rows,
        state=state,
        layout=layout,
        claimed=claimed,
        root=Processes.current().root(),
    )


def _remembered(task: Trainable, *run: Any) -> AuditReport:
    """Returns the audit of a run; a process makes it once for equal ones of small states."""
    algorithm, mechanism, state, layout = run

    def make() -> AuditReport:
        return audit_task(task, *run)

    if sum(leaf.nbytes for leaf in jax.tree.leaves(state)) > _KNOWN:
        return make()
    return _once(make, task, algorithm, mechanism, layout, arrays_digest(state))


def _remembered_sums(
    task: Trainable, refinement: Refinement, mechanism: Mechanism, params: PyTree
) -> AuditReport:
    """Returns the audit of sums over all rows; a process makes it once for equal ones."""

    def make() -> AuditReport:
        root = Processes.current().root()
        return audit_queries(refinement, mechanism, params, task.generated(ROWS), root=root)

    if sum(leaf.nbytes for leaf in jax.tree.leaves(params)) > _KNOWN:
        return make()
    return _once(make, task, refinement, mechanism.of_sums(), arrays_digest(params))


def _once(make: Callable[[], AuditReport], *key: Any) -> AuditReport:
    """Returns an audit, if it passed before the one that was made of an equal key."""
    key = (*key, json.dumps(compilation()))  # another program under others
    try:
        if (known := _passed.get(key)) is not None:
            return known
    except TypeError:  # a part of it has no hash
        return make()
    found = make()
    if found.passed:
        if len(_passed) == 256:
            _passed.clear()
        _passed[key] = found
    return found
