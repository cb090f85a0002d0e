r"""Composition of Poisson-sampled Gaussian releases by inverting moments: certified to many digits.

**What is computed.** X = 1 - q + q exp(Y), Y ~ N(-1/(2 s^2), 1/s^2) under Q, is one release's
likelihood ratio, X_T the product of T of them, and

    o(v) = E[(X_T - e^v)_+] - (1 - e^v)_+ = E[(e^v - X_T)_+] - (e^v - 1)_+  >= 0,

so that H_eps(P || Q) = o(eps) and H_eps(Q || P) = e^eps o(-eps). With M(z) = E[X^z], which is
entire, M(0) = M(1) = 1, Fubini's theorem gives the Laplace transform of o for every complex z,

    int o(v) e^{(z-1) v} dv = (M(z)^T - 1) / (z (z-1)),

(for Re z > 1 integrate (x - e^v)_+ e^{(z-1)v}, which gives x^z / (z (z-1)), and subtract that of
x = 1; elsewhere by analytic continuation). The same holds of a log-normal X of mean 1 and
log-variance w^2, with G(z) = exp(w^2 z (z-1) / 2) for M(z)^T and a closed form o_G (see
`gaussian`). On any line Re z = c, and z_n = c + i n eta, Poisson's summation formula is

    (eta / 2 pi) sum_n (M(z_n)^T - G(z_n)) e^{-(z_n - 1) v} / (z_n (z_n - 1))
        = sum_j (o - o_G)(v + j W) e^{(c-1) j W},     W = 2 pi / eta:

the term j = 0 is o(v) - o_G(v). (Where M(c)^T is not near 1 nothing needs to be subtracted: for
c > 1 the same sum of M(z)^T alone is that of h(v) = E[(X_T - e^v)_+], which is o(v) for v >= 0, and
for c < 0 that of E[(e^v - X_T)_+], which is o(v) for v <= 0.) Nothing was discretised; c, where the
sum's terms cancel least, is about Chernoff's, so that o has relative accuracy however small it is.

**Errors**, each bounded in `Inversion`:

- *aliases*, j != 0: o(v') <= k(b) M(b)^T e^{-(b-1) v'} for b < 0 and b > 1, with the greatest
  value k(b) of (1 - x^{-1}) x^{1-b}, resp. (1 - x) x^{-b} = |b|^|b| (1 + |b|)^{-1-|b|}; b > c for
  j > 0, b < c for j < 0; and o(v') <= min(1, e^{v'}), which is b = 1 and b = 0. Without the
  subtraction the call h has the bounds of b >= 1, and the put those of b <= 0.
- *the sum's end*: for n > N, |M(z_n)| <= R, by the bound below, and G decays.
- *M(z)*: E[X] = 1 and M(z) - 1 = E[g], g = X^z - 1 - z (X - 1), second order in log X: so
  its rounding is relative to M(z) - 1. With Y = (u - 1/(2s))/s it is an integral against the normal
  density of u, entire in u but for the powers, whose base X avoids (-inf, 0] while
  0 <= Im Y < pi. It is taken by the trapezoid rule on the line Im u = a. There, for Im z = y >= 0,

      |X^z| = |X|^c e^{-y arg X},   0 <= arg X < pi,   |X| <= X_0,   |X| >= X_0 cos(Im Y / 2)

  (X_0: its value at Re u): along that line integrands do not oscillate the more the larger y is.
  With a spacing t, the rule is off by at most (A_0 + A_2a) / (e^{2 pi a / t} - 1), A_h the integral
  of |integrand| on Im u = h (the residue theorem; Trefethen, Weideman, "The Exponentially
  Convergent Trapezoidal Rule", SIAM Review 2014, Theorem 5.1, for a strip of which the line is the
  middle): A_0 <= M(c) + 1 + 2 |z|, A_2a <= e^{2 a^2} (M(c) cos(2a / (2s))^{min(c, 0)} + 1 + 2 |z|).
- *R*: on such a line the terms' moduli for X^z fall in y, each of them; so their sum at y_N, plus
  the rule's error, bounds |M(c + i y)| for all y >= y_N.
- *nodes left out* and *floating point*: see `_Line`.

Sources: Carr and Madan, "Option Valuation Using the Fast Fourier Transform", 1999 (the transform of
a time value); Zhu, Dong, Wang, "Optimal Accounting of Differential Privacy via Characteristic
Function", AISTATS 2022.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special

from accounting.profile import Bound
from accounting.profiles.gaussian import GaussianProfile

Real = NDArray[np.floating]
Complex = NDArray[np.complexfloating]

ROUNDING = 2.0**-53
_SMALLEST = 1e-305
_LEAST_LOG = -700.0
"""Least log of a result's size, so that neither it nor its errors underflow beyond _SMALLEST."""
MOST_TERMS = 3.0e7
"""Largest number of (node of z) x (node of u) that is computed."""
_BLOCK = 2**17
ACCURACIES = (20.0, 37.0)
"""Errors are pressed to about e^-this of Chernoff's bound: first some, then what a double holds."""
_FACTORIALS = [1.0 / math.factorial(k) for k in range(2, 21)]


