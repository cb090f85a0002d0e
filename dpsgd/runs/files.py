"""Files that are whole or absent, also after the machine itself goes down."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any


def write_atomically(path: Path, write: Callable[[IO[bytes]], Any]) -> None:
    """Gives `path` the content that `write` writes, all of it or none, and durably.

    The content goes to a temporary file beside it, which is fsynced and then renamed; the folder is
    fsynced, too, since it is the folder that holds the name.

    Args:
      path: File to make, or to replace.
      write: Called once with the temporary file, open for writing bytes.

    Raises:
      OSError: if it cannot be written; what was at `path` before is still there.
    """
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        with open(unfinished, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


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
