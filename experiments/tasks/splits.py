"""Which rows train a model, and which are kept from it to see how good it is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from fractions import Fraction

import numpy as np

from experiments.tasks.splitmix import outputs

Columns = dict[str, np.ndarray]

FRACTIONS = (0.8, 0.1, 0.1)
"""Parts of the rows that train, validate and test, unless others are asked for."""


def chronological_split(
    num_rows: int, fractions: tuple[float, float, float] = FRACTIONS
) -> dict[str, tuple[int, int]]:
    """Return the first 80 % of rows as "train", then 10 % "validation", then "test".

    >>> chronological_split(25)
    {'train': (0, 20), 'validation': (20, 22), 'test': (22, 25)}
    """
    train, validation, _ = _exact(fractions)
    first, second = math.floor(num_rows * train), math.floor(num_rows * (train + validation))
    return {"train": (0, first), "validation": (first, second), "test": (second, num_rows)}


def random_masks(
    numbers: np.ndarray, fractions: tuple[float, float, float] = FRACTIONS
) -> dict[str, np.ndarray]:
    """Return which of `numbers` are "train" (80 %), "validation" and "test" (10 % each): bool.

    i goes where output i of the generator SplitMix64, seeded with 0, lies in the interval of its
    values: the last four fifths train, the tenth before them validates, and the first tenth tests.
    So every number falls on its own, and the split is the same for everybody.

    Args:
        numbers: Public names of rows, or of users, integers >= 0: [rows].
        fractions: Of those that train, validate and test, in place of those.
    """
    drawn = outputs(numbers)
    _, validation, test = _exact(fractions)
    # Fractions are less than 1, so that these are numbers of 64 bits.
    low, high = (np.uint64(math.floor(2**64 * part)) for part in (test, test + validation))
    return {
        "train": drawn >= high,
        "validation": (drawn >= low) & (drawn < high),
        "test": drawn < low,
    }


def random_split(
    columns: Columns, first_row: int, fractions: tuple[float, float, float] = FRACTIONS
) -> dict[str, Columns]:
    """Return the rows of a block apart, by their numbers in the data set (see `random_masks`).

    What a row holds does not decide where it goes: to change a row, or to append one, moves no
    other. The parts keep the order of the rows.

    Args:
        columns: Rows `first_row`, `first_row + 1`, ... of the data set.
        first_row: Number of the block's first row, from 0.
        fractions: Of the rows that train, validate and test.
    """
    masks = random_masks(_numbers(columns, first_row), fractions)
    return {part: taken(columns, mask) for part, mask in masks.items()}


def random_halves(columns: Columns, first_row: int) -> dict[str, Columns]:
    """Return the rows of a block, "validation" and "test" apart, each with a probability of 1/2.

    As in `random_split`, by the row's number alone.
    """
    low = outputs(_numbers(columns, first_row)) < np.uint64(1 << 63)
    return {"validation": taken(columns, low), "test": taken(columns, ~low)}


def check_fractions(fractions: tuple[float, float, float]) -> None:
    """Raise ValueError unless each part gets rows, and together they get all."""
    if not (all(0 < part < 1 for part in fractions) and sum(_exact(fractions)) == 1):
        raise ValueError(
            "the fractions of the rows that train, validate and test must be greater than 0 and "
            f"add up to 1, not {' '.join(map(str, fractions))}"
        )


def _exact(fractions: tuple[float, float, float]) -> list[Fraction]:
    """Return the fractions as they are written: a tenth, not the binary number nearest to it."""
    return [Fraction(str(part)) for part in fractions]


def _numbers(columns: Columns, first_row: int) -> np.ndarray:
    return np.arange(first_row, first_row + len(next(iter(columns.values()))), dtype=np.uint64)


def taken(columns: Columns, rows: np.ndarray | slice) -> Columns:
    """Return the rows that a mask, an index or a slice names."""
    return {name: column[rows] for name, column in columns.items()}


def joined(parts: Iterable[Columns]) -> Columns:
    """Return the rows of some columns after others."""
    parts = list(parts)
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def blocks_of(columns: Columns, rows: int = 1024) -> Iterator[Columns]:
    """Yield so many rows at a time."""
    for start in range(0, len(next(iter(columns.values()))), rows):
        yield taken(columns, slice(start, start + rows))
