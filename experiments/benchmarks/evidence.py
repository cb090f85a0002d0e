"""Models of public data sets at the same guarantees, beside peers and what papers report.

A case is a data set, of which `--files` names the folder: without privacy and at each epsilon, mean
and standard error over `--seeds`. `--written FOLDER` keeps what runs gave, so that a case that is
stopped goes on where it was; a file that is not there leaves its case out. `peers`: DP-EBM of
interpret-core and logistic regression of diffprivlib on the rows of the tables, in an interpreter
that has them (`--peer-python`). `published`: figures of papers, each with its source.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from dpsgd import RunSpec
from dpsgd.runs.task import Task
from experiments.benchmarks.case import Estimate, LeftOut, Row, at, cases
from experiments.benchmarks.models import (
    BARS,
    FewerRows,
    Models,
    aims,
    certified,
    defaults,
    mean,
    run_of,
)
from experiments.benchmarks.timing import Peer
from experiments.tasks.images.task import Images
from experiments.tasks.ratings.task import Ratings
from experiments.tasks.splits import random_masks
from experiments.tasks.text.task import Text


@dataclass(frozen=True)
class Table:
    """A CSV file, as `dpsgd prepare csv` is told of it: what is public of its columns."""

    label: str
    positive: str
    negative: str
    categories: tuple[str, ...]
    bounds: Mapping[str, tuple[float, float]]
    """Of each numeric column."""

    @property
    def words(self) -> list[str]:
        """The command's, but for its paths."""
        told = [f"{name}={low:g}:{high:g}" for name, (low, high) in self.bounds.items()]
        labels = ["--label", self.label, "--positive", self.positive, "--negative", self.negative]
        return [*labels, "--categories", *self.categories, "--numbers", *self.bounds,
                "--bounds", *told]  # fmt: skip


ADULT = Table(
    "income", ">50K", "<=50K",
    ("workclass", "education", "marital-status", "occupation", "relationship", "race", "sex",
     "native-country"),
    {"age": (16, 90), "fnlwgt": (1e4, 1e6), "education-num": (0, 16), "capital-gain": (0, 1e5),
     "capital-loss": (0, 5000), "hours-per-week": (0, 99)},
)  # fmt: skip
BANK = Table(
    "y", "yes", "no",
    ("poutcome", "job", "marital", "education", "default", "housing", "loan", "contact", "month"),
    {"day": (0, 31), "campaign": (0, 60), "duration": (0, 4000), "pdays": (0, 900),
     "previous": (0, 60), "age": (17, 95), "balance": (-8000, 100000)},
)  # fmt: skip


def sized(batch_size: int, epochs: int, **settings: Any) -> Callable[..., RunSpec]:
    """Returns runs whose settings are given, by their targets."""
    return lambda **target: run_of("balls-and-bins", batch_size, epochs, **settings, **target)


@dataclass(frozen=True)
class DataSet:
    """Rows in a file, what learns them, and the figure that tells models apart."""

    file: str
    task: Callable[[Path], Task]
    """Of the file, or of the store that is prepared of it."""
    metric: str = "auc"
    run: Callable[..., RunSpec] = defaults
    delta: float | str = "1/n"
    prepare: tuple[str, ...] | Table | None = None
    """What `dpsgd prepare` is told, if the task reads a store."""

    @contextlib.contextmanager
    def opened(self, folder: Path) -> Iterator[Task]:
        """Yields the task on the rows in a folder; LeftOut if their file is not there."""
        path = folder / self.file
        if not path.exists():
            raise LeftOut(f"{self.file} is not in the folder that --files names")
        if self.prepare is None:
            yield self.task(path)
            return
        from experiments import cli

        told = self.prepare
        first, *rest = ("csv", *told.words) if isinstance(told, Table) else told
        with tempfile.TemporaryDirectory() as name:
            store = Path(name) / "store"
            with contextlib.redirect_stdout(io.StringIO()):
                if cli.main(["prepare", first, str(path), str(store), *rest]):
                    raise ValueError(f"{path} could not be prepared")
            yield self.task(store)


DATA: Mapping[str, DataSet] = {
    "criteo": DataSet("criteo_display_110k.tsv.gz", FewerRows, prepare=("criteo-display",)),
    "adult": DataSet("adult.csv.gz", FewerRows, prepare=ADULT),
    "bank": DataSet("bank.csv.gz", FewerRows, prepare=BANK),
    "mnist": DataSet(
        "mnist_60k.npz",
        lambda path: Images(path, features="scattering", channels=()),
        "accuracy",
        delta=1e-5,
    ),
    "movielens": DataSet("ml-100k_u.data.gz", Ratings, "rmse", sized(256, 60, learning_rate=2e-2)),
    "sst2": DataSet("sst2.tsv.gz", Text, "accuracy", delta=1e-5),
}
"""By name. Of images, phrases and ratings the last 80/10/10 split, by number, is the task's."""
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
    assert files is not None, "the case needs --files"
    found = DATA[data]
    name = METRICS[found.metric]
    with found.opened(Path(files)) as task:
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


# ------------------------------------------------------------------------------------------- peers

