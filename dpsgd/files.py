"""Files that are whole or absent, also after the machine itself goes down, and the owner's alone.

Whatever the umask is, only the owner writes files that are made here, and only the owner reads
those made as `SECRET`; a stricter umask makes it stricter.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
import struct
import tempfile
import tokenize
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

PUBLIC = 0o644
"""Largest mode of a file."""

SECRET = 0o600
"""For the owner alone."""


DAMAGED = (
    OSError, EOFError, ValueError, KeyError, TypeError, OverflowError, RuntimeError, SyntaxError,
    struct.error, tokenize.TokenError, zipfile.BadZipFile, zlib.error,
)  # fmt: skip
"""What NumPy and zipfile raise on damaged bytes, by the field that is hit."""


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of writing that carry no name of a file."""


def check_writable(path: Path) -> None:
    """Raises OSError, which names `path`, if nothing can be made there: tried in the folder above.

    The nearest that is there: others are made with what is written.
    """
    above = next(folder for folder in path.absolute().parents if os.path.lexists(folder))
    try:
        os.rmdir(tempfile.mkdtemp(prefix=f".{path.name}.unfinished-", dir=above))
    except OSError as error:
        raise OSError(f"{path} cannot be written: {above}: {error.strerror}") from None


def write_atomically(path: Path, write: Callable[[IO[bytes]], Any], *, mode: int = PUBLIC) -> None:
    """Gives `path` the content that `write` writes, all of it or none, and durably.

    The content goes to a temporary file beside it, which is fsynced and then renamed; the folder is
    fsynced, too, since it is the folder that holds the name. The temporary file is locked: of two
    processes that write one file, one does. What a process left that died is written over.

    Args:
      path: File to make, or to replace.
      write: Called once with the temporary file, open for writing bytes.
      mode: Its largest mode.

    Raises:
      OSError: if it cannot be written, or another process is at it; what was at `path` before is
        still there.
    """
    unfinished = path.with_name(f".{path.name}.unfinished")
    with _locked(unfinished, mode) as file:
        try:
            file.truncate()
            write(file)
            file.flush()
            os.fsync(file.fileno())
            os.replace(unfinished, path)
        except BaseException as error:
            unfinished.unlink(missing_ok=True)
            if isinstance(error, OSError) and error.errno in _FULL and error.filename is None:
                raise OSError(error.errno, os.strerror(error.errno), os.fspath(path)) from error
            raise
    fsync_folder(path.parent)


def open_own(path: Path, flags: int, mode: int = PUBLIC, *, names: int = 1) -> int:
    """Opens a file that belongs to this user, has this one name and is no link; its descriptor.

    What lies elsewhere would outlive what is done at `path`, and what has another name or another
    owner is in another's hands too.

    Args:
      path: Of the file.
      flags: As for `os.open`.
      mode: Its largest mode.
      names: How many it may have; 0 for any number.

    Raises:
      ValueError: if there is something else; one line that says what to do.
      OSError: if it cannot be opened.
    """
    try:
        # A named pipe in the file's place must not hang the process.
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ValueError(
                f"{path} is a symbolic link to {os.readlink(path)}, and must be the file itself: "
                "move that here, in place of the link"
            ) from None
        if error.errno in (errno.ENXIO, errno.EISDIR):
            raise ValueError(f"{path} must be a regular file") from None
        raise
    try:
        found = os.fstat(descriptor)  # of the opened file: no race with a rename
        if not stat.S_ISREG(found.st_mode):
            raise ValueError(f"{path} must be a regular file")
        if found.st_uid != os.geteuid():
            raise ValueError(
                f"{path} belongs to user {found.st_uid}, and not to user {os.geteuid()} who opens "
                f"it: continue as that user, or `chown {os.geteuid()} {path}` if none other used it"
            )
        if names and found.st_nlink > names:
            raise ValueError(
                f"{path} has {found.st_nlink} names (hard links), and must have this one: remove "
                f"the others, or `cp {path} {path}.own && mv {path}.own {path}` to part them"
            )
        if surplus := stat.S_IMODE(found.st_mode) & ~(mode | 0o700):
            os.fchmod(descriptor, stat.S_IMODE(found.st_mode) & ~surplus)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def make_folder(path: Path, mode: int = 0o755) -> None:
    """Makes the folder `path`, and those above that are missing, which only the owner writes in.

    Raises:
      FileExistsError: if it is there.
    """
    if not path.parent.exists():
        with contextlib.suppress(FileExistsError):  # of another process
            make_folder(path.parent)
    path.mkdir(mode=mode)


def destroy(path: Path) -> None:
    """Overwrites and removes the file `path`, or the folder with all that is in it.

    What is gone is destroyed already, so that a process which dies in the midst of it can be
    followed by another. What a file system keeps of earlier blocks (snapshots, journals, flash
    memory) is beyond it, and so are copies. A link is removed, and not followed.

    Raises:
      OSError: if it cannot be overwritten or removed.
    """
    if path.is_dir() and not path.is_symlink():
        for inner in list(path.iterdir()):
            destroy(inner)
        path.rmdir()
        return
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISREG(path.lstat().st_mode):
            with open(path, "r+b", buffering=0) as file:
                left = os.fstat(file.fileno()).st_size
                while left > 0:
                    left -= file.write(bytes(min(left, 1 << 20)))
                os.fsync(file.fileno())
        path.unlink()


def _locked(path: Path, mode: int) -> IO[bytes]:
    """Opens the file `path` for this process alone, until it is closed."""
    file = os.fdopen(open_own(path, os.O_RDWR | os.O_CREAT, mode), "r+b")
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
