"""What is trained: a task knows nothing of privacy, and a run knows nothing else of its task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

PyTree = Any


class Task(Protocol):
    """Rows, a model of them and what to measure: all that a run needs to be told.

    A task is best a frozen dataclass, whose fields are its settings: the command offers them, and
    the run's configuration records them. One named `data`, a path, says where the rows lie, which
    is no part of what they are. `loss` is pure, and compiled.

    The methods below are what a run calls. A task may also have

    * `check(begun)`, which raises ValueError before any step if the rows are damaged or `metrics`
      could not be had of them; `begun` is None, or, where a run goes on, what `describe` returned
      when it was begun, which these rows must fit;
    * `digest()`, a text that names the rows: other rows, another text. It is kept a secret. By
      default the arrays of `columns` are hashed;
    * `small(secure)`, the same task with small tables and layers, for the audit, which takes the
      program's step many times; with `secure`, of the exact noise that takes seconds a million
      parameters. By default the task itself;
    * `predict(params, rows)`, what the model says of rows, which need no labels: an array with a
      row each; pure, and compiled. It serves `dpsgd score` and an exported model;
    * `read(path, labelled=True, split=None)`, which yields the rows of another file of the task's
      format, block by block: without labels if they need not be `labelled`, and of one `split` if
      the format has several. `dpsgd score` and `dpsgd evaluate` read by it;
    * `evaluate(params, blocks)`, figures of merit of such labelled rows, by their bare names, such
      as "auc": what `dpsgd evaluate` prints, and of which `metrics` may be made;
    * `encode(rows)`, rows as `predict` takes them of rows as people have them, such as a table of
      texts: what a program gives an exported model. By default they are the same;
    * `described(description, where)`, a static method that returns what predicts, reads and
      evaluates, from what `describe` returned and without the training rows; `where` begins the
      line of its ValueError. By default a task is made of the settings, but for `data`.
    """

    def columns(self) -> PyTree:
        """Returns the training rows: arrays, or memory maps, with one leading row an example.

        Where whole users are protected, `samplers.Contributions` instead: its rows are users.
        """

    def init(self, seed: int) -> PyTree:
        """Returns the parameters before training, which depend on no private row."""

    def loss(self, params: PyTree, example: PyTree) -> Any:
        """Returns the loss of one row, a scalar; with a third argument, a key, for dropout."""

    def metrics(self, params: PyTree) -> Mapping[str, float]:
        """Returns figures of merit on rows outside the training split, such as "test_auc".

        Each is named "<split>_<name>", and is NaN where it is undefined: the training diverged.
        """

    def generated(self, count: int) -> PyTree:
        """Returns `count` rows of the shapes and dtypes of `columns` that are nobody's."""

    def describe(self) -> Mapping[str, Any]:
        """Returns what is public of the task, as JSON values: it goes into the configuration.

        "headline" may name the metric that tables put first, and "better" whether its "higher" or
        its "lower" values are.
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
