"""Inputs of a step's parts, and the one place that adds noise."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from dpsgd.core.gaussian import add_row_noise
from dpsgd.core.philox import StepKey
from dpsgd.core.state import Scales

PyTree = Any


class Context(NamedTuple):
    """Inputs of lazy tables in a step, beside the training state."""

    noise_key: Any
    scales: Scales
    laws: Any
    """Laws of the step, or of a flush."""
    shapes: PyTree
    """Global shapes of all parameters, sharded ones included."""
    placement: Any
    """Devices that compute, a `dpsgd.engine.placement.Placement`."""
    return_gradient: Any = False
    """True to return the private mean gradient in place of updated rows, for an audit."""


class View(NamedTuple):
    """Inputs of a step's derivative: parameters, and examples that read them."""

    params: PyTree
    batch: PyTree
    """Examples, [B, ...] each leaf."""
    weights: jax.Array
    """[B]; 0 for padding."""
    keys: tuple[Any, ...]
    """Keys [B] of the examples, if the loss takes one."""


def privatize(
    clipped_sum: PyTree,
    noise_state: PyTree,
    noise_key: Any,
    step: Any,
    scales: Scales,
    rows: tuple[int, jax.Array] | None = None,
) -> tuple[PyTree, PyTree]:
    """Returns the private mean gradient and the next noise state.

    The mean is (sum + sigma C n) / b: sum, then noise, then division, in this one place. The
    divisor b is the sampler's *expected* batch size, a public constant: the realised size depends
    on the participants, and dividing by it would release it without noise.

    Args:
      clipped_sum: Sum over the batch of gradients of L2 norm at most C, float32. With `rows`, the
        sum of these rows of a table, float32 [U, ...].
      noise_state: State of the noise n after the previous step.
      noise_key: Key of the run's noise stream; key, step and leaf name the fresh part of n.
      step: int scalar, number of the update.
      scales: Scales C, sigma C and b, and the law of n, if any.
      rows: (index of the leaf that is a table, indices of its rows, int32 [U]). Their noise is
        independent, and not shared with a dense leaf.
    """
    divisor = scales.expected_batch_size
    if scales.noise is None:
        return jax.tree.map(lambda s: s / divisor, clipped_sum), noise_state
    if rows is not None:
        noised = add_row_noise(clipped_sum, *rows, StepKey(noise_key, step), scales)
        return noised, noise_state
    return scales.noise.add(clipped_sum, noise_state, noise_key, step, scales)
