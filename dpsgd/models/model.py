"""Models of finished runs or exports, with their guarantee.

A task's methods `predict`, `read`, `evaluate` and `encode` serve all its models (see
`dpsgd.runs.task.Task`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpsgd.runs.directory import RunDirectory
from dpsgd.runs.records import without_paths
from dpsgd.runs.result import GUARANTEE, MODEL, Bundle
from dpsgd.runs.task import TASKS, data_digest, find, load, made_of
from dpsgd.runs.terms import segment_records

if TYPE_CHECKING:
    import numpy as np

PyTree = Any


@dataclass(frozen=True)
class TrainedModel:
    """Trained parameters, their task and their guarantee.

    Attributes:
      path: Folder of the model.
      record: "name", "settings" and "description" of the task that it was trained for.
      guarantee: `Guarantee.record`, whose "guarantee" is the sentence, and the result of the
        "audit" before training.
      task: Task that predicts and reads.
      params: Parameters of the model.
    """

    path: Path
    record: Mapping[str, Any] = field(repr=False)
    guarantee: Mapping[str, Any]
    task: Any = field(repr=False)
    params: PyTree = field(repr=False)

    @property
    def description(self) -> Mapping[str, Any]:
        """Public description of the task, from its `describe`."""
        return self.record["description"]

    @property
    def num_params(self) -> int:
        """Number of parameters."""
        import jax

        return sum(leaf.size for leaf in jax.tree.leaves(self.params))

    def predict(self, rows: Any) -> np.ndarray:
        """Returns one prediction per row.

        Args:
          rows: Raw rows, if the task has `encode`: for a table, column name to values as in a raw
            file. Otherwise rows as in training.

        Raises:
          TypeError, ValueError: If the task cannot read the rows.
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
        """Returns the predictions for a file's rows, block by block.

        Args:
          path: File in the format of the task, with or without labels.
          split: Part of the file to predict; by default all.

        Raises:
          ValueError: If the file cannot be read, or does not fit the model.
        """
        from dpsgd.models.predictions import predictions

        predict, read = self._method("predict"), self._method("read")
        blocks = read(Path(path), labelled=False, **_split_option(split))
        return (predictions(predict, self.params, block) for block in blocks)

    def keys(self, path: str | os.PathLike[str], column: str) -> Iterator[str]:
        """Returns a column of a file as text.

        Args:
          path: File in the format of the task.
          column: Name of the column.

        Raises:
          ValueError: If the file, or its format, has no such column.

        Their order is as in `predictions`.
        """
        keys: Iterator[str] = self._method("keys")(Path(path), column)
        return keys

    def evaluate(
        self, path: str | os.PathLike[str], *, split: str | None = None
    ) -> dict[str, float]:
        """Returns metrics on the labelled rows of a file.

        Args:
          path: File in the format of the task.
          split: Part of the file to evaluate; by default all.
        """
        evaluate, read = self._method("evaluate"), self._method("read")
        return dict(evaluate(self.params, read(Path(path), **_split_option(split))))

    def _method(self, name: str) -> Any:
        method = getattr(self.task, name, None)
        if method is None:
            raise ValueError(
                f"{self.path}: its task, a {type(self.task).__name__}, has no method {name} (see "
                "dpsgd.Task)"
            )
        return method


def _split_option(split: str | None) -> dict[str, str]:
    return {} if split is None else {"split": split}


def read_model(
    path: Path,
    *,
    task: Any = None,
    kinds: Mapping[str, str] | None = None,
    execute: bool = True,
) -> TrainedModel:
    """Reads the model of a finished run or an export.

    An exported model may come from elsewhere: its task is one of `kinds`, and no other module is
    imported. A run's directory is its owner's, and names the task that made it.

    Args:
      path: Directory of a run, or an exported model.
      task: Task of the model, or its class, in place of the named one.
      kinds: Names of tasks, each standing for "module:Class"; by default `installed_tasks`.
      execute: Permission to import the module of a run's task, which executes its code: for your
        own run, not for somebody else's. Modules of `kinds` are imported in any case.

    Raises:
      FileNotFoundError: If there is no model.
      ValueError: If the model is damaged, or its task is unknown.
    """
    from dpsgd.runs.initial import read_arrays  # with JAX
    from dpsgd.runs.result import FinishedRun

    kinds = installed_tasks() if kinds is None else kinds
    if (path / MODEL).is_file():
        bundle = Bundle.read(path)
        task_or_class = task or _installed_task(path, bundle.task["name"], kinds)
        task = _finished_task(bundle.task, task_or_class, f"{path / MODEL} is damaged")
        params = read_arrays(RunDirectory(path).params_path, _shapes(task))
        return TrainedModel(path, bundle.task, bundle.guarantee, task, params)
    if not (path / "config.json").is_file():
        raise FileNotFoundError(f"{path} is neither an exported model nor a run directory")
    run = FinishedRun.read(path)
    damage = f"{path / 'config.json'} is damaged, or of another version"
    task = task or _recorded_task(path, run.task["name"], kinds, execute)
    task = _finished_task(run.task, task, damage)
    params = read_arrays(RunDirectory(path).params_path, _shapes(task))
    run.check_params()
    guarantee = {**run.history.guarantee().record(), "audit": run.history.audit}
    guarantee["segments"] = segment_records(run.history.parts)
    if trained := run.history.attempts[-1].terms.trained:
        guarantee["trained"] = list(trained)
    return TrainedModel(path, run.task, guarantee, task, params)


