"""Files written atomically and durably, for their owner alone.

With any umask only the owner writes these files, and only the owner reads `SECRET` ones; a stricter
umask applies as well.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
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
"""Default mode of a file, before the umask."""

SECRET = 0o600
"""Mode of a file that only its owner reads."""


DAMAGED = (
    OSError, EOFError, ValueError, KeyError, TypeError, OverflowError, RuntimeError, SyntaxError,
    struct.error, tokenize.TokenError, zipfile.BadZipFile, zlib.error,
)  # fmt: skip
"""Errors of NumPy and zipfile on damaged bytes."""


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a full disk, which come without a file name."""


def check_writable(path: Path) -> None:
    """Raises OSError unless `path` can be created.

    It tries in the nearest existing folder; missing ones are created with the content.
    """
    parents = path.absolute().parents or (path,)  # the root has none
    above = next(folder for folder in parents if os.path.lexists(folder))
    try:
        os.rmdir(tempfile.mkdtemp(prefix=f".{path.name}.unfinished-", dir=above))
    except OSError as error:
        raise OSError(f"{path} cannot be written: {above}: {error.strerror}") from None


def reserve(path: Path, size: int) -> None:
    """Allocates disk space to a file, where the system can.

    Only the owner can read the file.

    Args:
      path: File to create.
      size: Size in bytes.

    Raises:
      OSError: If there is no room; nothing is then left.
    """
    if not hasattr(os, "posix_fallocate"):
        return
    descriptor = open_own(path, os.O_RDWR | os.O_CREAT, SECRET)
    try:
        os.posix_fallocate(descriptor, 0, max(1, size))
    except BaseException as error:
        path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise OSError(error.errno, os.strerror(error.errno or 0), os.fspath(path)) from None
        raise
    finally:
        os.close(descriptor)


def unfinished_path(path: Path) -> Path:
    """Returns the path of `write_atomically`'s temporary file.

    >>> unfinished_path(Path("run/report.json")).name
    '.report.json.unfinished'
    """
    return path.with_name(f".{path.name}.unfinished")


def write_atomically(
    path: Path,
    write: Callable[[IO[bytes]], Any],
    *,
    mode: int = PUBLIC,
    reserved: Path | None = None,
) -> None:
    """Writes the file `path` atomically and durably.

    The content goes to a temporary file beside it, which is fsynced and then renamed; the folder,
    which holds the name, is fsynced, too. The temporary file is locked, so that only one of two
    processes writes. The remains of a dead process are overwritten.

    Args:
      path: File to create or replace.
      write: Function of the temporary file, open for writing bytes; called once.
      mode: Mode of the file, before the umask.
      reserved: File from `reserve`, whose place on the disk is used if it is there.

    Raises:
      OSError: If it cannot be written, or another process is writing it; `path` is then unchanged.
    """
    unfinished = unfinished_path(path)
    used = reserved is not None and reserved.exists()
    if reserved is not None and used:
        os.replace(reserved, unfinished)
    with _open_locked(unfinished, mode) as file:
        try:
            if not used:
                file.truncate()
            write(file)
            file.flush()
            file.truncate()
            os.fsync(file.fileno())
            os.replace(unfinished, path)
        except BaseException as error:
            unfinished.unlink(missing_ok=True)
            if isinstance(error, OSError) and error.errno in FULL and error.filename is None:
                raise OSError(error.errno, os.strerror(error.errno), os.fspath(path)) from error
            raise
    fsync_folder(path.parent)


