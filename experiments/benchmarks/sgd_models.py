"""Click models that are trained by SGD under correlated noise, and by Adam, on real rows."""

from __future__ import annotations

import functools
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal, NamedTuple

import jax

from accounting import calibrate
from dpsgd import Mechanism, RootKey, dpsgd, train_blocks
from dpsgd.noise.base import Noise
from dpsgd.noise.planning import best_noise, workload
from dpsgd.noise.strategies import optimized_buffers
from dpsgd.runs.optimizer import ADAM, SGD, hyperparameters
from experiments.benchmarks.rows import Row
from experiments.tasks.clicks.task import Clicks
from samplers import BallsAndBins, BatchSampler, Deterministic

PyTree = Any


@dataclass(frozen=True)
class Setting:
    """What a model is trained by; SGD unless `momentum` is None, which is Adam."""

    epsilon: float
    """To be certified of a run at delta = 1 / n."""
    batch_size: int
    """Expected number of rows in a batch."""
    epochs: int
    """Passes over the rows."""
    learning_rate: float
    """Peak of the cosine schedule."""
    bands: int = 1
    """Steps over which noise is correlated, by coefficients that are best for the run's steps."""
    order: Literal["balls-and-bins", "deterministic"] = "balls-and-bins"
    """By which rows are drawn: in cycles of `bands`, or in their order, without amplification."""
    momentum: float | None = 0.9
    """Of SGD; None for Adam."""
    l2_clip_norm: float = 4.0
    """C."""
    buffers: int = 0
    """In place of bands, of a known order: decaying sums of earlier noise (BLT)."""

    def __str__(self) -> str:
        by = "Adam" if self.momentum is None else f"SGD, momentum {self.momentum:g}"
        over = f"{self.buffers} buffers" if self.buffers else f"b = {self.bands}"
        return (
            f"epsilon {self.epsilon:g}, {by}, {self.order}, {over}, batch {self.batch_size}, "
            f"{self.epochs} epochs, C {self.l2_clip_norm:g}, rate {self.learning_rate:g}"
        )

    def sampler(self, num_examples: int) -> BatchSampler:
        """Returns who takes part in which step."""
        if self.order == "deterministic":
            return Deterministic(num_examples, self.batch_size, self.epochs)
        return BallsAndBins(num_examples, self.batch_size, self.epochs, cycle_length=self.bands)

    def mechanism(self, num_examples: int) -> Mechanism:
        """Returns the mechanism of the guarantee."""
        sampler = self.sampler(num_examples)
        noise = _noise(sampler, self.bands, self.buffers, self.momentum or 0.0)
        return Mechanism(sampler, _sigma(sampler, noise, self.epsilon), self.l2_clip_norm, noise)


@functools.cache
def _noise(sampler: BatchSampler, bands: int, buffers: int, momentum: float) -> Noise:
    if not buffers:
        return best_noise(sampler, bands, momentum=momentum)
    return optimized_buffers(workload(sampler, momentum=momentum), buffers, sampler.steps_per_epoch)


@functools.cache
def _sigma(sampler: BatchSampler, noise: Noise, epsilon: float) -> float:
    privacy = functools.partial(noise.privacy, sampler)
    return calibrate(privacy, epsilon=epsilon, delta=1 / sampler.num_examples)


@dataclass(frozen=True)
class Auc:
    """Area under the ROC curve of a model."""

    validation: float
    test: float