class NotInvertibleError(ValueError):
    """The sum would have too many terms: one release's law decays too slowly for it."""


@dataclass(frozen=True)
class Releases:
    """`count` releases at `noise_multiplier`, each with the example at `sampling_prob` < 1."""

    noise_multiplier: float
    sampling_prob: float
    count: int

    def log_ratio(self, u: Real, height: float) -> Complex:
        """Returns log X at u + i height, 0 <= height < pi s; complex [nodes].

        |X - 1| comes with a relative error of some 40 roundings, and so does log X, but for what
        Y's own error adds: see `_Line`.
        """
        sigma, rate = self.noise_multiplier, self.sampling_prob
        y, angle = (u - 0.5 / sigma) / sigma, height / sigma
        large = y > -math.log(rate)
        out = np.empty(y.shape, np.complex128)
        power = np.exp(y[~large])
        real = np.expm1(y[~large]) * math.cos(angle) - 2.0 * math.sin(0.5 * angle) ** 2
        imaginary = rate * power * math.sin(angle)
        # Where X is near 1 - q the sum of positive parts is sharp, the difference from 1 is not.
        parts = (1.0 - rate) + rate * power * math.cos(angle)
        modulus = np.where(
            parts < 0.5,
            np.log(np.hypot(parts, imaginary)),
            0.5 * np.log1p(np.maximum(rate * real * (2.0 + rate * real) + imaginary**2, -0.99)),
        )
        out[~large] = modulus + 1j * np.arctan2(imaginary, parts)
        rest = (1.0 - rate) / rate * np.exp(-y[large] - 1j * angle)
        out[large] = math.log(rate) + y[large] + 1j * angle + _log1p(rest)
        return out

    def slope(self, u: Any) -> Any:
        """Returns d log X / d Y at real `u`: in (0, 1)."""
        sigma, rate = self.noise_multiplier, self.sampling_prob
        return special.expit((u - 0.5 / sigma) / sigma + math.log(rate) - math.log1p(-rate))

    def height(self, tilt: float) -> float:
        """Returns the height of the line of u for Re z = `tilt`: <= 1, and Im Y <= 1.5 there.

        For a negative tilt |X|^tilt grows with the height; the angle keeps that to a factor of
        some e^2.
        """
        angle = 1.5 if tilt >= -1.0 else 2.0 / math.sqrt(-tilt)
        return min(1.0, self.noise_multiplier * min(1.5, angle))


