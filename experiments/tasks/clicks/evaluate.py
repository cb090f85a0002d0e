"""Logits of a model for labelled rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np

from dpsgd.models.predictions import predictions
from experiments.tasks.clicks.store import Columns

PyTree = Any


class Scores(NamedTuple):
    """Logits of a model for labelled rows."""

    logits: np.ndarray
    """float32[rows], or float32[rows, outputs]."""
    labels: np.ndarray
    """Labels in the store's dtype, [rows]."""
    ids: np.ndarray
    """Hashed values of one categorical column, int32[rows]; or empty."""


def score(
    logit_fn: Callable[[PyTree, PyTree], jax.Array],
    params: PyTree,
    blocks: Iterable[Columns],
    category: int | None = None,
) -> Scores:
    """Computes the logits of labelled rows, block by block.

    Args:
      logit_fn: (params, example) -> logits.
      params: Parameters of the model.
      blocks: Columns of labelled rows.
      category: Index of a categorical column to return, if any.

    Raises:
      ValueError: If there are no rows.
    """
    params, compiled = jax.device_put(params), _map_rows(logit_fn)
    logits, labels, ids = [], [], [np.zeros(0, np.int32)]
    for block in blocks:
        features = {name: column for name, column in block.items() if name != "label"}
        logits.append(predictions(compiled, params, features))
        labels.append(np.asarray(block["label"]))
        if category is not None:
            ids.append(np.asarray(block["categories"][:, category]))
    if not labels:
        raise ValueError("there are no rows to evaluate the model on")
    return Scores(np.concatenate(logits), np.concatenate(labels), np.concatenate(ids))


@functools.lru_cache(maxsize=8)
def _map_rows(
    logit_fn: Callable[[PyTree, PyTree], jax.Array],
) -> Callable[[PyTree, PyTree], jax.Array]:
    """Returns (params, rows) -> logits, one function so that its program compiles once."""
    return jax.vmap(logit_fn, in_axes=(None, 0))
