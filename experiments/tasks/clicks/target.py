"""Targets: a label of two values, of several, or a number, with loss and metrics."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

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


@dataclass(frozen=True)
class Target:
    """Kind of label.

    Logits are float32 outputs of the model for a row. A binary label (0 or 1) has a logit, cross
    entropy in nats, and AUC; one of several classes a logit each, cross entropy, and accuracy. A
    number in a public range has one logit z, squared error, and RMSE in its units: with m and h the
    middle of the range and half its length, the prediction is m + h z / 2, clipped to the range,
    and the loss is the square of z / 2 - (y - m) / h. Its gradient in z, the residual in units of
    h, is at most 2 for -2 <= z <= 2, so that a logit's step sizes fit. Huber's loss is linear
    beyond the residual `huber`.

    Source: P. Huber, "Robust Estimation of a Location Parameter", Annals of Mathematical Statistics
    35, 1964.
    """

    kind: Literal["binary", "classes", "number"]
    dtype: str
    """Dtype of labels in a store."""
    headline: str
    """Metric that is shown first."""
    better: str
    """Direction of its better values, "higher" or "lower"."""
    prediction: str = "probability"
    """Name of the prediction."""
    initial: float = 0.0
    """Initial logits of an untrained model."""
    classes: tuple[str, ...] = ()
    """Texts that mean 0, 1, ...; empty if the file has 0 and 1, or numbers."""
    bounds: tuple[float, ...] = ()
    """(low, high), to which numbers are clipped."""
    huber: float = 0.0
    """Residual in the number's units; 0 for the squared error everywhere."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the predicted numbers; empty for a single one."""
        return self.classes if self.kind == "classes" else ()

    @property
    def outputs(self) -> int:
        """Number of logits of a row."""
        return len(self.columns) or 1

    @property
    def _middle_and_half(self) -> tuple[float, float]:
        low, high = self.bounds
        return low + (high - low) / 2, (high - low) / 2

    def loss(self, logits: Any, label: Any) -> Any:
        """Returns the loss of one row, float32[].

        Args:
          logits: Logits of the row, float32[] or float32[outputs].
          label: Label of the row, in the target's dtype.

        >>> float(target_of((), (0.0, 5.0)).loss(np.float32(0.0), np.float32(5.0)))
        1.0
        """
        import optax

        if self.kind == "binary":
            return optax.sigmoid_binary_cross_entropy(logits, label.astype("float32"))
        if self.kind == "classes":
            return optax.softmax_cross_entropy_with_integer_labels(logits, label)
        middle, half = self._middle_and_half
        residual = 0.5 * logits - (label - middle) / half
        if not self.huber:
            return residual**2
        return 2.0 * optax.huber_loss(residual, delta=self.huber / half)

    def predict(self, logits: Any) -> Any:
        """Returns the predictions of rows: float32[rows], or float32[rows, outputs]."""
        import jax

        if self.kind == "number":
            middle, half = self._middle_and_half
            return jax.numpy.clip(middle + 0.5 * half * logits, *self.bounds)
        return (jax.nn.sigmoid if self.kind == "binary" else jax.nn.softmax)(logits)

    def metrics(self, logits: Array, labels: Array) -> Metrics:
        """Returns metrics of rows; NaN if undefined, as after divergence.

        Args:
          logits: Logits, float32[rows] or float32[rows, outputs].
          labels: Labels, [rows].

        Raises:
          ValueError: If there are no rows.
        """
        from experiments.tasks.classes import class_metrics
        from experiments.tasks.clicks.metrics import binary_metrics

        if self.kind == "binary":
            return vars(binary_metrics(logits, labels))
        if self.kind == "classes":
            return class_metrics([(logits, labels)] if labels.size else [])
        off = np.asarray(self.predict(logits), np.float64) - labels
        return {
            "rmse": float(np.sqrt(np.mean(off**2))),
            "mae": float(np.mean(np.abs(off))),
            "mean_error": float(np.mean(off)),
            "num_examples": labels.size,
        }

    def generated(self, rng: np.random.Generator, count: int) -> Array:
        """Returns labels of synthetic probe rows, uniform."""
        if self.kind == "number":
            low, high = self.bounds
            return rng.uniform(low, high, count).astype(self.dtype)
        if self.kind == "classes":
            return rng.integers(0, self.outputs, count, np.int32)
        return rng.integers(0, 2, count).astype(self.dtype)

    def robust(self, huber: float) -> Target:
        """Returns the target with Huber's loss; itself for 0.

        Raises:
          ValueError: For a label that is not a number.
        """
        if huber and self.kind != "number":
            raise ValueError("--huber needs a numerical label (--label-bounds); leave it out")
        return dataclasses.replace(self, huber=huber) if huber else self

    def problem(self, labels: Iterable[Array]) -> str:
        """Returns the reason why `metrics` are undefined, or ""."""
        if self.kind != "binary" or {int(y) for x in labels for y in np.unique(x)} == {0, 1}:
            return ""
        return "do not include both classes, so their AUC is undefined"

    def calibration(self, logit: Function, rescaled: Rescaled) -> Refinement:
        """Returns the calibration of a model after training.

        It is Platt scaling, temperature scaling, or an affine map fitted by the model's loss.

        Args:
          logit: Function (params, example) -> logits.
          rescaled: Function (params, a, c) -> parameters with the logit a z + c.
        """
        from dpsgd.engine.calibration import Affine, Platt, Temperature

        if self.kind == "binary":
            return Platt(logit, _label, rescaled)
        if self.kind == "classes":
            return Temperature(logit, _label, lambda params, a: rescaled(params, a, 0.0))
        middle, half = self._middle_and_half
        return Affine(
            lambda params, example: 0.5 * logit(params, example),
            lambda example: (example["label"] - middle) / half,
            lambda params, a, c: rescaled(params, a, 2 * c),
            min(1.0, self.huber / half) if self.huber else 1.0,
        )


