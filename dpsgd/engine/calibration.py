"""Calibrations after training: Platt, temperature and affine scaling of predictions.

Each rescales predictions by one or two numbers, fitted by noised Newton steps to sums over all
rows. Statistics, their bounds, and the choice of noise: docs/explanation/private-calibration.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from accounting import GaussianProfile, calibrate, default_delta
from dpsgd.core.queries import FullSums
from dpsgd.engine.newton import derivatives, hessian_weight, logistic_sums, newton_step
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
_LEAST_CURVATURE = 1e-3
_SCALES = 1 / 8, 4.0
_PLATT_SQUARE = 5.0  # most of x^2 + 1
_PLATT_STEP = 0.75, 1.5
_PLATT_RANGE = _SCALES, (-8.0, 8.0)
_TEMPERATURE_STEP = 0.75
_TEMPERATURE_WEIGHT = hessian_weight(1.0)  # k
_AFFINE_MOMENTS = math.sqrt(3) / 4  # m
_AFFINE_LEAST_CURVATURE = 0.02
_AFFINE_RANGE = (1 / 4, 4.0), (-1.0, 1.0)


def calibration_sums(
    kind: str, num_examples: int, *, epsilon: float = 1.0, delta: float | None = None
) -> FullSums | None:
    """Returns a calibration's sums and noise, or None if they would not pay.

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


@dataclass(frozen=True)
class Platt(Refinement):
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

    def __post_init__(self) -> None:
        if not 0 < self.largest_logit < math.inf:
            raise ValueError(f"largest_logit must be finite and > 0, got {self.largest_logit}")

    def reads(self, params: PyTree, example: PyTree) -> PyTree:
        """Returns a row's feature x and label y."""
        logit = jnp.asarray(self.logit(params, example), jnp.float32)
        x = jnp.clip(logit, -self.largest_logit, self.largest_logit) / self._scale
        return {"x": x, "y": jnp.asarray(self.label(example), jnp.float32)}

    def start(self) -> PyTree:
        """Returns the initial a S and c."""
        return jnp.array([_FIRST_SCALE * self._scale, 0.0])

    def statistic(self, state: PyTree, row: PyTree) -> Any:
        """Returns the row's vector v."""
        x = row["x"]
        return logistic_sums(state, jnp.stack([x, jnp.ones_like(x)]), row["y"], _PLATT_SQUARE)

    def fold(self, state: PyTree, mean: Any) -> PyTree:
        """Returns a S and c after a Newton step."""
        step = newton_step(*derivatives(mean, 2, _PLATT_SQUARE), _LEAST_CURVATURE)
        units = jnp.array([self._scale, 1.0])
        step = step / jnp.maximum(1.0, jnp.max(jnp.abs(step) / (units * jnp.array(_PLATT_STEP))))
        step = jnp.where(jnp.all(jnp.isfinite(step)), step, 0.0)
        low, high = (units * jnp.array(bounds) for bounds in zip(*_PLATT_RANGE, strict=True))
        return jnp.clip(state + step, low, high)

    def apply(self, params: PyTree, state: PyTree) -> PyTree:
        """Returns the rescaled parameters."""
        return self.rescaled(params, state[0] / self._scale, state[1])

    def summary(self, state: PyTree) -> Mapping[str, Any]:
        """Returns a and c."""
        return {"logit_scale": state[0] / self._scale, "logit_shift": state[1]}

    @property
    def _scale(self) -> float:
        return self.largest_logit / 2


