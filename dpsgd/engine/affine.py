"""Private affine calibration: predictions u of a number become a u + c, by one noised Newton step.

The statistic, its bound, and the choice of noise: docs/explanation/private-affine-calibration.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from dpsgd.core.queries import FullSums, balanced_sums
from dpsgd.engine.newton import newton_step
from dpsgd.engine.queries import Refinement

PyTree = Any

L2_CLIP_NORM = 1.6584
"""C, just above the square root of 2 + 4 m^2."""

_MOMENTS = math.sqrt(3) / 4  # m
_LEAST_CURVATURE = 0.02
_RANGE = (1 / 4, 4.0), (-1.0, 1.0)


@dataclass(frozen=True)
class Affine(Refinement):
    """Makes predictions u of a number a u + c, by least squares on the training rows.

    Predictions and labels are in units of half the label's public range, from its middle: both
    count as -1 or 1 beyond.

    Attributes:
      prediction: (params, example) -> the prediction u.
      label: example -> the label.
      rescaled: (params, a, c) -> parameters whose model predicts a u + c.
      largest_residual: rho in (0, 1]: a residual beyond it counts as rho, or -rho, as in Huber's
        loss. A public number.
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
        """Returns u and the residual of a row."""
        u = jnp.clip(jnp.asarray(self.prediction(params, example), jnp.float32), -1, 1)
        label = jnp.clip(jnp.asarray(self.label(example), jnp.float32), -1, 1)
        most = self.largest_residual
        return {"u": u, "residual": jnp.clip(u - label, -most, most)}

    def start(self) -> PyTree:
        """Returns a = 1 and c = 0."""
        return jnp.array([1.0, 0.0])

    def statistic(self, state: PyTree, row: PyTree) -> Any:
        """Returns v; residuals are those of a = 1 and c = 0."""
        del state
        u, residual = row["u"], row["residual"]
        one = jnp.ones_like(u)
        moments = _MOMENTS * jnp.stack([u * u, math.sqrt(2) * u, one])
        return jnp.concatenate([residual * jnp.stack([u, one]), moments])

    def fold(self, state: PyTree, mean: Any) -> PyTree:
        """Returns a and c after the Newton step."""
        square, first, weight = mean[2:] / (_MOMENTS * jnp.array([1.0, math.sqrt(2), 1.0]))
        hessian = jnp.array([[square, first], [first, weight]])
        step = newton_step(mean[:2], hessian, _LEAST_CURVATURE)
        step = jnp.where(jnp.all(jnp.isfinite(step)), step, 0.0)
        low, high = (jnp.array(ends) for ends in zip(*_RANGE, strict=True))
        return jnp.clip(state + step, low, high)

    def apply(self, params: PyTree, state: PyTree) -> PyTree:
        """Returns the rescaled parameters."""
        return self.rescaled(params, state[0], state[1])

    def summary(self, state: PyTree) -> Mapping[str, Any]:
        """Returns a and c."""
        return {"prediction_scale": state[0], "prediction_shift": state[1]}


def affine_sums(
    num_examples: int, *, epsilon: float = 1.0, delta: float | None = None
) -> FullSums | None:
    """Returns the sum that affine calibration takes, and its noise; None where it would not pay.

    The choice depends on public numbers alone, and never decides what is guaranteed:
    docs/explanation/private-affine-calibration.md has the trade-off and the measured constants.

    Args:
      num_examples: n.
      epsilon: About what the whole run costs.
      delta: At which; by default `accounting.default_delta`.

    Returns:
      One sum, or None if it costs more than `_MOST_LOSS` of the squared error.
    """
    losses = _NOISE_LOSS, _SIGMA_LOSS, _MOST_LOSS
    return balanced_sums(num_examples, 1, L2_CLIP_NORM, losses, epsilon=epsilon, delta=delta)


_NOISE_LOSS = 140.0
"""A: squared error by the sum's noise, in units of sigma^2 / n^2: C^2 (1 + 1 / least curvature)."""
_SIGMA_LOSS = 0.002
"""B: how the squared error grows with the logarithm of the run's sigma, between epsilon 3 and 1."""
_MOST_LOSS = 3e-4
