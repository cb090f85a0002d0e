"""Batch files: batches drawn ahead and stored in step order, for data that only a scan can read.

Their privacy cost and secrecy: docs/explanation/batches-drawn-ahead.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import itertools
import json
import os
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from dpsgd.engine.blocks import plan_blocks
from dpsgd.engine.sources import take_rows
from dpsgd.files import SECRET, destroy, fsync_folder, open_own, parse_json
from samplers import BatchSampler, BatchSource
from samplers.batches import IndexBlock

PyTree = Any

FILE_BYTES = 1 << 26
"""Capacity of one file, bytes of rows; a single step may exceed it."""

MANIFEST = "batches.json"
"""File written last: without it a folder has no batches."""

SEED = "seed"
"""File of the sampling seed for worker processes; destroyed when all batches are drawn."""

_FORMAT = "dpsgd-batches-1"
_MOST_SECRET = 1 << 10


@dataclass(frozen=True)
class Draw:
    """Steps to draw, for an attempt of a run: public.

    Attributes:
      sampler: Sampler of the run.
      run: Name of the run, as in its ledger.
      attempt: Attempt of the run for which the batches are drawn.
      first_step: First step; all later steps are drawn, too.
      steps_per_file: Number of steps of each file but the last.
    """

    sampler: BatchSampler
    run: str
    attempt: int
    first_step: int
    steps_per_file: int

    @classmethod
    def plan(
        cls, sampler: BatchSampler, data: PyTree, *, run: str, attempt: int, first_step: int
    ) -> Draw:
        """Returns the draw from `first_step`, in files of `FILE_BYTES`.

        Raises:
          ValueError: If the sampler has several data shards.
        """
        if sampler.num_shards > 1:
            raise ValueError(
                f"num_shards={sampler.num_shards}: batch files need rows in one place; use a "
                "sampler of one data shard"
            )
        row = sum(leaf.nbytes // len(leaf) for leaf in jax.tree.leaves(data))
        steps = max(1, FILE_BYTES // max(1, int(sampler.expected_batch_size * row)))
        return cls(sampler, run, attempt, first_step, steps)

    @property
    def num_files(self) -> int:
        """Number of files, without the padding's."""
        return -(-(self.sampler.num_steps - self.first_step) // self.steps_per_file)

    def steps(self, file: int) -> range:
        """Returns the steps of one file.

        >>> from samplers import Deterministic
        >>> Draw(Deterministic(100, batch_size=10), "run", 1, 2, steps_per_file=4).steps(1)
        range(6, 10)
        """
        first = self.first_step + file * self.steps_per_file
        return range(first, min(first + self.steps_per_file, self.sampler.num_steps))

    def file_of(self, step: int) -> int:
        """Returns the number of the file that holds `step`."""
        return (step - self.first_step) // self.steps_per_file

    def record(self) -> dict[str, Any]:
        """Returns the draw as JSON values, for the manifest."""
        terms = {"class": type(self.sampler).__qualname__, **self.sampler.terms()}
        fields = [field.name for field in dataclasses.fields(self)]
        return {**{name: getattr(self, name) for name in fields}, "sampler": terms}


def file_name(file: int) -> str:
    """Returns the name of file number `file`."""
    return f"{file:08d}.batches"


# --- Writing -------------------------------------------------------------------------------------


def refuse_existing(path: Path) -> None:
    """Raises FileExistsError if `path` exists."""
    if os.path.lexists(path):
        raise FileExistsError(f"{path} exists already and is left as it is: name another folder")


def save_seed(path: Path, seed: int) -> None:
    """Writes the sampling seed beside batch files, for worker processes.

    Args:
      path: Folder of the batch files.
      seed: Sampling seed of 256 bits.
    """
    write_secret(path / SEED, f"{seed:064x}".encode())


def load_seed(path: Path) -> int:
    """Reads the sampling seed; raises as `open_own` does."""
    with os.fdopen(open_own(path / SEED, os.O_RDONLY, SECRET), "rb") as file:
        return int(file.read(_MOST_SECRET), 16)


def write_secret(path: Path, content: bytes) -> None:
    """Writes a file of mode 0600, atomically among processes.

    Args:
      path: File to write.
      content: Bytes of the file.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, SECRET)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        raise


def write_file(
    path: Path,
    file: int,
    passes: Sequence[Sequence[np.ndarray]],
    columns: Sequence[np.ndarray],
) -> str:
    """Writes one file of batches; returns its SHA-256.

    Args:
      path: Folder of the files.
      file: Number of the file.
      passes: Example indices of each pass, for each step of the file.
      columns: Rows of these examples, pass after pass, for each leaf of the data.
    """
    members = [examples for step in passes for examples in step]
    content = io.BytesIO()
    for array in (
        np.array([len(step) for step in passes], np.int32),
        np.array([examples.size for examples in members], np.int32),
        np.concatenate([np.empty(0, np.int32), *members]).astype(np.int32, copy=False),
        *columns,
    ):
        np.lib.format.write_array(content, np.ascontiguousarray(array), allow_pickle=False)
    write_secret(path / file_name(file), content.getvalue())
    return hashlib.sha256(content.getbuffer()).hexdigest()


def write_manifest(path: Path, draw: Draw, seed: int, digests: Sequence[str], data: PyTree) -> None:
    """Completes a draw's batch files, and destroys the seed's.

    The files keep a copy of the first row of `data`, which serves as padding.
    """
    padding = write_file(path, draw.num_files, [], take_rows(jax.tree.leaves(data), slice(1)))
    record = {"format": _FORMAT, "draw": draw.record(), "files": [*digests, padding]}
    record["seal"] = _seal(record, seed)
    write_secret(path / MANIFEST, json.dumps(record, indent=1).encode() + b"\n")
    destroy(path / SEED)
    fsync_folder(path)


def draw_here(path: Path, draw: Draw, seed: int, data: PyTree) -> list[str]:
    """Draws and writes all files here; returns their SHA-256."""
    source = BatchSource(draw.sampler, seed)
    leaves = jax.tree.leaves(data)
    digests = []
    for file in range(draw.num_files):
        passes = [[ids for (ids,) in source.passes_by_shard(step)] for step in draw.steps(file)]
        rows = np.concatenate([np.empty(0, np.int32), *(ids for step in passes for ids in step)])
        digests.append(write_file(path, file, passes, take_rows(leaves, rows)))
    return digests


def _seal(record: dict[str, Any], seed: int) -> str:
    """Returns the digest of a manifest under the sampling seed."""
    text = json.dumps({key: record[key] for key in ("format", "draw", "files")}, sort_keys=True)
    key = hashlib.sha256(f"{seed:x}".encode()).digest()
    return hashlib.blake2b(text.encode(), key=key, person=b"dpsgd batches").hexdigest()


# --- Reading -------------------------------------------------------------------------------------


class _File(NamedTuple):
    passes: list[list[np.ndarray]]
    """Example indices of each pass, by step."""
    columns: list[np.ndarray]
    """Rows of the file, one array for each leaf of the data."""
    bounds: np.ndarray
    """Offsets of the first row of each step, and of the end."""


class BatchFiles(BatchSource):
    """Source that reads a draw's batches in step order, with their rows.

    Args:
      path: Folder of the files.
      draw: Draw of the batches; the files may begin before its first step.
      seed: Seed of the sampler.
      data: Pytree with the rows' shapes and dtypes, [examples, ...] each.

    Raises:
      ValueError: If the folder has other, damaged or no batches; the message states the remedy.
    """

    def __init__(self, path: Path, draw: Draw, seed: int, data: PyTree) -> None:
        super().__init__(draw.sampler, seed)
        self._path = path
        leaves, self._structure = jax.tree.flatten(data)
        self._row_shapes = [(leaf.dtype, leaf.shape[1:]) for leaf in leaves]
        remedy = "draw them again with `dpsgd batches`"
        try:
            with os.fdopen(open_own(path / MANIFEST, os.O_RDONLY, SECRET), "rb") as file:
                record = parse_json(file.read())
            first = record["draw"]["first_step"]
            steps_per_file = record["draw"]["steps_per_file"]
            files, seal = list(record["files"]), record["seal"]
            self.draw = dataclasses.replace(draw, first_step=first, steps_per_file=steps_per_file)
            ours = record["format"] == _FORMAT and seal == _seal(record, seed)
        except (OSError, LookupError, TypeError, ValueError) as error:
            raise ValueError(f"{path} holds no batches ({error}): {remedy}") from None
        if not ours or record["draw"] != json.loads(json.dumps(self.draw.record())):
            raise ValueError(
                f"{path} holds batches of another run, or of another attempt of this run, "
                f"or they were changed: {remedy}"
            )
        if first > draw.first_step:
            raise ValueError(
                f"{path} begins with step {first:,}, after step {draw.first_step:,} at which the "
                f"run resumes: {remedy}"
            )
        self._digests = files
        self._held: dict[int, _File] = {}
        self._padding = self._read(self.draw.num_files, 0).columns

    def passes_by_shard(self, step: int) -> list[tuple[np.ndarray, ...]]:
        """Returns the example indices of each pass of a step, of one shard."""
        return [(examples,) for examples in self._file(step).passes[self._place(step)]]

    def blocks(
        self, first_step: int, block_steps: int, *, ends: int | None = None
    ) -> Iterator[tuple[range, PyTree, IndexBlock]]:
        """Yields steps, rows and plan of each block, see `plan_blocks`.

        The plan's places count its examples among the rows: the data's first row, for
        padding, and the rows of its passes.
        """
        plans = plan_blocks(self, first_step=first_step, block_steps=block_steps, ends=ends)
        for steps, plan in plans:
            for file in [file for file in self._held if file < self.draw.file_of(steps.start)]:
                del self._held[file]
            sizes = plan.weights.sum(axis=1, dtype=np.int64)
            stops = np.cumsum(sizes)
            places = np.zeros(plan.indices.shape, np.int32)
            for row, (stop, size) in enumerate(zip(stops, sizes, strict=True)):
                places[row, :size] = np.arange(stop - size + 1, stop + 1)
            pieces = [self._padding, *(self._rows(step) for step in steps)]
            rows = [np.concatenate(columns) for columns in zip(*pieces, strict=True)]
            yield steps, jax.tree.unflatten(self._structure, rows), plan._replace(places=places)

    def _rows(self, step: int) -> list[np.ndarray]:
        file, place = self._file(step), self._place(step)
        return [column[file.bounds[place] : file.bounds[place + 1]] for column in file.columns]

    def _place(self, step: int) -> int:
        return (step - self.draw.first_step) % self.draw.steps_per_file

    def _file(self, step: int) -> _File:
        file = self.draw.file_of(step)
        if file not in self._held:
            self._held[file] = self._read(file, len(self.draw.steps(file)))
        return self._held[file]

    def _read(self, file: int, steps: int) -> _File:
        path = self._path / file_name(file)
        try:
            with os.fdopen(open_own(path, os.O_RDONLY, SECRET), "rb") as stream_file:
                content = stream_file.read()
        except FileNotFoundError:
            raise ValueError(
                f"{path} is missing: draw the batches again with `dpsgd batches`"
            ) from None
        if hashlib.sha256(content).hexdigest() != self._digests[file]:
            raise ValueError(f"{path} is damaged: draw the batches again with `dpsgd batches`")
        stream = io.BytesIO(content)
        counts, sizes, examples, *columns = (
            np.lib.format.read_array(stream, allow_pickle=False)
            for _ in range(3 + len(self._row_shapes))
        )
        if len(counts) != steps or [(c.dtype, c.shape[1:]) for c in columns] != self._row_shapes:
            raise ValueError(
                f"{path} holds rows of other shapes than the data: draw the batches again with "
                "`dpsgd batches`"
            )
        pass_examples = np.split(examples, np.cumsum(sizes)[:-1]) if len(sizes) else []
        pass_bounds = np.concatenate([[0], np.cumsum(counts)]).astype(int)
        passes = [pass_examples[a:b] for a, b in itertools.pairwise(pass_bounds)]
        rows = np.concatenate([[0], np.cumsum(sizes)]).astype(int)[pass_bounds]
        return _File(passes, columns, rows)


def forget(path: Path, run: str) -> None:
    """Destroys a run's batch files, and their folder if empty.

    Args:
      path: Folder of the batch files.
      run: Name of the run; files of another run stay.
    """
    if not path.is_dir() or path.is_symlink():
        return
    try:
        record = parse_json((path / MANIFEST).read_bytes())
        if record["draw"]["run"] != run:
            return
    except (FileNotFoundError, ValueError):
        pass  # of a command that died, or damaged: the names are our own
    except (LookupError, TypeError):
        return
    names = "*.batches*", ".*.batches.*", f".{SEED}.*", f".{MANIFEST}.*", SEED, MANIFEST
    for file in [file for name in names for file in path.glob(name)]:
        destroy(file)
    with contextlib.suppress(OSError):
        path.rmdir()
