"""Exact tests that arrays are independent standard normals, rounded to a grid or not.

For noise that takes z from a generator of its own, of which there is nothing to compute again. Each
test and why its p-value is valid: docs/explanation/tests-of-normal-noise.md.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import numpy as np
from scipy import special

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

TILES = 2**8, 2**12, 2**16
"""Consecutive coordinates whose squares are added up."""

WITHIN = 1e-5, 1e-3, 1e-1, 2.0, 3.0, 3.5, 4.0, 4.5, 5.0, 5.5, 6.0, 7.0
BELOW = -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5
"""Thresholds of the counts, in standard deviations: of magnitudes, and of draws."""

_LOW = np.array([*(-x for x in WITHIN), *(-math.inf for _ in BELOW)])
_HIGH = np.array([*WITHIN, *BELOW])
_DRAWS = 2**17, 2**20  # of z, in one array: resolves 1 % of sigma
_OTHERS = 2**13  # in arrays of other keys, steps and leaves
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
    tests = Bonferroni()
    some = {0, 1, *(2**k for k in range(steps.bit_length())), steps - 1}
    largest = int(np.clip(max(sizes), *_DRAWS))
    of = [(0, 0, 0, largest), *((g, 0, 0, _OTHERS) for g in (1, 2, 3))]
    of += [(0, step, 0, _OTHERS) for step in sorted(some) if 0 < step < steps]
    of += [(0, 0, leaf, _OTHERS) for leaf in range(1, len(sizes))]
    names = [f"leaf {leaf} of step {step:,} under key {attempt}" for attempt, step, leaf, _ in of]
    vectors = [np.ravel(draw(*one)).astype(np.float32) for one in of]
    for z, name in zip(vectors, names, strict=True):
        add_energies(tests, z, name)
        add_lags(tests, z, name)
        add_counts(tests, z, name, cell)
    add_cosines(tests, vectors, names)
    add_repeats(tests, vectors, names, cell)
    resolution = -special.ndtri(FALSE_ALARM / 2 / tests.count) / math.sqrt(2 * largest)
    found = tests.check(LAW, f"resolves {100 * resolution:.2g} % of sigma C")
    return found._replace(resolution=resolution)


def add_energies(tests: Bonferroni, flat: np.ndarray, name: str) -> None:
    """Tests the squares of a float array of one axis, added up by tile and in all."""
    squares = np.square(flat, dtype=np.float64)
    for tile in [*(tile for tile in TILES if tile < flat.size), max(1, flat.size)]:
        starts = np.arange(0, flat.size, tile)
        sizes = np.diff(starts, append=flat.size)
        where = functools.partial("stretch {2:,} of {0:,} in {1}".format, tile, name)
        tests.add(variance_pvalue(np.add.reduceat(squares, starts), sizes), where)


def add_counts(tests: Bonferroni, flat: np.ndarray, name: str, cell: float) -> None:
    """Tests how many draws lie between thresholds, and that all are finite.

    Args:
      tests: To which they are added.
      flat: Draws, of one axis.
      name: Of the array.
      cell: How far rounding moves a draw at most, in standard deviations.
    """
    tests.add(float(np.isfinite(flat).all()), f"numbers that are not finite in {name}")
    ordered = np.sort(flat)  # what is no number comes last
    seen = np.searchsorted(ordered, _HIGH, "right") - np.searchsorted(ordered, _LOW, "left")
    # Binomial, with a probability that is between the two.
    fewest, most = (
        np.maximum(0.0, special.ndtr(_HIGH + moved) - special.ndtr(_LOW - moved))
        for moved in (-cell, cell)
    )
    few = special.bdtr(seen, flat.size, fewest)
    many = np.where(seen == 0, 1.0, special.bdtrc(seen - 1.0, flat.size, most))

    def where(place: int) -> str:
        between = f"from {_LOW[place]:g} to {_HIGH[place]:g} sigma"
        return f"{seen[place]:,.0f} of {flat.size:,} in {name} {between}"

    tests.add(np.minimum(1.0, 2 * np.minimum(few, many)), where)


def add_cosines(tests: Bonferroni, vectors: Sequence[np.ndarray], names: Sequence[str]) -> None:
    """Tests all pairs of vectors, coordinate by coordinate of what the shorter one has.

    Args:
      tests: To which they are added.
      vectors: Float arrays of one axis.
      names: Of the vectors.
    """
    sizes = np.array([vector.size for vector in vectors])
    longest = int(np.sort(sizes)[-2:][0])  # of the longest one no more is compared
    rows = np.zeros((len(vectors), longest), np.float32)
    for row, vector in zip(rows, vectors, strict=True):
        row[: vector.size] = vector[:longest]
    there = (np.arange(longest) < sizes[:, None]).astype(np.float32)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        squares = np.square(rows) @ there.T  # of each, where the other has coordinates
        cosines = rows @ rows.T / np.sqrt(squares * squares.T)
    first, second = np.triu_indices(len(vectors), 1)
    common = np.minimum(sizes[first], sizes[second])
    first, second, common = (x[common >= _LEAST] for x in (first, second, common))
    tests.add(
        correlation_pvalue(cosines[first, second], common),
        lambda place: f"{names[first[place]]} and {names[second[place]]}",
    )


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


def add_repeats(
    tests: Bonferroni, vectors: Sequence[np.ndarray], names: Sequence[str], cell: float
) -> None:
    """Tests whether a run of coordinates is, but for signs, anywhere else.

    Args:
      tests: To which they are added.
      vectors: Float32 arrays of one axis.
      names: Of the vectors.
      cell: Of the grid of the draws, in standard deviations.
    """
    likely = math.log(0.8 * cell + 2.0**-23)  # at most, of a magnitude
    bound = 2 * math.log(max(1, sum(vector.size for vector in vectors)))
    # So long that none repeats but once in 10^10 times.
    length = max(2, math.ceil((bound + math.log(1e10)) / -likely))
    windows, places = [], []
    for vector, name in zip(vectors, names, strict=True):
        if vector.size >= length:
            words = np.abs(vector).view(np.uint32)
            windows.append(np.lib.stride_tricks.sliding_window_view(words, length))
            places.append(name)
    hashes = np.concatenate([np.zeros(0, np.uint64), *map(_hashed, windows)])
    order = np.argsort(hashes, kind="stable")
    alike = np.flatnonzero(hashes[order[1:]] == hashes[order[:-1]])
    ends = np.cumsum([len(one) for one in windows])
    pvalue, found = 1.0, ""
    for pair in zip(order[alike], order[alike + 1], strict=True):
        arrays = [int(np.searchsorted(ends, place, "right")) for place in pair]
        starts = [place - ends[k] + len(windows[k]) for k, place in zip(arrays, pair, strict=True)]
        one, other = (windows[k][start] for k, start in zip(arrays, starts, strict=True))
        if np.array_equal(one, other):  # and not their hashes alone
            where = [f"{places[k]} from {start:,}" for k, start in zip(arrays, starts, strict=True)]
            pvalue, found = math.exp(bound + length * likely), " and ".join(where)
            break
    tests.add(pvalue, f"{length} equal coordinates, {found}" if found else "")


def _hashed(windows: np.ndarray) -> np.ndarray:
    hashes = np.zeros(len(windows), np.uint64)
    for column in windows.T:
        hashes = (hashes ^ column) * _ODD
        hashes ^= hashes >> np.uint64(29)
    return hashes
