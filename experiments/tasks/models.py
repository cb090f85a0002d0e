"""Base class of tasks: a model as pure functions, and metrics of held-out rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

PyTree = Any


class Models:
    """Model as pure functions; a task adds training and held-out rows."""

    evaluate: Callable[[PyTree, Iterable[PyTree]], dict[str, float]]

    @property
    def functions(self) -> Any:
        """Pure functions of the model; equal models share compiled programs."""
        raise NotImplementedError

    def init(self, seed: int) -> PyTree:
        """Returns new parameters, which depend on no row."""
        return self.functions.init(seed)

    @property
    def loss(self) -> Callable[[PyTree, PyTree], Any]:
        """Loss (params, example) -> scalar, one function for equal models."""
        return self.functions.loss

    @property
    def predict(self) -> Callable[[PyTree, PyTree], Any]:
        """Predictions (params, rows) -> float32[rows] or float32[rows, ...]."""
        return self.functions.predict

    def held_out(self, split: str) -> Iterable[PyTree]:
        """Returns the "validation" or "test" rows in blocks."""
        raise NotImplementedError

    def metrics(self, params: PyTree) -> dict[str, float]:
        """Returns `evaluate` of the validation and test rows, by name."""
        return {
            f"{split}_{name}": value
            for split in ("validation", "test")
            for name, value in self.evaluate(params, self.held_out(split)).items()
        }
