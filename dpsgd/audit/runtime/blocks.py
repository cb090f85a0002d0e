"""Checks batches, steps and noise of the training loop's blocks.

`train_blocks` runs the first steps of the remaining run, some in its middle, and its last, with a
full block at both ends. The first and the last segment resume after one step at the run's own
scales, which must release the gradient of the drawn batch. Batches must have the drawn size and
number of marked rows, whose floats are NaN, and steps the noise of their key and number.
"""

from __future__ import annotations

from contextlib import closing
from typing import Any

import jax
import numpy as np

from dpsgd.audit.probe import Probe
from dpsgd.audit.report import CheckResult
from dpsgd.audit.runtime.expected import Comparison, ExpectedNoise, spread_places
from dpsgd.audit.runtime.releases import LARGE, cast_error, loud, noise_dominated, noise_stddev
from dpsgd.core.mechanism import Mechanism
from dpsgd.core.state import TrainState
from dpsgd.engine.copies import hosted
from dpsgd.engine.loop import Block
from dpsgd.engine.step import Watch
from samplers import BatchSource

BATCHES = "blocks train on the drawn batches"
STEPS = "blocks use the keys, scales and steps of the run"
FIRST = "the loop's first step releases the gradient of its batch"
_COPIES = "every device has the same state"

_SHORT = 2  # steps of a block; those at both ends are full unless that takes seconds
_LAST = 4  # last steps, if no block is full: a single step, and at least two blocks
_MIDDLE = 5  # steps in the middle, in at least three blocks
_ATTEMPT = 1
_WORK = 2**32  # most coordinates of gradients that a full block computes


def block_checks(probe: Probe) -> list[CheckResult]:
    """Checks blocks of the training loop.

    They lie at both ends of the remaining run, in its middle, and after a resume.
    For large tables with deferred noise, `deferred_checks` checks the blocks that it runs.
    """
    size = sum(leaf.size for leaf in jax.tree.leaves(probe.state.raw_params))
    checks = [] if size > LARGE and probe.tables else _Blocks(probe, size).checks()
    placement = probe.layout.placement
    if len(placement.devices) > 1:
        path = probe.placement_mismatch()
        detail = f"{len(placement.devices)} devices, after a full batch"
        why = f"state{path} differs between devices after a step"
        checks.append(CheckResult(_COPIES, path is None, detail if path is None else why))
    return checks


class Dispatched:
    """Compares an attempt's blocks with the declared steps and drawn batches.

    Attributes:
      declared: Steps of each block, as the loop declares them.
      wrong_steps: Description of the first wrong step; empty if none.
    """

    def __init__(self, probe: Probe, attempt: int):
        self._probe, self.wrong_steps, self._wrong = probe, "", ""
        self._source = BatchSource(probe.mechanism.sampler, probe.root.sampling_seed(attempt))
        self.declared: list[range] = []

    def compare(self, block: Block, start: int) -> None:
        """Compares a block that must begin with step `start`."""
        steps, log = block.steps, block.diagnostics
        is_declared = self.declared[-1] == steps and int(block.state.step) == steps.stop
        if steps.start != start or not is_declared:
            wrong = f"steps {steps.start:,} to {steps.stop - 1:,} differ from those declared"
            self.wrong_steps = self.wrong_steps or wrong
        for j, step in enumerate(steps):
            size, marked = self._batch(step)
            few = self._probe.poison is not None and int(log.nonfinite_count[j]) < marked
            if int(log.batch_size[j]) != size or few:
                self._wrong = (
                    self._wrong or f"step {step:,} trains on another batch than the drawn one"
                )

    def _batch(self, step: int) -> tuple[int, int]:
        """Returns a batch's number of examples, and of examples with a marked row.

        A step counts examples in float32, pass by pass, which rounds beyond 2^24.
        """
        block = self._source.fill(step, step + 1, passes=1)  # of an empty batch, too
        shape = len(block.indices), -1, self._probe.block
        places = block.indices if block.places is None else block.places
        rows, weights = (x.reshape(shape) for x in (places, block.weights))
        real = weights.max(axis=2) > 0
        counted = np.cumsum(real.sum(axis=1), dtype=np.float32)
        return int(counted[-1]), int((self._probe.marked[rows].any(axis=2) & real).sum())

    def check(self, detail: str) -> CheckResult:
        """Returns the check of the batches."""
        return CheckResult(BATCHES, not self._wrong, self._wrong or detail)


