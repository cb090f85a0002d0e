"""Byte ranges of raw files: every line belongs to the one range in which it begins."""

from __future__ import annotations

import gzip
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.tasks.clicks.raw.files import open_raw, read_raw

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