class _Line:
    """Nodes u = x + i height for M(z), Re z = `tilt`, Im z >= 0.

    *Nodes left out.* Each of |X|^c, |X|, 1, times the density, has its greatest value at some x in
    [low, high] (low <= 0, high = max(c, 1) / s), and falls outside at least as e^{-d^2 / 2} in the
    distance d: for c >= 0, log X has a slope in (0, 1 / s), and for c < 0 c log X is concave. So
    beyond a distance r a sum is <= (t + 1 / r) e^{-r^2 / 2} times that value. Nodes within whose
    terms are small are left out, too, and counted.

    *Floating point.* g = E_2(z l) - z E_2(l), E_2(w) = e^w - 1 - w (by its series for |w| < 1),
    l = log X. Along the segment from 0 to l, |e^{z s} - e^s| <= |z - 1| |s| m, with m =
    max(1, |X|^c, |X|), so |E_2(z l)| <= |z|^2 |l|^2 m / 2, and the like of E_2(l): a relative error
    k u of either is k u (|z|^2 + |z|) |l|^2 m / 2. k: 200 for sums by pairs, the exponential, the
    series, the logarithm and log X, and 8 x^2 for the density's exponent; an error d of l adds
    |z| |z - 1| |l| m d. Where |l| >= 1, |E_2(w)| <= m (2 + |w|), and the derivative of g,
    z (e^{z l} - e^l), is <= 2 |z| m, say less.
    """

    def __init__(self, releases: Releases, tilt: float, height: float, accuracy: float) -> None:
        sigma, rate = releases.noise_multiplier, releases.sampling_prob
        self.tilt = tilt
        angle = height / sigma
        # log of max |X|^c / X_0^c on this line, and on the upper edge of the strip.
        here, above = (min(tilt, 0.0) * math.log(math.cos(0.5 * k * angle)) for k in (1.0, 2.0))
        accuracy += 2.0 * height**2 + above
        step = 2.0 * math.pi * height / accuracy
        reach = math.sqrt(2.0 * accuracy)
        low, high = 0.0, max(tilt, 1.0) / sigma
        if tilt < 0.0:
            low, right = tilt / sigma, 0.0
            for _ in range(60):
                middle = 0.5 * (low + right)
                if middle < tilt * float(releases.slope(middle)) / sigma:
                    low = middle
                else:
                    right = middle
        if (high - low + 2.0 * reach) / step > MOST_TERMS / 8.0:
            raise NotInvertibleError("one release's moments need too many nodes")
        x = np.arange(math.floor((low - reach) / step), math.ceil((high + reach) / step) + 1) * step
        log_x = releases.log_ratio(x, height)
        log_weight = -0.5 * (x * x - height**2) + math.log(step / math.sqrt(2.0 * math.pi))
        real = np.logaddexp(math.log1p(-rate), math.log(rate) + (x - 0.5 / sigma) / sigma)
        size = log_weight + np.maximum(np.maximum(tilt * real, real), 0.0)
        top = float(size.max())
        kept = size > top - accuracy - math.log(x.size)
        missing = float(np.exp(size[~kept] - top).sum())
        # The greatest value is at a stationary point, at most step / 2 from a node.
        between = 0.125 * step**2 * (1.0 + 0.25 * max(abs(tilt), 1.0) / sigma**2)
        log_left_out = -0.5 * reach**2 + between + math.log1p(1.0 / (reach * step))
        missing += 6.0 * math.exp(min(log_left_out, 700.0))
        x, log_x, log_weight = x[kept], log_x[kept], log_weight[kept]

        self.scale = max(0.0, float((log_weight + tilt * log_x.real).max()))
        self._log_x, self._phase = log_x, -1j * height * x
        self._log_weight = log_weight
        log_largest = log_weight + np.maximum(np.maximum(tilt * log_x.real, log_x.real), 0.0)
        y_error = 8.0 * ROUNDING * (np.abs(x) / sigma + 0.5 / sigma**2)
        modulus = np.abs(log_x)
        share = np.exp(np.minimum(math.log(rate) + (x - 0.5 / sigma) / sigma - log_x.real, 1.0))
        x_error = share * y_error + 8.0 * ROUNDING * np.where(
            log_x.real > 0.5, abs(math.log(rate)) + modulus, modulus
        )
        self._modulus, self._log_x_error = modulus, x_error + 40.0 * ROUNDING * modulus
        largest = np.exp(log_largest - self.scale)
        relative, near = (200.0 + 8.0 * x * x) * ROUNDING, modulus < 1.0
        by_second_order = relative * 0.5 * modulus**2 + modulus * x_error
        by_size = relative * (2.0 + modulus) + 2.0 * x_error
        self.rounding = (
            float((largest * by_size)[~near].sum()),
            float((largest * by_second_order)[near].sum()),
        )
        """Error of M e^{-scale} by floating point: these times 1 + |z| and |z| (|z| + 1)."""
        weight = np.exp(log_weight + self._phase - self.scale)
        self._weight = weight
        small = modulus < 1.0
        second = np.empty_like(log_x)
        second[small] = weight[small] * _second(log_x[small])
        second[~small] = np.exp(
            log_weight[~small] + self._phase[~small] + log_x[~small] - self.scale
        ) - weight[~small] * (1.0 + log_x[~small])
        self._second_of_x = complex(second.sum())
        # |z| and 1 in the bounds are <= 2 (1 + |z|) in all; M(c) <= 1.1 (its sum + 1).
        moment = 1.1 * (
            float(np.exp(log_weight + tilt * log_x.real - self.scale).sum())
            * math.exp(0.5 * height**2)
            + math.exp(-self.scale)
        )
        edge = (1.0 + math.exp(2.0 * height**2 + above)) / math.expm1(accuracy)
        self.truncation = edge * (moment + 2.0 * math.exp(-self.scale)) + 2.0 * missing * math.exp(
            min(top - self.scale + here, 700.0)
        )
        """Error of M e^{-scale} by the rule and by nodes left out: this times 1 + |z|."""

    @property
    def size(self) -> int:
        """The number of nodes."""
        return int(self._log_x.size)

    def excess(self, z: Complex) -> Complex:
        """Returns (M(z) - 1) e^{-scale} for each z of real part `tilt`, Im z >= 0."""
        product = z[:, None] * self._log_x
        small = np.abs(product) < 1.0
        terms = np.exp((self._log_weight - self.scale) + self._phase + product)
        terms -= self._weight * (1.0 + product)
        if small.any():
            row, column = np.nonzero(small)
            terms[row, column] = self._weight[column] * _second(product[row, column])
        return terms.sum(axis=1) - z * self._second_of_x

    def log_moment(self, z: Complex) -> tuple[Complex, Real]:
        """Returns log M(z), and a bound on the error of each."""
        excess, size = self.excess(z), np.abs(z)
        error = (self.rounding[1] * size + self.rounding[0] + self.truncation) * (1.0 + size)
        if self.scale == 0.0:
            log_moment = _log1p(excess)
            modulus = np.abs(1.0 + excess)
            error = error + 30.0 * ROUNDING * np.abs(excess)
        else:
            whole = excess + math.exp(-self.scale)
            modulus = np.abs(whole)
            with np.errstate(divide="ignore"):
                log_moment = self.scale + np.log(whole)
            error = error + 30.0 * ROUNDING * (1.0 + self.scale) * modulus
        with np.errstate(divide="ignore", invalid="ignore"):
            return log_moment, np.where(error < 0.5 * modulus, 2.0 * error / modulus, math.inf)

    def log_decay(self, y: float) -> float:
        """Returns a bound on log |M(tilt + i y')| for all y' >= `y`."""
        log_terms = self._log_weight + self.tilt * self._log_x.real - y * self._log_x.imag
        exponents = np.abs(self._log_weight) + (abs(self.tilt) + y) * self._modulus + self.scale
        log_terms += (abs(self.tilt) + y) * self._log_x_error + 8.0 * ROUNDING * exponents
        total = float(np.exp(log_terms - self.scale).sum()) * (1.0 + 1e-11)
        return self.scale * (1.0 + 4.0 * ROUNDING) + math.log(total + self.truncation)


