"""Click models on real rows, a seed each: as `dpsgd train` makes them, and by SGD under bands."""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import dpsgd
from dpsgd import RunSpec
from dpsgd.runs.task import Task
from experiments.benchmarks.case import Estimate, Row, at, figure
from experiments.benchmarks.timing import Spent
from experiments.tasks.clicks.sizes import ModelConfig
from experiments.tasks.clicks.synthetic.rows import SyntheticStore, write_store
from experiments.tasks.clicks.task import Clicks
from samplers.settings import SETTINGS

PyTree = Any
Figures = Mapping[str, float]
"""What one run gave: "test_auc", "epsilon" (certified from above, of all that it released), ..."""

SHOWN = {
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
class Models:
    """Models of one task, `seeds` of a kind; what runs gave is kept in the folder `written`."""

    task: Task
    seeds: int
    written: Path | None = None

    @classmethod
    def of(
        cls, store: str | None, seeds: int = 1, written: str | None = None, **task: Any
    ) -> Models:
        """Returns those on the rows of `store`; `task` has settings of `FewerRows`."""
        assert store is not None, "the case needs --store"
        made = FewerRows(Path(store), **task)
        return cls(made, seeds, None if written is None else Path(written))

    def trained(self, name: str, spec: RunSpec) -> list[Figures]:
        """Returns what the runs of `spec` gave, a seed of the initial parameters each."""
        name = f"{name}, {getattr(self.task, 'kept_aside', 0)} rows kept aside"
        return [self._trained(f"{name}, seed {seed}", spec, seed) for seed in range(self.seeds)]

    def _trained(self, label: str, spec: RunSpec, seed: int) -> Figures:
        file = None if self.written is None else self.written / f"{label}.json"
        return kept(file, lambda: self._measured(label, spec, seed))

    def _measured(self, label: str, spec: RunSpec, seed: int) -> Figures:
        seeded, report = replace(spec, init_seed=seed), {}
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "run"
            spent = Spent.on(lambda: report.update(dpsgd.run(self.task, seeded, out)))
        found = {k: math.nan if x is None else x for k, x in report["metrics"].items()}
        epsilon = report["epsilon_upper"]
        found |= spent._asdict() | {"epsilon": math.inf if epsilon is None else epsilon}
        headline = str(self.task.describe()["headline"])
        print(f"{label}: {headline} {found[headline]:.4f}", file=sys.stderr, flush=True)
        return found


def kept(file: Path | None, measure: Callable[[], Any]) -> Any:
    """Returns what `file` holds, or else what `measure` gives, which is then written there."""
    if file is not None and file.exists():
        return json.loads(file.read_text())
    found = measure()
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found))
    return found


def run_of(sampler: str, batch_size: int | None, epochs: int | None = None, **rest: Any) -> RunSpec:
    """Returns the run that is asked for; None for what is chosen by default."""
    return RunSpec.of(SETTINGS[sampler](batch_size=batch_size, epochs=epochs), **rest)


def defaults(target_delta: float | str = "1/n", **target: Any) -> RunSpec:
    """Returns the run of which `target` alone is given."""
    return run_of("balls-and-bins", None, target_delta=target_delta, **target)


def certified(place: str, runs: Sequence[Figures], epsilon: float) -> Row:
    """Returns the largest epsilon that is certified for a run, beside the one that was asked."""
    return at(place)(
        "certified epsilon", max(x["epsilon"] for x in runs), "epsilon", at_most=epsilon
    )


