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
"""Descriptions of `Schema.transform` for people."""


class StoreError(ValueError):
    """Store that cannot be written or read: one line with its path, the reason and the remedy."""


def columns_of(schema: Schema) -> dict[str, tuple[np.dtype, int | None]]:
    """Returns the dtype and width (None for a vector) of each column."""
    return {
        "label": (np.dtype(schema.target.dtype), None),
        "integers": (np.dtype("<f4"), len(schema.integers)),
        "integers_missing": (np.dtype(bool), len(schema.integers)),
        "categories": (np.dtype("<i4"), len(schema.categories)),
    }


def empty_columns(schema: Schema, rows: int) -> Columns:
    """Returns uninitialised columns of a store for `rows` rows."""
    return {
        name: np.empty((rows,) if width is None else (rows, width), dtype)
        for name, (dtype, width) in columns_of(schema).items()
    }


@dataclass(frozen=True)
class Shard:
    """Consecutive rows; each column's file has a "name" and the "sha256" of its bytes."""

    rows: int
    files: Mapping[str, Mapping[str, str]]

    def __post_init__(self) -> None:
        if self.rows < 0:
            raise ValueError(f"rows must be at least 0, got {self.rows}")


class Absent:
    """Rows of an absent file: they can be counted, and raise `StoreError` when read."""

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
    """Concatenation of arrays, read on access.

    Slices of rows are views; integer arrays read and copy.

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
        """Returns the reason why some rows cannot be read here, or ""."""
        selected = self[rows.start : rows.stop]
        assert isinstance(selected, Joined)
        return next((x.why for x in selected._arrays if isinstance(x, Absent) and len(x)), "")

    def __getitem__(self, rows: slice | np.ndarray) -> Joined | np.ndarray:
        """Returns the rows of a slice without step, or of an array of indices in [0, len)."""
        begins = self._ends - [len(array) for array in self._arrays]
        if isinstance(rows, slice):
            if rows.step not in (None, 1):
                raise IndexError("rows of several shards are sliced without a step")
            first, last, _ = rows.indices(len(self))
            limits = zip(self._arrays, begins.tolist(), strict=True)
            return Joined([x[max(first - begin, 0) : max(last - begin, 0)] for x, begin in limits])
        if rows.size and not 0 <= rows.min() <= rows.max() < len(self):
            raise IndexError(f"rows must be in [0, {len(self)})")
        result = np.empty((*rows.shape, *self.shape[1:]), self.dtype)
        owner = np.searchsorted(self._ends, rows, side="right")
        for number, (array, begin) in enumerate(zip(self._arrays, begins, strict=True)):
            is_owner = owner == number
            result[is_owner] = array[rows[is_owner] - begin]
        return result


_KINDS = {
    "num_rows": int,
    "hash_seed": int,
    "splits": Mapping[str, list[int]],
    "source": Mapping[str, Any],
    "shards": list[Mapping[str, Any]],
}


def _range_of_rows(limits: list[int], num_rows: int, where: str) -> tuple[int, int]:
    if len(limits) != 2 or not 0 <= limits[0] <= limits[1] <= num_rows:
        raise ValueError(f"{where}: no range of {num_rows:,} rows")
    return limits[0], limits[1]


@dataclass(frozen=True)
class Store:
    """Store opened for reading by `Store.open(path)`.

    `digest` (SHA-256 of the manifest, which holds the checksums of all shards) identifies the data:
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
    """Names of the files that were absent when it was opened in part: they are never read."""

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, in_part: bool = False) -> Store:
        """Opens the store in directory `path`; all files must be complete.

        Args:
            path: Directory of the store.
            in_part: True to allow missing shards, as on one of several hosts: their rows count, and
              raise `StoreError` when read. The manifest's checksums, and so `digest`, are the same
              on all hosts.

        Raises:
            StoreError: If there is no store, it has another version, or a shard is missing or
              truncated.
        """
        path = Path(path)
        try:
            text = (path / MANIFEST).read_bytes()
        except FileNotFoundError:
            flaw = "has no manifest.json" if path.is_dir() else "does not exist"
            raise StoreError(f"{path} is not a store: it {flaw}; make one by prepare") from None
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
            terms = {name: checked(manifest.get(name), kind, name) for name, kind in _KINDS.items()}
            store = cls(
                path=path,
                schema=build(Schema, manifest.get("schema"), "schema"),
                num_rows=terms["num_rows"],
                splits={
                    name: _range_of_rows(limits, terms["num_rows"], f"splits, {name!a}")
                    for name, limits in terms["splits"].items()
                },
                hash_seed=terms["hash_seed"],
                source=terms["source"],
                digest=hashlib.sha256(text).hexdigest(),
                shards=tuple(build(Shard, shard, "shards") for shard in terms["shards"]),
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
        """Raises ValueError if the parts of the manifest contradict each other."""
        if sum(shard.rows for shard in self.shards) != self.num_rows:
            raise ValueError("rows of the shards do not add up")
        if missing := {"train", "validation", "test"} - set(self.splits):
            raise ValueError(f"splits: there is no {' or '.join(sorted(missing))}")
        filled = sorted((s, name) for name, s in self.splits.items() if s[0] < s[1])
        for ((_, end), first_name), ((begin, _), second_name) in itertools.pairwise(filled):
            if begin < end:
                raise ValueError(f"splits: {first_name!a} and {second_name!a} share rows")
        for shard, column in self._files():
            name = checked(shard.files.get(column, {}).get("name"), str, f"file of {column}")
            if Path(name).name != name or "\0" in name:
                raise ValueError(f"{name!a} is not the name of a file in the store")

    def schema_mismatch(self, schema: Schema, hash_seed: int) -> str | None:
        """Returns the difference from a model's `schema`, or None."""
        if self.schema.name != schema.name:
            return f"holds rows of {self.schema.name}, not of {schema.name}"
        stored, expected = ({*s.integers, *s.categories} for s in (self.schema, schema))
        if stored != expected:
            changed = sorted(stored ^ expected)
            text = f"{', '.join(changed[:5])}{', ...' * (len(changed) > 5)}"
            return f"was prepared with other columns ({text})"
        names = [field.name for field in dataclasses.fields(Schema)]
        changed = [name for name in names if getattr(self.schema, name) != getattr(schema, name)]
        if changed := [name for name in changed if name != "bounds"]:  # on which no row depends
            return f"was prepared with other {', '.join(changed)}"
        if self.hash_seed != hash_seed:
            return f"was prepared with another hash seed than {hash_seed} (see --hash-seed)"
        return None

    def rows(self, split: str) -> int:
        """Returns the number of rows of `split`.

        Raises:
            StoreError: If there is no such split.
        """
        begin, end = self._range(split)
        return end - begin

    def verify(self) -> None:
        """Compares the checksum of every local shard with the manifest's.

        Raises:
            StoreError: For the first file that was changed since it was written.
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
        """Returns the columns of `split`, read-only and memory-mapped.

        A column is an array if its rows lie in one local shard, else a `Joined` one. Rows are read
        on access: a process reads its own data shards, and may lack the others
        (`open(in_part=True)`).

        Args:
            split: Name of the split.
            rows: Consecutive rows, counted from the first of the split; by default all.

        Raises:
            StoreError: If there is no such split, or it does not have these rows.
        """
        begin, end = self._range(split)
        if rows is not None:
            if rows.step != 1 or not 0 <= rows.start <= rows.stop <= end - begin:
                raise StoreError(f"{split} of {self.path} has {end - begin:,} rows, and not {rows}")
            begin, end = begin + rows.start, begin + rows.stop
        pieces = self._parts(begin, end) or [(self.shards[0], 0, 0)]
        columns: dict[str, Any] = {}
        for column in columns_of(self.schema):
            arrays = [self._column(shard, column)[a:b] for shard, a, b in pieces]
            local = [array for array in arrays if isinstance(array, np.ndarray)]
            for array in local:
                array.flags.writeable = False
            columns[column] = local[0] if len(local) == len(arrays) == 1 else Joined(arrays)
        return columns

    def blocks(self, split: str, rows: int = 1 << 16) -> Iterator[Columns]:
        """Yields the columns of `split` in order, memory-mapped, in blocks of `rows`."""
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
        """Returns (shard, first row, last row), counted in the shard, for a range of rows."""
        pieces = []
        offset = 0
        for shard in self.shards:
            a, b = max(begin - offset, 0), min(end - offset, shard.rows)
            if a < b:
                pieces.append((shard, a, b))
            offset += shard.rows
        return pieces

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
