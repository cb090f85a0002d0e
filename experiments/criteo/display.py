"""Read the Kaggle format of Criteo Display Ads, and prepare a columnar store from it.

One click per line, 40 columns separated by tabs, no header: label (0 or 1), I1..I13 (integers,
I2 may be negative), C1..C26 (eight hexadecimal digits); an empty field is a missing value. Lines
end in LF or CRLF; the last may lack its end, and blank lines may follow it. Plain or gzip.

Two readers in one: blocks of lines are parsed with vectorised NumPy, which only says *whether*
all is well; if not, the block is read again line by line, in plain Python, to say what is wrong
and where. Memory is that of one block, whatever the size of the file.
"""

from __future__ import annotations

import gzip
import io
import os
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from experiments.criteo.schema import DISPLAY_ADS, MISSING, Schema, log_transform
from experiments.criteo.store import Columns, Store, StoreWriter, chronological_split

SCHEMA: Schema = DISPLAY_ADS
NUM_INTEGERS = len(SCHEMA.integers)
NUM_COLUMNS = 1 + NUM_INTEGERS + len(SCHEMA.categories)
COLUMN_NAMES = ("label", *SCHEMA.integers, *SCHEMA.categories)

BLOCK_BYTES = 1 << 22
MAX_LINE_BYTES = 1 << 20
MAX_DIGITS = 18  # an integer of 18 digits fits in 64 bits


class DataError(ValueError):
    """The input is not what its format says: one line that names file, line, column and finding.

    `line` counts from 1; `line` and `column` are None where the fault is that of the file.
    """

    def __init__(
        self, source: Path, problem: str, *, line: int | None = None, column: str | None = None
    ) -> None:
        where = str(source)
        where += "" if line is None else f", line {line}"
        where += "" if column is None else f", column {column}"
        super().__init__(f"{where}: {problem}")
        self.source, self.line, self.column = source, line, column


