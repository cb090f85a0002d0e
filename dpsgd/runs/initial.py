"""Initial parameters of a run: fresh ones, or those of a trained model.

The price of a run from a trained model: docs/explanation/training-from-an-earlier-model.md.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpsgd.core.segments import Initial, Segment
from dpsgd.runs.arrays import file_sha256, matching_names, npz_shapes, read_npz
from dpsgd.runs.directory import RunDirectory
from dpsgd.runs.records import checked
from dpsgd.runs.result import GUARANTEE, MODEL, Bundle, FinishedRun
from dpsgd.runs.spec import RunSpec
from dpsgd.runs.terms import segment_records, segments_from_records

PyTree = Any


def initial_params(fresh: PyTree, init_from: str | None) -> PyTree:
    """Returns the parameters that a run starts from.

    Args:
      fresh: Parameters that the task makes; arrays are found by their names, and cast to their
        floating-point types.
      init_from: Directory of a finished run, exported model or file .npz; None for `fresh` itself.

    Raises:
      FileNotFoundError: if there is no such model.
      ValueError: if it is damaged, not finished, not finite, or has other parameters.
    """
    if init_from is None:
        return fresh
    path = _params_path(_existing(init_from))
    shapes = npz_shapes(path)
    if "ledger_head" in shapes:
        raise ValueError(
            f"init_from: {path} is a checkpoint of an unfinished run, which released none of it: "
            "finish the run by `dpsgd resume`"
        )
    names = matching_names(path, shapes, fresh)
    if extra := sorted(shapes.keys() - {*jax.tree.leaves(names)}):
        shown = ", ".join(f"{name!a:.80}" for name in extra[:5])
        raise ValueError(f"{path} holds arrays that are no parameters: {shown}; leave them out")
    arrays = read_npz(path, jax.tree.leaves(names))

    def cast(name: str, leaf: Any) -> jax.Array:
        with np.errstate(over="ignore"):
            array = arrays[name].astype(leaf.dtype)
        if jnp.issubdtype(array.dtype, jnp.floating) and not np.isfinite(array).all():
            raise ValueError(f"{path}: {name!a:.80} has entries that are not finite numbers")
        return jnp.asarray(array)

    return jax.tree.map(cast, names, fresh)


def initial_model(init_from: str | None) -> Initial | None:
    """Returns the model that a run starts from, with the segments that trained it if at hand."""
    if init_from is None:
        return None
    path = _existing(init_from)
    segments: tuple[Segment, ...] = ()
    if (path / MODEL).is_file():
        try:
            records = checked(Bundle.read(path).guarantee["segments"], list[Any], "segments")
            segments = segments_from_records(records)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path / GUARANTEE} is damaged: {error}") from None
    elif path.is_dir():
        segments = segments_from_records(segment_records(FinishedRun.read(path).history.parts))
    name = re.sub(r"[^\w.-]", "_", path.resolve().name)[:60]
    return Initial(file_sha256(_params_path(path)), segments, name)


def with_absolute_path(spec: RunSpec) -> RunSpec:
    """Returns a spec that finds its initial model from any working directory."""
    if spec.init_from is None:
        return spec
    return dataclasses.replace(spec, init_from=os.path.abspath(spec.init_from))


def earlier_task(init_from: str | None) -> Mapping[str, Any]:
    """Returns the record of the initial model's task; empty if it is not known."""
    if init_from is None or (path := _existing(init_from)).is_file():
        return {}
    return Bundle.read(path).task if (path / MODEL).is_file() else FinishedRun.read(path).task


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


def _existing(init_from: str) -> Path:
    path = Path(init_from)
    if not path.exists():
        raise FileNotFoundError(
            f"init_from: {path} does not exist; name a finished run, an exported model or a file "
            ".npz"
        )
    return path


def _params_path(path: Path) -> Path:
    """Returns the file of a model's parameters; refuses unfinished runs and damaged exports."""
    if path.is_file():
        return path
    if (path / MODEL).is_file():
        Bundle.read(path)  # refuses parts of two
    else:
        RunDirectory.open(path).check_released()
    return RunDirectory(path).params_path
