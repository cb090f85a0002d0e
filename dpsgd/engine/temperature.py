"""Private temperature scaling: logits z of several classes become a z, by noised Newton steps.

The statistic, its bound, and the choice of noise: docs/explanation/private-platt-scaling.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dpsgd.core.queries import FullSums, balanced_sums
from dpsgd.engine.newton import hessian_weight
from dpsgd.engine.queries import Refinement

PyTree = Any

_WEIGHT = hessian_weight(1.0)  # k

L2_CLIP_NORM = 1.0001
"""C, just above 1."""

_FIRST = 0.7
_LEAST_CURVATURE = 1e-3
_STEP = 0.75
_RANGE = 1 / 8, 4.0


@dataclass(frozen=True)
class Temperature(Refinement):
    """Scales logits of a model of several classes to a z, fitted on the training rows.

    Attributes:
      logits: (params, example) -> the logits z of the classes, as the model predicts them: [K].
      label: example -> the class, 0 ... K - 1; a row with another label counts for nothing.
      rescaled: (params, a) -> parameters whose model predicts a z.
      largest_gap: D > 0: a logit farther below the largest of its row counts as D below it. A
        public number.
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
        """Returns x of each class, in [0, 1], and x of the label, which is NaN for no class."""
        logits = jnp.asarray(self.logits(params, example), jnp.float32)
        gaps = jnp.minimum(jnp.max(logits) - logits, self.largest_gap)
        x = 1 - gaps / self.largest_gap
        is_label = jnp.arange(x.size) == self.label(example)
        at_label = jnp.sum(jnp.where(is_label, x, 0.0))
        return {"x": x, "at_label": jnp.where(jnp.any(is_label), at_label, jnp.nan)}

    def start(self) -> PyTree:
        """Returns the first a D."""
        return jnp.array(_FIRST * self.largest_gap)

    def statistic(self, state: PyTree, row: PyTree) -> Any:
        """Returns v."""
        x = row["x"]
        p = jax.nn.softmax(state * x)
        mean = jnp.sum(p * x)
        curvature = jnp.sum(p * jnp.square(x - mean))
        return jnp.stack([mean - row["at_label"], _WEIGHT * curvature])

    def fold(self, state: PyTree, mean: Any) -> PyTree:
        """Returns a D after a Newton step."""
        step = -mean[0] / jnp.maximum(mean[1] / _WEIGHT, _LEAST_CURVATURE)
        step = jnp.clip(step, -_STEP * self.largest_gap, _STEP * self.largest_gap)
        low, high = (end * self.largest_gap for end in _RANGE)
        return jnp.clip(state + jnp.where(jnp.isfinite(mean).all(), step, 0.0), low, high)

    def apply(self, params: PyTree, state: PyTree) -> PyTree:
        """Returns the rescaled parameters."""
        return self.rescaled(params, state / self.largest_gap)

    def summary(self, state: PyTree) -> Mapping[str, Any]:
        """Returns a."""
        return {"logit_scale": state / self.largest_gap}


def temperature_sums(
    num_examples: int, *, epsilon: float = 1.0, delta: float | None = None
) -> FullSums | None:
    """Returns how many sums temperature scaling takes, at which noise; None where it would not pay.

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
"""k: so many Newton steps end within 4e-4 of the least log loss, from a in [0.4, 1.6]."""
_NOISE_LOSS = 75.0
"""A: log loss of the last gradient's noise, in units of sigma^2 / n^2."""
_SIGMA_LOSS = 0.02
"""B: how log loss grows with the logarithm of the run's sigma, between epsilon 3 and 1."""
_MOST_LOSS = 3e-3
"""A fifth of what it gains on Adult's marital status."""
