"""Models of public data sets at the same guarantees, beside peers and what papers report.

A case of `evidence` is a data set, of which `--files` names the folder: without privacy and at each
epsilon, mean and standard error over `--seeds`; `generated` rows are made. `peers`: one model by
every library (`evidence_peers`). `regret`: a fixed grid of settings beside the rules of the tasks
(`evidence_rules`). `published`: figures of papers, each with its source, and what their settings
give (`evidence_papers`). `--written FOLDER` keeps what runs gave, so that a
case that is stopped resumes where it was; a file that is not there leaves its case out. What is not
asked for by `-k` takes about 16 minutes of CPU time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from experiments.benchmarks import (
    evidence_defaults,
    evidence_papers,
    evidence_peers,
    evidence_rules,
)
from experiments.benchmarks.case import Row, at, cases
from experiments.benchmarks.evidence_data import DATA, METRICS
from experiments.benchmarks.models import BARS, Models, aims, certified, mean


def evidence(
    data: str,
    *,
    files: str | None = None,
    epsilons: tuple[float, ...] | None = None,
    seeds: int = 3,
    written: str | None = None,
) -> Iterator[Row]:
    """Measures models of a data set without privacy, and at each epsilon: the data set's own."""
    found = DATA[data]
    name = METRICS[found.metric]
    with found.opened(Path(files or ".")) as task:
        models = Models(task, seeds, None if written is None else Path(written) / data)
        for epsilon, named, target in aims(epsilons or found.epsilons):
            place = f"{data}, {named}"
            spec = found.run(target_delta=found.delta, **target)
            runs, row = models.trained(place, spec), at(place)
            bar = BARS.get(data, {}).get(epsilon, {}).get(found.metric, {})
            yield row(f"{name}, test rows", mean(runs, f"test_{found.metric}"), **bar)
            yield row(f"{name}, validation rows", mean(runs, f"validation_{found.metric}"))
            if epsilon < math.inf:
                yield certified(place, runs, epsilon)
            yield row("CPU time of a run", mean(runs, "cpu_seconds"), "s")


SECONDS = {
    "criteo": 60, "adult": 60, "bank": 60, "mnist": 60, "movielens": 60,
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
            quick=None if found.generated else {"seeds": 1, "epsilons": (3.0,)},
            seconds=SECONDS[name],
            asked=found.generated > 0,
        )
    ),
    *evidence_peers.CASES,
    *evidence_rules.CASES,
    *evidence_papers.CASES,
    *evidence_defaults.CASES,
]
