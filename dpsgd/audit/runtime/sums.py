"""What an example does to the sum of a batch, seen in releases of the program that trains.

Write S(A) for the sum over the members A of a batch. Two releases of one step have the same noise,
which is made far smaller than C, so their difference is S(A) - S(B) up to rounding. C and sigma are
arguments of the program: they are read from the configuration here, handed over as training does,
by `Mechanism.scales`, which is checked, and never read back from there.

**What is compared.** Two examples a and b lie in turn in all places of the batch, and what differs
from release to release is who takes part: every gradient comes from the same arithmetic in all of
them. C is lowered to half of the smaller of their norms: both are clipped, to norm C. Therefore

* ||S(all a) - S({})|| <= C #a, an equality but for rounding: one place anywhere whose example is
  clipped less, or by another's norm, exceeds it by what that example has too much;
* S(all a and b) = S(all a) + S(all b) - S({}): what b adds does not depend on a;
* ||S(all) - S(all but the last)|| <= C, and the same for the first: neighbours of a full batch.

**Rounding.** Let u = 2^-24, and w the unit roundoff of the parameters' type (0 for float32). A sum
of m float32 vectors of norm at most C, added up in any order, errs by (m - 1) u sum_j |x_j| at most
in each coordinate, to first order (Higham, Accuracy and Stability of Numerical Algorithms, section
4.2), hence by at most m^2 u C in norm. Adding noise, dividing by b and multiplying by it again err
by 4 u of the result, and its type by w: (4 u + w)(m C + ||noise||). The noise's grid adds at most a
cell in each of d coordinates, 2^-18 sigma C sqrt(d). Rows of tables whose noise comes late have it
in those releases alone that read them, where it does not cancel: it has norm sigma C |z|, z of e
coordinates of these tables, and Pr[|z| > sqrt(e) + x] <= exp(-x^2 / 2), as |z| is a Lipschitz
function of z: 3e-16 here. `_slack` adds these up over the releases that are combined. So that it
stays below C / 4, some 1,000 members at most have a gradient at a time; where a batch has more
places, NaN examples take part in the others, which add exact zeros, and the examples move through
the batch from release to release.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpsgd.audit.probe import Probe
from dpsgd.audit.report import CheckResult
from dpsgd.core.mechanism import Mechanism
from dpsgd.engine.loop import repeats_exactly

_UNIT = 2.0**-24  # roundoff of float32
_SINGLES = 4  # examples whose contribution is measured alone
_MOST_PARTS = 8  # into which the places of a batch are divided
_REACH = 8.5  # how far the norm of noise exceeds the root of its size
_QUIET = 2.0**-20  # noise multiplier under which sums are seen
_LOUD = 2.0**60  # by which noise exceeds what it is to hide
_PASS = 2**18  # coordinates that are looked at together

Release = list[np.ndarray]


def sum_checks(program: Probe) -> list[CheckResult]:
    """Checks what an example, padding and a poisoned example can do to a step's sum."""
    mechanism = program.mechanism
    quiet = _quiet(mechanism)
    given = _scales_check([mechanism, quiet, loud(mechanism)])
    if not given.passed:
        return [given]
    checks, norms = _singles(program, quiet)
    seen = sorted(range(len(norms)), key=lambda unit: norms[unit])[-2:]
    checks.append(_boundary_check(program, seen[-1]))
    least = norms[seen[0]]
    lower = min(mechanism.l2_clip_norm, least) / 2
    if not 0 < least < math.inf:
        checks += _not_made(_OF_CLIPPED, _NO_GRADIENTS)
    elif (quiet := _quiet(mechanism, lower)) is mechanism:
        checks += _not_made(_OF_CLIPPED, "no C is small enough to clip the generated rows")
    else:
        checks += _Clipped(program, quiet, seen[-1], seen[0]).checks()
    return [given, *checks, _batch_free(program)]


