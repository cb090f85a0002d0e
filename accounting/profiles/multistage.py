r"""Multistage (episodic) sampling without replacement: a sound guarantee for it.

**The sampler.** The examples are the leaves of a public tree. In each step, at each level j =
1..L, n_j of the N_j children of every unit drawn so far are drawn uniformly without replacement
(level 1 draws among the root's children), afresh in every step. The gradients of the drawn leaves
are clipped to norm 1, summed, and N(0, s^2 I) is added. A neighbour has one leaf x zeroed out.

With gamma_j = n_j/N_j on the path u_1, ..., u_L = x, the draw of x first fails at level j with
probability w_j = gamma_1 ... gamma_{j-1} (1 - gamma_j), and succeeds with gamma = gamma_1 ...
gamma_L. A drawn unit of level j has K_j = n_{j+1} ... n_L drawn leaves below it, K_L = 1.

**Claim.** One step with x against the same step without x has, for every a >= 1 and in any
dimension, a hockey-stick divergence at a of at most that of (all on a line, of variance s^2)

    (with || without):  sum_j w_j N(-2 K_j) + gamma N(0)   ||  sum_j w_j N(-2 K_j) + gamma N(-1)
    (without || with):  sum_j w_j N(1 - 2 K_j) + gamma N(0) || sum_j w_j N(1 - 2 K_j) + gamma N(-1)

**Proof.** H_a(P || Q) = int (P - a Q)_+ is jointly convex in (P, Q).

1. *Coupling.* Draw an episode given that x is drawn: the common randomness omega. An episode given
   that the draw fails at level j has a uniform set of n_j children of u_{j-1} that lacks u_j; put
   u_j in the place of a uniform member u', and the set is a uniform one that has u_j. Backwards,
   this turns omega into an episode that fails at level j and differs from it below u' and u_j
   alone, for all j at once. Each of the two has K_j drawn leaves of norm <= 1 (with x zeroed, u_j
   has K_j - 1). So, given omega, sums without x's draw are within 2 K_j of the sum with x drawn,
   and within 2 K_j - 1 of the sum with x drawn and zeroed; these two are within 1 of each other.
2. *Advanced joint convexity.* Let P_x, Q_x be the laws given that x is drawn and W_j those where
   the draw fails at level j, the same on both sides. Let a >= 1 and b = 1 + (a-1)/gamma. Then

       P - a Q = gamma (P_x - a Q_x) + (1-a) sum_j w_j W_j = gamma (P_x - b V),
       V = (a Q_x + sum_j w_j (a-1)/gamma W_j) / b, of mass 1.

   Given omega and its coupled draws (joint convexity again), P_x = N(c, s^2 I), and V is a mixture
   of Gaussians N(c + v_i, s^2 I) with |v_i| <= r_i: 2 K_j for W_j, 1 for Q_x.
3. *The worst directions.* With L_i = dN(v_i)/dN(0) and V_i the weights, the divergence at b is
   E_{N(0)} [(1 - b sum_i V_i L_i)_+]: a convex function of a sum of log-normals of mean 1 whose
   laws depend on |v_i| alone. Such a sum is largest in convex order when its terms are comonotone,
   that is when all v_i point the same way, and it then grows in each |v_i|: exp(r B_1 - r^2/2) is a
   martingale in r^2, and integrated quantiles add over comonotone terms. So v_i = -r_i e.
4. Undoing step 2 for this worst case gives the claim. For (without || with) exchange P_x and Q_x.

**Both orders at once.** Neither pair dominates the step at a < 1. But H_a(P || Q) = 1 - a + a
H_{1/a}(Q || P), so h(a) = h_1(a) for a >= 1 and 1 - a + a h_2(1/a) for a < 1, with h_1, h_2 the two
claims, bounds the step at every a > 0. The supremum of the true divergences is convex in a, so it
is below the greatest convex minorant of h (taken over grid points: at these it is below h, between
them below the chord). The minorant is 1 at 0, falls, and is >= (1-a)_+: so it is the curve
E[(X - a)_+] + P(infinity) of a likelihood ratio X whose masses are the changes of its slope. That
pair dominates every step whatever was released before, and its T-th power the run (Zhu, Dong, Wang,
"Optimal Accounting of Differential Privacy via Characteristic Function", AISTATS 2022, Theorem 10).

The two curves need no minorant away from a = 1: there the atoms are those of the spread of either
pair, whose curves are chords of h. At a = 1 they meet in a concave kink, which one bridge spans: a
common tangent, between atoms at a_i <= 1 <= a_j. Whichever i, j are taken, if the two bridging
masses that keep total mass and mean are nonnegative, the curve is h at all grid points outside and
a chord between: a bound. So validity rests on no search.

**Worst leaf.** The n_j are constants, so leaves of an uneven tree differ in the N_j on their paths.
h grows in each gamma_i, at each a >= 1: P - aQ = gamma_i A - B, where B = (a-1) (the part whose
draw fails before level i, or would at gamma_i = 0) >= 0, and A, B do not depend on gamma_i; where
the difference is positive, so is A. So smaller N_j on a path cost more.

**One stage** is exact in each order: all other leaves at -1, x at 1 (or at -1). Two or more: x's
siblings can not be at the extremes that both the swap of x and the swap of its unit would like, so
that the bound is loose, up to 3 times in epsilon where K_j is small against s.

**Units clipped together.** Episodic losses couple the examples of a unit. If the gradient of each
drawn unit of level c < L is clipped as one, the same proof holds with K_j = n_{j+1} ... n_c for
j <= c; but zeroing x, or not drawing it within u_c, changes the unit's gradient by up to 2.

Sources: Tombs, Kotevska, Young, "Privacy Amplification for Episodic Training Methods", CEUR
Vol-3318, 2022 (the sampler); Balle, Barthe, Gaboardi, "Privacy Amplification by Subsampling",
NeurIPS 2018 (advanced joint convexity; couplings for sampling without replacement); Kaas, Dhaene,
Goovaerts, "Upper and lower bounds for sums of random variables", 2000 (comonotone sums).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from accounting.algebra.cells import Array, Spread, log_mean_above, spread
from accounting.algebra.likelihood_ratio import ROUNDING, LikelihoodRatio, Side
from accounting.algebra.mixtures import (
    EDGE_DRIFT,
    Mixture,
    check_grid,
    ratio_deviation,
    ratio_edges,
    solve_increasing,
)
from accounting.profile import (
    ComposesWithGaussian,
    check_count,
)
from accounting.profiles.gaussian import GaussianProfile
from accounting.profiles.poisson import PoissonProfile
from accounting.profiles.repeated import RepeatedProfile

_MOST_SIGNS = 4


class Outcomes(NamedTuple):
    """How the draw of one leaf may end."""

    fails: tuple[float, ...]
    """w_j: probability that it first fails at level j = 1, ..., L."""
    succeeds: float
    """gamma: probability that the leaf is drawn."""


def outcomes(draws: Sequence[int], sizes: Sequence[int]) -> Outcomes:
    """Returns the probabilities with which the draw of a leaf fails at each level, or succeeds.

    >>> outcomes((1, 5), (10, 10))
    Outcomes(fails=(0.9, 0.05), succeeds=0.05)

    Args:
      draws: n_j, children drawn of each drawn unit.
      sizes: N_j, children of the leaf's own unit of level j - 1.
    """
    reached, fails = 1.0, []
    for drawn, size in zip(draws, sizes, strict=True):
        fails.append(reached * ((size - drawn) / size))
        reached *= drawn / size
    return Outcomes(tuple(fails), reached)


def check_stages(draws: Sequence[int], sizes: Sequence[int], clipped_level: int | None) -> None:
    """Raises a ValueError unless the stages describe a draw without replacement."""
    if not draws or len(draws) != len(sizes):
        raise ValueError(
            f"draws and sizes need one entry per level, at least one, got {draws} and {sizes}"
        )
    for level, (drawn, size) in enumerate(zip(draws, sizes, strict=True), 1):
        check_count(f"draws of level {level}", drawn)
        check_count(f"sizes of level {level}", size)
        if drawn > size:
            raise ValueError(f"level {level} draws {drawn} of only {size} without replacement")
    if clipped_level is not None and not 1 <= clipped_level <= len(draws):
        raise ValueError(f"clipped_level must be in [1, {len(draws)}], got {clipped_level}")


@dataclass(frozen=True)
class MultistageProfile(RepeatedProfile):
    r"""The profile of multistage sampling, zero-out adjacency, for a leaf of given path.

    Upper: the glued pair that the module proves dominating, composed `steps` times. Lower: the
    largest of the concrete pairs in which all leaves that branch off x's path at one level are at
    +1 or at -1. For one stage the two are close; for more, the gap is mostly in the proof.

    >>> profile = MultistageProfile(2.0, 100, draws=(1,), sizes=(10,))
    >>> f"{profile.epsilon(1e-5):.1f}"
    '[4.1, 4.4]'

    Args:
      noise_multiplier: s, in units of the clipping norm.
      steps: T, number of releases.
      draws: n_j, children drawn of each drawn unit, level 1 first.
      sizes: N_j, children of the leaf's own unit of level j - 1 (level 0 is the root).
      clipped_level: Level c of the units whose gradients are clipped, each as one; by default the
        leaves.

    Raises:
      ValueError: If a number is out of range, or more are drawn than there are.
    """

    draws: tuple[int, ...]
    sizes: tuple[int, ...]
    clipped_level: int | None = None

    gap_note: ClassVar[str] = "what is proved is more than any concrete pair of data sets shows"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "draws", tuple(self.draws))
        object.__setattr__(self, "sizes", tuple(self.sizes))
        check_stages(self.draws, self.sizes, self.clipped_level)

    @property
    def clips_leaves(self) -> bool:
        """Whether each example is clipped by itself."""
        return self.clipped_level in (None, len(self.draws))

    def contributions(self) -> list[int]:
        """Returns K_j, the clipped gradients below a drawn unit of level j, for j = 1, ..., c."""
        level = self.clipped_level or len(self.draws)
        return [math.prod(self.draws[j:level]) for j in range(1, level + 1)]

    def simpler(self) -> ComposesWithGaussian | None:
        """Returns the Gaussian mechanism's profile where every leaf is drawn."""
        return self.ceiling() if outcomes(self.draws, self.sizes).succeeds == 1.0 else None

    def ceiling(self) -> GaussianProfile:
        """Returns the profile if it were known who is drawn, and x always were."""
        return GaussianProfile(self.noise_multiplier / self._own() / math.sqrt(self.steps))

    def deviation(self) -> float:
        """Returns about the deviation of one release's X under Q, cut off at 1."""
        return ratio_deviation(*self._pair("with").laws())

    def ratios(self, side: Side, step: float, tail: float) -> list[LikelihoodRatio]:
        """Returns the glued pair ('upper') or the concrete pairs ('lower') of one release."""
        if side == "upper":
            return [self.glued(step, tail)]
        ratios = []
        for with_x, without_x in self.concrete_pairs():
            edges = ratio_edges(with_x, without_x, 0.25 * step, tail)
            p, q = with_x.masses(edges), without_x.masses(edges)
            drift = max(with_x.drift(edges), without_x.drift(edges))
            ratios.append(LikelihoodRatio.from_masses(p, q, step, "lower", drift))
        return ratios

    def divergence(self, a: float) -> float:
        """Returns h(a): no step has a larger int (P_with - a P_without)_+; a > 0, and finite.

        Before the convex minorant, in floating point: for plots and tests, not for guarantees.
        """
        if a < 1.0:
            return 1.0 - a + a * self._pair("without").divergence(1.0 / a)
        return self._pair("with").divergence(a)

    def glued(self, step: float, tail: float) -> LikelihoodRatio:
        """Returns the pair that dominates one release in both orders: glued, and bridged at 1.

        Args:
          step: Grid step in log X.
          tail: Mass beyond which the grid may end.
        """
        right, right_drift = self._pair("with").spread(step, tail)
        # Of 1/X: P and Q are exchanged.
        left, left_drift = self._pair("without").spread(step, tail)
        right_a = np.exp(np.arange(right.q.size) * step)
        left_a = np.exp(-np.arange(left.q.size) * step)
        # Masses strictly beyond each atom, and the curve there.
        right_q, right_p = _beyond(right.q), _beyond(right.p) + right.infinity
        left_q, left_p = _beyond(left.p) + left.infinity, _beyond(left.q)
        right_h = right_p - right_a * right_q
        left_h = 1.0 - left_a + left_a * left_q - left_p
        i, j = _common_tangent(left_a, left_h, right_a, right_h)
        mass, mean = 1.0 - left_q[i] - right_q[j], 1.0 - left_p[i] - right_p[j]
        gap = right_a[j] - left_a[i]
        up, down = (mean - left_a[i] * mass) / gap, (right_a[j] * mass - mean) / gap
        if min(up, down) < -1e-13 * mass:
            raise ArithmeticError(f"no bridge between atoms -{i} and {j} at step {step}")
        up, down = max(up, 0.0), max(down, 0.0)
        size = left.q.size - 1
        q, p = np.zeros(size + right.q.size), np.zeros(size + right.q.size)
        q[size + j + 1 :], p[size + j + 1 :] = right.q[j + 1 :], right.p[j + 1 :]
        q[: size - i], p[: size - i] = left.p[i + 1 :][::-1], left.q[i + 1 :][::-1]
        q[size + j] += up
        p[size + j] += up * right_a[j]
        q[size - i] += down
        p[size - i] += down * left_a[i]
        drift = max(left_drift, right_drift) + 8.0 * ROUNDING
        return LikelihoodRatio(
            "upper",
            step,
            0.0,
            -size,
            q,
            p,
            np.zeros(q.size),
            left.infinity,
            right.infinity,
            drift,
            EDGE_DRIFT + 2.0 * drift,
        )

    def concrete_pairs(self) -> Iterator[tuple[Mixture, Mixture]]:
        """Yields laws of one release (with x, without x) of data sets in one dimension.

        The gradients that branch off x's path at level j are all sign_j. Relative to the sum when
        x is drawn, less its own gradient, the sum is K_j sign_j - sum_{i>j} (n_i - 1) K_i sign_i
        where the draw fails at level j <= c. If units are clipped together, x's own is at 1 with x,
        at -1 without, and at sign_j where the draw fails at level j > c.
        """
        levels, own = len(self.draws), self.contributions()
        probabilities = outcomes(self.draws, self.sizes)
        weights = [*probabilities.fails, probabilities.succeeds]
        for few in itertools.product((-1.0, 1.0), repeat=min(levels, _MOST_SIGNS)):
            signs = [*few, *few[-1:] * (levels - len(few))]
            means = []
            for j in range(levels):
                shift = 0.0
                if j < len(own):
                    shift = own[j] * signs[j]
                    for i in range(j + 1, len(own)):
                        shift -= (self.draws[i] - 1) * own[i] * signs[i]
                else:
                    shift = signs[j]
                means.append(shift)
            zeroed = 0.0 if self.clips_leaves else -1.0
            yield (
                Mixture.of([*means, 1.0], weights, self.noise_multiplier),
                Mixture.of([*means, zeroed], weights, self.noise_multiplier),
            )

    def _own(self) -> float:
        """How far the sum moves when x, drawn, is zeroed out."""
        return 1.0 if self.clips_leaves else 2.0

    def _pair(self, first: str) -> _WorstPair:
        """Returns the pair of the claim whose first law is that `first` = 'with' or 'without' x."""
        probabilities = outcomes(self.draws, self.sizes)
        saved = 1.0 if first == "without" and self.clips_leaves else 0.0
        radii = [2.0 * count - saved for count in self.contributions()]
        radii += [2.0] * (len(self.draws) - len(radii))
        kept = [j for j, fails in enumerate(probabilities.fails) if fails > 0.0]
        return _WorstPair(
            np.array([probabilities.fails[j] for j in kept], float),
            np.array([radii[j] for j in kept], float),
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
        """Returns P and Q."""
        weights = np.append(self.fails, self.succeeds)
        return (
            Mixture(np.append(-self.radii, 0.0), weights, self.sigma),
            Mixture(np.append(-self.radii, -self.own), weights, self.sigma),
        )

    def divergence(self, a: float) -> float:
        """Returns int (P - a Q)_+ at a >= 1."""
        p, q = self.laws()
        low, high = -0.5 * self.own, p.reach(1e-300)[1]
        if a > 1.0:
            low = float(solve_increasing(self.log_excess, np.log([a - 1.0]), low, high)[0])
        edges = np.array([low, math.inf])
        return max(0.0, float(p.masses(edges)[0] - a * q.masses(edges)[0]))

    def spread(self, step: float, tail: float) -> tuple[Spread, float]:
        """Returns the cells of X >= 1, spread to a grid of `step` in log X, and their drift."""
        p, q = self.laws()
        low, high = -0.5 * self.own, p.reach(tail)[1]
        top = float(np.logaddexp(0.0, self.log_excess(np.array([high]))[0]))
        check_grid(top, step, top / step + 1.0)
        count = math.ceil(top / step) + 1
        log_excess = np.log(np.expm1(step * np.arange(1, count)))
        inner = solve_increasing(self.log_excess, log_excess, low, high)
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

    Args:
      left_a: 1 and falling.
      left_h: The curve there.
      right_a: 1 and rising.
      right_h: The curve there.
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


def add_remove_profile(
    noise_multiplier: float, steps: int, draws: Sequence[int], sizes: Sequence[int]
) -> PoissonProfile:
    r"""Returns the profile of one stage under adding or removing one example.

    With x one of N = `sizes[0]`, n = `draws[0]` of which are drawn, and a neighbour without it:
    couple as in the module, swapping x where it is drawn for another: sums differ by at most 2.
    So (1-q) N(0, s^2) + q N(2, s^2) against N(0, s^2), q = n/N, dominates, and is attained by x = 1
    and all others = -1: Poisson sampling at rate q and half the noise.

    >>> f"{add_remove_profile(4.0, 100, draws=(1,), sizes=(10,)).epsilon(1e-5):.1f}"
    '[2.3, 2.4]'

    Source: Balle, Barthe, Gaboardi, "Privacy Amplification by Subsampling", NeurIPS 2018.

    Raises:
      ValueError: If there are several stages: with one example less a unit may have fewer children
        than are drawn, and the sampler then has no output on the neighbour.
    """
    check_stages(draws, sizes, None)
    if len(draws) > 1:
        raise ValueError(
            "several stages have no guarantee under adding or removing an example, as a unit may "
            "be left with fewer examples than are drawn: use zero-out adjacency (MultistageProfile)"
        )
    return PoissonProfile(noise_multiplier / 2.0, draws[0] / sizes[0], steps)
