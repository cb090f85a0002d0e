"""Multistage (episodic) sampling without replacement: a sound guarantee for it.

In each step, at each level j, n_j of the N_j children of every unit drawn so far are drawn
uniformly without replacement, from a public tree whose leaves are the examples. A neighbour has one
leaf zeroed out. Claim and proof: docs/explanation/multistage-sampling.md.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

import numpy as np

from accounting.algebra.cells import Array, Spread, log_mean_above, spread
from accounting.algebra.likelihood_ratio import ROUNDING
from accounting.algebra.lower import LowerRatio
from accounting.algebra.mixtures import (
    EDGE_DRIFT,
    Mixture,
    check_grid,
    ratio_deviation,
    ratio_edges,
    solve_increasing,
)
from accounting.algebra.upper import UpperRatio
from accounting.profile import ComposesWithGaussian
from accounting.profiles.gaussian import GaussianProfile
from accounting.profiles.repeated import RepeatedProfile
from accounting.records import Count, Ge

_MOST_SIGNS = 4


class Outcomes(NamedTuple):
    """Probabilities of the outcomes of one leaf's draw."""

    fails: tuple[float, ...]
    """w_j: probability that it first fails at level j = 1, ..., L."""
    succeeds: float
    """gamma: probability that the leaf is drawn."""


def outcomes(draws: Sequence[int], sizes: Sequence[int]) -> Outcomes:
    """Returns the probabilities of each outcome of a leaf's draw.

    The draw fails at one of the levels, or succeeds.

    >>> outcomes((1, 5), (10, 10))
    Outcomes(fails=(0.9, 0.05), succeeds=0.05)

    Args:
      draws: n_j, children drawn of each drawn unit.
      sizes: N_j, children of the leaf's own unit of level j - 1.
    """
    reached, fails = 1.0, []
    for count, size in zip(draws, sizes, strict=True):
        fails.append(reached * ((size - count) / size))
        reached *= count / size
    return Outcomes(tuple(fails), reached)


