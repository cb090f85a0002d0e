"""Composition of Poisson-sampled Gaussian releases by inverting moments, without a grid.

o(v) = E[(X_T - e^v)_+] - (1 - e^v)_+, X_T the product of T releases' likelihood ratios, has a
Laplace transform made of their moments. H_eps(P || Q) = o(eps), H_eps(Q || P) = e^eps o(-eps).
Proof and errors: docs/explanation/composition-by-inverting-moments.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from accounting.algebra.cells import gaussian_delta
from accounting.algebra.moments import (
    MOST_TERMS,
    ROUNDING,
    Complex,
    Line,
    NotInvertibleError,
    Real,
    Releases,
    second_order,
)
from accounting.algebra.tilts import Tilts, log_peak
from accounting.profile import Bound, Profile, Question
from accounting.roots import falling_root

_SMALLEST = 1e-305
_LEAST_LOG = -700.0
"""Least log of a result's size, so that neither it nor its errors underflow beyond _SMALLEST."""
_BLOCK = 2**17
ACCURACY = 30.0
"""Errors are about e^-ACCURACY of Chernoff's bound: about 13 digits."""


class Inversion:
    """The function o on one side of 0, summed on one line of z, with its errors.

    Args:
      releases: Releases to compose.
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
        self.releases, self.loss = releases, loss
        self.tilt, target = tilts.narrower(tilt, loss, accuracy)
        log_power = float(tilts.log_powers(np.array([self.tilt]))[0])
        self.unit = self._log_unit(tilts)
        """Log of the size of o(`loss`): all is divided by e^unit e^{-(c - 1)(v - loss)}."""
        nodes = accuracy + 10.0 + max(0.0, self._log_amplification(log_power))
        height = releases.height(self.tilt)
        self._line = Line(releases, self.tilt, height, nodes)

        # Where M(z)^T is not near 1, nothing is subtracted, and the sum is that of h.
        subtracted = log_power < 1.0
        sides = tilts.windows(self.tilt, loss, target, subtracted)
        self._step = _spacing(max(width for width, _ in sides))
        self._window = 2.0 * math.pi / self._step
        self._aliases = [(b, 0.0 if b in (0.0, 1.0) else _log_size(releases, b)) for _, b in sides]

        # The sum ends where its rest is as small as the target, by the line that shows it first.
        last = target + (self.tilt - 1.0) * loss
        lines = [self._line]
        lower = math.sqrt(2.0 * max(log_power - last, accuracy) / releases.count)
        if lower < 0.7 * height:
            lines.append(Line(releases, self.tilt, lower, nodes))
        terms = self._count_terms(lines, last)
        highest = terms * self._step
        self._deviation = 9.0 / highest if subtracted else 0.0
        """Deviation w of the normal law whose transform is subtracted; 0 for none."""
        self._log_end = self._log_rest(lines, highest)
        if subtracted:
            normal = 0.5 * self._deviation**2 * (self.tilt * (self.tilt - 1.0) - highest**2)
            self._log_end = float(np.logaddexp(self._log_end, normal - math.log(math.pi * highest)))
        self._z = self.tilt + 1j * self._step * np.arange(terms + 1)
        self._terms, self._errors = self._sum_terms()

    def _log_unit(self, tilts: Tilts) -> float:
        unit = float(tilts.log_ceiling(np.array([self.tilt]))[0]) - (self.tilt - 1.0) * self.loss
        if not math.isfinite(unit):
            raise NotInvertibleError("no tilt has a moment within range")
        if unit - min(self.loss, 0.0) < _LEAST_LOG:
            raise NotInvertibleError("the result is beyond the range of floats")
        return unit

    def _log_amplification(self, log_power: float) -> float:
        """Returns the log of the result's error for one of M, in units.

        It is count M(c)^T / (c (c - 1)), from `log_power` = log M(c)^T.
        """
        size = math.log(self.releases.count) + log_power - self.unit
        distance = min(abs(self.tilt), abs(self.tilt - 1.0))
        return size - (self.tilt - 1.0) * self.loss - math.log(distance)

    def _log_rest(self, lines: Sequence[Line], y: float) -> float:
        """Returns a bound on the log of the sum's terms beyond Im z = `y`, of h."""
        decay = self.releases.count * min(line.log_decay(y) for line in lines)
        return decay + self._log_beside(y) - math.log(math.pi * y)

    def _count_terms(self, lines: Sequence[Line], log_rest: float) -> int:
        """Returns the least number of terms, to 5 %, beyond which the rest is e^`log_rest`."""
        most = MOST_TERMS / self._line.size

        def excess(log_terms: float) -> float:
            return self._log_rest(lines, self._step * math.exp(log_terms)) - log_rest

        _, high = falling_root(excess, 5.0, lambda x: 0.05, low=0.0, farthest=math.log(most))
        if high == math.inf or (terms := math.ceil(math.exp(high))) > most:
            raise NotInvertibleError("one release's moments decay too slowly")
        return terms

    def _log_beside(self, y: float) -> float:
        """Returns a bound on log |moment| of the further release at all y' >= `y`."""
        log_moment = complex(self.releases.log_beside(complex(self.tilt, y)))
        return log_moment.real + 8.0 * ROUNDING * abs(log_moment)

    def _sum_terms(self) -> tuple[Complex, Real]:
        """Returns the sum's terms at `loss`, divided by e^unit, and a bound on each one's error."""
        z, line, count, c = self._z, self._line, self.releases.count, self.tilt
        rows = max(1, _BLOCK // line.size)
        blocks = [line.log_moment(z[first : first + rows]) for first in range(0, z.size, rows)]
        with np.errstate(invalid="ignore"):  # -inf where all terms of M(z) underflow: lost, below
            log_power = self.releases.log_power(z, np.concatenate([block[0] for block in blocks]))
        error = count * np.concatenate([block[1] for block in blocks])
        error += 16.0 * ROUNDING * np.abs(self.releases.log_beside(z))
        log_normal = 0.5 * self._deviation**2 * (z * (z - 1.0))
        subtracted = self._deviation > 0.0
        shift = -(z - 1.0) * self.loss - self.unit
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            # Where M(z) is but its error, M(z)^T is taken for 0 and bounded.
            lost = ~(error < 0.1)
            power = np.exp(log_power + shift)
            power[lost] = 0.0
            normal = np.exp(log_normal + shift) if subtracted else np.zeros_like(shift)
            difference = log_power - log_normal
            close = (np.abs(difference) < 1.0) & ~lost & subtracted
            terms = power - normal
            small = np.asarray(difference[close], np.complex128)
            terms[close] = normal[close] * (small + second_order(small))
            exponents = np.where(close, 0.0, np.abs(shift) + abs(self.unit))
            size, other_size = np.abs(log_power), np.abs(log_normal)
            errors = np.abs(power) * (1.1 * error + 4.0 * ROUNDING * (size + exponents))
            errors += np.abs(normal) * (8.0 * ROUNDING * (other_size + exponents))
            errors += np.abs(terms) * (
                ROUNDING * (100.0 + 8.0 * np.abs(z - 1.0) * abs(self.loss) + 8.0 * abs(self.unit))
            )
        if lost.any():
            first = float(z[lost].imag.min())
            bound = count * line.log_decay(first) + self._log_beside(first)
            bound -= (c - 1.0) * self.loss + self.unit
            errors[lost] = math.exp(min(bound, 700.0)) + np.abs(normal[lost])
        weights = np.full(z.size, self._step / math.pi)
        weights[0] *= 0.5
        kernel = z * (z - 1.0)
        return weights * terms / kernel, weights * errors / np.abs(kernel)

    def value(self, loss: float, log_factor: float = 0.0) -> tuple[float, float]:
        """Bounds e^`log_factor` o(`loss`) from below and above.

        Args:
          loss: Loss v at which o is computed, near the one that the line was laid for.
          log_factor: Log of a factor of both bounds.
        """
        c, window = self.tilt, self._window
        moved = loss - self.loss
        ceiling = min(1.0, math.exp(min(loss, 0.0) + log_factor) * (1.0 + 1e-12) + _SMALLEST)
        other_side = self._deviation == 0.0 and (loss > 0.0) != (c > 1.0)
        far = max(abs((c - 1.0) * moved), self.unit + log_factor)
        if far > 600.0 or (other_side and abs(loss) + abs(log_factor) > 600.0):
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
        elif other_side:  # h is o and its value at X = 1
            normal = -math.exp(log_factor) * abs(math.expm1(loss))
            error += 8.0 * ROUNDING * abs(normal)
        low = total + normal - error - aliases * (1.0 + 1e-9) - _SMALLEST
        high = total + normal + error + normal_aliases * (1.0 + 1e-9) + _SMALLEST
        return min(max(0.0, low), ceiling), min(max(0.0, high), ceiling)

    def _log_normal_alias(self, loss: float, sign: float, log_factor: float) -> float:
        """Bounds e^`log_factor` sum_{j > 0} o_G(v + sign j W) e^{(c-1) sign j W}."""
        logs = []
        for j in (1.0, 2.0):
            aliased_loss = loss + sign * j * self._window
            away = max(abs(aliased_loss) / self._deviation - 0.5 * self._deviation, 0.0)
            power = (self.tilt - 1.0) * sign * j * self._window + log_factor
            logs.append(power + min(aliased_loss, 0.0) - 0.5 * away**2)
        if logs[1] >= logs[0] or logs[0] > 700.0:
            return math.inf
        return math.exp(logs[0]) / -math.expm1(logs[1] - logs[0])


def _spacing(window: float) -> float:
    """Returns about 2 pi / `window`, of few digits: its multiples have no rounding."""
    if not 0.0 < window < math.inf:
        raise NotInvertibleError("no tilt has a moment within range")
    mantissa, exponent = math.frexp(2.0 * math.pi / window)
    return math.ldexp(math.floor(mantissa * 2**24) / 2**24, exponent)


def _log_size(releases: Releases, b: float) -> float:
    """Returns a bound on log k(b) M(b)^T."""
    line = Line(releases, b, releases.height(b), 40.0)
    log_moment, error = line.log_moment(np.array([complex(b)]))
    log_power = releases.log_power(b, float(log_moment.real[0]) + float(error[0]))
    return log_peak(b) + log_power + 1e-9 + 16.0 * ROUNDING * abs(log_power)


def _log_normal_value(loss: float, deviation: float, log_factor: float) -> tuple[float, float]:
    """Returns e^`log_factor` o_G(`loss`), of log-variance `deviation`^2, and the error of it."""
    value, error = gaussian_delta(1.0 / deviation, abs(loss))
    factor = math.exp(min(loss, 0.0) + log_factor)
    rounding = 8.0 * ROUNDING * (1.0 + abs(loss)) * value
    return factor * value, factor * (error + rounding) + _SMALLEST


def log_ceiling(releases: Releases, loss: float, tilt: float) -> float:
    """Returns the log of Chernoff's bound on o(`loss`).

    That is k(c) M(c)^T e^{-(c - 1) loss} for T `releases` of moment M, at a tilt c > 1 or c < 0.
    """
    size, power = _log_size(releases, tilt), (tilt - 1.0) * loss
    return size - power + 4.0 * ROUNDING * (abs(size) + abs(power))


@dataclass(frozen=True)
class Inverted(Profile):
    """Both directions' profiles of `releases`, by inversion at one `accuracy`.

    Raises, when asked:
      NotInvertibleError: If a sum would have more than MOST_TERMS terms.
    """

    releases: Releases
    accuracy: float

    def answer(self, question: Question) -> Bound:
        """Bounds the larger of both directions' delta, or the larger epsilon."""
        tilts = Tilts(self.releases)
        if question.wanted == "delta":
            return Bound(*self._delta(question.at, tilts))
        return self._epsilon(question.at, tilts)

    def _delta(self, epsilon: float, tilts: Tilts) -> tuple[float, float]:
        tilt = tilts.for_loss(epsilon)
        # Between 0 and 1 there is no such bound, as o(v) is not small there.
        log_bound = 0.0 if 0.0 < tilt < 1.0 else log_ceiling(self.releases, epsilon, tilt)
        if log_bound < _LEAST_LOG:
            upper = math.exp(log_bound + 1e-9) + _SMALLEST
            return 0.0, max(upper, self._add_ceiling(epsilon, _SMALLEST, tilts))
        remove = Inversion(self.releases, epsilon, tilt, tilts, self.accuracy)
        low, high = remove.value(epsilon)
        enough = max(low, 1e-6 * high)
        if (ceiling := self._add_ceiling(epsilon, enough, tilts)) <= enough:
            return low, max(high, ceiling)
        add = _Add(self.releases, epsilon, tilts, self.accuracy)
        other_low, other_high = add.value(epsilon)
        return max(low, other_low), max(high, other_high)

    def _epsilon(self, delta: float, tilts: Tilts) -> Bound:
        tilt, start = tilts.for_delta(math.log(delta))
        bound = Bound(0.0, math.inf)
        for _ in range(4):
            remove, start = self._remove(start, tilt, tilts)
            tilt = remove.tilt
            bound = bound.intersection(_crossing(remove.value, delta, start))
            # Once more with the line laid for the answer, where that is far from the first guess.
            answer = bound.upper if bound.upper < math.inf else 0.9 * start
            if abs((start - answer) * (tilt - 1.0)) <= 1.0:
                break
            start, tilt = answer, tilts.for_loss(answer)
        epsilon = bound.lower
        if self._add_ceiling(epsilon, delta, tilts) <= delta:
            return bound
        add = _Add(self.releases, epsilon, tilts, self.accuracy)
        if add.value(epsilon)[1] <= delta:
            return bound
        return Bound.largest((bound, _crossing(add.value, delta, epsilon)))

    def _remove(self, start: float, tilt: float, tilts: Tilts) -> tuple[Inversion, float]:
        """Returns the sum for `start`, or for the first point below whose sum is short enough."""
        for _ in range(5):
            try:
                return Inversion(self.releases, start, tilt, tilts, self.accuracy), start
            except NotInvertibleError:
                start *= 0.6
                tilt = tilts.for_loss(start)
        return Inversion(self.releases, start, tilt, tilts, self.accuracy), start

    def _add_ceiling(self, epsilon: float, enough: float, tilts: Tilts) -> float:
        """Bounds H_epsilon(Q || P) by Chernoff's bound at a tilt where that is <= `enough`, if any.

        X >= 1 - q: beyond the log of its inverse, `count` times, they have no loss by themselves.
        """
        alone = self.releases.release == math.inf
        if alone and epsilon > -self.releases.count * math.log1p(-self.releases.sampling_prob) * (
            1.0 + 1e-12
        ):
            return 0.0
        if enough <= 0.0:
            return 1.0
        candidates = -np.exp(np.linspace(-11.0, 40.0, 103))
        logs = epsilon + log_peak(candidates) + tilts.log_powers(candidates)
        logs += (candidates - 1.0) * epsilon
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
        tilt = tilts.for_loss(-epsilon)
        self.inversion = Inversion(releases, -epsilon, tilt, tilts, accuracy)

    def value(self, epsilon: float) -> tuple[float, float]:
        return self.inversion.value(-epsilon, epsilon)


def _crossing(value: Callable[[float], tuple[float, float]], delta: float, start: float) -> Bound:
    """Bounds the point, near `start`, at which a curve between two bounds falls to `delta`."""
    question = Question("epsilon", delta)
    upper = question.upper_end(lambda epsilon: value(epsilon)[1], start=max(start, 0.0))
    distance = 1e-13 * upper
    while distance < upper < math.inf:
        if value(upper - distance)[0] > delta:
            return Bound(upper - distance, upper)
        distance *= 3.0
    return Bound(0.0, upper)
