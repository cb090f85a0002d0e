"""Reads a trained model that a run starts from.

Its privacy cost: docs/explanation/training-from-an-earlier-model.md.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpsgd.core.segments import Initial, Segment
from dpsgd.files import file_sha256
from dpsgd.runs.arrays import ParameterMismatch, read_arrays
from dpsgd.runs.directory import RunDirectory
from dpsgd.runs.records import to_json
from dpsgd.runs.result import MODEL, Bundle, FinishedRun
from dpsgd.runs.spec import RunSpec
from dpsgd.runs.task import Task
from dpsgd.runs.terms import segment_records, segments_from_records

PyTree = Any


@dataclass(frozen=True)
class EarlierModel:
    """Trained model that a run starts from.

    Attributes:
      params_path: File of the model's parameters.
      initial: SHA-256 and name of the model for the guarantee, with its segments if known.
      task: Record of the model's task; empty if unknown.
    """

    params_path: Path
    initial: Initial
    task: Mapping[str, Any]

    @classmethod
    def read(cls, init_from: str | None) -> EarlierModel | None:
        """Reads and checks a trained model; returns None without one.

        Args:
          init_from: Path of a finished run, an exported model or an .npz file; None for no model.

        Raises:
          FileNotFoundError: if the path does not exist, or its run is not finished.
          ValueError: if the model is damaged.
        """
        if init_from is None:
            return None
        if not (path := Path(init_from)).exists():
            raise FileNotFoundError(
                f"init_from: {path} does not exist; name a finished run, an exported model or a "
                "file .npz"
            )
        task: Mapping[str, Any] = {}
        segments: tuple[Segment, ...] = ()
        params_path = path if path.is_file() else RunDirectory(path).params_path
        if (path / MODEL).is_file():
            bundle = Bundle.read(path)
            task, segments = bundle.task, bundle.segments
        elif path.is_dir():
            run = FinishedRun.read(path)
            run.check_params()
            segments = segments_from_records(segment_records(run.history.parts))
            task = run.task
        name = re.sub(r"[^\w.-]", "_", path.resolve().name)[:60]
        return cls(params_path, Initial(file_sha256(params_path), segments, name), task)

    def params(self, fresh: PyTree, task: Task) -> PyTree:
        """Reads the model's parameters, see `read_arrays`.

        Args:
          fresh: Initial parameters of the task, with the shapes and dtypes of the result.
          task: Task of the new run.

        Raises:
          ValueError: if the model has other parameters than the task; the message names columns
            that the earlier task alone describes.
        """
        try:
            return read_arrays(self.params_path, fresh, cast=True)
        except ParameterMismatch as error:
            names = _texts(self.task.get("description")) - _texts(to_json(task.describe()))
            if not names:
                raise
            shown = ", ".join(f"{name!a:.80}" for name in sorted(names)[:5])
            problem = f"the earlier model used other columns (it has {shown}): {error}"
            raise ValueError(problem) from None


def _texts(value: Any) -> set[str]:
    """Returns all texts within a JSON value, but no keys."""
    if isinstance(value, str):
        return {value}
    values = value.values() if isinstance(value, Mapping) else value
    return set().union(*map(_texts, values)) if isinstance(value, Mapping | list) else set()


def with_absolute_path(spec: RunSpec) -> RunSpec:
    """Returns a spec whose `init_from` is an absolute path."""
    if spec.init_from is None:
        return spec
    return dataclasses.replace(spec, init_from=os.path.abspath(spec.init_from))


def chain(model: str | None) -> Iterator[RunDirectory]:
    """Yields the run of a model and its earlier runs.

    The chain follows `init_from`, newest first, up to the first model that is not a run directory.

    Args:
      model: Path of the model; None yields nothing.
    """
    visited = set[str]()  # a later run at the path of an earlier one would close a circle
    while isinstance(model, str) and (Path(model) / "ledger.jsonl").is_file():
        folder = RunDirectory(Path(model))
        history = folder.history()
        if history.name in visited:
            return
        visited.add(history.name)
        yield folder
        model = folder.config(history).get("init_from")
