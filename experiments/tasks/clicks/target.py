"""What a label is: one of two values, of several, or a number; and all that a task does by it."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

if TYPE_CHECKING:
    from dpsgd.engine.queries import Refinement

PyTree = Any
Array = np.ndarray
Function = Callable[[PyTree, PyTree], Any]
"""(params, example) -> logits."""
Rescaled = Callable[[PyTree, Any, Any], PyTree]
"""(params, a, c) -> parameters whose logit is a times as large, plus c."""
Metrics = dict[str, float]


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
    def metrics(self, logits: Array, labels: Array) -> Metrics:
        """Returns figures of merit of rows; NaN where one is undefined, as where training diverged.

        Raises:
          ValueError: if there are no rows.
        """

    @abc.abstractmethod
    def generated(self, rng: np.random.Generator, count: int) -> Array:
        """Returns labels of synthetic probe rows."""

    def robust(self, huber: float) -> Target:
        """Returns the target by Huber's loss beyond this residual; itself for 0.

        Raises:
          ValueError: for a label that is no number.
        """
        if huber:
            raise ValueError("--huber is for labels that are numbers (--label-bounds) alone")
        return self

    def problem(self, labels: Iterable[Array]) -> str:
        """Returns why rows with these labels have no `metrics`; empty if they have."""
        del labels
        return ""

    @abc.abstractmethod
    def calibration(self, logit: Function, rescaled: Rescaled) -> Refinement:
        """Returns what calibrates a model after training."""


@dataclass(frozen=True)
class Binary(Target):
    """One of two values, 0 and 1: a logit, cross entropy in nats, AUC."""

    classes: tuple[str, ...] = ()
    """Texts that mean 0 and 1; none where these are written."""

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

    def metrics(self, logits: Array, labels: Array) -> Metrics:
        """Returns those of `BinaryMetrics`."""
        from experiments.tasks.clicks.metrics import binary_metrics

        return vars(binary_metrics(logits, labels))

    def generated(self, rng: np.random.Generator, count: int) -> Array:
        """Returns zeros and ones."""
        return rng.integers(0, 2, count).astype(self.dtype)

    def problem(self, labels: Iterable[Array]) -> str:
        """Returns what is wrong where one of the values is absent."""
        both = {int(y) for block in labels for y in np.unique(block)} == {0, 1}
        return "" if both else "are not of both classes, so that they have no AUC"

    def calibration(self, logit: Function, rescaled: Rescaled) -> Refinement:
        """Returns Platt scaling."""
        from dpsgd.engine.calibration import Platt

        return Platt(logit, _label, rescaled)


def _label(example: PyTree) -> Any:
    return example["label"]


@dataclass(frozen=True)
class Classes(Target):
    """One of several declared values: a logit each, softmax cross entropy in nats, accuracy."""

    classes: tuple[str, ...]
    """Texts of the values, of which the k-th (from 0) means k."""

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

    def metrics(self, logits: Array, labels: Array) -> Metrics:
        """Returns accuracy and log loss."""
        from experiments.tasks.classes import class_metrics

        return class_metrics([(logits, labels)] if labels.size else [])

    def generated(self, rng: np.random.Generator, count: int) -> Array:
        """Returns uniform classes."""
        return rng.integers(0, self.outputs, count, np.int32)

    def calibration(self, logit: Function, rescaled: Rescaled) -> Refinement:
        """Returns temperature scaling."""
        from dpsgd.engine.calibration import Temperature

        return Temperature(logit, _label, lambda params, a: rescaled(params, a, 0.0))


@dataclass(frozen=True)
class Number(Target):
    r"""A number in a public range: one logit z, squared error, RMSE in the label's own units.

    The prediction is m + h z / 2, clipped to [m - h, m + h]: m and h are the middle of the range
    and half its length. The loss is the square of z / 2 - (y - m) / h, so that its gradient by z,
    the residual in units of h, is at most 2 long where -2 <= z <= 2: steps of a logit's size are
    right for it. Huber's loss grows on from the residual `huber` by a straight line.

    Source: P. Huber, "Robust Estimation of a Location Parameter", Annals of Mathematical Statistics
    35, 1964.
    """

    bounds: tuple[float, ...]
    """(low, high), to which labels are clipped."""
    huber: float = 0.0
    """In the label's own units; 0 for the squared error everywhere."""

    dtype = "<f4"
    headline, better, prediction = "rmse", "lower", "prediction"

    def __post_init__(self) -> None:
        low, high = (*self.bounds, math.nan, math.nan)[:2]
        with np.errstate(over="ignore"):
            ends = np.array([low, high, (high - low) / 2]).astype(np.float32)
        if len(self.bounds) != 2 or not (np.isfinite(ends).all() and ends[0] < ends[1]):
            shown = ":".join(f"{end:g}" for end in self.bounds)
            raise ValueError(
                "bounds of the label (--label-bounds LOW:HIGH) must be finite, LOW below HIGH, also"
                f" as numbers of 32 bits, not {shown}"
            )

    @property
    def _middle_and_half(self) -> tuple[float, float]:
        low, high = self.bounds
        return low + (high - low) / 2, (high - low) / 2

    def loss(self, logits: Any, label: Any) -> Any:
        """Returns the squared error, or Huber's loss, in units of half the range."""
        import optax

        middle, half = self._middle_and_half
        residual = 0.5 * logits - (label - middle) / half
        if not self.huber:
            return residual**2
        return 2.0 * optax.huber_loss(residual, delta=self.huber / half)

    def robust(self, huber: float) -> Number:
        """Returns the target by Huber's loss beyond this residual."""
        return dataclasses.replace(self, huber=huber)

    def calibration(self, logit: Function, rescaled: Rescaled) -> Refinement:
        """Returns affine calibration, by Huber's loss where the model learns by it."""
        from dpsgd.engine.calibration import Affine

        middle, half = self._middle_and_half
        return Affine(
            lambda params, example: 0.5 * logit(params, example),
            lambda example: (example["label"] - middle) / half,
            lambda params, a, c: rescaled(params, a, 2 * c),
            min(1.0, self.huber / half) if self.huber else 1.0,
        )

    def predict(self, logits: Any) -> Any:
        """Returns the number, in the label's own units, within its bounds."""
        import jax.numpy as jnp

        middle, half = self._middle_and_half
        return jnp.clip(middle + 0.5 * half * logits, *self.bounds)

    def metrics(self, logits: Array, labels: Array) -> Metrics:
        """Returns root mean squared, mean absolute and mean error, of predictions less labels."""
        off = np.asarray(self.predict(logits), np.float64) - labels
        return {
            "rmse": float(np.sqrt(np.mean(off**2))),
            "mae": float(np.mean(np.abs(off))),
            "mean_error": float(np.mean(off)),
            "num_examples": labels.size,
        }

    def generated(self, rng: np.random.Generator, count: int) -> Array:
        """Returns uniform numbers within the bounds."""
        low, high = self.bounds
        return rng.uniform(low, high, count).astype(self.dtype)


def target_of(classes: tuple[str, ...], bounds: tuple[float, ...] = ()) -> Target:
    """Returns the target of a label: a number with public bounds, or else one of some values.

    Raises:
      ValueError: if the values are fewer than two or not different texts, if bounds are no range,
        or if there are both.
    """
    if classes and bounds:
        raise ValueError("a label has declared values or bounds, not both")
    if bounds:
        return Number(bounds)
    if classes and (len(classes) < 2 or len({*classes, ""}) <= len(classes)):
        raise ValueError(
            "two or more different texts of the label are declared (--classes, or --positive and "
            f"--negative), not {' and '.join(map(ascii, classes))}"
        )
    return Classes(classes) if len(classes) > 2 else Binary(classes)
