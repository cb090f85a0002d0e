"""Checks of a command's output files, before any work."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from dpsgd.files import check_writable
from experiments.cli.errors import require

PICTURES = (".png", ".pdf", ".svg")
"""File endings of pictures."""


def check(path: Path, endings: Sequence[str], option: str, *, overwrite: bool = False) -> None:
    """Checks that a file may and can be written.

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

    >>> check(Path("table.txt"), (".csv", ".parquet"), "--out")
    Traceback (most recent call last):
    ValueError: --out must end in .csv or .parquet, got table.txt
    """
    if endings is PICTURES:
        require("matplotlib")
    if path.suffix not in endings:
        *first_endings, last = endings
        listed_endings = f"{', '.join(first_endings)} or {last}" if first_endings else last
        raise ValueError(f"{option} must end in {listed_endings}, got {path}")
    if os.path.lexists(path) and (not overwrite or path.is_dir()):
        advice = "" if path.is_dir() else ", or give --overwrite"
        raise FileExistsError(f"{path} exists already: name another {option}{advice}")
    check_writable(path)
