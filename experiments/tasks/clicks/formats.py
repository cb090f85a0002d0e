"""Formats of rows outside a store, in raw files and in tables, by name of the data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from experiments.tasks.clicks.criteo import display, search
from experiments.tasks.clicks.raw.format import RawFormat
from experiments.tasks.clicks.schema import Schema

if TYPE_CHECKING:
    from experiments.tasks.clicks.tabular.format import TableFormat


FORMATS: dict[str, RawFormat] = {f.schema.name: f for f in (display.FORMAT, search.FORMAT)}


def format_of(schema: Schema, hash_seed: int = 0) -> RawFormat | TableFormat:
    """Returns the format that reads raw rows into the columns of `schema`.

    Raises:
        ValueError: If no raw format has this schema.
    """
    if schema.label:  # the files name their columns
        from experiments.tasks.clicks.tabular.format import TableFormat  # and only these take Arrow

        return TableFormat(schema, hash_seed)
    if schema.name not in FORMATS:
        names = ", ".join([*FORMATS, "tables"])
        raise ValueError(
            f"data like {schema.name!a} have no raw format (only {names} have one): "
            "prepare them, and give the store"
        )
    return replace(FORMATS[schema.name], schema=schema, hash_seed=hash_seed)


def check_columns(rows: Any, features: Sequence[str]) -> None:
    """Raises TypeError unless `rows` maps names to columns."""
    if not hasattr(rows, "keys"):
        raise TypeError(
            "rows must map the name of each column to its values, one a row; it is a "
            f"{type(rows).__name__}"
        )
    for name in [name for name in features if name in rows]:
        values = rows[name]
        if isinstance(values, (str, bytes)) or not hasattr(values, "__len__"):
            raise TypeError(f"column {name}: values, one a row, are expected, not {values!a:.40}")
