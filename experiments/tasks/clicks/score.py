"""The probabilities that a model gives to rows, labelled or not, as a file."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import IO

import numpy as np

from dpsgd.runs.directory import RunDirectory
from dpsgd.runs.files import write_atomically
from experiments import trained

HEADER = "probability"
"""The one column of the file."""


def score(
    model_path: Path,
    data: Path,
    out: Path,
    *,
    split: str | None = None,
    progress: Callable[[int], None] = lambda rows: None,
) -> tuple[int, int]:
    """Writes the probability of the label 1 of each row of `data`, in their order, to a CSV file.

    Memory is constant. Either `out` is a whole file in the end or it does not exist.

    Args:
      model_path: The directory of a finished run, or an exported model.
      data: A raw file in the format that the model's store was prepared from, with labels or
        without; or a store.
      out: File to create, compressed if its name ends in ".gz"; a header and one line a row.
      split: Which rows of a store; by default all.
      progress: Called with the number of rows done, after every block.

    Returns:
      (rows, how many of them the model gives no number: NaN).

    Raises:
      FileExistsError: if there is something at `out`; it is left as it is.
      FileNotFoundError: if there is no such model, or no folder for `out`.
      ValueError: if the data cannot be read, or are not such as the model reads.
    """
    RunDirectory.refuse_existing(out)
    if not out.parent.is_dir():
        raise FileNotFoundError(f"{out.parent}, where {out.name} is to be written, is no folder")
    model = trained.read(model_path)
    blocks = model.rows(data, labelled=False, split=split)
    num_rows = undefined = 0

    def write(put: Callable[[bytes], object]) -> None:
        nonlocal num_rows, undefined
        put(f"{HEADER}\n".encode())
        for block in blocks:
            scores = model.probabilities(block)
            put("".join(f"{p:.9g}\n" for p in scores.tolist()).encode())
            num_rows += len(scores)
            undefined += int(np.isnan(scores).sum())
            progress(num_rows)

    def write_new(file: IO[bytes]) -> None:
        if out.suffix == ".gz":
            with gzip.GzipFile(fileobj=file, mode="wb", mtime=0, compresslevel=6) as packed:
                write(packed.write)
        else:
            write(file.write)
        RunDirectory.refuse_existing(out)

    write_atomically(out, write_new)
    return num_rows, undefined