def _singles(program: Probe, quiet: Mechanism) -> tuple[list[CheckResult], list[float]]:
    """Checks examples in batches of their own, and returns their norms."""
    clip, last = quiet.l2_clip_norm, program.places - 1
    places = [0, last, last // 2, min(last, last // 2 + 1)]
    nobody = program.release((), quiet)
    first = program.release([0], quiet, at=places[:1])
    norms = [norm((1, first), (-1, nobody))]
    for unit, place in zip(range(1, min(_SINGLES, program.units)), places[1:], strict=False):
        norms.append(norm((1, program.release([unit], quiet, at=[place])), (-1, nobody)))
    allowed = clip * (1 + _RELATIVE) + _slack(program, quiet, nobody, 1, 0)
    single = _at_most("an example moves the sum by at most C", max(norms), allowed)
    return [
        single,
        _huge_check(program, quiet, nobody),
        _rows_check(program, quiet, nobody, first),
    ], norms


def _boundary_check(program: Probe, unit: int) -> CheckResult:
    """Checks that an example is clipped whose gradient's norm is above C by little, or by half.

    C is raised until it leaves the gradient as it is, whose norm is then known.
    """

    def single(clip: float) -> tuple[float, float]:
        """Returns the norm of what the example adds under this C, and the rounding in it."""
        quiet = _quiet(program.mechanism, clip)
        if quiet.l2_clip_norm != clip:
            return math.inf, math.inf
        nobody = program.release((), quiet)
        added = norm((1, program.release([unit], quiet, at=[0])), (-1, nobody))
        return added, _slack(program, quiet, nobody, 1, 0)

    raised = (program.mechanism.l2_clip_norm * 2.0**k for k in _RAISED)
    size = next((size for clip in raised if 0 <= (size := single(clip)[0]) <= clip / 2), 0.0)
    if not size:
        return _not_made((_BOUNDARY,), "no C was found that leaves a gradient as it is")[0]
    excess, seen = -math.inf, 0
    for above in _ABOVE:
        clip = size / (1 + above)
        found, slack = single(clip)
        if slack <= clip * above / 2:  # of less, rounding hides whether it is clipped
            excess, seen = max(excess, (found - slack) / clip - 1), seen + 1
    detail = (
        f"{seen} of {len(_ABOVE)} norms from {min(_ABOVE):.2g} above C, {excess:+.2g} C at most"
    )
    if not seen:
        return _not_made((_BOUNDARY,), "rounding hides whether they are")[0]
    return CheckResult(_BOUNDARY, excess <= _RELATIVE, detail)


def _huge_check(program: Probe, quiet: Mechanism, nobody: Release) -> CheckResult:
    """Checks examples whose gradients, or the squares of these, are beyond what float32 holds."""
    members = list(program.huge)[: program.places]
    if not members:
        why = "rows have no floats" if program.nan is None else "there is no room for more rows"
        return _not_made((_HUGE,), why)[0]
    count, clip = len(members), quiet.l2_clip_norm
    together = program.release(members, quiet, at=np.arange(count))
    allowed = count * clip * (1 + _RELATIVE) + _slack(program, quiet, nobody, count, 0)
    return _at_most(_HUGE, norm((1, together), (-1, nobody)), allowed)


def _rows_check(program: Probe, quiet: Mechanism, nobody: Release, first: Release) -> CheckResult:
    """Checks that the program reads the rows that it is told, wherever in the data they lie.

    Else the sampler's law would be that of other rows. Copies of one example in rows far apart add
    as much each; another row adds something else, which is about as long. How far equal rows may
    differ in their own arithmetic is not proved: half of a gradient is far more.
    """
    copies = list(program.copies)[-program.places :]
    size = norm((1, first), (-1, nobody))
    if program.algorithm.takes_key or not copies or not 0 < size < math.inf:
        why = "no two examples are alike" if size else _NO_GRADIENTS
        return _not_made((_ROWS,), why)[0]
    at = np.linspace(0, program.places - 1, len(copies)).astype(int)
    together, count = program.release(copies, quiet, at=at), len(copies)
    off = norm((1, together), (-count, first), (count - 1, nobody))
    slack = count * _slack(program, quiet, nobody, 1, 0)
    return _at_most(_ROWS, off, size / 2 + slack)


_RELATIVE = 1e-3
"""Of C: what an example's own arithmetic may add, over a sequence for example."""

_RAISED = range(0, 36, 5)
"""C times 2 to the power of these is tried for one that clips nothing."""
_ABOVE = 2.0**-9, 2.0**-7, 2.0**-4, 0.5
"""By how much norms exceed C that are looked at: by more than an example's own arithmetic errs."""

_NO_GRADIENTS = "the generated rows have gradients that are zero"

_BOUNDARY = "an example just above C is clipped"
_HUGE = "huge examples move the sum by at most C each"
_ROWS = "the rows that are drawn are those that are read"
_LOWER = "a lower C clips to it"
_PLACES = "an example is clipped wherever it lies"
_ONE_BY_ONE = "examples are clipped one by one: sums add up"
_NEIGHBOURS = "neighbours of a full batch differ by at most C"
_PADDING = "padding is inert"
_NAN = "a NaN example moves the sum by at most C"
_OF_CLIPPED = _LOWER, _PLACES, _ONE_BY_ONE, _NEIGHBOURS, _PADDING, _NAN


class _Clipped:
    """Batches of two examples a and b in turn, both of which C clips."""

    def __init__(self, program: Probe, quiet: Mechanism, a: int, b: int):
        self.program, self.quiet = program, quiet
        self.turns = np.where(np.arange(program.places) % 2, b, a)
        self.nobody = program.release((), quiet)
        self.clip = quiet.l2_clip_norm
        self.single = self.clip  # of norm that one adds, with what its own arithmetic errs by
        self.together = self._most_together()

    def _most_together(self) -> int:
        """Returns how many may have a gradient at a time, so that rounding stays below C / 4."""
        most = 1
        while most < self.program.places and self._slack(2 * most, most, most, 0) <= self.clip / 4:
            most *= 2
        if (grid := self.quiet.scales().grid) is not None:  # of integers that hold so many
            most = min(most, int(2.0**30 * float(grid.spacing) / self.clip))
        return most

    def _slack(self, *members: int) -> float:
        return _slack(self.program, self.quiet, self.nobody, *members)

    def release(self, places: np.ndarray, padding: int | None = None, poisoned=()) -> Release:
        """Returns the release of what lies in `places`; poison in others may take part as well."""
        members, at = self.turns[places], places
        if len(poisoned):
            at = np.concatenate([places, poisoned])
            members = np.concatenate([members, np.full(len(poisoned), self.program.nan)])
        lying = self.turns if padding is None else padding
        return self.program.release(members, self.quiet, at=at, padding=lying)

    def moved(self, release: Release) -> float:
        """Returns the norm of what the members of a batch add up to."""
        return norm((1, release), (-1, self.nobody))

    def checks(self) -> list[CheckResult]:
        """Returns all checks, in the order of `_OF_CLIPPED`."""
        program, clip = self.program, self.clip
        if self._slack(2, 1, 1, 0) > clip / 4:
            return _not_made(_OF_CLIPPED, "rounding hides what a single example adds")
        every = np.arange(program.places)
        ends = [every[:1], every[-1:]]
        singles = [self.moved(self.release(end)) for end in ends]
        self.single = max(clip, min(singles))
        checks = [_at_most(_LOWER, max(singles), clip * (1 + _RELATIVE) + self._slack(1, 0))]

        parts = _parts(every, self.together)
        looked_at = parts[:1] + [parts[k] for k in _spread(1, len(parts), _MOST_PARTS)]
        excess, first = -math.inf, None
        for part in looked_at:
            others = self._poisoned(np.setdiff1d(every, part))
            halves = [part[part % 2 == parity] for parity in (0, 1)]
            sums = [self.release(half, poisoned=others) for half in halves]
            for half, release in zip(halves, sums, strict=True):
                allowed = half.size * self.single + self._slack(half.size, 0)
                excess = max(excess, self.moved(release) - allowed)
            first = first or (part, others, halves, sums)
        assert first is not None
        checks.append(self._place_check(excess, sum(map(len, looked_at))))

        part, others, halves, sums = first
        everybody = self.release(part, poisoned=others)
        off = norm((1, everybody), (-1, sums[0]), (-1, sums[1]), (1, self.nobody))
        slack = self._slack(part.size, halves[0].size, halves[1].size, 0)
        checks.append(_at_most(_ONE_BY_ONE, off, slack))

        # The neighbour's example has no gradient, as its floats are NaN; or does not take part.
        without = [
            self.release(np.setdiff1d(part, end), poisoned=np.union1d(others, self._poisoned(end)))
            for end in ends
        ]
        changed = max(norm((1, everybody), (-1, release)) for release in without)
        slack = self._slack(part.size, part.size - 1)
        checks.append(_at_most(_NEIGHBOURS, changed, clip * (1 + _RELATIVE) + slack))
        del everybody, without
        return [*checks, *self._hidden(halves[0], halves[1], others, sums[1])]

    def _poisoned(self, places: np.ndarray) -> np.ndarray:
        return places if self.program.poison is not None else places[:0]

    def _place_check(self, excess: float, seen: int) -> CheckResult:
        places = self.program.places
        detail = f"{seen:,} of {places:,} places, {excess / self.clip:+.2g} C beyond what may be"
        if excess > 0 or seen == places:
            return CheckResult(_PLACES, excess <= 0, detail)
        why = f"{detail}: rounding hides an example among more than {self.together:,} at a time"
        return CheckResult(_PLACES, True, why, made=False)

    def _hidden(
        self, free: np.ndarray, taken: np.ndarray, others: np.ndarray, release: Release
    ) -> list[CheckResult]:
        """Checks what does not count: rows under weight 0, and those whose gradients are NaN.

        Args:
          free: Places where that is, the first of the batch included.
          taken: Places of examples that take part.
          others: Places of NaN examples that do.
          release: Of these.
        """
        nan = self.program.nan
        if not taken.size:
            return _not_made((_PADDING, _NAN), "the batch has one place")
        lying = [0] if nan is None else [0, nan]
        slack = self._slack(taken.size, taken.size)
        same, moved = True, 0.0
        for padding in lying:
            other = self.release(taken, padding, poisoned=others)
            same &= all(map(same_bits, release, other))
            moved = max(moved, norm((1, release), (-1, other)))
        checks = [_padding_check(same, moved, slack)]
        if nan is None:
            return [*checks, *_not_made((_NAN,), "rows have no floats")]
        # One may move the sum by C, and any number of those whose gradient is NaN by nothing.
        added = free if self.program.poison is not None else free[:1]
        other = self.release(taken, poisoned=np.concatenate([others, added]))
        moved = norm((1, release), (-1, other))
        return [*checks, _at_most(_NAN, moved, self.clip * (1 + _RELATIVE) + slack)]


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


def _padding_check(same: bool, moved: float, slack: float) -> CheckResult:
    """Checks that releases are one whatever lies under weight 0: to the bit, where bits repeat.

    Where atomic additions come in any order, equal steps differ by rounding, and so may these: up
    to `slack`. A row that counts moves the sum by `clip`, and a NaN that gets through without
    bound: both are told from rounding, as `slack` is well below C.
    """
    if repeats_exactly():
        changed = "left the release bit-equal" if same else "changed the release"
        return CheckResult(_PADDING, same, f"other rows under weight 0 {changed}")
    detail = f"other rows under weight 0 move the release by {moved:.3g} of {slack:.3g} allowed"
    return CheckResult(
        _PADDING, moved <= slack, detail
    )  # False for NaN, whose distance is infinite


def _batch_free(program: Probe) -> CheckResult:
    """Checks that what is added to the sum, and what divides it, does not depend on the batch.

    Sums are made so small beside the noise that releases are the noise alone. Batches of one
    example and of as many of its kind as there is room for read the same rows of tables.
    """
    noisy = loud(program.mechanism)
    every = np.arange(program.places)
    pairs = {
        False: [program.release((), noisy), program.release(every % program.units, noisy, at=every)]
    }
    if program.tables:
        pairs[True] = [program.release(every[:size] * 0, noisy) for size in (1, program.places)]
    stddev = noisy.noise_multiplier * noisy.l2_clip_norm
    total, worst = program.places * noisy.l2_clip_norm, 0.0
    for leaf, dtype in enumerate(program.dtypes):
        a, b = (release[leaf] for release in pairs[leaf in program.tables])
        size = norm((1, [a]))
        allowed = total + stddev * 2.0**-18 * math.sqrt(a.size) + 4 * (_UNIT + _unit(dtype)) * size
        worst = max(worst, norm((1, [a]), (-1, [b])) / allowed)
    detail = f"a full batch changes them by {worst:.3g} of what rounding may"
    return CheckResult("noise and divisor do not depend on the batch", worst <= 1, detail)


def _scales_check(mechanisms: Sequence[Mechanism]) -> CheckResult:
    """Compares the numbers that the program is given with those of the configuration."""
    wrong = []
    for mechanism in mechanisms:
        scales, sampler = mechanism.scales(), mechanism.sampler
        clip, b = mechanism.l2_clip_norm, sampler.expected_batch_size
        stddev = mechanism.noise_multiplier * clip
        ratios = {
            "C": (float(scales.l2_clip_norm) / clip, 1 - _UNIT),
            "sigma C": (float(scales.noise_stddev) / stddev, 1 - _UNIT),
            "b": (float(scales.expected_batch_size) / b, 1 - _UNIT),
        }
        room = {name: 4 * _UNIT for name in ratios}
        if (grid := scales.grid) is not None:
            cells, spacing = float(grid.cells), float(grid.spacing)
            most = int(grid.max_square[0]) + 2**32 * int(grid.max_square[1])
            ratios["the grid's sigma C"] = cells * spacing / stddev, 1.0
            room["the grid's sigma C"] = spacing / stddev + 4 * _UNIT
            ratios["the grid's C"] = math.sqrt(most) * spacing / clip, 0.0
            room["the grid's C"] = 1 + 4 * _UNIT
        wrong += [
            f"{name} is {ratio:.4g} times that of the configuration"
            for name, (ratio, least) in ratios.items()
            if not least <= ratio <= least + room[name]
        ]
    detail = wrong[0] if wrong else "C, sigma C and b, as they are given to the program"
    return CheckResult("the program is given the scales of the configuration", not wrong, detail)


def _not_made(names: Sequence[str], why: str) -> list[CheckResult]:
    return [CheckResult(name, True, why, made=False) for name in names]


def _at_most(name: str, found: float, allowed: float) -> CheckResult:
    return CheckResult(name, found <= allowed, f"{found:.6g} of {allowed:.6g} allowed")


def _quiet(mechanism: Mechanism, clip: float | None = None) -> Mechanism:
    """Returns the mechanism with noise far below C; on an exact grid, with as little as it has.

    Args:
      mechanism: Of the run, which is returned where there is no other.
      clip: Another C.
    """
    sigma, clip = mechanism.noise_multiplier, clip or mechanism.l2_clip_norm

    def silenced(k: int) -> dict[str, float]:
        return {"l2_clip_norm": clip, "noise_multiplier": _QUIET * 2.0**k if k < 20 else sigma}

    return _first_valid(mechanism, silenced, range(21))


def loud(mechanism: Mechanism) -> Mechanism:
    """Returns the mechanism with its noise, and a C that is far below."""
    sigma, clip = mechanism.noise_multiplier, mechanism.l2_clip_norm

    def scaled(k: int) -> dict[str, float]:
        factor = _LOUD * 2.0**-k
        return {"noise_multiplier": sigma * factor, "l2_clip_norm": clip / factor}

    return _first_valid(mechanism, scaled, range(0, 60, 5))


def _first_valid(mechanism: Mechanism, changes, tries: range) -> Mechanism:
    for k in tries:
        try:
            return dataclasses.replace(mechanism, **changes(k))
        except ValueError:  # beyond what floats, or the grid, can tell apart
            continue
    return mechanism


def _unit(dtype: np.dtype) -> float:
    """Returns the unit roundoff of a type into which float32 is cast; 0 for itself."""
    return 0.0 if dtype == np.float32 else float(jnp.finfo(dtype).eps) / 2


def _slack(program: Probe, mechanism: Mechanism, nobody: Release, *members: int) -> float:
    """Bounds the rounding in a combination of releases of so many members each."""
    clip, unit = mechanism.l2_clip_norm, max(map(_unit, program.dtypes))
    stddev, late = mechanism.noise_multiplier * clip, sum(program.sizes[k] for k in program.tables)
    cells = stddev * 2.0**-18 * math.sqrt(sum(program.sizes))
    of_rows = stddev * (math.sqrt(late) + _REACH) if late else 0.0
    noise = norm((1, nobody)) + of_rows
    of_each = cells + of_rows
    return sum(
        (4 * _UNIT + unit) * (m * clip + noise) + of_each + m**2 * _UNIT * clip for m in members
    )


def norm(*terms: tuple[int, Release]) -> float:
    """Returns the norm of a combination of releases, in float64; infinity for NaN."""
    square = 0.0
    for leaves in zip(*(release for _, release in terms), strict=True):
        for start in range(0, leaves[0].size, _PASS):
            part = np.zeros(min(_PASS, leaves[0].size - start))
            for (factor, _), leaf in zip(terms, leaves, strict=True):
                part += factor * leaf[start : start + _PASS].astype(np.float64)
            square += float(part @ part)
    return math.sqrt(square) if math.isfinite(square) else math.inf


def flat(array: Any) -> np.ndarray:
    """Returns the entries of an array, on the host; of keys, their words."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return np.ravel(np.asarray(array))


def same_bits(a: Any, b: Any) -> bool:
    """Whether two arrays are one to the bit."""
    a, b = flat(a), flat(b)
    return a.dtype == b.dtype and np.array_equal(a.view(np.uint8), b.view(np.uint8))
