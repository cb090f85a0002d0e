"""Uniform integers, permutations and Bernoulli successes as pure functions of a secret key.

Keys are expanded by SHAKE-256, with integer operations and correctly rounded arithmetic alone: a
key gives the same draw on every machine and in every version. Distributions are exact, or their
distance from exact is stated: docs/explanation/exact-draws-from-a-seed.md.
"""

from __future__ import annotations

import enum
import hashlib
import math
import operator
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np

_MAX_UINT64 = (1 << 64) - 1


def check_seed(seed: int) -> int:
    """Returns `seed` as an int >= 0.

    Raises:
      ValueError: If `seed` is negative or no integer; the message does not show it.
    """
    try:
        seed = operator.index(seed)
    except TypeError:
        raise ValueError("the sampling seed must be an integer") from None
    if seed < 0:
        raise ValueError("the sampling seed must be an integer >= 0")
    return seed


class Stream(enum.IntEnum):
    """Purpose of a key: keys of different streams give independent draws."""

    PARTICIPATION = 0
    ORDER = 1
    TRUNCATION = 2
    CONTRIBUTION = 3


class Key:
    """One secret stream of uniform bits, a function of (seed, stream, epoch, index) alone.

    Reading is stateless: the same call always returns the same words, and a longer read extends a
    shorter one.

    Args:
      seed: The secret, an integer >= 0 of any size; in real runs 128 bits or more from the
        operating system (``secrets.randbits(256)``).
      stream: Purpose of the draw.
      epoch: Epoch of the draw, 0 <= epoch < 2^64.
      index: Chunk, bucket or step of the draw, 0 <= index < 2^64.

    Raises:
      ValueError: `seed` is negative or no integer, or `epoch` or `index` outside its range.
    """

    __slots__ = ("_hash",)

    def __init__(self, seed: int, stream: Stream, epoch: int, index: int) -> None:
        seed, epoch, index = check_seed(seed), operator.index(epoch), operator.index(index)
        if not (0 <= epoch <= _MAX_UINT64 and 0 <= index <= _MAX_UINT64):
            raise ValueError(f"epoch and index must be in [0, 2^64), got {epoch} and {index}")
        # Injective: fields of fixed width come first, the seed's shortest encoding comes last.
        message = b"dp batch samplers, version 1\0" + int(stream).to_bytes(1, "big")
        message += epoch.to_bytes(8, "big") + index.to_bytes(8, "big")
        message += seed.to_bytes((seed.bit_length() + 7) // 8, "big")
        self._hash = hashlib.shake_256(message)

    def words32(self, count: int) -> np.ndarray:
        """Returns the first `count` words of the stream: uint32[count], uniform."""
        return np.frombuffer(self._hash.digest(4 * count), dtype="<u4")

    def words64(self, count: int) -> np.ndarray:
        """Returns the first `count` words of the stream: uint64[count], uniform."""
        return np.frombuffer(self._hash.digest(8 * count), dtype="<u8")


def uniform_integers(key: Key, high: int, count: int) -> np.ndarray:
    """Draws integers, exactly uniform on {0, ..., high - 1}.

    Args:
      key: Source of the random bits.
      high: Number of values, 1 <= high <= 2^31.
      count: Number of independent draws.

    Returns:
      int32[count].

    Source: D. Lemire, Fast random integer generation in an interval (2019), Algorithm 5.
    """
    unfit = (1 << 32) % high
    fraction = unfit / 2**32
    size = 16 + math.ceil((count + 8 * math.sqrt(count * fraction)) / (1 - fraction))
    while True:
        products = key.words32(size).astype(np.uint64) * np.uint64(high)
        fit = (products & np.uint64(0xFFFFFFFF)) >= unfit
        values = (products >> np.uint64(32)).astype(np.int32)[fit]
        if values.size >= count:
            return values[:count]
        size *= 2


def uniform_permutation(key: Key, count: int) -> np.ndarray:
    """Draws an exactly uniform permutation of {0, ..., count - 1}.

    The order of random 64-bit sort keys; equal ones (probability below count^2 / 2^65) are drawn
    again.

    Args:
      key: Source of the random bits.
      count: Number of items.

    Returns:
      int64[count].
    """
    blocks = 1
    while True:
        sort_keys = key.words64(blocks * count)[(blocks - 1) * count :]
        order = np.argsort(sort_keys)
        ordered = sort_keys[order]
        if not np.any(ordered[1:] == ordered[:-1]):
            return order
        blocks += 1


def bernoulli_successes(key: Key, rate: float, length: int) -> np.ndarray:
    """Draws the successes of independent trials, in ascending order.

    Each trial succeeds with probability 1 - exp(-rate). The gaps between successes are geometric,
    each P(gap > k) within 2^-50 of exp(-rate)^k.

    Args:
      key: Source of the random bits.
      rate: -log(1 - q) for a success probability q in (0, 1]; infinite for q = 1.
      length: Number of trials, 0 <= length < 2^52.

    Returns:
      The successful trials, ascending: int64[successes].

    Source: L. Devroye, Non-Uniform Random Variate Generation (1986), section X.2.
    """
    mean = -length * math.expm1(-rate)
    size = 16 + math.ceil(mean + 8 * math.sqrt(mean))
    while True:
        uniforms = ((key.words64(size) >> np.uint64(11)) + np.uint64(1)) * 2.0**-53
        gaps = np.floor(_minus_log(uniforms) / rate).astype(np.int64) + 1
        positions = np.cumsum(gaps) - 1
        if positions[-1] >= length:
            return positions[: np.searchsorted(positions, length)]
        size *= 2


def exponential_rate(kept: Fraction) -> float:
    """Returns -log(`kept`), for a failure probability in [0, 1].

    In decimal arithmetic of 50 digits: the same float on every machine, and accurate near 1.

    >>> exponential_rate(Fraction(1, 2))
    0.6931471805599453
    """
    with localcontext() as context:
        context.prec = 50
        rounded = Decimal(kept.numerator) / Decimal(kept.denominator)
        return math.inf if kept == 0 else float(-rounded.ln())


# log(m) = 2 artanh(s), s = (m - 1) / (m + 1): odd powers of s up to 21. For m in
# [sqrt(1/2), sqrt(2)], |s| <= 0.1716, and the first omitted term is below 2^-62 |s|.
_ARTANH_COEFFICIENTS = tuple(1.0 / (2 * k + 1) for k in range(10, -1, -1))


def _minus_log(x: np.ndarray) -> np.ndarray:
    """Computes -log(x), x in (0, 1], to 4 units in the last place, alike on every machine."""
    mantissa, exponent = np.frexp(x)
    small = mantissa < math.sqrt(0.5)
    mantissa = np.where(small, 2.0 * mantissa, mantissa)
    exponent = exponent - small
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square = s * s
    series = np.full_like(s, _ARTANH_COEFFICIENTS[0])
    for coefficient in _ARTANH_COEFFICIENTS[1:]:
        series *= square
        series += coefficient
    return -(exponent * 0.6931471805599453 + 2.0 * s * series)
