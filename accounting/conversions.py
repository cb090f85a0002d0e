"""One privacy profile in the field's other languages: PLD, trade-off curve, μ, advantage, event.

All of them follow from the curve δ(ε), ε >= 0, the worse of both directions.
Proofs and sources: docs/explanation/trade-off-curves.md.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy
from numpy.typing import NDArray

from accounting.algebra.cells import Array
from accounting.algebra.likelihood_ratio import VALUE_DRIFT, LikelihoodRatio
from accounting.profile import Bound, PrivacyProfile
from accounting.profiles.gaussian import GaussianProfile
from accounting.profiles.poisson import PoissonProfile

# Upper values are raised by this much, so that rounding in the masses of a pair cannot go below
# them.
_ROUNDING = 1e-9
_LARGEST_EPSILON = 500.0


@dataclass(frozen=True, eq=False)
class PrivacyCurve:
    """Certified bounds on a privacy profile at evenly spaced ε, and what follows from them.

    >>> curve = PrivacyCurve.of(GaussianProfile(2.0))
    >>> f"{curve.advantage():.4f}", f"{curve.gaussian_mu():.2f}"
    ('[0.1974, 0.1975]', '[0.49, 0.51]')

    Attributes:
      interval: d > 0, the spacing of ε.
      lower: Lower bounds on δ at ε = 0, d, 2d, ..., float64 [K + 1].
      upper: Upper bounds on δ there, float64 [K + 1].
    """

    interval: float
    lower: Array
    upper: Array

    @classmethod
    def of(
        cls, profile: PrivacyProfile, *, interval: float = 1e-2, tail: float = 1e-12
    ) -> PrivacyCurve:
        """Evaluates a profile until its upper bound is at most `tail`.

        Args:
          profile: Any profile whose bounds are proved (confidence 1).
          interval: d > 0. What is computed from the curve is off by order d² (upper ends) or d
            (lower ends).
          tail: The δ in (0, 1) below which the curve is not resolved; it becomes an infinite loss.

        Raises:
          ValueError: If the profile's bounds hold only with some confidence, or δ does not fall to
            `tail`.
        """
        if not 0.0 < interval <= 1.0:
            raise ValueError(f"interval must be in (0, 1], got {interval}")
        if not 0.0 < tail < 1.0:
            raise ValueError(f"tail must be in (0, 1), got {tail}")
        lower: list[float] = []
        upper: list[float] = []
        while not upper or upper[-1] > tail:
            epsilon = len(upper) * interval
            if epsilon > _LARGEST_EPSILON:
                raise ValueError(
                    f"delta is still {upper[-1]} at epsilon = {epsilon}: "
                    "ask for a larger tail, or add noise"
                )
            bound = profile.delta(epsilon)
            if bound.confidence < 1.0:
                raise ValueError(
                    f"a curve needs proved bounds, got one of confidence {bound.confidence}"
                )
            lower.append(bound.lower)
            upper.append(bound.upper)
        return cls(interval, np.array(lower), np.array(upper))

    @functools.cached_property
    def _pair(self) -> tuple[Array, Array, float]:
        """Masses of P and of Q at the losses kd, k = 0 ... K, and the P-mass at infinity.

        At the loss -kd the pair has them exchanged, and Q has the infinite mass at -infinity.
        """
        a = np.exp(self.interval * np.arange(self.upper.size))
        h = np.minimum(1.0, (1.0 + _ROUNDING) * self.upper)
        # The chord from 1/a_k to a_k bounds h at 1 (and leaves a nonnegative mass at the loss 0).
        h[0] = min(1.0, float(np.min((2.0 * h + a - 1.0) / (1.0 + a))))
        kept = _convex_minorant(a, h)
        slopes = np.append(np.diff(h[kept]) / np.diff(a[kept]), 0.0)
        q = np.zeros(a.size)
        q[kept[1:]] = np.diff(slopes)
        p = a * q
        infinity = float(h[kept[-1]])
        p[0] = q[0] = max(0.0, 1.0 - infinity - p[1:].sum() - q[1:].sum())
        return p, q, infinity

    def privacy_loss_distribution(self) -> Any:
        """Returns the upper pair as dp_accounting's type: pessimistic, ready to be composed."""
        p, q, infinity = self._pair
        from dp_accounting.pld import privacy_loss_distribution as pld

        masses = {-k: float(q[k]) for k in range(q.size - 1, 0, -1)}
        masses |= {k: float(p[k]) for k in range(p.size)}
        return pld.PrivacyLossDistribution(_pmf(masses, self.interval, infinity))

    def type_two_error(self, type_one_error: float) -> Bound:
        """Bounds the trade-off curve f at α: the least miss rate of a test with false alarm rate α.

        1 - f(α) is the largest true positive rate of a membership attack at false positive rate α.

        Args:
          type_one_error: α in [0, 1].
        """
        alpha = type_one_error
        if not 0.0 <= alpha <= 1.0:
            raise ValueError(f"type_one_error must be in [0, 1], got {alpha}")
        a = np.exp(self.interval * np.arange(self.upper.size))
        right = np.append(self.lower[1:], 0.0)

        def best(h: Array) -> float:
            direct, mirrored = 1.0 - h - a * alpha, (1.0 - h - alpha) / a
            return max(0.0, float(direct.max()), float(mirrored.max()))

        lower = best(np.minimum(1.0, self.upper))
        return Bound(lower, max(lower, min(best(right), 1.0 - alpha)))

    def advantage(self) -> Bound:
        """Bounds the membership advantage, the total variation distance δ(0) of the pair.

        Source: S. Yeom et al., CSF 2018, arXiv:1709.01604, Definition 4.
        """
        return Bound(float(self.lower[0]), float(self.upper[0]))

    def gaussian_mu(self, slack: float = 1e-10) -> Bound:
        """Bounds the nearest Gaussian: the least μ with f >= f_μ - τ, so δ(ε) <= δ_μ(ε) + τ.

        f_μ is the trade-off curve of N(0, 1) and N(μ, 1). With τ = 0 and a sampled mechanism μ is
        that of full participation: a small τ asks about the part of the curve that matters.

        Args:
          slack: τ >= 0; must be at least δ at the end of the curve.

        Raises:
          ValueError: If the curve ends at a δ above τ.

        Source: J. Dong, A. Roth, W. Su, arXiv:1905.02383, Definition 3.
        """
        p, q, infinity = self._pair
        if not slack >= infinity:
            raise ValueError(f"slack must be at least the curve's tail, {infinity}, got {slack}")
        # Masses strictly above each loss kd; those above negative losses are their mirror images.
        p_above = infinity + np.append(np.cumsum(p[:0:-1])[::-1], 0.0)
        q_above = np.append(np.cumsum(q[:0:-1])[::-1], 0.0)
        corner = (p_above > slack) & (q_above > 0.0)
        upper = 0.0
        if corner.any():
            upper = float(
                np.max(
                    scipy.special.ndtri(p_above[corner] - slack)
                    - scipy.special.ndtri(q_above[corner])
                )
            )
        upper = max(0.0, upper) * (1.0 + _ROUNDING)

        lower = 0.0
        # In random order few points raise the maximum, and the others cost one comparison each.
        for k in np.random.default_rng(0).permutation(self.lower.size):
            lower = _raise_mu(lower, k * self.interval, float(self.lower[k] - slack))
        return Bound(lower, upper)


