"""Rows drawn from a described population, with a planted model of the label.

Rows come in chunks, each a pure function of (population, seed, chunk): any chunk can be made
alone, on any machine, and more rows only append.

Features. The value of a categorical column is its popularity rank r in 1..N, N its cardinality,
drawn from Zipf's law made continuous, ``Pr[rank <= r] proportional to integral_1^{r+1} t^{-a} dt``,
which inverts in closed form; integers are log-logistic, rounded down. Columns depend on each other
through two latent uniforms per row: a column draws from ``(latent + shift + width * v) mod 1``,
v uniform, which is uniform for every width. Missing values come in groups: a group draws one
uniform u per row, and each of its columns is missing if u is below the column's rate.

Label. ``Pr[label = 1 | features] = k / 2^16`` with k = round(2^16 sigmoid(b + s * score)), where
the score is a sum of effects of the values, of the logarithms of the integers and of pairs of
values. It depends on the features and on nothing else, so no predictor can have a larger expected
AUC than k.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import scipy.optimize

from experiments.tasks.clicks.schema import MISSING, log_transform

CHUNK = 1 << 16
"""Rows of a chunk, which share one random stream."""
PROBABILITIES = 1 << 16
"""Probabilities are whole multiples of one over this."""

_MAX_INTEGER = 9_999_999
_PAIR_VALUES = 16
# Frequent values matter more: the variance of an effect halves by this rank, and goes on falling
# with the rank. Ranks past the second limit share one effect. More rows teach ever rarer values.
_HALF_POWER_RANK = 150
_RANKS_WITH_EFFECT = 1 << 14


class Category(NamedTuple):
    """Categorical column: number of values, and exponent of Zipf's law."""

    cardinality: int
    zipf: float


class Count(NamedTuple):
    """Integer column: log-logistic, rounded down, with its smallest value."""

    scale: float
    shape: float
    least: int = 0


@dataclass(frozen=True, eq=False)
class Population:
    """Description of rows, by public summaries of a real data set, or by choices."""

    integers: Mapping[str, Count]
    categories: Mapping[str, Category]
    missing: tuple[Mapping[str, float], ...]
    """Missing rate of each column, by groups that are missing together."""
    pairs: tuple[tuple[str, str], ...]
    """Categories whose frequent values interact, which an additive model misses."""
    shares: tuple[float, float, float]
    """Shares of the score's variance: values, integers, pairs."""
    label_rate: float
    """Expected fraction of rows with the label one."""
    bayes_auc: float
    """AUC that the planted model is scaled to, in expectation."""


class Chunk(NamedTuple):
    """Drawn rows: one row of an array per column of the population."""

    label: np.ndarray
    """bool [n]"""
    integers: np.ndarray
    """int32 [I, n]; meaningless where missing"""
    integers_missing: np.ndarray
    """bool [I, n]"""
    ranks: np.ndarray
    """int32 [C, n]; 0 is missing"""
    probability: np.ndarray
    """int64 [n]; 2^16 times the probability that the label is one"""

    def rows(self, rows: slice) -> Chunk:
        """Returns some of the rows."""
        return Chunk(*(column[..., rows] for column in self))


def generate(population: Population, seed: int, chunk: int, rows: int = CHUNK) -> Chunk:
    """Returns the first rows of one chunk, deterministically.

    Args:
        population: Description of the rows.
        seed: Seed of the generator.
        chunk: Index of the chunk.
        rows: Number of rows, at most 65,536.

    Raises:
        ValueError: If `seed` or `chunk` is negative.
    """
    rng = np.random.Generator(np.random.SFC64([_check(seed), _check(chunk), 0]))
    features = _features(population, rng)
    model = _planted_model(population, seed)
    scaled = model.intercept + model.scale * model.score(features)
    exact = np.rint(PROBABILITIES * _sigmoid(scaled.astype(np.float64))).astype(np.int64)
    probability = np.clip(exact, 1, PROBABILITIES - 1)
    labels = np.random.Generator(np.random.SFC64([seed, chunk, 1]))
    # Exact: an integer below 2^16, uniform, is below k with probability k / 2^16.
    label = labels.integers(PROBABILITIES, size=CHUNK) < probability
    return features._replace(label=label, probability=probability).rows(slice(0, rows))


def _check(value: int) -> int:
    if value < 0:
        raise ValueError(f"seeds and chunk numbers must be at least 0, got {value}")
    return value


# --- Features ------------------------------------------------------------------------------------


def _features(population: Population, rng: np.random.Generator) -> Chunk:
    """Returns the features of one chunk, with zero labels and probabilities."""
    n = CHUNK
    missing = {}
    for group in population.missing:
        u = rng.random(n)
        missing.update({name: u < rate for name, rate in group.items()})
    latents = rng.random((2, n))

    def uniform(column: int) -> np.ndarray:
        """Returns uniform numbers that depend on one latent.

        The shifts, multiples of the golden ratio, keep the columns' popular values apart.
        """
        width = (0.3, 0.6, 1.0)[column % 3]
        u = rng.random(n)
        u *= width
        u += latents[column % 2]
        u += (column * 0.6180339887498949) % 1
        u -= np.floor(u)
        return u

    integers = np.empty((len(population.integers), n), dtype=np.int32)
    integers_missing = np.zeros(integers.shape, dtype=bool)
    for j, (name, count) in enumerate(population.integers.items()):
        u = np.clip(uniform(j), 1e-12, 1 - 1e-12)
        x = np.exp(count.shape * (np.log(u) - np.log1p(-u)))
        x *= count.scale
        integers[j] = np.minimum(x, _MAX_INTEGER)
        integers[j] += count.least
        if name in missing:
            integers_missing[j] = missing[name]

    ranks = np.empty((len(population.categories), n), dtype=np.int32)
    for j, (name, (cardinality, exponent)) in enumerate(population.categories.items()):
        u = uniform(len(integers) + j)
        # The inverse of (x^(1 - a) - 1) / ((N + 1)^(1 - a) - 1); log x / log(N + 1) where a = 1.
        if exponent == 1:
            x = np.exp(u * np.log(cardinality + 1))
        else:
            power = 1 - exponent
            x = np.exp(np.log1p(u * ((cardinality + 1) ** power - 1)) / power)
        ranks[j] = np.clip(x, 1, cardinality)
        if name in missing:
            ranks[j][missing[name]] = MISSING
    zeros = np.zeros(n, dtype=np.int64)
    return Chunk(zeros.astype(bool), integers, integers_missing, ranks, zeros)


