"""Files of tables: their columns by name, and their rows as batches of Arrow arrays.

Text files (CSV, TSV, with semicolons or bars) are UTF-8, plain or gzip, with a header of column
names. Fields may be quoted, as RFC 4180 says, and quoted ones may hold line ends; lines end in LF,
CRLF or CR, and blank ones are not looked at. Which character separates the fields is told from the
header alone, which is public. Parquet files say themselves what they hold.

Two readers in one: Arrow reads batches of rows, and says only *that* a row cannot be read; the csv
module of Python then reads the file again up to that row, to say which line it is and why. Memory
is that of a few blocks, whatever the size of the file.
"""

from __future__ import annotations

import abc
import csv
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from experiments.tasks.clicks.encoding import ColumnError
from experiments.tasks.clicks.raw.files import DataError, open_raw, read_raw

DELIMITERS = {",": "commas", "\t": "tabs", ";": "semicolons", "|": "bars"}
_MARK = "\x1f"
BLOCK_BYTES = 1 << 22
BLOCK_ROWS = 1 << 14
_LONG = "a row longer than 2 MB (is a quote not closed?)"

Batch = Mapping[str, pa.Array]
"""Column name to values, all of one length."""


@dataclass(frozen=True)
class TableFile(abc.ABC):
    """One file of a table: where it lies, and its columns in their order."""

    path: Path
    names: tuple[str, ...]

    @abc.abstractmethod
    def batches(self, wanted: Sequence[str]) -> Iterator[Batch]:
        """Yield the `wanted` columns of all rows in order, some rows at a time.

        Raises:
            DataError: the file cannot be read; it names the line if there is one.
        """

    @abc.abstractmethod
    def place(self, row: int) -> dict[str, Any]:
        """Return where `row` (from 0) is, as a `DataError` says it."""

    def located(self, error: ColumnError, first_row: int) -> DataError:
        """Return `error` about a batch that begins with row `first_row` (from 0) with its place."""
        place = {} if error.row is None else self.place(first_row + error.row)
        return DataError(self.path, error.problem, column=error.column, **place)


def open_table(path: Path, wanted: Sequence[str]) -> TableFile:
    """Open a file of any of the formats, told apart by its first bytes; its name does not matter.

    Raises:
        DataError: it is no such file, or a `wanted` column is not there, or there twice.
    """
    with closing(open_raw(path, "table")) as file:
        head = b""
        while len(head) < BLOCK_BYTES and (more := read_raw(file, BLOCK_BYTES - len(head), path)):
            head += more
        zipped = not isinstance(file, io.FileIO)
    table: TableFile
    if not head.startswith(b"PAR1"):
        table = TextFile.of(path, head, wanted)
        separated = f", separated by {DELIMITERS[table.delimiter]}"
    elif zipped:
        raise DataError(path, "is a Parquet file within gzip; unpack it")
    else:
        with _parquet(path) as opened:
            table, separated = ParquetFile(path, tuple(opened.schema_arrow.names)), ""
    if absent := [name for name in wanted if name not in table.names]:
        problem = f"has no column {', '.join(absent)}; it has {listed(table.names)}{separated}"
        raise DataError(path, problem)
    for name in wanted:
        if (times := table.names.count(name)) > 1:
            raise DataError(path, f"has the column {name} {times} times")
    return table


def listed(names: Sequence[str], most: int = 50) -> str:
    """Return names for people, with a count where they are too many.

    >>> listed(["a", " b", "", "\\x1b"]), listed(["a", "b", "c"], most=2)
    ("a, ' b', '', '\\\\x1b'", 'a, b, ... (3 in all)')
    """
    shown = [
        name if name and name == name.strip() and name.isprintable() else repr(name)
        for name in names[:most]
    ]
    return ", ".join(shown if len(names) <= most else [*shown, f"... ({len(names):,} in all)"])


