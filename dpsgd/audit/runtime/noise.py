"""The noise of the program that trains, compared with what key, step and place give.

The audit holds the key, so it computes the noise again (`dpsgd.audit.reference`) and compares
releases with it, coordinate by coordinate. A sum is known where a batch is empty, where C is far
below the noise, and where it cancels in two releases of one batch under different keys. sigma and C
are those of the configuration. Releases hold M^-1 z, where the noise states M (`Noise.whiten`),
which must have the bands and columns that are priced. A noise that takes z from a generator of its
own states z too (`Noise.fresh`), whose law is then tested.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from scipy import linalg, special

from dpsgd.audit import reference
from dpsgd.audit.probe import Probe
from dpsgd.audit.report import FALSE_ALARM, Bonferroni, CheckResult
from dpsgd.audit.runtime.normality import (
    Counts,
    Repeats,
    add_cosines,
    add_distribution,
    add_energies,
    add_lags,
    magnitudes,
)
from dpsgd.audit.runtime.sums import loud
from dpsgd.core.mechanism import Mechanism
from dpsgd.engine.loop import repeats_exactly
from dpsgd.noise.keys import ROOT_BYTES, RootKey

NOISE = "noise is what key, step and place give, in every leaf"
MATRIX = "noise has the bands and the columns that were claimed"
KEYS = "other generations and roots have other keys"
FULL = "full batches have noise at every C"
LAW = "noise of another generator is normal and independent"

WATCHED_NOISE = 2.0**-16
"""Standard deviations by which noise may be off: float32 errs by some 2^-20, its grid by 2^-18."""

_EVERY = 2**21  # coordinates of a release that are compared, where there are more
_FEW = 2**18  # of one of several steps
_COARSE = 2.0**-6  # of the noise, beyond which the sum's own rounding hides it
_MATRIX = 256  # steps of which M is looked at
_PADDED = 2**14  # first steps in which a matrix may be any, and not Toeplitz alone
_CELL = 2.0**-18  # of the grid of noise in float32, in standard deviations, at most
_FINE = 2.0**-10  # cells that are so fine that 0 is rare
_DRAWS = 2**17, 2**20  # of z that a noise states, in one array: resolves 1 % of sigma
_OTHERS = 2**13  # in arrays of other keys, steps and leaves


def noise_checks(program: Probe) -> list[CheckResult]:
    """Checks the noise of single steps, what it costs, and the law of z that a noise states."""
    expected = ExpectedNoise(program)
    checks = [keys_check(program.mechanism, program.root), _matrix_check(program, expected)]
    if expected.singular:
        return [
            *checks,
            CheckResult(NOISE, False, "the noise states a matrix M that has no inverse"),
        ]
    return checks + _Looks(program, expected).checks() + expected.law_checks()


class ExpectedNoise:
    """The noise that a program must add, in standard deviations.

    Attributes:
      allowed: How far it may be off, in standard deviations.
      singular: Whether the matrix that the noise states has no inverse: then it is no noise's.
      states: Whether the noise states its z itself.
    """

    def __init__(self, program: Probe):
        self._program, self._noise = program, program.mechanism.noise
        self._end = program.mechanism.sampler.num_steps
        dense = [k for k in range(len(program.sizes)) if k not in program.tables]
        self._number = {k: number for number, k in enumerate(dense)}
        key, scales = self._key(program.mechanism, 0), program.mechanism.scales()
        self.states = self._noise.fresh(key, 0, 0, 1, scales) is not None
        self.start = self._noise.whiten(np.eye(min(self._end, _MATRIX)))
        toeplitz = np.tril(linalg.toeplitz(self.start[:, 0]))
        self._toeplitz = np.allclose(self.start, toeplitz, rtol=1e-6, atol=1e-12)
        self.singular = not np.all(np.abs(np.diagonal(self.start)) > 2.0**-20)
        if not self.singular:
            inverse = linalg.solve_triangular(self.start, np.eye(len(self.start)), lower=True)
            spread = float(np.sqrt(np.max(np.sum(np.square(inverse), axis=1))))
            self.allowed = WATCHED_NOISE * max(1.0, spread)

    def knows(self, steps: range) -> bool:
        """Whether M is known in these steps, where they begin without history."""
        return self._toeplitz or steps.start <= _PADDED

    def places(self, leaf: int, most: int) -> np.ndarray:
        """Returns coordinates of a release: both ends, those around 2^k, and one of each stretch.

        Args:
          leaf: Number of the leaf.
          most: How many, at most.
        """
        size = self._program.sizes[leaf]
        if size <= most:
            return np.arange(size)
        powers = 2 ** np.arange(size.bit_length() - 1)
        ends = np.arange(max(1, most // 16))
        some = np.concatenate([ends, size - 1 - ends, powers - 1, powers])[: most // 2]
        rest = most - some.size  # a random one of each stretch of equal length
        inside = np.random.default_rng(0).random(rest)
        return np.concatenate([some, ((np.arange(rest) + inside) * size / rest).astype(np.int64)])

    def of(
        self,
        steps: range,
        leaf: int,
        places: np.ndarray,
        generation: int = 0,
        mechanism: Mechanism | None = None,
    ) -> np.ndarray:
        """Returns the noise of steps that begin without history: float64[steps, places]."""
        mechanism = mechanism or self._program.mechanism
        z = self._fresh(mechanism, steps, leaf, places, generation)
        if self._toeplitz:
            column = self._noise.whiten(np.eye(len(steps), 1))[:, 0]
            matrix = np.tril(linalg.toeplitz(column))
        else:
            unit = np.eye(steps.stop, len(steps), -steps.start)
            matrix = self._noise.whiten(unit)[steps.start :]
        return linalg.solve_triangular(matrix, z, lower=True)

    def _fresh(
        self, mechanism: Mechanism, steps: range, leaf: int, places: np.ndarray, generation: int
    ) -> np.ndarray:
        program, key = self._program, self._key(mechanism, generation)
        if leaf in program.tables:
            assert program.snapshot is not None
            width = math.prod(program.shapes[leaf][1:])
            places = program.snapshot.rows[leaf][places // width].astype(np.int64) * width + (
                places % width
            )
            number, purpose = leaf, reference.STEP
        else:
            number, purpose = self._number[leaf], 0
        if not self.states:
            numbers = np.array(steps)[:, None]
            return reference.normals(key, numbers, number, places, purpose)
        of = number, program.sizes[leaf], mechanism
        return np.stack([self._stated(key, step, *of)[places] for step in steps])

    def _stated(
        self, key: np.ndarray, step: int, leaf: int, size: int, mechanism: Mechanism
    ) -> np.ndarray:
        z = self._noise.fresh(key, step, leaf, size, mechanism.scales())
        assert z is not None, "it states all of its z, or none"
        return np.ravel(z)

    def _key(self, mechanism: Mechanism, generation: int) -> np.ndarray:
        return mechanism.noise_key(self._program.root, generation)

    # Of z that the noise states.

    def law_checks(self) -> list[CheckResult]:
        """Returns the check of the law of z, where the noise states it; else none."""
        if not self.states:
            return []
        law, mechanism, names, vectors = Bonferroni(), self._program.mechanism, [], []
        cell = law_of(mechanism)[1]
        steps = {0, 1, *(2**k for k in range(self._end.bit_length())), self._end - 1}
        largest = int(np.clip(max(self._program.sizes), *_DRAWS))
        of = [(0, 0, 0, largest), *((g, 0, 0, _OTHERS) for g in (1, 2, 3))]
        of += [(0, step, 0, _OTHERS) for step in sorted(steps) if 0 < step < self._end]
        of += [(0, 0, leaf, _OTHERS) for leaf in range(1, len(self._program.sizes))]
        repeats = Repeats(sum(size for *_, size in of), 2 * (0.4 * cell + 2.0**-24))
        digits = np.random.default_rng(0)  # in the place of those that the grid took away
        for generation, step, leaf, size in of:
            key = self._key(mechanism, generation)
            z = self._stated(key, step, leaf, size, mechanism).astype(np.float32)
            names.append(f"leaf {leaf} of step {step:,} under key {generation}")
            vectors.append(z)
            add_energies(law, z, names[-1])
            add_lags(law, z, names[-1])
            Counts(z).add_to(law, names[-1], cell)
            repeats.add(z, names[-1])
            if cell <= _COARSE:
                smooth = z.astype(np.float64) + cell * digits.uniform(-0.5, 0.5, z.shape)
                add_distribution(law, smooth, names[-1])
        add_cosines(law, vectors, names)
        if cell <= _FINE:  # of a coarse grid, magnitudes are not normal: 0 is common
            add_cosines(law, [magnitudes(z) for z in vectors], names, " but for signs")
        repeats.add_to(law)
        quantile = -special.ndtri(FALSE_ALARM / 2 / law.count)
        resolution = quantile / math.sqrt(2 * largest)
        found = law.check(LAW, f"resolves {100 * resolution:.2g} % of sigma C")
        return [found._replace(resolution=resolution)]


class Comparison:
    """Noise that was found, compared with what was expected; the first difference is told."""

    def __init__(self, name: str):
        self.wrong, self.compared, self._name = "", 0, name
        self._resolved: dict[int, float] = {}

    def add(
        self,
        found: np.ndarray,
        expected: np.ndarray,
        allowed: Any,
        where: str,
        leaf: int = 0,
    ) -> None:
        """Compares arrays of one shape.

        Args:
          found: In standard deviations.
          expected: Likewise.
          allowed: By how much they may differ, an array or a number.
          where: Which noise it is, in words.
          leaf: Number of the leaf.
        """
        self.compared += expected.size
        # A part that is missing everywhere shows where it is the largest beside what is allowed.
        part = np.min(allowed / np.maximum(np.abs(expected), 2.0**-60), initial=1.0)
        self._resolved[leaf] = min(float(part), self._resolved.get(leaf, 1.0))
        with np.errstate(invalid="ignore", over="ignore"):
            off = ~(np.abs(found - expected) <= allowed) | ~np.isfinite(found)
            if off.any() and not self.wrong:
                gain = float(np.vdot(found, expected) / np.vdot(expected, expected))
                share = f"{np.count_nonzero(off):,} of {off.size:,} coordinates"
                self.wrong = f"{where}: {share} are others, {gain:.4g} times the noise in the mean"

    def check(self, detail: str = "") -> CheckResult:
        """Returns the check."""
        worst = max(self._resolved.values(), default=0.0)
        return CheckResult(self._name, not self.wrong, self.wrong or detail, resolution=worst)


class _Looks:
    """The looks that are taken at releases of single steps."""

    def __init__(self, program: Probe, expected: ExpectedNoise):
        self._program, self._expected = program, expected
        self._everybody = np.arange(program.places) % program.units
        self._first = program.first_step
        self._dominated = noise_dominated(program.mechanism)
        self._found = Comparison(NOISE)
        # Of tables, coordinates of rows that everybody reads together.
        self._read: dict[int, np.ndarray] = {}
        for k, release in enumerate(program.release(self._everybody) if program.tables else ()):
            if k in program.tables:
                rows = release.reshape(program.shapes[k])
                read = np.any(rows, axis=tuple(range(1, rows.ndim)))
                self._read[k] = np.flatnonzero(np.repeat(read, math.prod(rows.shape[1:])))

    def checks(self) -> list[CheckResult]:
        """Returns what was seen, and what could not be looked at."""
        program, noise_dominated = self._program, self._dominated
        left_out = []
        if not self._expected.knows(range(self._first, self._first + 1)):
            why = f"M is no Toeplitz matrix, and looked at up to step {_PADDED:,}"
            left_out.append(CheckResult("noise of the steps to come", True, why, made=False))
            self._first = 0
        if noise_dominated is None:
            why = f"C = {program.mechanism.l2_clip_norm:.3g} is next to the least there is"
            left_out.append(CheckResult(FULL, True, why, made=False))
        else:
            self._look(self._everybody, noise_dominated, self._first, 0, _EVERY)
        unseen = self._look_at_own_scales()
        if unseen:
            names = ", ".join(self._program.names[k] for k in sorted(unseen)[:3])
            why = f"{names}: the sum leaves no digits"
            name = "noise at full batches and the run's own C"
            left_out.append(CheckResult(name, True, why, made=False))
        steps = self._steps()
        lazy = bool(program.tables and noise_dominated)  # whose rows have noise where they are read
        for number, step in enumerate(steps):
            who = self._everybody if lazy else ()
            without = () if lazy else program.tables
            self._look(who, noise_dominated if lazy else None, step, number, _FEW, without)
        detail = f"{self._found.compared:,} coordinates, to {self._expected.allowed:.2g} sigma C; "
        detail += f"steps {', '.join(f'{step:,}' for step in steps)}"
        return [self._found.check(detail), *left_out]

    def _steps(self) -> list[int]:
        """Returns the first step and the last, and two that have all bits that a step may have."""
        end = self._program.mechanism.sampler.num_steps
        top = 2 ** max(0, (end - 1).bit_length() - 1)
        some = (self._first, top - 1, min(top, end - 1), end - 1)
        return [step for step in sorted(set(some)) if self._expected.knows(range(step, step + 1))]

    def _look(
        self,
        members: Sequence[int] | np.ndarray,
        mechanism: Mechanism | None,
        step: int,
        generation: int,
        most: int,
        without: Collection[int] = (),
    ) -> None:
        """Compares the noise of one release, of a batch whose sum is next to 0."""
        of = mechanism or self._program.mechanism
        release = self._program.release(members, of, step=step, generation=generation)
        stddev, _ = law_of(of)
        where = f"step {step:,} of {'a full' if len(members) else 'an empty'} batch"
        steps = range(step, step + 1)
        for k, places, cast in self._leaves(most, without):
            found = release[k][places] / np.float64(stddev)
            (noise,) = self._expected.of(steps, k, places, generation, of)
            allowed = self._expected.allowed + cast * np.abs(noise)
            self._found.add(found, noise, allowed, f"{self._program.names[k]} at {where}", k)

    def _leaves(self, most: int, without: Collection[int]) -> list[tuple[int, np.ndarray, float]]:
        """Returns leaves, the coordinates that are looked at, and the roundoff of their types."""
        program, found = self._program, []
        total = sum(program.sizes)
        for k, (size, dtype) in enumerate(zip(program.sizes, program.dtypes, strict=True)):
            share = max(256, most * size // max(1, total))
            places = self._expected.places(k, size if total <= most else share)
            if k in self._read:
                places = np.intersect1d(places, self._read[k])
            unnoised = k in without or k in program.frozen  # at which `update_checks` looks
            if places.size and not unnoised:
                found.append((k, places, cast_of(dtype)))
        return found

    def _look_at_own_scales(self) -> set[int]:
        """Compares the noise at the run's own C; returns the leaves where the sum hides it."""
        program, first = self._program, self._first
        stddev, _ = law_of(program.mechanism)
        every = self._everybody
        one, other = (program.release(every, step=first, generation=g) for g in range(2))
        hidden, steps = set(), range(first, first + 1)
        unit = 2.0**-24 * (1 if repeats_exactly() else program.places)  # of sums in any order
        for k, places, cast in self._leaves(_EVERY, ()):
            largest = float(np.max(np.abs(one[k]), initial=0)) / stddev
            moved = 4 * largest * max(unit, cast)
            if not moved <= _COARSE:
                hidden.add(k)
                continue
            difference = one[k][places].astype(np.float64) - other[k][places]
            a, b = (self._expected.of(steps, k, places, g)[0] for g in range(2))
            allowed = 2 * self._expected.allowed + moved
            where = f"{self._program.names[k]} of a full batch at the run's own C"
            self._found.add(difference / stddev, a - b, allowed, where, k)
        if hidden and program.poison is not None:  # whose gradients count as 0
            members = np.full(program.places, program.poison)
            shown = set(range(len(self._program.names))) - hidden | set(program.tables)
            self._look(members, None, first, 0, _EVERY, without=shown)
            hidden &= set(program.tables)  # whose rows that batch does not read
        return hidden


