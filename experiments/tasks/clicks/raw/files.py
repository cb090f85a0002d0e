"""Files as their publishers and owners give them: plain or gzip, and what is wrong with them."""

from __future__ import annotations

import gzip
import io
import os
import zlib
from collections.abc import Sequence
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