@dataclass(frozen=True)
class MultistageProfile(RepeatedProfile):
    """The profile of multistage sampling, zero-out adjacency, for a leaf of given path.

    Upper: the pair that is proved dominating, composed `steps` times. Lower: the largest of the
    concrete pairs in which all leaves that branch off x's path at one level are at +1 or at -1. For
    one stage the two are close; for more, the gap is mostly in the proof.

    >>> profile = MultistageProfile(2.0, 100, draws=(1,), sizes=(10,))
    >>> f"{profile.epsilon(1e-5):.1f}"
    '[4.1, 4.4]'

    Args:
      noise_multiplier: s, in units of the clipping norm.
      steps: T, number of releases.
      draws: n_j, children drawn of each drawn unit, level 1 first.
      sizes: N_j, children of the leaf's own unit of level j - 1 (level 0 is the root).
      clipped_level: Level c of the units whose gradients are clipped, each as one: 0 for the whole
        episode, by default the leaves.

    Raises:
      ValueError: If a number is out of range, or more are drawn than there are.
    """

    draws: tuple[Count, ...]
    sizes: tuple[Count, ...]
    clipped_level: Annotated[int, Ge(0)] | None = None

    gap_note: ClassVar[str] = "no known pair of data sets attains the proved upper end"

    def __post_init__(self) -> None:
        super().__post_init__()
        draws, sizes, clipped = self.draws, self.sizes, self.clipped_level
        if not draws or len(draws) != len(sizes):
            raise ValueError(
                f"draws and sizes need one entry per level, at least one, got {draws} and {sizes}"
            )
        for level, (count, size) in enumerate(zip(draws, sizes, strict=True), 1):
            if count > size:
                raise ValueError(f"level {level} draws {count} of only {size} without replacement")
        if clipped is not None and clipped > len(draws):
            raise ValueError(f"clipped_level must be at most {len(draws)}, got {clipped}")

    @property
    def clips_leaves(self) -> bool:
        """True if each example is clipped separately."""
        return self.clipped_level in (None, len(self.draws))

    def contributions(self) -> list[int]:
        """Returns K_j for j = 1, ..., c.

        K_j is the number of clipped gradients below a drawn unit of level j.
        """
        level = len(self.draws) if self.clipped_level is None else self.clipped_level
        return [math.prod(self.draws[j:level]) for j in range(1, level + 1)]

    def simpler(self) -> ComposesWithGaussian | None:
        """Returns the Gaussian mechanism's profile where every leaf is drawn."""
        return self.ceiling() if outcomes(self.draws, self.sizes).succeeds == 1.0 else None

    def ceiling(self) -> GaussianProfile:
        """Returns the profile of an example that is always drawn.

        The attacker knows who else is drawn.
        """
        return GaussianProfile(self.noise_multiplier / self._own() / math.sqrt(self.steps))

    def deviation(self) -> float:
        """Estimates the deviation of one release's ratio.

        The deviation is under Q, with `|X - 1|` cut off at 1.
        """
        return ratio_deviation(*self._pair("with").laws())

    def lower_ratios(self, step: float, tail: float) -> list[LowerRatio]:
        """Returns the laws of the concrete pairs of one release.

        Args:
          step: Grid step in log X.
          tail: Largest mass beyond either end of the grid.
        """
        ratios = []
        for with_x, without_x in self.concrete_pairs():
            edges = ratio_edges(with_x, without_x, 0.25 * step, tail)
            p, q = with_x.masses(edges), without_x.masses(edges)
            drift = max(with_x.drift(edges), without_x.drift(edges))
            ratios.append(LowerRatio.from_masses(p, q, step, drift))
        return ratios

    def divergence(self, a: float) -> float:
        """Returns h(a), before its convex minorant.

        No step has a larger int (P_with - a P_without)_+; a > 0, and finite. Before the convex
        minorant, in floating point: for plots and tests, not for guarantees.
        """
        if a < 1.0:
            return 1.0 - a + a * self._pair("without").divergence(1.0 / a)
        return self._pair("with").divergence(a)

    def upper_ratio(self, step: float, tail: float) -> UpperRatio:
        """Returns the pair that dominates one release.

        It holds in both orders: the two halves are glued, and bridged at 1.

        Args:
          step: Grid step in log X.
          tail: Largest mass beyond either end of the grid.
        """
        right, right_drift = self._pair("with").spread(step, tail)
        # Of 1/X: P and Q are exchanged.
        below, below_drift = self._pair("without").spread(step, tail)
        right_a = np.exp(np.arange(right.q.size) * step)
        left_a = np.exp(-np.arange(below.q.size) * step)
        # Masses strictly beyond each atom, and the curve there.
        right_q, right_p = _beyond(right.q), _beyond(right.p) + right.infinity
        left_q, left_p = _beyond(below.p) + below.infinity, _beyond(below.q)
        right_h = right_p - right_a * right_q
        left_h = 1.0 - left_a + left_a * left_q - left_p
        i, j = _common_tangent(left_a, left_h, right_a, right_h)
        mass, mean = 1.0 - left_q[i] - right_q[j], 1.0 - left_p[i] - right_p[j]
        gap = right_a[j] - left_a[i]
        up, down = (mean - left_a[i] * mass) / gap, (right_a[j] * mass - mean) / gap
        if min(up, down) < -1e-13 * mass:
            raise ArithmeticError(f"no bridge between atoms -{i} and {j} at step {step}")
        up, down = max(up, 0.0), max(down, 0.0)
        size = below.q.size - 1
        q, p = np.zeros(size + right.q.size), np.zeros(size + right.q.size)
        q[size + j + 1 :], p[size + j + 1 :] = right.q[j + 1 :], right.p[j + 1 :]
        q[: size - i], p[: size - i] = below.p[i + 1 :][::-1], below.q[i + 1 :][::-1]
        q[size + j] += up
        p[size + j] += up * right_a[j]
        q[size - i] += down
        p[size - i] += down * left_a[i]
        drift = max(below_drift, right_drift) + 8.0 * ROUNDING
        cells = Spread(q, p, below.infinity, right.infinity)
        return UpperRatio.of_spread(step, -size, cells, drift, EDGE_DRIFT + 2.0 * drift)

    def concrete_pairs(self) -> Iterator[tuple[Mixture, Mixture]]:
        """Yields one release's laws with x and without x.

        The data sets have one dimension. The gradients that branch off x's path at level j are all
        sign_j.
        """
        levels, contributions = len(self.draws), self.contributions()
        probabilities = outcomes(self.draws, self.sizes)
        weights = [*probabilities.fails, probabilities.succeeds]
        for few in itertools.product((-1.0, 1.0), repeat=min(levels, _MOST_SIGNS)):
            signs = [*few, *few[-1:] * (levels - len(few))]
            means = []
            for j in range(levels):
                shift = 0.0
                if j < len(contributions):
                    shift = contributions[j] * signs[j]
                    for i in range(j + 1, len(contributions)):
                        shift -= (self.draws[i] - 1) * contributions[i] * signs[i]
                else:
                    shift = signs[j]
                means.append(shift)
            zeroed = 0.0 if self.clips_leaves else -1.0
            yield (
                Mixture.from_weights([*means, 1.0], weights, self.noise_multiplier),
                Mixture.from_weights([*means, zeroed], weights, self.noise_multiplier),
            )

    def _own(self) -> float:
        """Returns the distance that the sum moves when x, drawn, is zeroed out."""
        return 1.0 if self.clips_leaves else 2.0

    def _pair(self, first: str) -> _WorstPair:
        """Returns the pair of the claim whose first law is that `first` = 'with' or 'without' x."""
        probabilities = outcomes(self.draws, self.sizes)
        saved = 1.0 if first == "without" and self.clips_leaves else 0.0
        radii = [2.0 * count - saved for count in self.contributions()]
        radii += [2.0] * (len(self.draws) - len(radii))
        reachable = [j for j, fails in enumerate(probabilities.fails) if fails > 0.0]
        return _WorstPair(
            np.array([probabilities.fails[j] for j in reachable], float),
            np.array([radii[j] for j in reachable], float),
            probabilities.succeeds,
            self._own(),
            self.noise_multiplier,
        )


