"""Decode the fields of a block of lines with vectorised NumPy: integers, hexadecimals, text.

A kind of field answers three questions. `decode` takes a whole column, and only says *whether* all
is well; `accepts` takes one field, in plain Python, and is asked where `decode` refused, so that
an error can say which field it was. `write` says as which field a value of a table stands in a
file.

Fields are read as 64-bit words, eight characters at a time, and decoded by arithmetic on all
eight bytes at once ("SIMD within a register"). In a little-endian word the first character is
the lowest byte. An addition may only carry out of a byte from 0x80 up; such a byte is refused
whatever is carried into it, and the whole word with it, so that what it carries does not matter.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from experiments.tasks.clicks.hashing import first_characters, hash_text, words_of

MAX_DIGITS = 18  # an integer of 18 digits fits in 64 bits


def _bytes(value: int) -> np.uint64:
    """Return the word whose eight bytes are all `value`."""
    return np.uint64(value * 0x0101010101010101)


_u = np.uint64
_HIGH_BITS = _bytes(0x80)
_PADDING = b"\0" * 8  # so that the eight bytes before and after every field can be read


# --- Lines ---------------------------------------------------------------------------------------


class Lines:
    """Whole lines of text, cut into fields.

    Attributes:
        buffer: The text, eight zero bytes around it; uint8.
        words: `words[i]` are the eight bytes of `buffer` from i on, as one integer.
        starts, ends: Where in `buffer` each field lies; int64 [columns, lines].
    """

    def __init__(self, padded: bytes, ends: np.ndarray) -> None:
        self.buffer = np.frombuffer(padded, dtype=np.uint8)
        self.words = words_of(padded)
        self.starts = np.empty_like(ends)
        self.starts[1:] = ends[:-1] + 1
        self.starts[0, :1] = len(_PADDING)
        self.starts[0, 1:] = ends[-1, :-1] + 1
        self.ends = ends
        self.ends[-1] -= self.buffer[ends[-1] - 1] == ord("\r")

    @classmethod
    def cut(cls, text: bytes, num_columns: int) -> Lines | None:
        """Return `text`, which ends in a line end; None if a line has not `num_columns` fields."""
        padded = _PADDING + text + _PADDING
        buffer = np.frombuffer(padded, dtype=np.uint8)
        # One comparison finds tabs and line ends; other characters up to 10 are refused just below.
        separators = np.flatnonzero(buffer[8:-8] <= 10)
        separators += 8
        if len(separators) % num_columns:
            return None
        kinds = buffer[separators].reshape(-1, num_columns)
        if (kinds[:, :-1] != ord("\t")).any() or (kinds[:, -1] != ord("\n")).any():
            return None
        return cls(padded, np.ascontiguousarray(separators.reshape(-1, num_columns).T))

    def column(self, index: int) -> Fields:
        """Return the fields of one column."""
        return Fields(self, self.starts[index], self.ends[index])

    @cached_property
    def printable(self) -> bool:
        """Whether all but the separators is printable ASCII: from the space to the tilde."""
        text = self.buffer[8:-8]
        others = np.count_nonzero(text - np.uint8(ord(" ")) > ord("~") - ord(" "))
        returns = np.count_nonzero(self.buffer[self.ends[-1]] == ord("\r"))
        return bool(others == self.ends.size + returns)


class Fields(NamedTuple):
    """The fields of one column of `lines`."""

    lines: Lines
    starts: np.ndarray
    ends: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        """Characters of each field."""
        return self.ends - self.starts


# --- Kinds of fields -----------------------------------------------------------------------------


class Decoded(NamedTuple):
    """The values of one column; what stands where `missing` is true means nothing."""

    values: np.ndarray
    missing: np.ndarray


@runtime_checkable
class Kind(Protocol):
    """How the fields of a column are written."""

    @property
    def wanted(self) -> str:
        """What a field must be, for people."""

    def decode(self, fields: Fields) -> Decoded | None:
        """Return the values of a column; None if any of its fields is not of this kind."""

    def accepts(self, field: bytes) -> bool:
        """Whether `decode` takes this field."""

    def write(self, value: Any) -> bytes | None:
        """Return the field as which `value` stands in a file; None if nothing says which."""


@dataclass(frozen=True)
class Label:
    """0 or 1, never missing; uint8."""

    wanted = "0 or 1"

    def decode(self, fields: Fields) -> Decoded | None:
        """Return the labels."""
        label = fields.lines.buffer[fields.starts] - np.uint8(ord("0"))
        if (fields.lengths != 1).any() or (label > 1).any():
            return None
        return Decoded(label, np.zeros(len(label), dtype=bool))

    def accepts(self, field: bytes) -> bool:
        """Whether `field` is 0 or 1."""
        return field in (b"0", b"1")

    def write(self, value: Any) -> bytes | None:
        """Return a text as it is, and a whole number in decimal digits."""
        text = _as_text(value)
        return _as_integer(value) if text is None else text


_INTEGER = re.compile(rb"(-?[0-9]{1,%d})?" % MAX_DIGITS)


@dataclass(frozen=True)
class Integer:
    """A decimal integer, int64; missing if empty, or if it is the value `missing`."""

    missing: int | None = None
    wanted = f"an integer of at most {MAX_DIGITS} digits"

    def decode(self, fields: Fields) -> Decoded | None:
        """Return the integers."""
        length = fields.lengths
        negative = (fields.lines.buffer[fields.starts] == ord("-")) & (length > 0)
        digits = length - negative
        if (negative & (digits == 0)).any() or digits.max(initial=0) > MAX_DIGITS:
            return None
        magnitude = _natural(fields.lines.words, fields.ends, digits)
        if magnitude is None:
            return None
        values = magnitude.astype(np.int64)
        np.negative(values, out=values, where=negative)
        missing = length == 0
        if self.missing is not None:
            missing |= values == self.missing
        return Decoded(values, missing)

    def accepts(self, field: bytes) -> bool:
        """Whether `field` is an integer or empty."""
        return _INTEGER.fullmatch(field) is not None

    def write(self, value: Any) -> bytes | None:
        """Return a text as it is, and a whole number (3.0 is one) in decimal digits."""
        text = _as_text(value)
        return _as_integer(value) if text is None else text


_HEXADECIMAL = re.compile(rb"([0-9a-fA-F]{8})?")


@dataclass(frozen=True)
class Hexadecimal:
    """A 32-bit number in eight hexadecimal digits, uint64; missing if empty."""

    wanted = "eight hexadecimal digits"

    def decode(self, fields: Fields) -> Decoded | None:
        """Return the numbers."""
        length = fields.lengths
        present = length == 8
        values, valid = _hexadecimal(fields.lines.words[fields.starts])
        if not np.where(present, valid, length == 0).all():
            return None
        return Decoded(values, ~present)

    def accepts(self, field: bytes) -> bool:
        """Whether `field` is eight hexadecimal digits or empty."""
        return _HEXADECIMAL.fullmatch(field) is not None

    def write(self, value: Any) -> bytes | None:
        """Return a text as it is; of a number nobody knows in which base it was read."""
        return _as_text(value)


_PRINTABLE = re.compile(rb"[ -~]*")


@dataclass(frozen=True)
class Text:
    """Any printable ASCII, hashed to uint64; missing if empty, or if it is the text `missing`."""

    missing: bytes | None = None
    wanted = "printable ASCII text"

    def decode(self, fields: Fields) -> Decoded | None:
        """Return the hashes; two texts have the same with a probability of about 2^-64."""
        if not fields.lines.printable:
            return None
        lengths = fields.lengths
        missing = lengths == 0
        if self.missing is not None:
            word = np.uint64(int.from_bytes(self.missing, "little"))
            first = first_characters(fields.lines.words[fields.starts], lengths)
            missing |= (lengths == len(self.missing)) & (first == word)
        return Decoded(hash_text(fields.lines.words, fields.starts, lengths), missing)

    def accepts(self, field: bytes) -> bool:
        """Whether `field` is printable ASCII."""
        return _PRINTABLE.fullmatch(field) is not None

    def write(self, value: Any) -> bytes | None:
        """Return a text as it is, an integer in decimal digits; 3.0 may have been "3" or "3.0"."""
        text = _as_text(value)
        return _as_integer(value) if text is None and not isinstance(value, _FLOATS) else text


@dataclass(frozen=True)
class HourOfWeek(Integer):
    """A time in seconds since 1970 (UTC), uint64 hours since the last Thursday: 0 to 167."""

    wanted = f"a time in seconds since 1970, of at most {MAX_DIGITS} digits"

    def decode(self, fields: Fields) -> Decoded | None:
        """Return the hours."""
        decoded = super().decode(fields)
        if decoded is None:
            return None
        return Decoded((decoded.values // 3600 % 168).astype(np.uint64), decoded.missing)


# --- Values of a table ---------------------------------------------------------------------------

_INTEGERS, _FLOATS = (int, np.integer), (float, np.floating)


def is_missing(value: Any) -> bool:
    """Whether a table says by `value` that it has none: None, NaN, or an NA that equals nothing."""
    if value is None:
        return True
    try:
        return bool(value != value)
    except (TypeError, ValueError):  # an NA has no truth value, and an array has too many
        return type(value).__name__ == "NAType"


def _as_text(value: Any) -> bytes | None:
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    return bytes(value) if isinstance(value, bytes) else None


def _as_integer(value: Any) -> bytes | None:
    if isinstance(value, _FLOATS) and float(value).is_integer():
        value = int(value)
    if isinstance(value, _INTEGERS) and not isinstance(value, bool):
        return b"%d" % int(value)
    return None


# --- Eight characters at once --------------------------------------------------------------------


def _natural(words: np.ndarray, ends: np.ndarray, digits: np.ndarray) -> np.ndarray | None:
    """Return the numbers written in the `digits` characters before `ends`; None if one is not."""
    values, valid = _decimal(words[ends - 8], np.minimum(digits, 8))
    if not valid.all():
        return None
    long = np.flatnonzero(digits > 8)
    if len(long):
        higher = _natural(words, ends[long] - 8, digits[long] - 8)
        if higher is None:
            return None
        values[long] += higher * _u(10**8)
    return values


def _decimal(words: np.ndarray, digits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the number in the last `digits` (0 to 8) characters of each word, and its validity."""
    outside = (64 - 8 * digits).astype(np.uint64)
    x = words ^ _bytes(ord("0"))
    x >>= outside
    x <<= outside  # characters before the field count as the digit 0
    valid = ((x + _bytes(0x80 - 10)) | x) & _HIGH_BITS == 0
    x = (x * _u(10) + (x >> _u(8))) & _u(0x00FF00FF00FF00FF)
    x = (x * _u(100) + (x >> _u(16))) & _u(0x0000FFFF0000FFFF)
    x = (x * _u(10_000) + (x >> _u(32))) & _u(0xFFFFFFFF)
    return x, valid


def _hexadecimal(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the number written by the eight hexadecimal digits of each word, and its validity."""
    lower = words | _bytes(0x20)
    # The high bit of each byte of (c + 0x80 - a) & ~(c + 0x80 - b) is set if and only if a <= c < b
    digit = (words + _bytes(0x80 - ord("0"))) & ~(words + _bytes(0x80 - ord("9") - 1))
    letter = (lower + _bytes(0x80 - ord("a"))) & ~(lower + _bytes(0x80 - ord("f") - 1))
    valid = (digit | letter) & _HIGH_BITS == _HIGH_BITS
    x = (words & _bytes(0x0F)) + ((words >> _u(6)) & _bytes(1)) * _u(9)
    x = ((x * _u(0x1001)) >> _u(8)) & _u(0x00FF00FF00FF00FF)
    x = ((x * _u(0x1000001)) >> _u(16)) & _u(0x0000FFFF0000FFFF)
    x = (x * _u(0x1000000000001)) >> _u(32)
    return x, valid