def _raise_mu(mu: float, epsilon: float, delta: float) -> float:
    """Returns `mu`, or a μ larger by 1e-4 or more of it with δ_μ(ε) < δ: still too small there."""

    def too_small(value: float) -> bool:
        return bool(GaussianProfile(1.0 / value).delta(epsilon).upper < delta)

    low = max(1e-9, mu * (1.0 + 1e-4))
    if delta <= 0.0 or not too_small(low):
        return mu
    high = 2.0 * low
    while too_small(high):
        low, high = high, 2.0 * high
    while high - low > 1e-5 * high:
        middle = 0.5 * (low + high)
        low, high = (middle, high) if too_small(middle) else (low, middle)
    return low


def _convex_minorant(x: Array, y: Array) -> NDArray[np.int64]:
    """Returns the indices of the points at which the greatest convex function below all bends."""
    kept: list[int] = []
    for k in range(x.size):
        while len(kept) >= 2:
            i, j = kept[-2], kept[-1]
            if (y[j] - y[i]) / (x[j] - x[i]) < (y[k] - y[j]) / (x[k] - x[j]):
                break
            kept.pop()
        kept.append(k)
    return np.array(kept)


def _pmf(masses: dict[int, float], interval: float, infinity: float) -> Any:
    from dp_accounting.pld import pld_pmf

    return pld_pmf.create_pmf(masses, interval, infinity, pessimistic_estimate=True)


