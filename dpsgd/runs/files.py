"""Files that are whole or absent, also after the machine itself goes down."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any


def write_atomically(path: Path, write: Callable[[IO[bytes]], Any]) -> None:
    """Gives `path` the content that `write` writes, all of it or none, and durably.

    The content goes to a temporary file beside it, which is fsynced and then renamed; the folder is
    fsynced, too, since it is the folder that holds the name. The temporary file is locked: of two
    processes that write one file, one does. What a process left that died is written over.

    Args:
      path: File to make, or to replace.
      write: Called once with the temporary file, open for writing bytes.

    Raises:
      OSError: if it cannot be written, or another process is at it; what was at `path` before is
        still there.
    """
    unfinished = path.with_name(f".{path.name}.unfinished")
    with _locked(unfinished) as file:
        try:
            file.truncate()
            write(file)
            file.flush()
            os.fsync(file.fileno())
            os.replace(unfinished, path)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
    fsync_folder(path.parent)


def _locked(path: Path) -> IO[bytes]:
    """Opens the file `path` for this process alone, until it is closed."""
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # It may have been finished, and renamed, between the opening and the locking.
        if not (path.exists() and os.path.samestat(os.fstat(file.fileno()), os.stat(path))):
            raise BlockingIOError
    except BlockingIOError:
        file.close()
        raise BlockingIOError(f"another process is writing {path}") from None
    return file


def fsync_folder(path: Path) -> None:
    """Waits until the names in the folder `path` are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def parse_json(content: bytes) -> Any:
    """Returns the value that JSON text stands for.

    Raises:
      ValueError: if it is not JSON (to which NaN and infinity do not belong), or not UTF-8.
    """
    try:
        return json.loads(content.decode(), parse_constant=_refuse)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
