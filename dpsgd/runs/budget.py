"""How many epochs fit into a given time: steps of the run's own program, on generated rows."""

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
from dpsgd.runs.processes import Processes
from dpsgd.runs.spec import RunSpec

PyTree = Any
Clock = Callable[[], float]

RESERVE = 0.1
"""Part of the time that is left which is kept for what cannot be foreseen."""

_BEFORE, _BEFORE_STEPS = 1.5, 400
"""Accounting and audit take about so many times what the first step does with its compilation, and
so many steps: seen on models of 0.2M parameters, with batches of 4,096 and 16,384."""

_AFTER, _AFTER_EPOCHS = 0.25, 0.5
"""Calibration and evaluation likewise, in times of the first step and of an epoch."""

_UNLIMITED = 10_000
"""More epochs than any rule takes."""

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


class Budget:
    """The time of a whole run, from its start to its report."""

    def __init__(
        self,
        minutes: float,
        timing: Callable[[RunSpec], Timing],
        started: float | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """Begins with so many minutes, of which some are gone if it started before now.

        `timing` times a run, of which the batch size alone matters.
        """
        self.minutes, self._timing, self._clock = minutes, timing, clock
        self._started = clock() if started is None else started
        self._timed: dict[int, Timing] = {}
        self._chosen = math.nan  # when it was
        self._prepared: float | None = None

    def choose(self, choose: Callable[[int], RunSpec]) -> tuple[RunSpec, float]:
        """Returns the spec with the most epochs for which there is time, and that of one.

        `choose` returns the spec for so many epochs at most. Where there is no time for a single
        one, it raises ValueError.
        """
        most, settled = _UNLIMITED, False
        while True:
            spec = choose(most)
            size, epochs = spec.sampler.batch_size, min(most, spec.sampler.epochs)
            found = self._timed.get(size) or self._likely(size)
            likely = found is None or self._fitting(found, spec) >= epochs
            if size not in self._timed and not settled and (likely or epochs == 1):
                settled = bool(self._timed)  # others are not timed where these allow more
                self._timed[size] = found = self._timing(spec)
                settled &= self._fitting(found, spec) > epochs
                if settled:
                    most = self._fitting(found, spec)
                    continue
            assert found is not None, "timed now, or likely"
            if size in self._timed and self._fitting(found, spec) >= epochs:
                self._chosen = self._clock()
                return spec, found.epoch
            if epochs == 1:
                others = 60 * self.minutes - self._left_for_steps(found, spec)
                raise ValueError(
                    f"budget_minutes is {self.minutes:g}, and not even one epoch fits: here it "
                    f"takes {found.epoch:.1f} s, and all else about {others:.0f} s; give more "
                    "time, or train a smaller model"
                )
            fastest = min(one.epoch for one in self._timed.values())
            most = max(1, min(epochs - 1, int(self._left(found) / fastest)))

    def _fitting(self, found: Timing, spec: RunSpec) -> int:
        """Returns for how many epochs there is time."""
        return max(0, int(self._left_for_steps(found, spec) / found.epoch))

    def _likely(self, size: int) -> Timing | None:
        """Returns what batches of a size would take, from the latest that were timed, if any."""
        if not self._timed:
            return None
        (*_, latest), found = self._timed, list(self._timed.values())[-1]
        return found._replace(step=found.step * size / latest)

    def exceeded(self, spec: RunSpec) -> bool:
        """Returns whether to choose fewer epochs for a run that was prepared since it was chosen.

        Once, as it is prepared anew: it will take as long. A run that has no time even for one
        epoch then stays as it is.
        """
        found = self._timed[spec.sampler.batch_size]
        left, first = self._left(found), self._prepared is None
        self._prepared = self._clock() - self._chosen
        fewer = (1 - RESERVE) * left - self._prepared
        return first and found.epoch <= fewer < left < spec.sampler.epochs * found.epoch

    def _left(self, found: Timing) -> float:
        """Returns the time until the last step is to be taken."""
        after = _AFTER * found.first + _AFTER_EPOCHS * found.epoch
        return 60 * self.minutes - (self._clock() - self._started) - after

    def _left_for_steps(self, found: Timing, spec: RunSpec) -> float:
        """Returns the time for the steps of a run that is yet to be prepared."""
        before = self._prepared
        if before is None:
            audited = spec.audit and spec.private
            before = _BEFORE * found.first + audited * _BEFORE_STEPS * found.step
        return (1 - RESERVE) * self._left(found) - before


def time_steps(
    job: Training, *, flush_every: int | None = None, clock: Clock = time.perf_counter
) -> Timing:
    """Returns the time of one epoch on this machine, of the compiled program of a run.

    Nothing private is read: rows are synthetic, of the shapes of the run's own, and the keys are of
    a root that serves nothing else. Any noise serves, as the program is the same.
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
            root=Processes.current().root(),
            layout=layout,
            run="timing",
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
