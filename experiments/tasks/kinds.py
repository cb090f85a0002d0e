"""Kinds of columns, which decode Arrow arrays to labels, numbers and categories.

- `Label`: 0 and 1 as integers, floats, booleans or texts; true and false as texts; or declared
  texts, integers or dates; never missing;
- `Number`: an integer, a float, a decimal, or a text that is one; finite, NaN is missing; a label
  is clipped to its bounds, and never missing;
- `Category`: a text or other bytes, an integer (as its decimal digits), a boolean (as true or
  false), or a date (as 2026-01-31). Floats and times are refused: writers do not agree on how they
  are spelled, and one value would have several ids;
- `Integer`, `HourOfWeek`, `Hexadecimal`: fields of Criteo's files.

A text in a CSV file and the value that it stands for in a Parquet file become equal. The empty text
and null are missing. `decode` takes the values of a column, [rows], and its name, and raises a
ColumnError for the first invalid row.
"""

from __future__ import annotations

import binascii
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from experiments.tasks.hashes import characters, extents, hashed
from experiments.tasks.splits import ColumnError

LABELS = {
    **dict.fromkeys(("0", "0.0", "false", "False", "FALSE"), 0),
    **dict.fromkeys(("1", "1.0", "true", "True", "TRUE"), 1),
}
"""Texts of the labels 0 and 1."""

MAX_DIGITS = 18
"""Most digits of an integer, which fits in 64 bits."""


class Decoded(NamedTuple):
    """Values of one column, with a mask of the missing ones."""

    values: np.ndarray
    """Labels, numbers, or unsigned integers that stand for categories: [rows]."""
    missing: np.ndarray
    """bool[rows]."""


@dataclass(frozen=True)
class Label:
    """Labels 0 and 1, or indices of declared `classes`.

    >>> Label(("no", "yes")).decode(pa.array(["yes", "no"]), "bought").values
    array([1, 0], dtype=int32)
    """

    classes: tuple[str, ...] = ()

    def decode(self, array: pa.Array, column: str) -> Decoded:
        """Returns the labels."""
        texts = values = _plain(array)
        expected = " or ".join(map(ascii, self.classes)) or "0 or 1"
        if not self.classes and _is_number(values.type):
            texts = values.cast(pa.float64(), safe=False).cast(pa.string())  # 1.0 is "1"
        label_of = {name: i for i, name in enumerate(self.classes)} or LABELS
        index = pc.index_in(_spelled(texts, column, expected), value_set=pa.array(label_of))
        _refuse(np.asarray(index.is_null()), values, column, expected)
        labels = np.array([*label_of.values()], np.int32)[np.asarray(index)]
        return Decoded(labels, np.zeros(len(labels), bool))


@dataclass(frozen=True)
class Number:
    """Finite numbers, float64; within float32 unless `logarithmic`.

    >>> Number().decode(pa.array(["1.5", None]), "age").values
    array([1.5, nan])
    >>> Number(bounds=(0.0, 5.0)).decode(pa.array([-1.0, 7.0]), "stars").values
    array([0., 5.])
    """

    missing: tuple[str, ...] = ()
    logarithmic: bool = True
    bounds: tuple[float, ...] = ()
    """Public (low, high), to which a label is clipped; a label is never missing."""

    @property
    def _expected(self) -> str:
        return "a finite number" if self.bounds else "a finite number, or nothing"

    def decode(self, array: pa.Array, column: str) -> Decoded:
        """Returns the numbers, NaN where they are missing."""
        values = array = _plain(array)
        if types.is_string(array.type):
            missing = absent(array, self.missing)
            if missing.any():
                array = pc.if_else(pa.array(missing), pa.scalar(None, pa.string()), array)
            array = self._parsed(array, values, column)
        elif types.is_null(array.type) or _is_number(array.type):
            array = array.cast(pa.float64(), safe=False)
        else:
            raise ColumnError(f"holds {array.type}, expected numbers", column=column)
        numbers = _filled(array, np.nan)
        most = float(np.finfo(np.float64 if self.logarithmic else np.float32).max)
        expected = (
            self._expected if self.logarithmic else f"a number of at most {most:.1e}, or nothing"
        )
        _refuse(np.abs(numbers) > most, values, column, expected)
        if self.bounds:
            _refuse(np.isnan(numbers), values, column, expected)
            low, high = self.bounds
            numbers = np.clip(numbers, low, high)
        return Decoded(numbers, np.isnan(numbers))

    def _parsed(self, texts: pa.Array, values: pa.Array, column: str) -> pa.Array:
        with suppress(pa.ArrowInvalid):
            return texts.cast(pa.float64())
        trimmed = pc.ascii_trim_whitespace(texts)
        try:
            return trimmed.cast(pa.float64())
        except pa.ArrowInvalid:
            wrong = np.array([not _is_decimal(text) for text in trimmed])
            _refuse(wrong, values, column, self._expected)
            raise


