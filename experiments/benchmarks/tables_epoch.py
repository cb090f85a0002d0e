"""One epoch of generated rows with lazy tables, as `dpsgd train` takes it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from dpsgd import RunSpec, run
from dpsgd.runs.result import FinishedRun
from experiments.benchmarks.rows import Row
from experiments.tasks.clicks.sizes import ModelConfig
from experiments.tasks.clicks.synthetic import rows as synthetic
from experiments.tasks.clicks.task import Clicks
from samplers.settings import SETTINGS

EPSILON = 3.0
CRITEO = 46e6
"""Rows of Criteo Display Ads."""
TRAINING = 0.8
"""Part of the rows of a store."""


def epoch_rows(model: ModelConfig, rows: int, batch: int) -> Iterator[Row]:
    """Yields what an epoch takes, and what it reaches.

    Args:
      model: Sizes of the model.
      rows: To train on.
      batch: Examples of a step.
    """
    with tempfile.TemporaryDirectory() as temporary:
        store = Path(temporary) / "store"
        made = synthetic.write_store(store, round(rows / TRAINING), seed=0)
        config = RunSpec.of(
            SETTINGS["balls-and-bins"](batch_size=batch, epochs=1),
            target_epsilon=EPSILON,
            tables="lazy",
            audit=False,  # made before a run, and no part of what is timed
        )
        marks: dict[str, float] = {}

        def mark(line: str) -> None:  # the first word of a line of progress, when it first came
            marks.setdefault(line.split()[0], time.process_time())

        out = Path(temporary) / "run"
        run(Clicks(store, **asdict(model)), config, out, progress=mark)
        record = FinishedRun.read(out).record
    spent = marks["evaluating"] - marks["steps"]
    at = f"{record['num_params'] / 1e6:.3g}M parameters, batch {batch:,}"
    yield Row(f"an epoch of {rows:,} rows, tables lazy, {at}", spent, "s")
    yield Row(f"the same by the clock, {at}", record["training_seconds"], "s")
    yield Row(f"an epoch of 46M rows, scaled, {at}", spent * CRITEO / rows, "s")
    yield Row.at_most(f"its epsilon, {rows:,} rows", record["epsilon_upper"], "", EPSILON)
    found, best = record["metrics"]["test_auc"], made.summary.test_bayes_auc
    yield Row(f"test AUC after the epoch, epsilon {EPSILON:g}, {rows:,} rows", found, "")
    yield Row(f"best reachable AUC of its test rows, {rows:,} rows", best, "")
    yield Row(f"test AUC short of the best by, {rows:,} rows", best - found, "")
