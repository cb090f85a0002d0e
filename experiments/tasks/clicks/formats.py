"""How rows are written outside a store: in raw files, and in tables; by the name of their data."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

from experiments.tasks.clicks.criteo import display, search
from experiments.tasks.clicks.raw.format import RawFormat
from experiments.tasks.clicks.schema import Schema
from experiments.tasks.clicks.store import Columns


@runtime_checkable
class Format(Protocol):
    """What turns raw rows into the columns of a store, so that a model can be asked about them."""

    @property
    def schema(self) -> Schema:
        """The columns that rows become."""

    def read(
        self, source: str | os.PathLike[str], *, hash_seed: int = 0, labelled: bool = True
    ) -> Iterator[Columns]:
        """Yield the rows of a raw file as blocks of columns, in file order, in constant memory.

        Where the rows need not be `labelled`, the file may have the label or lack it, and the
        blocks have no "label". What is wrong with a file is a ValueError of one line, which names
        file, line and column.
        """

    def encode(self, rows: Mapping[str, Any], *, hash_seed: int = 0) -> Columns:
        """Return rows of a table as columns without "label", just as `read` does those of a file.

        `rows` maps names of columns to values as they stand in a raw file; None, NaN and the empty
        text are missing, and columns that are no features are not looked at. What is wrong is a
        ValueError of one line, which names row (from 0) and column.
        """


FORMATS: dict[str, RawFormat] = {f.schema.name: f for f in (display.FORMAT, search.FORMAT)}


def format_of(schema: Schema) -> Format:
    """Return the format that reads raw rows into the columns of `schema`.

    Raises:
        ValueError: the schema is that of no raw format.
    """
    if schema.label:  # the files name their columns
        from experiments.tasks.clicks.tabular.format import TableFormat  # and only these take Arrow

        return TableFormat(schema)
    if schema.name not in FORMATS:
        known = ", ".join([*FORMATS, "tables"])
        raise ValueError(
            f"data like {schema.name!a} have no raw format (only {known} have one): "
            "prepare them, and give the store"
        )
    return replace(FORMATS[schema.name], schema=schema)


def check_columns(rows: Any, features: Sequence[str]) -> None:
    """Raise TypeError unless `rows` maps names to columns, as dictionaries and data frames do."""
    if not hasattr(rows, "keys"):
        raise TypeError(
            "rows must map the name of each column to its values, one a row; it is a "
            f"{type(rows).__name__}"
        )
    for name in [name for name in features if name in rows]:
        values = rows[name]
        if isinstance(values, (str, bytes)) or not hasattr(values, "__len__"):
            raise TypeError(f"column {name}: values, one a row, are expected, not {values!a:.40}")
