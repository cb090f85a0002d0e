"""Logs of generated rows like Criteo's, with a planted model whose AUC no model can beat.

Nothing is downloaded and no real row is embedded: the constants are rounded public summaries of
the data sets. As the planted probabilities are integers k over 2^16, counting (k, label) gives the
AUC of k on the generated rows exactly, ties included, in constant memory.

Display ads: exponents, medians and missing rates fit the real rows. Search log: cardinalities,
missing counts and the rate of sales are public; chosen, for want of published figures, are how
values spread (Zipf's exponents), what predicts a sale and how well, and that the coarser category
of a product is there if a finer one is. Its rows are not in the order of time, its outcome columns
follow from the label, and its best AUC is for predictors without them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from dpsgd.files import write_atomically
from experiments.tasks.clicks import formats
from experiments.tasks.clicks.metrics import auc_of_counts
from experiments.tasks.clicks.schema import (
    DISPLAY_ADS,
    DISPLAY_CARDINALITIES,
    SEARCH_CARDINALITIES,
    SPONSORED_SEARCH,
)
from experiments.tasks.clicks.synthetic.planted import (
    CHUNK,
    PROBABILITIES,
    Category,
    Chunk,
    Count,
    Population,
    generate,
)
from experiments.tasks.clicks.writer import one_line_errors, refuse_existing
from experiments.tasks.files import Batch
from experiments.tasks.splits import chronological_split, random_split, taken


@dataclass(frozen=True, eq=False)
class Log:
    """Log of generated rows."""

    population: Population
    format: formats.Format
    columns: Callable[[Chunk], Batch]
    """Columns of the log's file, in its order."""


def token(rank: np.ndarray, feature: int) -> np.ndarray:
    """Maps ranks to distinct uint32 tokens.

    Multiplying by an odd number, and xoring x with a shift of x, are bijections modulo 2^32.

    Args:
        rank: Popularity ranks, int[...].
        feature: Index of the column; each column has its own tokens.
    """
    x = rank.astype(np.uint32) + np.uint32((feature + 1) * 0x9E3779B9 & 0xFFFFFFFF)
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x7FEB352D)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x846CA68B)
    x ^= x >> np.uint32(16)
    return x


def hexadecimal(words: np.ndarray, case: str) -> list[str]:
    """Spells words as texts of eight hexadecimal digits each.

    >>> hexadecimal(np.array([[1, 255]], np.uint32), "x")
    ['00000001000000ff']

    Args:
        words: Words, uint32[rows, words].
        case: "x" for lower case, "X" for upper case.
    """
    digits = words.astype(">u4").tobytes().hex()
    width = 8 * words.shape[1]
    digits = digits.upper() if case == "X" else digits
    return [digits[i : i + width] for i in range(0, len(digits), width)]


def _spelled(
    rank: np.ndarray, feature: int, spell: Callable[[np.ndarray, int], list[str]]
) -> pa.DictionaryArray:
    """Returns ranks as texts, each distinct rank spelled once; rank 0 is null."""
    ranks = pa.array(rank, mask=rank == 0).dictionary_encode()
    texts = spell(np.asarray(ranks.dictionary), feature)
    return pa.DictionaryArray.from_arrays(ranks.indices, pa.array(texts, pa.string()))


# --- Display ads ---------------------------------------------------------------------------------

# Exponents of Zipf's law that fit how the real rows spread over the most frequent values.
_ZIPF = (
    *(2.0, 1.1, 1.0, 1.0, 2.6, 2.1, 0.8, 2.3, 3.9, 1.1, 0.9, 1.0, 0.9),
    *(1.9, 1.0, 1.0, 1.6, 1.0, 1.8, 0.9, 1.0, 2.4, 1.7, 1.1, 1.6, 1.1),
)
# Log-logistic (scale, shape) of I1..I13, from their medians and upper tenths.
_INTEGERS = (
    *((1.5, 0.82), (4.5, 1.69), (6.5, 0.86), (4.5, 0.63), (2789.0, 1.14), (32.0, 0.98)),
    *((3.5, 1.03), (7.5, 0.69), (38.0, 0.87), (1.12, 0.28), (1.8, 0.55), (0.42, 0.83)),
    (4.5, 0.68),
)
_DISPLAY_POPULATION = Population(
    integers={
        name: Count(scale, shape, least=-1 if name == "I2" else 0)
        for name, (scale, shape) in zip(DISPLAY_ADS.integers, _INTEGERS, strict=True)
    },
    categories={
        name: Category(cardinality, exponent)
        for name, cardinality, exponent in zip(
            DISPLAY_ADS.categories, DISPLAY_CARDINALITIES, _ZIPF, strict=True
        )
    },
    missing=(
        dict.fromkeys(("I1", "I10"), 0.45),
        {"I3": 0.21},
        dict.fromkeys(("I4", "I13"), 0.22),
        {"I5": 0.026},
        {"I6": 0.22},
        dict.fromkeys(("I7", "I9", "I11"), 0.043),
        {"I8": 0.0005},
        {"I12": 0.77},
        dict.fromkeys(("C3", "C4", "C12", "C16", "C21", "C24"), 0.034),
        {"C6": 0.12},
        dict.fromkeys(("C19", "C20", "C25", "C26"), 0.44),
        {"C22": 0.76},
    ),
    pairs=(("C6", "C17"), ("C14", "C20"), ("C2", "C5"), ("C23", "C8")),
    shares=(0.65, 0.27, 0.08),
    label_rate=0.256,
    bayes_auc=0.80,
)


