"""What is trained: a task knows nothing of privacy, and a run knows nothing else of its task."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

PyTree = Any


@runtime_checkable
class Task(Protocol):
    """Rows, a model of them and what to measure: all that a run needs to be told.

    A task is best a frozen dataclass, whose fields are its settings: the command offers them, and
    the run's configuration records them. `loss` and `predict` are pure and compiled.
    """

    def columns(self) -> PyTree:
        """Returns the training rows: arrays, or memory maps, with one leading row an example.

        Where whole users are protected, `samplers.Contributions` instead: its rows are users.
        """

    def init(self, seed: int) -> PyTree:
        """Returns the parameters before training, which depend on no private row."""

    def loss(self, params: PyTree, example: PyTree) -> Any:
        """Returns the loss of one row, a scalar; with a third argument, a key, for dropout."""

    def predict(self, params: PyTree, rows: PyTree) -> Any:
        """Returns what the model says of rows, which need no labels: an array with a row each."""

    def read(self, path: Path) -> Iterator[PyTree]:
        """Yields the rows of another file of the task's format, block by block."""

    def metrics(self, params: PyTree) -> Mapping[str, float]:
        """Returns figures of merit on rows outside the training split, such as "test_auc"."""

    def generated(self, count: int) -> PyTree:
        """Returns `count` rows of the shapes and dtypes of `columns` that are nobody's."""

    def describe(self) -> Mapping[str, Any]:
        """Returns what is public of the task, as JSON values: it goes into the configuration."""
