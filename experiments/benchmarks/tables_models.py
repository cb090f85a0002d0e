"""Click models whose tables are lazy, and so trained by SGD, beside models trained by Adam alone.

Both are what `dpsgd train` makes at its defaults for an epsilon, calibration included, on real
rows; it makes no difference to AUC. Runs leave out their audit, which has no influence on a model.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dpsgd import RunSpec
from experiments.benchmarks.click_models import FIGURES, Models, Trained, defaults
from experiments.benchmarks.rows import Row
from experiments.benchmarks.sgd_models import Mean

EPSILONS = 1.0, 3.0, 8.0
SURELY = -0.003
"""At least so much is AUC with lazy tables less that of Adam, two standard errors left out."""
SEEDS = 20
"""Of that bar: of a few runs two standard errors may be more than it."""


@dataclass(frozen=True)
class Sizes:
    """Batches and passes, None for what is chosen by default."""

    batch_size: int | None = None
    epochs: int | None = None

    def __str__(self) -> str:
        if self.batch_size is None:
            return "batches and epochs by default"
        return f"batch {self.batch_size}, {self.epochs} epochs"

    def config(self, epsilon: float, tables: str) -> RunSpec:
        """Returns the run that somebody asks for."""
        spec = defaults(target_epsilon=epsilon, tables=tables, audit=False)
        sampler = dataclasses.replace(spec.sampler, **dataclasses.asdict(self))
        return dataclasses.replace(spec, sampler=sampler)


SIZES = {"models": Sizes(1024, 10), "defaults": Sizes()}
"""By the part of the benchmark."""
SHOWN = "auc", "log_loss"


def rows(models: Models, sizes: Sizes, epsilons: Sequence[float] = EPSILONS) -> Iterator[Row]:
    """Yields what models with lazy tables and dense ones reach, and how far apart they are."""
    for epsilon in epsilons:
        at = f"epsilon {epsilon:g}, {sizes}"
        found = {
            tables: models.trained(f"{tables} tables, {at}", sizes.config(epsilon, tables))
            for tables in ("lazy", "dense")
        }
        for tables, runs in found.items():
            by = "lazy tables" if tables == "lazy" else "Adam alone"
            for split, figure in itertools.product(("test", "validation"), SHOWN):
                mean = Mean.of([run.metrics[f"{split}_{figure}"] for run in runs])
                yield from mean.rows(f"{FIGURES[figure][0]}, {split} rows, {by}, {at}")
            least = min(run.cpu_seconds for run in runs)
            yield Row(f"least CPU time of a run, {by}, {at}", least, "s")
        yield from apart(found["lazy"], found["dense"], at)


def apart(lazy: Sequence[Trained], dense: Sequence[Trained], at: str) -> Iterator[Row]:
    """Yields how far models are apart on test rows, seed by seed; of AUC it has a bar."""
    for figure in SHOWN:
        key = f"test_{figure}"
        both = zip(lazy, dense, strict=True)
        mean = Mean.of([a.metrics[key] - b.metrics[key] for a, b in both])
        name = f"{FIGURES[figure][0]}, lazy tables minus Adam alone, test rows, {at}"
        yield from mean.rows(f"{name}, {len(lazy)} seeds")
        if figure == "auc" and len(lazy) > 1:
            name, surely = f"{name}, less 2 standard errors", mean.value - 2 * mean.error
            enough = len(lazy) >= SEEDS
            yield Row.at_least(name, surely, "", SURELY) if enough else Row(name, surely, "")
