"""Checks of the files that a command writes, before any work."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from dpsgd.files import check_writable
from experiments.cli.errors import require

PICTURES = (".png", ".pdf", ".svg")
"""Endings of pictures."""


def check(path: Path, endings: Sequence[str], option: str, *, overwrite: bool = False) -> None:
    """Refuses a file that must not or cannot be written.

    Args:
      path: File to write.
      endings: Allowed endings.
      option: Option that names the file.
      overwrite: Whether an existing file may be replaced.

    Raises:
      ValueError: For another ending.
      FileExistsError: If `path` exists and may not be replaced.
      OSError: If the file cannot be created.
      ModuleNotFoundError: For a picture, if matplotlib is not installed.
    """
    if endings is PICTURES:
        require("matplotlib")
    if path.suffix not in endings:
        *others, last = endings
        wanted = f"{', '.join(others)} or {last}" if others else last
        raise ValueError(f"{option} must end in {wanted}, got {path}")
    if os.path.lexists(path) and (not overwrite or path.is_dir()):
        mend = "" if path.is_dir() else ", or give --overwrite"
        raise FileExistsError(
            f"{path} exists already and is left as it is: name another {option}{mend}"
        )
    check_writable(path)
