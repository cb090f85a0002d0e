"""The public integer grid of secure noise, chosen from sigma, C and the batch size alone.

See docs/explanation/exact-noise-on-integer-sums.md.
"""

from __future__ import annotations

import math
import operator
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

MAX_CELLS = 2**20  # a finer grid would gain nothing: float32 has 24 bits
MAX_SUM = 2**30  # leaves room for the noise in int32


class SecureGrid(NamedTuple):
    """The public integer grid of a secure run, as arguments of a compiled program.

    Attributes:
      spacing: g, a power of two, float32 scalar.
      cells: s, int32 scalar; the noise is round(s Z), its standard deviation s g >= sigma C.
      max_square: floor((C / g)^2), the most that an example's integers may have as squared norm:
        uint32 `[2]`, its low and its high word.
    """

    spacing: Any
    cells: Any
    max_square: Any


def secure_grid(noise_multiplier: float, l2_clip_norm: float, max_batch_size: int) -> SecureGrid:
    """Return the finest public grid on which the integer sum of a batch fits in int32.

    The spacing g is the smallest power of two with max_batch_size * C / g <= 2^30 and
    sigma C / g <= 2^20; the noise has s = ceil(sigma C / g) cells, so it is rounded up.

    Args:
      noise_multiplier: sigma > 0, the standard deviation of the noise in units of C.
      l2_clip_norm: C > 0.
      max_batch_size: the most examples that a step sums. If one ever sums more, the guarantee
        holds all the same (the module's text says why), and the sum may be far off.

    Raises:
      ValueError: if an argument is out of range, or sigma is so small beside the batch size that
        the noise would have fewer than 2 cells.

    >>> int(secure_grid(1.0, 1.0, 1024).cells) == 2**20
    True
    """
    if not (0 < noise_multiplier < math.inf and 0 < l2_clip_norm < math.inf):
        raise ValueError(
            "the secure mode needs finite noise_multiplier > 0 and l2_clip_norm > 0, got "
            f"{noise_multiplier} and {l2_clip_norm}"
        )
    if operator.index(max_batch_size) < 1:
        raise ValueError(f"max_batch_size must be at least 1, got {max_batch_size}")
    clip = Fraction(float(l2_clip_norm))
    stddev = Fraction(float(noise_multiplier)) * clip
    least = max(max_batch_size * clip / MAX_SUM, stddev / MAX_CELLS)
    exponent = least.numerator.bit_length() - least.denominator.bit_length() - 1
    while Fraction(2) ** exponent < least:
        exponent += 1
    if not -120 <= exponent <= 100:
        raise ValueError(
            f"l2_clip_norm {l2_clip_norm} puts the grid outside float32; rescale the loss"
        )
    spacing = Fraction(2) ** exponent
    cells = math.ceil(stddev / spacing)
    if cells < 2:
        raise ValueError(
            f"noise_multiplier {noise_multiplier} is too small for a batch of {max_batch_size} in "
            "the secure mode: the integer grid would be coarser than the noise"
        )
    high, low = divmod(math.floor((clip / spacing) ** 2), 2**32)  # at most 2^60
    return SecureGrid(np.float32(spacing), np.int32(cells), np.array([low, high], np.uint32))
