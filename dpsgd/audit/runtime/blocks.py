"""What the loop that dispatches blocks gives them: batches, keys, scales and steps.

The first block of what is left of the run, and its last ones, are run by `train_blocks`, which
resumes there; of a large model, and under exact noise, which is slow, the last steps alone. They
are compared with

* the batches that are read for their steps: their sizes, and how many of the marked rows are in
  them, whose floats are NaN so that the step counts them;
* the noise that the mechanism's key of the generation and the numbers of the steps give, in some
  coordinates of every leaf and in every step. Noise that is correlated begins without history: what
  is lost or shifted on the way shows.
"""

from __future__ import annotations

from contextlib import closing

import jax
import numpy as np

from dpsgd.audit.probe import Probe
from dpsgd.audit.report import CheckResult
from dpsgd.audit.runtime.noise import Comparison, ExpectedNoise, cast_of, law_of, noise_dominated
from dpsgd.audit.runtime.sums import loud
from samplers import BatchSource

_LARGE = 2**22  # coordinates of a model of which few steps are taken
_EXACT = 2**15  # of one whose noise is slow
_TAIL = 2  # steps of the last block
_GENERATION = 1

_BATCHES = "blocks train on the batches that are drawn"
STEPS = "blocks are given the keys, scales and steps of the run"


def block_checks(program: Probe) -> list[CheckResult]:
    """Checks what the loop gives to the first block of what is left of the run, and to the last."""
    return _Blocks(program).checks()


class _Blocks:
    """Blocks that `train_blocks` runs, and what is wrong with them."""

    def __init__(self, program: Probe):
        self._program, self._mechanism = program, loud(program.mechanism)
        self._source = BatchSource(
            program.mechanism.sampler, program.root.sampling_seed(_GENERATION)
        )
        self._expected = ExpectedNoise(program)
        sampler = program.mechanism.sampler
        self._all = range(program.first_step, sampler.num_steps)
        self._places = [
            first if k in program.tables else self._expected.places(k, first.size)
            for k, first in enumerate(program.watched_places)
        ]
        self._declared: list[range] = []
        self._batches = self._steps = self._unknown = ""
        self._noise = Comparison(STEPS)

    def checks(self) -> list[CheckResult]:
        """Runs blocks; returns what was seen."""
        most = _EXACT if self._mechanism.noise.exact else _LARGE
        size = self._program.layout.block_steps if sum(self._program.sizes) <= most else 0
        last = max(self._all.start, self._all.stop - size - _TAIL)
        stretches = [range(last, self._all.stop)]
        whole = sum(leaf.size for leaf in jax.tree.leaves(self._program.state.params))
        if size and whole <= _LARGE and last > self._all.start:
            stretches.insert(0, range(self._all.start, min(last, self._all.start + size)))
        for steps in stretches:
            self._look(steps)
        what = f"{len(self._declared)} dispatched"
        what += "".join(f", steps {s.start:,} to {s.stop - 1:,}" for s in stretches)
        what += f"; {self._noise.compared:,} numbers of their noise"
        given = self._noise.check(what)
        if self._steps:
            given = CheckResult(STEPS, False, self._steps)
        elif self._unknown and given.passed:
            given = CheckResult(STEPS, True, f"noise not compared: {self._unknown}", made=False)
        return [CheckResult(_BATCHES, not self._batches, self._batches or what), given]

    def _look(self, wanted: range) -> None:
        """Compares blocks that begin with the first of these steps and reach the last."""
        program, stop, rows = self._program, wanted.start, []
        exact, poisoned = self._mechanism.noise.exact, program.poison is not None
        blocks = program.blocks(
            stop,
            self._mechanism,
            coordinates=self._places,
            generation=_GENERATION,
            declare=self._declared.append,
        )
        ends: list[int] = []
        with closing(blocks):
            for block in blocks:
                here = block.steps
                known = self._declared[-1] == here and int(block.state.step) == here.stop
                if here.start != stop or not known:
                    found = f"steps {here.start:,} to {here.stop - 1:,} are others"
                    self._steps = self._steps or found
                stop, log = here.stop, block.diagnostics
                for j, step in enumerate(here):
                    size, marked = _batch(program, self._source, step)
                    few = poisoned and int(log.nonfinite_count[j]) < marked
                    if int(log.batch_size[j]) != size or few:
                        self._batches = self._batches or f"step {step:,} is of another batch"
                rows.append(np.asarray(block.watched, np.float64)[: len(here)])
                ends += sorted({here.start, here.stop - 1}) if exact else here
                if stop >= wanted.stop:
                    break
        if stop < wanted.stop:
            self._steps = self._steps or f"the run ends at step {stop:,} of {self._all.stop:,}"
        self._compare(range(wanted.start, stop), np.concatenate(rows), ends)

    def _compare(self, steps: range, rows: np.ndarray, ends: list[int]) -> None:
        """Compares the noise of steps that begin without history."""
        program, mechanism = self._program, noise_dominated(self._program.mechanism)
        if mechanism is None:
            self._unknown = f"C = {program.mechanism.l2_clip_norm:.3g} is next to the least"
        elif self._expected.singular or not self._expected.knows(steps):
            self._unknown = "the noise states no Toeplitz matrix"
        if mechanism is None or self._unknown:
            return
        stddev, start = law_of(mechanism)[0], 0
        scale = mechanism.sampler.expected_batch_size / stddev
        at = np.array(ends) - steps.start
        for k, places in enumerate(self._places):
            found = rows[at, start : start + places.size] * scale
            start += places.size
            if k in program.frozen or k in program.tables:  # `update`, `late` look at these
                continue
            alone = mechanism.noise.exact  # and slow
            of = [range(step, step + 1) for step in ends] if alone else [steps]
            noise = [self._expected.of(s, k, places, _GENERATION, mechanism) for s in of]
            expected = np.concatenate(noise)[slice(None) if alone else at]
            allowed = self._expected.allowed + cast_of(program.dtypes[k]) * np.abs(expected)
            where = f"{program.names[k]} in blocks from step {steps.start:,} on"
            self._noise.add(found, expected, allowed, where, k)


def _batch(program: Probe, source: BatchSource, step: int) -> tuple[int, int]:
    """Returns how many examples a batch has, and how many of these hold a marked row.

    The first as a step counts them: in float32, pass by pass, which beyond 2^24 rounds.
    """
    block = source.fill(step, step + 1, passes=1)  # of nobody, too
    shape = len(block.indices), -1, program.block
    places = block.indices if block.places is None else block.places
    rows, weights = (x.reshape(shape) for x in (places, block.weights))
    real = weights.max(axis=2) > 0
    counted = np.cumsum(real.sum(axis=1), dtype=np.float32)
    return int(counted[-1]), int((program.marked[rows].any(axis=2) & real).sum())
