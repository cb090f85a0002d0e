"""About log M(c) for real c, quickly: what lines and windows of an inversion are chosen by."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from accounting.algebra.moments import Real, Releases

Branch = tuple[Callable[[Real], Real], float, float]
"""Tilts on one side of the poles at 0 and 1, by a parameter, and the range of that."""
_ABOVE: Branch = (lambda x: 1.0 + np.exp(x), -11.0, 50.0)
_BETWEEN: Branch = (lambda x: 1.0 / (1.0 + np.exp(-x)), -11.0, 11.0)
_BELOW: Branch = (lambda x: -np.exp(x), -11.0, 50.0)
_NEAR_POLE = 0.02
_SHARES = np.array([0.1, 0.2, 0.4, 0.6, 0.8, 0.9, 0.95, 1.03, 1.1, 1.3, 2.0, 4.0, 9.0, 17.0])
_DISTANCES = 4.0 ** np.arange(-3.0, 25.0)
"""Distances of two tilts: in parts of one's distance from a pole, and by themselves."""


class Tilts:
    """Fast approximation of log M(c) for real c, to choose tilts and windows, not to bound."""

    _STEP = 0.1
    _NODES = np.arange(-120, 121) * _STEP

    def __init__(self, releases: Releases) -> None:
        self._releases = releases
        self.largest = 3000.0 * releases.noise_multiplier
        self._near = self._law(self._NODES)

    def log_moments(self, tilts: Real) -> Real:
        """Approximates log M(c) for each of `tilts`; inf beyond the `largest`."""
        releases = self._releases
        return _log_moments(releases.noise_multiplier, releases.sampling_prob, tilts.tobytes())

    def compute_log_moments(self, tilts: Real) -> Real:
        """Computes `log_moments`, which remembers its values."""
        releases, last = self._releases, float(self._NODES[-1])
        log_moments = np.full(tilts.shape, math.inf)
        # The density times X^c has a mode near 0 and, for large c, another one to the right.
        mode = np.maximum(tilts, 1.0) / releases.noise_multiplier
        far = (mode > last) & (tilts <= self.largest)
        for _ in range(8 if far.any() else 0):
            mode[far] = (
                np.maximum(tilts[far], 1.0) / releases.noise_multiplier * releases.slope(mode[far])
            )
            far &= mode > last
        log_x, log_weight = self._near
        near = (tilts <= self.largest) & ~far
        if near.any():
            log_moments[near] = self._of_law(tilts[near], log_x, log_weight)
        if far.any():
            x = np.rint(mode[far] / self._STEP)[:, None] * self._STEP + self._NODES
            more_log_x, more_log_weight = self._law(x)
            more_log_weight[x < last + 0.5 * self._STEP] = -math.inf
            shape = (x.shape[0], log_x.size)
            log_moments[far] = self._of_law(
                tilts[far],
                np.concatenate([np.broadcast_to(log_x, shape), more_log_x], axis=1),
                np.concatenate([np.broadcast_to(log_weight, shape), more_log_weight], axis=1),
            )
        return log_moments

    def log_powers(self, tilts: Real) -> Real:
        """Estimates the log of the moments of all releases together."""
        return np.asarray(self._releases.log_power(tilts, self.log_moments(tilts)))

    def _law(self, x: Real) -> tuple[Real, Real]:
        """Returns log X and the log of the weights at nodes `x`."""
        sigma, rate = self._releases.noise_multiplier, self._releases.sampling_prob
        y = (x - 0.5 / sigma) / sigma
        large = y > -math.log(rate)
        log_x = np.log1p(rate * np.expm1(np.where(large, 0.0, y)))
        log_unsampled = np.log1p((1.0 - rate) / rate * np.exp(-np.maximum(y, 0.0)))
        log_x = np.where(large, math.log(rate) + y + log_unsampled, log_x)
        return log_x, -0.5 * x * x + math.log(self._STEP / math.sqrt(2.0 * math.pi))

    def _of_law(self, tilts: Real, log_x: Real, log_weight: Real) -> Real:
        power = tilts[:, None] * log_x
        scale = np.maximum((log_weight + power).max(axis=1), 0.0)
        weight = np.exp(log_weight - scale[:, None])
        with np.errstate(over="ignore", invalid="ignore"):
            terms = np.where(
                np.abs(power) < 0.3,
                weight * (0.5 * power**2 * (1.0 + power / 3.0)),
                np.exp(log_weight + power - scale[:, None]) - weight * (1.0 + power),
            )
            # E[X - 1 - log X], of second order, is -E[log X].
            shift = np.where(
                np.abs(log_x) < 0.3,
                weight * (0.5 * log_x**2 * (1.0 + log_x / 3.0)),
                np.exp(log_weight + log_x - scale[:, None]) - weight * (1.0 + log_x),
            )
        excess = terms.sum(axis=1) - tilts * shift.sum(axis=1)
        # M(c) < 1 between 0 and 1, and > 1 elsewhere, however small the difference is.
        between = (tilts > 0.0) & (tilts < 1.0)
        excess = np.where(
            between, np.clip(excess, -1.0 + 1e-15, -1e-300), np.maximum(excess, 1e-300)
        )
        with np.errstate(invalid="ignore"):
            large = scale + np.log(excess + np.exp(-scale))
        return np.where(scale == 0.0, np.log1p(excess), large)

    def log_ceiling(self, tilts: Real) -> Real:
        """Approximates log((M(c)^T - 1) / (c (c - 1))).

        Times e^{-(c - 1) v} it is the size of o.
        """
        total = self.log_powers(tilts)
        with np.errstate(divide="ignore", invalid="ignore"):
            logs = np.maximum(total, 0.0) + np.log(-np.expm1(-np.abs(total)))
            return logs - np.log(np.abs(tilts * (tilts - 1.0)))

    def for_loss(self, loss: float) -> float:
        """Returns the best tilt to compute o(`loss`) by.

        It is the saddle point of the transform: above 1 for a large `loss`, below 0 for one far
        below 0, and between them near 0. The poles of 1 / (z (z - 1)), which cancel, are kept at a
        distance.
        """

        def size(c: Real) -> Real:
            poles = np.log1p(_NEAR_POLE / np.abs(c)) + np.log1p(_NEAR_POLE / np.abs(c - 1.0))
            return self.log_ceiling(c) - (c - 1.0) * loss + poles

        return self._least(size, _ABOVE, _BETWEEN, _BELOW)

    def for_delta(self, log_delta: float) -> tuple[float, float]:
        """Estimates the best tilt for epsilon, 'remove', and Chernoff's epsilon."""

        def bound(c: Real) -> Real:
            rate = c - 1.0
            peak = rate * np.log(rate) - c * np.log(c)
            power = self.log_powers(c)
            by_transform = np.logaddexp(0.0, np.log(rate) + self.log_ceiling(c) - log_delta)
            return np.minimum(np.maximum(peak + power - log_delta, 0.0), by_transform) / rate

        tilt = self._least(bound, _ABOVE)
        return tilt, float(bound(np.array([tilt]))[0])

    def windows(
        self, tilt: float, loss: float, target: float, subtracted: bool
    ) -> tuple[tuple[float, float], tuple[float, float]]:
        """Returns the windows that keep aliases below and above negligible.

        Each window comes with the tilt b that proves it. The aliases are to be about e^target.

        Args:
          tilt: c of the inverted line.
          loss: Loss at which o is computed.
          target: Log of the aliases' size.
          subtracted: True if a normal law's transform is subtracted.
        """
        c = tilt
        distances = np.concatenate([abs(c - 1.0) * _SHARES, abs(c) * _SHARES, _DISTANCES])
        candidates = []
        for sign in (-1.0, 1.0):
            sides = c + sign * distances
            sides = sides[((sides < 0.0) | (sides > 1.0)) & (sides <= self.largest)]
            sides = sides[(sides >= -max(self.largest, 32.0 * abs(c))) & (sides != c)]
            limits = [b for b in (0.0, 1.0) if (b - c) * sign > 0.0]  # o <= e^v, and o <= 1
            if not subtracted:  # both h's bounds and the put's are for their own b alone
                sides = sides[(sides > 1.0) == (c > 1.0)]
                limits = [b for b in limits if b == float(c > 1.0)]
            logs = np.append(log_peak(sides) + self.log_powers(sides), np.zeros(len(limits)))
            sides = np.append(sides, limits)
            widths = (logs - (sides - 1.0) * loss - target) / np.abs(sides - c)
            best = int(np.argmin(widths)) if widths.size else -1
            candidates.append(
                (float(widths[best]), float(sides[best])) if best >= 0 else (math.inf, 0.0)
            )
        return candidates[0], candidates[1]

    def narrower(self, tilt: float, loss: float, accuracy: float) -> tuple[float, float]:
        """Returns a tilt of a much narrower window, and the target.

        The tilt is `tilt` if no other window is much narrower; the target is the log of the
        aliases' size. Where one large loss is likelier than many small ones, the tilted law has a
        second bump among the largest, which the best tilt just lets in.

        Args:
          tilt: Best tilt c by the saddle point.
          loss: Loss at which o is computed.
          accuracy: Digits of the result, in e-folds.
        """
        fractions = 0.7 ** np.arange(7.0)
        if 0.0 < tilt < 1.0:
            fractions = fractions[:1]
        tilts = 1.0 + (tilt - 1.0) * fractions if tilt > 1.0 else tilt * fractions
        units = self.log_ceiling(tilts) - (tilts - 1.0) * loss
        target = float(units[0]) - accuracy
        best, least = tilt, math.inf
        powers = self.log_powers(tilts)
        for c, unit, power in zip(tilts.tolist(), units.tolist(), powers.tolist(), strict=True):
            if unit > units[0] + 4.0 or not math.isfinite(unit):
                break
            (below, _), (above, _) = self.windows(c, loss, target, power < 1.0)
            if max(below, above) < 0.7 * least:
                best, least = c, max(below, above)
        return best, target

    def _least(self, bound: Callable[[Real], Real], *branches: Branch) -> float:
        candidates = []
        for branch, low, high in branches:
            for _ in range(4):
                grid = np.linspace(low, high, 40)
                values = np.nan_to_num(bound(branch(grid)), nan=math.inf)
                best = int(np.argmin(values))
                low, high = grid[max(best - 1, 0)], grid[min(best + 1, grid.size - 1)]
            candidates.append((float(values[best]), float(branch(grid[best]))))
        return min(candidates)[1]


@functools.lru_cache(maxsize=2048)
def _log_moments(noise_multiplier: float, sampling_prob: float, tilts: bytes) -> Real:
    """Computes log moments once: questions about one law ask for the same grids of tilts."""
    law = Tilts(Releases(noise_multiplier, sampling_prob, 1))
    log_moments = law.compute_log_moments(np.frombuffer(tilts))
    log_moments.setflags(write=False)
    return log_moments


def log_peak(b: Any) -> Any:
    """Returns log k(b): of the greatest (x - 1)_+ x^{-b}, b > 1, or (1 - x)_+ x^{-b}, b < 0."""
    far = np.maximum(b - 1.0, -b)
    return -far * np.log1p(1.0 / far) - np.log1p(far)