PEERS = """
import csv, gzip, json, sys, time, warnings
from importlib.metadata import version
import numpy as np
warnings.simplefilter("ignore")
has = {}
try:
    from interpret.privacy import DPExplainableBoostingClassifier
    has["DP-EBM"] = "interpret-core " + version("interpret-core")
except Exception as error:
    has["DP-EBM"] = None
try:
    from diffprivlib.models import LogisticRegression
    has["logistic regression"] = "diffprivlib " + version("diffprivlib")
except Exception as error:
    has["logistic regression"] = None
print(json.dumps(has), flush=True)

def scored(asked):
    rows, bounds, seed = asked["rows"], asked["bounds"], asked["seed"]
    count, split = len(bounds), asked["train"]
    x = np.array([[float(v) for v in row[:count]] + row[count:] for row in rows], object)
    y = np.array(asked["labels"])
    if asked["peer"] == "DP-EBM":
        kinds = ["continuous"] * count + ["nominal"] * (x.shape[1] - count)
        limits = {i: tuple(b) for i, b in enumerate(bounds)}
        model = DPExplainableBoostingClassifier(
            feature_types=kinds, privacy_bounds=limits, epsilon=asked["epsilon"],
            delta=asked["delta"], random_state=seed, n_jobs=1)
    else:
        low, high = np.array(bounds, float).T
        x_numbers = np.clip((x[:, :count].astype(float) - low) / (high - low), 0, 1)
        flags = [(x[:, i] == v) for i in range(count, x.shape[1]) for v in sorted(set(x[:, i]))]
        model = LogisticRegression(
            epsilon=asked["epsilon"], data_norm=float(np.sqrt(x.shape[1])), max_iter=1000,
            random_state=seed)
        x = np.column_stack([x_numbers, *flags]).astype(float)
    begin = time.process_time()
    model.fit(x[:split], y[:split])
    spent = time.process_time() - begin
    return model.predict_proba(x[split:])[:, 1].tolist(), spent

for line in sys.stdin:
    print(json.dumps(scored(json.loads(line))), flush=True)
"""
"""Reads questions, and answers probabilities of the rows after the training rows, and seconds."""
TELLS = {"DP-EBM": "delta 1 / n", "logistic regression": "delta 0"}


def peers(
    data: str,
    *,
    files: str | None = None,
    epsilons: tuple[float, ...] = EPSILONS,
    seeds: int = 3,
    peer_python: str | None = None,
) -> Iterator[Row]:
    """Measures what other libraries learn of the same training rows, by the same public bounds."""
    assert files is not None, "the case needs --files"
    table, path = DATA[data].prepare, Path(files) / DATA[data].file
    assert isinstance(table, Table), data
    if not path.exists():
        raise LeftOut(f"{path.name} is not in the folder that --files names")
    rows, labels, train = _rows(path, table)
    with Peer(peer_python or sys.executable, PEERS) as peer:
        for name, version in peer.description.items():
            if version is None:
                yield Row(f"AUC, test rows, {name}, {data}: the peer is not installed", None)
                continue
            for epsilon in epsilons:
                question = {
                    "peer": name, "rows": rows, "labels": labels, "train": train,
                    "bounds": list(table.bounds.values()), "epsilon": epsilon, "delta": 1 / train,
                }  # fmt: skip
                answers = [peer.ask(**question, seed=seed) for seed in range(seeds)]
                row = at(f"{data}, epsilon {epsilon:g}, {name} of {version}, {TELLS[name]}")
                scores = [_auc(found, labels[train:]) for found, _ in answers]
                yield row("AUC, test rows", Estimate.mean(scores))
                yield row("CPU time of a run", Estimate.mean([spent for _, spent in answers]), "s")


def _rows(path: Path, table: Table) -> tuple[list[list[str]], list[int], int]:
    """Returns the training rows and then the test rows, numbers first, labels, and how many train.

    They are the rows that train and test our models.
    """
    import numpy as np

    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        found = list(csv.DictReader(file, skipinitialspace=True))
    masks = random_masks(np.arange(len(found), dtype=np.uint64))
    order = [*np.flatnonzero(masks["train"]), *np.flatnonzero(masks["test"])]
    columns = (*table.bounds, *table.categories)
    rows = [[found[i][name] for name in columns] for i in order]
    labels = [int(found[i][table.label] == table.positive) for i in order]
    return rows, labels, int(masks["train"].sum())


def _auc(scores: list[float], labels: list[int]) -> float:
    import numpy as np

    from experiments.tasks.clicks.metrics import auc

    return float(auc(np.asarray(scores), np.asarray(labels)))


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


SECONDS = {"criteo": 120, "adult": 30, "bank": 40, "mnist": 600, "movielens": 60, "sst2": 900}
CASES = [
    *(
        case
        for name in DATA
        for case in cases(
            evidence, over={"data": [name]}, needs=("--files",), seconds=SECONDS[name]
        )
    ),
    *cases(peers, over={"data": ["adult", "bank"]}, needs=("--files",), seconds=120),
    *cases(published, seconds=1),
]