@dataclass(frozen=True)
class Category:
    """Texts, integers, booleans or dates: hashed to uint64, or indices of declared values.

    >>> Category(values=("small", "large")).decode(pa.array(["large", "huge"]), "size")
    Decoded(values=array([1, 0], dtype=int32), missing=array([False,  True]))
    """

    missing: tuple[str, ...] = ()
    values: tuple[str, ...] | None = None
    """Declared values; all others are missing."""

    def decode(self, array: pa.Array, column: str) -> Decoded:
        """Returns the hashes or the indices."""
        expected = "texts, integers, booleans or dates"
        texts = _spelled(_plain(array), column, expected)
        if self.values is None:
            return Decoded(hashed(texts), absent(texts, self.missing))
        index = pc.index_in(texts, value_set=pa.array(self.values))
        return Decoded(_filled(index, 0), np.asarray(index.is_null()))


@dataclass(frozen=True)
class User:
    """Texts, integers, booleans or dates that name users, none missing: bytes.

    >>> User().decode(pa.array(["ann", "bob"]), "user").values
    array([b'ann', b'bob'], dtype=object)
    """

    missing: tuple[str, ...] = ()

    def decode(self, array: pa.Array, column: str) -> Decoded:
        """Returns the names as bytes."""
        texts = _spelled(_plain(array), column, "texts, integers, booleans or dates")
        missing = absent(texts, self.missing)
        _refuse(missing, texts, column, "a user: remove the row, or name its user")
        return Decoded(np.array(texts.view(pa.binary()).to_pylist(), object), missing)


@dataclass(frozen=True)
class Integer:
    """Decimal integers, int64; the value `missing` stands for a missing one.

    >>> Integer(missing=-1).decode(pa.array(["12", "-1"]), "clicks").missing
    array([False,  True])
    """

    missing: int | None = None
    expected: str = f"an integer of at most {MAX_DIGITS} digits"

    def decode(self, array: pa.Array, column: str) -> Decoded:
        """Returns the integers."""
        array = _plain(array)
        if _is_number(array.type):
            numbers = _filled(array.cast(pa.float64(), safe=False), np.nan)
            missing = np.isnan(numbers)
            is_integer = (numbers == np.rint(numbers)) & (np.abs(numbers) < 10.0**MAX_DIGITS)
            _refuse(~(is_integer | missing), array, column, self.expected)
            integers = array.cast(pa.int64(), safe=False)
        else:
            integers = self._parsed(_texts(array, column, self.expected), column)
            missing = np.asarray(integers.is_null())
        values = np.where(missing, 0, _filled(integers, 0))
        if self.missing is not None:
            missing = missing | (values == self.missing)
        return Decoded(values, missing)

    def _parsed(self, texts: pa.Array, column: str) -> pa.Array:
        lengths = extents(texts)[1]
        # Arrow reads 0x1F and blanks around digits as well.
        odd = characters(texts).translate(None, b"-0123456789")
        if odd or lengths.max(initial=0) > MAX_DIGITS:
            self._refuse_others(texts, column)
        if np.count_nonzero(lengths == 0) > texts.null_count:
            texts = pc.if_else(pa.array(lengths == 0), pa.scalar(None, pa.string()), texts)
        try:
            return texts.cast(pa.int64())
        except pa.ArrowInvalid:
            self._refuse_others(texts, column)
            raise

    def _refuse_others(self, texts: pa.Array, column: str) -> None:
        pattern = rf"\A(-?[0-9]{{1,{MAX_DIGITS}}})?\z"
        _refuse(_not_matching(texts, pattern), texts, column, self.expected)


