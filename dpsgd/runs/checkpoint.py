"""Saves and restores training states atomically.

A checkpoint is one file, fsynced and then renamed: the bytes of the state's arrays, and a manifest
that names them with their SHA-256. Pieces of sharded arrays that other processes hold lie in
further files (parts), which the manifest names. It also holds the ledger's head, but no key:
docs/explanation/checkpoints.md.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dpsgd.files import DAMAGED, SECRET, destroy, make_folder, parse_json, reserve, write_atomically
from dpsgd.runs.processes import Processes

if TYPE_CHECKING:
    from dpsgd.core.state import TrainState

KEPT = 2
"""Number of checkpoints on the disk, one of them for fallback."""

_SUFFIX = ".checkpoint"

_SLACK = 2**12
"""Most bytes of the manifest per array."""

_TAIL = 40
"""Bytes after the manifest: its SHA-256, and its length."""


class Checkpoint(NamedTuple):
    """Training state without pending noise, and its place in the run."""

    state: TrainState
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
        if checkpoint.state.pending:
            raise ValueError(
                "state has pending noise, which no checkpoint may hold: flush it first"
            )
        self._make_folder()
        processes, leaves = self._processes, _leaves(checkpoint.state)
        is_parted = any(map(_is_sharded, leaves.values()))
        if not (processes.first or is_parted):
            return
        step = f"{checkpoint.step:012d}"
        part_name = f"{step}.part-{processes.index}-of-{processes.count}"
        path = self.folder / (step + _SUFFIX if processes.first else part_name)
        content: dict[str, Any] = {"name": path.name, "pieces": []}

        def write(file: IO[bytes]) -> None:
            digest = hashlib.sha256()
            for leaf, array in leaves.items():
                for bounds, block in self._blocks(array):
                    content["pieces"].append([leaf, bounds, file.tell()])
                    flat = np.ascontiguousarray(block).reshape(-1)
                    digest.update(entries := flat.view(np.uint8).data)
                    file.write(entries)
            content.update(length=file.tell(), sha256=digest.hexdigest())
            if processes.first:  # once the parts of all others are on the disk
                facts = {
                    "ledger_head": checkpoint.ledger_head,
                    "seconds": checkpoint.seconds,
                    "leaves": {leaf: [str(x.dtype), list(x.shape)] for leaf, x in leaves.items()},
                    "parts": processes.gather(content) if is_parted else [content],
                }
                manifest = json.dumps(facts).encode()
                file.write(manifest + _manifest_digest(path, manifest))
                file.write(len(manifest).to_bytes(8, "little"))

        # The state may reveal the noise.
        write_atomically(path, write, mode=SECRET, reserved=self._reserved)
        if processes.first:
            self._destroy_old()
        else:
            processes.gather(content)

    def _blocks(self, array: Any) -> Iterator[tuple[list[list[int]], Any]]:
        """Yields bounds and entries of the pieces of an array that this process writes."""
        if _is_sharded(array):
            for shard in array.addressable_shards:
                if not shard.replica_id:  # else a copy of a shard that is written elsewhere
                    index = zip(shard.index, array.shape, strict=True)
                    yield [list(span.indices(size)[:2]) for span, size in index], shard.data
        elif self._processes.first:
            yield [[0, size] for size in array.shape], array

    def room(self, state: TrainState) -> int:
        """Returns the bytes to reserve for the file of this process."""
        leaves = _leaves(state).values()
        blocks = [block.nbytes for array in leaves for _, block in self._blocks(array)]
        slack = (16 + len(leaves)) * _SLACK + 2**16
        return sum(blocks) + slack if self._processes.first else sum(blocks)

    def reserve(self, room: int) -> None:
        """Reserves disk space for the next checkpoint.

        Args:
          room: Size in bytes, from `room`; an existing file is left as it is.

        Raises:
          OSError: if the disk is full.
        """
        self._make_folder()
        if room and not self._reserved.exists():
            reserve(self._reserved, room)

    @property
    def _reserved(self) -> Path:
        return self.folder / f".reserved-{self._processes.index}"

    def _make_folder(self) -> None:
        with contextlib.suppress(FileExistsError):
            make_folder(self.folder, 0o700)
        self._refuse_link()

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
        for path in (self.folder / name for name in names):
            manifest: Any = {}
            try:
                manifest = _manifest(path)
                arrays = self._arrays(manifest)
            except DAMAGED:
                arrays = {}
            # If one process cannot read it, all processes try the checkpoint before.
            if all(self._processes.gather(bool(arrays))):
                head, seconds = manifest["ledger_head"], manifest["seconds"]
                return Checkpoint(_restore(arrays, like, path), head, seconds)
        if names:
            raise ValueError(
                f"{self.folder}: every checkpoint is damaged; restore one from a copy, or remove "
                "them to begin again from the initial parameters"
            )
        return None

    def _arrays(self, manifest: Any) -> dict[str, PartedArray]:
        """Returns the arrays of a manifest; raises ValueError for a damaged part.

        Each process checks the SHA-256 of process 0's arrays, and of its share of the parts.
        """
        arrays = {
            leaf: PartedArray(tuple(shape), np.dtype(dtype), [])
            for leaf, (dtype, shape) in manifest["leaves"].items()
        }
        for number, described in enumerate(manifest["parts"]):
            file, length = self.folder / described["name"], described["length"]
            is_assigned = number % self._processes.count in (0, self._processes.index)
            if length and is_assigned:
                stored = np.memmap(file, np.uint8, "r", shape=length)
                if hashlib.sha256(stored.data).hexdigest() != described["sha256"]:
                    raise ValueError(f"{file} is damaged")
            for leaf, bounds, offset in described["pieces"]:
                index = tuple(slice(*bound) for bound in bounds)
                arrays[leaf].pieces.append((index, file, offset))
        return arrays

    def latest_head(self) -> str | None:
        """Returns the newest readable checkpoint's ledger head, or None."""
        for path in self._paths():
            with contextlib.suppress(*DAMAGED):
                return str(_manifest(path)["ledger_head"])
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
        return sorted(self.folder.glob(f"[0-9]*{_SUFFIX}"), reverse=True)