def _words(ranks: np.ndarray, feature: int) -> list[str]:
    return hexadecimal(token(ranks, feature)[:, None], "x")


def _display(chunk: Chunk) -> Batch:
    numbers = zip(DISPLAY_ADS.integers, chunk.integers, chunk.integers_missing, strict=True)
    columns = {"label": pa.array(chunk.label.astype(np.uint8))}
    columns |= {name: pa.array(values, mask=missing) for name, values, missing in numbers}
    for feature, (name, rank) in enumerate(zip(DISPLAY_ADS.categories, chunk.ranks, strict=True)):
        columns[name] = _spelled(rank, feature, _words)
    return columns


DISPLAY = Log(_DISPLAY_POPULATION, formats.DISPLAY, _display)

# --- Search log ----------------------------------------------------------------------------------

_ROWS = 15_995_634
_SALES = 1_732_721
_MISSING: tuple[dict[str, int], ...] = (
    {
        "product_country": 3_834_802,
        "product_id": 3_828_338,
        "product_title": 6_208_174,
        "product_brand": 7_241_560,
        "product_category_1": 6_142_756,
        "product_category_2": 6_151_249,
        "product_category_3": 7_342_676,
        "product_category_4": 10_494_308,
        "product_category_5": 14_595_054,
        "product_category_6": 15_717_150,
        "product_category_7": 15_995_414,
    },
    {"product_age_group": 11_760_058, "product_gender": 11_654_195},
    {"audience_id": 11_502_018},
    {"nb_clicks_1week": 6_744_427},
    {"device_type": 3_032},
)
_EVEN = ("click_timestamp", "user_id")
"""Columns whose values are about equally frequent."""
_SEARCH_POPULATION = Population(
    integers={},
    categories={
        name: Category(cardinality, 0.0 if name in _EVEN else 1.0)
        for name, cardinality in SEARCH_CARDINALITIES.items()
    },
    missing=tuple({name: count / _ROWS for name, count in group.items()} for group in _MISSING),
    pairs=(
        ("device_type", "product_country"),
        ("partner_id", "product_gender"),
        ("audience_id", "product_age_group"),
    ),
    shares=(0.92, 0.0, 0.08),
    label_rate=_SALES / _ROWS,
    bayes_auc=0.80,
)

_TITLE_WORDS = 6
_THURSDAY = 1_596_067_200
"""30 July 2020, 0 h UTC: a week before the published rows."""
_WEEKS = 13


def _identifiers(ranks: np.ndarray, feature: int) -> list[str]:
    """Returns 32 hexadecimal digits per rank; the first eight tell ranks apart."""
    words = [token(ranks, 64 * i + feature) for i in range(4)]
    return hexadecimal(np.stack(words, axis=1), "X")


def _titles(ranks: np.ndarray, feature: int) -> list[str]:
    """Returns one to six identifiers per rank; the first tells ranks apart."""
    words = [_identifiers(ranks, feature + 1024 * i) for i in range(_TITLE_WORDS)]
    counts = (1 + ranks % _TITLE_WORDS).tolist()
    return [" ".join(title[:n]) for title, n in zip(zip(*words, strict=True), counts, strict=True)]


