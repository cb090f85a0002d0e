"""Rows into a store, those that train a model apart from those kept from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

from experiments.tasks.clicks.store import Columns, Splits
from experiments.tasks.clicks.writer import StoreWriter
from experiments.tasks.splits import FRACTIONS, chronological_split, random_split

Order = Literal["chronological", "random"]
"""How test rows are told apart: the last of the file, or by their numbers at random."""


def write_split(
    writer: StoreWriter,
    blocks: Iterable[Columns],
    order: Order,
    fractions: tuple[float, float, float] = FRACTIONS,
    progress: Callable[[int], None] | None = None,
) -> Splits:
    """Append `blocks` of consecutive rows to a store, part by part, and return where these lie.

    `progress` is called with the number of rows done, after every block.
    """
    for block in blocks:
        if order == "random":
            for part, rows in random_split(block, writer.num_rows, fractions).items():
                writer.append(rows, part)
        else:
            writer.append(block)
        if progress is not None:
            progress(writer.num_rows)
    return writer.parts if order == "random" else chronological_split(writer.num_rows, fractions)