def _log1p(x: Complex) -> Complex:
    """log(1 + x), with a small error relative to |x| where that is small."""
    real, imaginary = x.real, x.imag
    with np.errstate(divide="ignore", invalid="ignore"):
        modulus = np.where(
            real < -0.5,
            np.log(np.hypot(1.0 + real, imaginary)),
            0.5 * np.log1p(np.maximum(real * (2.0 + real) + imaginary**2, -0.99)),
        )
    return modulus + 1j * np.arctan2(imaginary, 1.0 + real)


def _second(x: Complex) -> Complex:
    """e^x - 1 - x for |x| < 1."""
    total = np.full(x.shape, _FACTORIALS[-1], np.complex128)
    for factor in _FACTORIALS[-2::-1]:
        total *= x
        total += factor
    return total * x * x


class Tilts:
    """About log M(c) for real c, quickly: to choose tilts and windows by, and for no bound."""

    _STEP = 0.1
    _NODES = np.arange(-120, 121) * _STEP

    def __init__(self, releases: Releases) -> None:
        self._releases = releases
        self.largest = 3000.0 * releases.noise_multiplier
        self._near = self._law(self._NODES)

    def log_moments(self, tilts: Real) -> Real:
        """Returns about log M(c) for each of `tilts`; inf beyond the `largest`."""
        releases, last = self._releases, float(self._NODES[-1])
        found = np.full(tilts.shape, math.inf)
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
            found[near] = self._of_law(tilts[near], log_x, log_weight)
        if far.any():
            x = np.rint(mode[far] / self._STEP)[:, None] * self._STEP + self._NODES
            more_log_x, more_log_weight = self._law(x)
            more_log_weight[x < last + 0.5 * self._STEP] = -math.inf
            shape = (x.shape[0], log_x.size)
            found[far] = self._of_law(
                tilts[far],
                np.concatenate([np.broadcast_to(log_x, shape), more_log_x], axis=1),
                np.concatenate([np.broadcast_to(log_weight, shape), more_log_weight], axis=1),
            )
        return found

    def _law(self, x: Real) -> tuple[Real, Real]:
        """Returns log X and the log of the weights at nodes `x`."""
        sigma, rate = self._releases.noise_multiplier, self._releases.sampling_prob
        y = (x - 0.5 / sigma) / sigma
        large = y > -math.log(rate)
        log_x = np.log1p(rate * np.expm1(np.where(large, 0.0, y)))
        rest = np.log1p((1.0 - rate) / rate * np.exp(-np.maximum(y, 0.0)))
        log_x = np.where(large, math.log(rate) + y + rest, log_x)
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
        excess = np.maximum(terms.sum(axis=1) - tilts * shift.sum(axis=1), 1e-300)
        return np.where(scale == 0.0, np.log1p(excess), scale + np.log(excess + np.exp(-scale)))

    def log_ceiling(self, tilts: Real) -> Real:
        """Returns about the log of (M(c)^T - 1) / (c (c - 1)), whose e^{-(c - 1) v} is o's size."""
        total = self._releases.count * self.log_moments(tilts)
        with np.errstate(divide="ignore", invalid="ignore"):
            less_one = np.where(total > 1e-6, np.log(-np.expm1(-total)), np.log(total) - total)
            return total + less_one - np.log(np.abs(tilts * (tilts - 1.0)))

    def at(self, loss: float, *, positive: bool) -> float:
        """Returns the tilt, > 1 if `positive`, else < 0, at which o(`loss`) is computed best."""
        return self._least(positive, lambda c: self.log_ceiling(c) - (c - 1.0) * loss)

    def for_delta(self, log_delta: float) -> tuple[float, float]:
        """Returns about the best tilt to find epsilon by, 'remove', and Chernoff's epsilon.

        That is from o <= k(c) M(c)^T e^{-(c-1) v}, or from o being a falling function on (0, inf)
        and the size of its transform: o(v) (e^{(c-1) v} - 1) / (c - 1) <= e^{log_ceiling(c)}.
        """

        def bound(c: Real) -> Real:
            rate = c - 1.0
            peak = rate * np.log(rate) - c * np.log(c)
            power = self._releases.count * self.log_moments(c)
            by_transform = np.logaddexp(0.0, np.log(rate) + self.log_ceiling(c) - log_delta)
            return np.minimum(np.maximum(peak + power - log_delta, 0.0), by_transform) / rate

        tilt = self._least(True, bound)
        return tilt, float(bound(np.array([tilt]))[0])

    def windows(
        self, tilt: float, loss: float, target: float, subtracted: bool
    ) -> tuple[tuple[float, float], tuple[float, float]]:
        """Returns the windows that aliases below and above need, each with the b that shows it.

        They are to be about e^target.
        """
        c, count = tilt, self._releases.count
        fractions = np.array([0.05, 0.1, 0.2, 0.4, 0.7])
        growing = 2.0 ** np.arange(-5.0, 5.0)
        if c > 1.0:
            below = np.concatenate([1.0 + (c - 1.0) * fractions, -c * growing])
            above = c + (c - 1.0) * growing
        else:
            below = c * (1.0 + growing)
            above = np.concatenate([c * fractions, 1.0 - c * growing])
        found = []
        for sides, plain in ((below, c > 1.0), (above, c < 0.0)):
            sides = sides[sides <= self.largest]
            if not subtracted:  # both h's bounds and the put's are for their own b alone
                sides = sides[(sides > 1.0) == (c > 1.0)]
            log_moments = self.log_moments(sides)
            candidates = [
                ((_log_peak(b) + count * log_moment - (b - 1.0) * loss - target) / abs(b - c), b)
                for b, log_moment in zip(sides.tolist(), log_moments.tolist(), strict=True)
            ]
            if plain:  # o <= 1, and o <= e^v
                ends = (0.0, 1.0) if subtracted else (1.0 if c > 1.0 else 0.0,)
                candidates += [((-(b - 1.0) * loss - target) / abs(b - c), b) for b in ends]
            found.append(min(candidates, default=(math.inf, 0.0)))
        return found[0], found[1]

    def narrower(self, tilt: float, loss: float, accuracy: float) -> tuple[float, float]:
        """Returns a tilt like `tilt` whose window is much narrower, if any, and the target's log.

        Where one large loss is likelier than many small ones, the tilted law has a second bump
        among the largest, which the best tilt just lets in.
        """
        fractions = 0.7 ** np.arange(7.0)
        tilts = 1.0 + (tilt - 1.0) * fractions if tilt > 1.0 else tilt * fractions
        units = self.log_ceiling(tilts) - (tilts - 1.0) * loss
        target = float(units[0]) - accuracy
        best, least = tilt, math.inf
        powers = self._releases.count * self.log_moments(tilts)
        for c, unit, power in zip(tilts.tolist(), units.tolist(), powers.tolist(), strict=True):
            if unit > units[0] + 4.0 or not math.isfinite(unit):
                break
            (below, _), (above, _) = self.windows(c, loss, target, power < 1.0)
            if max(below, above) < 0.7 * least:
                best, least = c, max(below, above)
        return best, target

    def _least(self, positive: bool, bound: Callable[[Real], Real]) -> float:
        low, high = -11.0, 50.0
        for _ in range(4):
            grid = np.linspace(low, high, 40)
            tilts = 1.0 + np.exp(grid) if positive else -np.exp(grid)
            values = np.nan_to_num(bound(tilts), nan=math.inf)
            best = int(np.argmin(values))
            low, high = grid[max(best - 1, 0)], grid[min(best + 1, grid.size - 1)]
        return float(tilts[best])


