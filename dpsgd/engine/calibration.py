"""Calibrations after training: Platt, temperature and affine scaling of predictions.

Each rescales predictions by one or two numbers, fitted by noised Newton steps to sums over all
rows. Statistics, their bounds, and the choice of noise: docs/explanation/private-calibration.md.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from accounting import GaussianProfile, calibrate, default_delta
from dpsgd.core.queries import FullSums
from dpsgd.engine.queries import Refinement

PyTree = Any


class SumsRule(NamedTuple):
    """Public constants that choose the sums of a calibration."""

    steps: int
    """Newton steps, one sum each."""
    l2_clip_norm: float
    """C, just above the norm of any row's vector."""
    noise_loss: float
    """Loss A from the last gradient's noise, in units of sigma^2 / n^2."""
    sigma_loss: float
    """Growth B of the loss with the logarithm of the run's sigma."""
    most_loss: float
    """Total loss above which no sum is taken."""


RULES = {
    "platt": SumsRule(4, 2.2361, 120.0, 0.004, 1e-3),
    "temperature": SumsRule(4, 1.0001, 75.0, 0.02, 3e-3),
    "affine": SumsRule(1, 1.6584, 140.0, 0.002, 3e-4),
}
"""Rule for each kind of calibration; losses in nats, or squares of half the label's range."""

_FIRST_SCALE = 0.7
"""Scale of logits before the first step: clipping makes private logits too steep more often."""
_SCALES = 1 / 8, 4.0
_OFF_DIAGONAL = 1.0, math.sqrt(2), 1.0  # so that the norm of a packed Hessian is the matrix's


def calibration_sums(
    kind: str, num_examples: int, *, epsilon: float = 1.0, delta: float | None = None
) -> FullSums | None:
    """Returns a calibration's sums, or None if not worthwhile.

    At this noise the sums and the run that pays for them lose least. The choice depends on public
    numbers alone, and does not affect the guarantee.

    >>> print(calibration_sums("platt", 88_000, epsilon=3.0))
    4 noisy sums over all rows (noise multiplier 33, clipping norm 2.2361)

    Args:
      kind: Kind of calibration, a key of `RULES`: "platt", "temperature" or "affine".
      num_examples: Number n of training rows.
      epsilon: Approximate privacy cost of the whole run.
      delta: Probability delta of that cost; by default `accounting.default_delta`.
    """
    steps, clip, noise_loss, sigma_loss, most_loss = RULES[kind]
    delta = default_delta(num_examples) if delta is None else delta
    mu = 1 / calibrate(GaussianProfile, epsilon=epsilon, delta=delta)
    if math.sqrt(2 * noise_loss * sigma_loss * steps) / (mu * num_examples) > most_loss:
        return None
    square = num_examples * math.sqrt(sigma_loss * steps / (2 * noise_loss)) / mu
    sigma = float(f"{math.sqrt(square):.2g}")  # equal for about equal runs
    return FullSums(steps, sigma, clip)


