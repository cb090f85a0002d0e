"""A columnar store of labelled rows: memory-mapped ``.npy`` shards and a ``manifest.json``.

Columns, all with rows first: "label" [n], of the type of the schema's target; "integers"
float32 [n, I], already transformed, 0 where missing; "integers_missing" bool [n, I]; "categories"
int32 [n, C], hashed ids, 0 where missing (see :mod:`experiments.tasks.clicks.schema`). A shard is a
range of rows, one file per column.

:mod:`experiments.tasks.clicks.writer` writes one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dpsgd.files import DAMAGED, parse_json
from dpsgd.runs.records import build, checked
from experiments.tasks.clicks.schema import Schema

Columns = dict[str, np.ndarray]
"""Column name to array, all with the same number of rows."""

Splits = Mapping[str, tuple[int, int]]
"""Split name to its range of rows, first (included) and last (excluded)."""

FORMAT = "dpsgd-columns"
VERSION = 2
MANIFEST = "manifest.json"
INTEGER_TRANSFORMS = {
    "log1p": "sign(x) * log1p(abs(x)); missing = 0",
    "none": "x; missing = 0",
    "both": "sign(x) * log1p(abs(x)); missing = 0",
}
"""For people: what `Schema.transform` makes of numbers."""


class StoreError(ValueError):
    """A store cannot be written or read: one line that says which, why and what to do."""


def columns_of(schema: Schema) -> dict[str, tuple[np.dtype, int | None]]:
    """Return the dtype and the width (None for a vector) of each column of a store of `schema`."""
    return {
        "label": (np.dtype(schema.target.dtype), None),
        "integers": (np.dtype("<f4"), len(schema.integers)),
        "integers_missing": (np.dtype(bool), len(schema.integers)),
        "categories": (np.dtype("<i4"), len(schema.categories)),
    }


def empty_columns(schema: Schema, rows: int) -> Columns:
    """Return the columns of a store of `schema` for so many rows, which are to be filled."""
    return {
        name: np.empty((rows,) if width is None else (rows, width), dtype)
        for name, (dtype, width) in columns_of(schema).items()
    }


@dataclass(frozen=True)
class Shard:
    """Consecutive rows, and for each column its file's "name" and the "sha256" of its bytes."""

    rows: int
    files: Mapping[str, Mapping[str, str]]

    def __post_init__(self) -> None:
        if self.rows < 0:
            raise ValueError(f"rows must be at least 0, got {self.rows}")


class Absent:
    """Rows of a file that is not here: they can be counted, and raise `StoreError` when read."""

    def __init__(self, why: str, dtype: np.dtype, shape: tuple[int, ...]) -> None:
        self.why, self.dtype, self.shape = why, dtype, shape

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if len(self):
            raise StoreError(self.why)
        return np.empty(self.shape, dtype or self.dtype)

    def __getitem__(self, rows: slice | np.ndarray) -> Absent | np.ndarray:
        if isinstance(rows, slice):
            count = len(range(*rows.indices(len(self))))
            return Absent(self.why, self.dtype, (count, *self.shape[1:]))
        if rows.size:
            raise StoreError(self.why)
        return np.empty((*rows.shape, *self.shape[1:]), self.dtype)


class Joined:
    """Arrays, one after the other, as one that is read where it is looked at.

    Rows are taken by slices, which are views, and by integer arrays, which read and copy.

    >>> rows = Joined([np.arange(3), np.arange(3, 5)])
    >>> rows[np.array([4, 0, 3])], np.asarray(rows[2:4])
    (array([4, 0, 3]), array([2, 3]))
    """

    def __init__(self, arrays: Sequence[np.ndarray | Absent]) -> None:
        self._arrays = [array for array in arrays if len(array)] or list(arrays[:1])
        self._ends = np.cumsum([len(array) for array in self._arrays])
        self.dtype = self._arrays[0].dtype
        self.shape = (int(self._ends[-1]), *self._arrays[0].shape[1:])
        self.ndim = len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("rows of several shards are one array by a copy alone")
        return np.concatenate([np.asarray(array) for array in self._arrays], dtype=dtype)

    def lacks(self, rows: range) -> str:
        """Return why some of these consecutive rows cannot be read here; empty if all can."""
        own = self[rows.start : rows.stop]
        assert isinstance(own, Joined)
        return next((x.why for x in own._arrays if isinstance(x, Absent) and len(x)), "")

    def __getitem__(self, rows: slice | np.ndarray) -> Joined | np.ndarray:
        """Return the rows of a slice without step, or of an array of numbers in [0, len)."""
        begins = self._ends - [len(array) for array in self._arrays]
        if isinstance(rows, slice):
            if rows.step not in (None, 1):
                raise IndexError("rows of several shards are sliced without a step")
            first, last, _ = rows.indices(len(self))
            limits = zip(self._arrays, begins.tolist(), strict=True)
            return Joined([x[max(first - at, 0) : max(last - at, 0)] for x, at in limits])
        if rows.size and not 0 <= rows.min() <= rows.max() < len(self):
            raise IndexError(f"rows must be in [0, {len(self)})")
        found = np.empty((*rows.shape, *self.shape[1:]), self.dtype)
        part = np.searchsorted(self._ends, rows, side="right")
        for number, (array, at) in enumerate(zip(self._arrays, begins, strict=True)):
            mine = part == number
            found[mine] = array[rows[mine] - at]
        return found


