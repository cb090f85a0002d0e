"""What a label is: one of two values, or one of several; and all that a task does by it."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

if TYPE_CHECKING:
    from dpsgd.engine.queries import Refinement

PyTree = Any


class Target(abc.ABC):
    """A kind of label.

    Logits are what a model says of a row, float32: of one output a scalar, of several a vector.
    """

    dtype: ClassVar[str]
    """Of labels in a store."""
    headline: ClassVar[str]
    """Metric that is shown first."""
    better: ClassVar[str]
    """Whether its "higher" or its "lower" values are."""
    prediction: ClassVar[str]
    """What is predicted of a row."""
    levels: ClassVar[bool] = False
    """Whether what is predicted is a rate, whose level by groups of rows is shown."""
    initial: ClassVar[float] = 0.0
    """Logits of a model that has not been trained."""

    @property
    def outputs(self) -> int:
        """How many logits a row has."""
        return 1

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the numbers that are predicted of a row; none where it is one number."""
        return ()

    @abc.abstractmethod
    def loss(self, logits: Any, label: Any) -> Any:
        """Returns the loss of one row, float32[]."""

    @abc.abstractmethod
    def predict(self, logits: Any) -> Any:
        """Returns the predictions of rows: float32[rows], or float32[rows, outputs]."""

    @abc.abstractmethod
    def metrics(self, logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
        """Returns figures of merit; NaN where one is undefined, as where the training diverged.

        Raises:
          ValueError: if there are no rows.
        """

    @abc.abstractmethod
    def generated(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """Returns labels of synthetic probe rows."""

    def problem(self, labels: Iterable[np.ndarray]) -> str:
        """Returns why rows with these labels have no `metrics`; empty if they have."""
        del labels
        return ""

    def calibration(
        self,
        logit: Callable[[PyTree, PyTree], Any],
        rescaled: Callable[[PyTree, Any, Any], PyTree],
    ) -> Refinement | None:
        """Returns what calibrates a model after training; None where nothing does.

        Args:
          logit: (params, example) -> logits.
          rescaled: (params, a, c) -> parameters whose logit is a times as large, plus c.
        """
        del logit, rescaled
        return None


@dataclass(frozen=True)
class Binary(Target):
    """One of two values, 0 and 1: a logit, cross entropy in nats, AUC.

    Attributes:
      classes: Texts that mean 0 and 1; none where these are written.
    """

    classes: tuple[str, ...] = ()

    dtype = "|u1"
    headline, better, prediction = "auc", "higher", "probability"
    levels = True
    initial = -1.0
    """Clicks are rarer than their absence: the data set's publishers state about one in four."""

    def loss(self, logits: Any, label: Any) -> Any:
        """Returns the cross entropy."""
        import optax

        return optax.sigmoid_binary_cross_entropy(logits, label.astype("float32"))

    def predict(self, logits: Any) -> Any:
        """Returns the probability of the label 1."""
        import jax

        return jax.nn.sigmoid(logits)

    def metrics(self, logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
        """Returns those of `BinaryMetrics`."""
        from experiments.tasks.clicks.metrics import binary_metrics

        return vars(binary_metrics(logits, labels))

    def generated(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """Returns zeros and ones."""
        return rng.integers(0, 2, count).astype(self.dtype)

    def problem(self, labels: Iterable[np.ndarray]) -> str:
        """Returns what is wrong where one of the values is absent."""
        both = {int(y) for block in labels for y in np.unique(block)} == {0, 1}
        return "" if both else "are not of both classes, so that they have no AUC"

    def calibration(
        self,
        logit: Callable[[PyTree, PyTree], Any],
        rescaled: Callable[[PyTree, Any, Any], PyTree],
    ) -> Refinement:
        """Returns Platt scaling."""
        from dpsgd.engine.platt import Platt

        return Platt(logit, _label, rescaled)


def _label(example: PyTree) -> Any:
    return example["label"]


@dataclass(frozen=True)
class Classes(Target):
    """One of several declared values: a logit each, softmax cross entropy in nats, accuracy.

    Attributes:
      classes: Their texts, of which the k-th (from 0) means k.
    """

    classes: tuple[str, ...]

    dtype = "<i4"
    headline, better, prediction = "accuracy", "higher", "probability"

    @property
    def outputs(self) -> int:
        """One a class."""
        return len(self.classes)

    @property
    def columns(self) -> tuple[str, ...]:
        """The classes."""
        return self.classes

    def loss(self, logits: Any, label: Any) -> Any:
        """Returns the cross entropy."""
        import optax

        return optax.softmax_cross_entropy_with_integer_labels(logits, label)

    def predict(self, logits: Any) -> Any:
        """Returns the probabilities of the classes."""
        import jax

        return jax.nn.softmax(logits)

    def metrics(self, logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
        """Returns accuracy and log loss."""
        from experiments.tasks.classes import class_metrics

        return class_metrics([(logits, labels)] if labels.size else [])

    def generated(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """Returns uniform classes."""
        return rng.integers(0, self.outputs, count, np.int32)


def target_of(classes: tuple[str, ...]) -> Target:
    """Returns the target of a label with these declared values, in their order; none are 0 and 1.

    Raises:
      ValueError: if they are fewer than two, or not different texts.
    """
    if classes and (len(classes) < 2 or len({*classes, ""}) <= len(classes)):
        raise ValueError(
            "two or more different texts of the label are declared (--classes, or --positive and "
            f"--negative), not {' and '.join(map(ascii, classes))}"
        )
    return Classes(classes) if len(classes) > 2 else Binary(classes)