def _label(example: PyTree) -> Any:
    return example["label"]


def target_of(classes: tuple[str, ...], bounds: tuple[float, ...] = ()) -> Target:
    """Returns the target of a label with declared classes or bounds.

    Args:
      classes: Texts of the label that mean 0, 1, ...; empty for zeros and ones.
      bounds: Public (low, high) of a numerical label; empty for classes.

    >>> target_of((), (0.0, 5.0)).headline
    'rmse'

    Raises:
      ValueError: If the classes are fewer than two or not distinct texts, the bounds are not a
        range, or both are given.
    """
    if classes and bounds:
        raise ValueError("the label has both declared classes and bounds; leave one out")
    if bounds:
        low, high = (*bounds, math.nan, math.nan)[:2]
        with np.errstate(over="ignore"):
            limits = np.array([low, high, (high - low) / 2]).astype(np.float32)
        if len(bounds) != 2 or not (np.isfinite(limits).all() and limits[0] < limits[1]):
            text = ":".join(f"{x:g}" for x in bounds)
            raise ValueError(
                f"label bounds {text}: expected LOW:HIGH (--label-bounds), finite in float32, LOW "
                "below HIGH"
            )
        return Target("number", "<f4", "rmse", "lower", "prediction", bounds=bounds)
    if classes and (len(classes) < 2 or len({*classes, ""}) <= len(classes)):
        raise ValueError(
            "a label needs two or more distinct texts (--classes, or --positive and --negative), "
            f"got {' and '.join(map(ascii, classes))}"
        )
    if len(classes) > 2:
        return Target("classes", "<i4", "accuracy", "higher", classes=classes)
    # Clicks are rarer than their absence, about one in four by the publishers.
    return Target("binary", "|u1", "auc", "higher", initial=-1.0, classes=classes)
