"""Compiled programs, kept for the next command in a folder that only its owner can write.

JAX keeps and finds them, by its own digest of a program, its options and JAX's version; each kind
of processor has a folder. A program holds what its functions close over, and no rows, keys or
parameters of a run: they are its arguments. A user who can write a file there runs code as the
owner: a folder that others can write, or replace, is not used. The audit runs the very program
that trains, be it compiled or kept.
"""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

from dpsgd.files import make_folder
from dpsgd.processor import processor_digest

NOT_KEPT = "JAX_ENABLE_COMPILATION_CACHE"
"""JAX's own variable: "false" neither keeps nor takes programs."""

MOST_BYTES = 2**30
"""Of all kept programs: those that were used last stay."""


def keep_programs() -> None:
    """Makes JAX, which is not imported yet, keep what it compiles.

    It does not where the user has named a folder to JAX, or forbidden it by `NOT_KEPT`; where the
    folder cannot be made; and, with a line that says so, where other users can write to it.
    """
    environ = os.environ
    named = {NOT_KEPT, "JAX_COMPILATION_CACHE_DIR"} & environ.keys()
    if named or os.name != "posix":
        return
    home = environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = Path(home).resolve() / "dpsgd" / "programs" / processor_digest()[:16]
    try:
        make_folder(folder, 0o700)
    except OSError:
        if not folder.is_dir():
            return
    own = [folder, *folder.parents[:2]]
    unsafe = [part for part in own if not _safe(part, own=True)]
    unsafe += [part for part in folder.parents[2:] if not _safe(part, own=False)]
    unsafe += [file for file in folder.iterdir() if not _safe(file, own=True)]
    if unsafe:
        print(
            f"dpsgd: other users can or could write {unsafe[0]}, so no compiled program is kept: "
            f"remove it, or what others can write above it, or set {NOT_KEPT}=false",
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


def _safe(path: Path, *, own: bool) -> bool:
    """Returns whether this user alone, or `own` aside the system too, can write or replace it."""
    try:
        found = path.lstat()
    except FileNotFoundError:  # removed by another command, to make room
        return True
    owners = {os.geteuid()} if own else {os.geteuid(), 0}
    open_to_others = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    sticky = found.st_mode & stat.S_ISVTX and not own
    return (
        not stat.S_ISLNK(found.st_mode)
        and found.st_uid in owners
        and (not open_to_others or bool(sticky))
    )
