"""The noise of the program that trains, compared with what key, step and place give.

A sum is known where a batch is empty, where C is far below the noise, and where it cancels in two
releases of one batch under different keys: then releases are the noise, coordinate by coordinate.
sigma and C are those of the configuration. A matrix M that a noise states must be the one that is
priced.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np

from dpsgd.audit.probe import Probe
from dpsgd.audit.report import CheckResult
from dpsgd.audit.runtime.expected import PADDED, Comparison, ExpectedNoise, cast_of
from dpsgd.audit.runtime.scales import noise_dominated, noise_stddev
from dpsgd.audit.runtime.sums import LARGE
from dpsgd.core.mechanism import Mechanism
from dpsgd.engine.loop import repeats_exactly
from dpsgd.noise.keys import ROOT_BYTES, RootKey

NOISE = "noise is what key, step and place give, in every leaf"
MATRIX = "noise has the bands and the columns that were claimed"
KEYS = "other attempts and roots have other keys"
FULL = "full batches have noise at every C"

_EVERY = 2**19  # coordinates of a release that are compared, where there are more
_FEW = 2**18  # of one of several steps
_COARSE = 2.0**-6  # of the noise, beyond which the sum's own rounding hides it


def noise_checks(probe: Probe) -> list[CheckResult]:
    """Checks the noise of single steps, and what it costs."""
    expected = ExpectedNoise(probe)
    checks = [keys_check(probe.root), _matrix_check(probe, expected)]
    if expected.singular:
        why = "the noise states a matrix M that has no inverse"
        return [*checks, CheckResult(NOISE, False, why)]
    return checks + _Looks(probe, expected).checks()


class _Looks:
    """The looks that are taken at releases of single steps."""

    def __init__(self, probe: Probe, expected: ExpectedNoise):
        self._probe, self._expected = probe, expected
        self._first = probe.first_step
        self._dominated = noise_dominated(probe.mechanism)
        self._found = Comparison(NOISE)
        # Of tables, coordinates of rows that a full batch reads.
        self._read: dict[int, np.ndarray] = {}
        for k, release in enumerate(probe.release(probe.full_batch) if probe.tables else ()):
            if k in probe.tables:
                rows = release.reshape(probe.shapes[k])
                read = np.any(rows, axis=tuple(range(1, rows.ndim)))
                self._read[k] = np.flatnonzero(np.repeat(read, math.prod(rows.shape[1:])))

    def checks(self) -> list[CheckResult]:
        """Returns what was seen, and what could not be looked at."""
        probe, mechanism = self._probe, self._dominated
        left_out = []
        if not self._expected.knows(range(self._first, self._first + 1)):
            why = f"M is no Toeplitz matrix, and looked at up to step {PADDED:,}"
            left_out.append(CheckResult.skipped("noise of the steps to come", why))
            self._first = 0
        if mechanism is None:
            why = f"C = {probe.mechanism.l2_clip_norm:.3g} is next to the least there is"
            left_out.append(CheckResult.skipped(FULL, why))
        else:
            self._look(probe.full_batch, mechanism, self._first, 0, _EVERY)
        unseen = self._look_at_own_scales()
        if unseen:
            names = ", ".join(self._probe.names[k] for k in sorted(unseen)[:3])
            why = f"{names}: the sum leaves no digits"
            name = "noise at full batches and the run's own C"
            left_out.append(CheckResult.skipped(name, why))
        steps = self._steps()
        lazy = bool(probe.tables and mechanism)  # whose rows have noise where they are read
        for number, step in enumerate(steps):
            who = probe.full_batch if lazy else ()
            without = () if lazy else probe.tables
            self._look(who, mechanism if lazy else None, step, number, _FEW, without)
        detail = f"{self._found.compared:,} coordinates, to {self._expected.allowed:.2g} sigma C; "
        detail += f"steps {', '.join(f'{step:,}' for step in steps)}"
        return [self._found.check(detail), *left_out]

    def _scale(self, mechanism: Mechanism) -> np.float64:
        """Returns the inverse of the deviation of a release, which is a mean gradient."""
        b = self._probe.mechanism.sampler.expected_batch_size
        return np.float64(b / noise_stddev(mechanism))

    def _steps(self) -> list[int]:
        """Returns the first step and the last, and two that have all bits that a step may have."""
        end = self._probe.mechanism.sampler.num_steps
        top = 2 ** max(0, (end - 1).bit_length() - 1)
        some = [top - 1, end - 1]
        if sum(self._probe.sizes) <= LARGE:
            some += [self._first, min(top, end - 1)]
        return [step for step in sorted(set(some)) if self._expected.knows(range(step, step + 1))]

    def _look(
        self,
        members: Sequence[int] | np.ndarray,
        mechanism: Mechanism | None,
        step: int,
        attempt: int,
        most: int,
        without: Collection[int] = (),
    ) -> None:
        """Compares the noise of one release, of a batch whose sum is next to 0."""
        of = mechanism or self._probe.mechanism
        release = self._probe.release(members, of, step=step, attempt=attempt)
        scale = self._scale(of)
        where = f"step {step:,} of {'a full' if len(members) else 'an empty'} batch"
        steps = range(step, step + 1)
        for k, places, cast in self._leaves(most, without):
            found = release[k][places] * scale
            (noise,) = self._expected.of(steps, k, places, attempt)
            allowed = self._expected.allowed + cast * np.abs(noise)
            self._found.add(found, noise, allowed, f"{self._probe.names[k]} at {where}", k)

    def _leaves(self, most: int, without: Collection[int]) -> list[tuple[int, np.ndarray, float]]:
        """Returns leaves, the coordinates that are looked at, and the roundoff of their types."""
        probe, found = self._probe, []
        total = sum(probe.sizes)
        for k, (size, dtype) in enumerate(zip(probe.sizes, probe.dtypes, strict=True)):
            share = max(256, most * size // max(1, total))
            places = self._expected.places(k, size if total <= most else share)
            if k in self._read:
                places = np.intersect1d(places, self._read[k])
            if places.size and k not in without:
                found.append((k, places, cast_of(dtype)))
        return found

    def _look_at_own_scales(self) -> set[int]:
        """Compares the noise at the run's own C; returns the leaves where the sum hides it."""
        probe, first = self._probe, self._first
        scale = self._scale(probe.mechanism)
        every = probe.full_batch
        one, other = (probe.release(every, step=first, attempt=g) for g in range(2))
        hidden, steps = set(), range(first, first + 1)
        unit = 2.0**-24 * (1 if repeats_exactly() else probe.places)  # of sums in any order
        for k, places, cast in self._leaves(_EVERY, ()):
            largest = scale * max(float(np.max(np.abs(x[k]), initial=0)) for x in (one, other))
            moved = 4 * largest * max(unit, cast)
            if not moved <= _COARSE:
                hidden.add(k)
                continue
            difference = one[k][places].astype(np.float64) - other[k][places]
            a, b = (self._expected.of(steps, k, places, g)[0] for g in range(2))
            allowed = 2 * self._expected.allowed + moved
            where = f"{self._probe.names[k]} of a full batch at the run's own C"
            self._found.add(difference * scale, a - b, allowed, where, k)
        del one, other
        if hidden and probe.poison is not None:  # whose gradients count as 0
            members = np.full(probe.places, probe.poison)
            shown = set(range(len(self._probe.names))) - hidden | set(probe.tables)
            self._look(members, None, first, 0, _EVERY, without=shown)
            hidden &= set(probe.tables)  # whose rows that batch does not read
        return hidden


