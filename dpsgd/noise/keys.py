"""The root secret of a run, and every key that is derived from it.

All randomness of a run is a pure function of (root, generation, stream, step, leaf):

- the *root* is 256 bits from the operating system, kept in its own file that only its owner can
  read. A root that can be searched removes every guarantee: whoever guesses it subtracts the noise;
- the *generation* separates runs of changed code, data or configuration over the same root, whose
  noise would cancel in a difference if it were shared;
- the *stream* is one of ``sampling`` (who takes part), ``noise``, ``secure`` (noise as well) and
  ``loss`` (dropout: what is random within one example, see ``dpsgd.gradients.losses``). Initial
  parameters are public, and come from a public seed of their own;
- *step* and *leaf* enter inside the compiled step, as counters (``dpsgd.noise.gaussian``).

Each derivation is BLAKE2b with the root as its key, the stream as its personalisation string and
the other coordinates as its message (Aumasson, Neves, Wilcox-O'Hearn, Winnerlein, "BLAKE2: simpler,
smaller, fast as MD5", 2013; RFC 7693). Keyed BLAKE2b is a pseudorandom function, so the outputs for
different coordinates are, to anybody who does not hold the root, independent and uniform, and none
of them leads back to the root.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import stat
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

ROOT_BYTES = 32
"""Length of the root secret: 256 bits."""

_HEADER = "dpsgd-root-key-v1"
_ORIGINS = {"entropy": False, "insecure-seed": True}  # how the file names `insecure`
_MAX_COORDINATE = 2**64 - 1


class RootKey:
    """The root secret of a run; everything random in the run is derived from it.

    Make one by `from_entropy` (or, giving up the guarantee, `from_insecure_seed`), keep it by
    `save`, and find it again by `load`. It is never printed and never pickled, so that it cannot
    reach a log, a checkpoint or an exported model by accident.

    Attributes:
      insecure: True if the root comes from an integer seed. Such a seed can be searched, so a run
        under it has no privacy guarantee and must say so wherever it reports a number.

    >>> RootKey.from_entropy()
    RootKey(<secret>, insecure=False)
    """

    __slots__ = ("_begun", "_insecure", "_secret")

    def __init__(self, secret: bytes, *, insecure: bool) -> None:
        """Hold the 32 bytes `secret`; prefer `from_entropy`, `from_insecure_seed` and `load`."""
        if len(secret) != ROOT_BYTES:
            raise ValueError(f"a root secret has {ROOT_BYTES} bytes, got {len(secret)}")
        self._secret = bytes(secret)
        self._insecure = bool(insecure)
        self._begun = False

    @property
    def insecure(self) -> bool:
        """True if the root comes from an integer seed that can be searched."""
        return self._insecure

    @classmethod
    def from_entropy(cls) -> RootKey:
        """Return a root of 256 bits from the operating system's cryptographic generator."""
        return cls(os.urandom(ROOT_BYTES), insecure=False)

    @classmethod
    def from_insecure_seed(cls, seed: int) -> RootKey:
        """Return the root of a reproducible run *without any privacy guarantee*.

        The hash spreads `seed` over all 256 bits, but adds no secrecy: an attacker tries the seeds.

        Args:
          seed: an integer in [0, 2**64).

        Raises:
          ValueError: if `seed` is not an integer in that range.
        """
        message = _coordinate("insecure seed", seed)
        secret = hashlib.blake2b(message, digest_size=ROOT_BYTES, person=b"dpsgd insecure").digest()
        return cls(secret, insecure=True)

    def begin_run(self) -> None:
        """Note that a run begins under this root, and refuse a second one.

        Two runs of different data, parameters or settings under the same noise have a noise-free
        difference. An insecure root may be used again, to repeat a run: it gives no guarantee.

        Raises:
          ValueError: if a run was begun under this very object.
        """
        if self._begun and not self._insecure:
            raise ValueError(
                "a run was already begun under this root, and a second one would have the same "
                "noise, which their difference is free of; take RootKey.from_entropy() for each"
            )
        self._begun = True

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the root to its own new file, readable and writable by its owner alone (0600).

        The file is created with O_EXCL, so that no root is ever overwritten: noise that was
        declared under a lost root could be neither repeated nor told apart from fresh noise. It and
        its folder are fsynced before this returns.

        Raises:
          FileExistsError: if `path` exists.
          OSError: if the file cannot be written; nothing is left behind.
        """
        path = Path(path)
        origin = next(name for name, insecure in _ORIGINS.items() if insecure == self._insecure)
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            raise FileExistsError(
                f"{path}: a file is already there, and a root key is never overwritten; "
                "choose another run folder, or resume this one"
            ) from None
        try:
            with os.fdopen(descriptor, "w", encoding="ascii") as file:
                os.fchmod(file.fileno(), 0o600)  # whatever the umask and default ACLs made of it
                file.write(f"{_HEADER} {origin} {self._secret.hex()}\n")
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            with contextlib.suppress(OSError):
                path.unlink()
            raise
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> RootKey:
        """Read a root that `save` wrote.

        Raises:
          FileNotFoundError: if there is no such file.
          PermissionError: if the file's mode lets anybody but its owner read, write or execute it.
          ValueError: if it is not a regular file, or not a whole root-key file.
        """
        path = Path(path)
        try:
            # O_NONBLOCK: a named pipe in the file's place must not hang the run.
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        except FileNotFoundError:
            raise FileNotFoundError(
                f"{path}: no root key here; without it a run can be neither resumed nor repeated"
            ) from None
        mode = os.fstat(descriptor).st_mode  # of the opened file: no race with a rename
        if not stat.S_ISREG(mode):
            os.close(descriptor)
            raise ValueError(f"{path}: a root key must be a regular file")
        with os.fdopen(descriptor, "rb") as file:
            if mode & 0o077:
                raise PermissionError(
                    f"{path}: others than its owner can use this root key (mode "
                    f"{stat.S_IMODE(mode):04o}), so the noise may not be secret; start a new run, "
                    f"or, if nobody read it, `chmod 600 {path}`"
                )
            words = file.read(4096).decode("ascii", errors="replace").split()
        # The message must not quote the file: it may hold most of a secret.
        if len(words) == 3 and words[0] == _HEADER and words[1] in _ORIGINS:
            with contextlib.suppress(ValueError):
                return cls(bytes.fromhex(words[2]), insecure=_ORIGINS[words[1]])
        raise ValueError(f"{path}: not a root key, or a damaged one; restore it from a copy")

    def sampling_seed(self, generation: int) -> int:
        """Return the 256-bit seed of the sampling stream, for `numpy.random.SeedSequence`."""
        return int.from_bytes(self._derive("sampling", generation, size=32), "little")

    def noise_key(self, generation: int) -> np.ndarray:
        """Return the key of the noise stream, uint32 `[4]` (128 bits), for `dpsgd.noise.gaussian`.

        Pass it to the compiled step as an argument: a key that is closed over is baked into the
        program as a constant, and with it into every dump and cache of that program.
        """
        return np.frombuffer(self._derive("noise", generation, size=16), dtype="<u4").astype(
            np.uint32
        )

    def secure_noise_key(self, generation: int) -> np.ndarray:
        """Return the key of the secure noise stream, uint32 `[8]`, for `dpsgd.noise.secure`.

        An argument of the compiled step, like `noise_key`.
        """
        return np.frombuffer(self._derive("secure", generation, size=32), dtype="<u4").astype(
            np.uint32
        )

    def loss_key(self, generation: int) -> np.ndarray:
        """Return the key of the loss stream, uint32 `[2]` (64 bits), for `dpsgd.gradients.losses`.

        An argument of the compiled step, like `noise_key`; but no guarantee depends on its secrecy.
        """
        return np.frombuffer(self._derive("loss", generation, size=8), dtype="<u4").astype(
            np.uint32
        )

    def blind(self, text: str) -> str:
        """Return a keyed digest of `text`: equal for equal texts, random without the root.

        A plain digest of private data would let anybody confirm a guess of them.
        """
        return hashlib.blake2b(
            text.encode(), digest_size=16, key=self._secret, person=b"dpsgd blind"
        ).hexdigest()

    def _derive(self, stream: str, generation: int, *, size: int) -> bytes:
        return hashlib.blake2b(
            _coordinate("generation", generation),
            digest_size=size,
            key=self._secret,
            person=f"dpsgd {stream}".encode("ascii").ljust(hashlib.blake2b.PERSON_SIZE, b"\0"),
        ).digest()

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
    """Encode one public coordinate of a derivation in 8 bytes, so that no two collide."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ValueError(f"{name} must be an integer, got {value!r}")
    if not 0 <= value <= _MAX_COORDINATE:
        raise ValueError(f"{name} must be in [0, 2**64), got {value}")
    return int(value).to_bytes(8, "little")
