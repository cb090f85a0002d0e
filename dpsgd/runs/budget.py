"""How many epochs fit into a given time: steps of the run's own program, on generated rows."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpsgd.core.state import TrainState
from dpsgd.runs.config import RunConfig
from dpsgd.runs.processes import Processes
from dpsgd.training.algorithm import Algorithm
from dpsgd.training.loop import Layout, train_blocks
from dpsgd.training.mechanism import Mechanism

PyTree = Any
Clock = Callable[[], float]

RESERVE = 0.1
"""Part of the time that is kept for what cannot be foreseen, such as the evaluation's."""

_UNLIMITED = 10_000
"""More epochs than any rule takes."""

_ROWS = 4096
"""Most rows that are generated to be timed; there are as many copies as it takes."""

_LEAST_SECONDS = 1.0
"""For which steps are timed, unless all of the run take less."""

_MOST_STEPS = 1024
"""That are timed at all."""


def within(
    minutes: float,
    choose: Callable[[int], RunConfig],
    epoch_seconds: Callable[[RunConfig], float],
    *,
    clock: Clock = time.monotonic,
) -> tuple[RunConfig, float]:
    """Returns the configuration with the most epochs for which there is time, and the time of one.

    Args:
      minutes: All the time there is, from now on. Timing, with its compilation, is part of it; so
        are the search for the noise and the audit, taken to last as long as the latest timing.
      choose: Returns the configuration for so many epochs at most.
      epoch_seconds: Times an epoch of a configuration, of which the batch size alone matters.
      clock: In seconds.

    Raises:
      ValueError: if there is no time for a single epoch.
    """
    if not 0 < minutes < math.inf:
        raise ValueError(f"budget_minutes must be finite and > 0, got {minutes}")
    started, timed = clock(), dict[int, float]()
    most, left, seconds, overhead = _UNLIMITED, math.inf, 0.0, 0.0
    while True:
        config = choose(most)
        size, epochs = config.sampler.batch_size, config.sampler.epochs
        # An epoch of batches that were not timed is taken to last as long as the latest that were.
        seconds = timed.get(size, seconds)
        new = size not in timed and left > 0 and (most == 1 or epochs * seconds <= left)
        if new:
            begun = clock()
            timed[size] = seconds = epoch_seconds(config)
            overhead = clock() - begun
        spent = clock() - started + overhead
        left = (1 - RESERVE) * 60 * minutes - spent
        fitting = max(1, int(left / seconds))
        if size in timed and epochs * seconds <= left and not (new and fitting > most):
            return config, seconds
        if most == 1 and not (new and fitting > 1):
            raise ValueError(
                f"budget_minutes is {minutes:g}, and not even one epoch fits: here it takes "
                f"{seconds:.1f} s, and compiling, timing and auditing {spent:.1f} s; give more "
                "time, or train a smaller model"
            )
        # More only where others were just timed, and else less: the loop ends.
        most = fitting if new else min(fitting, most - 1)


def epoch_seconds(
    algorithm: Algorithm,
    mechanism: Mechanism,
    state: TrainState,
    layout: Layout,
    shapes: PyTree,
    generated: Callable[[int], PyTree],
    *,
    flush_every: int | None = None,
    clock: Clock = time.perf_counter,
) -> float:
    """Returns the time of one epoch on this machine, of the compiled program of a run.

    Nothing private is read: rows are generated, and the keys are of a root that serves nothing
    else.

    Args:
      algorithm: Of the run.
      mechanism: Of the run; any noise serves, as the program is the same.
      state: The first of the run.
      layout: Of its blocks.
      shapes: Shapes and dtypes of its training rows.
      generated: Makes rows that are nobody's.
      flush_every: Steps between flushes of lazy tables.
      clock: In seconds.
    """
    sampler = mechanism.sampler
    some = generated(min(sampler.num_examples, _ROWS))
    rows = jax.tree.map(lambda shape, part: _filled(shape, part, layout.streamed), shapes, some)

    def timed(steps: int) -> float:
        first = jnp.asarray(sampler.num_steps - steps, state.step.dtype)
        blocks = train_blocks(
            algorithm,
            mechanism,
            state._replace(step=first),
            rows,
            root=Processes.current().root(),
            block_steps=layout.block_steps,
            data_on="host" if layout.streamed else "device",
            placement=layout.placement,
        )
        began = clock()
        for block in blocks:
            last = block.state
        jax.block_until_ready(last)
        return clock() - began

    timed(1)  # compiled by this
    once, steps, most = timed(1), 4, min(_MOST_STEPS, sampler.num_steps - 1)
    if not most:
        return once
    while True:
        steps = min(steps, most)
        more = timed(1 + steps)
        if steps == most or more - once >= _LEAST_SECONDS:
            break
        steps *= 4
    a_step = (more - once) / steps if more > once else more / (1 + steps)
    # What precedes the first step, such as the drawing of an epoch, is counted for each; and what
    # follows the last one, which is a flush of lazy tables, for each of these, if there are more.
    times = max(1.0, sampler.steps_per_epoch / (flush_every or math.inf))
    return sampler.steps_per_epoch * a_step + times * max(0.0, once - a_step)


def _filled(shape: Any, part: Any, streamed: bool) -> np.ndarray:
    """Returns rows of a shape made of some: all of them copies, or zeros where not all are stored.

    Rows that are streamed may be more than there is memory for; nobody's zeros take none.
    """
    part = np.asarray(part, shape.dtype)
    if not streamed:
        return np.resize(part, shape.shape)
    column = np.zeros(shape.shape, shape.dtype)
    column[: len(part)] = part
    return column