class _Newton(Refinement):
    """Fit of a scale, and perhaps of a shift, by noised Newton steps of bounded length.

    The state has the fitted numbers in `_units`. A row's vector has the derivatives of its loss:
    the gradient, and `_weight` times the entries of the Hessian in its upper triangle.
    """

    rescaled: Callable[..., PyTree]
    _names: ClassVar[tuple[str, ...]]
    """Names of the fitted numbers in `summary`."""
    _first: ClassVar[tuple[float, ...]]
    _ranges: ClassVar[tuple[tuple[float, float], ...]]
    _most_step: ClassVar[tuple[float, ...]]
    _least_curvature: ClassVar[float]
    _weight: ClassVar[float]

    @property
    @abc.abstractmethod
    def _units(self) -> np.ndarray:
        """Units of the state's numbers."""

    def start(self) -> PyTree:
        """Returns the initial numbers."""
        return jnp.asarray(self._units * self._first, jnp.float32)

    def fold(self, state: PyTree, mean: Any) -> PyTree:
        """Returns the numbers after a Newton step."""
        gradient, hessian = self._derivatives(mean)
        curvatures, axes = jnp.linalg.eigh(hessian)
        curvatures = jnp.maximum(curvatures, self._least_curvature)
        step = -axes @ ((axes.T @ gradient) / curvatures)
        units = jnp.array(self._units, jnp.float32)
        most = units * jnp.array(self._most_step)
        step = step / jnp.maximum(1.0, jnp.max(jnp.abs(step) / most))
        step = jnp.where(jnp.all(jnp.isfinite(step)), step, 0.0)
        low, high = (units * jnp.array(limits) for limits in zip(*self._ranges, strict=True))
        return jnp.clip(state + step, low, high)

    def apply(self, params: PyTree, state: PyTree) -> PyTree:
        """Returns the rescaled parameters."""
        return self.rescaled(params, *self._numbers(state))

    def summary(self, state: PyTree) -> Mapping[str, Any]:
        """Returns the fitted numbers by name."""
        return dict(zip(self._names, self._numbers(state), strict=True))

    def _numbers(self, state: PyTree) -> list[Any]:
        """Returns the fitted numbers in units of 1."""
        return [state[k] / unit for k, unit in enumerate(self._units.tolist())]

    def _vector(self, x: Any, slope: Any, curvature: Any) -> jax.Array:
        """Returns the vector of a loss of a x + c, given its derivatives by a x + c."""
        ones, scales = jnp.ones_like(x), jnp.asarray(_OFF_DIAGONAL, jnp.float32)
        gradient = slope * jnp.stack([x, ones])
        return jnp.concatenate([gradient, curvature * scales * jnp.stack([x * x, x, ones])])

    def _derivatives(self, mean: Any) -> tuple[Any, Any]:
        """Returns the gradient and the Hessian in a mean of vectors."""
        if mean.size == 2:
            return mean[:1], mean[1:, None] / self._weight
        square, mixed, curvature = mean[2:] / jnp.asarray(_OFF_DIAGONAL, jnp.float32)
        return mean[:2], jnp.array([[square, mixed], [mixed, curvature]]) / self._weight


@dataclass(frozen=True)
class Platt(_Newton):
    """Rescaling of a binary model's logits to a l + c, fitted on the training rows.

    Attributes:
      logit: (params, example) -> predicted logit l of the label 1.
      label: example -> 0 or 1.
      rescaled: (params, a, c) -> parameters whose model predicts a l + c.
      largest_logit: Bound R > 0 to which logits are clipped, a public number.
    """

    logit: Callable[[PyTree, PyTree], Any]
    label: Callable[[PyTree], Any]
    rescaled: Callable[[PyTree, Any, Any], PyTree]
    largest_logit: float = 6.0

    _names = "logit_scale", "logit_shift"
    _first = _FIRST_SCALE, 0.0
    _ranges = _SCALES, (-8.0, 8.0)
    _most_step = 0.75, 1.5
    _least_curvature = 1e-3
    _weight = math.sqrt(8 / 5)  # at |(x, 1)|^2 <= 5 the gradient alone has the largest norm

    def __post_init__(self) -> None:
        if not 0 < self.largest_logit < math.inf:
            raise ValueError(f"largest_logit must be finite and > 0, got {self.largest_logit}")

    @property
    def _units(self) -> np.ndarray:
        return np.array([self.largest_logit / 2, 1.0])

    def reads(self, params: PyTree, example: PyTree) -> PyTree:
        """Returns a row's feature x and label y."""
        logit = jnp.asarray(self.logit(params, example), jnp.float32)
        x = jnp.clip(logit, -self.largest_logit, self.largest_logit) / (self.largest_logit / 2)
        return {"x": x, "y": jnp.asarray(self.label(example), jnp.float32)}

    def statistic(self, state: PyTree, row: PyTree) -> Any:
        """Returns the row's vector v."""
        x = row["x"]
        p = jax.nn.sigmoid(jnp.sum(state * jnp.stack([x, jnp.ones_like(x)])))
        return self._vector(x, p - row["y"], self._weight * p * (1 - p))


