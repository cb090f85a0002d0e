"""Private Platt scaling: a trained model's logits l become a l + c, by noised Newton steps.

The statistic, its bound, and the choice of noise: docs/explanation/private-platt-scaling.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from dpsgd.core.queries import FullSums, balanced_sums
from dpsgd.engine.newton import derivatives, logistic_sums, newton_step
from dpsgd.engine.queries import Refinement

PyTree = Any

_Q = 5.0  # most of x^2 + 1

L2_CLIP_NORM = 2.2361
"""C, just above the square root of 5."""

_FIRST = 0.7, 0.0
"""a and c before the first step: clipping makes private logits too steep more often than not."""
_LEAST_CURVATURE = 1e-3
_STEP = 0.75, 1.5
_RANGE = (1 / 8, 4.0), (-8.0, 8.0)


@dataclass(frozen=True)
class Platt(Refinement):
    """Scales logits of a binary model to a l + c, fitted on the training rows.

    Attributes:
      logit: (params, example) -> the logit l of the label 1, as the model predicts it.
      label: example -> 0 or 1.
      rescaled: (params, a, c) -> parameters whose model predicts a l + c.
      largest_logit: R > 0: beyond it a logit counts as R, or -R. A public number.
    """

    logit: Callable[[PyTree, PyTree], Any]
    label: Callable[[PyTree], Any]
    rescaled: Callable[[PyTree, Any, Any], PyTree]
    largest_logit: float = 6.0

    def __post_init__(self) -> None:
        if not 0 < self.largest_logit < math.inf:
            raise ValueError(f"largest_logit must be finite and > 0, got {self.largest_logit}")

    def reads(self, params: PyTree, example: PyTree) -> PyTree:
        """Returns x and y of a row."""
        logit = jnp.asarray(self.logit(params, example), jnp.float32)
        x = jnp.clip(logit, -self.largest_logit, self.largest_logit) / self._scale
        return {"x": x, "y": jnp.asarray(self.label(example), jnp.float32)}

    def start(self) -> PyTree:
        """Returns the first a S and c."""
        return jnp.array([_FIRST[0] * self._scale, _FIRST[1]])

    def statistic(self, state: PyTree, row: PyTree) -> Any:
        """Returns v."""
        x = row["x"]
        return logistic_sums(state, jnp.stack([x, jnp.ones_like(x)]), row["y"], _Q)

    def fold(self, state: PyTree, mean: Any) -> PyTree:
        """Returns a S and c after a Newton step."""
        step = newton_step(*derivatives(mean, 2, _Q), _LEAST_CURVATURE)
        units = jnp.array([self._scale, 1.0])
        step = step / jnp.maximum(1.0, jnp.max(jnp.abs(step) / (units * jnp.array(_STEP))))
        step = jnp.where(jnp.all(jnp.isfinite(step)), step, 0.0)
        low, high = (units * jnp.array(ends) for ends in zip(*_RANGE, strict=True))
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


def platt_sums(
    num_examples: int, *, epsilon: float = 1.0, delta: float | None = None
) -> FullSums | None:
    """Returns how many sums Platt scaling takes, at which noise; None where it would not pay.

    The choice depends on public numbers alone, and never decides what is guaranteed:
    docs/explanation/private-platt-scaling.md has the trade-off and the measured constants.

    Args:
      num_examples: n.
      epsilon: About what the whole run costs.
      delta: At which; by default `accounting.default_delta`.

    Returns:
      The sums, or None if they cost more than `_MOST_LOSS` of log loss.
    """
    losses = _NOISE_LOSS, _SIGMA_LOSS, _MOST_LOSS
    return balanced_sums(num_examples, _STEPS, L2_CLIP_NORM, losses, epsilon=epsilon, delta=delta)


_STEPS = 4
"""k: so many Newton steps end within 1e-3, from a in [0.3, 1.5] and c in [-1, 1]."""
_NOISE_LOSS = 120.0
"""A: log loss of the last gradient's noise, in units of sigma^2 / n^2; 100 to 150."""
_SIGMA_LOSS = 0.004
"""B: how log loss grows with the logarithm of the run's sigma, between epsilon 8 and 1."""
_MOST_LOSS = 1e-3