# --- Text ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TextFile(TableFile):
    """A file of lines of fields, the first of which are the names of the columns."""

    delimiter: str

    @classmethod
    def of(cls, path: Path, head: bytes, wanted: Sequence[str]) -> TextFile:
        """Return the text file that begins with `head`; see `open_table`."""
        if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
            raise DataError(path, "is UTF-16 text; save it as UTF-8")
        text = head.decode("utf-8-sig", "surrogateescape")
        if not text:
            raise DataError(path, "is empty; expected a header of column names")
        with _long_fields():
            found = {
                d: next(csv.reader(io.StringIO(text, newline=""), delimiter=d)) for d in DELIMITERS
            }
        if "\0" in text[: text.find("\n") + 1 or None]:
            raise DataError(path, "byte 0x00 is not UTF-8 text", line=1)
        # The first of those that make the most of the wanted columns, and then the most columns.
        delimiter = max(found, key=lambda d: (len({*wanted} & {*found[d]}), len(found[d])))
        if not found[delimiter]:
            raise DataError(path, "begins with a blank line; expected a header of column names")
        return cls(path, tuple(found[delimiter]), delimiter)

    def batches(self, wanted: Sequence[str]) -> Iterator[Batch]:
        """Yield the `wanted` columns of all rows, as texts.

        A row of marks is added to the file's end. If it does not come back as the last row, a quote
        was open there, which made one text of all that follows it.
        """
        names = [str(number) for number in range(len(self.names))]  # no two of them are alike
        places = {name: names[self.names.index(name)] for name in wanted}
        end = f"\n{self.delimiter.join([_MARK] * len(names))}\n".encode()
        stream = _Stream(self.path, end, is_text=True)
        rows, last = 0, None
        try:
            with pyarrow.csv.open_csv(
                pa.PythonFile(stream, mode="r"),
                read_options=pyarrow.csv.ReadOptions(
                    column_names=names,
                    skip_rows_after_names=1,
                    block_size=BLOCK_BYTES,
                    use_threads=False,
                ),
                parse_options=pyarrow.csv.ParseOptions(
                    delimiter=self.delimiter, newlines_in_values=True
                ),
                convert_options=pyarrow.csv.ConvertOptions(
                    column_types=dict.fromkeys(places.values(), pa.string()),
                    include_columns=[*places.values()],
                ),
            ) as reader:
                for batch in filter(len, reader):
                    if last is not None:
                        yield {name: last.column(place) for name, place in places.items()}
                        rows += len(last)
                    last = batch
        except (pa.ArrowInvalid, _NoTextError) as error:
            self._explain(error, rows, wanted)
        if last is None or any(column[-1].as_py() != _MARK for column in last.columns):
            place = self.place(rows + len(last or []) - 1)
            raise DataError(self.path, "a quote is not closed", **place)
        if len(last) > 1:
            yield {name: last.column(place)[:-1] for name, place in places.items()}

    def place(self, row: int) -> dict[str, Any]:
        """Return the line on which a row begins; None if the csv module finds no such."""
        return {"line": next((line for line, _ in self._rows(row)), None)}

    def _rows(self, first_row: int) -> Iterator[tuple[int, list[str]]]:
        """Yield (line on which it begins, fields) of the rows from `first_row` on."""
        with closing(_Stream(self.path)) as stream, _long_fields():
            lines = io.TextIOWrapper(
                io.BufferedReader(stream), "utf-8-sig", "surrogateescape", newline=""
            )
            row, line, taken = -1, 1, 0  # the header

            def bounded() -> Iterator[str]:
                nonlocal taken
                while text := lines.readline(most + 1 - taken):
                    taken += len(text)
                    if taken > most:
                        raise DataError(self.path, _LONG, line=line)
                    yield text

            most = 2 * BLOCK_BYTES  # Arrow reads no row as long
            rows = csv.reader(bounded(), delimiter=self.delimiter)
            for fields in rows:
                if fields and row >= first_row:
                    yield line, fields
                row += bool(fields)
                line, taken = rows.line_num + 1, 0

    def _explain(self, error: Exception, first_row: int, wanted: Sequence[str]) -> NoReturn:
        """Raise the DataError of the first row from `first_row` on that cannot be read."""
        for line, fields in self._rows(first_row):
            if len(fields) != len(self.names):
                quote = " (is a quote not closed?)" if any("\n" in f for f in fields) else ""
                raise DataError(
                    self.path,
                    f"found {len(fields)} column{'s' * (len(fields) != 1)}, expected the "
                    f"{len(self.names)} of the header, separated by "
                    f"{DELIMITERS[self.delimiter]}{quote}",
                    line=line,
                )
            for name, field in zip(self.names, fields, strict=True):
                # What is not UTF-8 was decoded as a surrogate, whose low byte it is.
                if found := (_NO_TEXT if name in wanted else _NUL).search(field):
                    problem = f"byte 0x{ord(found[0]) & 0xFF:02x} is not UTF-8 text"
                    raise DataError(self.path, problem, line=line, column=name)
            if sum(map(len, fields)) > BLOCK_BYTES // 2:
                raise DataError(self.path, _LONG, line=line)
        why = " ".join(str(error).split())
        raise DataError(self.path, f"cannot be read as text with columns: {why:.200}")


class _NoTextError(Exception):
    """There is a NUL in a text, which Arrow takes for a character like others."""


_NUL, _NO_TEXT = re.compile("\0"), re.compile("[\0\udc80-\udcff]")


class _Stream(io.RawIOBase):
    """The bytes of a file, plain or gzip, and then those of `end`; a NUL is refused if told so."""

    def __init__(self, path: Path, end: bytes = b"", *, is_text: bool = False) -> None:
        self._path, self._file, self._is_text = path, open_raw(path, "table"), is_text
        self._end = io.BytesIO(end)

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer` as far as there are bytes, or raise a DataError or a _NoTextError."""
        done = 0
        while done < len(buffer):  # Arrow takes fewer bytes for a whole block
            left = len(buffer) - done
            data = read_raw(self._file, left, self._path) or self._end.read(left)
            if not data:
                break
            buffer[done : done + len(data)] = data
            done += len(data)
        if self._is_text and b"\0" in bytes(buffer[:done]):
            raise _NoTextError("NUL")
        return done

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()


@contextmanager
def _long_fields() -> Iterator[None]:
    """Let the csv module read any field; it refuses those of more than 128 KiB otherwise."""
    before = csv.field_size_limit(1 << 62)
    try:
        yield
    finally:
        csv.field_size_limit(before)


# --- Parquet -------------------------------------------------------------------------------------


class ParquetFile(TableFile):
    """A Parquet file."""

    def batches(self, wanted: Sequence[str]) -> Iterator[Batch]:
        """Yield the `wanted` columns of all rows, of the types that the file says."""
        with _parquet(self.path) as file:
            for batch in file.iter_batches(BLOCK_ROWS, columns=[*wanted], use_threads=False):
                yield {name: batch.column(name) for name in wanted}

    def place(self, row: int) -> dict[str, Any]:
        """Return the number of a row, from 1."""
        return {"row": row + 1}


@contextmanager
def _parquet(path: Path) -> Iterator[pyarrow.parquet.ParquetFile]:
    """Open a Parquet file, or raise a DataError if it is damaged."""
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            yield file
    except (pa.ArrowException, OSError) as error:
        why = " ".join(str(error).split())
        raise DataError(path, f"cannot be read as Parquet: {why:.200}") from None
