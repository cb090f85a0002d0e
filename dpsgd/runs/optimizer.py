"""The algorithm of a run. There is one optimizer of a kind, so that runs share programs."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from dpsgd.core.algorithm import Algorithm
from dpsgd.engine.algorithm import dpsgd
from dpsgd.engine.averages import averaged
from dpsgd.engine.lazy.group import LazyTables
from dpsgd.gradients.frozen import RunLoss
from dpsgd.runs.spec import SGD, Lazy, RunSpec


def algorithm_of(loss_fn: Callable[..., Any], spec: RunSpec, num_steps: int) -> Algorithm:
    """Returns what a run of a loss computes in `num_steps` steps; step sizes are of its state."""
    average = next(iter(vars(spec.average)), None)
    return dpsgd(
        RunLoss.restrict(loss_fn, spec.train, spec.compute),
        optimizer(_kind(spec), spec.optimizer.step_sizes, average),
        clipping=spec.clipping,
        microbatch_size=spec.microbatch_size,
        tables=lazy_tables(spec, num_steps),
    )


def step_sizes(spec: RunSpec, num_steps: int) -> dict[str, Any]:
    """Returns the arguments of `hyperparameters` for a run."""
    momentum = getattr(spec.optimizer, "momentum", None)
    rate = spec.optimizer.learning_rate
    how = {"learning_rate": rate, "num_steps": num_steps, "momentum": momentum}
    return how | vars(spec.average)


def _kind(spec: RunSpec) -> Literal["adam", "sgd"]:
    return "sgd" if isinstance(spec.optimizer, SGD) else "adam"


def hyperparameters(
    learning_rate: float, num_steps: int, momentum: float | None = None, **average: float
) -> dict[str, jax.Array]:
    """Returns the hyperparameters of the state of an optimizer that `optimizer` returns.

    Args:
      learning_rate: Peak step size.
      num_steps: After which it has fallen to zero.
      momentum: beta of SGD, in [0, 1); None for Adam.
      **average: `tail` or `decay` of `dpsgd.averaged`, if parameters are averaged.
    """
    given = {"learning_rate": learning_rate, "num_steps": num_steps, "momentum": momentum}
    return {k: jnp.float32(x) for k, x in (given | average).items() if x is not None}


def with_hyperparameters(opt_state: Any, hyperparams: dict[str, jax.Array]) -> Any:
    """Returns a state of an optimizer that `optimizer` returns with these."""
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


@dataclass(frozen=True)
class Constant:
    """One step size in all steps, as a number of the host."""

    learning_rate: float

    def __call__(self, step: Any) -> float:
        return self.learning_rate


def lazy_tables(spec: RunSpec, num_steps: int) -> LazyTables | None:
    """Returns how tables with deferred noise are trained; None where there are none."""
    if not isinstance(tables := spec.tables, Lazy):
        return None
    rate: Any = tables.learning_rate
    momentum: Any = tables.momentum
    assert None not in (rate, momentum), "`resolve` leaves nothing open"
    constant = spec.optimizer.schedule == "constant"
    sizes = Constant(rate) if constant else Cosine(rate, num_steps)
    return LazyTables(sizes, momentum)


def _made(
    learning_rate: Any, num_steps: Any, momentum: Any, tail: Any, decay: Any, constant: bool
) -> optax.GradientTransformation:
    sizes = learning_rate if constant else _cosine(learning_rate, num_steps)
    made = optax.adam(sizes) if momentum is None else optax.sgd(sizes, momentum)
    if tail is None and decay is None:
        return made
    return averaged(made, num_steps, tail=tail, decay=decay)


@functools.cache
def optimizer(
    kind: Literal["adam", "sgd"] = "adam",
    schedule: Literal["cosine", "constant"] = "cosine",
    average: Literal["tail", "decay"] | None = None,
) -> optax.GradientTransformation:
    """Returns the one optimizer of its kind, whose numbers are state: see `hyperparameters`.

    Args:
      kind: Adam, or SGD with momentum: v = momentum v + g, and a step by -v times its size.
      schedule: How step sizes fall.
      average: Of the parameters, see `dpsgd.averaged`; None for those after the last step.
    """
    momentum = 0.0 if kind == "sgd" else None
    share = {name: 0.5 if name == average else None for name in ("tail", "decay")}
    made = optax.inject_hyperparams(_made, static_args=("constant",))
    return made(0.0, 1.0, momentum, **share, constant=schedule == "constant")


ADAM = optimizer()
