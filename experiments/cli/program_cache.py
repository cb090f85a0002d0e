"""Compiled programs, kept for the next command in a folder that only its owner can write.

JAX keeps and finds them, by its own digest of a program, its options and JAX's version; each kind
of processor has a folder. A program holds no rows, keys or parameters: they are its arguments. But
a user who can write a file there runs code as the owner: a folder that others can write is not
used. The audit runs the very program that trains, be it compiled or kept.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

from dpsgd.processor import processor_digest

NOT_KEPT = "--no-program-cache"
"""The option, of every command, that neither keeps nor takes programs."""

MOST_BYTES = 2**30
"""Of all kept programs: those that were used last stay."""


def keep_programs(words: Sequence[str]) -> None:
    """Makes JAX, which is not imported yet, keep what it compiles.

    It does not where the user has named a folder to JAX, or `words` forbid it; where the folder
    cannot be made; and, with a line that says so, where other users can write to the folder.
    """
    environ = os.environ
    if NOT_KEPT in words or "JAX_COMPILATION_CACHE_DIR" in environ or os.name != "posix":
        return
    home = environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = Path(home) / "dpsgd" / "programs" / processor_digest()[:16]
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        open_to_others = [part for part in (folder, *folder.parents[:2]) if not _own(part)]
    except (OSError, RuntimeError):
        return
    if open_to_others:
        print(
            f"dpsgd: {open_to_others[0]} can be written by others, so no compiled program is kept: "
            f"make it yours alone (chmod 700), or give {NOT_KEPT}",
            file=sys.stderr,
        )
        return
    environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)
    for name, value in {
        "JAX_COMPILATION_CACHE_MAX_SIZE": MOST_BYTES,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": 0.1,
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": -1,
    }.items():
        environ.setdefault(name, str(value))


def _own(folder: Path) -> bool:
    """Returns whether a folder is one, belongs to this user, and no other user can write to it."""
    found = folder.lstat()
    return (
        stat.S_ISDIR(found.st_mode)
        and found.st_uid == os.geteuid()
        and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    )
