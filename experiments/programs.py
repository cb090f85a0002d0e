"""The algorithm of a run, made once for all runs that differ in numbers alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from dpsgd import Algorithm, dpsgd
from dpsgd.training.programs import MOST_PROGRAMS
from experiments.tasks.clicks.model import functional
from experiments.tasks.clicks.schema import Schema
from experiments.tasks.clicks.sizes import ModelConfig

PyTree = Any


def step_sizes(learning_rate: float, num_steps: int) -> dict[str, jax.Array]:
    """Returns the hyperparameters of the default optimizer's state.

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


_ADAM = optax.inject_hyperparams(_cosine_adam)(learning_rate=0.0, num_steps=1.0)


@functools.lru_cache(maxsize=MOST_PROGRAMS)
def click_algorithm(
    sizes: ModelConfig,
    schema: Schema,
    *,
    microbatch_size: int | None = None,
    optimizer: optax.GradientTransformation = _ADAM,
) -> tuple[Callable[[PyTree, PyTree], jax.Array], Algorithm]:
    """Returns (logit_fn, algorithm) for a click model; equal arguments share compiled programs.

    Args:
      sizes: Of the model.
      schema: Columns of the data.
      microbatch_size: Examples whose gradients are formed together; None for as many as fit.
      optimizer: By default Adam whose step sizes are state, see `step_sizes`.
    """
    _, logit_fn, loss_fn = functional(sizes, schema, seed=0)
    return logit_fn, dpsgd(loss_fn, optimizer, microbatch_size=microbatch_size)
