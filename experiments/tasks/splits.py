"""Which rows train a model, and which are kept from it to see how good it is."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import numpy as np

from experiments.tasks.splitmix import outputs

Columns = dict[str, np.ndarray]

Order = Literal["chronological", "random"]
FRACTIONS = (0.8, 0.1, 0.1)
"""Parts of the rows that train, validate and test, unless others are asked for."""


def _exact(fractions: tuple[float, float, float]) -> list[Fraction]:
    """Return the fractions as they are written: a tenth, not the binary number nearest to it."""
    return [Fraction(str(part)) for part in fractions]


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
    other. The parts keep the order of the rows, of which the first has the number `first_row`.
    """
    masks = random_masks(_numbers(columns, first_row), fractions)
    return {part: taken(columns, mask) for part, mask in masks.items()}


def random_halves(columns: Columns, first_row: int) -> dict[str, Columns]:
    """Return the rows of a block, "validation" and "test" apart, each with a probability of 1/2.

    As in `random_split`, by the row's number alone.
    """
    low = outputs(_numbers(columns, first_row)) < np.uint64(1 << 63)
    return {"validation": taken(columns, low), "test": taken(columns, ~low)}


@dataclass(frozen=True)
class Split:
    """Which rows of a store train, and which validate and test.

    Raises:
        ValueError: some part gets no rows, or together they do not get all.
    """

    order: Order = "random"
    """Whether test rows are told apart by their numbers at random, or are the last ones."""
    fractions: tuple[float, float, float] = FRACTIONS

    def __post_init__(self) -> None:
        if not (all(0 < part < 1 for part in self.fractions) and sum(_exact(self.fractions)) == 1):
            raise ValueError(
                "the fractions of the rows that train, validate and test must be greater than 0 "
                f"and add up to 1, not {' '.join(map(str, self.fractions))}"
            )

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts in which rows lie together, in their order; one if rows keep theirs."""
        return ("train", "validation", "test") if self.order == "random" else ("",)

    def places(self, first_row: int, rows: int) -> dict[str, np.ndarray | slice]:
        """Return which of some rows, the first of this number, lie in which part: masks, or all."""
        if self.order == "chronological":
            return {"": slice(0, rows)}
        numbers = np.arange(first_row, first_row + rows, dtype=np.uint64)
        return dict(random_masks(numbers, self.fractions))

    def ranges(self, sizes: Mapping[str, int]) -> dict[str, tuple[int, int]]:
        """Return the range of rows of each split, where parts of these sizes follow one another."""
        if self.order == "chronological":
            return chronological_split(sum(sizes.values()), self.fractions)
        return dict(
            zip(sizes, itertools.pairwise([0, *itertools.accumulate(sizes.values())]), strict=True)
        )


RANDOM = Split()
"""80/10/10 by the numbers of rows."""


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
