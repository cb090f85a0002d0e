"""The algorithm of a run, made once for all runs that differ in numbers alone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from dpsgd import Algorithm, Mechanism, dpsgd
from experiments.tasks.clicks.model import functional
from experiments.tasks.clicks.schema import Schema
from experiments.tasks.clicks.sizes import ModelConfig
from samplers import Deterministic

PyTree = Any

MOST_PROGRAMS = 16
"""Different programs that a process keeps compiled; each takes 20 to 90 MB."""


def click_algorithm(
    sizes: ModelConfig,
    schema: Schema,
    mechanism: Mechanism,
    *,
    microbatch_size: int | None = None,
    optimizer: optax.GradientTransformation | None = None,
) -> tuple[Callable[[PyTree, PyTree], jax.Array], Algorithm]:
    """Returns (logit_fn, algorithm) for a click model; equal arguments share compiled programs.

    Args:
      sizes: Of the model.
      schema: Columns of the data.
      mechanism: Sampler, sigma and C, of which the programs depend on the shapes alone.
      microbatch_size: Examples whose gradients are formed together; None for as many as fit.
      optimizer: By default Adam whose step sizes are state, see `step_sizes`.
    """
    noisy = bool(mechanism.noise_multiplier)
    parts = sizes, schema, microbatch_size, noisy, optimizer or _ADAM
    sampler = mechanism.sampler
    _make_room((*parts, sampler.num_examples, sampler.max_batch_size, sampler.accumulates))
    logit_fn, algorithm = _shared(*parts)
    return logit_fn, algorithm.with_mechanism(mechanism)


_kept: set[Hashable] = set()


def _make_room(program: Hashable) -> None:
    """Forgets all programs before one more than `MOST_PROGRAMS` is compiled.

    All of them, since JAX holds on to what it compiled for every shape that it has seen, down to
    the initialisation of a model's layers: a process of many different runs would grow forever.
    """
    if program not in _kept and len(_kept) >= MOST_PROGRAMS:
        _kept.clear()
        _shared.cache_clear()
        jax.clear_caches()
    _kept.add(program)


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


@functools.cache
def _shared(
    sizes: ModelConfig,
    schema: Schema,
    microbatch_size: int | None,
    noisy: bool,
    optimizer: optax.GradientTransformation,
) -> tuple[Callable[[PyTree, PyTree], jax.Array], Algorithm]:
    """Returns what runs have in common, under a mechanism that is a placeholder."""
    _, logit_fn, loss_fn = functional(sizes, schema, seed=0)
    placeholder = Mechanism(Deterministic(num_examples=1, batch_size=1), float(noisy), 1.0)
    return logit_fn, dpsgd(loss_fn, optimizer, placeholder, microbatch_size=microbatch_size)
