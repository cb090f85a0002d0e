"""Computes norms, rounding errors and scales of releases."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from dpsgd.core.mechanism import Mechanism

LARGE = 2**22
"""Coordinates of a model above which fewer examples and releases are compared."""

UNIT = 2.0**-24
"""Unit roundoff of float32."""

_QUIET = [2.0**k for k in range(-40, 0)]  # noise multipliers
_LOUD = [2.0**k for k in range(60, 0, -5)]  # factors between noise and clip norm
_PASS = 2**15  # coordinates added up together, within a core's cache
_TINY = 2.0**-48  # smaller norms are computed in float64: their squares underflow in float32

Release = list[np.ndarray]
"""Private mean gradient of one step, one flat float32 array for each leaf."""


def quiet(mechanism: Mechanism, clip: float | None = None) -> Mechanism:
    """Returns the mechanism with the least noise possible.

    Args:
      mechanism: Mechanism of the run.
      clip: Another clip norm, rounded to float32; by default the run's.
    """
    clip = mechanism.l2_clip_norm if clip is None else float(np.float32(clip))
    changes = ({"l2_clip_norm": clip, "noise_multiplier": sigma} for sigma in _QUIET)
    return _first_valid(mechanism, [*changes, {"l2_clip_norm": clip}])


def loud(mechanism: Mechanism) -> Mechanism:
    """Returns the mechanism of equal sigma C with least C."""
    sigma, clip = mechanism.noise_multiplier, mechanism.l2_clip_norm
    changes = ({"noise_multiplier": sigma * x, "l2_clip_norm": clip / x} for x in _LOUD)
    return _first_valid(mechanism, changes)


def noise_dominated(mechanism: Mechanism) -> Mechanism | None:
    """Returns the mechanism with negligible sums; None if impossible."""
    louder = loud(mechanism)
    most = mechanism.sampler.padded_batch_size * mechanism.sampler.max_passes
    return louder if most <= louder.noise_multiplier * 2.0**-22 else None


def noise_stddev(mechanism: Mechanism) -> float:
    """Returns the standard deviation of the noise of a sum."""
    return mechanism.noise_multiplier * mechanism.l2_clip_norm


def _first_valid(mechanism: Mechanism, changes: Iterable[dict[str, Any]]) -> Mechanism:
    for change in changes:
        try:
            return dataclasses.replace(mechanism, **change)
        except ValueError:  # beyond the range of float32
            continue
    return mechanism


def cast_error(dtype: np.dtype) -> float:
    """Returns the relative error (>= 2^-22) of casts from float32."""
    unit = float(jnp.finfo(dtype).eps)
    return unit / 2 if unit > 2.0**-20 else 2.0**-22


def norm(*terms: tuple[int, Release]) -> float:
    """Returns the norm of a linear combination of releases.

    Its relative error is at most 2^-13; NaN gives infinity.

    Args:
      *terms: Pairs of a factor and a release.
    """
    square = 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        for leaves in zip(*(release for _, release in terms), strict=True):
            for start in range(0, leaves[0].size, _PASS):
                chunks = [leaf[start : start + _PASS] for leaf in leaves]
                combined = _combined(terms, chunks, np.float32)
                chunk_square = float(combined @ combined)
                if not (_TINY**2 < chunk_square < math.inf):
                    combined = _combined(terms, chunks, np.float64)
                    chunk_square = float(combined @ combined)
                square += chunk_square
    return math.sqrt(square) if math.isfinite(square) else math.inf


def _combined(terms: Sequence[tuple[int, Any]], leaves: list[np.ndarray], dtype: Any) -> np.ndarray:
    total = terms[0][0] * leaves[0].astype(dtype)
    for (factor, _), leaf in zip(terms[1:], leaves[1:], strict=True):
        total += factor * leaf.astype(dtype, copy=False)
    return total