class _WorstPair(NamedTuple):
    """The pair sum_j w_j N(-r_j) + gamma N(0) || sum_j w_j N(-r_j) + gamma N(-r).

    Its ratio X has X - 1 = gamma (1 - L) / (sum_j w_j L_j + gamma L), L = dN(-r)/dN(0), L_j =
    dN(-r_j)/dN(0). X > 1 on z > -r/2, where X rises, as 1 - L does and L, L_j fall.
    """

    fails: Array
    radii: Array
    succeeds: float
    own: float
    sigma: float

    def log_excess(self, z: Array) -> Array:
        """Returns log(X - 1) at z > -r/2."""
        log_own = -self.own * (z + 0.5 * self.own) / self.sigma**2
        terms = [math.log(self.succeeds) + log_own]
        for weight, radius in zip(self.fails, self.radii, strict=True):
            terms.append(math.log(weight) - radius * (z + 0.5 * radius) / self.sigma**2)
        with np.errstate(divide="ignore"):
            above = np.log(-np.expm1(np.minimum(log_own, 0.0)))
        return math.log(self.succeeds) + above - np.logaddexp.reduce(terms, axis=0)

    def laws(self) -> tuple[Mixture, Mixture]:
        weights = np.append(self.fails, self.succeeds)
        return (
            Mixture(np.append(-self.radii, 0.0), weights, self.sigma),
            Mixture(np.append(-self.radii, -self.own), weights, self.sigma),
        )

    def divergence(self, a: float) -> float:
        p, q = self.laws()
        low, high = -0.5 * self.own, p.reach(1e-300)[1]
        if a > 1.0:
            low = float(solve_increasing(self.log_excess, np.log([a - 1.0]), low, high)[0])
        edges = np.array([low, math.inf])
        return max(0.0, float(p.masses(edges)[0] - a * q.masses(edges)[0]))

    def spread(self, step: float, tail: float) -> tuple[Spread, float]:
        """Returns the cells of X >= 1, spread, and their drift.

        Args:
          step: Grid step in log X.
          tail: Largest mass beyond the upper end of the grid.
        """
        p, q = self.laws()
        low, high = -0.5 * self.own, p.reach(tail)[1]
        top = float(np.logaddexp(0.0, self.log_excess(np.array([high]))[0]))
        check_grid(top, step, top / step + 1.0)
        count = math.ceil(top / step) + 1
        log_excess = np.log(np.expm1(step * np.arange(1, count)))
        farthest = p.reach(1e-300)[1]  # the last grid point may lie beyond `high`
        inner = solve_increasing(self.log_excess, log_excess, low, farthest)
        edges = np.concatenate([[low], inner, [math.inf]])
        with_x, without_x = p.masses(edges), q.masses(edges)
        above = log_mean_above(0, step, with_x, without_x)
        drift = max(p.drift(edges), q.drift(edges))
        return spread(step, with_x, without_x, above), drift


def _beyond(masses: Array) -> Array:
    """Returns, for each atom, the sum of the masses after it."""
    return np.append(np.cumsum(masses[::-1])[::-1][1:], 0.0)


def _common_tangent(
    left_a: Array, left_h: Array, right_a: Array, right_h: Array
) -> tuple[int, int]:
    """Returns where the lower common tangent touches two convex curves that meet at a = 1.

    Both a begin at 1: the left one falls, the right one rises.
    """
    # At a = 1 both bounds hold: the lower one stands for both curves.
    first_i, first_j = (1, 0) if right_h[0] <= left_h[0] else (0, 1)
    i, j = first_i, first_j
    while True:
        slopes = (right_h[first_j:] - left_h[i]) / (right_a[first_j:] - left_a[i])
        new_j = first_j + int(np.argmin(slopes))
        slopes = (right_h[new_j] - left_h[first_i:]) / (right_a[new_j] - left_a[first_i:])
        new_i = first_i + int(np.argmax(slopes))
        if new_i <= i and new_j <= j:
            return i, j
        i, j = max(i, new_i), max(j, new_j)
