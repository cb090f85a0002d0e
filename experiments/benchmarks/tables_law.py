"""The law of gaps beside the update rule itself: formulas, draws, and training without noise."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpsgd import LazyTables, Mechanism, RootKey, dpsgd, train
from dpsgd.audit.runtime.deferred_law import DeferredLaw
from dpsgd.core.state import Table
from dpsgd.engine.lazy.gaps import GapLaw, Gaps, LinearSgd
from dpsgd.engine.lazy.laws import RunLaws
from dpsgd.engine.lazy.rows import caught_up
from experiments.benchmarks.case import Row, at, figure
from samplers import BallsAndBins

STEPS = 100_000
LENGTHS = 1, 2, 10, 1_000, STEPS
OPTIMIZERS: dict[str, dict[str, float]] = {
    "SGD": {},
    "momentum 0.9": {"momentum": 0.9},
}
"""Of tables, as `LazyTables` takes them."""
SURE = 5.0
"""Standard errors."""


def schedules(steps: int) -> dict[str, np.ndarray]:
    """Returns step sizes of a run."""
    progress = np.arange(steps) / steps
    cosine = 0.5 * (1 + np.cos(np.pi * progress))
    return {
        "cosine": cosine,
        "constant": np.full(steps, 0.3),
        "warm-up and cosine": np.minimum(1.0, 100 * (progress + 1 / steps)) * cosine,
    }


def step_by_step(run: LinearSgd) -> Callable[[int, int], GapLaw]:
    """Returns (start, stop) -> the law of a gap as the audit knows it, by the update rule alone."""
    sizes = np.array(run.step_sizes)
    audited, kept = DeferredLaw(sizes, run.momentum, 1.0, lambda attempt: sizes), -run.order
    return lambda start, stop: GapLaw(*(x[kept:, kept:] for x in audited.gap(start, stop)))


def looked_up(gaps: Gaps, start: int, stop: int) -> GapLaw:
    """Returns the law of a gap as a step finds it."""
    at, multiple = gaps.ending_at(stop), -(-start // gaps.spacing)
    if multiple * gaps.spacing <= stop:
        return gaps.to_next_multiple.select(start).then(at.from_multiples.select(multiple))
    return at.from_recent.select(start % gaps.spacing)


def _off(found: np.ndarray, covariance: np.ndarray) -> float:
    """Returns how far a covariance is off, in standard deviations of both."""
    scale = np.sqrt(np.outer(*[np.diag(covariance)] * 2))
    return float(np.max(np.abs(found - covariance) / scale))


def law(steps: int = STEPS, draws: int = 1_000_000, kinds: int = 3) -> Iterator[Row]:
    """Yields the rows of runs of so many steps, of so many draws, and of so many schedules."""
    lengths = [length for length in LENGTHS if length < steps] + [steps]
    for (what, settings), (name, sizes) in itertools.product(
        OPTIMIZERS.items(), list(schedules(steps).items())[:kinds]
    ):
        run = LazyTables(sizes.__getitem__, **settings).of_run(steps)
        gaps, laws, truth = Gaps(run), RunLaws(run), step_by_step(run)
        off, moved, errors = 0.0, 0.0, 0.0
        places = {
            (max(0, stop - length), stop)
            for length in lengths
            for stop in (length, steps // 2, steps)
        }
        for start, stop in sorted(places, key=lambda place: place[1]):
            expected = truth(start, stop)
            found = looked_up(gaps, start, stop)
            off = max(off, _off(found.covariance, expected.covariance))
            moved = max(moved, _moved(run, laws, start, stop, expected))
            errors = max(errors, _drawn(run, laws, start, stop, expected, draws))
        row = at(f"{what}, {name}, gaps of 1 to {steps:,} steps")
        yield row("covariance, off brute force", off, "x", at_most=1e-9)
        yield row("rows without noise, off the update rule", moved, "x", at_most=1e-6)
        name = f"covariance of {draws:,} draws, off brute force"
        yield row(name, errors, "SE", at_most=SURE)


def _caught_up(
    run: LinearSgd, laws: RunLaws, start: int, stop: int, state: Any, stddev: Any
) -> np.ndarray:
    """Returns the state of rows of one coordinate each, as a step brings them up."""
    *m, theta = (jnp.asarray(x)[:, None] for x in state)
    old = Table(theta, m[0] if m else None, jnp.full(len(theta), start, jnp.int32))
    found = _program(old, laws.flush_arrays(stop), jnp.int32(stop), stddev)
    parts = found.momentum, found.values
    return np.stack([np.asarray(x, np.float64).ravel() for x in parts if x is not None])


@jax.jit
def _program(old, laws, step, stddev):
    numbers = jnp.arange(len(old.steps), dtype=jnp.int32)
    key = jnp.asarray(RootKey.from_insecure_seed(0).noise_key(0))
    how = {"laws": laws, "step": step, "noise_key": key, "leaf": 0, "stddev": stddev}
    return caught_up(old, numbers, **how)


def _moved(run: LinearSgd, laws: RunLaws, start: int, stop: int, expected: GapLaw) -> float:
    """Returns how far rows without noise are off, over the largest number before or after."""
    state = np.random.default_rng(0).normal(size=(run.order, 1_000)).astype(np.float32)
    found = _caught_up(run, laws, start, stop, state, None)
    wanted = expected.transition @ state.astype(np.float64)
    return float(
        np.max(np.abs(found - wanted)) / max(np.max(np.abs(state)), np.max(np.abs(wanted)))
    )


def _drawn(
    run: LinearSgd, laws: RunLaws, start: int, stop: int, expected: GapLaw, draws: int
) -> float:
    """Returns how many standard errors the covariance of draws is off."""
    state = np.zeros((run.order, draws), np.float32)
    z = _caught_up(run, laws, start, stop, state, jnp.float32(1.0))
    v = expected.covariance
    errors = np.sqrt((np.outer(np.diag(v), np.diag(v)) + v**2) / draws)
    return float(np.max(np.abs(z @ z.T / draws - v) / errors))


def trained(steps: int = 300) -> Iterator[Row]:
    """Yields how far training is off the dense algorithm's without noise, of all parameters."""
    num_rows, width, batch = 2_000, 3, 20
    rng = np.random.default_rng(0)
    ids = np.minimum(rng.zipf(1.3, size=(batch * steps, 4)) - 1, num_rows - 1).astype(np.int32)
    rows = {"ids": ids, "y": rng.normal(size=len(ids)).astype(np.float32)}
    params = {
        "table": rng.normal(size=(num_rows, width)).astype(np.float32),
        "w": rng.normal(size=4 * width).astype(np.float32),
    }

    def loss_fn(params: Any, example: Any) -> jax.Array:
        return (params["table"][example["ids"]].ravel() @ params["w"] - example["y"]) ** 2

    schedule = optax.cosine_decay_schedule(0.2, steps)
    for what, settings in OPTIMIZERS.items():
        tables = LazyTables(schedule, **settings)
        sgd = optax.sgd(schedule, tables.momentum or None)
        parts = optax.multi_transform({"t": sgd, "w": optax.adam(0.01)}, {"table": "t", "w": "w"})
        algorithms = dpsgd(loss_fn, parts), dpsgd(loss_fn, optax.adam(0.01), tables=tables)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the seed, and that nothing is private
            dense, found = (
                train(
                    algorithm,
                    Mechanism(BallsAndBins(len(ids), batch), 0.0, l2_clip_norm=0.5),
                    params,
                    rows,
                    root=RootKey.from_insecure_seed(3),
                    delta=1e-6,
                    audit=False,
                ).params
                for algorithm in algorithms
            )
        off = max(
            float(jnp.max(jnp.abs(found[name] - leaf)) / jnp.max(jnp.abs(leaf)))
            for name, leaf in dense.items()
        )
        name = f"parameters at sigma 0, off the dense algorithm's, {what}, {steps} steps"
        yield figure(name, off, "x", at_most=1e-6)