def cast_of(dtype: np.dtype) -> float:
    """Returns how far casting moves a number, relative to it, beyond what float32 does."""
    unit = float(jnp.finfo(dtype).eps)
    return unit / 2 if unit > 2.0**-20 else 2.0**-22


def noise_dominated(mechanism: Mechanism) -> Mechanism | None:
    """Returns a mechanism of the same noise and far smaller sums, if there is one."""
    found = loud(mechanism)
    most = mechanism.sampler.padded_batch_size * mechanism.sampler.max_passes
    return found if most <= found.noise_multiplier * 2.0**-22 else None


def law_of(mechanism: Mechanism) -> tuple[float, float]:
    """Returns the standard deviation that noise must have, and its cell in units of that.

    That of the integer grid is rounded up to whole cells, as `sum_checks` checks, and is that of a
    normal that is rounded to them.
    """
    grid = mechanism.scales().grid
    if grid is None:
        return mechanism.noise_multiplier * mechanism.l2_clip_norm, _CELL
    cells = float(grid.cells)
    return float(grid.spacing) * math.sqrt(cells**2 + 1 / 12), 1 / cells


def _matrix_check(program: Probe, expected: ExpectedNoise) -> CheckResult:
    """Checks that M, the inverse of which makes the noise of z, is one whose cost is priced.

    The noise states M itself: without this, half of the noise would be that of M = 2, and noise of
    two bands pass for independent noise.
    """
    matrix, noise = expected.start, program.mechanism.noise
    longest = float(np.sqrt(np.max(np.sum(np.square(matrix), axis=0))))
    passed = (
        longest <= 1 + 1e-9
        and not np.triu(matrix, 1).any()
        and not np.tril(matrix, -noise.bands).any()
        and _column_is_priced(program.mechanism, matrix)
    )
    reach = int(np.max(np.subtract(*np.nonzero(matrix)), initial=0)) + 1
    bands = min(noise.bands, len(matrix))
    detail = f"{reach} of {bands} bands, columns of norm {longest:.6g} of 1 allowed"
    return CheckResult(MATRIX, bool(passed), detail)