def prepare(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    hash_seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> Store:
    """Turn a raw file `source` into a store in the new directory `out`, and return the store.

    Rows keep their order; the split is chronological, 80/10/10. `progress` is called with the
    number of rows done, after every block. Memory is constant. Either `out` is a whole store in
    the end or it does not exist.

    Raises:
        DataError: `source` cannot be read or is not in the format.
        StoreError: `out` exists, or cannot be written.
    """
    with StoreWriter(out, SCHEMA, hash_seed=hash_seed) as writer:
        for block in read(source, hash_seed=hash_seed):
            writer.append(block)
            if progress is not None:
                progress(writer.num_rows)
        return writer.finish(
            splits=chronological_split(writer.num_rows),
            source={"format": "criteo-display", "file": Path(source).name},
        )


def read(
    source: str | os.PathLike[str], *, hash_seed: int = 0, block_bytes: int = BLOCK_BYTES
) -> Iterator[Columns]:
    """Yield the rows of a raw file as blocks of columns, those of a store, in file order.

    `block_bytes` of text are held at a time; the rows do not depend on it. The columns are
    "label" uint8 [n], "integers" float32 [n, 13], "integers_missing" bool [n, 13] and
    "categories" int32 [n, 26]. Integers x become ``sign(x) * log1p(|x|)``, missing ones 0.

    Raises:
        DataError: the file cannot be read or is not in the format.
    """
    path = Path(source)
    rows = 0
    for text, first_line in _blocks_of_lines(path, block_bytes):
        block = _parse(text, hash_seed)
        if block is None:
            _explain(path, text, first_line)
        else:
            rows += len(block["label"])
            yield block
    if rows == 0:
        raise DataError(path, f"is empty; expected lines of {NUM_COLUMNS} columns")


def _open(path: Path) -> io.IOBase:
    """Open a plain or gzip file, told apart by its first bytes; the name does not matter."""
    try:
        with open(path, "rb") as file:
            head = file.read(512)
        if head[:2] == b"\x1f\x8b":
            return gzip.GzipFile(path, "rb")
        if head[:4] == b"PK\x03\x04" or head[257:262] == b"ustar":
            raise DataError(path, "is a zip or tar archive; unpack it and give the train.txt in it")
        return open(path, "rb", buffering=0)
    except OSError as error:
        raise DataError(path, f"cannot be read: {error.strerror}") from None


def _blocks_of_lines(path: Path, block_bytes: int) -> Iterator[tuple[bytes, int]]:
    """Yield (whole lines, number of the first line); blank lines at the end of the file left out.

    Blank lines are only known to be at the end when the file ends: at the end of a block they are
    put aside, and the first of them is the error if a row follows.
    """
    line, blank, carry = 1, None, b""
    with _open(path) as file:
        while True:
            chunk = _read(file, block_bytes, path, line)
            text = carry + chunk
            if not chunk:
                if not text:
                    return
                text += b"\n"
            cut = text.rfind(b"\n") + 1
            text, carry = text[:cut], text[cut:]
            if text[-2:-1] in (b"", b"\n", b"\r"):
                last = len(text.rstrip(b"\r\n"))
                end = text.find(b"\n", last) + 1 if last else 0
            else:
                end = len(text)
            if end:
                if blank is not None:
                    raise DataError(path, _BLANK, line=blank)
                yield text[:end], line
                line += text.count(b"\n", 0, end)
            if end < len(text) and blank is None:
                blank = line  # and `line` is of no more use: a row is an error from here on
            if len(carry) > MAX_LINE_BYTES:
                if blank is not None:
                    raise DataError(path, _BLANK, line=blank)
                raise DataError(path, f"longer than {MAX_LINE_BYTES} bytes", line=line)


def _read(file: io.IOBase, size: int, path: Path, line: int) -> bytes:
    try:
        return file.read(size)
    except EOFError:
        problem = "the gzip stream is truncated"
    except (zlib.error, gzip.BadGzipFile) as error:
        problem = f"the gzip stream is damaged ({error})"
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
    raise DataError(path, f"{problem} (not before line {line})")


# --- The vectorised reader -----------------------------------------------------------------------
#
# Fields are read as 64-bit words, eight characters at a time, and decoded by arithmetic on all
# eight bytes at once ("SIMD within a register"). In a little-endian word the first character is
# the lowest byte. An addition may only carry out of a byte from 0x80 up; such a byte is refused
# whatever is carried into it, and the whole word with it, so that what it carries does not matter.


def _bytes(value: int) -> np.uint64:
    """Return the word whose eight bytes are all `value`."""
    return np.uint64(value * 0x0101010101010101)


_u = np.uint64
_HIGH_BITS = _bytes(0x80)
_PADDING = b"\0" * 8  # so that the eight bytes before and after every field can be read


def _parse(text: bytes, hash_seed: int) -> Columns | None:
    """Return the columns of `text`, whole lines; None if anything in it is not in the format."""
    padded = _PADDING + text + _PADDING
    buffer = np.frombuffer(padded, dtype=np.uint8)
    # One comparison finds tabs and line ends; other characters up to 10 are refused just below.
    separators = np.flatnonzero(buffer[8:-8] <= 10)
    separators += 8
    if len(separators) % NUM_COLUMNS:
        return None
    kinds = buffer[separators].reshape(-1, NUM_COLUMNS)
    if (kinds[:, :-1] != ord("\t")).any() or (kinds[:, -1] != ord("\n")).any():
        return None

    ends = np.ascontiguousarray(separators.reshape(-1, NUM_COLUMNS).T)
    rows = ends.shape[1]
    starts = np.empty_like(ends)
    starts[1:] = ends[:-1] + 1
    starts[0, 0] = 8
    starts[0, 1:] = ends[-1, :-1] + 1
    ends[-1] -= buffer[ends[-1] - 1] == ord("\r")
    lengths = ends - starts
    words = np.ndarray(len(padded) - 7, dtype="<u8", buffer=padded, strides=(1,))

    label = buffer[starts[0]] - np.uint8(ord("0"))
    if (lengths[0] != 1).any() or (label > 1).any():
        return None

    integers = np.empty((rows, NUM_INTEGERS), dtype=np.float32)
    missing = np.empty((rows, NUM_INTEGERS), dtype=bool)
    for j in range(NUM_INTEGERS):
        start, end, length = starts[1 + j], ends[1 + j], lengths[1 + j]
        negative = (buffer[start] == ord("-")) & (length > 0)
        digits = length - negative
        missing[:, j] = length == 0
        if (negative & (digits == 0)).any():
            return None
        magnitude, valid = _decimal(words[end - 8], np.minimum(digits, 8))
        if not valid.all():
            return None
        for i in np.flatnonzero(digits > 8):
            long = padded[end[i] - digits[i] : end[i]]
            if len(long) > MAX_DIGITS or not long.isdigit():
                return None
            magnitude[i] = int(long)
        value = magnitude.astype(np.int64)
        integers[:, j] = log_transform(np.where(negative, -value, value))

    categories = np.empty((rows, NUM_COLUMNS - 1 - NUM_INTEGERS), dtype=np.int32)
    for j in range(categories.shape[1]):
        start, length = starts[1 + NUM_INTEGERS + j], lengths[1 + NUM_INTEGERS + j]
        present = length == 8
        value, valid = _hexadecimal(words[start])
        if not np.where(present, valid, length == 0).all():
            return None
        categories[:, j] = np.where(present, SCHEMA.hash(value, j, hash_seed), MISSING)
    return {
        "label": label,
        "integers": integers,
        "integers_missing": missing,
        "categories": categories,
    }


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


# --- The reader that explains --------------------------------------------------------------------

_INTEGER = re.compile(rb"-?[0-9]{1,%d}" % MAX_DIGITS)
_HEXADECIMAL = re.compile(rb"[0-9a-fA-F]{8}")
_BLANK = f"a blank line between rows, expected {NUM_COLUMNS} columns"


def _explain(path: Path, text: bytes, first_line: int) -> None:
    """Raise the DataError of the first line of `text` that is not in the format."""
    for number, line in enumerate(text.split(b"\n")[:-1], start=first_line):
        line = line.removesuffix(b"\r")
        try:
            line.decode("utf-8")
        except UnicodeDecodeError as error:
            found = f"byte 0x{line[error.start]:02x} at position {error.start + 1}"
            raise DataError(path, f"{found} is not UTF-8 text", line=number) from None
        if not line:
            raise DataError(path, _BLANK, line=number)
        fields = line.split(b"\t")
        if len(fields) != NUM_COLUMNS:
            hint = " (the unlabelled test file has no label column)" * (
                len(fields) == NUM_COLUMNS - 1
            )
            found = f"{len(fields)} column{'s' * (len(fields) != 1)}"
            raise DataError(
                path,
                f"found {found}, expected {NUM_COLUMNS} separated by tabs: label, I1-I13, "
                f"C1-C26{hint}",
                line=number,
            )
        for column, field in zip(COLUMN_NAMES, fields, strict=True):
            expected = _expected(column, field)
            if expected is not None:
                shown = field.decode("utf-8")
                shown = ascii(shown if len(shown) <= 40 else shown[:40] + "...")
                problem = f"found {shown}, expected {expected}"
                raise DataError(path, problem, line=number, column=column)
    raise AssertionError(f"{path}: a block from line {first_line} was refused without a reason")


def _expected(column: str, field: bytes) -> str | None:
    """Return what `column` expects if `field` is not that, and None if it is."""
    if column == "label":
        return None if field in (b"0", b"1") else "0 or 1"
    if not field:
        return None
    if column in SCHEMA.integers:
        return None if _INTEGER.fullmatch(field) else f"an integer of at most {MAX_DIGITS} digits"
    return None if _HEXADECIMAL.fullmatch(field) else "eight hexadecimal digits"