class Inversion:
    """The function o on one side of 0, summed on one line of z, with its errors.

    Args:
      releases: What is composed.
      loss: Where the result is to be sharp; the side of 0 is its.
      tilt: About the best real part of z, > 1 or < 0.
      tilts: What `tilt` was chosen by.
      accuracy: Errors are to be about e^-accuracy of Chernoff's bound.

    Raises:
      NotInvertibleError: If the sum would have more than MOST_TERMS terms.
    """

    def __init__(
        self, releases: Releases, loss: float, tilt: float, tilts: Tilts, accuracy: float
    ) -> None:
        tilt, target = tilts.narrower(tilt, loss, accuracy)
        self.releases, self.tilt = releases, tilt
        count = releases.count
        # All is divided by e^unit e^{-(c - 1)(v - loss)}.
        self.loss = loss
        self.unit = float(tilts.log_ceiling(np.array([tilt]))[0]) - (tilt - 1.0) * loss
        if not math.isfinite(self.unit):
            raise NotInvertibleError("no tilt has a moment within range")
        if self.unit - min(loss, 0.0) < _LEAST_LOG:
            raise NotInvertibleError("the result is beyond the range of floats")
        log_power = count * float(tilts.log_moments(np.array([tilt]))[0])
        # An error e of M is one of count e (M^T / M) / (z (z - 1)).
        node_accuracy = (
            accuracy
            + 10.0
            + max(
                0.0,
                math.log(count)
                + log_power
                - self.unit
                - (tilt - 1.0) * loss
                - math.log(min(abs(tilt), abs(tilt - 1.0))),
            )
        )
        height = releases.height(tilt)
        self._line = line = _Line(releases, tilt, height, node_accuracy)
        # Where M(z)^T is not near 1, nothing is subtracted, and the sum is that of h.
        subtracted = log_power < 1.0
        below, above = tilts.windows(tilt, loss, target, subtracted)
        window = max(below[0], above[0])
        if not 0.0 < window < math.inf:
            raise NotInvertibleError("no tilt has a moment within range")
        self._aliases = [self._alias(b) for _, b in (below, above)]
        # A step of few digits: n step has no rounding.
        mantissa, exponent = math.frexp(2.0 * math.pi / window)
        self._step = step = math.ldexp(math.floor(mantissa * 2**24) / 2**24, exponent)
        self._window = 2.0 * math.pi / step

        lines = [line]
        last = target + (tilt - 1.0) * loss
        best_height = math.sqrt(2.0 * max(log_power - last, accuracy) / count)
        if best_height < 0.7 * height:
            lines.append(_Line(releases, tilt, best_height, node_accuracy))

        def log_end(y: float) -> float:
            return count * min(one.log_decay(y) for one in lines) - math.log(math.pi * y)

        low = high = math.log(step)
        while log_end(math.exp(high)) > last:
            low, high = high, high + 1.0
            if high - math.log(step) > math.log(MOST_TERMS / line.size):
                raise NotInvertibleError("one release's moments decay too slowly")
        while high - low > 0.05:
            middle = 0.5 * (low + high)
            low, high = (middle, high) if log_end(math.exp(middle)) > last else (low, middle)
        terms = math.ceil(math.exp(high) / step)
        if terms * line.size > MOST_TERMS:
            raise NotInvertibleError("one release's moments decay too slowly")
        end = terms * step
        self._deviation = 9.0 / end if subtracted else 0.0
        self._log_end = log_end(end)
        if subtracted:
            normal = 0.5 * self._deviation**2 * (tilt * (tilt - 1.0) - end**2)
            self._log_end = float(np.logaddexp(self._log_end, normal - math.log(math.pi * end)))
        self._z = tilt + 1j * step * np.arange(terms + 1)
        self._terms, self._errors = self._sum_terms()

    def _alias(self, b: float) -> tuple[float, float]:
        """Returns b and a bound on log k(b) M(b)^T."""
        return b, 0.0 if b in (0.0, 1.0) else _log_size(self.releases, b)

    def _sum_terms(self) -> tuple[Complex, Real]:
        """Returns the sum's terms at `loss`, divided by e^unit, and a bound on each one's error."""
        z, line, count, c = self._z, self._line, self.releases.count, self.tilt
        rows = max(1, _BLOCK // line.size)
        parts = [line.log_moment(z[first : first + rows]) for first in range(0, z.size, rows)]
        with np.errstate(invalid="ignore"):  # -inf where all terms of M(z) underflow: lost, below
            log_power = count * np.concatenate([part[0] for part in parts])
        error = count * np.concatenate([part[1] for part in parts])
        other = 0.5 * self._deviation**2 * (z * (z - 1.0))
        subtracted = self._deviation > 0.0
        shift = -(z - 1.0) * self.loss - self.unit
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            # Where M(z) is but its error, M(z)^T is taken for 0 and bounded.
            lost = ~(error < 0.1)
            power = np.exp(log_power + shift)
            power[lost] = 0.0
            normal = np.exp(other + shift) if subtracted else np.zeros_like(shift)
            apart = log_power - other
            close = (np.abs(apart) < 1.0) & ~lost & subtracted
            terms = power - normal
            small = np.asarray(apart[close], np.complex128)
            terms[close] = normal[close] * (small + _second(small))
            exponents = np.where(close, 0.0, np.abs(shift) + abs(self.unit))
            size, other_size = np.abs(log_power), np.abs(other)
            errors = np.abs(power) * (1.1 * error + 4.0 * ROUNDING * (size + exponents))
            errors += np.abs(normal) * (8.0 * ROUNDING * (other_size + exponents))
            errors += np.abs(terms) * (
                ROUNDING * (100.0 + 8.0 * np.abs(z - 1.0) * abs(self.loss) + 8.0 * abs(self.unit))
            )
        if lost.any():
            first = float(z[lost].imag.min())
            bound = count * line.log_decay(first) - (c - 1.0) * self.loss - self.unit
            errors[lost] = math.exp(min(bound, 700.0)) + np.abs(normal[lost])
        weights = np.full(z.size, self._step / math.pi)
        weights[0] *= 0.5
        kernel = z * (z - 1.0)
        return weights * terms / kernel, weights * errors / np.abs(kernel)

    def value(self, loss: float, log_factor: float = 0.0) -> tuple[float, float]:
        """Returns a lower and an upper bound on e^`log_factor` o(`loss`)."""
        c, window = self.tilt, self._window
        moved = loss - self.loss
        ceiling = min(1.0, math.exp(min(loss, 0.0) + log_factor) * (1.0 + 1e-12) + _SMALLEST)
        if abs((c - 1.0) * moved) > 600.0:
            return 0.0, ceiling
        turn = np.exp(-(self._z - 1.0) * moved)
        terms = self._terms * turn
        rounding = 4.0 * ROUNDING * np.abs(self._z - 1.0) * (abs(loss) + abs(self.loss))
        error = float(np.dot(np.abs(turn), self._errors))
        error += float(np.dot(np.abs(terms), rounding + 100.0 * ROUNDING))
        total = float(terms.real.sum())
        unit = math.exp(self.unit + log_factor)
        total, error = total * unit, error * unit * (1.0 + 1e-9)
        error += abs(total) * 4.0 * ROUNDING * (abs(self.unit) + abs(log_factor))
        log_end = self._log_end - (c - 1.0) * loss + log_factor
        error += math.exp(min(log_end, 700.0)) * (1.0 + 1e-9)

        aliases = 0.0
        for b, log_bound in self._aliases:
            fall = abs(b - c) * window
            log_alias = log_bound - (b - 1.0) * loss - fall + log_factor
            log_alias += 8.0 * ROUNDING * (abs(log_bound) + abs((b - 1.0) * loss) + fall)
            aliases += math.exp(min(log_alias, 700.0)) / -math.expm1(-fall)
        normal = normal_aliases = 0.0
        if self._deviation > 0.0:
            normal, normal_error = _log_normal_value(loss, self._deviation, log_factor)
            error += normal_error
            normal_aliases = sum(
                self._log_normal_alias(loss, sign, log_factor) for sign in (-1.0, 1.0)
            )
        elif (loss > 0.0) != (c > 1.0) and loss != 0.0:
            raise ValueError(f"a line at {c} gives no value at {loss}")
        low = total + normal - error - aliases * (1.0 + 1e-9) - _SMALLEST
        high = total + normal + error + normal_aliases * (1.0 + 1e-9) + _SMALLEST
        return min(max(0.0, low), ceiling), min(max(0.0, high), ceiling)

    def _log_normal_alias(self, loss: float, sign: float, log_factor: float) -> float:
        """Bounds e^`log_factor` times the sum over j > 0 of o_G(v + sign j W) e^{(c-1) sign j W}.

        o_G(v) <= min(1, e^v) e^{-(|v| / w - w / 2)^2 / 2} for |v| >= w^2 / 2: P-, resp. Q-mass of
        the losses beyond v. Terms' ratios fall.
        """
        logs = []
        for j in (1.0, 2.0):
            there = loss + sign * j * self._window
            away = max(abs(there) / self._deviation - 0.5 * self._deviation, 0.0)
            power = (self.tilt - 1.0) * sign * j * self._window + log_factor
            logs.append(power + min(there, 0.0) - 0.5 * away**2)
        if logs[1] >= logs[0] or logs[0] > 700.0:
            return math.inf
        return math.exp(logs[0]) / -math.expm1(logs[1] - logs[0])


def _log_peak(b: float) -> float:
    """Returns log k(b): of the greatest (x - 1)_+ x^{-b}, b > 1, or (1 - x)_+ x^{-b}, b < 0."""
    if b > 1.0:
        return (b - 1.0) * math.log1p(-1.0 / b) - math.log(b)
    return b * math.log1p(-1.0 / b) - math.log1p(-b)


def _log_size(releases: Releases, b: float) -> float:
    """Returns a bound on log k(b) M(b)^T."""
    line = _Line(releases, b, releases.height(b), 40.0)
    log_moment, error = line.log_moment(np.array([complex(b)]))
    log_power = releases.count * (float(log_moment.real[0]) + float(error[0]))
    return _log_peak(b) + log_power + 1e-9 + 4.0 * ROUNDING * abs(log_power)


def _log_normal_value(loss: float, deviation: float, log_factor: float) -> tuple[float, float]:
    """Returns e^`log_factor` o_G(`loss`), of log-variance `deviation`^2, and the error of it."""
    value, error = GaussianProfile(1.0 / deviation).value(abs(loss))
    factor = math.exp(min(loss, 0.0) + log_factor)
    rounding = 8.0 * ROUNDING * (1.0 + abs(loss)) * value
    return factor * value, factor * (error + rounding) + _SMALLEST


def log_ceiling(releases: Releases, loss: float, tilt: float) -> float:
    """Returns the log of Chernoff's bound k(c) M(c)^T e^{-(c - 1) loss} on o(`loss`)."""
    size, power = _log_size(releases, tilt), (tilt - 1.0) * loss
    return size - power + 4.0 * ROUNDING * (abs(size) + abs(power))


@dataclass(frozen=True)
class Curves:
    """Both directions' profiles of `releases`, by inversion at one `accuracy`.

    Raises, when asked:
      NotInvertibleError: If a sum would have more than MOST_TERMS terms.
    """

    releases: Releases
    accuracy: float

    def delta(self, epsilon: float) -> tuple[float, float]:
        """Bounds the larger of both directions' delta at `epsilon` >= 0."""
        tilts = Tilts(self.releases)
        tilt = tilts.at(epsilon, positive=True)
        log_bound = log_ceiling(self.releases, epsilon, tilt)
        if log_bound < _LEAST_LOG:
            upper = math.exp(log_bound + 1e-9) + _SMALLEST
            return 0.0, max(upper, self._add_ceiling(epsilon, _SMALLEST, tilts))
        remove = Inversion(self.releases, epsilon, tilt, tilts, self.accuracy)
        low, high = remove.value(epsilon)
        if self._add_ceiling(epsilon, low, tilts) <= low:
            return low, high
        add = _Add(self.releases, epsilon, tilts, self.accuracy)
        other_low, other_high = add.value(epsilon)
        return max(low, other_low), max(high, other_high)

    def epsilon(self, delta: float) -> Bound:
        """Bounds the smallest epsilon >= 0 at which both directions' delta is <= `delta`."""
        tilts = Tilts(self.releases)
        tilt, start = tilts.for_delta(math.log(delta))
        found = Bound(0.0, math.inf)
        for _ in range(4):
            remove, start = self._remove(start, tilt, tilts)
            tilt = remove.tilt
            again = _crossing(remove.value, delta, start, 1.0 / (tilt - 1.0))
            found = Bound(max(found.lower, again.lower), min(found.upper, again.upper))
            # Once more with the line laid for the answer, where that is far from the first guess.
            answer = found.upper if found.upper < math.inf else 0.9 * start
            if abs(start - answer) * (tilt - 1.0) <= 1.0:
                break
            start, tilt = answer, tilts.at(answer, positive=True)
        at = found.lower
        if self._add_ceiling(at, delta, tilts) <= delta:
            return found
        add = _Add(self.releases, at, tilts, self.accuracy)
        if add.value(at)[1] <= delta:
            return found
        other = _crossing(add.value, delta, at, 1.0 / abs(add.inversion.tilt - 1.0))
        return Bound(max(found.lower, other.lower), max(found.upper, other.upper))

    def _remove(self, start: float, tilt: float, tilts: Tilts) -> tuple[Inversion, float]:
        """Returns the sum for `start`, or for the first point below whose sum is short enough.

        Chernoff's epsilon may be twice the true one, and its tilt one at which large losses count.
        """
        for _ in range(5):
            try:
                return Inversion(self.releases, start, tilt, tilts, self.accuracy), start
            except NotInvertibleError:
                start *= 0.6
                tilt = tilts.at(start, positive=True)
        return Inversion(self.releases, start, tilt, tilts, self.accuracy), start

    def _add_ceiling(self, epsilon: float, enough: float, tilts: Tilts) -> float:
        """Bounds H_epsilon(Q || P) by Chernoff's bound at a tilt where that is <= `enough`, if any.

        X >= 1 - q: beyond the log of its inverse, `count` times, there is no loss.
        """
        if epsilon > -self.releases.count * math.log1p(-self.releases.sampling_prob) * (
            1.0 + 1e-12
        ):
            return 0.0
        if enough <= 0.0:
            return 1.0
        candidates = -np.exp(np.linspace(-11.0, 40.0, 103))
        logs = epsilon + tilts.log_ceiling(candidates) + (candidates - 1.0) * epsilon
        met = np.flatnonzero(logs < math.log(enough) - 1.0)
        if not met.size:
            return 1.0
        tilt = float(candidates[met[0]])
        try:
            log_bound = epsilon + log_ceiling(self.releases, -epsilon, tilt)
        except NotInvertibleError:
            return 1.0
        return math.exp(min(log_bound + 1e-9, 0.0)) + _SMALLEST


class _Add:
    """H_epsilon(Q || P) = e^epsilon o(-epsilon), near one epsilon."""

    def __init__(self, releases: Releases, epsilon: float, tilts: Tilts, accuracy: float) -> None:
        tilt = tilts.at(-epsilon, positive=False)
        self.inversion = Inversion(releases, -epsilon, tilt, tilts, accuracy)

    def value(self, epsilon: float) -> tuple[float, float]:
        """Bounds delta at `epsilon`."""
        return self.inversion.value(-epsilon, epsilon)


def _crossing(
    value: Callable[[float], tuple[float, float]], delta: float, start: float, scale: float
) -> Bound:
    """Bounds where a falling curve, of which `value` gives bounds, crosses `delta`, on [0, inf).

    By secants on the logarithm of the bounds' mean, then by a pad around that root, which is
    widened until the bounds prove its two ends.

    Args:
      value: Lower and upper bound at a point.
      delta: The value that is crossed.
      start: A point near.
      scale: About the distance in which the curve falls to a third.
    """

    def excess(at: float) -> float:
        low, high = value(at)
        return math.log(max(0.5 * (low + high), 1e-320) / delta)

    if value(0.0)[1] <= delta:
        return Bound(0.0, 0.0)
    low, high, at = 0.0, math.inf, max(start, 0.0)
    slope = -1.0 / scale
    for _ in range(60):
        here = excess(at)
        if here > 0.0:
            low = at
        else:
            high = at
        following = at - here / slope
        if high < math.inf and not low < following < high:
            following = 0.5 * (low + high)
        following = max(following, 0.0)
        if abs(following - at) <= 1e-13 * at or abs(here) < 1e-13:
            break
        new = excess(following)
        if (new - here) * (following - at) < 0.0:
            slope = (new - here) / (following - at)
        at = following
    pad = 1e-13 * at + 1e-13 / abs(slope)
    lower, upper = 0.0, math.inf
    for _ in range(60):
        if upper == math.inf and value(at + pad)[1] <= delta:
            upper = at + pad
        if lower == 0.0 and at - pad > 0.0 and value(at - pad)[0] > delta:
            lower = at - pad
        if upper < math.inf and (lower > 0.0 or pad >= at):
            break
        pad *= 3.0
    return Bound(lower, upper)
