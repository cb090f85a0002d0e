"""Public data sets of the evidence: their rows, what learns them, and which rows test."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from dpsgd import RunSpec
from dpsgd.runs.task import Task
from experiments.benchmarks.case import LeftOut
from experiments.benchmarks.models import FewerRows, defaults, generated, run_of
from experiments.tasks.clicks.sizes import PRESETS
from experiments.tasks.images import sources
from experiments.tasks.images.task import Images
from experiments.tasks.ratings.task import Ratings
from experiments.tasks.splits import Columns, random_masks

METRICS = {"auc": "AUC", "accuracy": "accuracy", "rmse": "RMSE", "log_loss": "log loss"}
"""The figures by which models are told apart, by the name that a task gives them."""


@dataclass(frozen=True)
class Table:
    """A CSV file, as `dpsgd prepare csv` is told of it: what is public of its columns."""

    label: str
    positive: str
    negative: str
    categories: tuple[str, ...]
    bounds: Mapping[str, tuple[float, float]]
    """Of each numeric column."""
    names: tuple[str, ...] = ()
    """Of all columns, where its source publishes it without a header."""

    def rows(self, path: Path) -> list[dict[str, str]]:
        """Returns the rows of a file: with a header and commas, or as UCI publishes it."""
        opened = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rt", encoding="utf-8", newline="") as file:
            lines = [line for line in file if line.strip()]
        names = self.names if self.names and self.label not in lines[0] else None
        delimiter = ";" if ";" in lines[0] else ","
        return list(csv.DictReader(lines, names, delimiter=delimiter, skipinitialspace=True))

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
    ("age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation",
     "relationship", "race", "sex", "capital-gain", "capital-loss", "hours-per-week",
     "native-country", "income"),
)  # fmt: skip
BANK = Table(
    "y", "yes", "no",
    ("poutcome", "job", "marital", "education", "default", "housing", "loan", "contact", "month"),
    {"day": (0, 31), "campaign": (0, 60), "duration": (0, 4000), "pdays": (0, 900),
     "previous": (0, 60), "age": (17, 95), "balance": (-8000, 100000)},
)  # fmt: skip


TESTED, VALIDATED = 10_000, 1_000
COLUMNS = "image", "label"


@dataclass(frozen=True)
class FreshTest(Images):
    """Images of which those test that no earlier choice of settings was measured on.

    Settings were chosen by the accuracy on a sixth of the file, at one of its ends, and figures
    were shown of the validation and test rows of the split by number. Rows that train by that split
    and lie in neither end test here; some validation rows remain, and all others train.
    """

    @cached_property
    def source(self) -> sources.Images:
        """The images, read when they are first needed."""
        found = sources.load(self.data, num_classes=self.num_classes)
        before, total = found.splits, sum(len(x["label"]) for x in found.splits.values())
        numbers = np.flatnonzero(random_masks(np.arange(total, dtype=np.uint64))["train"])
        middle = np.flatnonzero((numbers >= total // 6) & (numbers < total - total // 6))
        tests = np.isin(np.arange(len(numbers)), middle[:TESTED])
        parts: dict[str, list[tuple[Columns, Any]]] = {
            "train": [(before["train"], ~tests), (before["test"], slice(None)),
                      (before["validation"], slice(VALIDATED, None))],
            "validation": [(before["validation"], slice(VALIDATED))],
            "test": [(before["train"], tests)],
        }  # fmt: skip
        splits = {
            split: {k: np.concatenate([rows[k][which] for rows, which in some]) for k in COLUMNS}
            for split, some in parts.items()
        }
        return found._replace(splits=splits)


def sized(batch_size: int, epochs: int, **settings: Any) -> Callable[..., RunSpec]:
    """Returns runs whose settings are given, by their targets."""
    return lambda **target: run_of("balls-and-bins", batch_size, epochs, **settings, **target)


@dataclass(frozen=True)
class DataSet:
    """Rows in a file, what learns them, and the figure that tells models apart."""

    files: tuple[str, ...]
    """Its names, of which the first that is there is read; none of rows that are generated."""
    task: Callable[[Path], Task]
    """Of the file, or of the store that is prepared of it."""
    metric: str = "auc"
    epsilons: tuple[float, ...] = (8.0, 3.0, 1.0)
    run: Callable[..., RunSpec] = defaults
    delta: float | str = "1/n"
    prepare: tuple[str, ...] | Table | None = None
    """What `dpsgd prepare` is told, if the task reads a store."""

    chosen_on: Callable[[Path], Task] | None = None
    """Where settings are chosen, if other rows than the task's test there, or for one model."""
    generated: int = 0
    """Rows that are generated in place of a file."""

    def path(self, folder: Path) -> Path:
        """Returns the file in a folder; LeftOut if there is none."""
        found = [path for path in (folder / name for name in self.files) if path.exists()]
        if not found:
            names = " or ".join(self.files)
            raise LeftOut(f"{names} is not in the folder that --files names")
        return found[0]

    @contextlib.contextmanager
    def opened(self, folder: Path, *, chosen_on: bool = False) -> Iterator[Task]:
        """Yields the task on the rows in a folder; LeftOut if their file is not there."""
        if self.generated:
            with generated(self.generated, PRESETS["wide-and-deep"]) as (clicks, _, _):
                yield self.task(clicks.data)
            return
        path, told = self.path(folder), self.prepare
        task = self.chosen_on if chosen_on and self.chosen_on else self.task
        if told is None:
            yield task(path)
            return
        from experiments import cli

        with tempfile.TemporaryDirectory() as name:
            store = Path(name) / "store"
            if isinstance(told, Table):
                rows, path, told = told.rows(path), Path(name) / "rows.csv", ("csv", *told.words)
                with path.open("w", encoding="utf-8", newline="") as file:
                    writer = csv.DictWriter(file, rows[0])
                    writer.writeheader()
                    writer.writerows(rows)
            first, *rest = told
            with contextlib.redirect_stdout(io.StringIO()):
                if cli.main(["prepare", first, str(path), str(store), *rest]):
                    raise ValueError(f"{path} could not be prepared")
            yield task(store)


LINEAR: Mapping[str, Any] = {"task": FewerRows, "chosen_on": partial(FewerRows, model="linear")}
BARE: Mapping[str, Any] = {"calibration": "none", "audit": False, "schedule": "cosine"}
"""Of runs by which choices are compared: nothing is averaged either, unless it is asked for."""
DATA: Mapping[str, DataSet] = {
    "criteo": DataSet(("criteo_display_110k.tsv.gz",), **LINEAR, prepare=("criteo-display",)),
    "adult": DataSet(("adult.csv.gz", "adult.data"), **LINEAR, prepare=ADULT),
    "bank": DataSet(("bank.csv.gz", "bank-full.csv"), **LINEAR, prepare=BANK),
    "mnist": DataSet(
        ("mnist_60k.npz",),
        lambda path: FreshTest(path, num_classes=10),
        "accuracy",
        (9.74, 8.0, 7.1, 3.01, 3.0, 2.92, 1.2, 1.19, 1.0),  # the ones that sources print as well
        delta=1e-5,
        chosen_on=lambda path: Images(path, num_classes=10),
    ),
    "movielens": DataSet(("ml-100k_u.data.gz", "u.data"), Ratings, "rmse"),
    "generated_460k": DataSet((), FewerRows, generated=460_000),
    "generated_4600k": DataSet((), FewerRows, generated=4_600_000),
}
"""By name. Of ratings the 80/10/10 split, by number, is the task's."""
