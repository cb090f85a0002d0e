"""Trained model that a run may start from.

The price of a run from a trained model: docs/explanation/training-from-an-earlier-model.md.
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
from dpsgd.runs.arrays import read_arrays
from dpsgd.runs.directory import RunDirectory
from dpsgd.runs.result import MODEL, Bundle, FinishedRun
from dpsgd.runs.spec import RunSpec
from dpsgd.runs.terms import segment_records, segments_from_records

PyTree = Any


@dataclass(frozen=True)
class EarlierModel:
    """Trained model that a run starts from, checked as it is read.

    Attributes:
      params_path: File of its parameters.
      initial: What the guarantee states of it, with the segments that trained it if at hand.
      task: Record of its task; empty if it is not known.
    """

    params_path: Path
    initial: Initial
    task: Mapping[str, Any]

    @classmethod
    def read(cls, init_from: str | None) -> EarlierModel | None:
        """Reads a model; None for no model.

        Args:
          init_from: Directory of a finished run, exported model or file .npz.

        Raises:
          FileNotFoundError: if there is no such model.
          ValueError: if it is damaged or not finished.
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

    def params(self, fresh: PyTree) -> PyTree:
        """Returns the parameters that a run starts from, see `read_arrays`.

        Args:
          fresh: Parameters that the task makes, to whose floating-point types they are cast.
        """
        return read_arrays(self.params_path, fresh, cast=True)


def with_absolute_path(spec: RunSpec) -> RunSpec:
    """Returns a spec that finds its initial model from any working directory."""
    if spec.init_from is None:
        return spec
    return dataclasses.replace(spec, init_from=os.path.abspath(spec.init_from))


def chain(model: str | None) -> Iterator[RunDirectory]:
    """Yields the run of a model and the runs that it started from, the nearest first.

    It ends at the first model that is not a run directory.
    """
    seen = set[str]()  # another run may have taken the place of one
    while isinstance(model, str) and (Path(model) / "ledger.jsonl").is_file():
        folder = RunDirectory(Path(model))
        history = folder.history()
        if history.name in seen:
            return
        seen.add(history.name)
        yield folder
        model = folder.config(history).get("init_from")
