"""Balls-and-bins: each epoch every example falls into one of T batches, independently."""

from __future__ import annotations

import bisect
import contextlib
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import scipy

from accounting.algebra.composition import compose_both
from accounting.algebra.laplace import average_delta
from accounting.algebra.likelihood_ratio import LikelihoodRatio, Side
from accounting.algebra.mixtures import release_ratio, with_release
from accounting.algebra.moments import NotInvertibleError
from accounting.algebra.refinement import GridBounds, GridError, refine
from accounting.checks import check_settings
from accounting.profile import Bound, Curve, Question
from accounting.profiles.gaussian import WithRelease, as_redrawn, known_order
from accounting.profiles.largest_release import LargestRelease

_MANY_EPOCHS = 8
_SMALLEST_LOG_TAIL = -296.0
_SMALLEST_DELTA = 1e-286
_MOST_WORK = 1.8e9
"""Most pairs of atoms that are visited for one grid: a few seconds."""
_INVERTED = 1e-10
"""Inverting a transform leaves no digits of a smaller delta."""
_RARE = 1e-40
"""A delta that no one asks to be sharp at much cost."""
_WORK_PER_DISTANCE = 1e4
"""What a distance of atoms costs besides its pairs, in units of a pair."""


@dataclass(frozen=True)
class BallsAndBinsProfile(WithRelease):
    r"""The certified profile of balls-and-bins sampling, from below and above.

    One epoch of T = `bins` batches at s = `noise_multiplier` is dominated, tightly, by

    .. math:: P = \frac{1}{T} \sum_t N(e_t, s^2 I), \qquad Q = N(0, s^2 I)

    with e_t the t-th unit vector of R^T, under zeroing-out adjacency: an average of log-normals,
    whose E-fold product, E = `epochs`, is evaluated in the algebra of `likelihood_ratio`.

    >>> f"{BallsAndBinsProfile(1.0, bins=565).epsilon(2.7e-8):.2f}"
    '[0.40, 0.41]'

    Attributes:
      noise_multiplier: s.
      bins: T >= 1.
      epochs: E >= 1.
      assignment: 'redrawn': every epoch draws new bins, and the epochs compose; 'fixed': one
        assignment is kept: one epoch at s / sqrt(E). The two cost very differently.
      release: Noise multiplier of a further Gaussian release of every example; infinite for none.

    Source: Chua et al., "Balls-and-Bins Sampling for DP-SGD", AISTATS 2025 (arXiv 2412.16802),
    Theorem 3.1 (the pair), Proposition 3.3 (never above the deterministic order's profile).

    Raises:
      ValueError: If a number is out of range, or `assignment` is neither of both.
    """

    noise_multiplier: float
    bins: int
    epochs: int = 1
    assignment: Literal["redrawn", "fixed"] = "redrawn"
    release: float = math.inf

    def __post_init__(self) -> None:
        check_settings(self, counts=("bins", "epochs"), mode="assignment")

    def answer(self, question: Question) -> Bound:
        """Answers by closed forms, by inverting a transform, and by grids where these are wide."""
        sigma, epochs = as_redrawn(self.noise_multiplier, self.epochs, self.assignment)
        bound = question.of(known_order(sigma, epochs, self.release))
        if self.bins == 1:
            return bound
        law = sigma, self.bins, epochs, self.release
        bound = question.of(LargestRelease(*law)).intersection(Bound(0.0, bound.upper))
        invertible = epochs == 1 and self.release == math.inf and bound.upper > _INVERTED
        if question.wanted == "delta" and invertible and bound.width > question.width(bound):
            with contextlib.suppress(NotInvertibleError):
                bound = bound.intersection(Bound(*average_delta(sigma, self.bins, question.at)))
        return refine(_Grids(*law), question, bound)


def _tail(delta: float, epochs: int) -> float:
    """Returns the mass of tails that may be cut, without consequence for `delta`.

    In steps, so that questions about different deltas share grids.
    """
    exponent = math.log10(max(delta, _SMALLEST_DELTA)) - math.log10(epochs) - 8.0
    return 10.0 ** max(10.0 * math.floor(0.1 * exponent), _SMALLEST_LOG_TAIL)


@dataclass(frozen=True)
class _Grids:
    sigma: float
    bins: int
    epochs: int
    release: float
    first: float = 0.2
    coarsest: float = 0.2
    gap_note: str = ""

    def bounds(self, resolution: float, delta: float, epsilon: float | None) -> GridBounds:
        """Computes one grid (see `Grids`)."""
        if delta <= _SMALLEST_DELTA:
            raise GridError("delta is so small that masses leave the range of doubles")
        grid = _Grid(self.sigma, self.bins, resolution, _tail(delta, self.epochs))
        most = _MOST_WORK
        if epsilon is not None:
            most *= 0.1 if delta <= _RARE else 0.75
        if grid.work() > most:
            raise GridError("no finer grid is computed: it would take too long")
        curves = _curves(grid, self.epochs, self.release, delta, epsilon)
        return GridBounds(curves, finest=grid.finest(most))


