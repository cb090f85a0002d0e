"""What a run does by default beside what else it can do, over data sets, on the same seeds.

A case is a choice, on every data set where both can be run: how much better the first is than the
second, on validation and on test rows, and the mean over data sets. Settings are those of the
task's rule for each; no run is calibrated but by the choice of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from experiments.benchmarks.case import Estimate, LeftOut, Row, at, cases, figure
from experiments.benchmarks.evidence_data import BARE, DATA, METRICS
from experiments.benchmarks.models import Figures, Models, difference

SGD: Mapping[str, Any] = {"optimizer": "sgd", "momentum": 0.9}
CHOICES: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "lazy tables, not dense": ({"tables": "lazy"}, {}),
    "SGD, not Adam": (SGD, {}),
    "bands, not SGD alone": ({**SGD, "bands": "auto"}, SGD),
    "averages, not the last step": ({"average_tail": 0.1}, {}),
    "calibration, not none": ({"calibration": "platt"}, {}),
}
"""By name: the options of both runs beside `BARE`."""


def defaults(
    choice: str,
    *,
    files: str | None = None,
    choice_data: tuple[str, ...] = ("criteo", "adult", "bank", "mnist", "movielens"),
    choice_epsilons: tuple[float, ...] = (3.0, 1.0),
    choice_seeds: int = 2,
    written: str | None = None,
) -> Iterator[Row]:
    """Measures how much better the first of two options is than the second, by data set."""
    folder = None if written is None else Path(written) / "choices"
    gains: dict[str, list[Estimate]] = {}
    for data in choice_data:
        found = DATA[data]
        metrics = [found.metric, *(["log_loss"] if "calibration" in choice else [])]
        try:
            with found.opened(Path(files or "."), chosen_on=True) as task:
                models = Models(task, choice_seeds, folder)
                for epsilon in choice_epsilons:
                    place = f"{data}, epsilon {epsilon:g}"
                    both: list[list[Figures]] = []
                    for options in CHOICES[choice]:
                        named = ", ".join(f"{k} {v}" for k, v in options.items()) or "default"
                        target = {"target_epsilon": epsilon, "target_delta": found.delta}
                        spec = found.run(**target, **{**BARE, **options})
                        both.append(models.trained(f"{place}, {named}", spec))
                    for metric in metrics:
                        for split in ("validation", "test"):
                            more = difference(both[0], both[1], f"{split}_{metric}")
                            smaller = metric in ("rmse", "log_loss")
                            gain = Estimate(-more if smaller else more, more.error)
                            name = f"better by, {METRICS[metric]}, {split} rows"
                            gains.setdefault(name, []).append(gain)
                            yield at(f"{place}, {choice}")(name, gain)
        except (LeftOut, ValueError) as why:
            yield Row(f"{data}, {choice}: {why}", None)
    for name, of in gains.items():
        error = math.hypot(*(one.error or 0.0 for one in of)) / len(of)
        yield figure(f"mean of {len(of)}, {name}, {choice}", Estimate(fmean(of), error))


CASES = cases(defaults, over={"choice": CHOICES}, seconds=300, asked=True)
