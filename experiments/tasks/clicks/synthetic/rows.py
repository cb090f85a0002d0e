"""Logs like Criteo's, of any size, with a planted model whose AUC no model can beat.

Nothing is downloaded and no real row is embedded: the constants are rounded public summaries of
the data sets. As the planted probabilities are integers k over 2^16, counting (k, label) gives the
AUC of k on the generated rows exactly, ties included, in constant memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from dpsgd.files import write_atomically
from experiments.tasks.clicks.schema import MISSING, log_transform
from experiments.tasks.clicks.store import Columns, Store, empty_columns
from experiments.tasks.clicks.synthetic.display import DISPLAY
from experiments.tasks.clicks.synthetic.planted import CHUNK, PROBABILITIES, Chunk, generate
from experiments.tasks.clicks.synthetic.search import SEARCH
from experiments.tasks.clicks.synthetic.text import Log, text
from experiments.tasks.clicks.writer import one_line_errors, refuse_existing
from experiments.tasks.splits import chronological_split, random_split, taken


@dataclass(frozen=True)
class SyntheticSummary:
    """What was generated, and how well its labels can be predicted at best."""

    rows: int
    label_rate: float
    bayes_auc: float
    """AUC of the planted probabilities against the labels, on all rows; NaN with one class."""
    test_bayes_auc: float
    """The same on the rows of the test split."""


class SyntheticStore(NamedTuple):
    """A store of generated rows and their summary."""

    store: Store
    summary: SyntheticSummary


class InMemory(NamedTuple):
    """Generated rows that are in no store, and how well their labels can be predicted at best."""

    columns: Columns
    bayes_auc: float
    """AUC of the planted probabilities against the labels; NaN with one class."""


LOGS: dict[str, Log] = {log.format.schema.name: log for log in (DISPLAY, SEARCH)}
"""What can be generated, by the name of the data set that it is like."""


def write_raw(
    path: str | os.PathLike[str],
    num_rows: int,
    seed: int,
    *,
    log: Log = DISPLAY,
    progress: Callable[[int], None] | None = None,
) -> SyntheticSummary:
    """Write `num_rows` rows (>= 1) in the raw format of `log` to the new file `path`.

    The file appears under its name only when it is whole.

    Raises:
        StoreError: `path` exists or cannot be written.
    """
    path, count = Path(path), _Count(log, num_rows, seed)
    refuse_existing(path)

    def write(file: IO[bytes]) -> None:
        for chunk in count.chunks():
            file.write(text(log, chunk))
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
) -> SyntheticStore:
    """Write the rows of `write_raw`, prepared, to the new store `out`, without the text between.

    Columns and splits equal those of preparing the raw file with the same `hash_seed`.

    Raises:
        StoreError: `out` exists or cannot be written.
    """
    count = _Count(log, num_rows, seed)

    def source() -> dict[str, Any]:
        summary = asdict(count.summary())  # JSON has no word for what is no number
        finite = {name: None if value != value else value for name, value in summary.items()}
        return {"format": "synthetic", "seed": seed, **finite}

    blocks = (_columns(log, chunk, hash_seed) for chunk in count.chunks())
    format = replace(log.format, hash_seed=hash_seed)
    store = format.write(out, blocks, source, progress=progress)
    return SyntheticStore(store, count.summary())


def in_memory(num_rows: int, seed: int, *, log: Log = DISPLAY, first_chunk: int = 0) -> InMemory:
    """Return the rows from the chunk `first_chunk` on, as the columns of a store, in memory.

    The chunks are drawn by as many threads as there are processors.
    """
    _check_rows(num_rows)
    columns = empty_columns(log.format.schema, num_rows)

    def draw(begin: int) -> np.ndarray:
        rows = min(CHUNK, num_rows - begin)
        chunk = generate(log.population, seed, first_chunk + begin // CHUNK, rows)
        for name, column in _columns(log, chunk, hash_seed=0).items():
            columns[name][begin : begin + rows] = column
        return _histogram(chunk.label, chunk.probability)

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        counts = sum(threads.map(draw, range(0, num_rows, CHUNK)))
    return InMemory(columns, auc_of_counts(np.asarray(counts)))


def _check_rows(num_rows: int) -> None:
    if num_rows < 1:
        raise ValueError(f"the number of rows must be at least 1, not {num_rows}")


def _columns(log: Log, chunk: Chunk, hash_seed: int) -> Columns:
    """Return the columns of a store."""
    schema = log.format.schema
    columns = empty_columns(schema, len(chunk.label))
    columns["label"][:] = chunk.label
    columns["integers_missing"][:] = chunk.integers_missing.T
    for j, column in enumerate(chunk.integers):
        columns["integers"][:, j] = np.where(chunk.integers_missing[j], 0, log_transform(column))
    for j, rank in enumerate(chunk.ranks):
        ids = schema.hash(log.value(rank, j), j, hash_seed)
        columns["categories"][:, j] = np.where(rank == MISSING, MISSING, ids)
    return columns


class _Count:
    """Generates chunks of rows, and counts their labels and probabilities, the test rows apart."""

    def __init__(self, log: Log, num_rows: int, seed: int) -> None:
        _check_rows(num_rows)
        self._log, self._num_rows, self._seed, self.rows = log, num_rows, seed, 0
        self._all, self._test = np.zeros((2, 2, PROBABILITIES), dtype=np.int64)

    def chunks(self) -> Iterator[Chunk]:
        """Yield the chunks."""
        test_begins = chronological_split(self._num_rows)["test"][0]
        for number in range(-(-self._num_rows // CHUNK)):
            rows = min(CHUNK, self._num_rows - self.rows)
            chunk = generate(self._log.population, self._seed, number, rows)
            drawn = {"label": chunk.label, "probability": chunk.probability}
            if self._log.format.split.order == "random":
                test = random_split(drawn, self.rows)["test"]
            else:
                test = taken(drawn, slice(max(test_begins - self.rows, 0), None))
            self._all += _histogram(**drawn)
            self._test += _histogram(**test)
            self.rows += rows
            yield chunk

    def summary(self) -> SyntheticSummary:
        return SyntheticSummary(
            rows=self.rows,
            label_rate=float(self._all[1].sum() / self.rows),
            bayes_auc=auc_of_counts(self._all),
            test_bayes_auc=auc_of_counts(self._test),
        )


def _histogram(label: np.ndarray, probability: np.ndarray) -> np.ndarray:
    cells = label * PROBABILITIES + probability
    return np.bincount(cells, minlength=2 * PROBABILITIES).reshape(2, PROBABILITIES)


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
