"""Click models at their defaults, on real rows: what a bidder gets at each epsilon."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import dpsgd
from dpsgd import RunSpec
from experiments.benchmarks.rows import Row
from experiments.tasks.clicks.task import Clicks
from samplers.settings import SETTINGS

PyTree = Any


@dataclass(frozen=True)
class Bars:
    """What a model at some epsilon must reach on test rows, as a mean over seeds."""

    log_loss: float
    """At most."""
    auc: float
    """At least."""


BARS = {8.0: Bars(0.5020, 0.742), 3.0: Bars(0.5045, 0.739), 1.0: Bars(0.5085, 0.732)}
"""By epsilon, calibration included."""
MOST_MISCALIBRATED = 0.03
"""Between predicted over observed clicks of a private model and of the one without privacy."""
MOST_SECONDS = 300.0
"""For a whole run, with the search for the noise, audit and evaluation: in CPU time on one thread,
which no clock on idle cores exceeds by much, while one on busy cores tells nothing."""
FIGURES = {
    "log_loss": ("log loss", "nats"),
    "predicted_over_observed": ("predicted / observed", ""),
    "auc": ("AUC", ""),
}
"""What is shown of a model: its name here, and its unit."""


@dataclass(frozen=True)
class FewerRows(Clicks):
    """Clicks trained without the last training rows, on which the model is evaluated too."""

    kept_aside: int = 0
    """Training rows that training does not read."""

    def columns(self) -> PyTree:
        """Returns the rows to train on, memory-mapped."""
        columns = super().columns()
        kept = len(columns["label"]) - self.kept_aside
        if kept < 1:
            raise ValueError(f"{self.data} has {len(columns['label'])} training rows: keep fewer")
        return {name: column[:kept] for name, column in columns.items()}

    def metrics(self, params: PyTree) -> dict[str, float]:
        """Returns what `evaluate` does of validation and test, and of the rows kept aside."""
        kept = {name: x[len(x) - self.kept_aside :] for name, x in super().columns().items()}
        of_kept = self.evaluate(params, [kept]) if self.kept_aside else {}
        return super().metrics(params) | {f"kept_{name}": x for name, x in of_kept.items()}


@dataclass(frozen=True)
class Trained:
    """What one run gave."""

    metrics: dict[str, float]
    """By "<split>_<name>"."""
    epsilon: float
    """Certified from above, of all that the run released; infinite without privacy."""
    seconds: float
    """By the clock, for the whole run."""
    cpu_seconds: float
    """Of the processor, likewise."""


@dataclass(frozen=True)
class Models:
    """Runs at the defaults, a seed each; what they gave is written down as it comes.

    Attributes:
      task: What is trained.
      seeds: Of the initial parameters: how many.
      written: Folder of the figures of runs, which are not made again; None to keep none.
    """

    task: FewerRows
    seeds: int
    written: Path | None = None

    def trained(self, name: str, config: RunSpec) -> list[Trained]:
        """Returns what the runs of `config` gave, seed by seed."""
        return [self._trained(name, config, seed) for seed in range(self.seeds)]

    def _trained(self, name: str, config: RunSpec, seed: int) -> Trained:
        label = f"{name}, {self.task.kept_aside} rows kept aside, seed {seed}"
        file = None if self.written is None else self.written / f"{label}.json"
        if file is not None and file.exists():
            return Trained(**json.loads(file.read_text()))
        with tempfile.TemporaryDirectory() as folder:
            begin, cpu_begin = time.perf_counter(), time.process_time()
            report = dpsgd.run(
                self.task, dataclasses.replace(config, init_seed=seed), Path(folder) / "run"
            )
            seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu_begin
        metrics = {key: math.nan if x is None else x for key, x in report["metrics"].items()}
        epsilon = report["epsilon_upper"]
        found = Trained(metrics, math.inf if epsilon is None else epsilon, seconds, cpu_seconds)
        shown = ", ".join(f"{figure} {metrics[f'test_{figure}']:.4f}" for figure in FIGURES)
        print(f"{label}: {shown} ({seconds:.0f} s, {cpu_seconds:.0f} of CPU)", file=sys.stderr)
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(dataclasses.asdict(found)))
        return found


def rows(models: Models, epsilons: Sequence[float]) -> Iterator[Row]:
    """Yields the rows of the models without privacy, and of each epsilon beside its bars."""
    kept = bool(models.task.kept_aside)
    without = models.trained("no privacy", defaults(non_private=True))
    for split in ("kept",) if kept else ("validation", "test"):
        yield from _means(without, split, f"no privacy, {split} rows")
    for epsilon in epsilons:
        at, config = f"epsilon {epsilon:g}", defaults(target_epsilon=epsilon)
        private = models.trained(at, config)
        split = "kept" if kept else "test"
        yield from beside_bars(private, without, split, at, BARS.get(epsilon))
        worst = max(run.epsilon for run in private)
        yield Row.at_most(f"certified epsilon, {at}", worst, "epsilon", epsilon)
        most = max(run.cpu_seconds for run in private)
        yield Row.at_most(f"CPU time of the longest run, {at}", most, "s", MOST_SECONDS)
        yield Row(f"mean time of a run by the clock, {at}", fmean(x.seconds for x in private), "s")
        if not kept:
            yield from _means(private, "validation", f"{at}, validation rows")
            name, one = f"{at}, not calibrated", dataclasses.replace(models, seeds=1)
            bare = one.trained(name, dataclasses.replace(config, calibration="none"))
            yield from _means(bare, "test", f"{name}, test rows, one run")


def beside_bars(
    private: Sequence[Trained],
    without: Sequence[Trained],
    split: str,
    at: str,
    bars: Bars | None,
) -> Iterator[Row]:
    """Yields the rows of private models beside their bars, if there are any.

    Args:
      private: The runs.
      without: Those of the same model without privacy.
      split: On which rows.
      at: Says which runs they are.
      bars: Of their epsilon.
    """
    figures = {row.name: row for row in _means(private, split, f"{at}, {split} rows")}
    for name, row in figures.items():
        if bars is not None and name.startswith("log loss,"):
            yield Row.at_most(name, row.value, row.unit, bars.log_loss)
        elif bars is not None and name.startswith("AUC,"):
            yield Row.at_least(name, row.value, row.unit, bars.auc)
        else:
            yield row
    level = f"{split}_predicted_over_observed"
    apart = abs(_mean(private, level) - _mean(without, level))
    name = f"predicted / observed, from that without privacy, {at}, {split} rows"
    yield Row.at_most(name, apart, "", MOST_MISCALIBRATED)


def defaults(**aim: Any) -> RunSpec:
    """Returns what a run is asked for by somebody who gives its `aim` alone, at delta = 1 / n."""
    return RunSpec.of(SETTINGS["balls-and-bins"](), target_delta="1/n", **aim)


def _mean(runs: Sequence[Trained], figure: str) -> float:
    return fmean(run.metrics[figure] for run in runs)


def _means(runs: Sequence[Trained], split: str, at: str) -> Iterator[Row]:
    """Yields the mean of each figure over runs, and its standard error if there are several."""
    for figure, (name, unit) in FIGURES.items():
        values = [run.metrics[f"{split}_{figure}"] for run in runs]
        yield Row(f"{name}, {at}", fmean(values), unit)
        if len(values) > 1:
            error = stdev(values) / math.sqrt(len(values))
            yield Row(f"standard error of {name}, {at}", error, unit)
