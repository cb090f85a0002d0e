"""What an example does to the sum of a batch, seen in releases of the program that trains.

Under noise far below C a release is the sum. Two examples lie in turn in all places of the batch;
who takes part differs from release to release. What is compared, why that decides, and how far
rounding moves it: docs/explanation/audit-of-sums.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from dpsgd.audit.probe import Probe
from dpsgd.audit.report import CheckResult
from dpsgd.audit.runtime.scales import loud, quiet, scales_check
from dpsgd.core.mechanism import Mechanism
from dpsgd.engine.loop import repeats_exactly

SINGLE = "an example moves the sum by at most C"
HUGE = "huge examples move the sum by at most C each"
ROWS = "the rows that are drawn are those that are read"
BOUNDARY = "an example just above C is clipped"
LOWER = "a lower C clips to it"
PLACES = "an example is clipped wherever it lies"
ONE_BY_ONE = "examples are clipped one by one: sums add up"
ADDS_UP = "sums over different rows add up"
UNCLIPPED = f"{ADDS_UP}, unclipped"
NEIGHBOURS = "neighbours of a full batch differ by at most C"
PADDING = "padding is inert"
NAN = "a NaN example moves the sum by at most C"
OF_CLIPPED = LOWER, PLACES, ONE_BY_ONE, NEIGHBOURS, PADDING, NAN

LARGE = 2**22
"""Coordinates of a model of which fewer releases are looked at: they cost seconds."""

_UNIT = 2.0**-24  # roundoff of float32
_RELATIVE = 1e-3  # of C: what an example's own arithmetic may add, over a sequence for example
_SINGLES = 4  # examples whose contribution is measured alone
_MOST_PARTS = 8  # into which the places of a batch are divided
_REACH = 8.5  # how far the norm of noise exceeds the root of its size
_NEGLIGIBLE = 2.0**-20  # of C: noise of this norm need not cancel
_RAISED = range(0, 36, 5)  # C times 2 to the power of these is tried for one that clips nothing
_MEDIUM = 2**17  # coordinates of a model that is looked at unclipped
_ABOVE_ALL = 8.0  # times the norm of an example, a C that leaves about all examples as they are
_ABOVE = 2.0**-9, 2.0**-7, 2.0**-4, 0.5  # by how much norms exceed C that are looked at
_PASS = 2**15  # coordinates that are looked at together, in a core's cache
_TINY = 2.0**-80  # norms below it are computed in float64

Release = list[np.ndarray]


def sum_checks(probe: Probe) -> list[CheckResult]:
    """Checks what an example, padding and a NaN example can do to a step's sum."""
    mechanism = probe.mechanism
    given = scales_check([mechanism, quiet(mechanism), loud(mechanism)])
    if not given.passed:
        return [given]
    sums = _Sums(probe, quiet(mechanism))
    norms, first = _singles(sums)
    *_, b, a = 0, *sorted(range(len(norms)), key=lambda unit: norms[unit])
    allowed = sums.clip * (1 + _RELATIVE) + sums.slack(1, 0)
    rows_check = _rows_check(sums, first)
    del first  # of large models one release is held while another one is made
    size, boundary = _boundary_check(probe, a)
    checks = [
        given,
        _at_most(SINGLE, max(norms), allowed),
        _huge_check(sums),
        rows_check,
        boundary,
        _additivity_check(sums, ADDS_UP),
    ]
    if size and sum(probe.sizes) <= _MEDIUM:
        raised = quiet(mechanism, _ABOVE_ALL * size)
        checks.append(_additivity_check(_Sums(probe, raised), UNCLIPPED))
    least, why = norms[b], "the generated rows have gradients that are zero"
    quieter = mechanism
    if 0 < least < math.inf:
        quieter = quiet(mechanism, min(sums.clip, least) / 2)
        why = "no C is small enough to clip the generated rows"
    if quieter is mechanism:
        return checks + _not_made(OF_CLIPPED, why)
    del sums
    return checks + _Clipped(probe, quieter, a, b).checks()


