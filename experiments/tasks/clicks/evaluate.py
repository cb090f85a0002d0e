"""How good a model is on labelled rows: those of its own store, or any other file of its format."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dpsgd.runs.directory import RunDirectory
from experiments import trained
from experiments.tasks.clicks import predict
from experiments.tasks.clicks.metrics import BinaryMetrics, binary_metrics
from experiments.tasks.clicks.store import Columns, Store

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
    params = jax.device_put(params)
    logits, labels = [np.zeros(0, np.float32)], [np.zeros(0, np.uint8)]
    for block in blocks:
        logits.append(predict.logits(logit_fn, params, block))
        labels.append(block["label"])
    return binary_metrics(np.concatenate(logits), np.concatenate(labels))


def is_own(model_path: Path, data: Path, split: str | None = None) -> bool:
    """Returns whether among these rows are known to be some that trained the model.

    Of an exported model nobody knows: what it was trained on stays in the house.
    """
    if not data.is_dir() or split not in (None, "train"):
        return False
    return Store.open(data).digest in RunDirectory(model_path).data()


def evaluate_model(model_path: Path, data: Path, split: str | None = None) -> BinaryMetrics:
    """Returns the metrics of a model on rows of `data`.

    Args:
      model_path: The directory of a finished run, or an exported model.
      data: A store, or a raw file in the format that the model's store was prepared from.
      split: Which rows of a store; by default all.

    Raises:
      FileNotFoundError: if there is no such model.
      ValueError: if the data cannot be read, or are not such as the model reads.
    """
    model = trained.read(model_path)
    return evaluate(model.logit_fn, model.params, model.rows(data, split=split))
