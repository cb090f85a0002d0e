"""The optimizer of runs: one object for all, so that runs that differ in numbers share programs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax


def step_sizes(learning_rate: float, num_steps: int) -> dict[str, jax.Array]:
    """Returns the hyperparameters of the state of `ADAM`.

    Args:
      learning_rate: Peak step size.
      num_steps: After which it has fallen to zero.
    """
    return {"learning_rate": jnp.float32(learning_rate), "num_steps": jnp.float32(num_steps)}


def _cosine_adam(learning_rate: Any, num_steps: Any) -> optax.GradientTransformation:
    """Returns Adam whose steps shrink from `learning_rate` to zero by a cosine."""

    def schedule(step):
        return learning_rate * 0.5 * (1 + jnp.cos(jnp.pi * jnp.minimum(step / num_steps, 1.0)))

    return optax.adam(schedule)


ADAM = optax.inject_hyperparams(_cosine_adam)(learning_rate=0.0, num_steps=1.0)
"""Adam whose step sizes are state, see `step_sizes`."""
