"""The parameters that a run starts from: fresh ones, or those of an earlier model.

A run from an earlier model covers its own rows. Those of the earlier model keep the guarantee that
they have: to them, this run is a function of what was released. Proof and limits:
docs/explanation/training-from-an-earlier-model.md.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from accounting import Bound, format_delta
from dpsgd.core.guarantee import NO_GUARANTEE
from dpsgd.runs.arrays import is_orbax, sha256, source
from dpsgd.runs.bundle import GUARANTEE, MODEL, Bundle
from dpsgd.runs.directory import RunDirectory
from dpsgd.runs.mapping import lines_of, matched
from dpsgd.runs.records import checked
from dpsgd.runs.result import FinishedRun
from dpsgd.runs.spec import RunSpec

PyTree = Any

_LONGEST = 300
"""Characters of what a bundle, which may be anybody's, says of one guarantee."""


class Start(NamedTuple):
    """The parameters that a run starts from."""

    params: PyTree
    taken: dict[str, Any]
    """Which arrays of a file were taken for which parameters, as JSON values; else empty."""


def initial_params(
    fresh: PyTree,
    init_from: str | None,
    rules: Sequence[str] = (),
    known: Sequence[str] = (),
    digest: str | None = None,
) -> Start:
    """Returns the parameters that a run starts from.

    Args:
      fresh: Those that its task makes: their tree, shapes and dtypes are wanted.
      init_from: The directory of a finished run, an exported model, a file .npz or safetensors, or
        a checkpoint of Orbax; None for `fresh` itself.
      rules: Which array becomes which parameter, see `dpsgd.runs.mapping.Rule`; by default those of
        equal names.
      known: Such rules of the task, of names that it knows.
      digest: SHA-256 that the file must have, see `pinned`.

    Raises:
      FileNotFoundError: if there is no such model.
      ValueError: if it is damaged, has other parameters, or another digest.
    """
    if init_from is None:
        return Start(fresh, {})
    path = _found(init_from)
    arrays = _released(path)
    if digest is not None and (now := sha256(arrays)) != digest:
        raise ValueError(
            f"init_from: {path} is not the model that the run is to start from, of which the "
            f"SHA-256 is {digest!a:.70}: it is {now}; restore it from a copy"
        )
    if arrays != path and not rules:
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), fresh)
        return Start(RunDirectory(path).read_params(like), {})
    return Start(*matched(fresh, source(arrays), rules, known))


def pinned(spec: RunSpec) -> RunSpec:
    """Returns a spec whose earlier model is found again, as it is now, wherever a run resumes.

    Raises:
      FileNotFoundError: if there is no such model.
      ValueError: if rules cannot be read, or the model is not the one that is asked for.
    """
    if spec.init_from is None:
        return spec
    found = sha256(_released(_found(spec.init_from)))
    if spec.init_sha256 not in (None, found):
        raise ValueError(
            f"init_sha256: {spec.init_from} has the SHA-256 {found}, not {spec.init_sha256!a:.70}"
        )
    return dataclasses.replace(
        spec,
        init_from=os.path.abspath(spec.init_from),
        init_map=lines_of(spec.init_map),
        init_sha256=found,
    )


def earlier_guarantees(init_from: str | None) -> tuple[str, ...]:
    """Returns what the models before a run keep for their rows, the nearest first.

    Raises:
      FileNotFoundError: if there is no such model.
      ValueError: if it is damaged.
    """
    if init_from is None:
        return ()
    path = _found(init_from)
    if _of_arrays(path):
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


def _found(init_from: str) -> Path:
    path = Path(init_from)
    if not path.exists():
        raise FileNotFoundError(
            f"init_from: {path} does not exist: name a finished run, an exported model, a file "
            ".npz or .safetensors, or a checkpoint of Orbax"
        )
    return path


def _of_arrays(path: Path) -> bool:
    """Returns whether a model is arrays alone, of which nothing says what they were trained on."""
    return path.is_file() or (not (path / MODEL).is_file() and is_orbax(path))


def _released(path: Path) -> Path:
    """Returns where the arrays of a model lie, of which nothing is pending."""
    if _of_arrays(path):
        return path
    if (path / MODEL).is_file():
        Bundle.read(path)  # refuses parts of two
    else:
        RunDirectory.open(path).check_released()
    return RunDirectory(path).params_path


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
