"""Columns of a table, as Arrow arrays, become the columns of a store.

What a column may hold:

- the label: 0 and 1 as integers, floats, booleans or texts; true and false as texts; or two texts,
  integers or dates that were declared; never missing;
- a number: an integer, a float, a decimal, or a text that is one; finite, NaN is missing;
- a category: a text or other bytes, an integer (as its decimal digits), a boolean (as true or
  false), or a date (as 2026-01-31). Floats and times are refused: writers do not agree on how they
  are spelled, and one value would have several ids.

So a text in a CSV file and the value that it stands for in a Parquet file become the same. The
empty text and null are missing, and the texts of `Schema.missing`. Nothing is guessed, and nothing
is learned from the rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from experiments.tasks.clicks.hashing import hash_text, words_of
from experiments.tasks.clicks.schema import MISSING, Schema
from experiments.tasks.clicks.store import Columns

LABELS = {
    **dict.fromkeys(("0", "0.0", "false", "False", "FALSE"), 0),
    **dict.fromkeys(("1", "1.0", "true", "True", "TRUE"), 1),
}
"""What a text says that is a label."""

_LABEL_TEXTS = pa.array(LABELS)
_LABEL_VALUES = np.array([*LABELS.values()], dtype=np.uint8)
_SPELLED_ONE_WAY = (
    pa.types.is_integer,
    pa.types.is_boolean,
    pa.types.is_date,
    pa.types.is_null,
)
_MOST = float(np.finfo(np.float32).max)


class ColumnError(ValueError):
    """A column that is not what it is taken for.

    `row` counts from 0, in the arrays that were given; it is None where no one row is at fault.
    """

    def __init__(self, problem: str, *, column: str, row: int | None = None) -> None:
        super().__init__(problem)
        self.problem, self.column, self.row = problem, column, row


def encode(
    batch: Mapping[str, pa.Array], schema: Schema, hash_seed: int, *, labelled: bool
) -> Columns:
    """Return the columns of a store for a batch of rows.

    Args:
        batch: Column name to its values, all of one length; what `schema` does not name is not
            looked at.
        schema: Which columns are numbers, categories and the label.
        hash_seed: Public seed of the hash of categories.
        labelled: Whether to return the label, which then must be there.

    Raises:
        ColumnError: names the first column that cannot be read, and its first such row.
    """
    columns: Columns = {}
    if labelled:
        columns["label"] = _labels(_plain(batch[schema.label]), schema)
    numbers = [_numbers(_plain(batch[name]), name, schema) for name in schema.integers]
    ids = [
        _ids(_plain(batch[name]), name, feature, schema, hash_seed)
        for feature, name in enumerate(schema.categories)
    ]
    rows = len(next(iter(batch.values())))
    columns["integers"] = _side_by_side([values for values, _ in numbers], rows, np.float32)
    columns["integers_missing"] = _side_by_side([missing for _, missing in numbers], rows, bool)
    columns["categories"] = _side_by_side(ids, rows, np.int32)
    return columns


def _side_by_side(columns: list[np.ndarray], rows: int, dtype: Any) -> np.ndarray:
    """Return `columns` as an array [rows, columns], which has that shape without columns too."""
    joined = np.empty((rows, len(columns)), dtype)
    for j, column in enumerate(columns):
        joined[:, j] = column
    return joined


def _plain(array: pa.Array) -> pa.Array:
    """Return the values of a dictionary in its place, and texts in one layout."""
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    kind = array.type
    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind) or _is_bytes(kind):
        with suppress(pa.ArrowInvalid):  # bytes that are not UTF-8 stay what they are
            array = array.cast(pa.string())
    return array


def _is_bytes(kind: pa.DataType) -> bool:
    types = pa.types
    return types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind)


def _labels(array: pa.Array, schema: Schema) -> np.ndarray:
    kind, column, wanted = array.type, schema.label, "0 or 1"
    if schema.classes:
        wanted = " or ".join(map(ascii, schema.classes))
        if not pa.types.is_string(kind) and not any(test(kind) for test in _SPELLED_ONE_WAY):
            raise _type_error(column, kind, f"{wanted}, or what is spelled so")
        index = pc.index_in(array.cast(pa.string()), value_set=pa.array(schema.classes))
        labels, wrong = _filled(index, 0).astype(np.uint8), index.is_null()
    elif pa.types.is_string(kind):
        index = pc.index_in(array, value_set=_LABEL_TEXTS)
        known = _filled(index, 0)
        labels, wrong = _LABEL_VALUES[known], index.is_null()
    elif pa.types.is_boolean(kind) or _is_number(kind):
        values = _filled(array.cast(pa.float64(), safe=False), np.nan)
        labels, wrong = (values == 1).astype(np.uint8), (values != 0) & (values != 1)
    elif pa.types.is_null(kind):
        labels, wrong = np.zeros(len(array), np.uint8), np.ones(len(array), bool)
    else:
        raise _type_error(column, kind, "0 or 1")
    _refuse(np.asarray(wrong), array, column, wanted)
    return labels


def _numbers(array: pa.Array, column: str, schema: Schema) -> tuple[np.ndarray, np.ndarray]:
    """Return (the numbers as float32, 0 where they are missing; whether they are)."""
    given = array
    if pa.types.is_string(array.type):
        absent = _missing(array, schema)
        if absent.any():
            array = pc.if_else(pa.array(absent), pa.scalar(None, pa.string()), array)
        array = _parsed(array, given, column)
    elif pa.types.is_null(array.type) or _is_number(array.type):
        array = array.cast(pa.float64(), safe=False)
    else:
        raise _type_error(column, array.type, "numbers")
    values = _filled(array, np.nan)
    missing = np.isnan(values)
    if schema.transform == "none":
        wanted, most = f"a number of at most {_MOST:.1e}, or nothing", _MOST
    else:
        wanted, most = "a finite number, or nothing", float(np.finfo(np.float64).max)
    _refuse(np.abs(values) > most, given, column, wanted)
    return np.where(missing, 0, schema.transformed(values)), missing


def _parsed(texts: pa.Array, given: pa.Array, column: str) -> pa.Array:
    """Return the numbers that `texts` are, blanks around them aside."""
    try:
        return texts.cast(pa.float64())
    except pa.ArrowInvalid:
        pass
    trimmed = pc.ascii_trim_whitespace(texts)
    try:
        return trimmed.cast(pa.float64())
    except pa.ArrowInvalid:
        wrong = np.array([not _is_decimal(text) for text in trimmed])
        _refuse(wrong, given, column, "a finite number, or nothing")
        raise


def _is_decimal(text: pa.Scalar) -> bool:
    try:
        text.cast(pa.float64())
    except pa.ArrowInvalid:
        return False
    return True


def _ids(array: pa.Array, column: str, feature: int, schema: Schema, hash_seed: int) -> np.ndarray:
    kind, types = array.type, pa.types
    if types.is_date64(kind):
        array = array.cast(pa.date32(), safe=False)
    if any(test(kind) for test in _SPELLED_ONE_WAY):
        array = array.cast(pa.string())
    elif _is_bytes(kind):
        array = array.cast(pa.binary()).view(pa.string())  # only hashed
    elif not types.is_string(kind):
        raise _type_error(
            column, kind, "texts, integers, booleans or dates, which are spelled one way"
        )
    starts, lengths = _extents(array)
    text = b""
    if lengths.any():
        text = array.buffers()[2][starts[0] : starts[-1] + lengths[-1]].to_pybytes()
    hashes = hash_text(words_of(text + b"\0" * 8), starts - starts[:1], lengths)
    ids = schema.hash(hashes, feature, hash_seed)
    ids[_missing(array, schema)] = MISSING
    return ids


def _missing(texts: pa.Array, schema: Schema) -> np.ndarray:
    """Return which texts say that there is no value."""
    missing = _extents(texts)[1] == 0
    if texts.null_count:
        missing |= np.asarray(texts.is_null())
    if schema.missing:
        words = pa.array(schema.missing, pa.string())
        missing |= np.asarray(pc.is_in(texts, value_set=words))
    return missing


def _extents(texts: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Return where each text begins in the buffer of characters, and its length in bytes."""
    offsets = np.frombuffer(texts.buffers()[1], np.int32)
    offsets = offsets[texts.offset : texts.offset + len(texts) + 1].astype(np.int64)
    return offsets[:-1], np.diff(offsets)


def _filled(array: pa.Array, missing: Any) -> np.ndarray:
    """Return numbers as NumPy has them, nulls as `missing`."""
    return np.asarray(array.fill_null(missing) if array.null_count else array)


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)


def _type_error(column: str, kind: pa.DataType, wanted: str) -> ColumnError:
    return ColumnError(f"holds {kind}, expected {wanted}", column=column)


def _refuse(wrong: np.ndarray, array: pa.Array, column: str, wanted: str) -> None:
    """Raise the ColumnError of the first of the rows that are `wrong`."""
    for row in np.flatnonzero(wrong)[:1]:
        value = array[int(row)].as_py()
        shown = value if not isinstance(value, str) or len(value) <= 40 else f"{value[:40]}..."
        found = "nothing" if value is None or value == "" else ascii(shown)
        raise ColumnError(f"found {found}, expected {wanted}", column=column, row=int(row))
