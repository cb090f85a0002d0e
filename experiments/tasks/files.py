"""Files of rows: CSV, TSV and other text, plain or gzip, and Parquet, as batches of Arrow arrays.

Text is UTF-8. Its lines are separated by commas, tabs, semicolons or bars, with a header of column
names, and fields may be quoted (RFC 4180) and hold line ends; lines end in LF, CRLF or CR, and
blank ones are left out. Headerless text is separated by tabs, without quotes; lines end in LF or
CRLF, and blank ones are refused. Parquet files hold names and types.

Arrow reads batches of rows. If it refuses one, Python's csv module reads the file again, up to the
first unreadable row, to name its line and fault. A few blocks of the file are in memory at a time.
"""

from __future__ import annotations

import csv
import gzip
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from experiments.tasks.splits import ColumnError
from experiments.tasks.streams import DataError, MisreadText, Span, Stream

DELIMITERS = {",": "commas", "\t": "tabs", ";": "semicolons", "|": "bars"}
BLOCK_BYTES = 1 << 22
"""Bytes of text held at a time."""
BLOCK_ROWS = 1 << 14
"""Rows of a Parquet file held at a time."""
_MARK = "\x1f"
_LONG = "a row is longer than 2 MB (is a quote not closed?)"

Batch = Mapping[str, pa.Array]
"""Column name to values, all of one length."""


def listed(names: Sequence[str], most: int = 50) -> str:
    """Joins names by commas, cut off after `most`.

    Names that would be hard to see are quoted.

    Args:
        names: Names, such as of columns.
        most: Largest number of names to show.

    >>> listed(["a", " b", "", "\\x1b"]), listed(["a", "b", "c"], most=2)
    ("a, ' b', '', '\\\\x1b'", 'a, b, ... (3 in all)')
    """
    texts = [
        name if name and name == name.strip() and name.isprintable() else repr(name)
        for name in names[:most]
    ]
    return ", ".join(texts if len(names) <= most else [*texts, f"... ({len(names):,} in all)"])


def open_rows(
    path: Path,
    wanted: Sequence[str],
    layouts: Sequence[tuple[str, ...]] = (),
    span: Span | None = None,
) -> RowFile:
    """Opens a file; its first bytes decide the format.

    Args:
        path: File.
        wanted: Columns that must exist once.
        layouts: Names of the columns of headerless text, one layout for each number of columns; the
            first is the default. Empty for text with a header.
        span: Span of headerless text to read; None for the whole file.

    Raises:
        DataError: If the file has another format, or lacks a column.
    """
    with closing(Stream(path, span)) as stream:
        try:
            head = stream.read(BLOCK_BYTES) or b""
        except DataError:
            if not layouts:
                raise
            head = b"?"  # the error comes again, with its line
        zipped = isinstance(stream.file, gzip.GzipFile)
    if head.startswith(b"PAR1"):
        if zipped:
            raise DataError(path, "is a gzipped Parquet file; unpack it")
        with _parquet(path) as parquet:
            rows = RowFile(path, tuple(parquet.schema_arrow.names))
    elif layouts:
        return _headerless(path, head, layouts, span)
    else:
        rows = _with_header(path, head, wanted)
    if absent := [name for name in wanted if name not in rows.names]:
        separated = f", separated by {DELIMITERS[rows.delimiter]}" if rows.delimiter else ""
        problem = f"has no column {', '.join(absent)}; it has {listed(rows.names)}{separated}"
        raise DataError(path, problem)
    for name in wanted:
        if (times := rows.names.count(name)) > 1:
            raise DataError(path, f"has the column {name} {times} times")
    return rows


def _headerless(
    path: Path, head: bytes, layouts: Sequence[tuple[str, ...]], span: Span | None
) -> RowFile:
    if (span is None or span.end is None) and not head.strip(b"\r\n"):
        raise DataError(path, f"is empty; expected lines of {len(layouts[0])} columns")
    columns = 1 + head.partition(b"\n")[0].count(b"\t")
    names = next((names for names in layouts if len(names) == columns), layouts[0])
    return RowFile(path, names, "\t", header=False, span=span)


