"""What the fields of raw text hold: labels, integers, hexadecimal numbers, texts.

Each kind decodes a column at once, which only says whether all is well, and has a pattern for one
field, which says where it is not.
"""

from __future__ import annotations

import binascii
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from experiments.tasks.clicks.encoding import (
    ColumnError,
    Decoded,
    Kind,
    characters,
    extents,
    hashed,
)

if TYPE_CHECKING:
    import pyarrow as pa

MAX_DIGITS = 18  # an integer of 18 digits fits in 64 bits
_INTEGERS = (int, np.integer)
_NUMBERS = (*_INTEGERS, float, np.floating)

_AT_ONCE = 1 << 16  # fits in a cache


class RawKind(Kind):
    """How the fields of a column are written."""

    wanted: ClassVar[str]
    """What a field must be, for people."""
    pattern: ClassVar[re.Pattern[bytes]]
    """A field, and nothing else."""
    numbers: ClassVar[tuple[type, ...]] = ()
    """Types of whole numbers that are written in one way alone: in decimal digits."""

    def decode(self, array: pa.Array, column: str) -> Decoded:
        """Return the values of fields; a ColumnError, which names none, if one is not such."""
        decoded = self._decoded(array, extents(array)[1])
        if decoded is None:
            raise ColumnError(f"expected {self.wanted}", column=column)
        return decoded

    def _decoded(self, array: pa.Array, lengths: np.ndarray) -> Decoded | None:
        """Return the values; None if any of the fields is not of this kind."""
        raise NotImplementedError

    def write(self, value: Any) -> bytes | None:
        """Return the field as which a value stands in a file; None if it stands in none."""
        field: Any = value
        if isinstance(value, str):
            field = value.encode("utf-8", "surrogatepass")
        elif isinstance(field, self.numbers) and not isinstance(value, bool):
            whole = isinstance(value, _INTEGERS) or float(value).is_integer()
            field = b"%d" % int(value) if whole else None
        return field if isinstance(field, bytes) and self.pattern.fullmatch(field) else None


@dataclass(frozen=True)
class Label(RawKind):
    """0 or 1, never missing; uint8."""

    wanted = "0 or 1"
    pattern = re.compile(rb"[01]")
    numbers = _NUMBERS

    def _decoded(self, array: pa.Array, lengths: np.ndarray) -> Decoded | None:
        labels = np.frombuffer(characters(array), np.uint8) - np.uint8(ord("0"))
        if (lengths != 1).any() or (labels > 1).any():
            return None
        return Decoded(labels, np.zeros(len(labels), bool))


@dataclass(frozen=True)
class Integer(RawKind):
    """A decimal integer, int64; missing if empty, or if it is the value `missing`."""

    missing: int | None = None
    wanted = f"an integer of at most {MAX_DIGITS} digits"
    pattern = re.compile(rb"(-?[0-9]{1,%d})?" % MAX_DIGITS)
    numbers = _NUMBERS

    def _decoded(self, array: pa.Array, lengths: np.ndarray) -> Decoded | None:
        text = characters(array)
        if text.translate(None, b"-0123456789"):  # Arrow reads 0x1F as well
            return None
        for row in np.flatnonzero(lengths > MAX_DIGITS).tolist():
            if not self.pattern.fullmatch(array[row].as_buffer()):
                return None
        try:
            values = array.cast("int64")
        except ValueError:  # of Arrow
            return None
        integers = np.asarray(values.fill_null(0))
        missing = lengths == 0
        if self.missing is not None:
            missing |= integers == self.missing
        return Decoded(integers, missing)


@dataclass(frozen=True)
class HourOfWeek(Integer):
    """A time in seconds since 1970 (UTC), uint64 hours since the last Thursday: 0 to 167."""

    wanted = f"a time in seconds since 1970, of at most {MAX_DIGITS} digits"

    def _decoded(self, array: pa.Array, lengths: np.ndarray) -> Decoded | None:
        decoded = super()._decoded(array, lengths)
        if decoded is None:
            return None
        return Decoded((decoded.values // 3600 % 168).astype(np.uint64), decoded.missing)


@dataclass(frozen=True)
class Hexadecimal(RawKind):
    """A 32-bit number in eight hexadecimal digits, uint64; missing if empty."""

    wanted = "eight hexadecimal digits"
    pattern = re.compile(rb"([0-9a-fA-F]{8})?")

    def _decoded(self, array: pa.Array, lengths: np.ndarray) -> Decoded | None:
        present = lengths == 8
        if (lengths[~present] != 0).any():
            return None
        values = np.zeros(len(lengths), np.uint64)
        try:
            values[present] = np.frombuffer(binascii.unhexlify(characters(array)), ">u4")
        except binascii.Error:
            return None
        return Decoded(values, ~present)


@dataclass(frozen=True)
class Text(RawKind):
    """Any printable ASCII, hashed to uint64; missing if empty, or if it is the text `missing`."""

    missing: str = ""
    wanted = "printable ASCII text"
    pattern = re.compile(rb"[ -~]*")
    numbers = _INTEGERS

    def _decoded(self, array: pa.Array, lengths: np.ndarray) -> Decoded | None:
        return hashed(array, (self.missing,) if self.missing else ())


def num_unprintable(text: bytes) -> int:
    """Return how many bytes are no printable ASCII characters: from the space to the tilde."""
    characters, count = np.frombuffer(text, np.uint8), 0
    for begin in range(0, len(text), _AT_ONCE):
        shifted = characters[begin : begin + _AT_ONCE] - np.uint8(ord(" "))
        count += int(np.count_nonzero(shifted > ord("~") - ord(" ")))
    return count
