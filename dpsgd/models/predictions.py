"""What a model says of rows: batch by batch in one compiled program, in memory or in a file."""

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
"""Rows that are looked at at once, in one compiled program."""

FEW = 64
"""Where no more rows than these are given, a program of its own takes them."""


def predictions(
    predict: Callable[[PyTree, PyTree], Any],
    params: PyTree,
    rows: PyTree,
    *,
    batch: int | None = None,
) -> np.ndarray:
    """Returns what `predict` says of `rows`: an array with a row each.

    Args:
      predict: (params, rows) -> array, a pure function that treats every row alike. It is compiled
        once for each size of batch.
      params: The model's parameters, best on the device.
      rows: Arrays with one leading row an example.
      batch: Rows to look at at once; by default `BATCH`.
    """
    compiled, batch = _compiled(predict), batch or BATCH
    num_rows = len(jax.tree.leaves(rows)[0])
    if not num_rows:
        none = jax.eval_shape(predict, params, rows)
        return np.zeros(none.shape, none.dtype)
    found = []  # all batches are sent before one is awaited
    for start in range(0, num_rows, batch):
        # The last batch repeats a row up to the fixed shape; its surplus is cut off again.
        at = np.minimum(np.arange(start, start + batch), num_rows - 1)
        found.append(compiled(params, jax.tree.map(lambda x, at=at: x[at], rows)))
    return np.concatenate(found)[:num_rows]


@functools.lru_cache(maxsize=8)
def _compiled(predict: Callable[[PyTree, PyTree], Any]) -> Callable[[PyTree, PyTree], Any]:
    """Returns one compiled program for all who ask."""
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
    """Writes predictions to a CSV file, one line a row, in constant memory.

    Either `out` is a whole file in the end or it does not exist.

    Args:
      out: File to create, compressed if its name ends in ".gz".
      blocks: Predictions of consecutive rows: a number each, or several.
      name: Of the one column; of several "name_0", "name_1", ...
      columns: What stands for 0, 1, ... in names of several.
      keys: Name of a first column, and its value for each row.
      progress: Called with the number of rows done, after every block.

    Returns:
      (rows, how many of them the model gives no number: NaN).

    Raises:
      FileExistsError: if there is something at `out`; it is left as it is.
      FileNotFoundError: if there is no folder for it.
    """
    RunDirectory.refuse_existing(out)
    if not out.parent.is_dir():
        raise FileNotFoundError(f"{out.parent}, where {out.name} is to be written, is no folder")
    num_rows = undefined = 0
    key, of_rows = (None, None) if keys is None else (keys[0], iter(keys[1]))

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
            found = [[f"{x:.9g}" for x in row] for row in table.tolist()]
            if of_rows is None:
                put("".join(",".join(row) + "\n" for row in found).encode())
            else:
                named = zip(itertools.islice(of_rows, len(found)), found, strict=True)
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
