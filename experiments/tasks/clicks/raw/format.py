"""Read the raw file of a data set, by a description of its format, and prepare a store from it.

One row per line, fields separated by tabs, no header. Lines end in LF or CRLF; the last may lack
its end, and blank lines may follow it. Plain or gzip.

Blocks of lines are parsed by Arrow. Where that fails, the lines of the block are looked at one by
one, to say what is wrong and where. Memory is that of one block, whatever the size of the file.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.tasks.clicks.encoding import ColumnError, Format
from experiments.tasks.clicks.raw.files import (
    BLOCK_BYTES,
    MAX_LINE_BYTES,
    ByteRange,
    DataError,
    Lines,
    byte_ranges,
    lines_of,
    paths_of,
)
from experiments.tasks.clicks.raw.kinds import RawKind, Text, num_unprintable
from experiments.tasks.clicks.schema import Schema
from experiments.tasks.clicks.store import Columns, Store
from experiments.tasks.splits import Split

if TYPE_CHECKING:
    import pyarrow as pa

LONG = f"longer than {MAX_LINE_BYTES} bytes"
"""What is wrong with such a line."""


@dataclass(frozen=True)
class RawFormat(Format):
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
    split: Split
    hints: Mapping[int, str]
    """What a file may be that has another number of columns."""
    unlabelled: Mapping[str, Collection[str]] = dataclasses.field(default_factory=dict)
    """The columns that a file lacks whose rows have no label yet, by what it holds in a few words;
    each such file has another number of columns."""
    hash_seed: int = 0

    def __post_init__(self) -> None:
        if unknown := sorted(self._read - set(self.columns)):
            raise ValueError(f"{self.schema.name} files have no column {', '.join(unknown)}")

    @property
    def kinds(self) -> Mapping[str, RawKind]:
        """Those of the file."""
        return self.columns

    def prepare(
        self,
        source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        out: str | os.PathLike[str],
        *,
        progress: Callable[[int], None] | None = None,
    ) -> Store:
        """Turn a raw file, or several one after the other, into a store; see `write_blocks`.

        Raises:
            DataError: a file cannot be read or is not in the format.
            StoreError: `out` exists, or cannot be written.
            ValueError: a file is there twice.
        """
        paths = paths_of(source)
        blocks = (block for path in paths for block in self.read(path))
        return self.write(out, blocks, self.source(paths), progress=progress)

    def source(self, paths: Sequence[Path]) -> dict[str, Any]:
        """Return where rows are from, for the manifest of their store."""
        names = [path.name for path in paths]
        files = {"files": names} if len(names) > 1 else {"file": names[0]}
        return {"format": self.schema.name, **files}

    def read(
        self,
        source: str | os.PathLike[str],
        *,
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
        for block in format.read_range(span, block_bytes=block_bytes):
            if isinstance(block, DataError):
                raise block
            rows += len(block["categories"])
            yield block
        if rows == 0:
            raise DataError(path, self.empty)

    def ranges(self, paths: Sequence[Path], range_bytes: int) -> list[ByteRange]:
        """Return the tasks into which files are cut: wherever a line may begin."""
        return byte_ranges(paths, range_bytes)

    def read_range(
        self, span: ByteRange, lines: Lines | None = None, block_bytes: int = BLOCK_BYTES
    ) -> Iterator[Columns | DataError]:
        """Yield what stands in a byte range: blocks of rows, and an error for each other line.

        The lines of errors are counted in the range, and `lines` as they are read. A blank line is
        an error if a row follows it.

        Raises:
            DataError: the file cannot be read.
        """
        path, lines = Path(span.path), lines or Lines()
        for text, first, count in lines_of(span, self.file_name, block_bytes):
            end = len(text or b"")
            if text is not None and text[-2:-1] in (b"", b"\n", b"\r"):
                last = len(text.rstrip(b"\r\n"))
                end = text.find(b"\n", last) + 1 if last else 0
            if text is None or end:
                for blank in range(lines.count - lines.blank, lines.count):
                    yield DataError(path, self.blank, line=blank + 1)
                lines.blank = 0
            if text is None:
                yield DataError(path, LONG, line=first)
            elif end:
                columns = self.parse(text[:end])
                yield from [columns] if columns else self._faults(path, text[:end], first)
            lines.blank += (text or b"").count(b"\n", end)
            lines.count += count

    def no_rows(self, path: Path, rows: int, all_rows: int) -> DataError | None:
        """Return what is wrong with a file of so many rows: each has some."""
        return None if rows else DataError(path, self.empty)

    def array(self, values: Any, column: str) -> pa.Array:
        """Return the fields in which texts, or numbers where the file has integers, stand."""
        import pyarrow as pa

        kind, written = self.columns[column], []
        for row, value in enumerate(values):
            field = b"" if is_missing(value) else kind.write(value)
            if field is None:
                raise ColumnError.unexpected(value, kind.wanted, column=column, row=row)
            written.append(field or None)
        return pa.array(written, pa.binary()).view(pa.string())

    def parse(self, text: bytes) -> Columns | None:
        """Return the columns of whole lines; None if anything in them is not in the format."""
        import pyarrow as pa
        import pyarrow.csv

        # Arrow takes a NUL for text, skips a byte order mark, and ends a line at any return.
        returns = text.count(b"\r")
        if returns and returns != text.count(b"\r\n"):
            return None
        texts = pa.dictionary(pa.int32(), pa.string())
        wanted = {
            name: texts if isinstance(kind, Text) else pa.string()
            for name, kind in self.columns.items()
            if name in self._read
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
            return self.columns_of(batch, self.label)
        except (pa.ArrowInvalid, ColumnError):
            return None

    @cached_property
    def _read(self) -> set[str]:
        return {*self.features, *([] if self.label is None else [self.label])}

    def _without_label(self, num_columns: int) -> RawFormat:
        """Return how a file of so many columns is read for its features alone."""
        formats = [replace(self, label=None)]
        for summary, absent in self.unlabelled.items():
            if not {*self.features} & {*absent}:
                columns = {name: kind for name, kind in self.columns.items() if name not in absent}
                formats.append(replace(self, label=None, columns=columns, summary=summary))
        for format in formats:
            if len(format.columns) == num_columns:
                return format
        others = "".join(f"; or {len(f.columns)}: {f.summary}" for f in formats[1:])
        return replace(formats[0], summary=f"{self.summary}{others}", hints={})

    def _faults(self, path: Path, text: bytes, first_line: int) -> list[DataError]:
        """Return what is wrong with the lines of `text`, which `parse` refused."""
        lines = enumerate(text.split(b"\n")[:-1], start=first_line)
        found = [self._fault(path, line.removesuffix(b"\r"), number) for number, line in lines]
        if not any(found):  # rows would be lost
            raise AssertionError(f"{path}: a block from line {first_line} was refused for nothing")
        return [fault for fault in found if fault is not None]

    def _fault(self, path: Path, line: bytes, number: int) -> DataError | None:
        """Return what is first wrong with a line; None if nothing is."""
        try:
            line.decode("utf-8")
        except UnicodeDecodeError as error:
            place = f"byte 0x{line[error.start]:02x} at position {error.start + 1}"
            return DataError(path, f"{place} is not UTF-8 text", line=number)
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
        for (name, kind), field in zip(self.columns.items(), fields, strict=True):
            kind = kind if name in self._read else Text()
            if not kind.pattern.fullmatch(field):
                found = ColumnError.unexpected(field.decode(), kind.wanted, column=name, row=0)
                return DataError(path, found.problem, line=number, column=name)
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
