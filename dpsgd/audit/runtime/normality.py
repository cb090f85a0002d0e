"""Exact tests that arrays are independent standard normals, rounded to a grid or not.

For noise that takes z from a generator of its own, of which there is nothing to compute again. Each
test and why its p-value is valid: docs/explanation/tests-of-normal-noise.md.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
from scipy import special

from dpsgd.audit.report import FALSE_ALARM, CheckResult, correlation_pvalue, variance_pvalue
from dpsgd.audit.runtime.expected import ExpectedNoise
from dpsgd.audit.runtime.scales import noise_law

LAW = "noise of another generator is normal and independent"

Tests = Iterator[tuple[str, np.ndarray]]
"""What is tested, and p-values of whatever dependence."""

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


def law_check(expected: ExpectedNoise) -> CheckResult:
    """Tests the z that a noise states for a run, under the audit's keys."""
    mechanism = expected.probe.mechanism
    sizes, steps = expected.probe.sizes, mechanism.sampler.num_steps
    some = {0, 1, *(2**k for k in range(steps.bit_length())), steps - 1}
    largest = int(np.clip(max(sizes), *_DRAWS))
    of = [(0, 0, 0, largest), *((g, 0, 0, _OTHERS) for g in (1, 2, 3))]
    of += [(0, step, 0, _OTHERS) for step in sorted(some) if 0 < step < steps]
    of += [(0, 0, leaf, _OTHERS) for leaf in range(1, len(sizes))]
    vectors = {
        f"leaf {leaf} of step {step:,} under key {attempt}": expected.stated(
            expected.key(mechanism, attempt), step, leaf, size, mechanism
        )
        for attempt, step, leaf, size in of
    }
    return normality_check(vectors, noise_law(mechanism)[1])


def normality_check(vectors: dict[str, np.ndarray], cell: float) -> CheckResult:
    """Tests draws of several keys, steps and leaves.

    Args:
      vectors: By name, float[size] each.
      cell: Of the grid to which they are rounded, in standard deviations.
    """
    vectors = {name: draws.astype(np.float32) for name, draws in vectors.items()}
    tests = [*cosines(vectors), *repeats(list(vectors.values()), cell)]
    for name, draws in vectors.items():
        of_one = [*energies(draws), *counts(draws, cell), *lags(draws)]
        tests += [(f"{what} in {name}", pvalues) for what, pvalues in of_one]
    count = sum(np.size(pvalues) for _, pvalues in tests)
    where, least = min(((of, np.min(p, initial=1.0)) for of, p in tests), key=lambda of: of[1])
    largest = max(draws.size for draws in vectors.values())
    resolution = -special.ndtri(FALSE_ALARM / 2 / count) / math.sqrt(2 * largest)
    detail = f"resolves {100 * resolution:.2g} % of sigma C; the least likely of {count:,}: {where}"
    return CheckResult.of(LAW, count * least, detail)._replace(resolution=resolution)


def energies(draws: np.ndarray) -> Tests:
    """Tests the squares of a float array of one axis, added up by tile and in all."""
    squares = np.square(draws, dtype=np.float64)
    for tile in [*(tile for tile in TILES if tile < draws.size), max(1, draws.size)]:
        starts = np.arange(0, draws.size, tile)
        sizes = np.diff(starts, append=draws.size)
        yield f"squares by {tile:,}", variance_pvalue(np.add.reduceat(squares, starts), sizes)


def counts(draws: np.ndarray, cell: float) -> Tests:
    """Tests how many draws lie between thresholds, and that all are finite.

    Args:
      draws: Of one axis.
      cell: How far rounding moves a draw at most, in standard deviations.
    """
    yield "numbers that are not finite", np.asarray(float(np.isfinite(draws).all()))
    ordered = np.sort(draws)  # what is no number comes last
    seen = np.searchsorted(ordered, _HIGH, "right") - np.searchsorted(ordered, _LOW, "left")
    # Binomial, with a probability that is between the two.
    fewest, most = (
        np.maximum(0.0, special.ndtr(_HIGH + moved) - special.ndtr(_LOW - moved))
        for moved in (-cell, cell)
    )
    few = special.bdtr(seen, draws.size, fewest)
    many = np.where(seen == 0, 1.0, special.bdtrc(seen - 1.0, draws.size, most))
    yield "counts between thresholds", np.minimum(1.0, 2 * np.minimum(few, many))


def cosines(vectors: dict[str, np.ndarray]) -> Tests:
    """Tests all pairs of vectors, coordinate by coordinate of what the shorter one has."""
    for (one, a), (other, b) in itertools.combinations(vectors.items(), 2):
        yield from _cosine(f"{one} and {other}", a[: b.size], b[: a.size])


def lags(draws: np.ndarray) -> Tests:
    """Tests an array of one axis with itself, 2^k further on for all k."""
    for lag in [2**k for k in range(max(1, len(draws)).bit_length() - 1)]:
        pairs = draws[: len(draws) // (2 * lag) * 2 * lag].reshape(-1, 2, lag)
        # Side by side: no draw is in two pairs.
        yield from _cosine(f"draws {lag:,} apart", pairs[:, 0].ravel(), pairs[:, 1].ravel())


def _cosine(what: str, a: np.ndarray, b: np.ndarray) -> Tests:
    if a.size >= _LEAST:
        ab, aa, bb = (np.einsum("i,i", x, y, dtype=float) for x, y in ((a, b), (a, a), (b, b)))
        with np.errstate(divide="ignore", invalid="ignore"):
            yield what, correlation_pvalue(ab / np.sqrt(aa * bb), a.size)


def repeats(vectors: Sequence[np.ndarray], cell: float) -> Tests:
    """Tests whether a run of coordinates is, but for signs, anywhere else.

    Args:
      vectors: Float32 arrays of one axis.
      cell: Of the grid of the draws, in standard deviations.
    """
    likely = math.log(0.8 * cell + 2.0**-23)  # at most, of a magnitude
    bound = 2 * math.log(max(1, sum(vector.size for vector in vectors)))
    # So long that none repeats but once in 10^10 times.
    length = max(2, math.ceil((bound + math.log(1e10)) / -likely))
    words = [np.abs(vector).view(np.uint32) for vector in vectors if vector.size >= length]
    if not words:
        return
    runs = np.concatenate([np.lib.stride_tricks.sliding_window_view(x, length) for x in words])
    odd = np.random.default_rng(0).integers(0, 2**63, length, np.uint64) * np.uint64(2) + 1
    order = np.argsort(runs @ odd, kind="stable")  # equal runs have equal sums, and side by side
    alike = (runs[order[1:]] == runs[order[:-1]]).all(axis=1).any()
    yield f"{length} equal coordinates", np.asarray(math.exp(bound + length * likely) ** alike)
