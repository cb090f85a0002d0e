"""SplitMix64 (Steele, Lea and Flood, 2014): a public hash of integers, equal everywhere."""

from __future__ import annotations

import numpy as np

GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def mix(x: np.ndarray) -> np.ndarray:
    """Mixes uint64 `x` in place by SplitMix64's finaliser; returns `x`.

    >>> hex(mix(np.array([GOLDEN], np.uint64))[0])
    '0xe220a8397b1dcdaf'
    """
    x ^= x >> np.uint64(30)
    x *= np.uint64(_MULTIPLIERS[0])
    x ^= x >> np.uint64(27)
    x *= np.uint64(_MULTIPLIERS[1])
    x ^= x >> np.uint64(31)
    return x


def outputs(numbers: np.ndarray) -> np.ndarray:
    """Returns output i of the generator, seeded with 0: uint64.

    >>> int(outputs(np.array([0]))[0])
    16294208416658607535
    """
    return mix((np.asarray(numbers, np.uint64) + np.uint64(1)) * np.uint64(GOLDEN))
