"""Times steps of a run's own program, on generated rows."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpsgd.engine.loop import train_blocks
from dpsgd.runs.job import Training

PyTree = Any
Clock = Callable[[], float]

_ROWS = 4096
"""Most rows that are generated to be timed; there are as many copies as it takes."""

_LEAST_SECONDS = 1.0
"""For which steps are timed, unless all of the run take less."""

_MOST_STEPS = 1024
"""That are timed at all."""


class Timing(NamedTuple):
    """Seconds of an epoch, of one of its steps, and of the first step with its compilation."""

    epoch: float
    step: float
    first: float


def time_steps(
    job: Training, *, flush_every: int | None = None, clock: Clock = time.perf_counter
) -> Timing:
    """Returns the time of one epoch on this machine, of the compiled program of a run.

    Nothing private is read: rows are synthetic, of the shapes of the run's own. Any noise serves,
    as the program is the same.
    """
    algorithm, mechanism, state, layout = job.algorithm, job.mechanism, job.start(), job.layout
    sampler = mechanism.sampler
    some = job.synthetic(min(sampler.num_examples, _ROWS))
    rows = jax.tree.map(lambda shape, part: _filled(shape, part, layout.streamed), job.data, some)

    def timed(steps: int) -> float:
        begin = jnp.asarray(sampler.num_steps - steps, state.step.dtype)
        blocks = train_blocks(
            algorithm,
            mechanism,
            state._replace(step=begin),
            rows,
            layout=layout,
        )
        began = clock()
        for block in blocks:
            last = block.state
        jax.block_until_ready(last)
        return clock() - began

    first = timed(1)
    once, steps, most = timed(1), 4, min(_MOST_STEPS, sampler.num_steps - 1)
    if not most:
        return Timing(once, once, first)
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
    epoch = sampler.steps_per_epoch * a_step + times * max(0.0, once - a_step)
    return Timing(epoch, a_step, first)


def _filled(shape: Any, part: Any, streamed: bool) -> np.ndarray:
    """Returns rows of a shape made of some: all of them copies, or zeros where not all are stored.

    Rows that are streamed may be more than there is memory for; zeros take none.
    """
    part = np.asarray(part, shape.dtype)
    if not streamed:
        return np.resize(part, shape.shape)
    column = np.zeros(shape.shape, shape.dtype)
    column[: len(part)] = part
    return column
