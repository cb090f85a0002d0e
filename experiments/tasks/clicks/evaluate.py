"""How good a model is on labelled rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from dpsgd.models.predictions import predictions
from experiments.tasks.clicks.metrics import BinaryMetrics, binary_metrics
from experiments.tasks.clicks.store import Columns

PyTree = Any


def evaluate(
    logit_fn: Callable[[PyTree, PyTree], jax.Array], params: PyTree, blocks: Iterable[Columns]
) -> BinaryMetrics:
    """Returns the metrics of the model on labelled rows, read once, block by block.

    Args:
      logit_fn: (params, example) -> logit.
      params: The model's parameters.
      blocks: Columns of consecutive rows.

    Raises:
      ValueError: if there are no rows.
    """
    params, of_rows = jax.device_put(params), _of_rows(logit_fn)
    logits, labels = [np.zeros(0, np.float32)], [np.zeros(0, np.uint8)]
    for block in blocks:
        features = {name: column for name, column in block.items() if name != "label"}
        logits.append(predictions(of_rows, params, features))
        labels.append(block["label"])
    return binary_metrics(np.concatenate(logits), np.concatenate(labels))


@functools.lru_cache(maxsize=8)
def _of_rows(
    logit_fn: Callable[[PyTree, PyTree], jax.Array],
) -> Callable[[PyTree, PyTree], jax.Array]:
    """Returns (params, rows) -> logits: one function, so that its program is compiled once."""
    return jax.vmap(logit_fn, in_axes=(None, 0))