@contextmanager
def generated(rows: int, model: ModelConfig) -> Iterator[tuple[Clicks, Path, SyntheticStore]]:
    """Yields clicks on a store of so many generated rows, a folder for runs, and what was planted.

    Both are gone in the end.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        made = write_store(folder / "store", rows, seed=0)
        sizes = {name: size for name, size in vars(model).items() if name != "wide"}
        yield Clicks(folder / "store", **sizes), folder, made


def mean(runs: Sequence[Figures], key: str) -> Estimate:
    """Returns the mean of a figure over runs."""
    return Estimate.mean([run[key] for run in runs])


def difference(runs: Sequence[Figures], others: Sequence[Figures], key: str) -> Estimate:
    """Returns the mean of the difference, seed by seed."""
    return Estimate.mean([a[key] - b[key] for a, b in zip(runs, others, strict=True)])


# ----------------------------------------------------------------- at the defaults of `dpsgd train`

BARS: dict[str, dict[float, dict[str, dict[str, float]]]] = {
    "criteo": {
        8.0: {"log_loss": {"at_most": 0.497}, "auc": {"at_least": 0.7465}},
        3.0: {"log_loss": {"at_most": 0.499}, "auc": {"at_least": 0.7435}},
        1.0: {"log_loss": {"at_most": 0.504}, "auc": {"at_least": 0.736}},
    },
    "adult": {
        e: {"auc": {"at_least": x}} for e, x in {math.inf: 0.909, 3: 0.907, 1: 0.904}.items()
    },
    "bank": {e: {"auc": {"at_least": x}} for e, x in {math.inf: 0.914, 3: 0.912, 1: 0.909}.items()},
}
"""By data set and epsilon, calibration included: what a model must reach on test rows, as a mean
over seeds."""
MOST_LOG_LOSS = 1.03
"""Over that of the model without privacy."""
MOST_MISCALIBRATED = 0.03
"""Between predicted over observed clicks of a private model and of the one without privacy."""
MOST_SECONDS = 300.0
"""For a whole run, with the search for the noise, audit and evaluation: in CPU time on one thread,
which no clock on idle cores exceeds by much, while one on busy cores tells nothing."""


def at_defaults(
    *,
    store: str | None = None,
    kept_aside: int = 0,
    epsilons: tuple[float, ...] = (8.0, 3.0, 1.0),
    seeds: int = 10,
    delta: float = 0.0,
    bars: str = "criteo",
    model: str | None = None,
    written: str | None = None,
) -> Iterator[Row]:
    """Measures models without privacy, and those of each epsilon, beside the bars of a data set.

    They are of one preset, if `model` is given; a delta of 0 is 1/n.
    """
    models = Models.of(store, seeds, written, kept_aside=kept_aside, model=model)
    without = models.trained("no privacy", defaults(non_private=True))
    for split in ("kept",) if kept_aside else ("validation", "test"):
        beside = BARS[bars].get(math.inf, {}) if split == "test" else {}
        yield from means(without, split, f"no privacy, {split} rows", beside)
    for epsilon in epsilons:
        place = f"epsilon {epsilon:g}"
        config = defaults(delta or "1/n", target_epsilon=epsilon)
        row, private = at(place), models.trained(place, config)
        yield from beside_bars(private, without, "kept" if kept_aside else "test", epsilon, bars)
        yield certified(place, private, epsilon)
        most = max(run["cpu_seconds"] for run in private)
        yield row("CPU time of the longest run", most, "s", at_most=MOST_SECONDS)
        yield row("mean time of a run by the clock", mean(private, "seconds"), "s")
        if not kept_aside:
            yield from means(private, "validation", f"{place}, validation rows")
            name, one = f"{place}, not calibrated", replace(models, seeds=1)
            bare = one.trained(name, replace(config, calibration="none"))
            yield from means(bare, "test", f"{name}, test rows, one run")


def beside_bars(
    private: Sequence[Figures],
    without: Sequence[Figures],
    split: str,
    epsilon: float,
    bars: str = "criteo",
) -> Iterator[Row]:
    """Yields the figures of private models beside the bars of their epsilon, if it has any."""
    place, level = f"epsilon {epsilon:g}, {split} rows", f"{split}_predicted_over_observed"
    beside = BARS[bars].get(epsilon, {}) if split == "test" else {}
    yield from means(private, split, place, beside)
    over = mean(private, f"{split}_log_loss") / mean(without, f"{split}_log_loss")
    yield at(place)("log loss over that without privacy", over, "x", at_most=MOST_LOG_LOSS)
    off = abs(fmean(x[level] for x in private) - fmean(x[level] for x in without))
    name = "predicted / observed, from that without privacy"
    yield at(place)(name, off, at_most=MOST_MISCALIBRATED)


def means(
    runs: Sequence[Figures], split: str, place: str, bars: Mapping[str, Mapping[str, float]] = {}
) -> Iterator[Row]:
    """Yields the mean of each figure over runs."""
    for key, (name, unit) in SHOWN.items():
        yield at(place)(name, mean(runs, f"{split}_{key}"), unit, **bars.get(key, {}))


# ---------------------------------------------------------------------------------- of lazy tables

SURELY = -0.003
"""At least so much is AUC with lazy tables less that of Adam, two standard errors left out."""
SEEDS = 20
"""Of that bar: of a few runs two standard errors may be more than it."""


def asked_for(epsilon: float, tables: str, batch_size: int | None, epochs: int | None) -> RunSpec:
    """Returns a run with these tables; None for what is chosen by default."""
    chosen = {"target_epsilon": epsilon, "target_delta": "1/n", "tables": tables, "audit": False}
    return run_of("balls-and-bins", batch_size, epochs, **chosen)


def lazy_and_dense(models: Models, batch_size: int | None, epochs: int | None) -> Iterator[Row]:
    """Yields what models with lazy tables and by Adam alone reach, and how far they differ."""
    sizes = f"batch {batch_size}, {epochs} epochs"
    if batch_size is None:
        sizes = "batches and epochs by default"
    for epsilon in (1.0, 3.0, 8.0):
        place = f"epsilon {epsilon:g}, {sizes}"
        row, found = at(place), {}
        for tables, by in (("lazy", "lazy tables"), ("dense", "Adam alone")):
            spec = asked_for(epsilon, tables, batch_size, epochs)
            found[by] = runs = models.trained(f"{tables} tables, {place}", spec)
            for split in ("test", "validation"):
                for key in ("auc", "log_loss"):
                    yield row(f"{SHOWN[key][0]}, {split} rows, {by}", mean(runs, f"{split}_{key}"))
            least = min(run["cpu_seconds"] for run in runs)
            yield row(f"least CPU time of a run, {by}", least, "s")
        for key in ("auc", "log_loss"):
            off = difference(found["lazy tables"], found["Adam alone"], f"test_{key}")
            name = f"{SHOWN[key][0]}, lazy tables minus Adam alone, test rows, {place}"
            yield figure(f"{name}, {models.seeds} seeds", off)
            if key == "auc" and off.error is not None:
                bar = SURELY if models.seeds >= SEEDS else None
                surely = off - 2 * off.error
                yield figure(f"{name}, less 2 standard errors", surely, at_least=bar)
