"""Read the raw file of a data set, by a description of its format, and prepare a store from it.

One row per line, fields separated by tabs, no header. Lines end in LF or CRLF; the last may lack
its end, and blank lines may follow it. Plain or gzip.

Two readers in one: blocks of lines are parsed with vectorised NumPy, which only says *whether*
all is well; if not, the block is read again line by line, in plain Python, to say what is wrong
and where. Memory is that of one block, whatever the size of the file.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from experiments.tasks.clicks.raw.fields import Kind, Lines, Text, is_missing
from experiments.tasks.clicks.raw.files import DataError, open_raw, paths_of, read_raw
from experiments.tasks.clicks.schema import MISSING, Schema, log_transform
from experiments.tasks.clicks.store import Columns, Store
from experiments.tasks.clicks.writer import Order, StoreWriter

BLOCK_BYTES = 1 << 22
BLOCK_ROWS = 1 << 14
MAX_LINE_BYTES = 1 << 20
LONG = f"longer than {MAX_LINE_BYTES} bytes"
"""What is wrong with such a line."""


@dataclass(frozen=True)
class RawFormat:
    """How the rows of a data set are written, and which of them are for training.

    Columns that are neither `label` nor in `schema` are not read.
    """

    schema: Schema
    columns: Mapping[str, Kind]
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
        path, format = Path(source), self
        rows = 0
        for text, first_line in self._blocks_of_lines(path, block_bytes):
            if not (labelled or rows):
                format = self._without_label(1 + text[: text.find(b"\n")].count(b"\t"))
            block = format.parse(text, hash_seed)
            if block is None:
                raise next(format.faults(path, text, first_line))
            else:
                rows += len(block["categories"])
                yield block
        if rows == 0:
            raise DataError(path, self.empty)

    def encode(self, rows: Mapping[str, Any], *, hash_seed: int = 0) -> Columns:
        """Return rows of a table as the columns that a raw file with the same rows has, unlabelled.

        Args:
            rows: Column name to its values, as they stand in the raw file: texts, or numbers where
                the file has integers. None, NaN and the empty text are missing. Columns that are
                not among the features, the label for one, are not looked at.
            hash_seed: Public seed of the hash of categorical values.

        Raises:
            ValueError: a feature is not there or has fewer rows than another, or a value cannot
                stand in a raw file; the line names row (from 0) and column.
        """
        features = {*self.schema.integers, *self.schema.categories}
        kinds = {name: kind for name, kind in self.columns.items() if name in features}
        if absent := [name for name in kinds if name not in rows]:
            raise ValueError(f"the rows have no column {', '.join(absent)}")
        lengths = {name: len(rows[name]) for name in kinds}
        if len(set(lengths.values())) > 1:
            shown = ", ".join(f"{name} has {length:,}" for name, length in lengths.items())
            raise ValueError(f"the columns are not of one length: {shown}")
        num_rows = min(lengths.values(), default=0)
        format = replace(self, columns=kinds, label=None)
        blocks = [
            format._encode(
                {name: rows[name][at : at + BLOCK_ROWS] for name in kinds}, at, hash_seed
            )
            for at in range(0, max(num_rows, 1), BLOCK_ROWS)
        ]
        return {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}

    def _encode(self, rows: Mapping[str, Any], first: int, hash_seed: int) -> Columns:
        """Return rows of a table that has all columns and no other, the first of number `first`."""
        fields = [_fields(name, kind, rows[name], first) for name, kind in self.columns.items()]
        text = b"".join(b"\t".join(row) + b"\n" for row in zip(*fields, strict=True))
        columns = self.parse(text, hash_seed)
        # A tab or a line end within a value would make another number of fields, or of rows.
        if columns is None or len(columns["categories"]) != len(fields[0]):
            for (name, kind), column in zip(self.columns.items(), fields, strict=True):
                for row, value in enumerate(column, first):
                    if not kind.accepts(value):
                        _refuse(row, name, kind, value.decode("utf-8", "replace"))
            raise AssertionError("rows were refused without a reason")
        return columns

    def parse(self, text: bytes, hash_seed: int) -> Columns | None:
        """Return the columns of `text`, whole lines; None if anything in it is not in the format.

        The columns are "label" uint8 [n] (where there is one), "integers" float32 [n, I],
        "integers_missing" bool [n, I] and "categories" int32 [n, C]. Integers x become
        ``sign(x) * log1p(|x|)``, categories their hashed ids; what is missing becomes 0.
        """
        lines = Lines.cut(text, len(self.columns))
        if lines is None:
            return None
        rows, integers, categories = (
            lines.ends.shape[1],
            self.schema.integers,
            self.schema.categories,
        )
        columns: Columns = {} if self.label is None else {"label": np.empty(rows, dtype=np.uint8)}
        columns |= {
            "integers": np.empty((rows, len(integers)), dtype=np.float32),
            "integers_missing": np.empty((rows, len(integers)), dtype=bool),
            "categories": np.empty((rows, len(categories)), dtype=np.int32),
        }
        for index, (name, role, feature) in enumerate(self._roles):
            if role is None:
                continue
            decoded = self.columns[name].decode(lines.column(index))
            if decoded is None:
                return None
            values, missing = decoded
            match role:
                case "label":
                    columns["label"][:] = values
                case "integers":
                    columns["integers"][:, feature] = np.where(missing, 0, log_transform(values))
                    columns["integers_missing"][:, feature] = missing
                case "categories":
                    ids = self.schema.hash(values, feature, hash_seed)
                    columns["categories"][:, feature] = np.where(missing, MISSING, ids)
        return columns

    @cached_property
    def _roles(self) -> list[tuple[str, str | None, int]]:
        """Return (name, what it is for, which of these) of every column of the file."""
        roles = {} if self.label is None else {self.label: ("label", 0)}
        roles |= {name: ("integers", j) for j, name in enumerate(self.schema.integers)}
        roles |= {name: ("categories", j) for j, name in enumerate(self.schema.categories)}
        return [(name, *roles.get(name, (None, 0))) for name in self.columns]

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

    def _blocks_of_lines(self, path: Path, block_bytes: int) -> Iterator[tuple[bytes, int]]:
        """Yield (whole lines, number of the first line), without blank lines at the file's end.

        Blank lines are only known to be at the end when the file ends: at the end of a block they
        are put aside, and the first of them is the error if a row follows.
        """
        line, blank, carry = 1, None, b""
        with open_raw(path, self.file_name) as file:
            while True:
                chunk = read_raw(file, block_bytes, path, line)
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
                        raise DataError(path, self.blank, line=blank)
                    yield text[:end], line
                    line += text.count(b"\n", 0, end)
                if end < len(text) and blank is None:
                    blank = line  # and `line` is of no more use: a row is an error from here on
                if len(carry) > MAX_LINE_BYTES:
                    if blank is not None:
                        raise DataError(path, self.blank, line=blank)
                    raise DataError(path, LONG, line=line)

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
        for (name, role, _), field in zip(self._roles, fields, strict=True):
            kind = self.columns[name] if role else Text()
            if not kind.accepts(field):
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


def _fields(name: str, kind: Kind, values: Iterable[Any], first: int) -> list[bytes]:
    """Return the fields as which the values of one column, from row `first` on, stand in a file."""
    fields = []
    for row, value in enumerate(values, first):
        text = b"" if is_missing(value) else kind.write(value)
        if text is None:
            _refuse(row, name, kind, value)
        fields.append(text)
    return fields


def _refuse(row: int, name: str, kind: Kind, value: Any) -> NoReturn:
    raise ValueError(f"row {row}, column {name}: found {value!a:.40}, expected {kind.wanted}")
