"""Exact tests that arrays are independent standard normals, rounded to a grid or not.

For noise that takes z from a generator of its own, of which there is nothing to compute again. Each
test and why its p-value is valid: docs/explanation/tests-of-normal-noise.md.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import numpy as np
from scipy import special, stats

from dpsgd.audit.report import (
    FALSE_ALARM,
    Bonferroni,
    CheckResult,
    correlation_pvalue,
    variance_pvalue,
)
from dpsgd.audit.runtime.expected import ExpectedNoise
from dpsgd.audit.runtime.scales import noise_law

LAW = "noise of another generator is normal and independent"

TILES = 2**8, 2**12, 2**16, 2**20
"""Consecutive coordinates whose squares are added up."""

BEYOND = 2.0, 3.0, 3.5, 4.0, 4.5, 5.0, 5.5, 6.0, 7.0
WITHIN = 1e-5, 1e-3, 1e-1
"""Thresholds of the counts, in standard deviations."""

_THRESHOLDS = np.array([*BEYOND, *WITHIN])
_COARSE, _FINE = 2.0**-6, 2.0**-10  # cells of which draws are smooth, and 0 is rare
_DRAWS = 2**17, 2**20  # of z, in one array: resolves 1 % of sigma
_OTHERS = 2**13  # in arrays of other keys, steps and leaves
_SORTED = 2**21  # about as many runs are compared, and all of arrays of up to _SMALL coordinates
_SMALL = 2**12
_BLOCK = 2048  # rows of a Gram matrix that are formed together
_LEAST = 8  # coordinates from which on a copy is told from chance among 10^8 pairs
_ODD = np.uint64(0x9E3779B97F4A7C15)


def law_check(expected: ExpectedNoise) -> CheckResult:
    """Tests the z that a noise states for a run, under the audit's keys."""
    mechanism = expected.probe.mechanism

    def draw(attempt: int, step: int, leaf: int, size: int) -> np.ndarray:
        return expected.stated(expected.key(mechanism, attempt), step, leaf, size, mechanism)

    sizes, steps = expected.probe.sizes, mechanism.sampler.num_steps
    return normality_check(draw, noise_law(mechanism)[1], sizes, steps)


def normality_check(
    draw: Callable[[int, int, int, int], np.ndarray], cell: float, sizes: Sequence[int], steps: int
) -> CheckResult:
    """Tests draws of several keys, steps and leaves.

    Args:
      draw: (attempt, step, leaf, size) -> z: float[size].
      cell: Of the grid to which z is rounded, in standard deviations.
      sizes: Of the leaves.
      steps: Of the run.
    """
    tests, names, vectors = Bonferroni(), [], []
    some = {0, 1, *(2**k for k in range(steps.bit_length())), steps - 1}
    largest = int(np.clip(max(sizes), *_DRAWS))
    of = [(0, 0, 0, largest), *((g, 0, 0, _OTHERS) for g in (1, 2, 3))]
    of += [(0, step, 0, _OTHERS) for step in sorted(some) if 0 < step < steps]
    of += [(0, 0, leaf, _OTHERS) for leaf in range(1, len(sizes))]
    repeats = Repeats(sum(size for *_, size in of), 2 * (0.4 * cell + 2.0**-24))
    digits = np.random.default_rng(0)  # in the place of those that the grid took away
    for attempt, step, leaf, size in of:
        z = np.ravel(draw(attempt, step, leaf, size)).astype(np.float32)
        names.append(f"leaf {leaf} of step {step:,} under key {attempt}")
        vectors.append(z)
        add_energies(tests, z, names[-1])
        add_lags(tests, z, names[-1])
        add_counts(tests, z, names[-1], cell)
        repeats.add(z, names[-1])
        if cell <= _COARSE:
            smooth = z.astype(np.float64) + cell * digits.uniform(-0.5, 0.5, z.shape)
            add_distribution(tests, smooth, names[-1])
    add_cosines(tests, vectors, names)
    if cell <= _FINE:  # of a coarse grid, magnitudes are not normal: 0 is common
        add_cosines(tests, [magnitudes(z) for z in vectors], names, " but for signs")
    repeats.add_to(tests)
    resolution = -special.ndtri(FALSE_ALARM / 2 / tests.count) / math.sqrt(2 * largest)
    found = tests.check(LAW, f"resolves {100 * resolution:.2g} % of sigma C")
    return found._replace(resolution=resolution)


