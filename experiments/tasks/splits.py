"""Columns of rows, and splits into training, validation and test rows by a public hash.

SplitMix64 (Steele, Lea and Flood, 2014) is a hash of integers that is equal everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

import numpy as np

GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def mix(x: np.ndarray) -> np.ndarray:
    """Mixes uint64 `x` in place by SplitMix64's finaliser; returns `x`.

    >>> hex(mix(np.array([GOLDEN], np.uint64))[0])
    '0xe220a8397b1dcdaf'
    """
    x ^= x >> np.uint64(30)
    x *= np.uint64(_MULTIPLIERS[0])
    x ^= x >> np.uint64(27)
    x *= np.uint64(_MULTIPLIERS[1])
    x ^= x >> np.uint64(31)
    return x


def outputs(numbers: np.ndarray) -> np.ndarray:
    """Returns output i of the generator, seeded with 0: uint64.

    >>> int(outputs(np.array([0]))[0])
    16294208416658607535
    """
    return mix((np.asarray(numbers, np.uint64) + np.uint64(1)) * np.uint64(GOLDEN))


Columns = dict[str, np.ndarray]
"""Column name to array, all with the same number of rows."""

SPLITS = ("train", "validation", "test")
"""Names of the splits, in order."""
Order = Literal["chronological", "random"]
FRACTIONS = (0.8, 0.1, 0.1)
"""Default fractions of the rows that train, validate and test."""


class ColumnError(ValueError):
    """Column with an unexpected value.

    `row` counts from 0 in the given arrays; it is None if no single row is at fault.
    """

    def __init__(self, problem: str, *, column: str, row: int | None = None) -> None:
        super().__init__(f"column {column}: {problem}")
        self.problem, self.column, self.row = problem, column, row

    @classmethod
    def unexpected(cls, value: Any, expected: str, *, column: str, row: int) -> ColumnError:
        """Returns the error of a value that is not `expected`.

        >>> str(ColumnError.unexpected("x", "a number", column="age", row=3))
        "column age: found 'x', expected a number"
        """
        if isinstance(value, str) and len(value) > 40:
            value = f"{value[:40]}..."
        text = "nothing" if value is None or value == "" else ascii(value)
        return cls(f"found {text}, expected {expected}", column=column, row=row)


def _exact(fractions: tuple[float, float, float]) -> list[Fraction]:
    """Returns the decimal fractions exactly: a tenth, not its nearest binary number."""
    return [Fraction(str(fraction)) for fraction in fractions]


def chronological_split(
    num_rows: int, fractions: tuple[float, float, float] = FRACTIONS
) -> dict[str, tuple[int, int]]:
    """Returns the ranges of consecutive "train", "validation" and "test" rows.

    >>> chronological_split(25)
    {'train': (0, 20), 'validation': (20, 22), 'test': (22, 25)}
    """
    train, validation, _ = _exact(fractions)
    first, second = math.floor(num_rows * train), math.floor(num_rows * (train + validation))
    return {"train": (0, first), "validation": (first, second), "test": (second, num_rows)}


def random_masks(
    numbers: np.ndarray, fractions: tuple[float, float, float] = FRACTIONS
) -> dict[str, np.ndarray]:
    """Returns bool masks of the "train", "validation" and "test" numbers.

    Output i of the generator SplitMix64, seeded with 0, decides for number i: the top four fifths
    of its range train, the next tenth validates, the lowest tenth tests. Every number is decided
    alone, and the split is the same for everybody.

    >>> {name: int(mask.sum()) for name, mask in random_masks(np.arange(1000)).items()}
    {'train': 804, 'validation': 104, 'test': 92}

    Args:
        numbers: Public row or user numbers, integers >= 0: [rows].
        fractions: Fractions of the rows that train, validate and test.
    """
    hashes = outputs(numbers)
    _, validation, test = _exact(fractions)
    # Fractions are less than 1, so that these are numbers of 64 bits.
    low, high = (np.uint64(math.floor(2**64 * fraction)) for fraction in (test, test + validation))
    return {
        "train": hashes >= high,
        "validation": (hashes >= low) & (hashes < high),
        "test": hashes < low,
    }


def random_split(
    columns: Columns, first_row: int, fractions: tuple[float, float, float] = FRACTIONS
) -> dict[str, Columns]:
    """Splits a block of rows by their numbers alone.

    Changing or appending a row moves no other row. Each split keeps the order of the rows.

    >>> split = random_split({"x": np.arange(20)}, 0)
    >>> split["validation"]["x"], split["test"]["x"]
    (array([4, 6]), array([2]))
    """
    masks = random_masks(_numbers(columns, first_row), fractions)
    return {split: taken(columns, mask) for split, mask in masks.items()}


def random_halves(columns: Columns, first_row: int) -> dict[str, Columns]:
    """Splits a block of rows into "validation" and "test", half each.

    The row's number alone decides, as in `random_split`.
    """
    low = outputs(_numbers(columns, first_row)) < np.uint64(1 << 63)
    return {"validation": taken(columns, low), "test": taken(columns, ~low)}


@dataclass(frozen=True)
class Split:
    """Split of a store's rows.

    Raises:
        ValueError: If a part gets no rows, or the parts do not cover all.
    """

    order: Order = "random"
    """Order of the split: by random row numbers, or the last rows test."""
    fractions: tuple[float, float, float] = FRACTIONS

    def __post_init__(self) -> None:
        if not (all(0 < x < 1 for x in self.fractions) and sum(_exact(self.fractions)) == 1):
            raise ValueError(
                "the fractions of training, validation and test rows must be positive and add up "
                f"to 1, got {' '.join(map(str, self.fractions))}"
            )

    def places(self, first_row: int, rows: int) -> dict[str, np.ndarray | slice]:
        """Returns the indices of a block's rows, by split.

        A chronological split needs the number of all rows; until it is known all are "train".

        >>> Split("chronological").places(100, 50)
        {'train': slice(0, 50, None)}
        """
        if self.order == "chronological":
            return {"train": slice(0, rows)}
        numbers = np.arange(first_row, first_row + rows, dtype=np.uint64)
        return dict(random_masks(numbers, self.fractions))


RANDOM = Split()
"""Random split 80/10/10 by row numbers."""


def _numbers(columns: Columns, first_row: int) -> np.ndarray:
    return np.arange(first_row, first_row + len(next(iter(columns.values()))), dtype=np.uint64)


def taken(columns: Columns, rows: np.ndarray | slice) -> Columns:
    """Selects rows by a mask, an index array or a slice.

    >>> taken({"x": np.array([5, 6, 7])}, slice(1, None))
    {'x': array([6, 7])}
    """
    return {name: column[rows] for name, column in columns.items()}


def concatenate(blocks: Iterable[Columns]) -> Columns:
    """Concatenates blocks of rows."""
    blocks = list(blocks)
    return {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}


def blocks_of(columns: Columns, rows: int = 1024) -> Iterator[Columns]:
    """Yields consecutive blocks of at most `rows` rows.

    >>> [block["x"].size for block in blocks_of({"x": np.arange(5)}, rows=2)]
    [2, 2, 1]
    """
    for start in range(0, len(next(iter(columns.values()))), rows):
        yield taken(columns, slice(start, start + rows))
