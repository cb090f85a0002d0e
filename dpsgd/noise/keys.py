"""Root secret of a process's part of a run, and the keys derived from it, in memory only.

Nothing is ever repeated: each process draws its own root, and no file holds it.
Derivation and secrecy: docs/explanation/keys-of-a-process.md.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

ROOT_BYTES = 32
"""Length of the root secret, bytes."""

_MAX_COORDINATE = 2**64 - 1

Seeds = int | Callable[[int], int]
"""Sampling seed of all epochs, or a function of the epoch."""


class RootKey:
    """Root secret of one process's part of a run; its randomness derives from it.

    A root is never printed, pickled or written.

    Attributes:
      insecure: True if the root comes from an integer seed. Such a seed can be searched, so a run
        under it has no privacy guarantee and says so beside every number.

    >>> RootKey.from_entropy()
    RootKey(<secret>, insecure=False)
    """

    __slots__ = ("_insecure", "_process", "_secret")

    def __init__(self, secret: bytes, *, insecure: bool) -> None:
        """Stores the 32 bytes `secret`; prefer `from_entropy` and `from_insecure_seed`."""
        if len(secret) != ROOT_BYTES:
            raise ValueError(f"a root secret has {ROOT_BYTES} bytes, got {len(secret)}")
        self._secret = bytes(secret)
        self._insecure = bool(insecure)
        self._process = os.getpid()

    @property
    def insecure(self) -> bool:
        """True if the root comes from a searchable integer seed."""
        return self._insecure

    @classmethod
    def from_entropy(cls) -> RootKey:
        """Returns 256 bits from the operating system's cryptographic generator."""
        return cls(os.urandom(ROOT_BYTES), insecure=False)

    @classmethod
    def shared(cls) -> RootKey:
        """Returns one root in all processes of `jax.distributed`.

        Process 0 draws it; it travels by the collectives of the devices, as sums of gradients do.
        """
        secret = os.urandom(ROOT_BYTES)
        jax = sys.modules.get("jax")
        if jax is not None and jax.process_count() > 1:
            from jax.experimental import multihost_utils

            words = np.frombuffer(secret, np.uint8).astype(np.int32)
            secret = np.asarray(multihost_utils.broadcast_one_to_all(words), np.uint8).tobytes()
        return cls(secret, insecure=False)

    @classmethod
    def from_insecure_seed(cls, seed: int) -> RootKey:
        """Returns a reproducible run's root *without any privacy guarantee*.

        The hash spreads `seed` over all 256 bits, but adds no secrecy: an attacker tries the seeds.

        Args:
          seed: Integer in [0, 2**64).

        >>> RootKey.from_insecure_seed(7).insecure
        True

        Raises:
          ValueError: If `seed` is not an integer in that range.
        """
        message = _coordinate("insecure_seed", seed)
        secret = hashlib.blake2b(message, digest_size=ROOT_BYTES, person=b"dpsgd insecure").digest()
        return cls(secret, insecure=True)

    def sampling_seed(self, attempt: int = 0) -> int:
        """Returns the 256-bit seed of the sampling stream, for `samplers.BatchSource`."""
        return int.from_bytes(self._derive("sampling", attempt, size=32), "little")

    def noise_key(self, attempt: int = 0) -> np.ndarray:
        """Returns the noise stream's key, uint32 `[4]`.

        Pass it to the compiled step as an argument: a constant is part of the program's text and
        caches.

        >>> RootKey.from_insecure_seed(7).noise_key().shape
        (4,)
        """
        return self._key("noise", attempt, words=4)

    def loss_key(self, attempt: int = 0) -> np.ndarray:
        """Returns the loss stream's key, uint32 `[2]`.

        Privacy does not depend on it.
        """
        return self._key("loss", attempt, words=2)

    def child(self, purpose: str) -> RootKey:
        """Returns the root of another stream.

        It is independent of this root's streams and of the roots of other purposes.
        """
        self._check_process()
        secret = hashlib.blake2b(
            purpose.encode(), digest_size=ROOT_BYTES, key=self._secret, person=b"dpsgd child"
        ).digest()
        return RootKey(secret, insecure=self._insecure)

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

    def _check_process(self) -> None:
        if self._process != os.getpid() and not self._insecure:
            raise ValueError(
                f"process {os.getpid()} was forked from {self._process}, which drew this root, and "
                "both would have the same noise; begin the run after the fork"
            )

    def __repr__(self) -> str:
        return f"RootKey(<secret>, insecure={self._insecure})"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("a RootKey is never pickled: it stays in the process that drew it")


@dataclass(frozen=True, repr=False)
class Keys:
    """Keys and sampling seeds of one process in a run.

    Attributes:
      root: Root secret.
      attempt: Number of the streams under this root; audits have several.
      seeds: Sampling seeds; by default the one of the root's sampling stream.
    """

    root: RootKey
    attempt: int = 0
    seeds: Seeds | None = None

    @classmethod
    def of(cls, insecure_seed: int | None = None, processes: Collection[int] | None = None) -> Keys:
        """Returns fresh keys, or keys of an insecure seed.

        Processes that compute one model have equal keys. Others must not: the difference of two
        models with equal noise would show their rows.

        Args:
          insecure_seed: Seed of all keys, for debugging; None for fresh keys.
          processes: Indices of the processes of `jax.distributed` that compute the model; by
            default all.
        """
        if insecure_seed is not None:
            return cls(RootKey.from_insecure_seed(insecure_seed))
        if processes is None:
            return cls(RootKey.shared())
        if len(processes) == 1:
            return cls(RootKey.from_entropy())
        return cls(RootKey.shared().child(f"processes {sorted(processes)}"))

    @property
    def noise(self) -> np.ndarray:
        """Key of the noise, uint32[4]."""
        return self.root.noise_key(self.attempt)

    @property
    def loss(self) -> np.ndarray:
        """Key of the loss, uint32[2]."""
        return self.root.loss_key(self.attempt)

    @property
    def sampling(self) -> Seeds:
        """Sampling seeds."""
        return self.root.sampling_seed(self.attempt) if self.seeds is None else self.seeds

    @property
    def of_sums(self) -> Keys:
        """Keys of the sums over all rows after training."""
        return Keys(self.root.child("full sums"), self.attempt)


def _coordinate(name: str, value: int) -> bytes:
    """Encodes one public coordinate of a derivation in 8 bytes, without collisions."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ValueError(f"{name} must be an integer, got {value!r}")
    if not 0 <= value <= _MAX_COORDINATE:
        raise ValueError(f"{name} must be in [0, 2**64), got {value}")
    return int(value).to_bytes(8, "little")
