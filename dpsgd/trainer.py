"""`train`: parameters, and the guarantee of what ran, audited before it begins."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable
from contextlib import closing
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from accounting import default_delta
from dpsgd.audit.audit import audit_program, audit_queries
from dpsgd.audit.report import AuditReport
from dpsgd.audit.synthetic import Generated, generated_rows
from dpsgd.core.algorithm import Algorithm
from dpsgd.core.cost import Segment, cost
from dpsgd.core.guarantee import Guarantee
from dpsgd.core.mechanism import Mechanism
from dpsgd.core.state import TrainState
from dpsgd.engine.algorithm import owned
from dpsgd.engine.feed import BLOCK_STEPS, Layout
from dpsgd.engine.loop import columns_of, train_blocks
from dpsgd.engine.modules import check_parameters
from dpsgd.engine.placement import Placement
from dpsgd.engine.queries import Refinement, refine, sums_run
from dpsgd.noise.keys import RootKey
from samplers import Population, UnitData

PyTree = Any

_READ_BYTES = 2**24
"""Most bytes of rows that are looked at together before training."""

_UNITS = 17
"""Examples that an audit is given, or blocks of rows where these are clipped as one."""

NOT_AUDITED = (
    "not audited: that the compiled program and the draws are what is claimed was not tested in "
    "this run (audit=True tests it)"
)


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
    under keys and on rows that are nobody's: clipping, noise, divisor, padding, the update, and
    whole epochs of draws. **What nobody can see**: a loss that holds data in a closure, or an
    optimizer that does so or calls the host. Such data go around clipping and noise, and no epsilon
    covers them: the loss is a function of parameters and one example, and the optimizer one of the
    private gradient.

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
      generated: Rows that are nobody's, for the audit: a pytree like `data` of a few rows, or a
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
      ValueError: if a run was begun under `root` before, the data have not the units that the
        sampler draws, the cost is not proved, the audit fails, the loss could see other examples
        than its own, there is a refinement without sums or the other way round, and as for
        `train_blocks`.
    """
    if (refinement is None) != (mechanism.full_sums is None):
        raise ValueError(
            "a refinement is made of sums that the mechanism has none of: give it full_sums"
            if refinement
            else "the mechanism releases sums over all rows: give what is made of them, refinement="
        )
    root = RootKey.from_entropy() if root is None else root
    # A run that is refused has not begun: it leaves the root to the next one.
    columns = columns_of(mechanism.sampler, data)
    check_parameters(params)
    guarantee = _planned(algorithm, mechanism, data, delta, root)
    state = algorithm.init(params, mechanism, columns)
    layout = Layout.of(
        mechanism.sampler, columns, block_steps=block_steps, data_on=data_on, placement=placement
    )
    private = mechanism.noise_multiplier > 0
    if audit and private:
        note = _audited(algorithm, mechanism, state, columns, layout, generated, refinement)
    else:
        layout.program(algorithm, mechanism, state, columns)  # refuses what cannot be trained
        if refinement is not None:
            one = generated_rows(columns, 1, generated)
            sums = sums_run(refinement, mechanism.of_sums(), params, one, placement)
            sums.program()  # so does this
        note = NOT_AUDITED if private else "not audited: there is no noise"
    guarantee = dataclasses.replace(guarantee, notes=(*guarantee.notes, note))
    run = root.begin_run()
    if root.insecure and private:
        warnings.warn(guarantee.sentence(), stacklevel=2)
    if found := not_finite(columns):
        warnings.warn(
            f"{', '.join(f'data{path}' for path in found)}: there is NaN or infinity among them; a "
            "gradient that is not finite counts as zero, so that nothing is learned from its "
            "example (this warning looked at private rows: no guarantee covers it)",
            stacklevel=2,
        )
    done, whole = 0, mechanism.num_steps
    blocks = train_blocks(
        algorithm,
        mechanism,
        state,
        columns,
        root=root,
        layout=layout,
        donate=True,
        flush_every=None if on_block is None else layout.block_steps,
        run=run,
    )
    try:
        with closing(blocks):
            for block in blocks:
                done = block.steps.stop
                if not block.state.pending:
                    params = block.state.params
                if on_block is not None and on_block(done, owned(params)):
                    break
            else:
                if refinement is not None:
                    params = refine(
                        refinement,
                        mechanism,
                        params,
                        data,
                        root=root,
                        placement=placement,
                        run=run,
                    ).params
                    done = whole
    except BaseException as error:
        error.add_note(f"training was cut short: {guarantee.stopped(done, whole).sentence()}")
        raise
    return Trained(params, guarantee if done == whole else guarantee.stopped(done, whole))


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


def _planned(
    algorithm: Algorithm,
    mechanism: Mechanism,
    data: PyTree | UnitData,
    delta: float | None,
    root: RootKey,
) -> Guarantee:
    """Returns the guarantee of the whole run, or raises ValueError where it has none."""
    sampler = mechanism.sampler
    rows = Population(sampler.num_examples)
    population = data.population if isinstance(data, UnitData) else rows
    noisy = mechanism.noise_multiplier > 0 and not root.insecure
    segment = Segment(
        mechanism,
        unit=sampler.protected_unit(population) if noisy else sampler.unit,
        reproducible_noise=root.insecure,
        lazy_tables=algorithm.tables is not None,
    )
    guarantee = cost([segment], default_delta(sampler.num_units) if delta is None else delta)
    return dataclasses.replace(guarantee, foreign_calls=algorithm.foreign_calls)


def _audited(
    algorithm: Algorithm,
    mechanism: Mechanism,
    state: TrainState,
    columns: PyTree,
    layout: Layout,
    generated: Generated | None,
    refinement: Refinement | None,
) -> str:
    """Audits a run that is about to begin; returns what a guarantee says of it, or raises."""
    block = math.prod(mechanism.sampler.clipped_shape)
    rows = generated_rows(columns, _UNITS * block, generated, block=block)
    found = audit_program(algorithm, mechanism, state.params, rows, state=state, layout=layout)
    if refinement is not None:
        sums = audit_queries(refinement, mechanism, state.params, rows, placement=layout.placement)
        found = AuditReport(found.checks + sums.checks)
    return audit_note(found, ", and those of the sums over all rows," if refinement else "")


def audit_note(found: AuditReport, others: str = "") -> str:
    """Returns what a guarantee says of the audit of a run, or raises ValueError if it failed."""
    found.require_passed()
    made = len(found.checks) - len(found.left_out)
    what = "the compiled program and the draws" if found.sampler_audited else "the compiled program"
    note = f"audited before it began: {what}{others} passed {made} checks, on generated rows"
    for why, names in found.reasons.items():
        note += f"; not checked, as {why}: {', '.join(names)}"
    if any("generated rows" in why for why in found.reasons):
        note += " (train takes others: generated=)"
    return f"{note}. {found.limits}"