def _with_header(path: Path, head: bytes, wanted: Sequence[str]) -> RowFile:
    """Returns the text file whose first line, which is public, tells its delimiter."""
    if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise DataError(path, "is UTF-16 text; save it as UTF-8")
    text = head.decode("utf-8-sig", "surrogateescape")
    if not text:
        raise DataError(path, "is empty; expected a header of column names")
    with _long_fields():
        headers = {
            d: next(csv.reader(io.StringIO(text, newline=""), delimiter=d)) for d in DELIMITERS
        }
    if "\0" in text[: text.find("\n") + 1 or None]:
        raise DataError(path, "byte 0x00 is not UTF-8 text", line=1)
    # The first delimiter with the most wanted columns, then with the most columns.
    delimiter = max(headers, key=lambda d: (len({*wanted} & {*headers[d]}), len(headers[d])))
    if not headers[delimiter]:
        raise DataError(path, "begins with a blank line; expected a header of column names")
    return RowFile(path, tuple(headers[delimiter]), delimiter)


@dataclass(frozen=True)
class RowFile:
    """File of rows with named columns; see the module."""

    path: Path
    names: tuple[str, ...]
    """Names of the columns, in order."""
    delimiter: str = ""
    """Character between fields of text; empty for Parquet."""
    header: bool = True
    """True if the first line names the columns, and fields may be quoted."""
    span: Span | None = None
    """Span of headerless text to read; None for the whole file."""

    def batches(self, wanted: Mapping[str, pa.DataType]) -> Iterator[Batch]:
        """Yields the wanted columns in batches of rows.

        Raises:
            DataError: If the file cannot be read; it names the line if there is one.
        """
        if self.delimiter:
            yield from self._text(wanted)
            return
        with _parquet(self.path) as file:
            for batch in file.iter_batches(BLOCK_ROWS, columns=[*wanted], use_threads=False):
                yield {name: batch.column(name) for name in wanted}

    def located(self, error: ColumnError, first_row: int) -> DataError:
        """Adds file and line, or row, to the error of a batch."""
        place = {} if error.row is None else self._place(first_row + error.row)
        return DataError(self.path, error.problem, column=error.column, **place)

    def _place(self, row: int) -> dict[str, Any]:
        """Returns the line of a row as an argument of `DataError`, or its number in Parquet."""
        if not self.delimiter:
            return {"row": row + 1}
        return {"line": next((line for n, (line, _) in enumerate(self._rows()) if n == row), None)}

    def _text(self, wanted: Mapping[str, pa.DataType]) -> Iterator[Batch]:
        """Yields the wanted columns of text.

        A row of marks is added after the last one of a file with quotes. If it does not come back
        as the last row, an open quote has joined it to the text before.
        """
        names = [str(number) for number in range(len(self.names))]  # distinct
        places = {name: names[self.names.index(name)] for name in wanted}
        tail = f"\n{self.delimiter.join([_MARK] * len(names))}\n".encode() if self.header else b""
        refused = "NUL" if self.header else "lines"
        stream = Stream(self.path, self.span, tail=tail, refused=refused)
        rows, last = 0, None
        try:
            for batch in self._arrow_batches(stream, names, {places[x]: wanted[x] for x in wanted}):
                if last is not None:
                    yield {name: last.column(place) for name, place in places.items()}
                    rows += len(last)
                last = batch
        except (pa.ArrowInvalid, MisreadText) as error:
            if stream.empty:
                return  # a span in which no line begins
            yield from self._rows_before_fault(rows, [*wanted], error)
        except DataError as error:
            line = "" if self.header else f" (at line {rows + 1} or later)"
            raise DataError(self.path, f"{error.problem}{line}") from None
        if self.header:
            if last is None or any(column[-1].as_py() != _MARK for column in last.columns):
                place = self._place(rows + len(last or []) - 1)
                raise DataError(self.path, "a quote is not closed; add the closing quote", **place)
            last = last[:-1]
        if last:
            yield {name: last.column(place) for name, place in places.items()}

    def _arrow_batches(
        self, stream: Stream, names: list[str], types: Mapping[str, pa.DataType]
    ) -> Iterator[pa.RecordBatch]:
        read = pyarrow.csv.ReadOptions(
            column_names=names,
            skip_rows_after_names=int(self.header),
            block_size=BLOCK_BYTES,
            use_threads=False,
        )
        parse = pyarrow.csv.ParseOptions(
            delimiter=self.delimiter,
            quote_char='"' if self.header else False,
            newlines_in_values=self.header,
        )
        convert = pyarrow.csv.ConvertOptions(
            column_types=dict(types),
            check_utf8=any(pa.types.is_dictionary(kind) for kind in types.values()),
            include_columns=[*types],
            strings_can_be_null=True,
            null_values=[""],
        )
        with pyarrow.csv.open_csv(pa.PythonFile(stream, mode="r"), read, parse, convert) as reader:
            yield from filter(len, reader)

    def _rows(self) -> Iterator[tuple[int, list[str]]]:
        """Yields (first line, fields) of all rows, slowly.

        Raises:
            DataError: For a row without an end, and for a blank line of headerless text.
        """
        with closing(Stream(self.path, self.span)) as stream, _long_fields():
            lines = io.TextIOWrapper(
                io.BufferedReader(stream),
                "utf-8-sig",
                "surrogateescape",
                newline="" if self.header else "\n",
            )
            line, taken, most = 1, 0, 2 * BLOCK_BYTES  # Arrow reads no row as long

            def bounded() -> Iterator[str]:
                nonlocal taken
                while text := lines.readline(most + 1 - taken):
                    taken += len(text)
                    if taken > most:
                        raise DataError(self.path, _LONG, line=line)
                    yield text

            if self.header:
                rows = csv.reader(bounded(), delimiter=self.delimiter)
                for number, fields in enumerate(rows):
                    if number and fields:
                        yield line, fields
                    line, taken = rows.line_num + 1, 0
                return
            for text in bounded():
                content = text.removesuffix("\n").removesuffix("\r" * text.endswith("\r\n"))
                if not content:
                    problem = f"the line is blank, expected {len(self.names)} columns"
                    raise DataError(self.path, problem, line=line)
                yield line, content.split(self.delimiter)
                line, taken = line + 1, 0

    def _rows_before_fault(
        self, first_row: int, wanted: Sequence[str], error: Exception
    ) -> Iterator[Batch]:
        """Yields the rows from `first_row` on, and raises the DataError of the unreadable one."""
        readable: list[list[str]] = []
        reason = " ".join(str(error).split())
        fault = DataError(self.path, f"cannot be read as text in columns: {reason:.200}")
        try:
            for number, (line, fields) in enumerate(self._rows()):
                if number >= first_row:
                    self._check(line, fields, wanted)
                    readable.append(fields)
        except DataError as first:
            fault = first
        if readable:
            columns = {name: self.names.index(name) for name in wanted}
            yield {
                name: pa.array([row[i] or None for row in readable], pa.string())
                for name, i in columns.items()
            }
        raise fault

    def _check(self, line: int, fields: list[str], wanted: Sequence[str]) -> None:
        """Raises the DataError of a row that Arrow cannot read."""
        if len(fields) != len(self.names):
            quote = " (is a quote not closed?)" if any("\n" in f for f in fields) else ""
            expected = f"{len(self.names)} of the header" if self.header else str(len(self.names))
            raise DataError(
                self.path,
                f"found {len(fields)} column{'s' * (len(fields) != 1)}, expected "
                f"{'the ' * self.header}{expected}, separated by "
                f"{DELIMITERS[self.delimiter]}{quote}",
                line=line,
            )
        for name, text in zip(self.names, fields, strict=True):
            # Bytes that are not UTF-8 were decoded as surrogates, whose low byte they are.
            if match := (_NO_TEXT if name in wanted else _NUL).search(text):
                problem = f"byte 0x{ord(match[0]) & 0xFF:02x} is not UTF-8 text"
                raise DataError(self.path, problem, line=line, column=name)
            if "\r" in text and not self.header:
                problem = f"found {text[:40]!a}, expected no carriage return"
                raise DataError(self.path, problem, line=line, column=name)
        if sum(map(len, fields)) > BLOCK_BYTES // 2:
            raise DataError(self.path, _LONG, line=line)


_NUL, _NO_TEXT = re.compile("\0"), re.compile("[\0\udc80-\udcff]")


@contextmanager
def _long_fields() -> Iterator[None]:
    """Lets the csv module read any field; its default limit is 128 KiB."""
    limit = csv.field_size_limit(1 << 62)
    try:
        yield
    finally:
        csv.field_size_limit(limit)


@contextmanager
def _parquet(path: Path) -> Iterator[pyarrow.parquet.ParquetFile]:
    """Opens a Parquet file; raises a DataError if it is damaged."""
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            yield file
    except (pa.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())
        raise DataError(path, f"cannot be read as Parquet: {reason:.200}") from None