def append_line(descriptor: int, line: bytes) -> None:
    """Appends a line to a file, durably on return.

    Raises:
      OSError: If it cannot be written; the file is then unchanged.
    """
    length = os.fstat(descriptor).st_size
    try:
        # One call: the system writes a line of this length whole, or (disk full) in part.
        if os.write(descriptor, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(descriptor)
    except OSError:
        os.ftruncate(descriptor, length)
        raise


def open_own(path: Path, flags: int, mode: int = PUBLIC) -> int:
    """Opens a regular file of this user; returns its descriptor.

    A link would leave the content elsewhere, and another name or owner gives others access.

    Args:
      path: Path of the file.
      flags: Flags of `os.open`.
      mode: Largest mode of the file.

    Raises:
      ValueError: If `path` is something else; the message states the remedy.
      OSError: If it cannot be opened.
    """
    try:
        # A named pipe in the file's place must not hang the process.
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ValueError(
                f"{path} is a symbolic link to {os.readlink(path)}; move the file itself here, in "
                "place of the link"
            ) from None
        if error.errno in (errno.ENXIO, errno.EISDIR):
            raise ValueError(f"{path} must be a regular file") from None
        raise
    try:
        status = os.fstat(descriptor)  # of the opened file: no race with a rename
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{path} must be a regular file")
        if status.st_uid != os.geteuid():
            raise ValueError(
                f"{path} belongs to user {status.st_uid}, not to user {os.geteuid()} who opens it: "
                f"continue as that user, or `chown {os.geteuid()} {path}` if none other used it"
            )
        if status.st_nlink > 1:
            raise ValueError(
                f"{path} has {status.st_nlink} names (hard links), and must have one: remove the "
                f"others, or copy it by `cp {path} {path}.own && mv {path}.own {path}`"
            )
        if surplus := stat.S_IMODE(status.st_mode) & ~(mode | 0o700):
            os.fchmod(descriptor, stat.S_IMODE(status.st_mode) & ~surplus)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def make_folder(path: Path, mode: int = 0o755) -> None:
    """Creates a folder, writable by the owner alone.

    Args:
      path: Folder; missing parents are created as well.
      mode: Mode of the folder, before the umask.

    Raises:
      FileExistsError: If `path` exists.
    """
    if not path.parent.exists():
        with contextlib.suppress(FileExistsError):  # of another process
            make_folder(path.parent)
    path.mkdir(mode=mode)


def destroy(path: Path) -> None:
    """Overwrites and removes a file or folder.

    Missing files count as destroyed, so that another process can follow one that died. Earlier
    blocks that the file system keeps (snapshots, journals, flash memory) and copies remain. A link
    is removed, and not followed.

    Raises:
      OSError: If it cannot be overwritten or removed.
    """
    if path.is_dir() and not path.is_symlink():
        for inner in list(path.iterdir()):
            destroy(inner)
        path.rmdir()
        return
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISREG(path.lstat().st_mode):
            with open(path, "r+b", buffering=0) as file:
                remaining = os.fstat(file.fileno()).st_size
                while remaining > 0:
                    remaining -= file.write(bytes(min(remaining, 1 << 20)))
                os.fsync(file.fileno())
        path.unlink()


def lock(descriptor: int, path: Path) -> None:
    """Locks an open file for this process.

    Args:
      descriptor: Descriptor of the file.
      path: Path of the file, for messages.

    Raises:
      BlockingIOError: If another process has locked it.
      OSError: If its file system has no locks; the line names the file.

    The lock ends when the file is closed.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        reason = f"{error.strerror}; use a file system with locks (flock)"
        raise OSError(error.errno, reason, os.fspath(path)) from None


def _open_locked(path: Path, mode: int) -> IO[bytes]:
    """Opens a file for this process alone, until it is closed."""
    file = os.fdopen(open_own(path, os.O_RDWR | os.O_CREAT, mode), "r+b")
    try:
        lock(file.fileno(), path)
        # It may have been finished, and renamed, between the opening and the locking.
        if not (path.exists() and os.path.samestat(os.fstat(file.fileno()), os.stat(path))):
            raise BlockingIOError
    except BlockingIOError:
        file.close()
        raise BlockingIOError(f"another process is writing {path}") from None
    except BaseException:
        file.close()
        raise
    return file


def fsync_folder(path: Path) -> None:
    """Waits until a folder's file names are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_sha256(path: Path) -> str:
    """Returns the SHA-256 of a file, in hexadecimal.

    >>> file_sha256(Path(os.devnull))[:8]
    'e3b0c442'
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def parse_json(content: bytes) -> Any:
    """Returns the value of a JSON text.

    >>> parse_json(b'{"a": [1, 2]}')
    {'a': [1, 2]}

    Raises:
      ValueError: If it is not JSON (NaN and infinity are not), or not UTF-8.
    """
    try:
        return json.loads(content.decode(), parse_constant=_refuse)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
