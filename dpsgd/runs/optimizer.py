"""Algorithm and optimizer of a run; equal kinds of optimizer share compiled programs."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from dpsgd.core.state import TrainState
from dpsgd.engine.algorithm import Algorithm, dpsgd
from dpsgd.engine.averages import averaged
from dpsgd.engine.lazy.group import LazyTables
from dpsgd.gradients.frozen import RunLoss
from dpsgd.runs.spec import Lazy, Optimizer, RunSpec


def algorithm_of(loss_fn: Callable[..., Any], spec: RunSpec, num_steps: int) -> Algorithm:
    """Returns the algorithm of a run.

    Step sizes are hyperparameters in the optimizer's state.

    Args:
      loss_fn: Loss of one example.
      spec: Resolved settings.
      num_steps: Number of steps of the sampler.
    """
    average, settings = next(iter(vars(spec.average)), None), spec.optimizer
    zeros: dict[str, Any] = dict.fromkeys(settings.numbers, 0.0)  # the state has the values
    kind = replace(settings, learning_rate=None, **zeros)
    return dpsgd(
        RunLoss.restrict(loss_fn, spec.train, spec.compute),
        optimizer(kind, average),
        clipping=spec.clipping,
        microbatch_size=spec.microbatch_size,
        tables=lazy_tables(spec, num_steps),
    )


def hyperparameters(spec: RunSpec, num_steps: int) -> dict[str, float]:
    """Returns the numbers in the state of a run's `optimizer`, by name.

    >>> from dpsgd.runs.spec import SGD, NonPrivate, TailAverage
    >>> from samplers.settings import SETTINGS
    >>> averaged = TailAverage(0.5)
    >>> spec = RunSpec(SETTINGS["poisson"](), NonPrivate(), optimizer=SGD(0.1), average=averaged)
    >>> hyperparameters(spec, 200)
    {'learning_rate': 0.1, 'momentum': 0.0, 'num_steps': 200, 'tail': 0.5}

    Args:
      spec: Resolved settings.
      num_steps: Number of steps of the sampler, after which a cosine schedule is zero.
    """
    chosen: Any = spec.optimizer
    settings = {"learning_rate": chosen.learning_rate, **chosen.numbers}
    return {**settings, "num_steps": num_steps, **vars(spec.average)}


def with_hyperparameters(state: TrainState, hyperparams: Mapping[str, float]) -> TrainState:
    """Returns a training state with the numbers of its optimizer replaced, as new float32 arrays.

    Args:
      state: State of an algorithm from `algorithm_of`.
      hyperparams: Numbers by name, from `hyperparameters`.
    """
    arrays = {name: jnp.float32(number) for name, number in hyperparams.items()}
    return state._replace(opt_state=state.opt_state._replace(hyperparams=arrays))


@dataclass(frozen=True)
class StepSizes:
    """Schedule of step sizes, for optimizers and, in Python floats, lazy tables.

    >>> [round(StepSizes(3.0, 4)(step), 4) for step in range(5)]
    [3.0, 2.5607, 1.5, 0.4393, 0.0]

    Attributes:
      learning_rate: Peak step size; may be traced.
      num_steps: Number of steps, after which a cosine is zero; None for a constant step size.
    """

    learning_rate: Any
    num_steps: Any

    def __call__(self, step: Any) -> Any:
        if self.num_steps is None:
            return self.learning_rate
        fraction = step / self.num_steps
        traced = isinstance(fraction, jax.Array)
        cos, least = (jnp.cos, jnp.minimum) if traced else (math.cos, min)
        return self.learning_rate * 0.5 * (1 + cos(math.pi * least(fraction, 1.0)))


def lazy_tables(spec: RunSpec, num_steps: int) -> LazyTables | None:
    """Returns the settings of lazy tables; None for dense ones.

    Args:
      spec: Resolved settings.
      num_steps: Number of steps, after which a cosine schedule is zero.
    """
    if not isinstance(tables := spec.tables, Lazy):
        return None
    rate: Any = tables.learning_rate
    momentum: Any = tables.momentum
    assert None not in (rate, momentum), "`resolve` leaves nothing open"
    constant = spec.optimizer.schedule == "constant"
    return LazyTables(StepSizes(rate, None if constant else num_steps), momentum)


def _build_optimizer(
    learning_rate: Any,
    num_steps: Any,
    momentum: Any,
    weight_decay: Any,
    tail: Any,
    decay: Any,
    kind: Optimizer,
) -> optax.GradientTransformation:
    constant = kind.schedule == "constant"
    sizes = learning_rate if constant else StepSizes(learning_rate, num_steps)
    numbers = {"momentum": momentum, "weight_decay": weight_decay}
    base = kind.transformation(sizes, **{k: x for k, x in numbers.items() if x is not None})
    if tail is None and decay is None:
        return base
    return averaged(base, num_steps, tail=tail, decay=decay)


@functools.cache
def optimizer(
    kind: Optimizer, average: Literal["tail", "decay"] | None = None
) -> optax.GradientTransformation:
    """Returns the shared optimizer of a kind.

    Args:
      kind: Settings; the state holds the learning rate, momentum and weight decay in their place.
      average: Average of the parameters, see `dpsgd.averaged`; None for the last parameters.
    """
    numbers = dict.fromkeys(("momentum", "weight_decay")) | dict.fromkeys(kind.numbers, 0.0)
    share = {name: 0.5 if name == average else None for name in ("tail", "decay")}
    make_optimizer = optax.inject_hyperparams(_build_optimizer, static_args=("kind",))
    return make_optimizer(0.0, 1.0, **numbers, **share, kind=kind)