_KINDS = {
    "num_rows": int,
    "hash_seed": int,
    "splits": Mapping[str, list[int]],
    "source": Mapping[str, Any],
    "shards": list[Mapping[str, Any]],
}


def _range_of_rows(ends: list[int], num_rows: int, where: str) -> tuple[int, int]:
    if len(ends) != 2 or not 0 <= ends[0] <= ends[1] <= num_rows:
        raise ValueError(f"{where}: no range of {num_rows:,} rows")
    return ends[0], ends[1]


@dataclass(frozen=True)
class Store:
    """A whole store, opened for reading; `Store.open(path)` makes one.

    `digest` (SHA-256 of the manifest, which holds the checksums of all shards) names the data:
    two stores with the same digest and intact shards hold the same rows.
    """

    path: Path
    schema: Schema
    num_rows: int
    splits: Splits
    hash_seed: int
    source: Mapping[str, Any]
    digest: str
    shards: tuple[Shard, ...]
    absent: frozenset[str] = frozenset()
    """Names of the files that were not there when it was opened in part: they are never read."""

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, in_part: bool = False) -> Store:
        """Open the store in directory `path`; every file must be there, with its right size.

        Args:
            path: Its directory.
            in_part: Whether shards may be missing, as on one of several hosts: then their rows
                count, and raise `StoreError` when they are read. What they hold is still said by
                the manifest's checksums, and so by `digest`, which is the same on all hosts.

        Raises:
            StoreError: no store, a store of another version, or a shard missing or cut.
        """
        path = Path(path)
        try:
            text = (path / MANIFEST).read_bytes()
        except FileNotFoundError:
            what = "has no manifest.json" if path.is_dir() else "does not exist"
            raise StoreError(f"{path} is not a store: it {what}; make one with prepare") from None
        except NotADirectoryError:
            raise StoreError(
                f"{path} is a file and no store: make one of it with `dpsgd prepare`"
            ) from None
        except OSError as error:
            raise StoreError(f"{path} is not a readable store: {error.strerror}") from None
        try:
            manifest = checked(parse_json(text), dict[str, Any], "it")
            if manifest.get("format") != FORMAT:
                raise StoreError(f"{path} is not a store: its manifest has another format")
            if manifest.get("version") != VERSION:
                raise StoreError(
                    f"{path} is a store of version {manifest.get('version')!a:.20}, and this "
                    f"program reads version {VERSION}; prepare the data again"
                )
            given = {name: checked(manifest.get(name), kind, name) for name, kind in _KINDS.items()}
            store = cls(
                path=path,
                schema=build(Schema, manifest.get("schema"), "schema"),
                num_rows=given["num_rows"],
                splits={
                    name: _range_of_rows(ends, given["num_rows"], f"splits, {name!a}")
                    for name, ends in given["splits"].items()
                },
                hash_seed=given["hash_seed"],
                source=given["source"],
                digest=hashlib.sha256(text).hexdigest(),
                shards=tuple(build(Shard, shard, "shards") for shard in given["shards"]),
            )
            store._check()
        except StoreError:
            raise
        except ValueError as error:
            raise StoreError(f"{path} has a damaged {MANIFEST}: {error}") from None
        if in_part:
            names = {shard.files[column]["name"] for shard, column in store._files()}
            absent = frozenset(name for name in names if not (path / name).exists())
            store = dataclasses.replace(store, absent=absent)
        for shard, column in store._files():
            store._column(shard, column)
        return store

    def _files(self) -> Iterator[tuple[Shard, str]]:
        return itertools.product(self.shards, columns_of(self.schema))

    def _check(self) -> None:
        """Raises ValueError if the parts of the manifest do not fit together."""
        if sum(shard.rows for shard in self.shards) != self.num_rows:
            raise ValueError("rows of the shards do not add up")
        if missing := {"train", "validation", "test"} - set(self.splits):
            raise ValueError(f"splits: there is no {' or '.join(sorted(missing))}")
        filled = sorted((ends, name) for name, ends in self.splits.items() if ends[0] < ends[1])
        for ((_, end), one), ((begin, _), other) in itertools.pairwise(filled):
            if begin < end:
                raise ValueError(f"splits: {one!a} and {other!a} share rows")
        for shard, column in self._files():
            name = checked(shard.files.get(column, {}).get("name"), str, f"file of {column}")
            if Path(name).name != name or "\0" in name:
                raise ValueError(f"{name!a} is not the name of a file in the store")

    def schema_mismatch(self, schema: Schema, hash_seed: int) -> str | None:
        """Return how it differs from what a model of `schema` reads; None if it does not."""
        if self.schema.name != schema.name:
            return f"holds rows of {self.schema.name}, not of {schema.name}"
        found, wanted = ({*s.integers, *s.categories} for s in (self.schema, schema))
        if found != wanted:
            others = sorted(found ^ wanted)
            shown = f"{', '.join(others[:5])}{', ...' * (len(others) > 5)}"
            return f"was prepared with other columns ({shown})"
        names = [field.name for field in dataclasses.fields(Schema)]
        others = [name for name in names if getattr(self.schema, name) != getattr(schema, name)]
        if others := [name for name in others if name != "bounds"]:  # on which no row depends
            return f"was prepared with other {', '.join(others)}"
        if self.hash_seed != hash_seed:
            return f"was prepared with another hash seed than {hash_seed} (see --hash-seed)"
        return None

    def rows(self, split: str) -> int:
        """Return how many rows `split` has.

        Raises:
            StoreError: there is no such split.
        """
        begin, end = self._range(split)
        return end - begin

    def verify(self) -> None:
        """Compare the checksum of every shard that is here with the manifest's; reads them whole.

        Raises:
            StoreError: names the first file that was changed since it was written.
        """
        for shard, column in self._files():
            data = self._column(shard, column)
            if isinstance(data, Absent):
                continue
            digest = hashlib.sha256()
            for begin in range(0, len(data), 1 << 16):
                digest.update(np.ascontiguousarray(data[begin : begin + (1 << 16)]).data)
            if digest.hexdigest() != shard.files[column].get("sha256"):
                file = self.path / shard.files[column]["name"]
                raise StoreError(f"{file} is damaged: its checksum is not the manifest's")

    def load(self, split: str, rows: range | None = None) -> dict[str, Any]:
        """Return the columns of `split`, or of some of its rows: read-only and memory-mapped.

        A column is an array if its rows lie in one shard that is here, else a `Joined` one. No row
        is read before it is looked at: a process that holds some data shards reads their rows
        alone, and may have been given no others (`open(in_part=True)`).

        Args:
            split: One of `splits`.
            rows: Consecutive rows, counted from the first of the split; by default all.

        Raises:
            StoreError: there is no such split, or it has not these rows.
        """
        begin, end = self._range(split)
        if rows is not None:
            if rows.step != 1 or not 0 <= rows.start <= rows.stop <= end - begin:
                raise StoreError(f"{split} of {self.path} has {end - begin:,} rows, and not {rows}")
            begin, end = begin + rows.start, begin + rows.stop
        parts = self._parts(begin, end) or [(self.shards[0], 0, 0)]
        columns: dict[str, Any] = {}
        for column in columns_of(self.schema):
            arrays = [self._column(shard, column)[a:b] for shard, a, b in parts]
            here = [array for array in arrays if isinstance(array, np.ndarray)]
            for array in here:
                array.flags.writeable = False
            columns[column] = here[0] if len(here) == len(arrays) == 1 else Joined(arrays)
        return columns

    def blocks(self, split: str, rows: int = 1 << 16) -> Iterator[Columns]:
        """Yield the columns of `split` in order, at most `rows` rows at a time, memory-mapped."""
        begin, end = self._range(split)
        for shard, first, last in self._parts(begin, end):
            arrays: dict[str, Any] = {x: self._column(shard, x) for x in columns_of(self.schema)}
            for array in arrays.values():
                if isinstance(array, Absent):
                    raise StoreError(array.why)
            for a in range(first, last, rows):
                yield {column: x[a : min(a + rows, last)] for column, x in arrays.items()}

    def _range(self, split: str) -> tuple[int, int]:
        if split not in self.splits:
            raise StoreError(f"{self.path} has no split {split!r}; it has {', '.join(self.splits)}")
        return self.splits[split]

    def _parts(self, begin: int, end: int) -> list[tuple[Shard, int, int]]:
        """Return (shard, first row, last row), rows counted in the shard, of a range of rows."""
        parts = []
        offset = 0
        for shard in self.shards:
            a, b = max(begin - offset, 0), min(end - offset, shard.rows)
            if a < b:
                parts.append((shard, a, b))
            offset += shard.rows
        return parts

    def _column(self, shard: Shard, column: str) -> np.ndarray | Absent:
        name = shard.files[column]["name"]
        file, missing = self.path / name, f"{self.path} is incomplete: {name} is missing"
        dtype, width = columns_of(self.schema)[column]
        shape = (shard.rows,) if width is None else (shard.rows, width)
        if name in self.absent:  # also if it is there by now: what came later was not verified
            return Absent(missing, dtype, shape)
        try:
            array = np.lib.format.open_memmap(file, mode="r")
            surplus = file.stat().st_size - array.offset - array.nbytes
        except FileNotFoundError:
            raise StoreError(missing) from None
        except DAMAGED as error:
            raise StoreError(f"{file} cannot be read or has the wrong size: {error}") from None
        if surplus:
            raise StoreError(f"{file} has the wrong size: {surplus:,} bytes too many")
        if array.shape != shape or array.dtype != dtype:
            raise StoreError(
                f"{file} has shape {array.shape} and dtype {array.dtype}, "
                f"and its manifest says {shape} and {dtype}"
            )
        return np.asarray(array)
