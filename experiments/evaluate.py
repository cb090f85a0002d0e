"""How good a model is on labelled rows: those of its own store, or any other file of its format."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dpsgd.metrics import BinaryMetrics, binary_metrics
from experiments.criteo.formats import format_of
from experiments.criteo.store import Columns, Store
from experiments.run_directory import RunDirectory
from experiments.trained import TrainedModel

PyTree = Any

BATCH = 8192
"""Rows that are scored at once, in one compiled program."""


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
    score, params = _scorer(logit_fn), jax.device_put(params)
    logits, labels = [np.zeros(0, np.float32)], [np.zeros(0, np.uint8)]
    for block in blocks:
        num_rows = len(block["label"])
        scored = [np.zeros(0, np.float32)]  # all batches of a block are sent before one is awaited
        for start in range(0, num_rows, BATCH):
            # The last batch repeats a row up to the fixed shape; its surplus is cut off again.
            rows = np.minimum(np.arange(start, start + BATCH), num_rows - 1)
            scored.append(score(params, {name: x[rows] for name, x in block.items()}))
        logits.append(np.concatenate(scored)[:num_rows])
        labels.append(block["label"])
    return binary_metrics(np.concatenate(logits), np.concatenate(labels))


@functools.lru_cache(maxsize=8)
def _scorer(logit_fn: Callable[[PyTree, PyTree], jax.Array]) -> Callable[[PyTree, PyTree], Any]:
    """Returns the compiled (params, batch) -> logits, one program for all who ask."""
    return jax.jit(jax.vmap(logit_fn, in_axes=(None, 0)))


def is_own(run_path: Path, data: Path) -> bool:
    """Returns whether `data` is a store that the run in `run_path` was trained on."""
    return data.is_dir() and Store.open(data).digest in RunDirectory(run_path).data()


def evaluate_run(run_path: Path, data: Path) -> BinaryMetrics:
    """Returns the metrics of a finished run's model on every row of `data`.

    Args:
      run_path: The run's directory.
      data: A store, or a raw file in the format that the run's store was prepared from.

    Raises:
      FileNotFoundError: if there is no finished run.
      ValueError: if the data cannot be read, or were prepared differently from the run's.
    """
    run = RunDirectory.open(run_path)
    model = TrainedModel.load(run)
    if not data.is_dir():
        rows = format_of(model.schema).read(data, hash_seed=model.hash_seed)
        return evaluate(model.logit_fn, model.params, rows)
    store = Store.open(data)
    if (store.schema, store.hash_seed) != (model.schema, model.hash_seed):
        raise ValueError(
            f"{data} was prepared with other columns or another hash seed than the data of "
            f"{run_path}: prepare it with --hash-seed {model.hash_seed}"
        )
    store.verify()
    rows = (block for split in store.splits for block in store.blocks(split))
    return evaluate(model.logit_fn, model.params, rows)