def _column_is_priced(mechanism: Mechanism, matrix: np.ndarray) -> bool:
    """Whether columns are all the one whose overlap is priced, where they may overlap."""
    noise, sampler = mechanism.noise, mechanism.sampler
    if noise.bands <= sampler.separation:
        return True
    impulse = np.eye(min(sampler.num_steps, _PADDED), 1)
    found, column = noise.whiten(impulse)[:, 0], noise.column(len(impulse))
    if column is None or not np.allclose(found, column, rtol=1e-6, atol=0):
        return False
    toeplitz = np.tril(linalg.toeplitz(column[: len(matrix)]))
    return bool(np.allclose(matrix, toeplitz, rtol=1e-6, atol=0))


def keys_check(mechanism: Mechanism, root: RootKey) -> CheckResult:
    """Checks that another generation or root gives other keys; programs are seen to heed them.

    Among the roots are 0 and those that have one bit: each bit of a root must count.
    """
    generations = [*range(16), *(2**k for k in range(4, 64))]
    bits = [0, *(1 << k for k in range(8 * ROOT_BYTES))]
    roots = [RootKey(bit.to_bytes(ROOT_BYTES, "little"), insecure=False) for bit in bits]
    of = [(root, generation) for generation in generations] + [(other, 0) for other in roots]
    distinct = min(
        len({mechanism.noise_key(*one).tobytes() for one in of}),
        len({one.sampling_seed(generation) for one, generation in of}),
    )
    return CheckResult(KEYS, distinct == len(of), f"{distinct} of {len(of)}")