@dataclass(frozen=True)
class Models:
    """Models of each setting, a seed each; what they gave is written down as it comes.

    Attributes:
      task: What is trained.
      seeds: Of initial parameters, draws and noise: how many.
      written: Folder of the figures of runs, which are not made again; None to keep none.
    """

    task: Clicks
    seeds: int
    written: Path | None = None

    def trained(self, setting: Setting) -> list[Auc]:
        """Returns what the runs of a setting gave, seed by seed."""
        return [self._trained(setting, seed) for seed in range(self.seeds)]

    def _trained(self, setting: Setting, seed: int) -> Auc:
        label = f"{setting}, seed {seed}"
        file = None if self.written is None else self.written / f"{label}.json"
        if file is not None and file.exists():
            return Auc(**json.loads(file.read_text()))
        begin = time.process_time()
        params = self._params(setting, seed)
        of = {
            split: self.task.evaluate(params, self.task.store.blocks(split))["auc"]
            for split in ("validation", "test")
        }
        spent = time.process_time() - begin
        print(f"{label}: AUC {of['test']:.4f} ({spent:.0f} s of CPU)", file=sys.stderr, flush=True)
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(of))
        return Auc(**of)

    def _params(self, setting: Setting, seed: int) -> PyTree:
        """Returns the parameters that a run ends with."""
        columns = self.task.columns()
        mechanism = setting.mechanism(len(columns["label"]))
        algorithm = dpsgd(self.task.loss, ADAM if setting.momentum is None else SGD)
        state = algorithm.init(self.task.init(seed), mechanism)
        sizes = hyperparameters(setting.learning_rate, mechanism.num_steps, setting.momentum)
        state = state._replace(opt_state=state.opt_state._replace(hyperparams=sizes))
        for block in train_blocks(
            algorithm, mechanism, state, columns, root=RootKey.from_insecure_seed(seed)
        ):
            state = block.state
        return jax.device_get(state.params)


class Mean(NamedTuple):
    """Of a figure over seeds."""

    value: float
    error: float
    """Its standard error; NaN of one seed."""

    @classmethod
    def of(cls, values: Sequence[float]) -> Mean:
        """Returns the mean of values."""
        error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
        return cls(fmean(values), error)

    def rows(self, name: str, bar: float | None = None) -> Iterator[Row]:
        """Yields the mean, at least `bar` if there is one, and its standard error."""
        yield Row(name, self.value, "") if bar is None else Row.at_least(name, self.value, "", bar)
        if not math.isnan(self.error):
            yield Row(f"standard error of {name}", self.error, "")


def auc(models: Models, setting: Setting, name: str = "") -> Iterator[Row]:
    """Yields the mean AUC of a setting on test rows and on the validation rows."""
    found = models.trained(setting)
    for split in ("test", "validation"):
        mean = Mean.of([getattr(each, split) for each in found])
        yield from mean.rows(f"AUC, {split} rows, {f'{name}: ' if name else ''}{setting}")


def gain(
    models: Models, setting: Setting, other: Setting, name: str, bar: float | None = None
) -> Iterator[Row]:
    """Yields the mean AUC on test rows of one setting less that of another, seed by seed."""
    both = zip(models.trained(setting), models.trained(other), strict=True)
    yield from Mean.of([a.test - b.test for a, b in both]).rows(name, bar)


# Rates were chosen by the AUC on validation rows of two models each, among 0.05, 0.1, 0.2 and 0.4
# for SGD and 0.001, 0.002, 0.003, 0.005 and 0.008 for Adam.
SGD_RATES = {8.0: 0.2, 3.0: 0.2, 1.0: 0.1}
ADAM_RATES = {8.0: 0.005, 3.0: 0.005, 1.0: 0.005}


def few_steps(epsilon: float) -> dict[str, Setting]:
    """Returns what is compared at 88 steps an epoch, in batches of 1,000, and 10 epochs."""
    one = Setting(epsilon, 1000, 10, SGD_RATES[epsilon])
    return {
        "SGD with independent noise": one,
        "SGD with 8 bands": replace(one, bands=8),
        "SGD with 22 bands": replace(one, bands=22),
        "SGD in a known order, 88 bands": replace(one, bands=88, order="deterministic"),
        "SGD in a known order, 4 buffers": replace(one, buffers=4, order="deterministic"),
        "Adam with independent noise": replace(
            one, learning_rate=ADAM_RATES[epsilon], momentum=None
        ),
    }


def adam_default(epsilon: float) -> Setting:
    """Returns what `dpsgd train` does by default on 88,000 rows."""
    rate = {8.0: 0.0038, 3.0: 0.005, 1.0: 0.0062}[epsilon]
    return Setting(epsilon, 4096, 30, rate, momentum=None)


def best_independent(epsilon: float) -> Setting:
    """Returns the setting of SGD under independent noise that was best on validation rows.

    At epsilon 8 more passes with larger batches help it, as they help Adam; with bands they do not.
    """
    if epsilon == 8.0:
        return Setting(epsilon, 4096, 30, 0.2)
    return few_steps(epsilon)["SGD with independent noise"]
