"""`train`: parameters, and the guarantee of what ran; a run without a directory."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from accounting import default_delta
from dpsgd.audit.synthetic import Generated, generated_rows
from dpsgd.core.algorithm import Algorithm
from dpsgd.core.guarantee import Guarantee
from dpsgd.core.mechanism import Mechanism
from dpsgd.engine.algorithm import copy_buffers
from dpsgd.engine.feed import BLOCK_STEPS
from dpsgd.engine.loop import Block, check_parameters, columns_of
from dpsgd.engine.placement import Placement
from dpsgd.engine.queries import Refinement
from dpsgd.noise.keys import RootKey
from dpsgd.runs.job import Journal, Training
from samplers import Population, UnitData

PyTree = Any

_READ_BYTES = 2**24
"""Most bytes of rows that are looked at together before training."""


class Trained(NamedTuple):
    """What a run leaves: parameters, and the guarantee of what ran."""

    params: PyTree
    guarantee: Guarantee


def train(
    algorithm: Algorithm,
    mechanism: Mechanism,
    params: PyTree,
    data: PyTree | UnitData,
    *,
    delta: float | None = None,
    root: RootKey | None = None,
    audit: bool = True,
    generated: Generated | None = None,
    refinement: Refinement | None = None,
    block_steps: int = BLOCK_STEPS,
    data_on: Literal["device", "host"] | None = None,
    placement: Placement | None = None,
    on_block: Callable[[int, PyTree], bool | None] | None = None,
) -> Trained:
    """Trains from `params`, through every step of the sampler unless `on_block` stops the run.

    The guarantee is that of what ran. It is proved before the run begins: a mechanism that has none
    is refused, unless it has no noise or `root` is from a seed, which the guarantee then says. Then
    the program that is about to train, and the sampler's draws, are audited: they do what the proof
    assumes, or the run is refused.

    **What the audit sees**: the compiled program itself, with the run's own shapes and optimizer,
    under other keys and on synthetic probe rows: clipping, noise, divisor, padding, the update, and
    whole epochs of draws. A loss or an optimizer that holds an array of the shape of rows is
    refused, and an optimizer that calls the host. **What nobody can see**: data in another shape
    that either holds, and data that Python code reads for the trace from a container of a
    method's object, from another module or from a file. Such data go around clipping and
    noise, and no epsilon covers them: the loss is a function of parameters and one example, and the
    optimizer one of the private gradient.

    Args:
      algorithm: From `dpsgd`.
      mechanism: Sampler, sigma and C.
      params: Initial parameters; they must not depend on the private data.
      data: Pytree of arrays with one leading row per example; or `UnitData`, which say what a row
        is: what is protected is then what they have. NaN or infinity among them gives a
        warning, which looks at private rows and which no guarantee covers: it is for whoever holds
        them, and tells neither how many they are nor which.
      delta: Of the guarantee, in (0, 0.1); by default `accounting.default_delta`.
      root: Secret of this run and of no other; by default fresh from the operating system's
        entropy. One from a seed gives a warning, and no guarantee.
      audit: Whether the run is audited before it begins, which takes seconds; if not, the guarantee
        says so. Without noise there is nothing to audit.
      generated: Synthetic probe rows, for the audit: a pytree like `data` of a few rows, or a
        function that makes so many. By default made of the shapes and types of the data alone:
        floats are standard normal, or their absolute values, and whole numbers 0 or 1. It is worth
        giving where the guarantee says that such rows have no gradient.
      refinement: What is made, after the last step, of the mechanism's sums over all rows
        (`Mechanism.full_sums`), such as `Platt`: the parameters that are returned are refined, and
        the guarantee is that of both. A run that is stopped releases no sums.
      block_steps: Steps per dispatch.
      data_on: Where the data lie, see `train_blocks`.
      placement: Which devices compute, such as `Placement.default()`, all; by default one.
      on_block: Called after each block of at most `block_steps` steps (fewer where rows stream from
        the host, or batches take several passes) with the number of steps that are done and a copy
        of the parameters, to evaluate or to keep them; the run stops where it returns True. The
        guarantee covers these parameters, with whatever is computed of them and of public rows;
        what is computed of private rows is not covered. A run that is stopped costs what the whole
        run costs, see `cost`, which also says what is spent by then. An exception of
        `on_block` is passed on, with a note of what the run has cost.

    Raises:
      TypeError: if the algorithm, the mechanism or the root is something else.
      ValueError: if a run was begun under `root` before, the data have not the units that the
        sampler draws, the cost is not proved, the audit fails, the loss could see other examples
        than its own, there is a refinement without sums or the other way round, and as for
        `train_blocks`.
    """
    for value, kind in ((algorithm, Algorithm), (mechanism, Mechanism)):
        if not isinstance(value, kind):
            raise TypeError(
                "train takes an Algorithm, as dpsgd(loss_fn, optimizer) returns it, and then a "
                f"Mechanism, got a {type(value).__name__} in place of the {kind.__name__}"
            )
    if (refinement is None) != (mechanism.full_sums is None):
        raise ValueError(
            "a refinement is made of sums that the mechanism has none of: give it full_sums"
            if refinement
            else "the mechanism releases sums over all rows: give what is made of them, refinement="
        )
    root = RootKey.from_entropy() if root is None else root
    RootKey.require(root)
    columns, sampler = columns_of(mechanism.sampler, data), mechanism.sampler
    check_parameters(params)
    private = mechanism.noise_multiplier > 0
    rows = data.population if isinstance(data, UnitData) else Population(sampler.num_examples)
    guaranteed = private and not root.insecure
    block = math.prod(sampler.clipped_shape)
    job = Training(
        data=columns,
        unit=sampler.protected_unit(rows) if guaranteed else sampler.unit,
        params=params,
        algorithm=algorithm,
        mechanism=mechanism,
        delta=default_delta(sampler.num_units) if delta is None else delta,
        refinement=refinement,
        placement=placement,
        query_placement=placement,
        synthetic=lambda count: generated_rows(columns, count, generated, block=block),
        audited=audit,
        data_on=data_on,
        block_steps=block_steps,
    )
    # A run that is refused has not begun: it leaves the root to the next one.
    guarantee = job.guarantee(reproducible_noise=root.insecure)
    job.programs()
    note = f"audit before training: {job.audit()}"
    guarantee = dataclasses.replace(guarantee, notes=(*guarantee.notes, note))
    journal = _Callback(job, root.begin_run(), on_block)
    if root.insecure and private:
        warnings.warn(guarantee.sentence(), stacklevel=2)
    if found := not_finite(columns):
        warnings.warn(
            f"{', '.join(f'data{path}' for path in found)}: there is NaN or infinity among them; a "
            "gradient that is not finite counts as zero, so that nothing is learned from its "
            "example (this warning looked at private rows: no guarantee covers it)",
            stacklevel=2,
        )
    whole = mechanism.num_steps
    try:
        end = job.train(job.start(), root, journal)
    except BaseException as error:
        stopped = guarantee.stopped(journal.done, whole)
        error.add_note(f"training was cut short: {stopped.sentence()}")
        raise
    done = int(end.step)
    return Trained(end.params, guarantee if done == whole else guarantee.stopped(done, whole))


class _Callback(Journal):
    """Calls `on_block` after each block."""

    def __init__(
        self, job: Training, name: str, on_block: Callable[[int, PyTree], bool | None] | None
    ) -> None:
        self.name, self._on_block = name, on_block
        self.flush_every = None if on_block is None else job.layout.block_steps
        self.done = 0

    def keep(self, block: Block) -> bool:
        self.done = block.steps.stop
        if self._on_block is None:
            return False
        return bool(self._on_block(self.done, copy_buffers(block.state.params)))


def not_finite(tree: PyTree) -> list[str]:
    """Returns the paths of the arrays with NaN or infinity; those of the host are read in parts.

    >>> not_finite({"x": np.array([1.0, np.nan]), "y": np.array([0, 1])})
    ["['x']"]
    """
    found = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            continue
        if isinstance(leaf, jax.Array):
            finite = bool(jnp.isfinite(leaf).all())
        else:
            rows = max(1, _READ_BYTES * len(leaf) // max(1, leaf.nbytes))
            parts = (leaf[i : i + rows] for i in range(0, len(leaf), rows))
            finite = all(bool(np.isfinite(part).all()) for part in parts)
        if not finite:
            found.append(jax.tree_util.keystr(path))
    return found
