"""Bytes of files: plain or gzip, whole or in spans of lines."""

from __future__ import annotations

import gzip
import io
import os
import zlib
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RANGE_BYTES = 1 << 26
"""Bytes of a range: some ten seconds of a core, so that few are lost with a worker."""


class DataError(ValueError):
    """Error in an input file, in one line: file, line, column and problem.

    `line` counts from 1, and so does `row`, which Parquet files have in place of lines. All three
    are None if the whole file is at fault. `problem` is the message without the location.
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
        named = {"line": line, "row": row, "column": column}
        place = "".join(f", {name} {x}" for name, x in named.items() if x is not None)
        super().__init__(f"{source}{place}: {problem}")
        self.source, self.line, self.row, self.column = source, line, row, column
        self.problem = problem


def paths_of(source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[Path]:
    """Returns the paths of one or several files, all distinct.

    A row of a repeated file would count as two examples, but the guarantee protects one.

    >>> [path.name for path in paths_of("train.csv")]
    ['train.csv']

    Raises:
        ValueError: If two paths lead to one file, or `source` is empty.
    """
    paths = [Path(p) for p in ([source] if isinstance(source, (str, os.PathLike)) else source)]
    if not paths:
        raise ValueError("no files to read; name at least one")
    real_paths = set()
    for path in paths:
        if (real := path.resolve()) in real_paths:
            raise ValueError(f"{path} is named twice; each of its rows would count as two examples")
        real_paths.add(real)
    return paths


@dataclass(frozen=True, order=True)
class Span:
    """Lines of a file that begin in the bytes [begin, end)."""

    file: int
    """Index of the file among those that are read."""
    index: int
    """Index of the span in its file."""
    path: str
    begin: int = 0
    end: int | None = None
    """One beyond the last byte; None for the file's end."""

    @property
    def name(self) -> str:
        """Name of the span, unique among all files.

        >>> Span(file=2, index=7, path="day_2.gz").name
        '00002-0000007'
        """
        return f"{self.file:05d}-{self.index:07d}"


def spans_of(paths: Sequence[Path], span_bytes: int | None) -> list[Span]:
    """Divides files into spans, in the order of their lines.

    A gzip file is one span.

    Args:
        paths: Paths of the files.
        span_bytes: Size of a span in bytes; None for whole files.

    Raises:
        DataError: If a file cannot be read.
    """
    spans = []
    for number, path in enumerate(paths):
        with closing(_open(path)) as file:
            size = 0 if isinstance(file, gzip.GzipFile) else path.stat().st_size
        step = span_bytes if size else None
        begins = range(0, size, step) if step else [0]
        spans += [
            Span(number, index, str(path), begin, begin + step if step else None)
            for index, begin in enumerate(begins)
        ]
    return spans


def _open(path: Path) -> gzip.GzipFile | io.FileIO:
    """Returns a plain or gzip file, told apart by its first bytes; the name does not matter."""
    try:
        if not (path.is_file() or path.is_dir()) and path.exists():
            raise DataError(
                path, "is a pipe or a device, but must be read twice; name a regular file"
            )
        with open(path, "rb") as file:
            head = file.read(512)
        if head[:2] == b"\x1f\x8b":
            return gzip.GzipFile(path, "rb")
        if head[:4] == b"PK\x03\x04" or head[257:262] == b"ustar":
            raise DataError(path, "is a zip or tar archive; unpack it and name the file inside")
        return io.FileIO(path)
    except OSError as error:
        raise DataError(path, f"cannot be read: {error.strerror}") from None


def _line_start(path: Path, offset: int) -> int:
    """Returns the first byte from `offset` on at which a line begins, or the file's end."""
    with open(path, "rb") as file:
        file.seek(max(offset - 1, 0))
        while offset and (line := file.readline(1 << 20)) and not line.endswith(b"\n"):
            pass
        return file.tell()


class MisreadText(Exception):
    """Bytes that Arrow takes for text, for a line end or for nothing."""


class Stream(io.RawIOBase):
    """Bytes of a file, or of a span of it, and then `tail`.

    Args:
        path: File.
        span: Span to read; None for the whole file.
        tail: Bytes to add.
        refused: "NUL" to refuse NUL; "lines" to refuse also blank lines, and carriage returns that
            end no line; "" to check nothing.
    """

    def __init__(
        self, path: Path, span: Span | None = None, *, tail: bytes = b"", refused: str = ""
    ) -> None:
        self._path, self._refused, self._last = path, refused, b"\n"
        self.file, self._tail, self._left = _open(path), io.BytesIO(tail), 1 << 62
        if span is not None and span.end is not None:
            begin = _line_start(path, span.begin)
            self._left = _line_start(path, span.end) - begin
            self.file.seek(begin)
        self.empty = True

    def readable(self) -> bool:
        """Returns True."""
        return True

    def close(self) -> None:
        """Closes the file."""
        self.file.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        """Fills `buffer`; raises DataError or MisreadText for invalid bytes."""
        data = b""
        while piece := self._read(len(buffer) - 1 - len(data)):  # Arrow takes less for a block
            data = data + piece if data else piece
        if data.endswith(b"\r"):
            data += self._read(1)
        self.empty &= not data
        if self._refused and b"\0" in data:
            raise MisreadText("NUL")
        if self._refused == "lines" and data:
            begin, returns = self._last + data[:2], data.count(b"\r")
            blank = begin.startswith((b"\n\n", b"\n\r\n")) or b"\n\n" in data
            if blank or (returns and (returns != data.count(b"\r\n") or b"\n\r\n" in data)):
                raise MisreadText("blank line or carriage return")
            self._last = data[-1:]
        data = data or self._tail.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def _read(self, size: int) -> bytes:
        try:
            data = self.file.read(min(size, self._left)) or b""
        except EOFError:
            problem = "the gzip file is incomplete"
        except (zlib.error, gzip.BadGzipFile) as error:
            problem = f"the gzip file is damaged ({error})"
        except OSError as error:
            problem = f"cannot be read: {error.strerror}"
        else:
            self._left -= len(data)
            return data
        raise DataError(self._path, problem)
