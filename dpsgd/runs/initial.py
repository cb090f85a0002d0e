"""Reads a trained model that a run starts from, and its untrusted .npz file.

Its privacy cost: docs/explanation/training-from-an-earlier-model.md. Compressed arrays are refused,
so that a file takes no more memory than its size.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpsgd.core.segments import Initial, Segment
from dpsgd.files import DAMAGED, file_sha256
from dpsgd.gradients.frozen import leaf_names
from dpsgd.runs.directory import RunDirectory
from dpsgd.runs.records import to_json
from dpsgd.runs.result import MODEL, Bundle, FinishedRun
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
        except _ParameterMismatch as error:
            names = _texts(self.task.get("description")) - _texts(to_json(task.describe()))
            if not names:
                raise
            columns = ", ".join(f"{name!a:.80}" for name in sorted(names)[:5])
            problem = f"the earlier model used other columns (it has {columns}): {error}"
            raise ValueError(problem) from None


def _texts(value: Any) -> set[str]:
    """Returns all texts within a JSON value, but no keys."""
    if isinstance(value, str):
        return {value}
    values = value.values() if isinstance(value, Mapping) else value
    return set().union(*map(_texts, values)) if isinstance(value, Mapping | list) else set()


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
        config = folder.configuration()
        config.check(history)
        model = config.record.get("init_from")


# --- Arrays in files ------------------------------------------------------------------------------


class _ParameterMismatch(ValueError):
    """Raised if a file holds the parameters of another model."""


def read_arrays(path: Path, like: PyTree, *, cast: bool = False) -> PyTree:
    """Reads a pytree of arrays by name.

    Args:
      path: .npz file.
      like: Pytree with the structure, shapes and dtypes of the arrays.
      cast: True to convert floating-point arrays to the dtypes of `like`.

    Raises:
      ValueError: if the file is damaged, lacks an array of `like` or holds others, or has entries
        that are not finite after a cast.
    """
    stored = _stored_arrays(path)
    leaves = zip(leaf_names(like), jax.tree_util.tree_leaves_with_path(like), strict=True)
    names = [_stored_name(path, stored, name, *leaf) for name, leaf in leaves]
    if extra := sorted(stored.keys() - {*names}):
        extra_names = ", ".join(f"{name!a:.80}" for name in extra[:5])
        raise _ParameterMismatch(
            f"{path} has arrays that the model does not: {extra_names}; remove them"
        )

    def checked(name: str, leaf: Any) -> jax.Array:
        array = stored[name]
        if not cast and array.dtype != leaf.dtype:
            raise ValueError(f"{path}: {name} is {array.dtype}, expected {leaf.dtype}")
        with np.errstate(over="ignore"):
            array = array.astype(leaf.dtype)
        if cast and jnp.issubdtype(array.dtype, jnp.floating) and not np.isfinite(array).all():
            raise ValueError(f"{path}: {name!a:.80} has entries that are not finite numbers")
        return jnp.asarray(array)

    like_leaves, structure = jax.tree.flatten(like)
    return jax.tree.unflatten(structure, map(checked, names, like_leaves))


def _stored_name(
    path: Path, arrays: Mapping[str, Any], leaf_name: str, key_path: Any, leaf: Any
) -> str:
    """Returns the stored name of a leaf: its key path, dotted or not, or its name."""
    dotted = jax.tree_util.keystr(key_path, simple=True, separator=".")
    for name in (jax.tree_util.keystr(key_path), dotted, leaf_name):
        if (stored := arrays.get(name)) is None:
            continue
        floats = [jnp.issubdtype(array.dtype, jnp.floating) for array in (stored, leaf)]
        if stored.shape == leaf.shape and (all(floats) or stored.dtype == leaf.dtype):
            return name
        raise _ParameterMismatch(
            f"{path}: {name} is {stored.dtype.name}{list(stored.shape)}, and the model needs "
            f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}; name a model of the same task"
        )
    raise _ParameterMismatch(
        f"{path} lacks the parameter {leaf_name} of shape {list(leaf.shape)}; name a model of "
        "the same task"
    )


def _stored_arrays(path: Path) -> dict[str, np.ndarray]:
    """Returns stored arrays by name.

    Raises ValueError if the file is damaged or compressed, holds objects, or repeats a name.
    """
    with _located(path), np.load(path, allow_pickle=False) as file:
        members = file.zip.infolist()
        for info in members:
            if info.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"{info.filename!a:.80} is compressed; write it by numpy.savez")
        stored = {name: file[name] for name in file.files}
        numeric = [isinstance(array, np.ndarray) for array in stored.values()]
        if len(stored) < len(members) or not all(numeric):
            raise ValueError("an entry is not a numeric array, or stored twice")
    return stored


@contextmanager
def _located(path: Path) -> Iterator[None]:
    """Turns errors about damaged bytes into a ValueError with the path."""
    try:
        yield
    except (*DAMAGED, MemoryError) as error:
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ValueError(f"{path} is damaged, or not an .npz file: {kind}{error}") from None