@dataclass(frozen=True)
class HourOfWeek(Integer):
    """Times in seconds since 1970 (UTC), as hours since the last Thursday: uint64, 0 to 167.

    >>> HourOfWeek().decode(pa.array([7200]), "time").values
    array([2], dtype=uint64)
    """

    expected: str = f"a time in seconds since 1970, of at most {MAX_DIGITS} digits"

    def decode(self, array: pa.Array, column: str) -> Decoded:
        """Returns the hours."""
        seconds, missing = super().decode(array, column)
        return Decoded((seconds // 3600 % 168).astype(np.uint64), missing)


@dataclass(frozen=True)
class Hexadecimal:
    """Numbers of 32 bits in eight hexadecimal digits, uint64; missing if empty.

    >>> Hexadecimal().decode(pa.array(["000000ff", ""]), "C1").values
    array([255,   0], dtype=uint64)
    """

    expected: str = "eight hexadecimal digits"

    def decode(self, array: pa.Array, column: str) -> Decoded:
        """Returns the numbers."""
        texts = _texts(_plain(array), column, self.expected)
        lengths = extents(texts)[1]
        present = lengths == 8
        values = np.zeros(len(lengths), np.uint64)
        try:
            if lengths[~present].any():
                raise ValueError("other lengths")
            values[present] = np.frombuffer(binascii.unhexlify(characters(texts)), ">u4")
        except ValueError:
            wrong = _not_matching(texts, r"\A([0-9a-fA-F]{8})?\z")
            _refuse(wrong, texts, column, self.expected)
            raise
        return Decoded(values, ~present)


Kind = Label | Number | Category | User | Integer | Hexadecimal
"""Kind of the values of a column."""


# --- Arrays --------------------------------------------------------------------------------------


def _plain(array: pa.Array) -> pa.Array:
    """Returns a dictionary's values in its place, and texts in one layout."""
    if types.is_dictionary(array.type):
        array = array.dictionary_decode()
    kind = array.type
    if types.is_large_string(kind) or types.is_string_view(kind) or _is_bytes(kind):
        with suppress(pa.ArrowInvalid):  # bytes that are not UTF-8 stay bytes
            array = array.cast(pa.string())
    return array


def _spelled(array: pa.Array, column: str, expected: str) -> pa.Array:
    """Returns values as texts if their type has one spelling; bytes stay as they are."""
    kind = array.type
    if types.is_date64(kind):
        array = array.cast(pa.date32(), safe=False)
    one_spelling = types.is_integer, types.is_boolean, types.is_date, types.is_null
    if any(test(kind) for test in one_spelling):
        return array.cast(pa.string())
    return _texts(array, column, expected)


def _texts(array: pa.Array, column: str, expected: str) -> pa.Array:
    if _is_bytes(array.type):
        return array.cast(pa.binary()).view(pa.string())  # bytes that no text has
    if types.is_null(array.type):
        return array.cast(pa.string())
    if types.is_floating(array.type):  # 17 is 17 in one file, and 17.0 in another
        expected += ": convert whole numbers to integers, in pandas by astype('Int64')"
    if not types.is_string(array.type):
        raise ColumnError(f"holds {array.type}, expected {expected}", column=column)
    return array


def _is_bytes(kind: pa.DataType) -> bool:
    return types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind)


def _is_number(kind: pa.DataType) -> bool:
    return types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind)


def _is_decimal(text: pa.Scalar) -> bool:
    with suppress(pa.ArrowInvalid):
        text.cast(pa.float64())
        return True
    return False


def _filled(array: pa.Array, missing: Any) -> np.ndarray:
    """Returns numbers as NumPy has them, nulls as `missing`."""
    return np.asarray(array.fill_null(missing) if array.null_count else array)


def _not_matching(texts: pa.Array, pattern: str) -> np.ndarray:
    matches = pc.match_substring_regex(texts.view(pa.binary()), pattern)
    return ~np.asarray(matches.fill_null(True))


def _refuse(wrong: np.ndarray, array: pa.Array, column: str, expected: str) -> None:
    """Raises the ColumnError of the first row that is `wrong`."""
    if wrong.any():
        row = int(wrong.argmax())
        value = array[row]
        value = value.as_py() if not types.is_string(value.type) else _as_text(value)
        raise ColumnError.unexpected(value, expected, column=column, row=row)


def _as_text(value: pa.Scalar) -> str | None:
    data = value.as_buffer()
    return None if data is None else data.to_pybytes().decode("utf-8", "backslashreplace")


def absent(texts: pa.Array, missing: Sequence[str] = ()) -> np.ndarray:
    """Returns the mask of missing texts, bool[rows].

    >>> absent(pa.array(["a", "", None, "-1"]), missing=("-1",))
    array([False,  True,  True,  True])
    """
    mask = extents(texts)[1] == 0
    if texts.null_count:
        mask |= np.asarray(texts.is_null())
    for text in missing:
        mask |= np.asarray(pc.equal(texts, text).fill_null(False))
    return mask
