"""Targets: a label of two values, of several, or a number, with loss and metrics."""

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
"""(params, a, c) -> parameters with the logit scaled by a and shifted by c."""
Metrics = dict[str, float]


class Target(abc.ABC):
    """Kind of label.

    Logits are float32 outputs of the model for a row: a scalar or a vector.
    """

    dtype: ClassVar[str]
    """Dtype of labels in a store."""
    headline: ClassVar[str]
    """Metric that is shown first."""
    better: ClassVar[str]
    """Direction of its better values, "higher" or "lower"."""
    prediction: ClassVar[str]
    """Name of the prediction."""
    levels: ClassVar[bool] = False
    """True if the prediction is a rate, shown by groups of rows."""
    initial: ClassVar[float] = 0.0
    """Initial logits of an untrained model."""

    @property
    def outputs(self) -> int:
        """Number of logits of a row."""
        return 1

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the predicted numbers; empty for a single one."""
        return ()

    @abc.abstractmethod
    def loss(self, logits: Any, label: Any) -> Any:
        """Returns the loss of one row, float32[].

        Args:
          logits: Logits of the row, float32[] or float32[outputs].
          label: Label of the row, in the target's dtype.
        """

    @abc.abstractmethod
    def predict(self, logits: Any) -> Any:
        """Returns the predictions of rows: float32[rows], or float32[rows, outputs]."""

    @abc.abstractmethod
    def metrics(self, logits: Array, labels: Array) -> Metrics:
        """Returns metrics of rows; NaN if undefined, as after divergence.

        Args:
          logits: Logits, float32[rows] or float32[rows, outputs].
          labels: Labels, [rows].

        Raises:
          ValueError: If there are no rows.
        """

    @abc.abstractmethod
    def generated(self, rng: np.random.Generator, count: int) -> Array:
        """Returns labels of synthetic probe rows."""

    def robust(self, huber: float) -> Target:
        """Returns the target with Huber's loss; itself for 0.

        Raises:
          ValueError: For a label that is not a number.
        """
        if huber:
            raise ValueError("--huber needs a numerical label (--label-bounds); leave it out")
        return self

    def problem(self, labels: Iterable[Array]) -> str:
        """Returns the reason why `metrics` are undefined, or ""."""
        del labels
        return ""

    @abc.abstractmethod
    def calibration(self, logit: Function, rescaled: Rescaled) -> Refinement:
        """Returns the calibration of a model after training.

        Args:
          logit: Function (params, example) -> logits.
          rescaled: Function (params, a, c) -> parameters with the logit a z + c.
        """


@dataclass(frozen=True)
class Binary(Target):
    """Label 0 or 1: a logit, cross entropy in nats, AUC."""

    classes: tuple[str, ...] = ()
    """Texts that mean 0 and 1; empty if the file has 0 and 1."""

    dtype = "|u1"
    headline, better, prediction = "auc", "higher", "probability"
    levels = True
    initial = -1.0
    """Initial logit: clicks are rarer than their absence, about one in four by the publishers."""

    def loss(self, logits: Any, label: Any) -> Any:
        """Returns the cross entropy."""
        import optax

        return optax.sigmoid_binary_cross_entropy(logits, label.astype("float32"))

    def predict(self, logits: Any) -> Any:
        """Returns the probability of the label 1."""
        import jax

        return jax.nn.sigmoid(logits)

    def metrics(self, logits: Array, labels: Array) -> Metrics:
        """Returns the metrics of `BinaryMetrics`."""
        from experiments.tasks.clicks.metrics import binary_metrics

        return vars(binary_metrics(logits, labels))

    def generated(self, rng: np.random.Generator, count: int) -> Array:
        """Returns zeros and ones."""
        return rng.integers(0, 2, count).astype(self.dtype)

    def problem(self, labels: Iterable[Array]) -> str:
        """Describes rows of a single class; "" for both classes."""
        has_both = {int(y) for block in labels for y in np.unique(block)} == {0, 1}
        return "" if has_both else "do not include both classes, so their AUC is undefined"

    def calibration(self, logit: Function, rescaled: Rescaled) -> Refinement:
        """Returns Platt scaling."""
        from dpsgd.engine.calibration import Platt

        return Platt(logit, _label, rescaled)


def _label(example: PyTree) -> Any:
    return example["label"]


@dataclass(frozen=True)
class Classes(Target):
    """Label of several declared values: a logit each, cross entropy in nats, accuracy."""

    classes: tuple[str, ...]
    """Texts of the values; the k-th (from 0) means k."""

    dtype = "<i4"
    headline, better, prediction = "accuracy", "higher", "probability"

    @property
    def outputs(self) -> int:
        """Number of classes."""
        return len(self.classes)

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the classes."""
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
    """Label in a public range: one logit z, squared error, RMSE in the label's units.

    The prediction is m + h z / 2, clipped to [m - h, m + h]: m and h are the middle of the range
    and half its length. The loss is the square of z / 2 - (y - m) / h; its gradient in z, the
    residual in units of h, is at most 2 for -2 <= z <= 2, so that a logit's step sizes fit. Huber's
    loss is linear beyond the residual `huber`.

    Source: P. Huber, "Robust Estimation of a Location Parameter", Annals of Mathematical Statistics
    35, 1964.
    """

    bounds: tuple[float, ...]
    """(low, high), to which labels are clipped."""
    huber: float = 0.0
    """Residual in the label's units; 0 for the squared error everywhere."""

    dtype = "<f4"
    headline, better, prediction = "rmse", "lower", "prediction"

    def __post_init__(self) -> None:
        low, high = (*self.bounds, math.nan, math.nan)[:2]
        with np.errstate(over="ignore"):
            limits = np.array([low, high, (high - low) / 2]).astype(np.float32)
        if len(self.bounds) != 2 or not (np.isfinite(limits).all() and limits[0] < limits[1]):
            text = ":".join(f"{x:g}" for x in self.bounds)
            raise ValueError(
                f"label bounds {text}: expected LOW:HIGH (--label-bounds), finite in float32, LOW "
                "below HIGH"
            )

    @property
    def _middle_and_half(self) -> tuple[float, float]:
        low, high = self.bounds
        return low + (high - low) / 2, (high - low) / 2

    def loss(self, logits: Any, label: Any) -> Any:
        """Returns the squared or Huber loss, in half ranges.

        >>> float(Number((0.0, 5.0)).loss(np.float32(0.0), np.float32(5.0)))
        1.0
        """
        import optax

        middle, half = self._middle_and_half
        residual = 0.5 * logits - (label - middle) / half
        if not self.huber:
            return residual**2
        return 2.0 * optax.huber_loss(residual, delta=self.huber / half)

    def robust(self, huber: float) -> Number:
        """Returns the target with Huber's loss."""
        return dataclasses.replace(self, huber=huber)

    def calibration(self, logit: Function, rescaled: Rescaled) -> Refinement:
        """Returns affine calibration, with the model's loss."""
        from dpsgd.engine.calibration import Affine

        middle, half = self._middle_and_half
        return Affine(
            lambda params, example: 0.5 * logit(params, example),
            lambda example: (example["label"] - middle) / half,
            lambda params, a, c: rescaled(params, a, 2 * c),
            min(1.0, self.huber / half) if self.huber else 1.0,
        )

    def predict(self, logits: Any) -> Any:
        """Returns the number in the label's units, within its bounds."""
        import jax.numpy as jnp

        middle, half = self._middle_and_half
        return jnp.clip(middle + 0.5 * half * logits, *self.bounds)

    def metrics(self, logits: Array, labels: Array) -> Metrics:
        """Returns RMSE, mean absolute and mean error, predictions less labels."""
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
    """Returns the target of a label with declared classes or bounds.

    Args:
      classes: Texts of the label that mean 0, 1, ...; empty for zeros and ones.
      bounds: Public (low, high) of a numerical label; empty for classes.

    >>> target_of((), (0.0, 5.0))
    Number(bounds=(0.0, 5.0), huber=0.0)

    Raises:
      ValueError: If the classes are fewer than two or not distinct texts, the bounds are not a
        range, or both are given.
    """
    if classes and bounds:
        raise ValueError("the label has both declared classes and bounds; leave one out")
    if bounds:
        return Number(bounds)
    if classes and (len(classes) < 2 or len({*classes, ""}) <= len(classes)):
        raise ValueError(
            "a label needs two or more distinct texts (--classes, or --positive and --negative), "
            f"got {' and '.join(map(ascii, classes))}"
        )
    return Classes(classes) if len(classes) > 2 else Binary(classes)
