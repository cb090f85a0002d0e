"""Files as their publishers and owners give them, plain or gzip, and ranges of their lines."""

from __future__ import annotations

import gzip
import io
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path


class DataError(ValueError):
    """The input is not what its format says: one line that names file, line, column and finding.

    `line` counts from 1, as does `row` where a file has no lines; they and `column` are None where
    the fault is that of the file. `problem` is the line without its beginning, which names these.
    """

    def __init__(
        self,
        source: Path,
        problem: str,
        *,
        line: int | None = None,
        row: int | None = None,
        column: str | None = None,
    ) -> None:
        where = str(source)
        where += "" if line is None else f", line {line}"
        where += "" if row is None else f", row {row}"
        where += "" if column is None else f", column {column}"
        super().__init__(f"{where}: {problem}")
        self.source, self.line, self.row, self.column = source, line, row, column
        self.problem = problem


def paths_of(source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[Path]:
    """Return the paths of one file or several, of which no two lead to one file.

    A row in it would be two examples, and the guarantee of a run is for one.

    Raises:
        ValueError: two do, or there is none.
    """
    paths = [Path(p) for p in ([source] if isinstance(source, (str, os.PathLike)) else source)]
    if not paths:
        raise ValueError("give a file to read")
    found = set()
    for path in paths:
        if (real := path.resolve()) in found:
            raise ValueError(f"{path} is given twice, and each of its rows would be two examples")
        found.add(real)
    return paths


def open_raw(path: Path, file_name: str) -> io.IOBase:
    """Open a plain or gzip file, told apart by its first bytes; the name does not matter."""
    try:
        if not (path.is_file() or path.is_dir()) and path.exists():
            raise DataError(path, "is a pipe or a device, and is read twice; give a file")
        with open(path, "rb") as file:
            head = file.read(512)
        if head[:2] == b"\x1f\x8b":
            return gzip.GzipFile(path, "rb")
        if head[:4] == b"PK\x03\x04" or head[257:262] == b"ustar":
            raise DataError(
                path, f"is a zip or tar archive; unpack it and give the {file_name} in it"
            )
        return open(path, "rb", buffering=0)
    except OSError as error:
        raise DataError(path, f"cannot be read: {error.strerror}") from None


def read_raw(file: io.IOBase, size: int, path: Path, line: int | None = None) -> bytes:
    """Read at most `size` bytes; a DataError says what is wrong, and where if `line` is known."""
    try:
        return file.read(size)
    except EOFError:
        problem = "the gzip stream is truncated"
    except (zlib.error, gzip.BadGzipFile) as error:
        problem = f"the gzip stream is damaged ({error})"
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
    raise DataError(path, problem if line is None else f"{problem} (not before line {line})")


# --- Byte ranges: every line belongs to the one in which it begins -------------------------------

BLOCK_BYTES = 1 << 22
MAX_LINE_BYTES = 1 << 20

RANGE_BYTES = 1 << 26
"""Bytes of a range: some ten seconds of a core, so that few are lost with a worker."""


@dataclass(frozen=True, order=True)
class ByteRange:
    """The lines of a file that begin in [begin, end): one task.

    Attributes:
        file: Number of the file among those that are read, from 0.
        index: Number of the range in its file, from 0.
        path: The file.
        begin: First byte.
        end: One beyond the last; None reads to the file's end, whatever its size.
    """

    file: int
    index: int
    path: str
    begin: int = 0
    end: int | None = None

    @property
    def name(self) -> str:
        """Begins the names of the files that are made of it."""
        return f"{self.file:05d}-{self.index:07d}"


def byte_ranges(paths: Sequence[Path], range_bytes: int = RANGE_BYTES) -> list[ByteRange]:
    """Return the ranges of files in the order of their lines; of a gzip file there is one.

    Raises:
        DataError: a file cannot be read.
    """
    ranges = []
    for number, path in enumerate(paths):
        with open_raw(path, "raw file") as file:
            size = 0 if isinstance(file, gzip.GzipFile) else path.stat().st_size
        begins = range(0, size, range_bytes) if size else [0]
        ranges += [
            ByteRange(number, index, str(path), begin, begin + range_bytes if size else None)
            for index, begin in enumerate(begins)
        ]
    return ranges


@dataclass
class Lines:
    """How many lines were read, and how many of the last of these are blank."""

    count: int = 0
    blank: int = 0


def lines_of(
    span: ByteRange, file_name: str, block_bytes: int = BLOCK_BYTES
) -> Iterator[tuple[bytes | None, int, int]]:
    r"""Yield a range as (whole lines, number of the first of them, how many they are).

    Numbers count from 1 in the range. Of a line that is longer than any row there is None. The last
    line of a file is given its line end if it lacks one.

    A line begins at byte 0, or after a line end. With e(x) the first line end at byte x - 1 or
    later, the lines that begin in [begin, end) are the bytes from e(begin) + 1 (0 for begin 0)
    through e(end): so the ranges [0, a), [a, b), ... hold each line once.

    Raises:
        DataError: the file cannot be read.
    """
    path, end = Path(span.path), span.end
    with open_raw(path, file_name) as file:
        position, line, text = span.begin, 1, b""
        if span.begin:
            file.seek(span.begin - 1)
            position = _after_line_end(file, path, span.begin - 1, block_bytes, end)
            if end is not None and position >= end:
                return
            file.seek(position)
        while True:
            chunk = read_raw(file, block_bytes, path, line if end is None else None)
            text += chunk
            if not chunk:
                if not text:
                    return
                text += b"\n"
            cut, last = text.rfind(b"\n") + 1, not chunk
            if end is not None and position + len(text) >= end:
                own = text.find(b"\n", max(end - 1 - position, 0)) + 1
                cut, last = own or cut, last or own > 0
            if cut:
                whole, text = text[:cut], text[cut:]
                lines = whole.count(b"\n")
                yield whole, line, lines
                position, line = position + cut, line + lines
            if last:
                return
            if len(text) > MAX_LINE_BYTES:
                yield None, line, 1
                line += 1
                position = _after_line_end(file, path, position + len(text), block_bytes, end)
                if end is not None and position >= end:
                    return
                if file.seekable():
                    file.seek(position)
                text = b""


def _after_line_end(
    file: io.IOBase, path: Path, position: int, block_bytes: int, end: int | None
) -> int:
    """Return the byte after the first line end from `position` on, or any from `end` on if later.

    The file is read from `position`, and stands anywhere afterwards.
    """
    while chunk := read_raw(file, block_bytes, path):
        at = chunk.find(b"\n")
        if at >= 0:
            return position + at + 1
        position += len(chunk)
        if end is not None and position >= end:
            return position
    return position
