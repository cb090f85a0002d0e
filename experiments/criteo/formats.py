"""The raw formats, by the name of their data set."""

from __future__ import annotations

from dataclasses import replace

from experiments.criteo import display, search
from experiments.criteo.raw import RawFormat
from experiments.criteo.schema import Schema

FORMATS: dict[str, RawFormat] = {f.schema.name: f for f in (display.FORMAT, search.FORMAT)}


def format_of(schema: Schema) -> RawFormat:
    """Return the format that reads raw files into the columns of `schema`.

    Raises:
        ValueError: the schema is that of no raw format.
    """
    if schema.name not in FORMATS:
        raise ValueError(
            f"data like {schema.name!a} have no raw format (only {', '.join(FORMATS)} have one): "
            "prepare them, and give the store"
        )
    return replace(FORMATS[schema.name], schema=schema)