@dataclass(frozen=True)
class Temperature(Refinement):
    """Rescaling of a multi-class model's logits to a z, fitted on the training rows.

    Attributes:
      logits: (params, example) -> predicted logits z of the classes, [K].
      label: example -> class, 0 ... K - 1; a row with another label counts as zero.
      rescaled: (params, a) -> parameters whose model predicts a z.
      largest_gap: Bound D > 0 on a logit's distance below the largest of its row, to which it is
        clipped; a public number.
    """

    logits: Callable[[PyTree, PyTree], Any]
    label: Callable[[PyTree], Any]
    rescaled: Callable[[PyTree, Any], PyTree]
    largest_gap: float = 12.0

    kind = "temperature"

    def __post_init__(self) -> None:
        if not 0 < self.largest_gap < math.inf:
            raise ValueError(f"largest_gap must be finite and > 0, got {self.largest_gap}")

    def reads(self, params: PyTree, example: PyTree) -> PyTree:
        """Returns each class's x in [0, 1], and the label's x, NaN without a class."""
        logits = jnp.asarray(self.logits(params, example), jnp.float32)
        gaps = jnp.minimum(jnp.max(logits) - logits, self.largest_gap)
        x = 1 - gaps / self.largest_gap
        is_label = jnp.arange(x.size) == self.label(example)
        at_label = jnp.sum(jnp.where(is_label, x, 0.0))
        return {"x": x, "at_label": jnp.where(jnp.any(is_label), at_label, jnp.nan)}

    def start(self) -> PyTree:
        """Returns the initial a D."""
        return jnp.array(_FIRST_SCALE * self.largest_gap)

    def statistic(self, state: PyTree, row: PyTree) -> Any:
        """Returns the row's vector v."""
        x = row["x"]
        p = jax.nn.softmax(state * x)
        mean = jnp.sum(p * x)
        curvature = jnp.sum(p * jnp.square(x - mean))
        return jnp.stack([mean - row["at_label"], _TEMPERATURE_WEIGHT * curvature])

    def fold(self, state: PyTree, mean: Any) -> PyTree:
        """Returns a D after a Newton step."""
        step = -mean[0] / jnp.maximum(mean[1] / _TEMPERATURE_WEIGHT, _LEAST_CURVATURE)
        step = jnp.clip(
            step, -_TEMPERATURE_STEP * self.largest_gap, _TEMPERATURE_STEP * self.largest_gap
        )
        low, high = (bound * self.largest_gap for bound in _SCALES)
        return jnp.clip(state + jnp.where(jnp.isfinite(mean).all(), step, 0.0), low, high)

    def apply(self, params: PyTree, state: PyTree) -> PyTree:
        """Returns the rescaled parameters."""
        return self.rescaled(params, state / self.largest_gap)

    def summary(self, state: PyTree) -> Mapping[str, Any]:
        """Returns a."""
        return {"logit_scale": state / self.largest_gap}


@dataclass(frozen=True)
class Affine(Refinement):
    """Affine map a u + c of numeric predictions u, least squares on the training rows.

    Predictions and labels are in units of half the label's public range, from its middle, and
    clipped to [-1, 1].

    Attributes:
      prediction: (params, example) -> prediction u.
      label: example -> label.
      rescaled: (params, a, c) -> parameters whose model predicts a u + c.
      largest_residual: Bound rho in (0, 1] to which residuals are clipped, as in Huber's loss; a
        public number.
    """

    prediction: Callable[[PyTree, PyTree], Any]
    label: Callable[[PyTree], Any]
    rescaled: Callable[[PyTree, Any, Any], PyTree]
    largest_residual: float = 1.0

    kind = "affine"

    def __post_init__(self) -> None:
        if not 0 < self.largest_residual <= 1:
            raise ValueError(f"largest_residual must lie in (0, 1], got {self.largest_residual}")

    def reads(self, params: PyTree, example: PyTree) -> PyTree:
        """Returns a row's prediction u and residual."""
        u = jnp.clip(jnp.asarray(self.prediction(params, example), jnp.float32), -1, 1)
        label = jnp.clip(jnp.asarray(self.label(example), jnp.float32), -1, 1)
        bound = self.largest_residual
        return {"u": u, "residual": jnp.clip(u - label, -bound, bound)}

    def start(self) -> PyTree:
        """Returns a = 1 and c = 0."""
        return jnp.array([1.0, 0.0])

    def statistic(self, state: PyTree, row: PyTree) -> Any:
        """Returns the row's vector v, with the residual at a = 1 and c = 0."""
        del state
        u, residual = row["u"], row["residual"]
        ones = jnp.ones_like(u)
        moments = _AFFINE_MOMENTS * jnp.stack([u * u, math.sqrt(2) * u, ones])
        return jnp.concatenate([residual * jnp.stack([u, ones]), moments])

    def fold(self, state: PyTree, mean: Any) -> PyTree:
        """Returns a and c after the Newton step."""
        square, first, weight = mean[2:] / (_AFFINE_MOMENTS * jnp.array([1.0, math.sqrt(2), 1.0]))
        hessian = jnp.array([[square, first], [first, weight]])
        step = newton_step(mean[:2], hessian, _AFFINE_LEAST_CURVATURE)
        step = jnp.where(jnp.all(jnp.isfinite(step)), step, 0.0)
        low, high = (jnp.array(bounds) for bounds in zip(*_AFFINE_RANGE, strict=True))
        return jnp.clip(state + step, low, high)

    def apply(self, params: PyTree, state: PyTree) -> PyTree:
        """Returns the rescaled parameters."""
        return self.rescaled(params, state[0], state[1])

    def summary(self, state: PyTree) -> Mapping[str, Any]:
        """Returns a and c."""
        return {"prediction_scale": state[0], "prediction_shift": state[1]}
