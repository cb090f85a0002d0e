"""Models of public data sets at the same guarantees, beside peers and what papers report.

A case of `evidence` is a data set, of which `--files` names the folder: without privacy and at each
epsilon, mean and standard error over `--seeds`; `generated` rows are made. `peers`: one model by
every library (`evidence_peers`). `regret`: a fixed grid of settings beside the rules of the tasks
(`evidence_rules`). `published`: figures of papers, each with its source. `--written FOLDER` keeps
what runs gave, so that a case that is stopped goes on where it was; a file that is not there leaves
its case out. What is not asked for by `-k` takes about 16 minutes of CPU time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from experiments.benchmarks import evidence_peers, evidence_rules
from experiments.benchmarks.case import Row, at, cases
from experiments.benchmarks.evidence_data import DATA
from experiments.benchmarks.models import BARS, Models, aims, certified, mean

METRICS = {"auc": "AUC", "accuracy": "accuracy", "rmse": "RMSE"}
EPSILONS = (8.0, 3.0, 1.0)


def evidence(
    data: str,
    *,
    files: str | None = None,
    epsilons: tuple[float, ...] = EPSILONS,
    seeds: int = 3,
    written: str | None = None,
) -> Iterator[Row]:
    """Measures models of a data set without privacy, and at each epsilon."""
    found = DATA[data]
    name = METRICS[found.metric]
    with found.opened(Path(files or ".")) as task:
        models = Models(task, seeds, None if written is None else Path(written) / data)
        for epsilon, named, target in aims(epsilons):
            place = f"{data}, {named}"
            spec = found.run(target_delta=found.delta, **target)
            runs, row = models.trained(place, spec), at(place)
            bar = BARS.get(data, {}).get(epsilon, {}).get(found.metric, {})
            yield row(f"{name}, test rows", mean(runs, f"test_{found.metric}"), **bar)
            yield row(f"{name}, validation rows", mean(runs, f"validation_{found.metric}"))
            if epsilon < math.inf:
                yield certified(place, runs, epsilon)
            yield row("CPU time of a run", mean(runs, "cpu_seconds"), "s")


# --------------------------------------------------------------------------------------- published


class Published(NamedTuple):
    """A figure that a paper reports."""

    data: str
    epsilon: float
    delta: str
    metric: str
    value: float
    what: str
    source: str


_HANDCRAFTED = (
    "Tramèr, Boneh, ICLR 2021; table of main results in the README of the authors' repository, "
    "github.com/ftramer/Handcrafted-DP"
)
_RGP = (
    "Yu, Zhang, Chen, Yin, Liu, ICML 2021; table of results in language/README.md of the authors' "
    "repository, github.com/dayu11/Differentially-Private-Deep-Learning"
)
PUBLISHED = (
    Published("mnist", 3.0, "1e-05", "accuracy", 0.981, "CNN on pixels", _HANDCRAFTED),
    Published("mnist", 3.0, "1e-05", "accuracy", 0.987, "scattering, linear", _HANDCRAFTED),
    Published("mnist", 3.0, "1e-05", "accuracy", 0.987, "scattering, CNN", _HANDCRAFTED),
    Published("sst2", 8.0, "1e-05", "accuracy", 0.916, "RoBERTa base, fine-tuned", _RGP),
    Published("sst2", 8.0, "1e-05", "accuracy", 0.930, "RoBERTa large, fine-tuned", _RGP),
)
"""Only what could be read where it says, to the digits that are given there; papers' own splits."""


def published() -> Iterator[Row]:
    """Yields what papers report; nothing is measured."""
    for one in PUBLISHED:
        place = f"{one.data}, epsilon {one.epsilon:g}, delta {one.delta}, {one.what}"
        yield at(f"{place} ({one.source})")(f"{METRICS[one.metric]}, published", one.value)


SECONDS = {
    "criteo": 60, "adult": 60, "bank": 60, "mnist": 60, "movielens": 60, "sst2": 240,
    "generated_460k": 240, "generated_4600k": 3_600,
}  # fmt: skip
CASES = [
    *(
        case
        for name, found in DATA.items()
        for case in cases(
            evidence,
            over={"data": [name]},
            needs=() if found.generated else ("--files",),
            seconds=SECONDS[name],
            asked=found.generated > 0,
        )
    ),
    *evidence_peers.CASES,
    *evidence_rules.CASES,
    *cases(published, seconds=1),
]
