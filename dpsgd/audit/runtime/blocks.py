"""What the loop that dispatches blocks gives them: batches, keys, scales and steps.

The first block of what is left of the run, and its last ones, are run by `train_blocks`; of a large
model the last steps alone. Batches are compared by their sizes and by how many of the marked rows,
whose floats are NaN, are in them; the noise of every step with what the key of the attempt and the
number of the step give.
"""

from __future__ import annotations

from contextlib import closing

import jax
import numpy as np

from dpsgd.audit.probe import Probe
from dpsgd.audit.report import CheckResult
from dpsgd.audit.runtime.expected import Comparison, ExpectedNoise, cast_of
from dpsgd.audit.runtime.scales import loud, noise_dominated, noise_stddev
from dpsgd.audit.runtime.sums import LARGE
from dpsgd.engine.loop import Block
from dpsgd.engine.step import Watch
from samplers import BatchSource

_TAIL = 2  # steps of the last block
_ATTEMPT = 1

BATCHES = "blocks train on the batches that are drawn"
STEPS = "blocks are given the keys, scales and steps of the run"
_COPIES = "every device has the same state"


def block_checks(probe: Probe) -> list[CheckResult]:
    """Checks what the loop gives to the first block of what is left of the run, and to the last.

    Of large tables with deferred noise, `deferred_checks` does so in the blocks that it runs.
    """
    large = sum(leaf.size for leaf in jax.tree.leaves(probe.state.raw_params)) > LARGE
    checks = [] if large and probe.tables else _Blocks(probe, large=large).checks()
    placement = probe.layout.placement
    if placement is not None and len(placement.devices) > 1:
        path = probe.placement_mismatch()
        detail = f"{len(placement.devices)} devices, after a full batch"
        why = f"state{path} after a step differs from one to another"
        checks.append(CheckResult(_COPIES, path is None, detail if path is None else why))
    return checks


class Dispatched:
    """The steps and batches of blocks that an attempt is given, against those that are drawn."""

    def __init__(self, probe: Probe, attempt: int):
        self._probe, self.count, self.wrong_steps, self._wrong = probe, 0, "", ""
        self._source = BatchSource(probe.mechanism.sampler, probe.root.sampling_seed(attempt))
        self.declared: list[range] = []

    def compare(self, block: Block, start: int) -> None:
        """Compares a block that must begin with a step."""
        here, log = block.steps, block.diagnostics
        self.count += len(here)
        known = self.declared[-1] == here and int(block.state.step) == here.stop
        if here.start != start or not known:
            wrong = f"steps {here.start:,} to {here.stop - 1:,} are others"
            self.wrong_steps = self.wrong_steps or wrong
        for j, step in enumerate(here):
            size, marked = self._batch(step)
            few = self._probe.poison is not None and int(log.nonfinite_count[j]) < marked
            if int(log.batch_size[j]) != size or few:
                self._wrong = self._wrong or f"step {step:,} is of another batch"

    def _batch(self, step: int) -> tuple[int, int]:
        """Returns how many examples a batch has, and how many of these hold a marked row.

        The first as a step counts them: in float32, pass by pass, which beyond 2^24 rounds.
        """
        block = self._source.fill(step, step + 1, passes=1)  # of an empty one, too
        shape = len(block.indices), -1, self._probe.block
        places = block.indices if block.places is None else block.places
        rows, weights = (x.reshape(shape) for x in (places, block.weights))
        real = weights.max(axis=2) > 0
        counted = np.cumsum(real.sum(axis=1), dtype=np.float32)
        return int(counted[-1]), int((self._probe.marked[rows].any(axis=2) & real).sum())

    def check(self, detail: str) -> CheckResult:
        """Returns the check of the batches."""
        return CheckResult(BATCHES, not self._wrong, self._wrong or detail)


class _Blocks:
    """Blocks that `train_blocks` runs, and what is wrong with them."""

    def __init__(self, probe: Probe, *, large: bool):
        self._probe, self._mechanism = probe, loud(probe.mechanism)
        self._given = Dispatched(probe, _ATTEMPT)
        self._expected = ExpectedNoise(probe)
        self._all = range(probe.first_step, probe.mechanism.sampler.num_steps)
        self._block = 0 if large else probe.layout.block_steps
        self._places = [
            np.asarray(at)
            if k in (*probe.tables, *probe.frozen)
            else self._expected.places(k, at.size)
            for k, at in enumerate(Watch.nothing(probe.state.raw_params).places)
        ]
        self._unknown, self._noise = "", Comparison(STEPS)

    def checks(self) -> list[CheckResult]:
        """Runs blocks; returns what was seen."""
        last = max(self._all.start, self._all.stop - self._block - _TAIL)
        segments = [range(last, self._all.stop)]
        if self._block and last > self._all.start:
            segments.insert(0, range(self._all.start, min(last, self._all.start + self._block)))
        for steps in segments:
            self._look(steps)
        what = f"{len(self._given.declared)} dispatched"
        what += "".join(f", steps {s.start:,} to {s.stop - 1:,}" for s in segments)
        what += f"; {self._noise.compared:,} numbers of their noise"
        given = self._noise.check(what)
        if self._given.wrong_steps:
            given = CheckResult(STEPS, False, self._given.wrong_steps)
        elif self._unknown and given.passed:
            given = CheckResult.skipped(STEPS, f"noise not compared: {self._unknown}")
        return [self._given.check(what), given]

    def _look(self, wanted: range) -> None:
        """Compares blocks that begin with the first of these steps and reach the last."""
        stop, rows = wanted.start, []
        blocks = self._probe.blocks(
            self._probe.begun(stop),
            self._mechanism,
            attempt=_ATTEMPT,
            places=self._places,
            return_gradient=True,
            declare=self._given.declared.append,
        )
        with closing(blocks):
            for block in blocks:
                here = block.steps
                self._given.compare(block, stop)
                rows.append(np.asarray(block.watched, np.float64)[: len(here)])
                stop = here.stop
                if stop >= wanted.stop:
                    break
        if stop < wanted.stop:
            ended = f"the run ends at step {stop:,} of {self._all.stop:,}"
            self._given.wrong_steps = self._given.wrong_steps or ended
        self._compare(range(wanted.start, stop), np.concatenate(rows))

    def _compare(self, steps: range, rows: np.ndarray) -> None:
        """Compares the noise of steps that begin without history."""
        probe, mechanism = self._probe, noise_dominated(self._probe.mechanism)
        if mechanism is None:
            self._unknown = f"C = {probe.mechanism.l2_clip_norm:.3g} is next to the least"
        elif self._expected.singular or not self._expected.knows(steps):
            self._unknown = "the noise states no Toeplitz matrix"
        if mechanism is None or self._unknown:
            return
        scale, start = mechanism.sampler.expected_batch_size / noise_stddev(mechanism), 0
        for k, places in enumerate(self._places):
            found = rows[:, start : start + places.size] * scale
            start += places.size
            unnoised = k in probe.frozen or k in probe.tables  # `flow`, `deferred` look at these
            if unnoised or not probe.sizes[k]:
                continue
            expected = self._expected.of(steps, k, places, _ATTEMPT)
            allowed = self._expected.allowed + cast_of(probe.dtypes[k]) * np.abs(expected)
            where = f"{probe.names[k]} in blocks from step {steps.start:,} on"
            self._noise.add(found, expected, allowed, where, k)
