"""Table of results, one row per finished run: pages, figures and sweeps are views of it.

Columns are the run's settings, guarantee, metrics, times and digests. Each row is read from the
run's directory, where the ledger proves the guarantee. A table read from a file holds the values of
the time when it was written.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl

from dpsgd.files import write_atomically
from dpsgd.noise.registry import noise_label
from dpsgd.runs.records import near
from dpsgd.runs.result import FinishedRun
from dpsgd.runs.spec import PARTS, known_options
from experiments.results.points import CODE, SPECIFICATION, Better, Headline
from samplers.settings import SamplerSettings


class Axis(NamedTuple):
    """Spellings of a setting."""

    short: str
    """Spelling in the names of runs."""
    symbol: str
    """Spelling in tables and legends."""
    label: str
    """Spelling under a panel."""


AXES = {
    "noise_multiplier": Axis("sigma", "σ", "noise multiplier σ"),
    "target_epsilon": Axis("eps", "ε", "ε by which the noise was chosen"),
    "batch_size": Axis("b", "batch", "batch size"),
    "epochs": Axis("e", "epochs", "epochs"),
    "learning_rate": Axis("lr", "learning rate", "learning rate"),
    "l2_clip_norm": Axis("c", "C", "clipping norm C"),
    "bands": Axis("bands", "bands", "steps b over which noise is correlated"),
}
"""Settings that a sweep can vary."""
PRIVACY = ("noise_multiplier", "target_epsilon")
"""Settings of privacy: a private run has one, another run none."""
IN_SAMPLER = ("batch_size", "epochs")
"""Settings that belong to samplers."""
_OF_NOISE = {*PARTS["noise"].values(), *PARTS["clipping"].values()}
WITH_NOISE = {"noise", "clipping", "calibration", "optimistic"} | {
    name for name, option in known_options().items() if option.owner in _OF_NOISE
}
"""Options of clipping and noise, which a run without privacy does not have."""

GUARANTEE = (
    *("guarantee", "epsilon_lower", "epsilon_upper", "delta", "attack_advantage_lower"),
    *("attack_advantage_upper", "adjacency", "unit", "num_examples", "num_steps", "num_params"),
    *("noise", "signal_to_noise", "attempts", "audit", "notes", "not_covered"),
)
"""Columns of the guarantee and its sizes."""
TIMES = ("seconds", "training_seconds", "examples_per_second")
"""Columns of times: null if secret, as in a private selection."""
DIGESTS = ("params_sha256", SPECIFICATION, CODE, "data")
"""Columns that identify model, settings, code and rows."""
COLUMNS = (
    *("run", "task", "headline", "better", "sampler", "sampler_settings", *AXES),
    *("optimistic", "init_seed", "insecure_seed", *GUARANTEE, *TIMES, *DIGESTS),
)
"""Columns of every table; a table adds its runs' further settings and metrics."""
_METRICS = "metrics"
RUNS = "runs"
"""Folder of a sweep's run directories."""


