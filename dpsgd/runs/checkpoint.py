"""Saves and restores training states atomically.

A checkpoint is one file, fsynced and then renamed, that holds a SHA-256 of its content. Sharded
arrays lie in further files (parts), which the checkpoint names. It also holds the ledger's head,
but no key: docs/explanation/checkpoints.md.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dpsgd.files import (
    DAMAGED,
    SECRET,
    destroy,
    file_sha256,
    make_folder,
    parse_json,
    reserve,
    write_atomically,
)
from dpsgd.runs.processes import Processes
from dpsgd.runs.records import checked

if TYPE_CHECKING:
    from dpsgd.core.state import TrainState

KEPT = 2
"""Number of checkpoints on the disk, one of them for fallback."""

_RESERVED = ".reserved"
"""Name of the file that reserves disk space for the next checkpoint."""

_SLACK = 2**12
"""Most bytes of an array's header."""

_LEAF = "state"
_PARTS = "parts"
_DIGEST = "sha256"


class Checkpoint(NamedTuple):
    """Training state without pending noise, and its place in the run."""

    state: TrainState
    attempt: int
    """Index of the attempt that computed the state."""
    ledger_head: str
    """Hash of the ledger's last line when the checkpoint was written."""
    seconds: float
    """Seconds of training up to the state."""

    @property
    def step(self) -> int:
        """Number of steps done."""
        return int(self.state.step)


