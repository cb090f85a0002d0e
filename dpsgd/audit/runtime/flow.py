"""Proves from the program's trace that rows leave only through releases.

Claims and limits of the proof: docs/explanation/non-interference-of-the-program.md.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax

from dpsgd.audit.report import CheckResult
from dpsgd.audit.runtime.labels import (
    DATA,
    KEPT,
    KEY,
    LAST,
    NOISE,
    PENDING,
    PUBLIC,
    READ,
    RELEASE,
    ROWS,
    STDDEV,
    STEP,
    Flow,
    Reader,
    Sum,
    union,
    words,
)
from dpsgd.core.mechanism import Mechanism
from dpsgd.core.state import Scales, TrainState, split_leaves
from dpsgd.engine.algorithm import Algorithm
from dpsgd.engine.feed import Layout
from dpsgd.engine.programs import shapes_of_rows
from dpsgd.engine.step import BlockInputs, block_program, flush_program
from dpsgd.noise.correlated import BandedToeplitz

PyTree = Any

LEAVES = "private rows reach the output through noised sums alone"
GIVEN = "each sum is released once, with the given key, step, sigma C, b and C"

_SECRET = frozenset({ROWS, READ, PENDING, KEY, NOISE, KEPT})
_OF_TABLES = frozenset({ROWS, KEY})


def flow_checks(
    algorithm: Algorithm, mechanism: Mechanism, state: TrainState, data: PyTree, layout: Layout
) -> list[CheckResult]:
    """Checks the traces of the training program and flush.

    Nothing is compiled.

    Args:
      algorithm: Algorithm of the run.
      mechanism: Mechanism of the run.
      state: State with which the run begins or resumes, or its shapes.
      data: Rows of the run, or their shapes.
      layout: Layout of the run's blocks.
    """
    noise_shapes = jax.eval_shape(mechanism.noise.init, state.dense_params)
    arguments = layout.arguments(algorithm, mechanism, state._replace(noise=noise_shapes), data)
    trace = block_program(algorithm, mechanism.sampler, arguments, layout).traced
    start_state, inputs = arguments
    rows = _all((inputs.data, inputs.plan), Flow(frozenset({ROWS})))
    inputs_flow = (
        _state(start_state),
        _all(inputs, PUBLIC)._replace(
            data=rows[0],
            plan=rows[1]._replace(num_steps=PUBLIC),
            noise_key=_argument(KEY),
            scales=_scales(inputs.scales),
        ),
    )
    reader = _reader(mechanism)
    (final_state, _, watched), wrong = _through(reader, trace, inputs_flow)
    leaks = [
        *_state_leaks("", final_state),
        *_leaks("noise state", final_state.noise, DATA),
        *_leaks("values recorded by a block", () if final_state.pending else watched, _SECRET),
    ]
    example = shapes_of_rows(data, *mechanism.sampler.clipped_shape)
    still = split_leaves(final_state.raw_params, algorithm.frozen(state.raw_params, example))[1]
    leaks += _leaks("frozen parameters", still, frozenset({RELEASE}))
    if final_state.step != Flow(frozenset({STEP}), LAST):
        leaks.append("the step counter does not advance by one in each step")
    if RELEASE not in union(jax.tree.leaves(final_state.raw_params)):
        leaks.append("no release reaches the parameters")
    if final_state.pending:
        flush_leaks, flush_faults = _flush(
            reader, algorithm, mechanism.sampler.num_steps, arguments, layout
        )
        leaks += flush_leaks
        wrong |= flush_faults
    arrays = len(jax.tree.leaves(final_state))
    return [
        CheckResult(LEAVES, not leaks, "; ".join(leaks) or f"{arrays} arrays of the state"),
        CheckResult(GIVEN, not wrong, "; ".join(sorted(wrong)) or "in all steps"),
    ]


def _reader(mechanism: Mechanism) -> Reader:
    noise = mechanism.noise
    if noise.bands == 1:  # the state of the noise could count steps
        return Reader(frozenset({KEY, STEP, KEPT}))
    return Reader(frozenset({KEY, STEP} if isinstance(noise, BandedToeplitz) else {KEY}))


def _flush(
    reader: Reader,
    algorithm: Algorithm,
    num_steps: int,
    arguments: tuple[TrainState, BlockInputs],
    layout: Layout,
) -> tuple[list[str], frozenset[str]]:
    """Returns leaks in the results of a flush, and faults of its trace."""
    state, (_, _, key, scales, *_) = arguments
    gap_laws = algorithm.gap_laws(num_steps).flush_arrays(0)
    trace = flush_program(algorithm, (state, gap_laws, key, scales), layout.placement).traced
    inputs = _state(state), _all(gap_laws, PUBLIC), _argument(KEY), _scales(scales)
    (flushed, _), wrong = _through(reader, trace, inputs)
    leaks = _state_leaks("flushed ", flushed)
    if any(NOISE not in flow.labels for flow in jax.tree.leaves(flushed.lazy_tables)):
        leaks.append("a table is flushed without noise")
    return leaks, wrong


def _through(reader: Reader, trace: jax.stages.Traced, given: PyTree) -> tuple[Any, frozenset[str]]:
    """Returns the flows of a program's outputs, in their structure, and its faults."""
    outputs, counts = reader.read(trace.jaxpr, jax.tree.leaves(given))
    wrong = frozenset(x for x in counts if isinstance(x, str))
    released = Counter(x.number for x in counts.elements() if isinstance(x, Sum))
    if max(released.values(), default=0) > 1:
        wrong |= {"a sum is released more than once in a step"}
    return jax.tree.unflatten(jax.tree.structure(trace.out_info), outputs), wrong


def _state_leaks(prefix: str, state: TrainState) -> list[str]:
    return [
        *_leaks(f"{prefix}parameters", state.params_without_tables, _SECRET),
        *_leaks(f"{prefix}optimizer state", state.opt_state, _SECRET),
        *_leaks(f"{prefix}tables", state.lazy_tables, _OF_TABLES),
    ]


def _leaks(place: str, tree: PyTree, forbidden: frozenset[str]) -> list[str]:
    flows = jax.tree_util.tree_leaves_with_path(tree)
    return [
        f"{place}{jax.tree_util.keystr(path)} depends on {words(flow.labels & forbidden)} "
        "except through releases"
        for path, flow in flows
        if flow.labels & forbidden
    ]


def _all(tree: PyTree, flow: Flow) -> PyTree:
    return jax.tree.map(lambda _: flow, tree)


def _argument(name: str) -> Flow:
    return Flow(frozenset({name}), name)


def _state(state: TrainState) -> TrainState:
    """Returns the flows of a state that follows from earlier releases."""
    public, past_noise = _all(state, PUBLIC), _all(state.noise, Flow(frozenset({KEPT})))
    public = public._replace(step=_argument(STEP), noise=past_noise)
    return public.with_tables(_all(state.lazy_tables, Flow(frozenset({PENDING, READ}))))


def _scales(scales: Scales) -> Scales:
    return Scales(Flow(name="C"), _argument(STDDEV), Flow(name="b"), scales.noise)