@dataclass(frozen=True)
class Table:
    """Finished runs, one per row of `frame`.

    An undefined metric, after a diverged training, is NaN; an unmeasured one is null. `data`
    numbers the training rows, equal numbers for equal rows: their digest depends on private rows
    and is in no table. Runs without noise have null for the clipping norm and bands.
    """

    frame: pl.DataFrame
    metrics: tuple[str, ...]
    """Names of the metric columns."""

    @classmethod
    def collect(cls, runs: Mapping[str, FinishedRun]) -> Table:
        """Returns the table of finished runs by their names."""
        data: dict[str, int] = {}
        rows = []
        for name, run in runs.items():
            row = row_of(name, run)
            if run.data is not None:
                row["data"] = data.setdefault(run.data, len(data))
            rows.append(row)
        metrics = [name for run in runs.values() for name in run.record["metrics"]]
        return cls.of_rows(rows, [name for name in metrics if name not in COLUMNS])

    @classmethod
    def of_rows(cls, rows: Sequence[Mapping[str, Any]], metrics: Iterable[str]) -> Table:
        """Returns a table from rows of `row_of`.

        Args:
          rows: Column values of each run.
          metrics: Names of the metric columns.
        """
        names = dict.fromkeys([*COLUMNS, *(name for row in rows for name in row)])
        columns = {name: [row.get(name) for row in rows] for name in names}
        frame = pl.DataFrame([pl.Series(name, x, strict=False) for name, x in columns.items()])
        return cls(frame, tuple(dict.fromkeys(metrics)))

    @classmethod
    def load(cls, path: Path) -> Table:
        """Reads a table that `write` wrote as Parquet.

        Raises:
          ValueError: If the file is something else.
        """
        try:
            frame = pl.read_parquet(path)
            metrics = tuple(json.loads(pl.read_parquet_metadata(path)[_METRICS]))
        except (pl.exceptions.PolarsError, KeyError, ValueError):
            raise ValueError(f"{path} is not a table of runs in Parquet") from None
        if missing := [name for name in (*COLUMNS, *metrics) if name not in frame.columns]:
            raise ValueError(f"{path} is a table of another version: it has no {missing[0]}")
        return cls(frame, metrics)

    def write(self, path: Path) -> None:
        """Writes the table as CSV or Parquet, by suffix."""
        if path.suffix == ".csv":
            lists = pl.col("notes", "not_covered").cast(pl.List(pl.String)).list.join("; ")
            text = self.frame.with_columns(lists).write_csv()
            write_atomically(path, lambda file: file.write(text.encode()))
            return
        metadata = {_METRICS: json.dumps(self.metrics)}
        write_atomically(path, lambda file: self.frame.write_parquet(file, metadata=metadata))

    def where(self, **values: Any) -> Table:
        """Selects rows by values of columns.

        Args:
          **values: Value of each column; a list allows several values.
        """
        conditions = [
            pl.col(name).is_in(value) if isinstance(value, list) else pl.col(name).eq_missing(value)
            for name, value in values.items()
        ]
        return dataclasses.replace(self, frame=self.frame.filter(*conditions))

    def measured(self) -> Table:
        """Returns the table without metrics that no run measured."""
        lacking = [name for name in self.metrics if self.frame[name].is_null().all()]
        metrics = tuple(name for name in self.metrics if name not in lacking)
        return Table(self.frame.drop(lacking), metrics)

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """All rows, each as a dictionary."""
        return self.frame.to_dicts()

    @property
    def diverged(self) -> list[str]:
        """Names of the runs with an undefined metric."""
        return [r["run"] for r in self.rows if any(r[name] != r[name] for name in self.metrics)]

    def values(self, name: str) -> list[Any]:
        """Returns a column's distinct values without null, in order."""
        return self.frame[name].drop_nulls().unique(maintain_order=True).to_list()

    def headline(self, name: str | None = None, better: Better | None = None) -> Headline:
        """Chooses the named metric, or by default the task's own.

        If the runs lack the task's metric, the default is their first.

        Args:
          name: Name of the metric.
          better: Direction of better values; by default the task's.

        Raises:
          ValueError: If nothing is measured, or no metric of that name.
        """
        metrics, task_metric = self.metrics, next(iter(self.values("headline")), None)
        if name is not None and name not in metrics:
            raise ValueError(f"unknown metric {name!r}; choose of {', '.join(metrics) or 'none'}")
        if not metrics:
            raise ValueError("the task measures no metrics, so runs cannot be compared")
        chosen = str(name or (task_metric if task_metric in metrics else metrics[0]))
        direction = next(iter(self.values("better")), None) if chosen == task_metric else None
        return Headline(chosen, better or (direction if direction in ("higher", "lower") else None))

    def check_columns(self, names: Iterable[str]) -> None:
        """Raises ValueError if a name is not a column."""
        for name in names:
            if name not in self.frame.columns:
                hint = near(name, self.frame.columns) or ": --out FILE.csv has all"
                raise ValueError(f"the runs have no column {name!r}{hint}")

    @property
    def settings(self) -> list[str]:
        """Names of the columns that are settings."""
        excluded = {*GUARANTEE, *TIMES, *DIGESTS, *self.metrics, "run", "headline", "better"}
        return [name for name in self.frame.columns if name not in excluded - {"data"}]

    def varied(self) -> list[str]:
        """Returns the settings in which runs differ.

        A setting that one run has and another lacks counts if they have the same sampler, noise,
        optimizer and other parts. The settings of a sampler are compared among its own runs.
        """
        parts = [name for name in ("sampler", *PARTS) if name in self.frame.columns]
        private = pl.col("noise_multiplier") > 0
        peers = self.frame.with_columns(_private=private).partition_by(*parts, "_private")
        return [
            name
            for name in self.settings
            if any(group[name].n_unique() > 1 for group in peers)
            or (name != "sampler_settings" and self.frame[name].drop_nulls().n_unique() > 1)
        ]


def read(paths: Sequence[Path]) -> tuple[Table, list[Path]]:
    """Reads runs, and tables in Parquet files, into one table.

    Args:
      paths: As for `finished_runs`, and Parquet files of `Table.write`.

    Returns:
      The table, and the directories of unfinished runs.

    Raises:
      FileNotFoundError: If there is no run.
      ValueError: For a damaged run or file.
    """
    files = [path for path in paths if path.suffix == ".parquet" and path.is_file()]
    runs, unfinished = finished_runs(path for path in paths if path not in files)
    tables = [Table.collect(runs)] if runs else []
    tables += [Table.load(path) for path in files]
    if not tables:
        raise FileNotFoundError("there is no finished run: name run directories or their folders")
    metrics = dict.fromkeys(name for table in tables for name in table.metrics)
    frame = pl.concat([table.frame for table in tables], how="diagonal_relaxed")
    if len(tables) > 1:  # each table numbers its rows anew
        frame = frame.with_columns(data=None)
    return Table(frame, tuple(metrics)), unfinished


