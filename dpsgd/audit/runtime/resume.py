"""What a run that resumes reads of its noise, recomputed from key and steps and compared.

Correlated noise resumes with what it kept of the steps before: n of the last steps, or buffers of
them (`dpsgd.noise.correlated`, `dpsgd.noise.buffered`). Both are recursions in z, which
`dpsgd.audit.reference` gives. Rows of lazy tables that no step has read hold their first numbers.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpsgd.audit import reference
from dpsgd.core.state import TrainState
from dpsgd.noise.base import Noise
from dpsgd.noise.buffered import BufferedToeplitz
from dpsgd.noise.correlated import BandedToeplitz
from dpsgd.packing import packs

PyTree = Any

_NUMBERS = 2**22  # of z, about
_PLACES = 2, 64  # of a leaf
_CHUNK = 256  # steps that are drawn together
_ERROR = 2.0**-16  # of n, in its standard deviations


def wrong_noise(
    noise: Noise, state: TrainState, params: PyTree, key: np.ndarray, first_step: int
) -> str:
    """Returns what is wrong with the noise that a run resumes with; empty if nothing is.

    What lies on other hosts, and what a noise of another class keeps, is not looked at.

    Args:
      noise: Of the run.
      state: With which it resumes.
      params: With which it began.
      key: Of its noise.
      first_step: With which the attempt of that key began.
    """
    if state.pending:
        return _wrong_rows(state, params)
    if not isinstance(noise, BandedToeplitz | BufferedToeplitz) or not jax.tree.leaves(state.noise):
        return ""
    sizes = [math.prod(jnp.shape(leaf)) for leaf in jax.tree.leaves(state.dense_params)]
    steps = range(first_step, int(state.step))
    most = _NUMBERS // max(1, len(steps) * len(sizes))
    places = [_places(size, int(np.clip(most, *_PLACES))) for size in sizes]
    count = sum(map(len, places))
    recursion: _Bands | _Buffers
    if isinstance(noise, BandedToeplitz):
        recursion = _Bands(noise, count)
    else:
        recursion = _Buffers(noise, count)
    for start in range(steps.start, steps.stop, _CHUNK):
        numbers = np.arange(start, min(start + _CHUNK, steps.stop))
        drawn = [reference.normals(key, numbers[:, None], k, at) for k, at in enumerate(places)]
        for step, z in zip(numbers.tolist(), np.concatenate(drawn, axis=1), strict=True):
            recursion.step(step, z)
    borders = np.cumsum([len(at) for at in places])[:-1]
    expected = np.split(recursion.kept, borders, axis=1)
    for pack, rows in zip(packs(dict(enumerate(sizes))), state.noise, strict=True):
        offsets = [0, *itertools.accumulate(sizes[k] for k in pack)]
        for k, offset in zip(pack, offsets, strict=False):
            found = [_some(row, offset + places[k]) for row in rows]
            off = [
                x is not None and not np.all(np.abs(x - y) <= _ERROR * size)
                for x, y, size in zip(found, expected[k], recursion.size, strict=True)
            ]
            if any(off):
                return (
                    f"vector {off.index(True)} of {len(off)} that the noise keeps is, in array {k} "
                    f"of the parameters, not that of steps {steps.start:,} to {steps.stop - 1:,}"
                )
    return ""


class _Bands:
    """n of the last steps, each in row step mod (b - 1)."""

    def __init__(self, noise: BandedToeplitz, count: int):
        self._c = np.array(noise.coefficients)
        self.kept = np.zeros((len(self._c) - 1, count))
        self.size = np.full(len(self.kept), max(1.0, noise.spread))

    def step(self, step: int, z: np.ndarray) -> None:
        rows = len(self.kept)
        lag = (step - 1 - np.arange(rows)) % rows if rows else np.arange(0)
        n = (z - self._c[1 + lag] @ self.kept) / self._c[0]
        if rows:
            self.kept[step % rows] = n


class _Buffers:
    """Sums of n with weights that decay."""

    def __init__(self, noise: BufferedToeplitz, count: int):
        self._weights, self._decays = np.array(noise.weights), np.array(noise.decays)
        pairs = np.outer(self._weights, self._weights)
        inner = 1 - np.outer(self._decays, self._decays)
        self._gain = math.sqrt(1 + float(np.sum(pairs / inner)))
        self.kept = np.zeros((len(self._weights), count))
        # A buffer forgets its roundings as slowly as it decays.
        slow = (1 - self._decays) ** -0.5
        self.size = noise.spread * np.maximum(1.0, slow) * (1 + slow / 64)

    def step(self, step: int, z: np.ndarray) -> None:
        n = self._gain * z - self._weights @ self.kept
        self.kept = self._decays[:, None] * self.kept + n


def _wrong_rows(state: TrainState, params: PyTree) -> str:
    leaves = jax.tree.leaves(params)
    for k, table in state.lazy_tables.items():
        if not table.steps.is_fully_addressable:
            continue
        if not bool(jnp.all((table.steps >= 0) & (table.steps <= state.step))):
            return f"rows of table {k} hold noise of steps that were not taken"
        fresh = (table.steps == 0).reshape(-1, *[1] * (table.values.ndim - 1))
        moved = jnp.any(fresh & (table.values != leaves[k]))
        if table.momentum is not None:
            moved |= jnp.any(fresh & (table.momentum != 0))
        if bool(moved):
            return f"rows of table {k} have moved that no step has read"
    return ""


def _places(size: int, most: int) -> np.ndarray:
    """Returns coordinates from the first to the last."""
    return np.unique(np.linspace(0, size - 1, min(size, most)).astype(np.int64))


def _some(row: Any, at: np.ndarray) -> np.ndarray | None:
    if isinstance(row, jax.Array) and not row.is_fully_addressable:
        return None
    return np.asarray(row[at], np.float64)
