"""Files that a command is asked to write: what is wrong with them is said before any work."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from dpsgd.files import check_writable
from experiments.cli.errors import require

PICTURES = (".png", ".pdf", ".svg")
"""Endings of pictures, which name their formats."""


def check(path: Path, endings: Sequence[str], option: str, *, overwrite: bool = False) -> None:
    """Refuses a file that is not to be written, or could not be.

    Raises:
      ValueError: for another ending.
      FileExistsError: if there is something that may not be replaced.
      OSError: if it cannot be made there.
      ModuleNotFoundError: for a picture, if there is nothing to draw with.
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