def row_of(name: str, run: FinishedRun) -> dict[str, Any]:
    """Returns the table row of a finished run, without `data`.

    Args:
      name: Name of the run in the table.
      run: Finished run.
    """
    record, sampler, description = run.record, run.spec.sampler, run.task["description"]
    options = {k: v for k, v in run.spec.record().items() if k != "sampler"}
    task_settings = {k: v for k, v in dict(run.task["settings"]).items() if k not in COLUMNS}
    if not (private := record["noise_multiplier"] > 0):
        options |= dict.fromkeys(WITH_NOISE & options.keys())
    attempt = run.history.attempts[-1]
    stages = record["stage_seconds"]
    metrics = {k: math.nan if x is None else x for k, x in record["metrics"].items()}
    return {
        **metrics,  # first, so that no metric replaces a guarantee
        "run": name,
        "task": run.task["name"],
        "headline": description.get("headline"),
        "better": description.get("better"),
        "sampler": record["sampler"],
        "sampler_settings": sampler_settings(sampler),
        **{axis: getattr(sampler, axis, None) for axis in IN_SAMPLER},
        **{name: _cell(value) for name, value in {**task_settings, **options}.items()},
        "noise_multiplier": record["noise_multiplier"],
        "l2_clip_norm": record["l2_clip_norm"] if private else None,
        "bands": run.spec.noise.bands if private else None,
        **{name: record[name] for name in GUARANTEE},
        "noise": noise_label(record["noise"]),
        "seconds": None if stages is None else sum(stages.values()),
        "training_seconds": record["training_seconds"],
        "examples_per_second": record["examples_per_second"],
        "params_sha256": record["params_sha256"],
        SPECIFICATION: attempt.terms.config,
        CODE: attempt.environment.get("code"),
    }


def sampler_settings(sampler: Any) -> str:
    """Returns a sampler's own settings that differ from the defaults.

    >>> from samplers.settings import SETTINGS
    >>> sampler_settings(SETTINGS["shuffle"](order="fixed"))
    'order-fixed'
    """
    if not isinstance(sampler, SamplerSettings):
        return ""
    return " ".join(
        f"{field.name}-{digits(getattr(sampler, field.name))}"
        for field in dataclasses.fields(sampler)
        if field.name not in IN_SAMPLER and getattr(sampler, field.name) != field.default
    )


def digits(value: Any) -> str:
    """Returns the shortest text that identifies a setting's value.

    >>> digits(4.0), digits(0.30000000000000004), digits((8, 64)), digits("fixed")
    ('4', '0.30000000000000004', '8+64', 'fixed')
    """
    if isinstance(value, tuple | list):
        return "+".join(map(digits, value))
    if isinstance(value, Mapping):  # name and settings of an own part
        settings = [f"{k}-{digits(x)}" for k, x in value.items() if k != "name" and x is not None]
        return " ".join([str(value.get("name")), *settings])
    return str(value).removesuffix(".0")


def _cell(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str | None) else digits(value)


def finished_runs(paths: Iterable[Path]) -> tuple[dict[str, FinishedRun], list[Path]]:
    """Reads the finished runs in folders.

    Args:
      paths: Run directories, folders of sweeps, and folders of these.

    Returns:
      The runs by folder name, or by path if names repeat; and the directories of unfinished runs.

    Raises:
      FileNotFoundError: For a folder without a run.
      ValueError: For a damaged run.
    """
    runs, unfinished, read_folders = [], [], set()
    for path in paths:
        folders = [folder for folder in _folders(path) if (folder / "config.json").is_file()]
        if not folders:
            raise FileNotFoundError(f"{path} is not the directory of a run and contains none")
        for folder in folders:
            if (place := os.path.abspath(folder)) in read_folders:
                continue  # a run that is named twice is no repetition of itself
            read_folders.add(place)
            if len(folders) > 1 and not (folder / "report.json").is_file():
                unfinished.append(folder)
            else:
                runs.append(FinishedRun.read(folder))
    names = [run.path.name or str(run.path) for run in runs]
    if len(set(names)) < len(names):
        names = [str(run.path) for run in runs]
    return dict(zip(names, runs, strict=True)), unfinished


def _folders(path: Path) -> list[Path]:
    """Returns the folder of a run, or of all runs of a sweep or one level below."""
    if (path / "config.json").is_file() or not path.is_dir():
        return [path]
    inner = path / RUNS if (path / RUNS).is_dir() else path
    below = sorted(folder for folder in inner.iterdir() if folder.is_dir())
    return [run for x in below for run in (_folders(x) if (x / RUNS).is_dir() else [x])]
