"""Rows like Criteo's, of any number, with a planted model whose AUC no model can beat.

Nothing is downloaded and no real row is embedded: the constants are rounded public summaries of
the data sets. As the planted probabilities are integers k over 2^16, counting (k, label) gives the
AUC of k on the generated rows exactly, ties included, in constant memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.csv

from dpsgd.files import write_atomically
from experiments.tasks.clicks.metrics import auc_of_counts
from experiments.tasks.clicks.synthetic.logs import DISPLAY, SEARCH, Log
from experiments.tasks.clicks.synthetic.planted import CHUNK, PROBABILITIES, Chunk, generate
from experiments.tasks.clicks.writer import one_line_errors, refuse_existing
from experiments.tasks.splits import chronological_split, random_split, taken


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
