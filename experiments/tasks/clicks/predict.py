"""What a model says of rows: its logits, batch by batch in one compiled program."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from experiments.tasks.clicks.store import Columns

PyTree = Any

BATCH = 8192
"""Rows that are scored at once, in one compiled program."""

FEW = 64
"""Where no more rows than these are asked for, a program of its own scores them."""


def logits(
    logit_fn: Callable[[PyTree, PyTree], jax.Array],
    params: PyTree,
    columns: Columns,
    *,
    batch: int | None = None,
) -> np.ndarray:
    """Returns the model's logits, float32[rows].

    Args:
      logit_fn: (params, example) -> logit.
      params: The model's parameters, on the device.
      columns: Consecutive rows; "label" is not looked at.
      batch: Rows to score at once; by default `BATCH`.
    """
    score, batch = _scorer(logit_fn), batch or BATCH
    features = {name: column for name, column in columns.items() if name != "label"}
    num_rows = len(next(iter(features.values())))
    scored = [np.zeros(0, np.float32)]  # all batches are sent before one is awaited
    for start in range(0, num_rows, batch):
        # The last batch repeats a row up to the fixed shape; its surplus is cut off again.
        rows = np.minimum(np.arange(start, start + batch), num_rows - 1)
        scored.append(score(params, {name: x[rows] for name, x in features.items()}))
    return np.concatenate(scored)[:num_rows]


@functools.lru_cache(maxsize=8)
def _scorer(logit_fn: Callable[[PyTree, PyTree], jax.Array]) -> Callable[[PyTree, PyTree], Any]:
    """Returns the compiled (params, batch) -> logits, one program for all who ask."""
    return jax.jit(jax.vmap(logit_fn, in_axes=(None, 0)))
