"""Read the raw file of a data set, by a description of its format, and prepare a store from it.

One row per line, fields separated by tabs, no header. Lines end in LF or CRLF; the last may lack
its end, and blank lines may follow it. Plain or gzip.

Blocks of lines are parsed by Arrow. Where that fails, the lines of the block are looked at one by
one, to say what is wrong and where. Memory is that of one block, whatever the size of the file.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.tasks.clicks.encoding import ColumnError, encode, encode_rows
from experiments.tasks.clicks.raw.files import DataError, paths_of
from experiments.tasks.clicks.raw.kinds import RawKind, Text, num_unprintable
from experiments.tasks.clicks.raw.ranges import (
    BLOCK_BYTES,
    MAX_LINE_BYTES,
    ByteRange,
    lines_of,
)
from experiments.tasks.clicks.schema import Schema
from experiments.tasks.clicks.store import Columns, Store
from experiments.tasks.clicks.writer import Order, StoreWriter

if TYPE_CHECKING:
    import pyarrow as pa

LONG = f"longer than {MAX_LINE_BYTES} bytes"
"""What is wrong with such a line."""


@dataclass(frozen=True)
class RawFormat:
    """How the rows of a data set are written, and which of them are for training.

    Columns that are neither `label` nor in `schema` are not read.
    """

    schema: Schema
    columns: Mapping[str, RawKind]
    """The kind of every column, in the order of the file."""
    label: str | None
    """The column of the label; None where it is not read."""
    summary: str
    """The columns in a few words, for errors."""
    file_name: str
    """What the publishers call the file, for errors."""
    split: Order
    """How test rows are told apart; see `StoreWriter.append_all`."""
    hints: Mapping[int, str]
    """What a file may be that has another number of columns."""
    unlabelled: Mapping[str, Collection[str]] = dataclasses.field(default_factory=dict)
    """The columns that a file lacks whose rows have no label yet, by what it holds in a few words;
    each such file has another number of columns."""

    def __post_init__(self) -> None:
        wanted = {*self.schema.integers, *self.schema.categories}
        wanted |= set() if self.label is None else {self.label}
        unknown = sorted(wanted - set(self.columns))
        if unknown:
            raise ValueError(f"{self.schema.name} files have no column {', '.join(unknown)}")

    def prepare(
        self,
        source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        out: str | os.PathLike[str],
        *,
        hash_seed: int = 0,
        progress: Callable[[int], None] | None = None,
    ) -> Store:
        """Turn a raw file, or several one after the other, into a store in the new directory `out`.

        `progress` is called with the number of rows done, after every block. Memory is constant.
        Either `out` is a whole store in the end or it does not exist.

        Raises:
            DataError: a file cannot be read or is not in the format.
            StoreError: `out` exists, or cannot be written.
            ValueError: a file is there twice.
        """
        paths = paths_of(source)
        return self.write(
            out,
            (block for path in paths for block in self.read(path, hash_seed=hash_seed)),
            hash_seed=hash_seed,
            source=lambda: self.source(paths),
            progress=progress,
        )

    def source(self, paths: Sequence[Path]) -> dict[str, Any]:
        """Return where rows are from, for the manifest of their store."""
        names = [path.name for path in paths]
        files = {"files": names} if len(names) > 1 else {"file": names[0]}
        return {"format": self.schema.name, **files}

    def write(
        self,
        out: str | os.PathLike[str],
        blocks: Iterable[Columns],
        *,
        hash_seed: int,
        source: Callable[[], Mapping[str, Any]],
        progress: Callable[[int], None] | None = None,
    ) -> Store:
        """Write `blocks` of rows as a new store, split as this data set is; as `prepare` does.

        `source` is asked where the rows are from when all are written.
        """
        with StoreWriter(out, self.schema, hash_seed=hash_seed) as writer:
            splits = writer.append_all(blocks, self.split, progress=progress)
            return writer.finish(splits=splits, source=source())

    def read(
        self,
        source: str | os.PathLike[str],
        *,
        hash_seed: int = 0,
        labelled: bool = True,
        block_bytes: int = BLOCK_BYTES,
    ) -> Iterator[Columns]:
        """Yield the rows of a raw file as blocks of columns, those of a store, in file order.

        Where the rows need not be `labelled`, the file may have the label or lack it: the blocks
        have none. `block_bytes` of text are held at a time; the rows do not depend on it.

        Raises:
            DataError: the file cannot be read or is not in the format.
        """
        path, format, rows = Path(source), self, 0
        span = ByteRange(0, 0, str(path))
        if not labelled:
            text, *_ = next(lines_of(span, self.file_name, block_bytes), (b"",))
            format = self._without_label(1 + (text or b"").partition(b"\n")[0].count(b"\t"))
        for block in RawReader(format, span, hash_seed, block_bytes):
            if isinstance(block, DataError):
                raise block
            rows += len(block["categories"])
            yield block
        if rows == 0:
            raise DataError(path, self.empty)

    def encode(self, rows: Mapping[str, Any], *, hash_seed: int = 0) -> Columns:
        """Return rows of a table as the columns that a raw file with the same rows has, unlabelled.

        `rows` map column names to values as they stand in the raw file: texts, or numbers where
        the file has integers. None, NaN and the empty text are missing. See `encode_rows`.
        """

        def fields(values: Any, column: str) -> pa.Array:
            import pyarrow as pa

            kind, written = self.columns[column], []
            for row, value in enumerate(values):
                field = b"" if is_missing(value) else kind.write(value)
                if field is None:
                    raise ColumnError.found(value, kind.wanted, column=column, row=row)
                written.append(field or None)
            return pa.array(written, pa.binary()).view(pa.string())

        return encode_rows(rows, self.schema, self.columns, fields, hash_seed)

    def parse(self, text: bytes, hash_seed: int) -> Columns | None:
        """Return the columns of `text`, whole lines; None if anything in it is not in the format.

        The columns are "label" uint8 [n] (where there is one), "integers" float32 [n, I],
        "integers_missing" bool [n, I] and "categories" int32 [n, C]. Integers x become
        ``sign(x) * log1p(|x|)``, categories their hashed ids; what is missing becomes 0.
        """
        import pyarrow as pa
        import pyarrow.csv

        # Arrow takes a NUL for text, skips a byte order mark, and ends a line at any return.
        returns = text.count(b"\r")
        if returns and returns != text.count(b"\r\n"):
            return None
        texts = pa.dictionary(pa.int32(), pa.string())
        wanted = {
            name: texts if isinstance(self.columns[name], Text) else pa.string()
            for name, read in self._roles
            if read
        }
        try:
            table = pyarrow.csv.read_csv(
                pa.BufferReader(text),
                read_options=pyarrow.csv.ReadOptions(
                    column_names=[*self.columns], use_threads=False, block_size=len(text) + 1
                ),
                parse_options=pyarrow.csv.ParseOptions(delimiter="\t", quote_char=False),
                convert_options=pyarrow.csv.ConvertOptions(
                    include_columns=[*wanted],
                    column_types=wanted,
                    check_utf8=False,  # it is ASCII, or refused below
                    strings_can_be_null=True,
                    null_values=[""],
                ),
            )
            # Else there is a blank line, or a control character, or more than ASCII.
            if num_unprintable(text) != len(table) * len(self.columns) + returns:
                return None
            batch = {name: table.column(name).combine_chunks() for name in wanted}
            return encode(batch, self.schema, self.columns, hash_seed, label=self.label)
        except (pa.ArrowInvalid, ColumnError):
            return None

    @cached_property
    def _roles(self) -> list[tuple[str, bool]]:
        """Return (name, whether it is read) of every column of the file."""
        read = {self.label, *self.schema.integers, *self.schema.categories}
        return [(name, name in read) for name in self.columns]

    def _without_label(self, num_columns: int) -> RawFormat:
        """Return how a file of so many columns is read for its features alone."""
        features = {*self.schema.integers, *self.schema.categories}
        formats = [replace(self, label=None)]
        for summary, absent in self.unlabelled.items():
            if not features & set(absent):
                columns = {name: kind for name, kind in self.columns.items() if name not in absent}
                formats.append(replace(self, label=None, columns=columns, summary=summary))
        for format in formats:
            if len(format.columns) == num_columns:
                return format
        others = "".join(f"; or {len(f.columns)}: {f.summary}" for f in formats[1:])
        return replace(formats[0], summary=f"{self.summary}{others}", hints={})

    def faults(self, path: Path, text: bytes, first_line: int) -> Iterator[DataError]:
        """Yield what is wrong with each line of `text`, which `parse` refused: one fault a line."""
        found = False
        for number, line in enumerate(text.split(b"\n")[:-1], start=first_line):
            if (fault := self._fault(path, line.removesuffix(b"\r"), number)) is not None:
                found = True
                yield fault
        if not found:
            raise AssertionError(f"{path}: a block from line {first_line} was refused for nothing")

    def _fault(self, path: Path, line: bytes, number: int) -> DataError | None:
        """Return what is first wrong with a line; None if nothing is."""
        try:
            line.decode("utf-8")
        except UnicodeDecodeError as error:
            found = f"byte 0x{line[error.start]:02x} at position {error.start + 1}"
            return DataError(path, f"{found} is not UTF-8 text", line=number)
        if not line:
            return DataError(path, self.blank, line=number)
        fields = line.split(b"\t")
        if len(fields) != len(self.columns):
            hint = self.hints.get(len(fields), "")
            return DataError(
                path,
                f"found {len(fields)} column{'s' * (len(fields) != 1)}, expected "
                f"{len(self.columns)} separated by tabs: {self.summary}{hint and f' ({hint})'}",
                line=number,
            )
        for (name, read), field in zip(self._roles, fields, strict=True):
            kind = self.columns[name] if read else Text()
            if not kind.pattern.fullmatch(field):
                shown = field.decode("utf-8")
                shown = ascii(shown if len(shown) <= 40 else shown[:40] + "...")
                problem = f"found {shown}, expected {kind.wanted}"
                return DataError(path, problem, line=number, column=name)
        return None

    @property
    def empty(self) -> str:
        """What is wrong with a file without rows."""
        return f"is empty; expected lines of {len(self.columns)} columns"

    @property
    def blank(self) -> str:
        """What is wrong with a blank line that a row follows."""
        return f"a blank line between rows, expected {len(self.columns)} columns"


def is_missing(value: Any) -> bool:
    """Whether a table says by `value` that it has none: None, NaN, or an NA that equals nothing."""
    if value is None:
        return True
    try:
        return bool(value != value)
    except (TypeError, ValueError):  # an NA has no truth value, and an array has too many
        return type(value).__name__ == "NAType"


@dataclass
class RawReader:
    """Reads the lines of a byte range: blocks of rows, and an error for each line that is no row.

    The lines of errors are counted in the range. A blank line is an error if a row follows it.

    Attributes:
        lines: Lines that were read so far.
        blank: How many of the last of these are blank.
    """

    format: RawFormat
    span: ByteRange
    hash_seed: int
    block_bytes: int = BLOCK_BYTES
    lines: int = 0
    blank: int = 0

    def __iter__(self) -> Iterator[Columns | DataError]:
        """Yield what stands in the range, in the order of its lines.

        Raises:
            DataError: the file cannot be read.
        """
        path = Path(self.span.path)
        blocks = lines_of(self.span, self.format.file_name, self.block_bytes)
        for text, first, lines in blocks:
            if text is None:
                yield from self._blank_lines(path)
                yield DataError(path, LONG, line=first)
                self.lines = first
                continue
            end = len(text)
            if text[-2:-1] in (b"", b"\n", b"\r"):
                last = len(text.rstrip(b"\r\n"))
                end = text.find(b"\n", last) + 1 if last else 0
            if end:
                yield from self._blank_lines(path)
                columns = self.format.parse(text[:end], self.hash_seed)
                if columns is not None:
                    yield columns
                else:
                    yield from self.format.faults(path, text[:end], first)
            self.blank += text.count(b"\n", end)
            self.lines += lines

    def _blank_lines(self, path: Path) -> Iterator[DataError]:
        for line in range(self.lines - self.blank, self.lines):
            yield DataError(path, self.format.blank, line=line + 1)
        self.blank = 0
