"""Interface of a task, which provides a run's rows, model and metrics, but no privacy."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from dpsgd.runs.records import (
    build,
    checked,
    field_types,
    is_path,
    near,
    to_json,
    without_paths,
)
from samplers import Population, UnitData
from samplers.registry import import_module

if TYPE_CHECKING:
    from dpsgd.runs.recommendation import RecommendationRequest

PyTree = Any


@dataclasses.dataclass(frozen=True)
class TaskRecord:
    """Record of a task in a run's configuration, see `task_record`."""

    name: str | None
    settings: dict[str, Any]
    description: dict[str, Any]


@runtime_checkable
class Trainable(Protocol):
    """A model with its loss, and synthetic rows for the audit's steps."""

    def init(self, seed: int) -> PyTree:
        """Returns the initial parameters, which depend on no private row."""

    def loss(self, params: PyTree, example: PyTree) -> Any:
        """Returns the loss of one row, a scalar.

        A loss with a third argument gets a key, for dropout. A loss made by `dpsgd.with_rows` can
        train with lazy tables.

        Args:
          params: Pytree of parameters, as from `init`.
          example: One row of `columns`, without the leading axis.
        """

    def generated(self, count: int) -> PyTree:
        """Returns `count` synthetic rows, shaped as `columns`."""


@runtime_checkable
class Task(Trainable, Protocol):
    """Rows, model and metrics of a run.

    A task is best a frozen dataclass, whose fields are its settings: the command offers them, and
    the run's configuration records them. A field named `data` is the path of the rows, which may
    move between attempts. `loss` is a pure function that is compiled; equal tasks have
    equal losses.

    A run calls the methods below. A task may also have

    * `check(begun)`, which raises ValueError before any step if the rows are damaged or do not
      suffice for `metrics`; `begun` is None, or, in a resumed run, the former result of `describe`,
      which these rows must fit;
    * `num_examples`, the number of training rows, if it is known before they are read; then
      `dpsgd train` refuses options that do not fit it at once;
    * `digest()`, a text that identifies the rows: other rows, another text. It is kept a secret. By
      default the arrays of `columns` are hashed;
    * `predict(params, rows)`, the predictions for rows, which need no labels: an array with one
      entry per row; pure, and compiled. `dpsgd score` and exported models call it;
    * `read(path, labelled=True, split=None)`, which yields the rows of another file of the task's
      format, block by block; rows may lack labels if `labelled` is False, and belong to `split` if
      the format has several. `dpsgd score` and `dpsgd evaluate` call it;
    * `keys(path, column)`, which yields a column of such a file, one text per row;
      `dpsgd score --key` writes it beside the predictions;
    * `not_covered()`, sentences about facts of private rows that the guarantee does not cover, such
      as "which class an image is of": the guarantee's sentence and the report add them;
    * `evaluate(params, blocks)`, the metrics of labelled rows from `read`, by names without a
      split, such as "auc": `dpsgd evaluate` prints them, and `metrics` may call it;
    * `encode(rows)`, which converts rows in a form for people, such as a table of texts, to rows
      for `predict`: programs pass them to an exported model. By default both are equal;
    * `recommend(request)`, the `dpsgd.Settings` for options that a user leaves open, from a
      `RecommendationRequest`: the number of rows and the wanted guarantee. It must look at no row.
      By default `dpsgd.runs.recommendation.generic`;
    * `settle(request)`, the task with its open settings chosen, such as the kind of model, from a
      `RecommendationRequest` with only the rows and the guarantee; and the reasons by setting. It
      must look at no row;
    * `calibration()`, a `dpsgd.engine.queries.Refinement`, such as `Platt`, which changes the model
      after the last step of a private run by noisy sums over all rows; equal tasks have equal
      refinements (`RunSpec.calibration`); None if its labels have none;
    * `described(description, where)`, a static method that returns an object for predicting,
      reading and evaluating, from the result of `describe` and without the training rows; its
      ValueError begins with `where`. By default the task is rebuilt from its settings without
      `data` and other paths.
    """

    def columns(self) -> PyTree:
        """Returns the training rows, one per example.

        If rows are not examples, or users hold several of them, it returns `samplers.UnitData`,
        made by `Contributions.of_users` or `UnitTree.data`, which names the protected unit.

        The rows are arrays or memory maps. In a run of several processes, each may lack rows that
        belong to other shards; such a task needs a `digest`, equal in all processes.
        """

    def metrics(self, params: PyTree) -> Mapping[str, float]:
        """Returns metrics on rows that did not train.

        Names are "<split>_<name>". A value is NaN where it is undefined: the training diverged.
        """

    def describe(self) -> Mapping[str, Any]:
        """Returns the public description of the task, as JSON values.

        The configuration records it. "headline" may name the metric that tables put first, "better"
        the direction of its better values, "higher" or "lower", and "prediction" the meaning of
        `predict`, such as "probability".
        """