class _Sums:
    """Releases of the first step, under one C and little noise."""

    def __init__(self, probe: Probe, mechanism: Mechanism):
        self.probe, self.mechanism, self.clip = probe, mechanism, mechanism.l2_clip_norm
        self._unit = max(map(_unit, probe.dtypes))
        stddev, size = mechanism.noise_multiplier * self.clip, sum(probe.sizes)
        self._noise = self._left = 16 * stddev * (math.sqrt(size) + _REACH)
        self.empty: Release | None = None
        if self._noise > self.clip * _NEGLIGIBLE:
            deferred = sum(probe.sizes[k] for k in probe.tables)
            of_rows = stddev * (math.sqrt(deferred) + _REACH) if deferred else 0.0
            self.empty = probe.release((), mechanism)
            self._noise = self.norm((1, self.empty)) + of_rows
            self._left = stddev * 2.0**-18 * math.sqrt(size) + of_rows

    def norm(self, *terms: tuple[int, Release | None]) -> float:
        """Returns the norm of a combination of sums."""
        some = [(factor, release) for factor, release in terms if release is not None]
        return norm(*some) * self.probe.mechanism.sampler.expected_batch_size

    def release(self, members: Any, **where: Any) -> Release:
        return self.probe.release(members, self.mechanism, **where)

    def moved(self, release: Release) -> float:
        """Returns the norm of what the members of a batch add up to, 0 where noise hides it."""
        found = self.norm((1, release), (-1, self.empty))
        return 0.0 if found <= self._noise and self.empty is None else found

    def slack(self, *members: int) -> float:
        """Bounds the rounding in a combination of releases of so many members each."""
        clip, unit = self.clip, 4 * _UNIT + self._unit
        return sum(
            unit * (m * clip + self._noise) + self._left + m**2 * _UNIT * clip for m in members
        )


