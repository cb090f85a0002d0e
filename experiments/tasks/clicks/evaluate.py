"""How good a model is on labelled rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np

from dpsgd.models.predictions import predictions
from experiments.tasks.clicks.store import Columns
from experiments.tasks.clicks.target import Target

PyTree = Any


class Scores(NamedTuple):
    """What a model says of labelled rows."""

    logits: np.ndarray
    """float32[rows], or float32[rows, outputs]."""
    labels: np.ndarray
    """[rows], as a store has them."""
    ids: np.ndarray
    """The values of one categorical column, hashed: int32[rows]; or none."""


def score(
    logit_fn: Callable[[PyTree, PyTree], jax.Array],
    params: PyTree,
    blocks: Iterable[Columns],
    category: int | None = None,
) -> Scores:
    """Returns what (params, example) -> logits says of labelled rows, read once, block by block.

    Raises:
      ValueError: if there are no rows.
    """
    params, compiled = jax.device_put(params), _of_rows(logit_fn)
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


def evaluate(
    logit_fn: Callable[[PyTree, PyTree], jax.Array],
    params: PyTree,
    blocks: Iterable[Columns],
    target: Target,
) -> dict[str, float]:
    """Returns the metrics of the model on labelled rows, see `score` and `Target.metrics`.

    Raises:
      ValueError: if there are no rows.
    """
    scores = score(logit_fn, params, blocks)
    return target.metrics(scores.logits, scores.labels)


@functools.lru_cache(maxsize=8)
def _of_rows(
    logit_fn: Callable[[PyTree, PyTree], jax.Array],
) -> Callable[[PyTree, PyTree], jax.Array]:
    """Returns (params, rows) -> logits: one function, so that its program is compiled once."""
    return jax.vmap(logit_fn, in_axes=(None, 0))