class Checkpoints:
    """Folder of a run's checkpoints, whose file names are their steps."""

    def __init__(self, folder: Path, processes: Processes | None = None):
        """Opens a folder in which `processes`, by default all, save together."""
        self.folder = folder
        self._processes = processes or Processes.current()

    def save(self, checkpoint: Checkpoint) -> None:
        """Writes a checkpoint, then destroys all but the newest `KEPT`.

        Raises:
          ValueError: if the state has pending noise, or the folder is a symbolic link.
          OSError: if the checkpoint cannot be written.
        """
        import jax

        if checkpoint.state.pending:
            raise ValueError(
                "state has pending noise, which no checkpoint may hold: flush it first"
            )
        self._make_folder()
        leaves = {
            _LEAF + jax.tree_util.keystr(key_path): leaf
            for key_path, leaf in jax.tree_util.tree_leaves_with_path(checkpoint.state)
        }
        sharded = {name: leaf for name, leaf in leaves.items() if _is_sharded(leaf)}
        name = f"{checkpoint.step:012d}"
        part_records = self._save_parts(name, sharded) if sharded else []
        if self._processes.first:
            arrays = {name: np.asarray(leaves[name]) for name in leaves.keys() - sharded.keys()}
            arrays["attempt"] = np.array(checkpoint.attempt)
            arrays["ledger_head"] = np.array(checkpoint.ledger_head)
            arrays["seconds"] = np.array(checkpoint.seconds)
            if part_records:
                arrays[_PARTS] = np.array(json.dumps(part_records))
            arrays[_DIGEST] = np.array(_digest(f"{name}.npz", arrays))

            write_atomically(
                self.folder / f"{name}.npz",
                lambda file: np.savez(file, allow_pickle=False, **arrays),
                mode=SECRET,  # the state may reveal the noise
                reserved=self.folder / _RESERVED,
            )
            self._destroy_old()

    def room(self, state: TrainState) -> dict[Path, int]:
        """Returns the bytes to reserve per file of this process."""
        import jax

        leaves = jax.tree.leaves(state)
        sharded = [leaf for leaf in leaves if _is_sharded(leaf)]
        shard_bytes = sum(
            shard.data.nbytes for leaf in sharded for shard in leaf.addressable_shards
        )
        unsharded_bytes = sum(leaf.nbytes for leaf in leaves if not _is_sharded(leaf))
        sizes = {self._reserved_part: shard_bytes} if sharded else {}
        if self._processes.first:
            sizes[self.folder / _RESERVED] = unsharded_bytes + (16 + len(leaves)) * _SLACK + 2**16
        return sizes

    def reserve(self, room: Mapping[Path, int]) -> None:
        """Reserves disk space for the next checkpoint.

        Args:
          room: Size in bytes by file, from `room`; existing files are left as they are.

        Raises:
          OSError: if the disk is full.
        """
        self._make_folder()
        for path, size in room.items():
            if not path.exists():
                reserve(path, size)

    @property
    def _reserved_part(self) -> Path:
        return self.folder / f"{_RESERVED}-{self._processes.index}"

    def _make_folder(self) -> None:
        with contextlib.suppress(FileExistsError):
            make_folder(self.folder, 0o700)
        self._refuse_link()

    def _save_parts(self, name: str, sharded: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Writes this process's shards; returns descriptions of all parts."""
        processes, digest, pieces = self._processes, hashlib.sha256(), []

        def write(file: IO[bytes]) -> None:
            for leaf, array in sharded.items():
                for shard in array.addressable_shards:
                    if shard.replica_id:  # a copy of a shard that is written elsewhere
                        continue
                    index = zip(shard.index, array.shape, strict=True)
                    pieces.append([leaf, [span.indices(n)[:2] for span, n in index], file.tell()])
                    digest.update(content := _bytes(shard.data))
                    file.write(content)

        part_name = f"{name}.part-{processes.index}-of-{processes.count}"
        path = self.folder / part_name
        write_atomically(path, write, mode=SECRET, reserved=self._reserved_part)
        described = {
            "name": part_name,
            "sha256": digest.hexdigest(),
            "pieces": pieces,
            "leaves": {leaf: [str(x.dtype), list(x.shape)] for leaf, x in sharded.items()},
        }
        return processes.gather(described)

    def _destroy_old(self) -> None:
        """Destroys all but the newest `KEPT` checkpoints, parts included."""
        paths = self._paths()
        kept_steps = {_step(path) for path in paths[:KEPT]}
        for path in sorted(self.folder.glob("[0-9]*"), reverse=True):
            # Another process may be writing a part of the next checkpoint.
            if _step(path) not in kept_steps and _step(path) < _step(paths[0]):
                destroy(path)

    def destroy_after(self, step: int) -> None:
        """Destroys the checkpoints of later steps, unfinished parts included."""
        for path in list(self.folder.glob("[0-9]*")):
            if _step(path) > step:
                destroy(path)

    def latest(self, like: TrainState) -> Checkpoint | None:
        """Returns the newest undamaged checkpoint; None without any.

        Args:
          like: State, or its shapes, with the structure, shapes and dtypes of the result.

        Raises:
          ValueError: if every checkpoint is damaged, the newest undamaged one is of another model
            or optimizer, or the folder is a symbolic link.
        """
        self._refuse_link()
        names = self._processes.share([path.name for path in self._paths()])
        paths = [self.folder / name for name in names]
        members: dict[str, Any]
        for path in paths:
            try:
                with np.load(path, allow_pickle=False) as saved:
                    members = {name: saved[name] for name in saved.files}
                if str(members.pop(_DIGEST)) != _digest(path.name, members):
                    raise ValueError(f"{path} is damaged")
                attempt = int(members.pop("attempt"))
                head, seconds = str(members.pop("ledger_head")), float(members.pop("seconds"))
                if _PARTS in members:
                    members |= self._read_parts(str(members.pop(_PARTS)))
            except DAMAGED:
                members = {}
            # If one process cannot read it, all processes try the checkpoint before.
            if all(self._processes.gather(bool(members))):
                return Checkpoint(_restore(members, like, path), attempt, head, seconds)
        if paths:
            raise ValueError(
                f"{self.folder}: every checkpoint is damaged; restore one from a copy, or remove "
                "them to begin again from the initial parameters"
            )
        return None

    def _read_parts(self, described: str) -> dict[str, PartedArray]:
        """Returns the arrays in parts; raises ValueError for a damaged part.

        Each process checks the SHA-256 of its share of the parts.
        """
        arrays: dict[str, PartedArray] = {}
        for number, record in enumerate(checked(parse_json(described.encode()), list[Any], _PARTS)):
            file = self.folder / checked(record["name"], str, "name")
            is_assigned = number % self._processes.count == self._processes.index
            if is_assigned and file_sha256(file) != record["sha256"]:
                raise ValueError(f"{file} is damaged")
            for leaf, (dtype, shape) in record["leaves"].items():
                arrays.setdefault(leaf, PartedArray(tuple(shape), np.dtype(dtype), []))
            for leaf, bounds, offset in record["pieces"]:
                index = tuple(slice(first, stop) for first, stop in bounds)
                arrays[leaf].pieces.append((index, file, offset))
        for leaf, array in arrays.items():
            sizes = [math.prod(_lengths(index)) for index, _, _ in array.pieces]
            if sum(sizes) != math.prod(array.shape):
                raise ValueError(f"{leaf} lacks some of its pieces")
        return arrays

    def latest_head(self) -> str | None:
        """Returns the newest readable checkpoint's ledger head, or None."""
        for path in self._paths():
            try:
                with np.load(path, allow_pickle=False) as saved:
                    return str(saved["ledger_head"])
            except DAMAGED:
                continue
        return None

    def remove(self) -> None:
        """Destroys the folder and all its checkpoints."""
        self._refuse_link()
        destroy(self.folder)

    def _refuse_link(self) -> None:
        """Raises ValueError for a link, whose target would outlive the run."""
        if self.folder.is_symlink():
            raise ValueError(
                f"{self.folder} is a symbolic link to {os.readlink(self.folder)}; move the "
                "folder itself here, in place of the link"
            )

    def _paths(self) -> list[Path]:
        """Returns the checkpoint files, newest first, without their parts."""
        return sorted(self.folder.glob("[0-9]*.npz"), reverse=True)


def _digest(name: str, arrays: Mapping[str, np.ndarray]) -> str:
    """Returns the SHA-256 of a checkpoint's name and all its arrays."""
    digest = hashlib.sha256(name.encode())
    for key, array in sorted(arrays.items()):
        # By kind and size: NumPy reads back a bfloat16 as two bytes without a meaning.
        kind = f"{array.dtype.kind}{array.dtype.itemsize}"
        digest.update(f"\n{key} {kind} {array.shape}\n".encode())
        digest.update(_bytes(array))
    return digest.hexdigest()


def _bytes(array: Any) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _step(path: Path) -> int:
    return int(path.name.partition(".")[0])


@dataclass(frozen=True)
class PartedArray:
    """Array in several files; indexing reads only the indexed entries."""

    shape: tuple[int, ...]
    dtype: np.dtype
    pieces: list[tuple[tuple[slice, ...], Path, int]]
    """Index range, file and byte offset of each disjoint piece."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[tuple(slice(None) for _ in self.shape)], dtype)

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        """Returns a copy of the entries at slices of step 1."""
        requested = [slice(*span.indices(n)) for span, n in zip(index, self.shape, strict=True)]
        entries = np.empty(_lengths(requested), self.dtype)
        for location, file, offset in self.pieces:
            common = [
                slice(max(a.start, b.start), min(a.stop, b.stop))
                for a, b in zip(requested, location, strict=True)
            ]
            if all(span.start < span.stop for span in common):
                piece = np.memmap(file, self.dtype, "r", offset, _lengths(location))
                entries[_within(common, requested)] = piece[_within(common, location)]
        return entries


def _lengths(index: Sequence[slice]) -> tuple[int, ...]:
    return tuple(span.stop - span.start for span in index)


def _within(index: Sequence[slice], outer: Sequence[slice]) -> tuple[slice, ...]:
    """Returns `index` relative to the start of the part at `outer`."""
    pairs = zip(index, outer, strict=True)
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in pairs)


def _is_sharded(leaf: Any) -> bool:
    """Returns True if no process holds the complete array."""
    import jax

    if not isinstance(leaf, jax.Array):
        return False
    return not (leaf.is_fully_addressable or leaf.is_fully_replicated)


def _restore(members: Mapping[str, Any], like: Any, path: Path) -> Any:
    import jax

    def leaf(key_path, expected):
        name = _LEAF + jax.tree_util.keystr(key_path)
        array = members.get(name)
        if array is None or array.shape != np.shape(expected):
            raise ValueError(
                f"{path} is of another model or optimizer: no {name} of shape {np.shape(expected)}"
            )
        dtype = np.dtype(expected.dtype)
        if isinstance(array, np.ndarray) and array.dtype.kind == "V":
            array = array.view(dtype)  # bfloat16 and its kin, to NumPy bytes without a meaning
        if array.dtype != dtype:
            raise ValueError(f"{path}: {name} is {array.dtype}, expected {dtype}")
        return array

    return jax.tree_util.tree_map_with_path(leaf, like)