class _Grid(NamedTuple):
    sigma: float
    bins: int
    resolution: float
    tail: float

    def work(self) -> float:
        """Returns about how long it takes, in units of a pair of atoms that is added up."""
        steps = self.steps()
        span = 1.0 / self.sigma**2 - 2.0 * float(scipy.special.ndtri(self.tail)) / self.sigma
        atoms = span / steps[0]
        distances = (min(atoms, (2.0 - math.log(min(step, 1.0))) / step) for step in steps)
        additions = 1.0 + self.bins.bit_count() / self.bins.bit_length()
        return additions * sum(d * (atoms + _WORK_PER_DISTANCE) for d in distances)

    def finest(self, most: float) -> float:
        """Returns the finest resolution, or nearly so, that takes no more work than `most`."""
        finer = [self.resolution * 0.98**k for k in range(1_000)]
        beyond = bisect.bisect_right(
            finer, most, lo=1, key=lambda r: self._replace(resolution=r).work()
        )
        return finer[beyond - 1]

    def steps(self) -> tuple[float, ...]:
        """Returns the grid step after each doubling, in proportion to the sum's deviation."""
        first, halvings = _steps(self.sigma, self.bins)
        return tuple(self.resolution * first / 2.0**halved for halved in halvings)


@lru_cache(maxsize=64)
def _steps(sigma: float, bins: int) -> tuple[float, tuple[int, ...]]:
    """Returns the first grid step at resolution 1, and how often each step is half of it."""
    variance = math.expm1(min(1.0 / sigma**2, 700.0))
    wanted = [min(1.0, 4.0 * math.sqrt(variance / 2.0**k)) for k in range(bins.bit_length())]
    halvings = [0]
    for step in wanted[1:]:
        halved = halvings[-1]
        while wanted[0] / 2.0**halved > 1.5 * step:
            halved += 1
        halvings.append(halved)
    return wanted[0], tuple(halvings)


@lru_cache(maxsize=16)
def _epoch(grid: _Grid) -> tuple[LikelihoodRatio, LikelihoodRatio]:
    """Returns the lower and the upper likelihood ratio of one epoch."""
    steps = grid.steps()

    def one(side: Side) -> LikelihoodRatio:
        first = LikelihoodRatio.gaussian(grid.sigma, steps[0], side, grid.tail)
        return first.average(grid.bins, steps)

    return one("lower"), one("upper")


@lru_cache(maxsize=16)
def _ratios(grid: _Grid, epochs: int) -> tuple[LikelihoodRatio, LikelihoodRatio]:
    low, high = _epoch(grid)
    return low.power(epochs), high.power(epochs)


def _curves(
    grid: _Grid, epochs: int, release: float, delta: float, epsilon: float | None
) -> list[tuple[Curve, Curve]]:
    """Returns pairs of lower and upper bounds on delta(epsilon): the profile is the pairs' maximum.

    Epochs are composed by tilted FFT where its error is negligible, or where direct convolutions,
    which keep relative accuracy at any delta, would take too long.
    """
    low, high = _epoch(grid)
    beside = {side.side: release_ratio(release, side) for side in (low, high)}
    # Each doubling is four convolutions of a lower ratio, and two of an upper one.
    atoms = max(low.q.size, high.q.size)
    direct = 6.0 * epochs.bit_length() * atoms**2
    if beside["upper"]:
        direct += 6.0 * atoms * math.sqrt(epochs) * beside["upper"].q.size
    if epochs >= _MANY_EPOCHS or direct > 6e7:
        with contextlib.suppress(GridError):
            lows, highs = (
                compose_both(side, epochs, beside[side.side], delta=delta, epsilon=epsilon)
                for side in (low, high)
            )
            at = epsilon
            if at is None:
                asked = Question("epsilon", delta)
                at = max(asked.between(part.delta, resolution=1e-3).lower for part in highs)
            error = max(part.floor(at) for part in (*lows, *highs))
            negligible = error <= 1e-4 * max(part.delta(at) for part in lows)
            if negligible or direct > _MOST_WORK:
                return [(lows[0].delta, highs[0].delta), (lows[1].delta, highs[1].delta)]
        if direct > _MOST_WORK:
            raise GridError("no finer grid is computed: it would take too long")
    below, above = (with_release(ratio, release) for ratio in _ratios(grid, epochs))
    return [(below.delta, above.delta)]
