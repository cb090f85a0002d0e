"""The model of a finished run, or one that was exported: read back with its guarantee, and asked.

Whatever a task knows of its models serves all of them alike: `predict`, `read`, `evaluate` and
`encode` (see `dpsgd.runs.task.Task`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpsgd.runs.directory import RunDirectory
from dpsgd.runs.result import GUARANTEE, MODEL, Bundle
from dpsgd.runs.task import data_digest, find, load, made_of
from dpsgd.runs.terms import segment_records

if TYPE_CHECKING:
    import numpy as np

PyTree = Any

TASKS = "dpsgd.tasks"
"""Group of the entry points by which installed packages name their tasks, "module:Class"."""


@dataclass(frozen=True)
class TrainedModel:
    """Parameters, what can be asked of them, and what is guaranteed to those who trained them.

    Attributes:
      path: Where it was read.
      record: The "name", "settings" and "description" of the task that it was trained for.
      guarantee: The guarantee as `Guarantee.record` has it: "guarantee" is its sentence; and what
        the "audit" before training saw, or that none was made.
      task: What predicts and reads.
      params: The parameters.
    """

    path: Path
    record: Mapping[str, Any] = field(repr=False)
    guarantee: Mapping[str, Any]
    task: Any = field(repr=False)
    params: PyTree = field(repr=False)

    @property
    def description(self) -> Mapping[str, Any]:
        """What is public of the task, as its `describe` had it."""
        return self.record["description"]

    @property
    def num_params(self) -> int:
        """How many parameters there are."""
        import jax

        return sum(leaf.size for leaf in jax.tree.leaves(self.params))

    def predict(self, rows: Any) -> np.ndarray:
        """Returns what the model says of rows: an array with a row each.

        Args:
          rows: As people have them, where the task knows such (its `encode`): of a table, column
            name to values as they stand in a raw file. Else as they were trained on.

        Raises:
          TypeError, ValueError: if they are not such rows.
        """
        import jax

        from dpsgd.models.predictions import FEW, predictions

        predict = self._method("predict")
        rows = self.task.encode(rows) if hasattr(self.task, "encode") else rows
        few = len(jax.tree.leaves(rows)[0]) <= FEW
        return predictions(predict, self.params, rows, batch=FEW if few else None)

    def predictions(
        self, path: str | os.PathLike[str], *, split: str | None = None
    ) -> Iterator[np.ndarray]:
        """Returns what the model says of the rows of a file, labelled or not, block by block.

        Args:
          path: A file in the format of the task.
          split: Which of its rows, where it has several parts; by default all.

        Raises:
          ValueError: if it cannot be read, or does not fit the model.
        """
        from dpsgd.models.predictions import predictions

        predict, read = self._method("predict"), self._method("read")
        blocks = read(Path(path), labelled=False, **_given(split))
        return (predictions(predict, self.params, block) for block in blocks)

    def keys(self, path: str | os.PathLike[str], column: str) -> Iterator[str]:
        """Returns what a column of a file says of its rows, as text, in the order of `predictions`.

        Raises:
          ValueError: if the file, or its format, has no such column.
        """
        keys: Iterator[str] = self._method("keys")(Path(path), column)
        return keys

    def evaluate(
        self, path: str | os.PathLike[str], *, split: str | None = None
    ) -> dict[str, float]:
        """Returns the metrics of the model on the labelled rows of a file, see `predictions`."""
        evaluate, read = self._method("evaluate"), self._method("read")
        return dict(evaluate(self.params, read(Path(path), **_given(split))))

    def _method(self, name: str) -> Any:
        method = getattr(self.task, name, None)
        if method is None:
            raise ValueError(
                f"{self.path}: its task, a {type(self.task).__name__}, has no method {name} (see "
                "dpsgd.Task)"
            )
        return method


def _given(split: str | None) -> dict[str, str]:
    return {} if split is None else {"split": split}


def read_model(
    path: Path, *, task: Any = None, kinds: Mapping[str, str] | None = None
) -> TrainedModel:
    """Reads the model of a finished run, or one that was exported.

    An exported model may come from elsewhere: it chooses among `kinds`, and imports no other
    module. The directory of a run is its owner's, and names the task that it was made by.

    Args:
      path: The directory of a run, or an exported model.
      task: The task whose model it is, or its class, to be asked in place of the one it names.
      kinds: Names of tasks, each standing for "module:Class"; by default `installed_tasks`.

    Raises:
      FileNotFoundError: if there is none.
      ValueError: if it is damaged, or of a task that is not known.
    """
    from dpsgd.runs.result import FinishedRun

    kinds = installed_tasks() if kinds is None else kinds
    if (path / MODEL).is_file():
        bundle = Bundle.read(path)
        found = task or _known(path, bundle.task["name"], kinds)
        task = _finished(bundle.task, found, f"{path / MODEL} is damaged")
        params = RunDirectory(path).read_params(_shapes(task))
        return TrainedModel(path, bundle.task, bundle.guarantee, task, params)
    if not (path / "config.json").is_file():
        raise FileNotFoundError(f"{path} is neither an exported model nor the directory of a run")
    run = FinishedRun.read(path)
    folder, where = RunDirectory(path), f"{path / 'config.json'} is damaged, or of another version"
    task = _finished(run.task, task or _named(path, run.task["name"], kinds), where)
    params = folder.read_params(_shapes(task))
    folder.check_released()
    guarantee = {**run.history.guarantee().record(), "audit": run.history.audit}
    guarantee["segments"] = segment_records(run.history.parts)
    if trained := run.history.attempts[-1].terms.fingerprint.get("trained"):
        guarantee["trained"] = trained
    return TrainedModel(path, run.task, guarantee, task, params)


def load_exported(path: str | os.PathLike[str], task: Any = None) -> TrainedModel:
    """Returns the model that `dpsgd export` wrote into the folder `path`, ready to be asked.

    Args:
      path: The folder.
      task: The task whose model it is, or its class; by default the one of that name that an
        installed package has.

    Raises:
      FileNotFoundError: if there is no bundle, or one of its files is missing.
      ValueError: if it is damaged, of another version, or of a task that no installed package has.
    """
    path = Path(path)
    if not (path / MODEL).is_file():
        raise FileNotFoundError(f"{path} is not an exported model: it has no {MODEL}")
    return read_model(path, task=task)


def export(
    run_path: Path, out: Path, *, task: Any = None, kinds: Mapping[str, str] | None = None
) -> None:
    """Writes the model of a finished run into the new folder `out`; `load_exported` reads it.

    Nothing is copied: the parameters are read as those of the model and written again, and the
    guarantee is computed from the ledger, so that no key, seed, batch index, optimizer state or
    diagnostic can come along; nor where the data lie.

    Raises:
      FileNotFoundError: if there is no finished run.
      FileExistsError: if there is something at `out`.
      ValueError: if the ledger or the parameters do not hold together.
    """
    RunDirectory.refuse_existing(out, option="OUT")
    RunDirectory.open(run_path)  # a bundle is none
    model = read_model(run_path, task=task, kinds=kinds)
    settings = {name: value for name, value in model.record["settings"].items() if name != "data"}
    with RunDirectory.create(out) as bundle:
        bundle.write_params(model.params)
        bundle.write_json(GUARANTEE, dict(model.guarantee))
        record = {**model.record, "settings": settings}
        bundle.write_json(MODEL, Bundle.manifest(bundle.path, record))


def trained_on(model: TrainedModel, data: Path, *, kinds: Mapping[str, str]) -> bool:
    """Returns whether these are known to be data that trained the model, wherever they lie.

    They are those of its run, and of the runs before it. Unknown of an exported model: its training
    rows stay where it was trained.
    """
    from dpsgd.runs.initial import chain
    from dpsgd.runs.job import rows_of

    known = [digest for run in chain(str(model.path)) for digest in run.data() if digest]
    if not known:
        return False
    try:
        task = load(model.record, str(model.path), kinds=kinds, data=data)
        columns, population = rows_of(task)
        return data_digest(task, columns, population) in known
    except ValueError:  # no data that could train it
        return False


def installed_tasks() -> dict[str, str]:
    """Returns the tasks that installed packages name, as "module:Class", by their names.

    Raises:
      ValueError: if two packages have a task of one name.
    """
    found: dict[str, str] = {}
    for entry in entry_points(group=TASKS):
        if found.setdefault(entry.name, entry.value) != entry.value:
            raise ValueError(
                f"two installed packages have a task {entry.name}: keep one of "
                f"{found[entry.name]}, {entry.value}"
            )
    return found


def _known(path: Path, name: str | None, kinds: Mapping[str, str]) -> Any:
    """Returns what an exported model names, if it is among `kinds`."""
    named = kinds.get(name or "", name)
    if named is None or named not in kinds.values():
        raise ValueError(
            f"{path} is a model of the task {name!a:.60}, which is not among those of installed "
            f"packages ({', '.join(sorted(kinds)) or 'none'}): give the task itself (--task), or "
            "install or update the package that has it"
        )
    return find(named)


def _named(path: Path, name: str | None, kinds: Mapping[str, str]) -> Any:

    if name is None:
        raise ValueError(f"{path}: its task was given as an object without a name: give it again")
    return find(kinds.get(name, name))


def _finished(record: Mapping[str, Any], task: Any, where: str) -> Any:
    """Returns what predicts and reads, of a task or of its class and what was recorded of it."""
    if callable(described := getattr(task, "described", None)):
        return described(record["description"], where)
    if isinstance(task, type):
        return made_of(task, record["settings"], record["name"], where)
    return task


def _shapes(task: Any) -> PyTree:
    """Returns the shapes of the parameters, which are not made where `init` can be traced."""
    import jax

    try:
        return jax.eval_shape(lambda: task.init(0))
    except jax.errors.JAXTypeError:
        return task.init(0)
