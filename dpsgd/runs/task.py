"""What is trained: a task knows nothing of privacy, and a run knows nothing else of its task."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, get_args, runtime_checkable

import numpy as np

from dpsgd.runs.records import build, checked, field_types, near, to_json
from samplers import Population, UnitData

if TYPE_CHECKING:
    from dpsgd.core.mechanism import Mechanism
    from dpsgd.engine.queries import Refinement
    from dpsgd.runs.recommendation import RecommendationRequest

PyTree = Any


@dataclasses.dataclass(frozen=True)
class TaskRecord:
    """What is recorded of a task, see `task_record`."""

    name: str | None
    settings: dict[str, Any]
    description: dict[str, Any]


@runtime_checkable
class Trainable(Protocol):
    """A model with its loss, and synthetic probe rows, of which an audit takes its steps."""

    def init(self, seed: int) -> PyTree:
        """Returns the parameters before training, which depend on no private row."""

    def loss(self, params: PyTree, example: PyTree) -> Any:
        """Returns the loss of one row, a scalar; with a third argument, a key, for dropout.

        A loss made by `dpsgd.with_rows` can train with lazy tables.
        """

    def generated(self, count: int) -> PyTree:
        """Returns `count` rows of the shapes and dtypes of `columns`, made of none of them."""


@runtime_checkable
class Task(Trainable, Protocol):
    """Rows, a model of them and what to measure: all that a run needs to be told.

    A task is best a frozen dataclass, whose fields are its settings: the command offers them, and
    the run's configuration records them. One named `data`, a path, says where the rows lie, which
    is no part of what they are. `loss` is pure, and compiled; equal tasks have the same one.

    The methods below are what a run calls. A task may also have

    * `check(begun)`, which raises ValueError before any step if the rows are damaged or `metrics`
      could not be had of them; `begun` is None, or, where a run resumes, what `describe` returned
      when it was begun, which these rows must fit;
    * `num_examples`, how many rows train, where that is known before they are read: `dpsgd train`
      refuses what does not fit them at once;
    * `digest()`, a text that names the rows: other rows, another text. It is kept a secret. By
      default the arrays of `columns` are hashed;
    * `predict(params, rows)`, what the model says of rows, which need no labels: an array with a
      row each; pure, and compiled. It serves `dpsgd score` and an exported model;
    * `read(path, labelled=True, split=None)`, which yields the rows of another file of the task's
      format, block by block: without labels if they need not be `labelled`, and of one `split` if
      the format has several. `dpsgd score` and `dpsgd evaluate` read by it;
    * `keys(path, column)`, which yields what a column of such a file says of each row, as text:
      what `dpsgd score --key` writes beside its prediction;
    * `not_covered()`, sentences about facts of private rows that the guarantee does not cover, such
      as "which class an image is of": its sentence and the report add them;
    * `evaluate(params, blocks)`, figures of merit of such labelled rows, by their bare names, such
      as "auc": what `dpsgd evaluate` prints, and of which `metrics` may be made;
    * `encode(rows)`, rows as `predict` takes them of rows as people have them, such as a table of
      texts: what a program gives an exported model. By default they are the same;
    * `recommend(request)`, the `dpsgd.Settings` that a run takes where its user gives none, for a
      `RecommendationRequest`: the number of rows and the guarantee that is wanted. It must
      look at no row. By default `dpsgd.runs.recommendation.generic`;
    * `settle(request)`, the task with what its user left open chosen for a run, such as the kind of
      model, for a `RecommendationRequest` of the rows and the guarantee alone; and why, as
      {setting: reason}. It must look at no row;
    * `calibration()`, a `dpsgd.engine.queries.Refinement`, such as `Platt`: what private runs
      make of noisy sums over all rows after their last step, to be part of the model; equal tasks
      have equal ones (`RunSpec.calibration`); None where labels have none;
    * `described(description, where)`, a static method that returns what predicts, reads and
      evaluates, from what `describe` returned and without the training rows; `where` begins the
      line of its ValueError. By default a task is made of the settings, but for `data`.
    """

    def columns(self) -> PyTree:
        """Returns the training rows: arrays, or memory maps, with one leading row an example.

        Where rows are not examples, or users hold several of them, `samplers.UnitData`, as
        `Contributions.of_users` and `UnitTree.data` make it: the guarantee reads its unit there.

        Of several processes each may lack the rows of shards that others have: of an array with a
        method `lacks(rows)`, the run asks by it why a range of rows, counted from 0, cannot be read
        here ("" if all can), before any step. Such a task needs a `digest`, the same in all.
        """

    def metrics(self, params: PyTree) -> Mapping[str, float]:
        """Returns figures of merit on rows outside the training split, such as "test_auc".

        Each is named "<split>_<name>", and is NaN where it is undefined: the training diverged.
        """

    def describe(self) -> Mapping[str, Any]:
        """Returns what is public of the task, as JSON values: it goes into the configuration.

        "headline" may name the metric that tables put first, and "better" whether its "higher" or
        its "lower" values are; "prediction" what `predict` returns, such as "probability".
        """


METHODS = ("columns", "init", "loss", "metrics", "generated", "describe")
"""What makes a task of an object."""


def check_task(task: Any, name: str) -> None:
    """Raises ValueError if `task`, which was called `name`, lacks a method of a `Task`."""
    if isinstance(task, type):
        raise ValueError(f"{name} is a class, and no task: make one of it")
    if missing := [method for method in METHODS if not callable(getattr(task, method, None))]:
        raise ValueError(
            f"{name} is no task: it is a {type(task).__name__} without {', '.join(missing)} (see "
            "dpsgd.runs.task.Task)"
        )


def settled(task: Any, request: RecommendationRequest) -> tuple[Any, dict[str, str]]:
    """Returns a task of which nothing is left open for a run, and why its settings were chosen."""
    settle = getattr(task, "settle", None)
    return settle(request) if callable(settle) else (task, {})


def like_earlier(
    task: Any, name: str | None, record: Mapping[str, Any]
) -> tuple[Any, dict[str, str]]:
    """Returns a task, called `name`, with what it leaves open as an earlier one had it; and why.

    These are its settings that are None, but for `data` and paths; `record` is what `task_record`
    made of the earlier task. Nothing is taken of a task of another name, or of settings that do not
    fit.
    """
    own, settings = _settings(task), record.get("settings", {})
    if own is None or record.get("name") not in (name, task_record(task)["name"]):
        return task, {}
    kind: Any = type(task)
    hints = field_types(kind)
    found = {
        key: settings[key]
        for key, value in own.items()
        if value is None and settings.get(key) is not None and str(settings[key]).isprintable()
        if key != "data" and not _is_path(hints[key])
    }
    if not found:
        return task, {}
    try:
        made = with_settings(task, found, "init_from")
    except ValueError:
        return task, {}
    return made, dict.fromkeys(found, "in the model that it starts from")


def with_settings(task: Any, found: Mapping[str, Any], where: str) -> Any:
    """Returns a task with other settings, JSON values, or refuses them at `where`."""
    own, kind = _settings(task), type(task)
    if own is None:  # it is more than JSON values
        return dataclasses.replace(task, **found)
    return made_of(kind, {**own, **found}, kind.__qualname__, where)


def exceptions_of(task: Any) -> tuple[str, ...]:
    """Returns the sentences of a task about what its guarantee does not cover."""
    made = getattr(task, "not_covered", None)
    return tuple(checked(list(made()), list[str], "not_covered() of the task")) if made else ()


def calibration_of(task: Any) -> Any:
    """Returns the `calibration` of a task; None if it offers none."""
    made = getattr(task, "calibration", None)
    return made() if callable(made) else None


def refinement_of(task: Any, mechanism: Mechanism, kind: str | None) -> Refinement | None:
    """Returns what a task makes of the sums that its run ends in, if there are any.

    Raises:
      ValueError: if the task offers none, or another than the `kind` that the run is to have.
    """
    if mechanism.full_sums is None:
        return None
    if (made := calibration_of(task)) is None:
        raise ValueError(
            f"the run ends in {mechanism.full_sums}, of which its task, a {type(task).__name__}, "
            "makes nothing: it has no calibration() (see dpsgd.runs.task.Task)"
        )
    if made.kind != kind:
        raise ValueError(
            f"calibration is {kind}, and the task, a {type(task).__name__}, offers {made.kind}"
        )
    return made


def find(name: str) -> Any:
    """Returns the object called "module:name", whose module is imported, or raises ValueError."""
    module, colon, qualified = name.partition(":")
    if not (module and colon and qualified):
        raise ValueError(f"{name!a} names no object: write module:object")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise ValueError(f"{module} cannot be imported: {error}") from error
        raise ValueError(
            f"there is no module {error.name}, where {name} should be: it is looked for in the "
            "current folder and where Python finds modules (PYTHONPATH)"
        ) from None
    except Exception as error:  # whatever the user's own lines raise
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"{module} cannot be imported: {type(error).__name__}: {reason}"
        ) from error
    try:
        return functools.reduce(getattr, qualified.split("."), found)
    except AttributeError:
        meant = near(qualified, vars(found))
        raise ValueError(f"module {module} has no {qualified!a}{meant}") from None


def made_of(kind: type, settings: Mapping[str, Any], name: str, where: str) -> Any:
    """Returns the task of the class `kind`, called `name`, or refuses its settings at `where`."""
    if not dataclasses.is_dataclass(kind):
        raise ValueError(f"{where}: {name} is a class and no dataclass: name a task made of it")
    hints = field_types(kind)
    values = {
        key: Path(value) if isinstance(value, str) and _is_path(hints.get(key)) else value
        for key, value in settings.items()
    }
    try:
        task = build(kind, values, where)
    except TypeError as error:  # a type that no record holds
        raise ValueError(f"{where}: {error}") from None
    check_task(task, name)
    return task


def _is_path(kind: Any) -> bool:
    return kind is Path or Path in get_args(kind)


def task_record(task: Task, name: str | None = None) -> dict[str, Any]:
    """Returns what a run's configuration says of its task, as JSON values.

    `name` is what it is called where it is found again: that of an object, "module:name", or of its
    class; by default its class, if `settings` say all of it.
    """
    try:
        description = to_json(task.describe())
        json.dumps(description, allow_nan=False)
    except ValueError as error:
        raise ValueError(f"describe() of the task returns no JSON values: {error}") from None
    settings = _settings(task)
    if name is None and settings is not None:
        name = f"{type(task).__module__}:{type(task).__qualname__}"
    return {"name": name, "settings": settings or {}, "description": description}


def _settings(task: Task) -> dict[str, Any] | None:
    """Returns the fields of a task; None if it is more, or other, than JSON values."""
    if not dataclasses.is_dataclass(task):
        return None
    try:
        fields = [(f.name, getattr(task, f.name)) for f in dataclasses.fields(task)]
        settings = to_json({n: v.resolve() if isinstance(v, Path) else v for n, v in fields})
        json.dumps(settings, allow_nan=False)
    except ValueError:
        return None
    return settings


def load(
    record: Any, where: str, *, kinds: Mapping[str, str] = {}, data: Path | None = None
) -> Any:
    """Returns the task that `task_record` recorded, or refuses the record at `where`.

    `kinds` are names that stand for others, "module:name"; `data` is where they lie, if not where
    they lay.
    """
    record = checked(record, dict[str, Any], f"{where}: task")
    name = checked(record.get("name"), str | None, f"{where}: task, name")
    if name is None:
        raise ValueError(
            f"{where}: the task was given as an object that nobody can find again: give it to "
            "resume() once more"
        )
    settings = dict(checked(record.get("settings"), dict[str, Any], f"{where}: task, settings"))
    name_of_kind = (kinds or {}).get(name, name)
    if not re.fullmatch(r"[^:]+:[^:]+", name_of_kind):
        raise ValueError(f"{where}: task, name: {name!a:.40} is no module:object")
    found = find(name_of_kind)
    if not isinstance(found, type):
        if data is not None:
            raise ValueError(f"the task {name} brings its own rows: it takes no other data")
        check_task(found, name)
        return found
    if data is not None:
        if "data" not in settings:
            raise ValueError(f"the task {name} has no setting `data`, so that it takes none")
        settings["data"] = str(data)
    return made_of(found, settings, name, f"{where}: task")


def rows_of(task: Task) -> tuple[PyTree, Population]:
    """Returns the training rows of a task, and what is public of them, or refuses the columns."""
    import jax

    data = task.columns()
    columns = data.columns if isinstance(data, UnitData) else data
    shapes = [getattr(leaf, "shape", ()) for leaf in jax.tree.leaves(columns)]
    rows = {shape[0] if shape else 0 for shape in shapes}
    if len(rows) != 1 or 0 in rows:
        raise ValueError(
            f"columns() of the task must be arrays with equally many rows, one an example; they "
            f"have {', '.join(map(str, sorted(rows))) or 'none'}"
        )
    return columns, data.population if isinstance(data, UnitData) else Population(rows.pop())


def data_digest(task: Task, columns: PyTree, population: Population | None = None) -> str:
    """Returns a text that names the training rows of a task: a secret, as they are.

    It is the task's own `digest`, or of all arrays, and of the units that the rows lie in.
    """
    if callable(digest := getattr(task, "digest", None)):
        return digest()
    tree = population.tree if population else None
    return arrays_digest(columns, tree.shape.digest if tree else "")


def arrays_digest(arrays: PyTree, prefix: str = "") -> str:
    """Returns the SHA-256 of a text and of all arrays, with their names, dtypes and shapes."""
    import jax

    found = hashlib.sha256(prefix.encode())
    for path, leaf in jax.tree_util.tree_leaves_with_path(arrays):
        array = np.asanyarray(leaf)
        found.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}\n".encode())
        array = np.atleast_1d(array)
        rows = max(1, _READ_BYTES * len(array) // max(1, array.nbytes))
        for start in range(0, len(array), rows):
            found.update(np.ascontiguousarray(array[start : start + rows]).tobytes())
    return found.hexdigest()


_READ_BYTES = 2**24
"""Most bytes of rows that are looked at together."""
