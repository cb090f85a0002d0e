"""Cache of compiled programs, in a folder that only its owner can write.

JAX stores programs by its digest of a program, its options and JAX's version; each processor type
has a folder. A program contains the constants that its functions close over. Rows, keys and
parameters of a run are arguments, and never in it. Whoever can write a file there can run code as
the owner, so a folder that others can write or replace is not used. The audit runs the same program
that trains, whether compiled or cached.
"""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

from dpsgd.files import make_folder
from dpsgd.processor import processor_digest

NOT_KEPT = "JAX_ENABLE_COMPILATION_CACHE"
"""JAX's environment variable; "false" disables the cache."""

MOST_BYTES = 2**30
"""Largest size of the cache in bytes; the least recently used programs are deleted."""


def keep_programs() -> None:
    """Configures JAX's program cache, before JAX is imported.

    Changes nothing if the user has set JAX's cache folder or `NOT_KEPT`, or if the folder cannot be
    created. If other users can write to the folder, prints a warning and leaves the cache off.
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
    own_paths = [folder, *folder.parents[:2]]
    unsafe = [path for path in own_paths if not _safe(path, own=True)]
    unsafe += [path for path in folder.parents[2:] if not _safe(path, own=False)]
    unsafe += [file for file in folder.iterdir() if not _safe(file, own=True)]
    if unsafe:
        print(
            f"dpsgd: compiled programs are not cached, because other users can write or replace "
            f"{unsafe[0]}: remove it or restrict its permissions, or set {NOT_KEPT}=false",
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
    """Returns whether only this user (and root, unless `own`) can write or replace a path."""
    try:
        status = path.lstat()
    except FileNotFoundError:  # removed by another command, to make room
        return True
    owners = {os.geteuid()} if own else {os.geteuid(), 0}
    open_to_others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    sticky = status.st_mode & stat.S_ISVTX and not own
    return (
        not stat.S_ISLNK(status.st_mode)
        and status.st_uid in owners
        and (not open_to_others or bool(sticky))
    )
