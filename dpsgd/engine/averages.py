"""Averages of the parameters over the steps, as part of an optimizer."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

PyTree = Any


class AverageState(NamedTuple):
    """State of `averaged`: its optimizer's state, and the average so far."""

    inner: optax.OptState
    average: PyTree
    """float32 leaves of the parameters' shapes."""
    step: Any
    """int32 scalar, number of updates done."""


def averaged(
    optimizer: optax.GradientTransformation,
    num_steps: Any,
    *,
    tail: Any = None,
    decay: Any = None,
) -> optax.GradientTransformation:
    """Returns an optimizer whose last step averages the parameters.

    With theta_t the parameters that `optimizer` makes in step t, the average is a_t = a_{t-1} + w_t
    (theta_t - a_{t-1}). Step N = `num_steps` leads to a_N, all others to theta_t; a run that ends
    before ends with theta_t. An average is a function of releases, and costs no privacy.

    >>> params, optimizer = jnp.zeros(()), averaged(optax.sgd(1.0), 4, tail=0.5)
    >>> state = optimizer.init(params)
    >>> for gradient in (-1.0, -1.0, -1.0, -2.0):
    ...     updates, state = optimizer.update(jnp.float32(gradient), state, params)
    ...     params = optax.apply_updates(params, updates)
    >>> float(params)  # the mean of 3 and 5
    4.0

    Args:
      optimizer: Optimizer of the steps.
      num_steps: Number N of steps of the sampler.
      tail: Fraction s in (0, 1]: the mean of the last s N parameters, w_t = 1 / (t - (1 - s) N),
        with (1 - s) N rounded.
      decay: Factor beta in [0, 0.999999], in place of `tail`: the exponential moving average,
        corrected for its start, w_t = (1 - beta) / (1 - beta^t).

    Raises:
      ValueError: Unless exactly one of `tail` and `decay` is given, in its range.

    Source: B. Polyak, A. Juditsky, Acceleration of Stochastic Approximation by Averaging (1992), on
    tails; D. Kingma, J. Ba, Adam (2015), section 7.2, on the moving average.
    """
    _check(tail, decay)

    def init(params: PyTree) -> AverageState:
        """Returns the optimizer's first state, with an average of zeros."""
        start = jax.tree.map(lambda p: jnp.zeros(jnp.shape(p), jnp.float32), params)
        return AverageState(optimizer.init(params), start, jnp.zeros((), jnp.int32))

    def update(gradient: PyTree, state: AverageState, params: PyTree) -> Any:
        """Returns updates, in the last step to the average, and state."""
        updates, inner = optimizer.update(gradient, state.inner, params)
        step = state.step + 1
        weight = _weight(step, num_steps, tail, decay)
        next_params = optax.apply_updates(params, updates)
        average = jax.tree.map(lambda a, p: a + weight * (p - a), state.average, next_params)
        updates = jax.tree.map(
            lambda u, a, p: jnp.where(step >= num_steps, (a - p).astype(u.dtype), u),
            updates,
            average,
            params,
        )
        return updates, AverageState(inner, average, step)

    return optax.GradientTransformation(init, update)


def _check(tail: Any, decay: Any) -> None:
    if (tail is None) == (decay is None):
        raise ValueError("give one of tail and decay")
    if isinstance(tail, int | float) and not 0 < tail <= 1:
        raise ValueError(f"tail must be in (0, 1], got {tail}")
    if isinstance(decay, int | float) and not 0 <= decay <= 0.999999:
        raise ValueError(f"decay must be in [0, 0.999999], got {decay}")


def _weight(step: Any, num_steps: Any, tail: Any, decay: Any) -> Any:
    if tail is None:  # one decay in both, or digits of 1 - decay differ
        decay = jnp.asarray(decay, jnp.float32)
        return jnp.minimum((1 - decay) / (1 - jnp.power(decay, step)), 1)
    skipped = jnp.round((1 - jnp.asarray(tail, jnp.float32)) * num_steps)
    return 1 / jnp.maximum(step - skipped, 1)
