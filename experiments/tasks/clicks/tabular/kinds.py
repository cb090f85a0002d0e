"""What the columns of a table hold, of any type of Arrow's.

- the label: 0 and 1 as integers, floats, booleans or texts; true and false as texts; or two or more
  texts, integers or dates that were declared; or a number, clipped to its bounds; never missing;
- a number: an integer, a float, a decimal, or a text that is one; finite, NaN is missing;
- a category: a text or other bytes, an integer (as its decimal digits), a boolean (as true or
  false), or a date (as 2026-01-31). Floats and times are refused: writers do not agree on how they
  are spelled, and one value would have several ids.

So a text in a CSV file and the value that it stands for in a Parquet file become the same. The
empty text and null are missing, and the texts of `Schema.missing`.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from experiments.tasks.clicks.encoding import ColumnError, Decoded, Kind, absent, hashed
from experiments.tasks.clicks.schema import Schema

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


def kinds_of(schema: Schema) -> dict[str, Kind]:
    """Return what each column of a table holds."""
    return {
        schema.label: Clipped(*ends) if (ends := schema.label_bounds) else Label(schema.classes),
        **dict.fromkeys(schema.integers, Number(schema.missing, schema.transform != "none")),
        **{name: Category(schema.missing, schema.declared.get(name)) for name in schema.categories},
    }


@dataclass(frozen=True)
class Label(Kind):
    """Zeros and ones, or the places of `classes`."""

    classes: tuple[str, ...] = ()

    def decode(self, array: pa.Array, column: str) -> Decoded:
        """Return the labels."""
        array = _plain(array)
        kind, wanted = array.type, "0 or 1"
        if self.classes:
            wanted = " or ".join(map(ascii, self.classes))
            if not pa.types.is_string(kind) and not any(test(kind) for test in _SPELLED_ONE_WAY):
                raise _type_error(column, kind, f"{wanted}, or what is spelled so")
            index = pc.index_in(array.cast(pa.string()), value_set=pa.array(self.classes))
            labels, wrong = _filled(index, 0), index.is_null()
        elif pa.types.is_string(kind):
            index = pc.index_in(array, value_set=_LABEL_TEXTS)
            labels, wrong = _LABEL_VALUES[_filled(index, 0)], index.is_null()
        elif pa.types.is_boolean(kind) or _is_number(kind):
            values = _filled(array.cast(pa.float64(), safe=False), np.nan)
            labels, wrong = (values == 1).astype(np.uint8), (values != 0) & (values != 1)
        elif pa.types.is_null(kind):
            labels, wrong = np.zeros(len(array), np.uint8), np.ones(len(array), bool)
        else:
            raise _type_error(column, kind, "0 or 1")
        _refuse(np.asarray(wrong), array, column, wanted)
        return Decoded(labels, np.zeros(len(labels), bool))


@dataclass(frozen=True)
class Number(Kind):
    """Finite numbers, float64; those that are not `logarithmic` fit in 32 bits."""

    missing: tuple[str, ...]
    logarithmic: bool
    wanted: str = "a finite number, or nothing"

    def decode(self, array: pa.Array, column: str) -> Decoded:
        """Return the numbers, NaN where they are missing."""
        given = array = _plain(array)
        if pa.types.is_string(array.type):
            missing = absent(array, self.missing)
            if missing.any():
                array = pc.if_else(pa.array(missing), pa.scalar(None, pa.string()), array)
            array = _parsed(array, given, column, self.wanted)
        elif pa.types.is_null(array.type) or _is_number(array.type):
            array = array.cast(pa.float64(), safe=False)
        else:
            raise _type_error(column, array.type, "numbers")
        values = _filled(array, np.nan)
        most = float(np.finfo(np.float64 if self.logarithmic else np.float32).max)
        wanted = self.wanted if self.logarithmic else f"a number of at most {most:.1e}, or nothing"
        _refuse(np.abs(values) > most, given, column, wanted)
        return Decoded(values, np.isnan(values))


@dataclass(frozen=True)
class Clipped(Kind):
    """Finite numbers, none missing, clipped to a public range; how many are, nothing says."""

    low: float
    high: float

    def decode(self, array: pa.Array, column: str) -> Decoded:
        """Return the numbers in [low, high]."""
        values, missing = Number((), True, wanted := "a finite number").decode(array, column)
        _refuse(missing, _plain(array), column, wanted)
        return Decoded(np.clip(values, self.low, self.high), missing)


@dataclass(frozen=True)
class Category(Kind):
    """Texts and what is spelled in one way, hashed to uint64; or the places of declared values."""

    missing: tuple[str, ...]
    values: tuple[str, ...] | None = None
    """The values that are declared; all others are missing."""

    def decode(self, array: pa.Array, column: str) -> Decoded:
        """Return the hashes or the places."""
        array = self.texts(array, column)
        if self.values is None:
            return hashed(array, self.missing)
        index = pc.index_in(array, value_set=pa.array(self.values))
        return Decoded(_filled(index, 0), np.asarray(index.is_null()))

    def texts(self, array: pa.Array, column: str) -> pa.Array:
        """Return how the values are spelled; bytes stay what they are."""
        array = _plain(array)
        kind, types = array.type, pa.types
        if types.is_date64(kind):
            array = array.cast(pa.date32(), safe=False)
        if any(test(kind) for test in _SPELLED_ONE_WAY):
            array = array.cast(pa.string())
        elif _is_bytes(kind):
            array = array.cast(pa.binary()).view(pa.string())  # only hashed
        elif not types.is_string(kind):
            wanted = "texts, integers, booleans or dates, which are spelled one way"
            raise _type_error(column, kind, wanted)
        return array


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


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)


def _parsed(texts: pa.Array, given: pa.Array, column: str, wanted: str) -> pa.Array:
    """Return the numbers that `texts` are, blanks around them aside."""
    with suppress(pa.ArrowInvalid):
        return texts.cast(pa.float64())
    trimmed = pc.ascii_trim_whitespace(texts)
    try:
        return trimmed.cast(pa.float64())
    except pa.ArrowInvalid:
        wrong = np.array([not _is_decimal(text) for text in trimmed])
        _refuse(wrong, given, column, wanted)
        raise


def _is_decimal(text: pa.Scalar) -> bool:
    with suppress(pa.ArrowInvalid):
        text.cast(pa.float64())
        return True
    return False


def _filled(array: pa.Array, missing: Any) -> np.ndarray:
    """Return numbers as NumPy has them, nulls as `missing`."""
    return np.asarray(array.fill_null(missing) if array.null_count else array)


def _type_error(column: str, kind: pa.DataType, wanted: str) -> ColumnError:
    return ColumnError(f"holds {kind}, expected {wanted}", column=column)


def _refuse(wrong: np.ndarray, array: pa.Array, column: str, wanted: str) -> None:
    """Raise the ColumnError of the first of the rows that are `wrong`."""
    for row in np.flatnonzero(wrong)[:1]:
        value = array[int(row)].as_py()
        found = None if value == "" else value
        raise ColumnError.unexpected(found, wanted, column=column, row=int(row))
