"""Which rows train a model, and which are kept from it to see how good it is."""

from __future__ import annotations

import numpy as np

from experiments.criteo.schema import GOLDEN, mix
from experiments.criteo.store import Columns


def chronological_split(num_rows: int) -> dict[str, tuple[int, int]]:
    """Return the first 80 % of rows as "train", then 10 % "validation", then "test".

    >>> chronological_split(25)
    {'train': (0, 20), 'validation': (20, 22), 'test': (22, 25)}
    """
    first, second = num_rows * 8 // 10, num_rows * 9 // 10
    return {"train": (0, first), "validation": (first, second), "test": (second, num_rows)}


def random_split(columns: Columns, first_row: int) -> dict[str, Columns]:
    """Return the rows of a block, "train" (80 %), "validation" and "test" (10 % each) apart.

    Row i of the data set goes where output i of the generator SplitMix64 (Steele, Lea and Flood,
    2014), seeded with 0, lies in the interval of its values: the last four fifths train, the tenth
    before them validates, and the first tenth tests. So every row falls on its own, the split is
    the same for everybody, and what a row holds does not decide where it goes: to change a row, or
    to append one, moves no other. The parts keep the order of the rows.

    Args:
        columns: Rows `first_row`, `first_row + 1`, ... of the data set.
        first_row: Number of the block's first row, from 0.
    """
    drawn = _drawn(columns, first_row)
    tenth, fifth = (np.uint64(2**64 // n) for n in (10, 5))
    masks = {
        "train": drawn >= fifth,
        "validation": (drawn >= tenth) & (drawn < fifth),
        "test": drawn < tenth,
    }
    return _parts(columns, masks)


def random_halves(columns: Columns, first_row: int) -> dict[str, Columns]:
    """Return the rows of a block, "validation" and "test" apart, each with a probability of 1/2.

    As in `random_split`, by the row's number alone.
    """
    low = _drawn(columns, first_row) < np.uint64(1 << 63)
    return _parts(columns, {"validation": low, "test": ~low})


def _drawn(columns: Columns, first_row: int) -> np.ndarray:
    """Return the outputs of SplitMix64, seeded with 0, that belong to the rows; uint64."""
    rows = np.arange(first_row + 1, first_row + 1 + len(columns["label"]), dtype=np.uint64)
    return mix(rows * np.uint64(GOLDEN))


def _parts(columns: Columns, masks: dict[str, np.ndarray]) -> dict[str, Columns]:
    return {
        part: {name: column[mask] for name, column in columns.items()}
        for part, mask in masks.items()
    }
