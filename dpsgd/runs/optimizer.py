"""The optimizers of runs: one object each, so that runs that differ in numbers share programs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax


def hyperparameters(
    learning_rate: float, num_steps: int, momentum: float | None = None
) -> dict[str, jax.Array]:
    """Returns the hyperparameters of the state of `ADAM`, or of `SGD` where there is a momentum.

    Args:
      learning_rate: Peak step size.
      num_steps: After which it has fallen to zero.
      momentum: beta of SGD, in [0, 1).
    """
    found = {"learning_rate": jnp.float32(learning_rate), "num_steps": jnp.float32(num_steps)}
    return found if momentum is None else {**found, "momentum": jnp.float32(momentum)}


def with_hyperparameters(opt_state: Any, hyperparams: dict[str, jax.Array]) -> Any:
    """Returns a state of `ADAM` or `SGD` with these."""
    return opt_state._replace(hyperparams=hyperparams)


def _cosine(learning_rate: Any, num_steps: Any) -> optax.Schedule:
    """Returns step sizes that shrink from `learning_rate` to zero by a cosine."""

    def schedule(step):
        return learning_rate * 0.5 * (1 + jnp.cos(jnp.pi * jnp.minimum(step / num_steps, 1.0)))

    return schedule


@dataclass(frozen=True)
class Cosine:
    """The same step sizes as numbers of the host: of lazy tables, equal for equal runs.

    >>> [round(Cosine(3.0, 4)(step), 4) for step in range(5)]
    [3.0, 2.5607, 1.5, 0.4393, 0.0]
    """

    learning_rate: float
    num_steps: int

    def __call__(self, step: Any) -> float:
        done = min(step / self.num_steps, 1.0)
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * done))


def _cosine_adam(learning_rate: Any, num_steps: Any) -> optax.GradientTransformation:
    return optax.adam(_cosine(learning_rate, num_steps))


def _cosine_sgd(learning_rate: Any, num_steps: Any, momentum: Any) -> optax.GradientTransformation:
    return optax.sgd(_cosine(learning_rate, num_steps), momentum)


ADAM = optax.inject_hyperparams(_cosine_adam)(learning_rate=0.0, num_steps=1.0)
"""Adam whose step sizes are state, see `hyperparameters`."""

SGD = optax.inject_hyperparams(_cosine_sgd)(learning_rate=0.0, num_steps=1.0, momentum=0.0)
"""SGD whose step sizes and momentum are state: v = momentum v + g, and a step by -v."""
