"""A private sum, mean, histogram or logistic regression, with the guarantee of what was released.

Each is made of sums over all rows, released as those after a run are (`dpsgd.engine.queries`): by
the same clipping and noise, and audited before. Within a run, whose cost then counts it, write it
as a `Refinement`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from accounting import calibrate, default_delta
from dpsgd.audit.audit import audit_program
from dpsgd.audit.synthetic import generated_rows
from dpsgd.core.cost import cost
from dpsgd.core.guarantee import Guarantee
from dpsgd.core.mechanism import Mechanism
from dpsgd.core.segments import Segment
from dpsgd.engine.loop import columns_of
from dpsgd.engine.newton import derivatives, logistic_sums, newton_step
from dpsgd.engine.queries import Refinement, release, sums_run
from dpsgd.noise.base import Independent, Noise
from dpsgd.noise.keys import RootKey
from dpsgd.runs.audit import NOT_MADE, verdict
from samplers import FullBatch

PyTree = Any

_ROWS = 17
"""Rows that an audit is given."""

_CURVATURE = 0.5
"""Least curvature of a Newton step, in units of the noise of the Hessian; chosen on public data."""

_ONE_ROW = 1 + 2.0**-19
"""Clipping norm under which a vector of norm 1 is not clipped, for all rounding of norms."""


class Released(NamedTuple):
    """What was released of rows, and the guarantee of it."""

    value: np.ndarray
    """float64[d]."""
    guarantee: Guarantee


def private_sum(
    rows: Any,
    *,
    l2_clip_norm: float,
    epsilon: float,
    delta: float | None = None,
    noise: Noise = Independent(),  # noqa: B008
    root: RootKey | None = None,
    audit: bool = True,
) -> Released:
    """Returns the sum of vectors, each clipped to the L2 norm C, and Gaussian noise sigma C z.

    Neighbours differ in one row that counts as zero; how many there are is public. sigma is the
    smallest at which (epsilon, delta) holds. A row with NaN or infinity counts as zero.

    Args:
      rows: Vectors, [n, d].
      l2_clip_norm: C, chosen without a look at the rows.
      epsilon: What may be spent, > 0.
      delta: In (0, 0.1); by default `accounting.default_delta`.
      noise: Its law: `Independent()`, or one's own.
      root: Secret of this release and of no other; by default fresh entropy. One from a seed gives
        no guarantee.
      audit: Whether the program is audited before it releases, which takes a second.

    Raises:
      ValueError: if the rows are no such array, an argument is out of range, or the audit fails.
    """
    mean, guarantee = private_mean(
        rows,
        l2_clip_norm=l2_clip_norm,
        epsilon=epsilon,
        delta=delta,
        noise=noise,
        root=root,
        audit=audit,
    )
    return Released(mean * len(rows), guarantee)


def private_mean(
    rows: Any,
    *,
    l2_clip_norm: float,
    epsilon: float,
    delta: float | None = None,
    noise: Noise = Independent(),  # noqa: B008
    root: RootKey | None = None,
    audit: bool = True,
) -> Released:
    """Returns what `private_sum` does, divided by the public number of rows n.

    >>> rows = np.random.default_rng(0).normal(0.5, 0.1, size=(2_000, 2))
    >>> mean, guarantee = private_mean(rows, l2_clip_norm=1.0, epsilon=1.0)
    >>> bool(np.abs(mean - 0.5).max() < 0.05), guarantee.epsilon.upper <= 1.0
    (True, True)
    """
    rows = _vectors(rows)
    if rows.ndim != 2 or not jnp.issubdtype(rows.dtype, jnp.floating):
        raise ValueError(f"rows must be vectors, float[n, d], and are {rows.dtype}{rows.shape}")
    of = _Mean(rows.shape[1])
    return _released(lambda sigma: of, rows, l2_clip_norm, epsilon, delta, noise, root, audit)


def private_histogram(
    bins: Any,
    count: int,
    *,
    epsilon: float,
    delta: float | None = None,
    noise: Noise = Independent(),  # noqa: B008
    root: RootKey | None = None,
    audit: bool = True,
) -> Released:
    """Returns how many rows lie in each bin, with Gaussian noise.

    A row is in one bin, and its vector, 1 there and 0 elsewhere, has norm 1, which is C. One whose
    number is none of 0, ..., `count` - 1 is in no bin. Counts may be negative, and no integers.

    >>> counts, guarantee = private_histogram(np.arange(10_000) % 3, 4, epsilon=1.0, audit=False)
    >>> bool(np.abs(counts - [3334, 3333, 3333, 0]).max() < 50), guarantee.epsilon.upper <= 1.0
    (True, True)

    Args:
      bins: Number of each row's bin, integers [n].
      count: Number of bins, a public number: bins that were found in the rows tell of them.
      epsilon: As for `private_sum`.
      delta: As there.
      noise: As there.
      root: As there.
      audit: As there.
    """
    bins = _vectors(bins)
    if bins.ndim != 1 or not np.issubdtype(bins.dtype, np.integer):
        raise ValueError(f"bins must be whole numbers, int[n], and are {bins.dtype}{bins.shape}")
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}")
    least = np.iinfo(np.int32)
    bins = np.clip(bins, least.min, least.max).astype(np.int32)  # who is in none is in none still
    of = _Histogram(count)
    mean, guarantee = _released(
        lambda sigma: of, bins, _ONE_ROW, epsilon, delta, noise, root, audit
    )
    return Released(mean * len(bins), guarantee)


def private_logistic_regression(
    features: Any,
    labels: Any,
    *,
    largest_norm: float,
    epsilon: float,
    delta: float | None = None,
    steps: int = 6,
    noise: Noise = Independent(),  # noqa: B008
    root: RootKey | None = None,
    audit: bool = True,
) -> Released:
    r"""Returns coefficients theta of P(label = 1) = sigmoid(theta . x), by noised Newton steps.

    Each step reads one noisy sum over all rows: their gradients and their Hessians together, at the
    noise that gradients need alone. A step takes O(n d^2): a few hundred features are many. Beside
    DP-SGD on the same model: docs/explanation/results/logistic-regression.md.

    >>> rng = np.random.default_rng(0)
    >>> x = np.stack([np.ones(20_000), rng.uniform(-1, 1, 20_000)], axis=1)
    >>> y = rng.random(20_000) < 1 / (1 + np.exp(1 - 2 * x[:, 1]))
    >>> theta, _ = private_logistic_regression(x, y, largest_norm=1.42, epsilon=1.0, audit=False)
    >>> bool(np.abs(theta - [-1, 2]).max() < 0.3)
    True

    Args:
      features: x, float[n, d], with a 1 in each row if there is to be an intercept. How they are
        scaled, and d, are public choices; bounds and lists of values taken from the rows are not.
      labels: 0 or 1 of each row, [n].
      largest_norm: R > 0: a longer row counts as one of this L2 norm. A public number.
      epsilon: As for `private_sum`, of all steps together.
      delta: As there.
      steps: Newton steps, at least 1. Each has sqrt(steps) times the noise of a single one.
      noise: As there.
      root: As there.
      audit: As there.

    Source: docs/explanation/private-calibration.md.
    """
    x, y = _vectors(features), np.asarray(labels)
    if x.ndim != 2 or not (np.issubdtype(x.dtype, np.number) and np.isrealobj(x)):
        raise ValueError(f"features must be vectors, float[n, d], and are {x.dtype}{x.shape}")
    if y.shape != x.shape[:1] or not np.isin(y, (0, 1)).all():
        raise ValueError(f"labels must be 0 or 1 of each of the {len(x)} rows")
    if not 0 < largest_norm < math.inf:
        raise ValueError(f"largest_norm must be finite and > 0, got {largest_norm}")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps must be a whole number, at least 1, got {steps!r}")
    rows = {"x": x.astype(np.float32), "y": y.astype(np.float32)}

    def of(sigma: float) -> Refinement:
        return _Logistic(x.shape[1], float(largest_norm), sigma / len(x))

    return _released(of, rows, _ONE_ROW, epsilon, delta, noise, root, audit, steps)


def _vectors(rows: Any) -> np.ndarray:
    rows = np.asarray(rows)
    if not rows.size:
        raise ValueError("there are no rows")
    return rows


def _released(
    made: Callable[[float], Refinement],
    rows: PyTree,
    l2_clip_norm: float,
    epsilon: float,
    delta: float | None,
    noise: Noise,
    root: RootKey | None,
    audit: bool,
    count: int = 1,
) -> Released:
    """Audits the program of so many sums over all rows, and releases them once.

    What is made of them may depend on their noise multiplier, a public number.
    """
    root = RootKey.from_entropy() if root is None else root
    size = len(jax.tree.leaves(rows)[0])
    delta = default_delta(size) if delta is None else delta
    sampler = FullBatch(size, count)
    sigma = calibrate(sampler.privacy, epsilon=epsilon, delta=delta)
    of, mechanism = made(sigma), Mechanism(sampler, sigma, l2_clip_norm, noise)
    guarantee = cost([Segment(mechanism, reproducible_noise=root.insecure)], delta)
    note = NOT_MADE
    if audit:
        run = sums_run(of, mechanism, (), generated_rows(rows, _ROWS))
        report = audit_program(
            run.algorithm, mechanism, run.state.params, run.rows, state=run.state
        )
        note = verdict(report, ["the compiled program", "the draws"])
    notes = (*guarantee.notes, f"audit before the release: {note}")
    guarantee = dataclasses.replace(guarantee, notes=notes)
    columns = columns_of(mechanism.sampler, rows)
    found = release(of, mechanism, (), columns, root=root, run=root.begin_run())
    return Released(np.asarray(found.params, np.float64), guarantee)


@dataclass(frozen=True)
class _Mean(Refinement):
    """The mean of vectors."""

    size: int

    def reads(self, params, example):
        return example

    def start(self):
        return jnp.zeros(self.size)

    def statistic(self, state, row):
        return row

    def fold(self, state, mean):
        return state + mean

    def apply(self, params, state):
        return state


@dataclass(frozen=True)
class _Histogram(_Mean):
    """The share of rows in each bin."""

    def statistic(self, state, row):
        return jax.nn.one_hot(row, self.size)


@dataclass(frozen=True)
class _Logistic(Refinement):
    """The coefficients of a logistic regression, by Newton steps on features of norm at most 1."""

    size: int
    largest_norm: float
    noise: float
    """Standard deviation of the noise of a mean's coordinate, sigma / n."""

    def reads(self, params, example):
        # Divided by the largest entry first: no square overflows.
        most = jnp.maximum(jnp.max(jnp.abs(example["x"])), self.largest_norm)
        x = example["x"] / most
        x = x / jnp.maximum(jnp.linalg.norm(x), self.largest_norm / most)
        return {"x": x, "y": example["y"]}

    def start(self):
        return jnp.zeros(self.size)

    def statistic(self, state, row):
        return logistic_sums(state, row["x"], row["y"], 1.0)

    def fold(self, state, mean):
        # Below the spectral norm of the Hessian's noise, sqrt(d) sigma / (2 n), all is noise.
        least = _CURVATURE * self.noise * math.sqrt(self.size) / 2
        step = newton_step(*derivatives(mean, self.size, 1.0), max(least, 1e-6))
        return state + jnp.where(jnp.all(jnp.isfinite(step)), step, 0.0)

    def apply(self, params, state):
        return state / self.largest_norm