def add_energies(tests: Bonferroni, flat: np.ndarray, name: str) -> None:
    """Tests the squares of a float32 array of one axis, added up by tile and in all."""
    tile = TILES[0]
    whole = flat.size // tile * tile
    rows = flat[:whole].reshape(-1, tile)
    # In float32: 256 terms err by a relative 2^-17 at most, where chance moves the sum by 2^-4.
    squares = np.einsum("ij,ij->i", rows, rows).astype(np.float64)
    sizes = np.full(squares.size, tile)
    if flat.size > whole:
        rest = flat[whole:].astype(np.float64)
        squares, sizes = np.append(squares, rest @ rest), np.append(sizes, rest.size)
    tests.add(variance_pvalue(squares.sum(), flat.size), name)
    for larger in (*TILES[1:], 0):
        if squares.size <= 1:
            break
        where = functools.partial("stretch {2:,} of {0:,} in {1}".format, tile, name)
        tests.add(variance_pvalue(squares, sizes), where)
        if larger:
            starts = np.arange(0, squares.size, larger // tile)
            squares, sizes = (np.add.reduceat(a, starts) for a in (squares, sizes))
            tile = larger


def add_counts(tests: Bonferroni, draws: np.ndarray, name: str, cell: float) -> None:
    """Tests how many draws are beyond thresholds, within others, and not finite.

    Args:
      tests: To which they are added.
      draws: Of one axis.
      name: Of the array.
      cell: How far rounding moves a draw at most, in standard deviations.
    """
    flat = np.abs(draws)
    counts = [np.count_nonzero(flat > t) for t in BEYOND]
    counts += [np.count_nonzero(flat < t) for t in WITHIN]
    seen = np.array([*counts, flat.size - int(np.count_nonzero(np.isfinite(flat)))])
    nearer, farther = np.maximum(0.0, _THRESHOLDS - cell), _THRESHOLDS + cell
    beyond = np.arange(_THRESHOLDS.size) < len(BEYOND)
    low = np.where(beyond, 2 * special.ndtr(-farther), special.erf(nearer * math.sqrt(0.5)))
    high = np.where(beyond, 2 * special.ndtr(-nearer), special.erf(farther * math.sqrt(0.5)))
    low, high = np.append(low, 0.0), np.append(high, 0.0)  # none that is not finite
    # Binomial, with a probability that is between the two.
    few = special.bdtr(seen.astype(np.float64), flat.size, low)
    many = np.where(seen == 0, 1.0, special.bdtrc(seen - 1.0, flat.size, high))
    where = functools.partial(_counted, seen, flat.size, name)
    tests.add(np.minimum(1.0, 2 * np.minimum(few, many)), where)


def _counted(counts: np.ndarray, size: int, name: str, place: int) -> str:
    what = f"{counts[place]:,} of {size:,} in {name}"
    if place == _THRESHOLDS.size:
        return f"{what} are not finite"
    return f"{what} {'beyond' if place < len(BEYOND) else 'within'} {_THRESHOLDS[place]:g} sigma"


def add_distribution(tests: Bonferroni, draws: np.ndarray, name: str) -> None:
    """Tests the distance from the normal law (Kolmogorov and Smirnov), and the mean."""
    flat = np.sort(draws.ravel())
    ranks = np.arange(flat.size + 1) / flat.size
    law = special.ndtr(flat)
    distance = max(float(np.max(ranks[1:] - law)), float(np.max(law - ranks[:-1])))
    where = f"{name}, of {flat.size:,} draws"
    tests.add(float(stats.kstwo.sf(distance, flat.size)), f"distance from the law in {where}")
    mean = float(flat.sum(dtype=np.float64)) / math.sqrt(flat.size)
    tests.add(special.erfc(abs(mean) / math.sqrt(2)), f"mean in {where}")


def magnitudes(draws: np.ndarray) -> np.ndarray:
    """Returns m(z), standard normal and independent of the sign of z."""
    both = 2 * special.ndtr(-np.abs(draws))  # of z = 0, which a grid has, it is 1
    return -special.ndtri(np.minimum(both, 1 - 2.0**-22))


def add_cosines(
    tests: Bonferroni, vectors: Sequence[np.ndarray], names: Sequence[str], what: str = ""
) -> None:
    """Tests all pairs of vectors, coordinate by coordinate of what the shorter one has.

    Args:
      tests: To which they are added.
      vectors: Float arrays of one axis.
      names: Of the vectors.
      what: Of them is compared.
    """
    sizes = np.array([vector.size for vector in vectors], np.int64)
    for size in np.unique(sizes[sizes >= _LEAST]):
        longer = np.flatnonzero(sizes >= size).tolist()
        rows = np.stack([vectors[k][:size] for k in longer])
        exact = sizes[longer] == size  # the other pairs have another, longer, common part
        _add_gram(tests, rows, exact, [names[k] for k in longer], what)


def _add_gram(
    tests: Bonferroni, rows: np.ndarray, exact: np.ndarray, names: Sequence[str], what: str
) -> None:
    norms = np.sqrt(np.einsum("ij,ij->i", rows, rows, dtype=np.float64))
    void = ~((norms > 0) & (norms < np.inf))
    if void.any():
        tests.add(0.0, f"{names[int(np.argmax(void))]}: there is nothing, or nothing finite")
        return
    unit = (rows / norms[:, None]).astype(np.float32)
    count, largest, pair = 0, -1.0, (0, 0)
    of_size = np.flatnonzero(exact)
    # Each pair once: one of this size with a longer one, or with a later one of this size.
    order = np.concatenate([of_size, np.flatnonzero(~exact)])
    unit = unit[order]
    for start in range(0, of_size.size, _BLOCK):
        stop = min(start + _BLOCK, of_size.size)
        cosines = np.abs(unit[start:stop] @ unit[start:].T)
        cosines[np.tri(stop - start, cosines.shape[1], dtype=bool)] = -1
        count += (stop - start) * cosines.shape[1] - (stop - start) * (stop - start + 1) // 2
        place = int(np.argmax(cosines))
        i, j = divmod(place, cosines.shape[1])
        if cosines[i, j] > largest:
            largest, pair = float(cosines[i, j]), (order[start + i], order[start + j])
    if count == 0:
        return
    a, b = (rows[k].astype(np.float64) for k in pair)
    cosine = a @ b / math.sqrt((a @ a) * (b @ b))
    where = " and ".join(names[k] for k in sorted(pair)) + what
    tests.add(correlation_pvalue(cosine, a.size), where, count)


def add_lags(tests: Bonferroni, draws: np.ndarray, name: str) -> None:
    """Tests an array of one axis with itself, 2^k further on for all k."""
    for lag in [2**k for k in range(max(1, len(draws)).bit_length() - 1)]:
        stretches = len(draws) // (2 * lag)
        pairs = draws[: 2 * lag * stretches].reshape(stretches, 2, lag)
        a, b = pairs[:, 0], pairs[:, 1]  # side by side: no draw is in two pairs
        if a.size < _LEAST:
            continue
        ab, aa, bb = (
            float(np.einsum("ij,ij->", x, y, dtype=np.float64)) for x, y in ((a, b), (a, a), (b, b))
        )
        cosine = ab / math.sqrt(aa * bb) if aa * bb > 0 else math.nan
        tests.add(correlation_pvalue(cosine, a.size), f"{lag:,} apart in {name}")


class Repeats:
    """Runs of coordinates, to be compared with all others that are added.

    Of many coordinates, only runs that begin with certain values are kept, about 2^21 of all, and
    all runs of small arrays: what is shared has its share of them.
    """

    def __init__(self, total: int, most_likely: float):
        """Prepares for `total` coordinates, none of whose values is likelier than `most_likely`."""
        self._bound = 2 * math.log(max(1, total))
        # So long that none repeats but once in 10^10 times.
        self.length = max(2, math.ceil((self._bound + math.log(1e10)) / -math.log(most_likely)))
        self._bound += self.length * math.log(most_likely)
        self._rarely = (total // _SORTED).bit_length()
        self._names: list[str] = []
        self._kept: list[tuple[np.ndarray, ...]] = []

    def add(self, array: np.ndarray, name: str) -> None:
        """Adds the runs of a float32 array."""
        words = array.ravel().view(np.uint32)
        starts = np.arange(max(0, words.size - self.length + 1))
        if words.size > _SMALL and self._rarely:
            scrambled = (words[: starts.size] << np.uint32(1)) * np.uint32(0x9E3779B1)
            starts = np.flatnonzero(scrambled < np.uint32(2 ** (32 - self._rarely)))
        sign = words[starts] & np.uint32(2**31)  # of the first: equal but for one common sign
        runs = np.stack([words[starts + k] ^ sign for k in range(self.length)], axis=1)
        self._kept.append((runs, np.full(starts.size, len(self._names), np.int32), starts))
        self._names.append(name)

    def add_to(self, tests: Bonferroni) -> None:
        """Tests whether any run is there twice."""
        runs, arrays, starts = (np.concatenate(parts) for parts in zip(*self._kept, strict=True))
        hashes = np.zeros(len(runs), np.uint64)
        for column in runs.T:
            hashes = (hashes ^ column) * _ODD
            hashes ^= hashes >> np.uint64(29)
        order = np.argsort(hashes)
        alike = np.flatnonzero(hashes[order[1:]] == hashes[order[:-1]])
        pairs = np.stack([order[alike], order[alike + 1]])
        equal = np.all(runs[pairs[0]] == runs[pairs[1]], axis=1)  # and not their hashes alone
        if not equal.any():
            tests.add(1.0, "", 1)
            return
        pair = pairs[:, int(np.argmax(equal))]
        places = " and ".join(f"{self._names[arrays[k]]} from {starts[k]:,}" for k in sorted(pair))
        tests.add(math.exp(self._bound), f"{self.length} equal coordinates, {places}", 1)