# --- The planted model ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _PlantedModel:
    population: Population
    values: np.ndarray
    """float32 [C, ranks]: the effect of each value"""
    slopes: np.ndarray
    """float32 [I]: the effect of one unit of the transformed integer"""
    absent: np.ndarray
    """float32 [I]: the effect of a missing integer"""
    pairs: np.ndarray
    """float32 [pairs, 16, 16]: the effect of two frequent values together"""
    scale: float = 1.0
    intercept: float = 0.0

    def parts(self, chunk: Chunk) -> np.ndarray:
        """Returns scores of values, integers and pairs, float32[3, rows]."""
        names = list(self.population.categories)
        scores = np.zeros((3, chunk.ranks.shape[1]), dtype=np.float32)
        for effect, rank in zip(self.values, chunk.ranks, strict=True):
            scores[0] += effect[np.minimum(rank, _RANKS_WITH_EFFECT - 1)]
        for j in range(len(chunk.integers)):
            effect = self.slopes[j] * log_transform(chunk.integers[j])
            scores[1] += np.where(chunk.integers_missing[j], self.absent[j], effect)
        for effect, (a, b) in zip(self.pairs, self.population.pairs, strict=True):
            first, second = chunk.ranks[names.index(a)], chunk.ranks[names.index(b)]
            last = _PAIR_VALUES - 1
            scores[2] += effect[np.minimum(first, last), np.minimum(second, last)]
        return scores

    def score(self, chunk: Chunk) -> np.ndarray:
        """Returns the score, float32[rows]."""
        return self.parts(chunk).sum(axis=0)


@lru_cache(maxsize=4)
def _planted_model(population: Population, seed: int) -> _PlantedModel:
    """Returns the model of `seed`: random effects, scaled on one chunk of features.

    The scaling uses the *probabilities* of a chunk that is never written, so that the expected
    label rate and Bayes AUC are `population`'s, up to the sampling of the chunk.
    """
    rng = np.random.Generator(np.random.SFC64([_check(seed), 0, 2]))
    pilot = _features(population, np.random.Generator(np.random.SFC64([seed, 0, 3])))
    values = rng.normal(size=(len(pilot.ranks), _RANKS_WITH_EFFECT))
    values *= rng.uniform(0.5, 1.5, size=(len(pilot.ranks), 1))
    values /= np.sqrt(1 + np.arange(_RANKS_WITH_EFFECT) / _HALF_POWER_RANK)
    slopes = rng.normal(size=len(pilot.integers))
    for j, column in enumerate(pilot.integers):  # all on one footing, whatever their range
        slopes[j] /= log_transform(column).std()
    raw = _PlantedModel(
        population,
        values=values.astype(np.float32),
        slopes=slopes.astype(np.float32),
        absent=rng.normal(size=len(slopes)).astype(np.float32),
        pairs=rng.normal(size=(len(population.pairs), *[_PAIR_VALUES] * 2)).astype(np.float32),
    )
    values_by, integers_by, pairs_by = (
        np.sqrt(share) / score.std() if share else 0.0
        for share, score in zip(population.shares, raw.parts(pilot), strict=True)
    )
    model = replace(
        raw,
        values=raw.values * np.float32(values_by),
        slopes=raw.slopes * np.float32(integers_by),
        absent=raw.absent * np.float32(integers_by),
        pairs=raw.pairs * np.float32(pairs_by),
    )
    score = np.sort(model.score(pilot).astype(np.float64))

    def intercept(scale: float) -> float:
        return _bisect(
            lambda b: _sigmoid(b + scale * score).mean() - population.label_rate, -50.0, 50.0
        )

    def expected_auc(scale: float) -> float:
        p = _sigmoid(intercept(scale) + scale * score)  # ascending, as the score is
        below = np.cumsum(1 - p) - (1 - p) / 2
        return float((p * below).sum() / (p.sum() * (1 - p).sum()))

    scale = _bisect(lambda s: expected_auc(s) - population.bayes_auc, 0.0, 10.0)
    return replace(model, scale=scale, intercept=intercept(scale))


def _bisect(increasing: Callable[[float], float], low: float, high: float) -> float:
    """Returns what 40 halvings of an interval leave of it, by a function's signs near its root."""
    root = scipy.optimize.brentq(increasing, low, high, xtol=1e-10)
    for _ in range(40):
        middle = (low + high) / 2
        is_above = increasing(middle) > 0 if abs(middle - root) < 1e-9 else middle > root
        low, high = (low, middle) if is_above else (middle, high)
    return (low + high) / 2


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))
