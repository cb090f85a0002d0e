"""An optimizer of the tests' own that writes down what it is given: releases at one place."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

PyTree = Any


class Recording(NamedTuple):
    """State of the optimizer that `recorder` returns."""

    count: Any  # int32 scalar: updates seen
    releases: PyTree  # like the parameters, float32, with a leading axis of slots


@functools.cache
def recorder(slots: int = 1) -> optax.GradientTransformation:
    """Returns an optimizer that keeps the parameters and writes down the private mean gradients.

    Args:
      slots: How many of the last gradients are kept; gradient k goes to slot k mod `slots`.

    The same object for the same slots, by which compiled programs can be shared.
    """

    def init(params: PyTree) -> Recording:
        zeros = jax.tree.map(lambda p: jnp.zeros((slots, *jnp.shape(p)), jnp.float32), params)
        return Recording(jnp.zeros((), jnp.int32), zeros)

    def update(gradient, state, params=None):
        releases = jax.tree.map(
            lambda kept, g: kept.at[state.count % slots].set(g.astype(jnp.float32)),
            state.releases,
            gradient,
        )
        return jax.tree.map(jnp.zeros_like, gradient), Recording(state.count + 1, releases)

    return optax.GradientTransformation(init, update)