def _matrix_check(probe: Probe, expected: ExpectedNoise) -> CheckResult:
    """Checks that M, the inverse of which makes the noise of z, is one whose cost is priced.

    The noise states M itself: without this, half of the noise would be that of M = 2, and noise of
    two bands pass for independent noise.
    """
    matrix, noise = expected.start, probe.mechanism.noise
    longest = float(np.sqrt(np.max(np.sum(np.square(matrix), axis=0))))
    passed = (
        longest <= 1 + 1e-9
        and not np.triu(matrix, 1).any()
        and not np.tril(matrix, -noise.bands).any()
        and noise.bands <= probe.mechanism.sampler.separation
    )
    reach = int(np.max(np.subtract(*np.nonzero(matrix)), initial=0)) + 1
    bands = min(noise.bands, len(matrix))
    detail = f"{reach} of {bands} bands, columns of norm {longest:.6g} of 1 allowed"
    return CheckResult(MATRIX, bool(passed), detail)


def keys_check(root: RootKey) -> CheckResult:
    """Checks that another attempt or root gives other keys; programs are seen to heed them.

    Among the roots are 0 and those that have one bit: each bit of a root must count.
    """
    attempts = [*range(16), *(2**k for k in range(4, 64))]
    bits = [0, *(1 << k for k in range(8 * ROOT_BYTES))]
    roots = [RootKey(bit.to_bytes(ROOT_BYTES, "little"), insecure=False) for bit in bits]
    of = [(root, attempt) for attempt in attempts] + [(other, 0) for other in roots]
    distinct = min(
        len({one.noise_key(attempt).tobytes() for one, attempt in of}),
        len({one.sampling_seed(attempt) for one, attempt in of}),
    )
    return CheckResult(KEYS, distinct == len(of), f"{distinct} of {len(of)}")
