"""What a run that resumes reads of its noise, recomputed from key and steps and compared.

Correlated noise resumes with n of the last steps (`dpsgd.noise.correlated`), a recursion in z,
which `dpsgd.audit.reference` gives. Rows of lazy tables that no step has read hold their first
numbers.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpsgd.audit import reference
from dpsgd.core.noise import Noise
from dpsgd.core.state import TrainState
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
    if not isinstance(noise, BandedToeplitz) or not jax.tree.leaves(state.noise):
        return ""
    sizes = [math.prod(jnp.shape(leaf)) for leaf in jax.tree.leaves(state.dense_params)]
    steps = range(first_step, int(state.step))
    most = int(np.clip(_NUMBERS // max(1, len(steps) * len(sizes)), *_PLACES))
    places = [
        np.unique(np.linspace(0, size - 1, min(size, most)).astype(np.int64)) for size in sizes
    ]
    kept, allowed = _kept(noise, key, steps, places), _ERROR * max(1.0, noise.spread)
    expected = np.split(kept, np.cumsum([len(at) for at in places])[:-1], axis=1)
    for pack, rows in zip(packs(dict(enumerate(sizes))), state.noise, strict=True):
        offsets = [0, *itertools.accumulate(sizes[k] for k in pack)]
        for k, offset in zip(pack, offsets, strict=False):
            for number, (row, wanted) in enumerate(zip(rows, expected[k], strict=True)):
                if isinstance(row, jax.Array) and not row.is_fully_addressable:
                    continue
                found = np.asarray(row[offset + places[k]], np.float64)
                if not np.all(np.abs(found - wanted) <= allowed):
                    return (
                        f"vector {number} of {len(rows)} that the noise keeps is, in array {k} of "
                        f"the parameters, not that of steps {steps.start:,} to {steps.stop - 1:,}"
                    )
    return ""


def _kept(
    noise: BandedToeplitz, key: np.ndarray, steps: range, places: list[np.ndarray]
) -> np.ndarray:
    """Returns n of the last steps, each in row step mod (b - 1): float64[b - 1, places]."""
    c = np.array(noise.coefficients)
    kept = np.zeros((len(c) - 1, sum(map(len, places))))
    for some in np.array_split(np.array(steps), len(steps) // _CHUNK + 1):
        drawn = [reference.normals(key, some[:, None], k, at) for k, at in enumerate(places)]
        for step, z in zip(some.tolist(), np.concatenate(drawn, axis=1), strict=True):
            lag = (step - 1 - np.arange(len(kept))) % len(kept)
            kept[step % len(kept)] = (z - c[1 + lag] @ kept) / c[0]
    return kept


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
