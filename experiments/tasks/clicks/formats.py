"""Formats of raw rows: Criteo's logs, and tables in files or in memory.

Criteo Display Ads (46M displays of a week, in order): label, 13 integers, 26 categories of eight
hexadecimal digits; an empty field is missing; test.txt has no labels. Split: the last rows test.

Criteo Sponsored Search (16M clicks in 90 days, by time): 23 columns, to predict *Sale*; -1 or an
empty field is missing. All features are categories; the time of the click is the hour of its week,
as the second says next to nothing about the next click. Left out unless included:
SalesAmountInEuro and time_delay_for_conversion, known only after a sale, and product_price, 0.0
without one in the published rows: a model that sees them reads the answer. Split: random.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from experiments.tasks.clicks.encoding import Format
from experiments.tasks.clicks.kinds import (
    Category,
    Clipped,
    Hexadecimal,
    HourOfWeek,
    Integer,
    Kind,
    Label,
    Number,
    User,
)
from experiments.tasks.clicks.schema import DISPLAY_ADS, SPONSORED_SEARCH, Schema
from experiments.tasks.splits import RANDOM, Split

BUCKETS = 1 << 16
"""Default number of hash buckets of a category."""


# --- Tables --------------------------------------------------------------------------------------


def table_format(schema: Schema, hash_seed: int = 0, split: Split = RANDOM) -> Format:
    """Returns the format of a table in files or in memory."""
    bounds, missing = schema.label_bounds, schema.missing
    kinds: dict[str, Kind] = {
        schema.label: Clipped(*bounds) if bounds else Label(schema.classes),
        **dict.fromkeys(schema.integers, Number(missing, schema.transform != "none")),
        **{name: Category(missing, schema.declared.get(name)) for name in schema.categories},
        **({schema.user: User(missing)} if schema.user else {}),
    }
    return Format(schema, kinds, schema.label, split=split, hash_seed=hash_seed)


def table_schema(
    label: str,
    *,
    categories: Sequence[str] = (),
    numbers: Sequence[str] = (),
    buckets: Sequence[int] = (BUCKETS,),
    transform: Literal["log1p", "none", "both"] = "both",
    missing: Sequence[str] = (),
    classes: Sequence[str] = (),
    label_bounds: Sequence[float] = (),
    bounds: Mapping[str, tuple[float, float]] | None = None,
    values: Mapping[str, Sequence[str]] | None = None,
    user: str | None = None,
) -> Schema:
    """Returns the schema of a table.

    >>> table_schema("bought", categories=["city"], numbers=["age"]).buckets
    (65536,)

    Args:
        label: Column to predict: zeros and ones, declared classes, or numbers with bounds.
        categories: Columns whose values are hashed.
        numbers: Columns of numbers.
        buckets: Hash buckets, a power of two: one for all hashed categories, or one for each.
        transform: Transform of numbers, see `Schema.transform`.
        missing: Texts that stand for a missing value, beside the empty one.
        classes: Texts of the label that mean 0, 1, ...; empty for zeros and ones.
        label_bounds: Public (low, high) of a numerical label.
        bounds: Public (low, high) of numbers, by column.
        values: Public values of categories, by column, not hashed; all others are missing.
        user: Column that names each row's user; None for rows without users.

    Raises:
        ValueError: For a repeated name, no feature, or unfit buckets, bounds or values.
    """
    names = [label, *categories, *numbers, *([] if user is None else [user])]
    if not label:
        raise ValueError("--label is empty; name the column to predict")
    if user == "":
        raise ValueError("--user is empty; name the column of users, or leave it out")
    if repeated := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise ValueError(
            f"{', '.join(repeated)}: name each column once, as label, category, number or user"
        )
    if not categories and not numbers:
        raise ValueError("no columns to learn from; name them by --categories, --numbers or both")
    bounds = bounds or {}
    declared = {name: tuple(texts) for name, texts in (values or {}).items()}
    if unknown := [name for name in bounds if name not in numbers]:
        raise ValueError(f"bounds: {', '.join(unknown)} must be among --numbers")
    if unknown := [name for name in declared if name not in categories]:
        raise ValueError(f"values: {', '.join(unknown)} must be among --categories")
    hashed = [name for name in categories if name not in declared]
    if len(buckets) not in (1, len(hashed)):
        raise ValueError(
            f"--buckets needs 1 number or {len(hashed)}, one per category"
            f"{' without declared values' * bool(declared)}, got {len(buckets)}"
        )
    sizes = dict(zip(hashed, [*buckets] * (len(hashed) if len(buckets) == 1 else 1), strict=True))
    return Schema(
        name="table",
        integers=tuple(numbers),
        categories=tuple(categories),
        buckets=tuple(len(declared[x]) if x in declared else sizes[x] for x in categories),
        label=label,
        transform=transform,
        missing=tuple(missing),
        classes=tuple(classes),
        label_bounds=tuple(label_bounds),
        bounds=tuple(bounds.get(name) for name in numbers) if bounds else (),
        values=tuple(declared.get(name) for name in categories) if declared else (),
        user=user or "",
    )


# --- Criteo --------------------------------------------------------------------------------------

_DISPLAY = ("label", *DISPLAY_ADS.integers, *DISPLAY_ADS.categories)
DISPLAY = Format(
    schema=DISPLAY_ADS,
    kinds={
        "label": Label(),
        **dict.fromkeys(DISPLAY_ADS.integers, Integer()),
        **dict.fromkeys(DISPLAY_ADS.categories, Hexadecimal()),
    },
    label="label",
    layouts=(_DISPLAY, _DISPLAY[1:]),
    split=Split("chronological"),
)
"""Criteo Display Ads."""

_IDENTIFIER = Category(("-1",))
_SEARCH: dict[str, Kind] = {
    "Sale": Label(),
    "SalesAmountInEuro": Category(("-1.0",)),
    "time_delay_for_conversion": _IDENTIFIER,
    "click_timestamp": HourOfWeek(missing=-1),
    "nb_clicks_1week": Integer(missing=-1),
    "product_price": _IDENTIFIER,
    # In the order of the schema, whose first two columns are above.
    **dict.fromkeys(SPONSORED_SEARCH.categories[2:], _IDENTIFIER),
}
_OUTCOMES = ("Sale", "SalesAmountInEuro", "time_delay_for_conversion", "product_price")
SEARCH = Format(
    schema=SPONSORED_SEARCH,
    kinds=_SEARCH,
    label="Sale",
    # Columns known only after a sale are absent together, with or without the price.
    layouts=tuple(
        tuple(name for name in _SEARCH if name not in _OUTCOMES[:absent]) for absent in (0, 1, 3, 4)
    ),
)
"""Criteo Sponsored Search."""

FORMATS = {format.schema.name: format for format in (DISPLAY, SEARCH)}
"""Formats of headerless files, by the name of their schema."""


def format_of(schema: Schema, hash_seed: int = 0) -> Format:
    """Returns the format of raw rows of a schema.

    Raises:
        ValueError: If no format has this schema.
    """
    if schema.label:  # the files name their columns
        return table_format(schema, hash_seed)
    if schema.name not in FORMATS:
        names = ", ".join([*FORMATS, "tables"])
        raise ValueError(
            f"raw files of {schema.name!a} cannot be read (only {names} can); prepare a store and "
            "name it instead"
        )
    return replace(FORMATS[schema.name], schema=schema, hash_seed=hash_seed)
