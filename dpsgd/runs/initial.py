"""The parameters that a run starts from: fresh ones, or those of an earlier model.

A run from an earlier model covers its own rows. Those of the earlier model keep the guarantee that
they have: to them, this run is a function of what was released. Proof and limits:
docs/explanation/training-from-an-earlier-model.md.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from accounting import Bound, format_delta
from dpsgd.core.guarantee import NO_GUARANTEE
from dpsgd.runs.bundle import GUARANTEE, MODEL, Bundle
from dpsgd.runs.directory import RunDirectory, read_arrays
from dpsgd.runs.records import checked
from dpsgd.runs.result import FinishedRun

PyTree = Any

_LONGEST = 300
"""Characters of what a bundle, which may be anybody's, says of one guarantee."""


def initial_params(fresh: PyTree, init_from: str | None) -> PyTree:
    """Returns the parameters that a run starts from.

    Args:
      fresh: Those that its task makes: their tree, shapes and dtypes are wanted.
      init_from: The directory of a finished run, an exported model, or a file .npz whose arrays
        have the names of the parameters; None for `fresh` itself.

    Raises:
      FileNotFoundError: if there is no such model.
      ValueError: if it is damaged, or has other parameters.
    """
    if init_from is None:
        return fresh
    path = _found(init_from)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), fresh)
    if path.is_file():
        return read_arrays(path, like)
    if (path / MODEL).is_file():
        Bundle.read(path)  # refuses parts of two
    else:
        RunDirectory.open(path).check_released()
    return RunDirectory(path).read_params(like)


def earlier_guarantees(init_from: str | None) -> tuple[str, ...]:
    """Returns what the models before a run keep for their rows, the nearest first.

    Raises:
      FileNotFoundError: if there is no such model.
      ValueError: if it is damaged.
    """
    if init_from is None:
        return ()
    path = _found(init_from)
    if path.is_file():
        return (f"{NO_GUARANTEE} (public rows need none)",)
    if (path / MODEL).is_file():
        return _stated(Bundle.read(path).guarantee, path / GUARANTEE)
    return _stated(FinishedRun.read(path).record, path / "ledger.jsonl")


def check_other_rows(init_from: str | None, digest: str) -> None:
    """Raises ValueError if a model before a run had these very rows.

    It is known of run directories that lie where they lay, up to the first model that is none.

    Args:
      init_from: The nearest.
      digest: What names the rows of the run.
    """
    seen = set[str]()  # another run may have taken the place of one
    while isinstance(init_from, str) and (Path(init_from) / "ledger.jsonl").is_file():
        folder = RunDirectory(Path(init_from))
        history = folder.history()
        if history.name in seen:
            return
        seen.add(history.name)
        if digest in folder.data():
            raise ValueError(
                f"init_from: {init_from} was trained on these very rows, and the guarantee of this "
                "run would leave out what they cost there: train for more epochs in one run"
            )
        init_from = folder.config(history).get("init_from")


def absolute(init_from: str | None) -> str | None:
    """Returns the path that a run resumes by, wherever it is resumed."""
    return None if init_from is None else os.path.abspath(init_from)


def _found(init_from: str) -> Path:
    path = Path(init_from)
    if not (path.is_dir() or zipfile.is_zipfile(path)):
        why = "is no file .npz" if path.exists() else "does not exist"
        raise FileNotFoundError(
            f"init_from: {path} {why}: name a finished run, an exported model or a file .npz"
        )
    return path


def _stated(record: Mapping[str, Any], where: Path) -> tuple[str, ...]:
    upper = checked(record.get("epsilon_upper"), float | None, f"{where}: epsilon_upper")
    before = checked(record.get("earlier", []), list[str], f"{where}: earlier")
    unit = checked(record.get("unit"), str, f"{where}: unit")
    own = NO_GUARANTEE
    if upper is not None:
        delta = format_delta(checked(record.get("delta"), float, f"{where}: delta"))
        own = f"epsilon <= {Bound(0.0, upper).format_upper('.3g')} at delta {delta}"
        own = f"{own} (unit: one {unit})"
    for text in (own, *before):
        if not text.isprintable() or len(text) > _LONGEST:
            raise ValueError(f"{where} is damaged: {text!a:.60}")
    return own, *before