TASKS = "dpsgd.tasks"
"""Entry point group in which installed packages name their tasks, "module:Class"."""

METHODS = ("columns", "init", "loss", "metrics", "generated", "describe")
"""Methods that every task has."""


def check_task(task: Any, name: str) -> None:
    """Refuses an object that lacks a method of `Task`.

    Args:
      task: Object to check.
      name: Name of the object in error messages.

    Raises:
      ValueError: if it is a class, or a method is missing.
    """
    if isinstance(task, type):
        raise ValueError(f"{name} is a class, not a task: pass an instance")
    if missing := [method for method in METHODS if not callable(getattr(task, method, None))]:
        raise ValueError(
            f"{name} is not a task: a {type(task).__name__} lacks {', '.join(missing)} (see "
            "dpsgd.runs.task.Task)"
        )


def settled(
    task: Any,
    request: RecommendationRequest,
    name: str | None = None,
    earlier: Mapping[str, Any] = {},
) -> tuple[Any, dict[str, dict[str, Any]]]:
    """Returns a task with its open settings chosen, and the choices.

    Settings that are None come from the earlier task, if it has the same name, or else from the
    task's method `settle`, if any. The second result gives "value" and "why" by setting.

    Args:
      task: Task of the new run.
      request: Number of rows and guarantee.
      name: Name of the task, or None.
      earlier: `task_record` of the earlier task; empty without one.
    """
    reasons = {}
    if taken := _settings_of_earlier(task, name, earlier):
        with contextlib.suppress(ValueError):  # settings that do not fit
            task = with_settings(task, taken, "init_from")
            reasons = dict.fromkeys(taken, "in its initial model")
    if callable(settle := getattr(task, "settle", None)):
        task, why = settle(request)
        reasons |= why
    return task, {key: {"value": getattr(task, key), "why": why} for key, why in reasons.items()}


