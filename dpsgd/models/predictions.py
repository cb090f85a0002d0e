"""Predictions, batch by batch in one compiled program, in memory or to a file."""

from __future__ import annotations

import csv
import functools
import gzip
import io
import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO, Any

import jax
import numpy as np

from dpsgd.files import write_atomically
from dpsgd.runs.directory import RunDirectory

PyTree = Any

BATCH = 8192
"""Number of rows that one call of the compiled program predicts."""

FEW = 64
"""Largest number of rows that use a smaller compiled program."""


def predictions(
    predict: Callable[[PyTree, PyTree], Any],
    params: PyTree,
    rows: PyTree,
    *,
    batch: int | None = None,
) -> np.ndarray:
    """Returns one prediction per row.

    >>> predictions(lambda w, x: w * x, 2.0, np.arange(3.0, dtype=np.float32)).tolist()
    [0.0, 2.0, 4.0]

    Args:
      predict: (params, rows) -> array, a pure function that treats every row alike. It is compiled
        once for each batch size.
      params: Parameters of the model, preferably on the device.
      rows: Arrays with one leading row per example.
      batch: Rows per call; by default `BATCH`.
    """
    compiled, batch = _compiled(predict), batch or BATCH
    num_rows = len(jax.tree.leaves(rows)[0])
    if not num_rows:
        empty = jax.eval_shape(predict, params, rows)
        return np.zeros(empty.shape, empty.dtype)
    batches = []  # all batches are sent before one is awaited
    for start in range(0, num_rows, batch):
        # The last batch repeats a row up to the fixed shape; its surplus is cut off again.
        rows_at = np.minimum(np.arange(start, start + batch), num_rows - 1)
        batches.append(compiled(params, jax.tree.map(lambda x, rows_at=rows_at: x[rows_at], rows)))
    return np.concatenate(batches)[:num_rows]


@functools.lru_cache(maxsize=8)
def _compiled(predict: Callable[[PyTree, PyTree], Any]) -> Callable[[PyTree, PyTree], Any]:
    """Returns the compiled program of `predict`, shared by all calls."""
    return jax.jit(predict)


def write_predictions(
    out: Path,
    blocks: Iterable[np.ndarray],
    *,
    name: str = "prediction",
    columns: Sequence[str] = (),
    keys: tuple[str, Iterable[str]] | None = None,
    progress: Callable[[int], None] = lambda rows: None,
) -> tuple[int, int]:
    """Writes predictions to a CSV file.

    `out` is either complete in the end or does not exist.

    Args:
      out: File to create, compressed if its name ends in ".gz".
      blocks: Predictions of consecutive rows: one number each, or several.
      name: Name of a single column; several are "name_0", "name_1", ...
      columns: Suffixes in place of 0, 1, ... for several columns.
      keys: Name of a first column, and its value for each row.
      progress: Function of the number of rows done, called after every block.

    Returns:
      (number of rows, number of rows without a prediction: NaN).

    Raises:
      FileExistsError: If `out` exists; it stays unchanged.
      FileNotFoundError: If its folder does not exist.

    Memory is constant; the file has one line per row.
    """
    RunDirectory.refuse_existing(out)
    if not out.parent.is_dir():
        raise FileNotFoundError(f"{out.parent} is not a folder; create it for {out.name}")
    num_rows = undefined = 0
    key, row_keys = (None, None) if keys is None else (keys[0], iter(keys[1]))

    def line(fields: Iterable[str]) -> str:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerow(fields)
        return text.getvalue()

    def write(put: Callable[[bytes], object]) -> None:
        nonlocal num_rows, undefined
        header: list[str] = []
        first = [] if key is None else [key]
        for block in blocks:
            table = block.reshape(len(block), -1)
            if not header:
                wide = columns or range(table.shape[1])
                header = [f"{name}_{i}" for i in wide] if block.ndim > 1 else [name]
                put(line([*first, *header]).encode())
            cells = [[f"{x:.9g}" for x in row] for row in table.tolist()]
            if row_keys is None:
                put("".join(",".join(row) + "\n" for row in cells).encode())
            else:
                named = zip(itertools.islice(row_keys, len(cells)), cells, strict=True)
                put("".join(line([value, *row]) for value, row in named).encode())
            num_rows += len(table)
            undefined += int(np.isnan(table).any(axis=1).sum())
            progress(num_rows)
        if not header:
            put(line([*first, name]).encode())

    def write_new(file: IO[bytes]) -> None:
        if out.suffix == ".gz":
            with gzip.GzipFile(fileobj=file, mode="wb", mtime=0, compresslevel=6) as packed:
                write(packed.write)
        else:
            write(file.write)
        RunDirectory.refuse_existing(out)

    write_atomically(out, write_new)
    return num_rows, undefined
