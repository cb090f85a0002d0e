"""Checkpoints: a training state that is whole and on the disk, or not there at all.

Each is one `.npz` file, made under a temporary name, fsynced and renamed, with the folder fsynced;
its members carry the CRC-32 checksums of the zip format, which reading verifies. The newest two are
kept, and one that is damaged gives way to the one before.

Why not orbax-checkpoint: it renames a whole folder into place, but (0.12.8, by its system calls) it
fsyncs the arrays alone, and neither its metadata and commit marker before the rename nor the folder
above after it. After a power failure the newest checkpoint may be there without its metadata, or
not at all. To fsync its dozen files behind it, and to tell which of them are torn, would be more
code than this, and more to believe than one file with one rename.

A checkpoint holds the state and the head of the ledger at its time, by which a ledger that was
rolled back is recognised. It holds no key: see `dpsgd.noise.keys`. But what noise needs from step
to step, if anything, is as secret as one, so that only the owner can read the file; the guarantee
covers the rest of the state.
"""

from __future__ import annotations

import contextlib
import os
import struct
import tokenize
import zipfile
import zlib
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple

import numpy as np

from dpsgd.files import SECRET, destroy, make_folder, write_atomically

if TYPE_CHECKING:
    from dpsgd.training.algorithm import TrainState

KEPT = 2
"""How many checkpoints stay: the newest, and one to fall back to."""

DAMAGED = (
    OSError, EOFError, ValueError, KeyError, TypeError, OverflowError, RuntimeError, SyntaxError,
    struct.error, tokenize.TokenError, zipfile.BadZipFile, zlib.error,
)  # fmt: skip
"""What NumPy and zipfile raise on damaged bytes, by the field that is hit."""
_LEAF = "state"


class Checkpoint(NamedTuple):
    """Where a run can go on.

    The state's step says how far it came; a batch is a function of the seed and the step, so
    nothing else is needed, and going on costs the same after one step as after a million.
    """

    state: TrainState
    ledger_head: str
    """Hash of the ledger's last line when this was written."""
    seconds: float
    """Time that was spent on training so far."""


class Checkpoints:
    """The folder of a run's checkpoints, named by their step."""

    def __init__(self, folder: Path):
        self.folder = folder

    def save(self, checkpoint: Checkpoint) -> None:
        """Writes `checkpoint`, and then destroys all but the newest two.

        Raises:
          OSError: if it cannot be written; the ones before are still there.
        """
        import jax

        with contextlib.suppress(FileExistsError):
            make_folder(self.folder, 0o700)
        self._refuse_link()
        arrays = {
            _LEAF + jax.tree_util.keystr(at): np.asarray(leaf)
            for at, leaf in jax.tree_util.tree_leaves_with_path(checkpoint.state)
        }
        arrays["ledger_head"] = np.array(checkpoint.ledger_head)
        arrays["seconds"] = np.array(checkpoint.seconds)
        path = self.folder / f"{int(checkpoint.state.step):012d}.npz"

        def write(file: IO[bytes]) -> None:
            np.savez(file, allow_pickle=False, **arrays)

        write_atomically(path, write, mode=SECRET)  # the state may hold what subtracts noise
        for old in self._paths()[KEPT:]:
            destroy(old)

    def latest(self, like: TrainState) -> Checkpoint | None:
        """Returns the newest checkpoint that is not damaged, or None if there never was one.

        Args:
          like: A state of the same structure, shapes and dtypes.

        Raises:
          ValueError: if all are damaged, or if they are of another model or optimizer.
        """
        self._refuse_link()
        paths = self._paths()
        for path in paths:
            try:
                with np.load(path, allow_pickle=False) as saved:
                    members = {name: saved[name] for name in saved.files}
                head, seconds = str(members.pop("ledger_head")), float(members.pop("seconds"))
            except DAMAGED:
                continue
            return Checkpoint(_restore(members, like, path), head, seconds)
        if paths:
            raise ValueError(
                f"{self.folder}: every checkpoint is damaged; restore one from a copy, or remove "
                "them to begin again from the initial parameters"
            )
        return None

    def latest_head(self) -> str | None:
        """Returns the ledger's head in the newest checkpoint that can be read; None without one."""
        for path in self._paths():
            try:
                with np.load(path, allow_pickle=False) as saved:
                    return str(saved["ledger_head"])
            except DAMAGED:
                continue
        return None

    def remove(self) -> None:
        """Destroys all checkpoints, and the folder."""
        self._refuse_link()
        destroy(self.folder)

    def _refuse_link(self) -> None:
        """Raises ValueError if the folder lies elsewhere: there checkpoints outlive their run."""
        if self.folder.is_symlink():
            raise ValueError(
                f"{self.folder} is a symbolic link to {os.readlink(self.folder)}, and must be the "
                "folder itself: move that here, in place of the link"
            )

    def _paths(self) -> list[Path]:
        """Whole files, newest first; what has not got its name yet does not match."""
        return sorted(self.folder.glob("[0-9]*.npz"), reverse=True)


def _restore(members: dict[str, np.ndarray], like: TrainState, path: Path) -> TrainState:
    import jax

    def leaf(at, wanted):
        name = _LEAF + jax.tree_util.keystr(at)
        array = members.get(name)
        if array is None or array.shape != np.shape(wanted):
            raise ValueError(
                f"{path} is of another model or optimizer: no {name} of shape {np.shape(wanted)}"
            )
        dtype = np.dtype(wanted.dtype)
        if array.dtype.kind == "V":  # bfloat16 and its kin, to NumPy bytes without a meaning
            array = array.view(dtype)
        if array.dtype != dtype:
            raise ValueError(f"{path}: {name} is {array.dtype}, and the model needs {dtype}")
        return array

    return jax.tree_util.tree_map_with_path(leaf, like)
