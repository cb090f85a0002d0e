"""Click data like Criteo's, of any size, with a planted model whose AUC nobody can beat.

Rows come in chunks, each a pure function of (seed, chunk): any chunk can be made alone, on any
machine, and more rows only append. Nothing is downloaded and no real row is embedded: the
constants are rounded public summaries of the data set.

Features. The value of categorical column c is its popularity rank r in 1..N_c, N_c the real
cardinality, drawn from Zipf's law made continuous, ``Pr[rank <= r] proportional to
integral_1^{r+1} t^{-a_c} dt``, which inverts in closed form; integers are log-logistic, rounded
down. Columns depend on each other through two latent uniforms per row: a column draws from
``(latent + shift + width * v) mod 1``, v uniform, which is uniform whatever the width. Missing
values come together in the groups in which they do in the real data.

Label. ``Pr[label = 1 | features] = k / 2^16`` with k = round(2^16 sigmoid(b + s * score)), where
the score is a sum of effects of the values, of the logarithms of the integers and of pairs of
values. It depends on the features that are written and on nothing else, so no predictor can have
a larger expected AUC than k; and as k is an integer, counting (k, label) gives the AUC of k on
the generated rows exactly, ties included, in constant memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.criteo.schema import (
    DISPLAY_ADS,
    DISPLAY_CARDINALITIES,
    MISSING,
    log_transform,
)
from experiments.criteo.splits import chronological_split
from experiments.criteo.store import Columns, Store
from experiments.criteo.writer import StoreWriter, one_line_errors, refuse_existing

CHUNK = 1 << 16
"""Rows that share one random stream."""
CLICK_RATE = 0.256
BAYES_AUC = 0.80
"""What the planted model is scaled to, in expectation over rows."""

# Exponents of Zipf's law that fit how the real rows spread over the most frequent values.
_ZIPF = (
    *(2.0, 1.1, 1.0, 1.0, 2.6, 2.1, 0.8, 2.3, 3.9, 1.1, 0.9, 1.0, 0.9),
    *(1.9, 1.0, 1.0, 1.6, 1.0, 1.8, 0.9, 1.0, 2.4, 1.7, 1.1, 1.6, 1.1),
)
# Log-logistic (scale, shape) of I1..I13, from their medians and upper tenths; I2 is one less.
_INTEGERS = (
    *((1.5, 0.82), (4.5, 1.69), (6.5, 0.86), (4.5, 0.63), (2789.0, 1.14), (32.0, 0.98)),
    *((3.5, 1.03), (7.5, 0.69), (38.0, 0.87), (1.12, 0.28), (1.8, 0.55), (0.42, 0.83)),
    (4.5, 0.68),
)
_MAX_INTEGER = 9_999_999
# Columns that are missing together, and how often.
_MISSING: tuple[tuple[float, tuple[str, ...]], ...] = (
    (0.45, ("I1", "I10")),
    (0.21, ("I3",)),
    (0.22, ("I4", "I13")),
    (0.026, ("I5",)),
    (0.22, ("I6",)),
    (0.043, ("I7", "I9", "I11")),
    (0.0005, ("I8",)),
    (0.77, ("I12",)),
    (0.034, ("C3", "C4", "C12", "C16", "C21", "C24")),
    (0.12, ("C6",)),
    (0.44, ("C19", "C20", "C25", "C26")),
    (0.76, ("C22",)),
)
# Pairs of columns whose frequent values interact: an additive model misses this part.
_PAIRS = (("C6", "C17"), ("C14", "C20"), ("C2", "C5"), ("C23", "C8"))
_PAIR_VALUES = 16
# Shares of the score's variance: values, integers, pairs.
_SHARES = (0.65, 0.27, 0.08)
# Frequent values matter more: the variance of an effect halves by this rank, and goes on falling
# with the rank. Ranks past the second limit share one effect. More rows teach ever rarer values.
_HALF_POWER_RANK = 150
_RANKS_WITH_EFFECT = 1 << 14

_NUM_INTEGERS = len(DISPLAY_ADS.integers)
_NUM_CATEGORIES = len(DISPLAY_ADS.categories)
_PROBABILITIES = 1 << 16


@dataclass(frozen=True)
class SyntheticSummary:
    """What was generated, and how well its labels can be predicted at best."""

    rows: int
    click_rate: float
    bayes_auc: float
    """AUC of the planted probabilities against the labels, on all rows; NaN with one class."""
    test_bayes_auc: float
    """The same on the last tenth of the rows, the test split of `chronological_split`."""


class SyntheticStore(NamedTuple):
    """A store of generated rows and their summary."""

    store: Store
    summary: SyntheticSummary


class Chunk(NamedTuple):
    """The rows of one chunk, as drawn: one column of an array per column of the schema."""

    label: np.ndarray
    """bool [n]"""
    integers: np.ndarray
    """int32 [13, n]; meaningless where missing"""
    integers_missing: np.ndarray
    """bool [13, n]"""
    ranks: np.ndarray
    """int32 [26, n]; 0 is missing"""
    probability: np.ndarray
    """int64 [n]; 2^16 times the probability of a click"""


def write_raw(
    path: str | os.PathLike[str],
    num_rows: int,
    seed: int,
    *,
    progress: Callable[[int], None] | None = None,
) -> SyntheticSummary:
    """Write `num_rows` rows (>= 1) in the Kaggle format to the new file `path`.

    The file appears under its name only when it is whole.

    Raises:
        StoreError: `path` exists or cannot be written.
    """
    path = Path(path)
    _check_rows(num_rows)
    refuse_existing(path)
    partial = path.parent / f".{path.name}.partial"
    count = _Count(num_rows)
    with one_line_errors(path, lambda: count.rows):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(partial, "wb") as file:
                for chunk in _chunks(num_rows, seed):
                    for begin in range(0, len(chunk.label), _TEXT_ROWS):
                        file.write(_text(_rows(chunk, slice(begin, begin + _TEXT_ROWS))))
                    count.add(chunk)
                    if progress is not None:
                        progress(count.rows)
                file.flush()
                os.fsync(file.fileno())
            os.rename(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    return count.summary()


def write_store(
    out: str | os.PathLike[str],
    num_rows: int,
    seed: int,
    *,
    hash_seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> SyntheticStore:
    """Write the rows of `write_raw`, prepared, to the new store `out`, without the text between.

    The columns equal those of preparing the raw file with the same `hash_seed`.

    Raises:
        StoreError: `out` exists or cannot be written.
    """
    _check_rows(num_rows)
    count = _Count(num_rows)
    with StoreWriter(out, DISPLAY_ADS, hash_seed=hash_seed) as writer:
        for chunk in _chunks(num_rows, seed):
            writer.append(_columns(chunk, hash_seed))
            count.add(chunk)
            if progress is not None:
                progress(count.rows)
        summary = count.summary()
        store = writer.finish(
            splits=chronological_split(num_rows),
            source={"format": "synthetic", "seed": seed, **_finite(asdict(summary))},
        )
    return SyntheticStore(store, summary)


def generate(seed: int, chunk: int, rows: int = CHUNK) -> Chunk:
    """Return the first `rows` (at most 65,536) rows of one chunk, a pure function of the arguments.

    Raises:
        ValueError: `seed` or `chunk` is negative.
    """
    drawn = _features(np.random.Generator(np.random.SFC64([_check(seed), _check(chunk), 0])))
    model = _planted_model(seed)
    scaled = model.intercept + model.scale * model.score(drawn)
    probability = _integer_probability(scaled)
    labels = np.random.Generator(np.random.SFC64([seed, chunk, 1]))
    # Exact: an integer below 2^16, uniform, is below k with probability k / 2^16.
    label = labels.integers(_PROBABILITIES, size=CHUNK) < probability
    return _rows(drawn._replace(label=label, probability=probability), slice(0, rows))


def _check(value: int) -> int:
    if value < 0:
        raise ValueError(f"seeds and chunk numbers must be at least 0, not {value}")
    return value


def _check_rows(num_rows: int) -> None:
    if num_rows < 1:
        raise ValueError(f"the number of rows must be at least 1, not {num_rows}")


def _chunks(num_rows: int, seed: int) -> Iterator[Chunk]:
    for chunk in range(-(-num_rows // CHUNK)):
        yield generate(seed, chunk, min(CHUNK, num_rows - chunk * CHUNK))


def _rows(chunk: Chunk, rows: slice) -> Chunk:
    return Chunk(*(column[..., rows] for column in chunk))


# --- Features ------------------------------------------------------------------------------------


def _features(rng: np.random.Generator) -> Chunk:
    """Draw the features of one chunk; label and probability are zeros still."""
    n = CHUNK
    missing = {}
    for rate, names in _MISSING:
        absent = rng.random(n) < rate
        missing.update(dict.fromkeys(names, absent))
    latents = rng.random((2, n))

    def uniform(column: int) -> np.ndarray:
        """Return uniforms that depend on one of the two latents, more in some columns than others.

        The shifts, multiples of the golden ratio, keep the columns' popular values apart.
        """
        width = (0.3, 0.6, 1.0)[column % 3]
        u = rng.random(n)
        u *= width
        u += latents[column % 2]
        u += (column * 0.6180339887498949) % 1
        u -= np.floor(u)
        return u

    integers = np.empty((_NUM_INTEGERS, n), dtype=np.int32)
    integers_missing = np.zeros((_NUM_INTEGERS, n), dtype=bool)
    for j, (scale, shape) in enumerate(_INTEGERS):
        u = np.clip(uniform(j), 1e-12, 1 - 1e-12)
        x = np.exp(shape * (np.log(u) - np.log1p(-u)))
        x *= scale
        integers[j] = np.minimum(x, _MAX_INTEGER)
        if DISPLAY_ADS.integers[j] == "I2":
            integers[j] -= 1
        if DISPLAY_ADS.integers[j] in missing:
            integers_missing[j] = missing[DISPLAY_ADS.integers[j]]

    ranks = np.empty((_NUM_CATEGORIES, n), dtype=np.int32)
    for j, (cardinality, exponent) in enumerate(zip(DISPLAY_CARDINALITIES, _ZIPF, strict=True)):
        u = uniform(_NUM_INTEGERS + j)
        # The inverse of (x^(1 - a) - 1) / ((N + 1)^(1 - a) - 1); log x / log(N + 1) where a = 1.
        if exponent == 1:
            x = np.exp(u * np.log(cardinality + 1))
        else:
            power = 1 - exponent
            x = np.exp(np.log1p(u * ((cardinality + 1) ** power - 1)) / power)
        ranks[j] = np.clip(x, 1, cardinality)
        if DISPLAY_ADS.categories[j] in missing:
            ranks[j][missing[DISPLAY_ADS.categories[j]]] = MISSING
    zeros = np.zeros(n, dtype=np.int64)
    return Chunk(zeros.astype(bool), integers, integers_missing, ranks, zeros)


# --- The planted model ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _PlantedModel:
    values: np.ndarray
    """float32 [26, ranks]: the effect of each value"""
    slopes: np.ndarray
    """float32 [13]: the effect of one unit of the transformed integer"""
    absent: np.ndarray
    """float32 [13]: the effect of a missing integer"""
    pairs: np.ndarray
    """float32 [pairs, 16, 16]: the effect of two frequent values together"""
    scale: float = 1.0
    intercept: float = 0.0

    def parts(self, chunk: Chunk) -> np.ndarray:
        """Return float32 [3, n]: the parts of the score due to values, integers and pairs."""
        parts = np.zeros((3, chunk.ranks.shape[1]), dtype=np.float32)
        for effect, rank in zip(self.values, chunk.ranks, strict=True):
            parts[0] += effect[np.minimum(rank, _RANKS_WITH_EFFECT - 1)]
        for j in range(_NUM_INTEGERS):
            effect = self.slopes[j] * log_transform(chunk.integers[j])
            parts[1] += np.where(chunk.integers_missing[j], self.absent[j], effect)
        for effect, (a, b) in zip(self.pairs, _PAIRS, strict=True):
            first = chunk.ranks[DISPLAY_ADS.categories.index(a)]
            second = chunk.ranks[DISPLAY_ADS.categories.index(b)]
            last = _PAIR_VALUES - 1
            parts[2] += effect[np.minimum(first, last), np.minimum(second, last)]
        return parts

    def score(self, chunk: Chunk) -> np.ndarray:
        """Return the score, float32 [n]."""
        return self.parts(chunk).sum(axis=0)


@lru_cache(maxsize=4)
def _planted_model(seed: int) -> _PlantedModel:
    """Return the model of `seed`: effects drawn at random, then scaled on one chunk of features.

    The scaling uses the *probabilities* of a chunk that is never written, so that click rate and
    Bayes AUC are those of `CLICK_RATE` and `BAYES_AUC` in expectation, up to that chunk's sampling.
    """
    rng = np.random.Generator(np.random.SFC64([_check(seed), 0, 2]))
    pilot = _features(np.random.Generator(np.random.SFC64([seed, 0, 3])))
    values = rng.normal(size=(_NUM_CATEGORIES, _RANKS_WITH_EFFECT))
    values *= rng.uniform(0.5, 1.5, size=(_NUM_CATEGORIES, 1))
    values /= np.sqrt(1 + np.arange(_RANKS_WITH_EFFECT) / _HALF_POWER_RANK)
    slopes = rng.normal(size=_NUM_INTEGERS)
    for j in range(_NUM_INTEGERS):  # all columns on one footing, whatever their range
        slopes[j] /= log_transform(pilot.integers[j]).std()
    raw = _PlantedModel(
        values=values.astype(np.float32),
        slopes=slopes.astype(np.float32),
        absent=rng.normal(size=_NUM_INTEGERS).astype(np.float32),
        pairs=rng.normal(size=(len(_PAIRS), _PAIR_VALUES, _PAIR_VALUES)).astype(np.float32),
    )
    values_by, integers_by, pairs_by = (
        np.sqrt(share) / part.std() for share, part in zip(_SHARES, raw.parts(pilot), strict=True)
    )
    model = _PlantedModel(
        values=raw.values * np.float32(values_by),
        slopes=raw.slopes * np.float32(integers_by),
        absent=raw.absent * np.float32(integers_by),
        pairs=raw.pairs * np.float32(pairs_by),
    )
    score = np.sort(model.score(pilot).astype(np.float64))

    def intercept(scale: float) -> float:
        return _bisect(lambda b: _sigmoid(b + scale * score).mean() - CLICK_RATE, -50.0, 50.0)

    def expected_auc(scale: float) -> float:
        p = _sigmoid(intercept(scale) + scale * score)  # ascending, as the score is
        below = np.cumsum(1 - p) - (1 - p) / 2
        return float((p * below).sum() / (p.sum() * (1 - p).sum()))

    scale = _bisect(lambda s: expected_auc(s) - BAYES_AUC, 0.0, 10.0)
    return _PlantedModel(
        values=model.values,
        slopes=model.slopes,
        absent=model.absent,
        pairs=model.pairs,
        scale=scale,
        intercept=intercept(scale),
    )


def _bisect(increasing: Callable[[float], float], low: float, high: float) -> float:
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if increasing(middle) > 0 else (middle, high)
    return (low + high) / 2


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def _integer_probability(logit: np.ndarray) -> np.ndarray:
    """Return 2^16 times the probability, an integer strictly between 0 and 2^16."""
    k = np.rint(_PROBABILITIES * _sigmoid(logit.astype(np.float64))).astype(np.int64)
    return np.clip(k, 1, _PROBABILITIES - 1)


# --- Counting ------------------------------------------------------------------------------------


def _finite(record: dict[str, Any]) -> dict[str, Any]:
    """Return `record` with None for what is no number, which JSON has no word for."""
    return {name: None if value != value else value for name, value in record.items()}


class _Count:
    """Counts (probability, label) as rows go by, the test rows apart."""

    def __init__(self, num_rows: int) -> None:
        self.rows = 0
        self._test_begins = chronological_split(num_rows)["test"][0]
        self._all = np.zeros((2, _PROBABILITIES), dtype=np.int64)
        self._test = np.zeros((2, _PROBABILITIES), dtype=np.int64)

    def add(self, chunk: Chunk) -> None:
        self._all += _histogram(chunk)
        first = max(self._test_begins - self.rows, 0)
        self._test += _histogram(_rows(chunk, slice(first, None)))
        self.rows += len(chunk.label)

    def summary(self) -> SyntheticSummary:
        return SyntheticSummary(
            rows=self.rows,
            click_rate=float(self._all[1].sum() / self.rows),
            bayes_auc=auc_of_counts(self._all),
            test_bayes_auc=auc_of_counts(self._test),
        )


def _histogram(chunk: Chunk) -> np.ndarray:
    cells = chunk.label * _PROBABILITIES + chunk.probability
    return np.bincount(cells, minlength=2 * _PROBABILITIES).reshape(2, _PROBABILITIES)


def auc_of_counts(counts: np.ndarray) -> float:
    """Return the exact AUC of an integer score, ties counted half, from `counts` [label, score].

    ``(#{positive above negative} + #{equal} / 2) / (positives * negatives)``; NaN with one class.

    >>> auc_of_counts(np.array([[2, 1, 0], [0, 1, 1]]))
    0.9166666666666666
    """
    negative, positive = counts.astype(np.float64)
    pairs = positive.sum() * negative.sum()
    if pairs == 0:
        return float("nan")
    below = np.cumsum(negative) - negative / 2
    return float((positive * below).sum() / pairs)


# --- Values --------------------------------------------------------------------------------------


def _token(rank: np.ndarray, feature: int) -> np.ndarray:
    """Return the 32-bit value that stands for each rank; distinct ranks get distinct values.

    Multiplying by an odd number and xoring with a shifted self are bijections modulo 2^32.
    """
    x = rank.astype(np.uint32) + np.uint32((feature + 1) * 0x9E3779B9 & 0xFFFFFFFF)
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x7FEB352D)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x846CA68B)
    x ^= x >> np.uint32(16)
    return x


def _columns(chunk: Chunk, hash_seed: int) -> Columns:
    """Return the columns of a store."""
    n = len(chunk.label)
    integers = np.empty((n, _NUM_INTEGERS), dtype=np.float32)
    for j, column in enumerate(chunk.integers):
        integers[:, j] = np.where(chunk.integers_missing[j], 0, log_transform(column))
    categories = np.empty((n, _NUM_CATEGORIES), dtype=np.int32)
    for j, rank in enumerate(chunk.ranks):
        ids = DISPLAY_ADS.hash(_token(rank, j), j, hash_seed)
        categories[:, j] = np.where(rank == MISSING, MISSING, ids)
    return {
        "label": chunk.label.astype(np.uint8),
        "integers": integers,
        "integers_missing": np.ascontiguousarray(chunk.integers_missing.T),
        "categories": categories,
    }


_TEXT_ROWS = 1 << 13  # whose text, at full width, fits in a cache
_POWERS = 10 ** np.arange(6, -1, -1)
_HEX_PAIRS = np.array([list(b"%02x" % i) for i in range(256)], dtype=np.uint8)


def _text(chunk: Chunk) -> bytes:
    """Return the rows in the Kaggle format.

    Every field is written at its full width, zero bytes where it has no character; then the zero
    bytes are taken out.
    """
    digits = len(_POWERS)
    width = 1 + _NUM_INTEGERS * (2 + digits) + _NUM_CATEGORIES * 9 + 1
    text = np.zeros((len(chunk.label), width), dtype=np.uint8)
    text[:, 0] = chunk.label + ord("0")
    at = 1
    for value, absent in zip(chunk.integers, chunk.integers_missing, strict=True):
        text[:, at] = ord("\t")
        text[:, at + 1] = ((value < 0) & ~absent) * ord("-")
        magnitude = np.abs(value)
        for i, power in enumerate(_POWERS):
            shown = ((magnitude >= power) | (power == 1)) & ~absent
            text[:, at + 2 + i] = shown * (magnitude // power % 10 + ord("0"))
        at += 2 + digits
    for feature, rank in enumerate(chunk.ranks):
        text[:, at] = ord("\t")
        octets = _token(rank, feature).astype(">u4").view(np.uint8).reshape(-1, 4)
        characters = _HEX_PAIRS[octets].reshape(-1, 8)
        text[:, at + 1 : at + 9] = np.where((rank == MISSING)[:, None], 0, characters)
        at += 9
    text[:, at] = ord("\n")
    flat = text.ravel()
    return flat[flat != 0].tobytes()