@dataclass(frozen=True)
class Temperature(_Newton):
    """Rescaling of a multi-class model's logits to a z, fitted on the training rows.

    Attributes:
      logits: (params, example) -> predicted logits z of the classes, [K].
      label: example -> class, 0 ... K - 1; a row with another label counts as zero.
      rescaled: (params, a) -> parameters whose model predicts a z.
      largest_gap: Bound D > 0 on a logit's distance below the largest of its row, to which it is
        clipped; a public number.

    >>> temperature = Temperature(lambda z, x: z, lambda x: x, lambda z, a: a * z)
    >>> temperature.reads(jnp.array([0.0, 12.0]), 1)["x"].tolist()
    [0.0, 1.0]
    """

    logits: Callable[[PyTree, PyTree], Any]
    label: Callable[[PyTree], Any]
    rescaled: Callable[[PyTree, Any], PyTree]
    largest_gap: float = 12.0

    kind = "temperature"
    _names = ("logit_scale",)
    _first = (_FIRST_SCALE,)
    _ranges = (_SCALES,)
    _most_step = (0.75,)
    _least_curvature = 1e-3
    _weight = math.sqrt(8)

    def __post_init__(self) -> None:
        if not 0 < self.largest_gap < math.inf:
            raise ValueError(f"largest_gap must be finite and > 0, got {self.largest_gap}")

    @property
    def _units(self) -> np.ndarray:
        return np.array([self.largest_gap])

    def reads(self, params: PyTree, example: PyTree) -> PyTree:
        """Returns each class's x in [0, 1], and the label's, NaN without a class."""
        logits = jnp.asarray(self.logits(params, example), jnp.float32)
        gaps = jnp.minimum(jnp.max(logits) - logits, self.largest_gap)
        x = 1 - gaps / self.largest_gap
        is_label = jnp.arange(x.size) == self.label(example)
        at_label = jnp.sum(jnp.where(is_label, x, 0.0))
        return {"x": x, "at_label": jnp.where(jnp.any(is_label), at_label, jnp.nan)}

    def statistic(self, state: PyTree, row: PyTree) -> Any:
        """Returns the row's vector v."""
        x = row["x"]
        p = jax.nn.softmax(state[0] * x)
        mean = jnp.sum(p * x)
        curvature = jnp.sum(p * jnp.square(x - mean))
        return jnp.stack([mean - row["at_label"], self._weight * curvature])


@dataclass(frozen=True)
class Affine(_Newton):
    """Affine map a u + c of numeric predictions u, least squares on the training rows.

    Predictions and labels are in units of half the label's public range, from its middle, and
    clipped to [-1, 1].

    Attributes:
      prediction: (params, example) -> prediction u.
      label: example -> label.
      rescaled: (params, a, c) -> parameters whose model predicts a u + c.
      largest_residual: Bound rho in (0, 1] to which residuals are clipped, as in Huber's loss; a
        public number.

    >>> affine = Affine(lambda w, x: w * x, lambda x: x, lambda w, a, c: a * w)
    >>> affine.start().tolist()
    [1.0, 0.0]
    """

    prediction: Callable[[PyTree, PyTree], Any]
    label: Callable[[PyTree], Any]
    rescaled: Callable[[PyTree, Any, Any], PyTree]
    largest_residual: float = 1.0

    kind = "affine"
    _names = "prediction_scale", "prediction_shift"
    _first = 1.0, 0.0
    _ranges = (1 / 4, 4.0), (-1.0, 1.0)
    _most_step = math.inf, math.inf
    _least_curvature = 0.02
    _weight = math.sqrt(3) / 4

    def __post_init__(self) -> None:
        if not 0 < self.largest_residual <= 1:
            raise ValueError(f"largest_residual must lie in (0, 1], got {self.largest_residual}")

    @property
    def _units(self) -> np.ndarray:
        return np.ones(2)

    def reads(self, params: PyTree, example: PyTree) -> PyTree:
        """Returns a row's prediction u and residual."""
        u = jnp.clip(jnp.asarray(self.prediction(params, example), jnp.float32), -1, 1)
        label = jnp.clip(jnp.asarray(self.label(example), jnp.float32), -1, 1)
        bound = self.largest_residual
        return {"u": u, "residual": jnp.clip(u - label, -bound, bound)}

    def statistic(self, state: PyTree, row: PyTree) -> Any:
        """Returns the row's vector v; its residual is at a = 1 and c = 0."""
        return self._vector(row["u"], row["residual"], self._weight)
