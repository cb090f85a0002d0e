"""Private Platt scaling: a trained model's logits l become a l + c, by noised Newton steps.

Clipping bends the level of a private model's predictions; two numbers mend it. They minimise the
log loss on the training rows, and each Newton step reads one noisy sum over these rows.

**The statistic.** With x = clip(l, -R, R) / S, S = R / 2, p = sigmoid(a S x + c) and a label y in
{0, 1}, a row has the gradient (p - y) (x, 1) in (a S, c) and the Hessian p (1 - p) (x, 1)(x, 1)^T.
They are released in one vector,

  v = ((p - y) x, p - y, k w x^2, k w sqrt(2) x, k w),   w = p (1 - p),

whose squared norm is (p - y)^2 q + k^2 w^2 q^2 with q = x^2 + 1 <= Q = 5. It grows with q. For
y = 0, p and 1 - p change places: it is at most (1 - p)^2 (Q + k^2 Q^2 p^2), which is Q at p = 0. At
k^2 Q = 8 this falls in p: its derivative is 2 (1 - p) (k^2 Q^2 (p - 2 p^2) - Q), and that is
-2 (1 - p) Q (4 p - 1)^2. So the norm is at most sqrt(Q), which the gradient alone needs already:
the Hessian costs nothing beside it, and C = sqrt(Q) clips nobody, so that clipping has no part in
where the steps lead. (The library clips all the same.) The scale S balances the noise of a and c:
with second moment M of the logits, what the noise of the last gradient costs in log loss is
proportional to (1 + R^2 / S^2) (S^2 + M), and is least at S^2 = R sqrt(M), which is R / 2 for
M = R^2 / 16.

**Noise cannot throw it away.** Eigenvalues of the Hessian are at least `_LEAST_CURVATURE`, a step
is at most `_STEP` long in either number (one that overflows is left out), and a and c keep to
`_RANGE`.

Source: J. Platt, Probabilistic Outputs for Support Vector Machines and Comparisons to Regularized
Likelihood Methods (1999); Z. Bu, H. Wang, Z. Dai, Q. Long, On the Convergence and Calibration of
Deep Learning with Differential Privacy (2021), on why clipping miscalibrates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from accounting import GaussianProfile, calibrate, default_delta
from dpsgd.core.queries import FullSums
from dpsgd.engine.queries import Refinement

PyTree = Any

_Q = 5.0  # most of x^2 + 1
_K = math.sqrt(8 / _Q)  # weight of the Hessian

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
        x, y = row["x"], row["y"]
        p = jax.nn.sigmoid(state[0] * x + state[1])
        w = _K * p * (1 - p)
        return jnp.stack([(p - y) * x, p - y, w * x**2, w * math.sqrt(2) * x, w])

    def fold(self, state: PyTree, mean: Any) -> PyTree:
        """Returns a S and c after a Newton step."""
        off = mean[3] / math.sqrt(2)
        hessian = jnp.array([[mean[2], off], [off, mean[4]]]) / _K
        curvatures, axes = jnp.linalg.eigh(hessian)
        step = -axes @ ((axes.T @ mean[:2]) / jnp.maximum(curvatures, _LEAST_CURVATURE))
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

    What is gained grows with miscalibration, and what is lost is little: with n rows and k sums of
    noise sigma, the noise of the last step costs log loss A sigma^2 / n^2; and the run that pays
    for the sums has noise that is larger by a factor of about 1 + k / (2 mu^2 sigma^2), if the
    whole is as private as a Gaussian release of sensitivity mu, which costs log loss
    B k / (2 mu^2 sigma^2). Their sum is least at sigma^2 = n sqrt(B k / (2 A)) / mu, where it is
    sqrt(2 A B k) / (mu n).

    A and B were measured where a quarter of the labels are 1 (of rarer ones A is larger: 400 for a
    twelfth); they decide how good the choice is, and never what is guaranteed. The choice depends
    on public numbers alone. By simulation, at epsilon 1 and 8, the noise of a and c costs 5e-5 and
    1e-5 of log loss at n = 88,000, and the run's sigma grows by 1.0 and 0.2 %; a tenth of that at
    n = 10^6, nothing at 4 10^7, and at n = 10^4 the noise costs 4e-4 and 6e-5, sigma 9 and 1.4 %.
    Miscalibrated logits, a = 0.75 and c = 0.1, cost 0.018.

    Args:
      num_examples: n.
      epsilon: About what the whole run costs.
      delta: At which; by default `accounting.default_delta`.

    Returns:
      The sums, or None if they cost more than `_MOST_LOSS` of log loss.
    """
    delta = default_delta(num_examples) if delta is None else delta
    mu = 1 / calibrate(GaussianProfile, epsilon=epsilon, delta=delta)
    if math.sqrt(2 * _NOISE_LOSS * _SIGMA_LOSS * _STEPS) / (mu * num_examples) > _MOST_LOSS:
        return None
    square = num_examples * math.sqrt(_SIGMA_LOSS * _STEPS / (2 * _NOISE_LOSS)) / mu
    sigma = float(f"{math.sqrt(square):.2g}")  # equal for about equal runs
    return FullSums(_STEPS, sigma, L2_CLIP_NORM)


_STEPS = 4
"""k: so many Newton steps end within 1e-3, from a in [0.3, 1.5] and c in [-1, 1]."""
_NOISE_LOSS = 120.0
"""A: log loss of the last gradient's noise, in units of sigma^2 / n^2; 100 to 150."""
_SIGMA_LOSS = 0.004
"""B: how log loss grows with the logarithm of the run's sigma, between epsilon 8 and 1."""
_MOST_LOSS = 1e-3