def load_exported(path: str | os.PathLike[str], task: Any = None) -> TrainedModel:
    """Returns the model that `dpsgd export` wrote into `path`.

    Args:
      path: Folder of the export.
      task: Task of the model, or its class; by default an installed package's task of that name.

    Raises:
      FileNotFoundError: If there is no bundle, or one of its files is missing.
      ValueError: If it is damaged, of another version, or of a task that no installed package has.
    """
    path = Path(path)
    if not (path / MODEL).is_file():
        raise FileNotFoundError(f"{path} is not an exported model: it has no {MODEL}")
    return read_model(path, task=task)


def export(
    run_path: Path, out: Path, *, task: Any = None, kinds: Mapping[str, str] | None = None
) -> None:
    """Writes a finished run's model into a new folder.

    `load_exported` reads it. The parameters are read as the model's and written again, and the
    guarantee is computed from the ledger, so that no key, seed, batch index, optimizer state or
    diagnostic can leak; nor a path.

    Args:
      run_path: Directory of the run.
      out: Folder to create.
      task: Task of the run, or its class, in place of the named one.
      kinds: Names of tasks, each standing for "module:Class"; by default `installed_tasks`.

    Raises:
      FileNotFoundError: If there is no finished run.
      FileExistsError: If `out` exists.
      ValueError: If the ledger and the parameters contradict each other.
    """
    RunDirectory.refuse_existing(out, option="OUT")
    RunDirectory.open(run_path)  # refuses a bundle
    model = read_model(run_path, task=task, kinds=kinds)
    name = model.record["name"]
    task_or_class = task or find((installed_tasks() if kinds is None else kinds).get(name, name))
    kind = task_or_class if isinstance(task_or_class, type) else type(task_or_class)
    settings = without_paths(model.record["settings"], kind)
    with RunDirectory.create(out) as bundle:
        bundle.write_params(model.params)
        bundle.write_json(GUARANTEE, dict(model.guarantee))
        record = {**model.record, "settings": settings}
        bundle.write_json(MODEL, Bundle.manifest(bundle.path, record))


def trained_on(model: TrainedModel, data: Path, *, kinds: Mapping[str, str]) -> bool:
    """Returns True if `data` are known to have trained the model.

    The data of its run and of the runs before it are known; an exported model's are not: its
    training rows stay where it was trained.

    Args:
      model: Trained model.
      data: File of rows.
      kinds: Names of tasks, each standing for "module:Class".
    """
    from dpsgd.runs.initial import chain
    from dpsgd.runs.job import rows_of

    digests = [digest for run in chain(str(model.path)) if (digest := run.data())]
    if not digests:
        return False
    try:
        task = load(model.record, str(model.path), kinds=kinds, data=data)
        columns, population = rows_of(task)
        return data_digest(task, columns, population) in digests
    except Exception:  # of a task that trains on other files: no data that could train the model
        return False


def installed_tasks() -> dict[str, str]:
    """Returns the tasks of installed packages, name to "module:Class".

    >>> "no such task" in installed_tasks()
    False

    Raises:
      ValueError: If two packages have a task of one name.
    """
    tasks: dict[str, str] = {}
    for entry in entry_points(group=TASKS):
        if tasks.setdefault(entry.name, entry.value) != entry.value:
            raise ValueError(
                f"two installed packages have a task {entry.name}: keep one of "
                f"{tasks[entry.name]}, {entry.value}"
            )
    return tasks


def _installed_task(path: Path, name: str | None, kinds: Mapping[str, str]) -> Any:
    """Returns the task class that an exported model names, if it is among `kinds`."""
    qualified_name = kinds.get(name or "", name)
    if qualified_name is None or qualified_name not in kinds.values():
        raise ValueError(
            f"{path} is a model of the task {name!a:.60}, which no installed package has "
            f"({', '.join(sorted(kinds)) or 'none'}); pass it by --task, or install or update "
            "its package"
        )
    return find(qualified_name)


def _recorded_task(path: Path, name: str | None, kinds: Mapping[str, str], execute: bool) -> Any:
    if name is None:
        raise ValueError(f"{path}: its task has no name; pass the task as task=")
    qualified_name = kinds.get(name, name)
    may_import = execute or qualified_name in kinds.values()
    if not (may_import or qualified_name.partition(":")[0] in sys.modules):
        raise ValueError(
            f"{path}: the module of its task {name!a:.60} is not imported: if you trust its code, "
            "import it first (commands: --trust MODULE)"
        )
    return find(qualified_name)


def _finished_task(record: Mapping[str, Any], task: Any, where: str) -> Any:
    """Returns a task that predicts and reads, from itself or its class and record."""
    if callable(described := getattr(task, "described", None)):
        return described(record["description"], where)
    if isinstance(task, type):
        return made_of(task, record["settings"], record["name"], where)
    return task


def _shapes(task: Any) -> PyTree:
    """Returns the shapes of the parameters, traced if `init` allows it."""
    import jax

    try:
        return jax.eval_shape(lambda: task.init(0))
    except jax.errors.JAXTypeError:
        return task.init(0)
