"""The audit of a run that is about to start: its own step and its sampler, on generated rows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from dpsgd.audit.checks import AuditReport
from dpsgd.audit.coupled import coupled_audit
from dpsgd.gradients.memory import bytes_per_example
from dpsgd.gradients.memory import microbatch_size as automatic_size
from dpsgd.runs.task import Trainable
from dpsgd.training.algorithm import dpsgd
from dpsgd.training.mechanism import Mechanism
from samplers import BatchSampler

PyTree = Any

_ROWS = 64
_UNITS = 18  # at least, where blocks of rows are clipped as one
_MICROBATCH = 24  # at most: a batch has three, the last of them not full


def audit_run(
    task: Trainable,
    params: PyTree,
    mechanism: Mechanism,
    microbatch_size: int | None,
    progress: Callable[[str], None] = lambda line: None,
) -> str:
    """Audits the step and the sampler of a run that is about to start, and says what was checked.

    The step is the run's own: loss, clipping, noise and divisor, and a scan over microbatches where
    the run has one. Three things are not, so that it takes seconds and tells nothing about anybody:
    the rows are generated, the keys are other keys, and batches and microbatches are small, as are
    tables and layers where the task makes itself small. Sizes are shapes to the program, which does
    the same with every row of a batch and every coordinate of a table.

    Args:
      task: What is trained.
      params: Its initial parameters, or their shapes.
      mechanism: Sampler, sigma and C.
      microbatch_size: Of the run.
      progress: Called with one line of text.

    Raises:
      ValueError: if the run is not what its guarantee assumes; it must not be trained.
    """
    if not mechanism.noise_multiplier:
        return "not made: there is no noise"
    progress("auditing the step and the sampler")
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
    found, audited = _remembered(task, shapes, mechanism, microbatch_size)
    found.require_passed()
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    on = ["generated rows", f"batches of {_ROWS}"]
    if audited != size:
        on.append(f"a model of {audited:,} parameters in place of {size:,}")
    kept = "step and sampler keep" if found.sampler_audited else "the step keeps"
    line = f"passed: {kept} what the guarantee assumes, on {', '.join(on)}"
    if not found.sampler_audited:
        line = f"SAMPLER NOT AUDITED; {line}"
    if found.left_out:
        left_out = "; ".join(f"{check.name} ({check.detail})" for check in found.left_out)
        line += f". Not checked: {left_out}"
    return line


def _remembered(
    task: Trainable, shapes: PyTree, mechanism: Mechanism, microbatch_size: int | None
) -> tuple[AuditReport, int]:
    """Returns the audit of a run; a process makes it once for each task and mechanism."""
    leaves, structure = jax.tree.flatten(shapes)
    key: Any = task, structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
    try:
        hash((key, mechanism))
    except TypeError:
        return audit_step(task, shapes, mechanism, microbatch_size)
    return _audited(*key, mechanism, microbatch_size)


@functools.lru_cache(maxsize=256)
def _audited(
    task: Trainable,
    structure: Any,
    leaves: tuple[tuple[tuple[int, ...], Any], ...],
    mechanism: Mechanism,
    microbatch_size: int | None,
) -> tuple[AuditReport, int]:
    shapes = jax.tree.unflatten(structure, [jax.ShapeDtypeStruct(*leaf) for leaf in leaves])
    return audit_step(task, shapes, mechanism, microbatch_size)


def audit_step(
    task: Trainable,
    shapes: PyTree,
    mechanism: Mechanism,
    microbatch_size: int | None = None,
    *,
    claimed: BatchSampler | None = None,
) -> tuple[AuditReport, int]:
    """Audits the step of a task, made small; returns what was found and of how many parameters.

    Args:
      task: What is trained.
      shapes: Of its parameters.
      mechanism: Sampler, sigma and C.
      microbatch_size: Of the run; None for as many as fit.
      claimed: Sampler whose guarantee is claimed, if not the mechanism's own.
    """
    together = microbatch_size or _automatic_microbatch(task, shapes, mechanism)
    scans = together < mechanism.sampler.padded_batch_size
    # All of the small batch at once where the run takes all of its own at once.
    together = min(together, _MICROBATCH) if scans else _ROWS
    small = task
    if callable(make := getattr(task, "small", None)):
        small = make(mechanism.noise.exact)
    params = small.init(0)
    block = 1
    for size in mechanism.sampler.clipped_shape:
        block *= size
    found = coupled_audit(
        lambda optimizer: dpsgd(small.loss, optimizer, microbatch_size=together),
        mechanism,
        params,
        small.generated(max(_ROWS, _UNITS * block)),
        claimed=claimed,
        max_batch_size=_ROWS,
    )
    return found, sum(leaf.size for leaf in jax.tree.leaves(params))


def _automatic_microbatch(task: Trainable, shapes: PyTree, mechanism: Mechanism) -> int:
    """Returns how many examples a run differentiates together if nobody says how many."""
    clipped = mechanism.sampler.clipped_shape
    example = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((*clipped, *leaf.shape[1:]), leaf.dtype),
        task.generated(1),
    )
    sizes_in_bytes = []

    def estimate(params: PyTree) -> None:
        sizes_in_bytes.append(
            bytes_per_example(
                task.loss, params, example, per_example_gradients=mechanism.noise.exact
            )
        )

    jax.eval_shape(estimate, shapes)  # shapes alone: no table of the run's size is filled
    return automatic_size(mechanism.sampler.padded_batch_size, sizes_in_bytes[0])