def _manifest(path: Path) -> Any:
    """Returns the manifest of a checkpoint; raises an error of `DAMAGED` if it is not whole."""
    with path.open("rb") as file:
        file.seek(-_TAIL, os.SEEK_END)
        tail = file.read()
        length = int.from_bytes(tail[-8:], "little")
        file.seek(-_TAIL - length, os.SEEK_END)
        content = file.read(length)
    if _manifest_digest(path, content) != tail[:-8]:
        raise ValueError(f"{path} is damaged")
    return parse_json(content)


def _manifest_digest(path: Path, content: bytes) -> bytes:
    """Returns the SHA-256 of a checkpoint's name and its manifest."""
    return hashlib.sha256(path.name.encode() + content).digest()


def _leaves(state: TrainState) -> dict[str, Any]:
    """Returns the arrays of a state by key path."""
    import jax

    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(key_path): leaf for key_path, leaf in leaves}


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


def _restore(arrays: dict[str, PartedArray], like: Any, path: Path) -> Any:
    import jax

    def leaf(key_path, expected):
        name, dtype = jax.tree_util.keystr(key_path), np.dtype(expected.dtype)
        array = arrays.get(name)
        if array is None or array.shape != np.shape(expected):
            raise ValueError(
                f"{path} is of another model or optimizer: no {name} of shape {np.shape(expected)}"
            )
        if array.dtype != dtype:
            raise ValueError(f"{path}: {name} is {array.dtype}, expected {dtype}")
        return array if array.pieces[1:] else np.asarray(array)

    return jax.tree_util.tree_map_with_path(leaf, like)