def _copied(leaf: Any) -> Any:
    """Returns a copy of an array, or of an array of keys."""
    return leaf.copy() if isinstance(leaf, jax.Array) else np.array(leaf)


class _Blocks:
    """Blocks that `train_blocks` runs with noise far above the sums."""

    def __init__(self, probe: Probe, size: int):
        self._probe, self._mechanism = probe, loud(probe.mechanism)
        self._dispatched = Dispatched(probe, _ATTEMPT)
        self._expected = ExpectedNoise(probe)
        self._all = range(probe.first_step, probe.mechanism.sampler.num_steps)
        work = size * probe.places * probe.layout.block_steps
        self._first = None if work <= _WORK else _SHORT  # period of the ends of the first blocks
        self._last = None if 3 * work <= _WORK else _SHORT  # period of the ends of the last blocks
        self._places = [
            np.asarray(indices)
            if k in (*probe.tables, *probe.frozen)
            else spread_places(probe.sizes[k], indices.size)
            for k, indices in enumerate(Watch.nothing(probe.state.raw_params).places)
        ]
        self._noise, self._differ = Comparison(STEPS), list[int]()

    def checks(self) -> list[CheckResult]:
        """Runs blocks, and returns their checks."""
        steps, resumes = self._all, not self._probe.tables  # pending noise is not copied
        stop = steps.start + resumes + (self._first or self._probe.layout.block_steps)
        first = range(steps.start, min(steps.stop, stop))
        block_steps = self._probe.layout.block_steps
        last_steps = _LAST  # or a single step, a full block, and the run's last block
        if self._last is None:
            last_steps = 2 + block_steps + (len(steps) - 1) % block_steps
        last = range(max(first.stop, steps.stop - last_steps), steps.stop)
        middle = self._middle(first, last)
        segments = [segment for segment in (first, middle, last) if segment]
        for segment in segments:
            self._run(segment, compares_first=resumes and segment != middle)
        words = ", ".join(f"{s.start:,} to {s.stop - 1:,}" for s in segments)
        detail = f"{len(self._dispatched.declared)} blocks of steps {words}"
        check = self._noise.check(f"{detail}; {self._noise.compared:,} numbers of their noise")
        if self._dispatched.wrong_steps:
            check = CheckResult(STEPS, False, self._dispatched.wrong_steps)
        elif check.passed and (unknown := self._unknown()):
            check = CheckResult.skipped(STEPS, f"noise not compared: {unknown}")
        words = f"it differs in steps {self._differ}" if self._differ else "first and last steps"
        first_check = CheckResult(FIRST, not self._differ, words)
        return [self._dispatched.check(detail), check, first_check]

    def _middle(self, first: range, last: range) -> range:
        """Returns random consecutive steps between two segments; empty if too few."""
        free = range(first.stop, last.start - _MIDDLE)
        if not free:
            return free
        rng = np.random.default_rng(self._probe.root.sampling_seed(_ATTEMPT))
        start = int(rng.integers(free.start, free.stop))
        return range(start, start + _MIDDLE)

    def _unknown(self) -> str:
        """Returns the obstacle to comparing the noise of blocks; empty if none."""
        if noise_dominated(self._probe.mechanism) is None:
            return f"C = {self._probe.mechanism.l2_clip_norm:.3g} is too small to scale down"
        is_known = not self._expected.singular and self._expected.knows(self._all.start)
        return "" if is_known else "the noise matrix is singular, or not Toeplitz"

    def _run(self, steps: range, *, compares_first: bool) -> None:
        """Runs blocks over some steps, and compares them.

        Args:
          steps: Steps.
          compares_first: True to run the first step at the run's own scales, and to resume after
            it, unless it is the last.
        """
        probe, start = self._probe, steps.start
        state: Any = probe.begun(start)
        if compares_first:
            state, recorded = self._trained(state, probe.mechanism, range(start, start + 1))
            if not self._released(start, recorded):
                self._differ.append(start)
            start = min(start + 1, steps.stop - 1)
            if start > steps.start:
                state = jax.tree.map(_copied, hosted(state))
            else:
                state = probe.begun(start)
        _, recorded = self._trained(state, self._mechanism, range(start, steps.stop))
        if not self._unknown():
            self._compare(range(steps.start, start + len(recorded)), recorded)

    def _trained(
        self, state: Any, mechanism: Mechanism, steps: range
    ) -> tuple[TrainState, np.ndarray]:
        """Returns the state after some steps, and the recorded coordinates of every step.

        The buffers of `state` are donated.
        """
        flush_every: int | None = _SHORT
        if steps.start <= self._all.start + 1:
            flush_every = self._first
        elif steps.stop == self._all.stop:
            flush_every = self._last
        flush_every = steps.stop if len(steps) == 1 else flush_every
        rows, stop = [], steps.start
        blocks = self._probe.blocks(
            state,
            mechanism,
            attempt=_ATTEMPT,
            places=self._places,
            return_gradient=True,
            flush_every=flush_every,
            declare=self._dispatched.declared.append,
        )
        with closing(blocks):
            for block in blocks:
                self._dispatched.compare(block, stop)
                rows.append(np.asarray(block.watched, np.float64)[: len(block.steps)])
                state, stop = block.state, block.steps.stop
                if stop >= steps.stop:
                    break
        if stop < steps.stop:
            ended = f"the loop stops at step {stop:,} of {self._all.stop:,}"
            self._dispatched.wrong_steps = self._dispatched.wrong_steps or ended
        return state, np.concatenate(rows)

    def _released(self, step: int, recorded: np.ndarray) -> bool:
        """Returns True if the loop's record of a step is its batch's release."""
        probe, plan = self._probe, self._probe.drawn_plan(step, _ATTEMPT)
        state, _ = probe.called(
            probe.begun(step), plan, attempt=_ATTEMPT, loss_attempt=_ATTEMPT, return_gradient=True
        )
        pairs = zip(jax.tree.leaves(state.raw_params), self._places, strict=True)
        released = np.concatenate([np.ravel(np.asarray(x))[indices] for x, indices in pairs])
        allowed = 2.0**-20 if jax.default_backend() == "cpu" else 1e-3
        size = float(np.max(np.abs(released), initial=0.0))
        return bool(np.all(np.abs(recorded[0] - released) <= allowed * size))

    def _compare(self, steps: range, rows: np.ndarray) -> None:
        """Compares the recorded noise of the last steps with the noise of key and step."""
        probe, mechanism = self._probe, self._mechanism
        scale, start = mechanism.sampler.expected_batch_size / noise_stddev(mechanism), 0
        for k, places in enumerate(self._places):
            noise = rows[:, start : start + places.size] * scale
            start += places.size
            unnoised = k in probe.frozen or k in probe.tables  # see `flow` and `deferred`
            if unnoised or not probe.sizes[k]:
                continue
            expected = self._expected.values(steps, k, places, _ATTEMPT)[-len(rows) :]
            allowed: Any = self._expected.allowed + cast_error(probe.dtypes[k]) * np.abs(expected)
            name = f"{probe.names[k]} in blocks from step {steps.start:,} on"
            self._noise.add(noise, expected, allowed, name)