def _settings_of_earlier(task: Any, name: str | None, record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the open settings that an earlier task has, but no paths."""
    own_settings, settings = _settings(task), record.get("settings", {})
    if own_settings is None or record.get("name") not in (name, task_record(task)["name"]):
        return {}
    return {
        key: settings[key]
        for key, value in without_paths(own_settings, type(task)).items()
        if value is None and settings.get(key) is not None and str(settings[key]).isprintable()
    }


def with_settings(task: Any, values: Mapping[str, Any], where: str) -> Any:
    """Returns a task with some settings replaced.

    Args:
      task: Task, a dataclass.
      values: Settings by name, as JSON values.
      where: Prefix of error messages.

    Raises:
      ValueError: if a setting is not allowed.
    """
    own_settings, kind = _settings(task), type(task)
    if own_settings is None:  # some fields are no JSON values
        return dataclasses.replace(task, **values)
    return made_of(kind, {**own_settings, **values}, kind.__qualname__, where)


def exceptions_of(task: Any) -> tuple[str, ...]:
    """Returns the sentences of a task's `not_covered`."""
    method = getattr(task, "not_covered", None)
    return tuple(checked(list(method()), list[str], "not_covered() of the task")) if method else ()


def calibration_of(task: Any) -> Any:
    """Returns the `calibration` of a task, or None."""
    method = getattr(task, "calibration", None)
    return method() if callable(method) else None


def find(name: str) -> Any:
    """Returns the object "module:name" of an imported module.

    Raises:
      ValueError: if there is no such object, or its module cannot be imported.

    >>> find("math:sqrt")(9.0)
    3.0
    """
    module, colon, qualified = name.partition(":")
    if not (module and colon and qualified):
        raise ValueError(f"{name!a} is not of the form module:object")
    imported = import_module(module)
    try:
        return functools.reduce(getattr, qualified.split("."), imported)
    except AttributeError:
        meant = near(qualified, vars(imported))
        raise ValueError(f"module {module} has no {qualified!a}{meant}") from None


def made_of(kind: type, settings: Mapping[str, Any], name: str, where: str) -> Any:
    """Returns a task of the class `kind`.

    Args:
      kind: Dataclass with the methods of `Task`.
      settings: Fields by name, as JSON values.
      name: Name of the class in error messages.
      where: Prefix of error messages.

    Raises:
      ValueError: if the class is no dataclass or no task, or a setting is not allowed.
    """
    if not dataclasses.is_dataclass(kind):
        raise ValueError(f"{where}: {name} is a class, but not a dataclass: name an instance")
    hints = field_types(kind)
    values = {
        key: Path(value) if isinstance(value, str) and is_path(hints.get(key)) else value
        for key, value in settings.items()
    }
    try:
        task = build(kind, values, where)
    except TypeError as error:  # records do not support the type of a field
        raise ValueError(f"{where}: {error}") from None
    check_task(task, name)
    return task


def task_record(task: Task, name: str | None = None) -> dict[str, Any]:
    """Returns the record of a task for a configuration.

    Args:
      task: Task of the run.
      name: "module:name" of the task, as an object, or of its class; by default of its class, if
        its settings are JSON values.

    Raises:
      ValueError: if `describe()` returns no JSON values.
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
    """Returns the fields of a task as JSON values; None if it has others."""
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
    """Returns the task of a `task_record`.

    Args:
      record: Record of the task.
      where: Prefix of error messages.
      kinds: Short names of tasks, each standing for "module:name".
      data: Path of the task's rows, if they have moved.

    Raises:
      ValueError: if the record is damaged, or its task cannot be found.
    """
    record = checked(record, dict[str, Any], f"{where}: task")
    name = checked(record.get("name"), str | None, f"{where}: task, name")
    if name is None:
        raise ValueError(
            f"{where}: the task was given as an object without a name: pass it to resume() again"
        )
    settings = dict(checked(record.get("settings"), dict[str, Any], f"{where}: task, settings"))
    name_of_kind = (kinds or {}).get(name, name)
    if not re.fullmatch(r"[^:]+:[^:]+", name_of_kind):
        raise ValueError(f"{where}: task, name: {name!a:.40} is no module:object")
    task_or_class = find(name_of_kind)
    if not isinstance(task_or_class, type):
        if data is not None:
            raise ValueError(f"the task {name} has its own rows: leave out data")
        check_task(task_or_class, name)
        return task_or_class
    if data is not None:
        if "data" not in settings:
            raise ValueError(f"the task {name} has no setting `data`: leave out data")
        settings["data"] = str(data)
    return made_of(task_or_class, settings, name, f"{where}: task")


def rows_of(task: Task) -> tuple[PyTree, Population]:
    """Returns a task's training rows and their population.

    Raises:
      ValueError: if `columns` returns no rows, or arrays of different lengths.
    """
    import jax

    from dpsgd.engine.sources import by_place, is_table

    data = task.columns()
    columns = data.columns if isinstance(data, UnitData) else data
    if is_table(columns):
        raise ValueError(
            f"columns() of the task must return arrays by name, got a {type(columns).__name__}: "
            "pass {name: np.asarray(table[name]) for name in names}"
        )
    columns = by_place(columns)
    shapes = [getattr(leaf, "shape", ()) for leaf in jax.tree.leaves(columns)]
    rows = {shape[0] if shape else 0 for shape in shapes}
    if len(rows) != 1 or 0 in rows:
        raise ValueError(
            f"columns() of the task must return arrays with equally many rows, one per example, "
            f"got {', '.join(map(str, sorted(rows))) or 'none'}"
        )
    return columns, data.population if isinstance(data, UnitData) else Population(rows.pop())


def data_digest(task: Task, columns: PyTree, population: Population | None = None) -> str:
    """Returns a digest of training rows, as secret as the rows.

    It is the task's `digest`, if it has one, or a hash of all arrays and of the tree of units.

    Args:
      task: Task that has the rows.
      columns: Pytree of arrays with one row per example.
      population: Population of the rows, whose tree of units is hashed.
    """
    if callable(digest := getattr(task, "digest", None)):
        return digest()
    from dpsgd.engine.sources import arrays_digest

    tree = population.tree if population else None
    return arrays_digest(columns, tree.shape.digest if tree else "")