def _singles(sums: _Sums) -> tuple[list[float], Release]:
    """Returns the norms of examples in batches of their own, and the release of the first."""
    probe, norms = sums.probe, []
    last = probe.places - 1
    places = [0, last, last // 2, min(last, last // 2 + 1)]
    first = sums.release([0], at=places[:1])
    norms = [sums.moved(first)]
    for unit, place in zip(range(1, min(_SINGLES, probe.units)), places[1:], strict=False):
        norms.append(sums.moved(sums.release([unit], at=[place])))
        if sum(probe.sizes) > LARGE and sum(size > 0 for size in norms) > 1:
            break
    return norms, first


def _boundary_check(probe: Probe, unit: int) -> tuple[float, CheckResult]:
    """Checks that an example is clipped whose gradient's norm is above C by little, or by half.

    C is raised until it leaves the gradient as it is, whose norm is then known.

    Returns:
      That norm, or 0 where it is not found, and the check.
    """

    def single(clip: float) -> tuple[float, float]:
        """Returns the norm of what the example adds under this C, and the rounding in it."""
        raised = quiet(probe.mechanism, clip)
        if raised.l2_clip_norm != clip:
            return math.inf, math.inf
        sums = _Sums(probe, raised)
        return sums.moved(sums.release([unit], at=[0])), sums.slack(1, 0)

    raised = (probe.mechanism.l2_clip_norm * 2.0**k for k in _RAISED)
    sizes = ((single(clip)[0], clip) for clip in raised)
    size = next((size for size, clip in sizes if 0 <= size <= clip / 2), 0.0)
    if not size:
        why = "no C was found that leaves a gradient as it is"
        return 0.0, CheckResult.skipped(BOUNDARY, why)
    above = _ABOVE[::2] + _ABOVE[-1:] if sum(probe.sizes) > LARGE else _ABOVE
    excess, seen = -math.inf, 0
    for part in above:
        clip = size / (1 + part)
        found, slack = single(clip)
        if slack <= clip * part / 2:  # of less, rounding hides whether it is clipped
            excess, seen = max(excess, (found - slack) / clip - 1), seen + 1
    detail = f"{seen} of {len(above)} norms from {min(above):.2g} above C, {excess:+.2g} C at most"
    if not seen:
        return size, CheckResult.skipped(BOUNDARY, "rounding hides whether they are")
    return size, CheckResult(BOUNDARY, excess <= _RELATIVE, detail)


def _additivity_check(sums: _Sums, name: str) -> CheckResult:
    """Checks that what some rows add depends on no other rows: S(A) + S(B) = S(A and B).

    All rows differ, and so do the rows of tables that they look up. Each lies in one place of the
    batch in all releases.
    """
    probe = sums.probe
    count = min(probe.units, probe.places)
    if count < 2:
        return CheckResult.skipped(name, "a batch has one row")
    at = np.random.default_rng(1).permutation(probe.places)[:count]
    halves = np.array_split(np.arange(count), 2)
    one, other = (sums.release(half, at=at[half]) for half in halves)
    added = _sum_of_leaves(one, other)
    off = sums.norm((1, sums.release(np.arange(count), at=at)), (-1, added), (1, sums.empty))
    return _at_most(name, off, sums.slack(count, *map(len, halves), 0))


def _huge_check(sums: _Sums) -> CheckResult:
    """Checks examples whose gradients, or the squares of these, are beyond what float32 holds."""
    members = list(sums.probe.huge)[: sums.probe.places]
    if not members:
        why = "rows have no floats" if sums.probe.nan is None else "there is no room for more rows"
        return CheckResult.skipped(HUGE, why)
    count = len(members)
    together = sums.release(members, at=np.arange(count))
    allowed = count * sums.clip * (1 + _RELATIVE) + sums.slack(count, 0)
    return _at_most(HUGE, sums.moved(together), allowed)


def _rows_check(sums: _Sums, first: Release) -> CheckResult:
    """Checks that the program reads the rows that it is told, wherever in the data they lie.

    Else the sampler's law would be that of other rows. Copies of one example in rows far apart add
    as much each; another row adds something else, which is about as long. How far equal rows may
    differ in their own arithmetic is not proved: half of a gradient is far more.
    """
    probe, size = sums.probe, sums.moved(first)
    copies = list(probe.copies)[-probe.places :]
    if probe.algorithm.takes_key or not copies or not 0 < size < math.inf:
        why = "the loss takes a key" if probe.algorithm.takes_key else "there is no room for copies"
        return CheckResult.skipped(ROWS, why if copies else "there is no room for copies")
    together = sums.release(copies, at=np.arange(len(copies)))
    count = len(copies)
    off = sums.norm((1, together), (-count, first), (count - 1, sums.empty))
    return _at_most(ROWS, off, size / 2 + count * sums.slack(1, 0))


class _Clipped(_Sums):
    """Batches of two examples a and b in turn, both of which C clips."""

    def __init__(self, probe: Probe, mechanism: Mechanism, a: int, b: int):
        super().__init__(probe, mechanism)
        self.turns = np.where(np.arange(probe.places) % 2, b, a)
        self.together = 1  # that may have a gradient at a time: rounding stays below C / 4
        while self.together < probe.places and (
            self.slack(2 * self.together, self.together, self.together, 0) <= self.clip / 4
        ):
            self.together *= 2

    def sum_of(self, places: np.ndarray, padding: Any = None, poisoned: Any = ()) -> Release:
        """Returns the release of what lies in `places`; poison in others may take part as well."""
        members, at = self.turns[places], places
        if len(poisoned):
            at = np.concatenate([places, poisoned])
            members = np.concatenate([members, np.full(len(poisoned), self.probe.nan)])
        return self.release(members, at=at, padding=self.turns if padding is None else padding)

    def checks(self) -> list[CheckResult]:
        """Returns all checks, in the order of `OF_CLIPPED`."""
        probe, clip = self.probe, self.clip
        if self.slack(2, 1, 1, 0) > clip / 4:
            return _not_made(OF_CLIPPED, "rounding hides what a single example adds")
        few, every = sum(probe.sizes) > LARGE, np.arange(probe.places)
        ends = [every[-1:]] if few else [every[:1], every[-1:]]
        singles = [self.moved(self.sum_of(end)) for end in ends]
        checks = [_at_most(LOWER, max(singles), clip * (1 + _RELATIVE) + self.slack(1, 0))]

        parts = _parts(every, self.together)
        looked_at = parts[:1] + [parts[k] for k in _spread(1, len(parts), _MOST_PARTS)]
        single = max(clip, min(singles))  # with what an example's own arithmetic errs by
        excess, first = -math.inf, None
        for part in looked_at:
            others = self._poisoned(np.setdiff1d(every, part))
            halves = [part[part % 2 == parity] for parity in (0, 1)]
            added: Release | None = None  # of large models one release is held at a time
            for half in halves:
                release = self.sum_of(half, poisoned=others)
                allowed = half.size * single + self.slack(half.size, 0)
                excess = max(excess, self.moved(release) - allowed)
                if first is None and added is not None:
                    release = _sum_of_leaves(release, added)
                added = release if first is None else None
                del release
            first = first or (part, others, halves, added)
        assert first is not None
        checks.append(self._place_check(excess, sum(map(len, looked_at))))

        part, others, halves, added = first
        del first
        whole = self.sum_of(part, poisoned=others)
        slack = self.slack(part.size, part.size, halves[0].size, halves[1].size, 0)
        off = self.norm((1, whole), (-1, added), (1, self.empty))
        checks.append(_at_most(ONE_BY_ONE, off, slack))
        del added

        # The neighbour's example has no gradient, as its floats are NaN; or does not take part.
        changed = 0.0
        for end in ends:
            poisoned = np.union1d(others, self._poisoned(end)).astype(np.int64)
            without = self.sum_of(np.setdiff1d(part, end), poisoned=poisoned)
            changed = max(changed, self.norm((1, whole), (-1, without)))
            del without
        slack = self.slack(part.size, part.size - 1)
        checks.append(_at_most(NEIGHBOURS, changed, clip * (1 + _RELATIVE) + slack))
        del whole
        free, taken = halves
        return [*checks, *self._uncounted(free, taken, others)]

    def _poisoned(self, places: np.ndarray) -> np.ndarray:
        return places if self.probe.poison is not None else places[:0]

    def _place_check(self, excess: float, seen: int) -> CheckResult:
        places = self.probe.places
        detail = f"{seen:,} of {places:,} places, {excess / self.clip:+.2g} C beyond what may be"
        if excess > 0 or seen == places:
            return CheckResult(PLACES, excess <= 0, detail)
        why = f"{detail}: rounding hides an example among more than {self.together:,} at a time"
        return CheckResult.skipped(PLACES, why)

    def _uncounted(
        self, free: np.ndarray, taken: np.ndarray, others: np.ndarray
    ) -> list[CheckResult]:
        """Checks what does not count: rows under weight 0, and those whose gradients are NaN.

        Args:
          free: Places where that is, the first of the batch included.
          taken: Places of examples that take part.
          others: Places of NaN examples that do.
        """
        nan = self.probe.nan
        if not taken.size:
            return _not_made((PADDING, NAN), "the batch has one place")
        release = self.sum_of(taken, poisoned=others)
        padding = np.full(self.probe.places, nan or 0)
        padding[free[1::2]] = 0
        slack = self.slack(taken.size, taken.size)
        other = self.sum_of(taken, padding, poisoned=others)
        checks = [self._padding_check(release, other, slack)]
        del other
        if nan is None:
            return [*checks, CheckResult.skipped(NAN, "rows have no floats")]
        # One may move the sum by C, and any number of those whose gradient is NaN by nothing.
        added = free if self.probe.poison is not None else free[:1]
        other = self.sum_of(taken, poisoned=np.concatenate([others, added]))
        moved = self.norm((1, release), (-1, other))
        return [*checks, _at_most(NAN, moved, self.clip * (1 + _RELATIVE) + slack)]

    def _padding_check(self, release: Release, other: Release, slack: float) -> CheckResult:
        """Checks that releases are one whatever lies under weight 0: to the bit, if bits repeat.

        Where atomic additions come in any order, equal steps differ by rounding, and so may these:
        by far less than a row that counts.
        """
        if repeats_exactly():
            same = all(map(same_bits, release, other))
            changed = "left the release bit-equal" if same else "changed the release"
            return CheckResult(PADDING, same, f"other rows under weight 0 {changed}")
        moved = self.norm((1, release), (-1, other))
        detail = f"other rows under weight 0 move the release by {moved:.3g} of {slack:.3g} allowed"
        return CheckResult(PADDING, moved <= slack, detail)  # the distance of NaN is infinite


def _parts(every: np.ndarray, together: int) -> list[np.ndarray]:
    """Divides the places into parts, the first of which has both ends of the batch."""
    if every.size <= together:
        return [every]
    half = max(1, together // 2)
    ends = np.concatenate([every[:half], every[-half:]])
    middle = every[half:-half]
    return [ends, *(middle[k : k + together] for k in range(0, middle.size, together))]


def _spread(start: int, stop: int, most: int) -> list[int]:
    """Returns at most `most` of the numbers of a range, from its first to its last."""
    numbers = np.linspace(start, stop - 1, most).astype(int).tolist()
    return sorted(set(numbers)) if stop > start else []


def _not_made(names: Sequence[str], why: str) -> list[CheckResult]:
    return [CheckResult.skipped(name, why) for name in names]


def _at_most(name: str, found: float, allowed: float) -> CheckResult:
    return CheckResult(name, found <= allowed, f"{found:.6g} of {allowed:.6g} allowed")


def _unit(dtype: np.dtype) -> float:
    """Returns the unit roundoff of a type into which float32 is cast; 0 for itself."""
    return 0.0 if dtype == np.float32 else float(jnp.finfo(dtype).eps) / 2


def norm(*terms: tuple[int, Release]) -> float:
    """Returns the norm of a combination of releases to 2^-13 of it; infinity for NaN."""
    square = 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        for leaves in zip(*(release for _, release in terms), strict=True):
            for start in range(0, leaves[0].size, _PASS):
                some = [leaf[start : start + _PASS] for leaf in leaves]
                part = _combined(terms, some, np.float32)
                found = float(part @ part)
                if not (_TINY**2 < found < math.inf):
                    part = _combined(terms, some, np.float64)
                    found = float(part @ part)
                square += found
    return math.sqrt(square) if math.isfinite(square) else math.inf


def _combined(terms: Sequence[tuple[int, Any]], leaves: list[np.ndarray], dtype: Any) -> np.ndarray:
    total = terms[0][0] * leaves[0].astype(dtype)
    for (factor, _), leaf in zip(terms[1:], leaves[1:], strict=True):
        total += factor * leaf.astype(dtype, copy=False)
    return total


def _sum_of_leaves(one: Release, other: Release) -> Release:
    """Returns the sum of two releases, which are given away: leaf after leaf."""
    return [one.pop(0) + other.pop(0) for _ in range(len(one))]


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays are one to the bit."""
    return a.dtype == b.dtype and np.array_equal(a.view(np.uint8), b.view(np.uint8))
