"""Formats of raw rows: Criteo's logs, tables in files or in memory, and TensorFlow data sets.

Criteo Display Ads (46M displays of a week, in order): label, 13 integers, 26 categories of eight
hexadecimal digits; an empty field is missing; test.txt has no labels. Split: the last rows test.

Criteo Sponsored Search (16M clicks in 90 days, by time): 23 columns, to predict *Sale*; -1 or an
empty field is missing. All features are categories; the time of the click is the hour of its week,
as the second says next to nothing about the next click. Left out unless included:
SalesAmountInEuro and time_delay_for_conversion, known only after a sale, and product_price, 0.0
without one in the published rows: a model that sees them reads the answer. Split: random.

Prepared data sets of TensorFlow Datasets are read without TensorFlow. Features are single values,
encoded like a table's columns (`experiments.tasks.kinds`), so that files and tables with the
same columns can be scored. Numbers become numeric columns; class labels (negative is missing),
booleans and texts become categories, hashed into tables of the classes' sizes, or of given ones.
Other features are refused by name unless they are left out.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from experiments.tasks.clicks.encoding import Format
from experiments.tasks.clicks.schema import DISPLAY_ADS, SPONSORED_SEARCH, Schema, default_buckets
from experiments.tasks.clicks.store import Store
from experiments.tasks.clicks.writer import StoreWriter
from experiments.tasks.kinds import (
    Category,
    Hexadecimal,
    HourOfWeek,
    Integer,
    Kind,
    Label,
    Number,
    User,
)
from experiments.tasks.splits import RANDOM, Columns, Split
from experiments.tasks.tfds import DataSet, SourceError

BUCKETS = 1 << 16
"""Default number of hash buckets of a category."""


# --- Tables --------------------------------------------------------------------------------------


def table_format(schema: Schema, hash_seed: int = 0, split: Split = RANDOM) -> Format:
    """Returns the format of a table in files or in memory."""
    bounds, missing = schema.label_bounds, schema.missing
    kinds: dict[str, Kind] = {
        schema.label: Number(bounds=bounds) if bounds else Label(schema.classes),
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


def prepare_tfds(
    name: str,
    out: str | os.PathLike[str],
    *,
    data_dir: str | os.PathLike[str] | None = None,
    label: str | None = None,
    leave_out: Collection[str] = (),
    text_buckets: int = BUCKETS,
    classes: Collection[str] = (),
    hash_seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> Store:
    """Writes a data set as a new store.

    Args:
        name: Name of the data set, or the directory of one version.
        out: Store to create; whole in the end, or absent.
        data_dir: Folder of the data sets; by default TensorFlow Datasets' own.
        label: Feature to predict; by default the data set's own, or "label".
        leave_out: Features not to read.
        text_buckets: Hash buckets of a text feature, a power of two.
        classes: Values of the label that mean 0, 1, ...; empty for 0 and 1.
        hash_seed: Public seed of the hash of categories.
        progress: Function of the number of rows done, called now and then.

    Raises:
        SourceError: If there is no such data set, or it cannot be read.
        StoreError: If `out` exists, or cannot be written.
    """
    data_set = DataSet(name, data_dir, label)
    data_set.check_features(leave_out)
    schema, numbered = _tfds_schema(data_set, leave_out, text_buckets, tuple(classes))
    format = table_format(schema, hash_seed)

    def decode(records: list[dict[str, Any]]) -> Columns:
        names = [format.label, *format.features]
        batch = {name: pa.array([record[name] for record in records]) for name in names}
        for name in numbered:
            negative = pc.less(batch[name], 0)
            batch[name] = pc.if_else(negative, pa.scalar(None, batch[name].type), batch[name])
        return format.columns_of(batch, format.label)

    with StoreWriter(out, schema, hash_seed=hash_seed) as writer:
        for split, rows in data_set.parts(decode):
            writer.append(rows, split)
            if progress is not None:
                progress(writer.num_rows)
        return writer.complete({"format": "tfds", "name": data_set.name})


def _tfds_schema(
    data_set: DataSet, leave_out: Collection[str], text_buckets: int, labels: tuple[str, ...]
) -> tuple[Schema, list[str]]:
    """Returns the schema, and the features that are class labels."""
    import tensorflow_datasets as tfds

    numbers, buckets, unsupported, classes = [], {}, [], []
    for feature, kind in data_set.features.items():
        if feature == data_set.label or feature in leave_out:
            continue
        dtype = None if kind.shape != () else np.dtype(kind.np_dtype)
        if isinstance(kind, tfds.features.ClassLabel):
            buckets[feature] = default_buckets(kind.num_classes or 1)
            classes.append(feature)
        elif isinstance(kind, tfds.features.Text) or (dtype and dtype.kind in "OSU"):
            buckets[feature] = text_buckets
        elif dtype and dtype.kind == "b":
            buckets[feature] = default_buckets(2)
        elif dtype and dtype.kind in "iuf":
            numbers.append(feature)
        else:
            unsupported.append(f"{feature} ({type(kind).__name__})")
    if unsupported:
        raise SourceError(
            f"{data_set.name} has features that are not single numbers, classes or texts: "
            f"{', '.join(unsupported)}; leave them out by --leave-out"
        )
    schema = Schema(
        name=f"tfds:{data_set.name.partition('/')[0]}",
        integers=tuple(numbers),
        categories=tuple(buckets),
        buckets=tuple(buckets.values()),
        label=data_set.label,
        classes=labels,
    )
    return schema, classes