def ratio_to_privacy_loss_distribution(ratio: LikelihoodRatio, *, interval: float = 1e-4) -> Any:
    """Converts an upper likelihood ratio to dp_accounting's type, each direction on its own.

    The loss is log X under P for removing, -log X under Q for adding. Each atom is split between
    the two neighbouring multiples of `interval` so that mass and mean of X are kept: a spread,
    hence still an upper bound in both directions.

    >>> step = LikelihoodRatio.subsampled_gaussian(1.0, 0.01, 2e-3, "upper")
    >>> run = ratio_to_privacy_loss_distribution(step, interval=2e-3).self_compose(100)
    >>> f"{run.get_epsilon_for_delta(1e-5):.2f}"  # Poisson's: [0.717, 0.719]
    '0.72'

    Args:
      ratio: A ratio of side "upper".
      interval: Spacing of the losses, > 0.

    Raises:
      ValueError: If the ratio is a lower bound.
    """
    if ratio.side != "upper":
        raise ValueError("a lower likelihood ratio is no guarantee; convert an upper one")
    if not 0.0 < interval <= 1.0:
        raise ValueError(f"interval must be in (0, 1], got {interval}")
    from dp_accounting.pld import privacy_loss_distribution as pld

    def directed(losses: Array, masses: Array, infinity: float) -> Any:
        # Moved and raised by what the ratio's own floating point may have lost.
        losses = losses + VALUE_DRIFT
        index = np.floor(losses / interval).astype(np.int64)
        # Keeps the mass m and e^{-loss} m, the mass under the other measure.
        up = np.clip(np.expm1(index * interval - losses) / math.expm1(-interval), 0.0, 1.0)
        start = int(index.min())
        size = int(index.max()) - start + 2
        split = np.bincount(index - start, masses * (1.0 - up), size)
        split += np.bincount(index - start + 1, masses * up, size)
        raised = {start + k: (1.0 + _ROUNDING) * float(split[k]) for k in range(size)}
        return _pmf(raised, interval, min(1.0, (1.0 + _ROUNDING) * infinity))

    return pld.PrivacyLossDistribution(
        directed(ratio.log_values, ratio.p, ratio.infinity),
        directed(-ratio.log_values, ratio.q, ratio.zero),
    )


def to_dp_event(profile: PrivacyProfile) -> Any:
    """Returns dp_accounting's event for the mechanism of a profile, where that library has one.

    Raises:
      ValueError: If it has none; `PrivacyCurve.privacy_loss_distribution` converts any profile.
    """
    import dp_accounting as dp

    if isinstance(profile, GaussianProfile):
        return dp.GaussianDpEvent(profile.noise_multiplier * (1.0 - profile.relative_error))
    if isinstance(profile, PoissonProfile):
        sums = dp.GaussianDpEvent(profile.noise_multiplier)
        step = dp.PoissonSampledDpEvent(profile.sampling_prob, sums)
        steps = dp.SelfComposedDpEvent(step, profile.steps)
        if profile.release == math.inf:
            return steps
        return dp.ComposedDpEvent([steps, dp.GaussianDpEvent(profile.release)])
    raise ValueError(
        f"dp_accounting has no event for {type(profile).__name__}; "
        "use PrivacyCurve.of(profile).privacy_loss_distribution()"
    )