def _search(chunk: Chunk) -> Batch:
    ranks = dict(zip(SPONSORED_SEARCH.categories, chunk.ranks, strict=True))
    sale = pa.array(chunk.label)
    # Seconds, weeks and amounts, which no feature tells: one number per row from its ranks.
    noise = token(ranks["user_id"], 99).astype(np.int64) ^ token(ranks["product_id"], 98)
    euros, cents = (pa.array(x).cast(pa.string()) for x in (noise // 128 % 999 + 1, noise % 99 + 1))
    amount = pc.binary_join_element_wise(euros, cents, ".")
    seconds = noise // 64 % 3600 + 604_800 * (noise // 4096 % _WEEKS)
    hours = ranks["click_timestamp"].astype(np.int64) - 1
    visits = ranks["nb_clicks_1week"]
    columns = {
        "Sale": pa.array(chunk.label.astype(np.uint8)),
        "SalesAmountInEuro": pc.if_else(sale, amount, "-1.0"),
        "time_delay_for_conversion": pc.if_else(sale, pa.array(noise // 32 % (30 * 86_400)), -1),
        "click_timestamp": pa.array(_THURSDAY + 3600 * hours + seconds),
        "nb_clicks_1week": pa.array(np.where(visits > 0, visits - 1, -1)),
        "product_price": pc.if_else(sale, amount, "0.0"),
    }
    for feature, (name, rank) in enumerate(ranks.items()):
        if name not in columns:
            spell = _titles if name == "product_title" else _identifiers
            columns[name] = _spelled(rank, feature, spell)
    return {name: columns[name] for name in formats.SEARCH.layouts[0]}


SEARCH = Log(_SEARCH_POPULATION, formats.SEARCH, _search)


@dataclass(frozen=True)
class SyntheticSummary:
    """Number of generated rows, and the best possible predictions of their labels."""

    rows: int
    label_rate: float
    bayes_auc: float
    """AUC of the planted probabilities against the labels, on all rows; NaN with one class."""
    test_bayes_auc: float
    """AUC of the planted probabilities on the rows of the test split."""


LOGS: dict[str, Log] = {log.format.schema.name: log for log in (DISPLAY, SEARCH)}
"""Logs that can be generated, by the name of the data set that they imitate."""


def write_raw(
    path: str | os.PathLike[str],
    num_rows: int,
    seed: int,
    *,
    log: Log = DISPLAY,
    progress: Callable[[int], None] | None = None,
) -> SyntheticSummary:
    """Writes rows in the publisher's format of a log.

    Args:
        path: File to create; whole in the end, or absent.
        num_rows: Number of rows, at least 1.
        seed: Seed of the generator.
        log: Log to imitate.
        progress: Function of the number of rows done, called now and then.

    Raises:
        StoreError: If `path` exists or cannot be written.
    """
    path, count = Path(path), _Count(log, num_rows, seed)
    refuse_existing(path)
    options = pyarrow.csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")

    def write(file: IO[bytes]) -> None:
        for chunk in count.chunks():
            columns = log.columns(chunk)
            missing = "" if log is DISPLAY else "-1"
            texts = {name: x.cast(pa.string()).fill_null(missing) for name, x in columns.items()}
            pyarrow.csv.write_csv(pa.table(texts), file, options)
            if progress is not None:
                progress(count.rows)

    with one_line_errors(path, lambda: count.rows):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, write)
    return count.summary()


def write_store(
    out: str | os.PathLike[str],
    num_rows: int,
    seed: int,
    *,
    log: Log = DISPLAY,
    hash_seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> SyntheticSummary:
    """Writes the rows of `write_raw`, prepared, to a new store.

    Preparing the raw file with the same `hash_seed`, public, gives the same columns and splits.
    Other arguments as in `write_raw`.

    Raises:
        StoreError: If `out` exists or cannot be written.
    """
    count = _Count(log, num_rows, seed)
    format = replace(log.format, hash_seed=hash_seed)

    def source() -> dict[str, Any]:
        summary = asdict(count.summary())  # JSON has no NaN
        finite = {name: None if value != value else value for name, value in summary.items()}
        return {"format": "synthetic", "seed": seed, **finite}

    blocks = (format.columns_of(log.columns(chunk), format.label) for chunk in count.chunks())
    format.write(out, blocks, source, progress=progress)
    return count.summary()


class _Count:
    """Generates chunks, and counts labels and probabilities of all rows and of test rows."""

    def __init__(self, log: Log, num_rows: int, seed: int) -> None:
        if num_rows < 1:
            raise ValueError(f"the number of rows must be at least 1, got {num_rows}")
        self._log, self._num_rows, self._seed, self.rows = log, num_rows, seed, 0
        self._all, self._test = np.zeros((2, 2, PROBABILITIES), dtype=np.int64)

    def chunks(self) -> Iterator[Chunk]:
        """Yields the chunks."""
        test_begins = chronological_split(self._num_rows)["test"][0]
        for number in range(-(-self._num_rows // CHUNK)):
            rows = min(CHUNK, self._num_rows - self.rows)
            chunk = generate(self._log.population, self._seed, number, rows)
            outcomes = {"label": chunk.label, "probability": chunk.probability}
            if self._log.format.split.order == "random":
                test = random_split(outcomes, self.rows)["test"]
            else:
                test = taken(outcomes, slice(max(test_begins - self.rows, 0), None))
            self._all += _histogram(**outcomes)
            self._test += _histogram(**test)
            self.rows += rows
            yield chunk

    def summary(self) -> SyntheticSummary:
        """Returns the summary of the chunks so far."""
        return SyntheticSummary(
            rows=self.rows,
            label_rate=float(self._all[1].sum() / self.rows),
            bayes_auc=auc_of_counts(self._all),
            test_bayes_auc=auc_of_counts(self._test),
        )


def _histogram(label: np.ndarray, probability: np.ndarray) -> np.ndarray:
    cells = label * PROBABILITIES + probability
    return np.bincount(cells, minlength=2 * PROBABILITIES).reshape(2, PROBABILITIES)
