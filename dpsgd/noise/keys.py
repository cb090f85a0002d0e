"""Root secret of a run, and the keys derived from it.

All randomness of a run is a pure function of (root, attempt, stream, step, leaf). One root serves
one run, which claims it in memory and in its file: subtracting the outputs of two runs with the
same noise would cancel it. See docs/explanation/keys-and-claims-of-the-root-secret.md.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from dpsgd.files import SECRET, fsync_folder, open_own

ROOT_BYTES = 32
"""Length of the root secret, bytes."""

_HEADER = "dpsgd-root-key-v2"
_ORIGINS = {"entropy": False, "insecure-seed": True}  # how the file names `insecure`
_MAX_COORDINATE = 2**64 - 1
_CLAIM, _USE = "claim", "use"


class RootKey:
    """Root secret of a run; all randomness of the run derives from it.

    `from_entropy` creates a root (`from_insecure_seed` one without a guarantee), `save` stores it,
    `load` reads it. A root is never printed and never pickled.

    Attributes:
      insecure: True if the root comes from an integer seed. Such a seed can be searched, so a run
        under it has no privacy guarantee and says so beside every number.

    >>> RootKey.from_entropy()
    RootKey(<secret>, insecure=False)
    """

    __slots__ = (
        "_children",
        "_files",
        "_insecure",
        "_is_copy",
        "_process",
        "_run",
        "_secret",
        "_uses",
    )

    def __init__(self, secret: bytes, *, insecure: bool) -> None:
        """Stores the 32 bytes `secret`; prefer `from_entropy`, `from_insecure_seed` and `load`."""
        if len(secret) != ROOT_BYTES:
            raise ValueError(f"a root secret has {ROOT_BYTES} bytes, got {len(secret)}")
        self._secret = bytes(secret)
        self._insecure = bool(insecure)
        self._process = os.getpid()
        self._run: str | None = None
        self._uses: dict[str, str] = {}
        self._children: dict[str, RootKey] = {}
        self._files: tuple[Path, ...] = ()
        self._is_copy = False

    @property
    def is_copy(self) -> bool:
        """True if loaded from a copy of the file that its run claimed."""
        return self._is_copy

    @property
    def insecure(self) -> bool:
        """True if the root comes from an integer seed that can be searched."""
        return self._insecure

    @classmethod
    def from_entropy(cls) -> RootKey:
        """Returns 256 bits from the operating system's cryptographic generator."""
        return cls(os.urandom(ROOT_BYTES), insecure=False)

    @classmethod
    def from_insecure_seed(cls, seed: int) -> RootKey:
        """Returns the root of a reproducible run *without any privacy guarantee*.

        The hash spreads `seed` over all 256 bits, but adds no secrecy: an attacker tries the seeds.

        Args:
          seed: Integer in [0, 2**64).

        >>> RootKey.from_insecure_seed(7).insecure
        True

        Raises:
          ValueError: If `seed` is not an integer in that range.
        """
        message = _coordinate("insecure seed", seed)
        secret = hashlib.blake2b(message, digest_size=ROOT_BYTES, person=b"dpsgd insecure").digest()
        return cls(secret, insecure=True)

    def begin_run(self, run: str | None = None, uses: Mapping[str, str] | None = None) -> str:
        """Claims the root for a run, in memory and in its files.

        Every other run is refused from then on, except under an insecure root, which gives no
        guarantee and may repeat a run.

        Args:
          run: Name of the run, without a space; a new random name by default.
          uses: Digests of the run's inputs by name, both without a space; an input that is named
            again must have the same digest.

        Returns:
          The name of the run.

        Raises:
          ValueError: If another run has claimed the root, or this run with other uses; or the
            process was forked from the one that made the root.
          OSError: If the claim cannot be written.
        """
        run, uses = run or secrets.token_hex(16), uses or {}
        self._check_process()
        if self._insecure or (self._run == run and uses.items() <= self._uses.items()):
            return run
        self._check_claim(self._run, run)
        self._check_uses(self._uses, uses)
        for path in self._files:
            with contextlib.suppress(FileNotFoundError):  # removed: the root is in memory
                descriptor = open_own(path, os.O_RDWR | os.O_APPEND, SECRET)
                with os.fdopen(descriptor, "rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX)  # one process claims, others then read it
                    root, claim, used = _parse(file.read(), path)
                    if root != self:
                        continue  # another one's file has taken its place
                    self._check_claim(claim and claim[0], run)
                    self._check_uses(used, uses)
                    new = dict(uses.items() - used.items())
                    _append(descriptor, _notes(descriptor, run if claim is None else None, new))
        self._run = run
        self._uses.update(uses)
        return run

    def _check_process(self) -> None:
        if self._process != os.getpid() and not self._insecure:
            raise ValueError(
                f"process {os.getpid()} was forked from {self._process}, which made this root, and "
                "both would draw the same noise; take RootKey.from_entropy() in each process"
            )

    def _check_uses(self, known: Mapping[str, str], uses: Mapping[str, str]) -> None:
        if changed := [name for name in uses if known.get(name, uses[name]) != uses[name]]:
            raise ValueError(
                f"a run under this root and attempt had other {_words(changed[0])}, and the "
                "same noise, which their difference would be free of; take RootKey.from_entropy(), "
                "or another attempt"
            )

    def _check_claim(self, claim: str | None, run: str) -> None:
        if claim not in (None, run):
            raise ValueError(
                "a run was already begun under this root, and a second one would have the same "
                "noise, which their difference is free of; take RootKey.from_entropy() for each"
            )

    def hold(self) -> None:
        """Marks this root's files as originals, as their run has its own keys."""
        for path in self._files:
            if self._is_copy and self._run and not self._insecure:
                descriptor = open_own(path, os.O_RDWR | os.O_APPEND, SECRET)
                try:
                    _append(descriptor, _notes(descriptor, self._run))
                finally:
                    os.close(descriptor)
        self._is_copy = False

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the root to a new file that only its owner can access (0600).

        No root is ever overwritten. The file and its folder are fsynced before this returns.

        Raises:
          FileExistsError: If `path` exists.
          OSError: If the file cannot be written; no partial file remains.
        """
        path = Path(path).absolute()
        origin = next(name for name, insecure in _ORIGINS.items() if insecure == self._insecure)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, SECRET)
        except FileExistsError:
            raise FileExistsError(
                f"{path}: a file is already there, and a root key is never overwritten; "
                "choose another run folder, or resume this one"
            ) from None
        try:
            try:
                os.fchmod(descriptor, SECRET)  # whatever the umask and default ACLs made of it
                notes = "" if self._insecure else _notes(descriptor, self._run, self._uses)
                _append(descriptor, f"{_HEADER} {origin} {self._secret.hex()}\n{notes}")
            finally:
                os.close(descriptor)
        except BaseException:
            with contextlib.suppress(OSError):
                path.unlink()
            raise
        fsync_folder(path.parent)
        self._files += (path,)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> RootKey:
        """Reads a root that `save` wrote.

        Raises:
          FileNotFoundError: If there is no such file.
          PermissionError: If the file's mode lets others than its owner read, write or execute it.
          ValueError: If it is a link, has another name or another owner, is not a regular file, or
            not a complete root-key file.
        """
        path = Path(path).absolute()
        try:
            descriptor = open_own(path, os.O_RDONLY, 0o777)
        except FileNotFoundError:
            raise FileNotFoundError(
                f"{path}: no root key here; without it a run can be neither resumed nor repeated"
            ) from None
        with os.fdopen(descriptor, "rb") as file:
            mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
            if mode & 0o077:
                raise PermissionError(
                    f"{path}: others than its owner can use this root key (mode "
                    f"{mode:04o}), so the noise may not be secret; start a new run, "
                    f"or, if no other user read it, `chmod 600 {path}`"
                )
            root, claim, _ = _parse(file.read(), path)
            root._is_copy = claim is not None and claim[1] != _number(descriptor)
        root._files = (path,)
        return root

    @staticmethod
    def remove(path: str | os.PathLike[str]) -> None:
        """Overwrites the secret in a file and deletes `path`.

        All names of the file are overwritten with it. Earlier blocks that the file system keeps
        (snapshots, journals, flash memory) and copies remain. A missing file counts as removed.

        Raises:
          ValueError: If `path` is a link or no file of one's own; the secret is then elsewhere.
        """
        path = Path(path)
        with contextlib.suppress(FileNotFoundError):
            try:
                descriptor = open_own(path, os.O_RDWR, SECRET, names=0)
            except ValueError as error:
                raise ValueError(
                    f"the root secret was not removed: {error}, and remove it"
                ) from None
            try:
                os.pwrite(descriptor, bytes(os.fstat(descriptor).st_size), 0)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            path.unlink()

    def sampling_seed(self, attempt: int) -> int:
        """Returns the 256-bit seed of the sampling stream, for `numpy.random.SeedSequence`."""
        return int.from_bytes(self._derive("sampling", attempt, size=32), "little")

    def noise_key(self, attempt: int) -> np.ndarray:
        """Returns the key of the noise stream, uint32 `[4]`, for `dpsgd.core.gaussian`.

        Pass it to the compiled step as an argument: a constant is part of the program's text and
        caches.

        >>> RootKey.from_insecure_seed(7).noise_key(attempt=0).shape
        (4,)
        """
        return self._key("noise", attempt, words=4)

    def loss_key(self, attempt: int) -> np.ndarray:
        """Returns the key of the loss stream, uint32 `[2]`; privacy does not depend on it."""
        return self._key("loss", attempt, words=2)

    def child(self, purpose: str) -> RootKey:
        """Returns the root of another stream of this run.

        The sums after training are an example. The child's streams are independent of this root's
        and of other purposes'. It is in no file: this root derives it again. One object has one
        child per purpose, which remembers its uses.
        """
        self._check_process()
        if purpose in self._children:
            return self._children[purpose]
        secret = hashlib.blake2b(
            purpose.encode(), digest_size=ROOT_BYTES, key=self._secret, person=b"dpsgd child"
        ).digest()
        root = RootKey(secret, insecure=self._insecure)
        root._run = self._run
        self._children[purpose] = root
        return root

    def blind(self, text: str) -> str:
        """Returns a keyed digest of `text`, equal for equal texts.

        It looks random without the root; an unkeyed digest of private data would let anyone confirm
        a guess.
        """
        return hashlib.blake2b(
            text.encode(), digest_size=16, key=self._secret, person=b"dpsgd blind"
        ).hexdigest()

    def _key(self, stream: str, attempt: int, *, words: int) -> np.ndarray:
        return np.frombuffer(self._derive(stream, attempt, size=4 * words), "<u4").astype(np.uint32)

    def _derive(self, stream: str, attempt: int, *, size: int) -> bytes:
        self._check_process()
        return hashlib.blake2b(
            _coordinate("attempt", attempt),
            digest_size=size,
            key=self._secret,
            person=f"dpsgd {stream}".encode("ascii").ljust(hashlib.blake2b.PERSON_SIZE, b"\0"),
        ).digest()

    @classmethod
    def require(cls, root: Any) -> None:
        """Raises TypeError unless `root` is a `RootKey`."""
        if not isinstance(root, cls):
            raise TypeError(
                f"root is of type {type(root).__name__}; pass RootKey.from_entropy(), or "
                "RootKey.from_insecure_seed(seed) to repeat a run without a guarantee"
            )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RootKey):
            return NotImplemented
        same = hmac.compare_digest(self._secret, other._secret)
        return same and self._insecure == other._insecure

    # Equal keys must hash equally, but a hash value may be printed: it tells the kind alone.
    def __hash__(self) -> int:
        return hash((RootKey, self._insecure))

    def __repr__(self) -> str:
        return f"RootKey(<secret>, insecure={self._insecure})"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("a RootKey is never pickled or copied into another file; use RootKey.save")


def _coordinate(name: str, value: int) -> bytes:
    """Encodes one public coordinate of a derivation in 8 bytes, without collisions."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ValueError(f"{name} must be an integer, got {value!r}")
    if not 0 <= value <= _MAX_COORDINATE:
        raise ValueError(f"{name} must be in [0, 2**64), got {value}")
    return int(value).to_bytes(8, "little")


def _words(use: str) -> str:
    return use.rpartition(":")[2]


def _parse(content: bytes, path: Path) -> tuple[RootKey, tuple[str, str] | None, dict[str, str]]:
    """Returns the root in a file, its last claim (run and file number), and the uses."""
    lines = content.decode("ascii", errors="replace").split("\n")[
        :-1
    ]  # a torn last line is dropped
    words = lines[0].split() if lines else []
    notes = [line.split() for line in lines[1:]]
    # The message must not quote the file: it may hold most of a secret.
    if len(words) == 3 and words[0] == _HEADER and words[1] in _ORIGINS:
        with contextlib.suppress(ValueError):
            root = RootKey(bytes.fromhex(words[2]), insecure=_ORIGINS[words[1]])
            if all(len(note) == 3 and note[0] in (_CLAIM, _USE) for note in notes):
                claims = [(run, number) for kind, run, number in notes if kind == _CLAIM]
                uses = {name: value for kind, name, value in notes if kind == _USE}
                return root, claims[-1] if claims else None, uses
    raise ValueError(f"{path}: not a root key, or a damaged one; restore it from a copy")


def _notes(descriptor: int, run: str | None, uses: Mapping[str, str] | None = None) -> str:
    """Returns the lines that record a claim, if there is a run, and the uses."""
    claim = f"{_CLAIM} {run} {_number(descriptor)}\n" if run else ""
    return claim + "".join(f"{_USE} {name} {use}\n" for name, use in sorted((uses or {}).items()))


def _append(descriptor: int, lines: str) -> None:
    """Appends lines to an open file and syncs them to disk."""
    if not (line := lines.encode()):
        return
    complete_bytes = os.pread(descriptor, os.fstat(descriptor).st_size, 0).rfind(b"\n") + 1
    os.ftruncate(descriptor, complete_bytes)  # at most by a claim that a crash tore
    try:
        if os.write(descriptor, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(descriptor)
    except OSError:
        os.ftruncate(descriptor, complete_bytes)
        raise


def _number(descriptor: int) -> str:
    """Returns the inode of an open file, which tells it from its copies."""
    return str(os.fstat(descriptor).st_ino)
