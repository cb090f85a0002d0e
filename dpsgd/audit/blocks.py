"""What the loop that dispatches blocks gives them: batches, keys, scales and steps.

The last blocks of the run are run by `train_blocks`, which goes on from there: a full one and then
the last, or, of a large model and under exact noise, the last steps alone. They are compared with

* the batches that are read for their steps: their sizes, and how many of the marked rows are in
  them, whose floats are NaN so that the step counts them;
* the releases of the executable itself, called with the mechanism's key of the generation and the
  number of the step: in steps at both ends of each block, the watched coordinates are the same.
  Noise that is correlated is whitened for it, which leaves what is fresh in a step: a history that
  is lost or shifted on the way leaves more.
"""

from __future__ import annotations

from contextlib import closing
from typing import NamedTuple

import numpy as np

from dpsgd.audit.checks import Check
from dpsgd.audit.program import AuditedProgram
from dpsgd.audit.sums import loud
from dpsgd.training.mechanism import Mechanism
from samplers import BatchSource

_LARGE = 2**22  # coordinates of a model of which few steps are taken
_COMPARED = 2**23  # coordinates of all blocks of correlated noise of which every step is compared
_TAIL = 2  # steps of the last block
_GENERATION = 1
_GRID = 2.0**-14  # of the noise's deviation: cells of its grid, and sums that are drowned
_CASTS = {2: 2.0**-7, 4: 2.0**-20, 8: 2.0**-20}  # of a number, by the bytes of its type

PADDED = 2**14
"""Steps before those whose correlated noise is whitened, at most."""

_BATCHES = "blocks train on the batches that are drawn"
_STEPS = "blocks are given the keys, scales and steps of the run"


def block_checks(program: AuditedProgram) -> list[Check]:
    """Checks what the loop gives to the last blocks of the run."""
    sampler, mechanism = program.mechanism.sampler, loud(program.mechanism)
    large = mechanism.noise.exact or sum(program.sizes) > _LARGE
    size = 0 if large else program.layout.block_steps
    first = max(program.first_step, sampler.num_steps - size - _TAIL)
    places = program.watched_places
    source = BatchSource(sampler, program.root.sampling_seed(_GENERATION))
    exact = program.poison is not None
    declared: list[range] = []
    batches = steps = ""
    stop = first
    rows: list[np.ndarray] = []
    ends: set[int] = set()
    blocks = program.blocks(
        first, mechanism, coordinates=places, generation=_GENERATION, declare=declared.append
    )
    with closing(blocks):
        for block in blocks:
            here = block.steps
            if here.start != stop or declared[-1] != here or int(block.state.step) != here.stop:
                steps = steps or f"steps {here.start:,} to {here.stop - 1:,} are others"
            stop, log = here.stop, block.diagnostics
            for j, step in enumerate(here):
                wanted, marked = _batch(program, source, step)
                found = int(log.batch_size[j])
                if found != wanted or (exact and int(log.nonfinite_count[j]) < marked):
                    batches = batches or f"step {step:,} is of another batch"
            rows.append(np.asarray(block.watched, np.float64)[: len(here)])
            ends |= {here.start, here.stop - 1}
    if stop != sampler.num_steps:
        steps = steps or f"the run ends at step {stop:,} of {sampler.num_steps:,}"
    if mechanism.noise.bands > 1 and (stop - first) * sum(program.sizes) <= _COMPARED:
        ends = set(range(first, stop))  # what is lost within a block is seen there
    if _drowns(mechanism):
        fresh = _fresh(mechanism, first, np.concatenate(rows), ends)
        for step, release in fresh.items():
            if not _same(program, mechanism, step, release, places):
                steps = steps or f"step {step:,} has another release than its key and number give"
    what = f"{len(declared)} dispatched, steps {first:,} to {stop - 1:,}"
    return [
        Check(_BATCHES, not batches, batches or what),
        Check(_STEPS, not steps, steps or what),
    ]


def _drowns(mechanism: Mechanism) -> bool:
    """Whether sums are far below the cells of the noise's grid, or below what is compared."""
    most = mechanism.sampler.padded_batch_size * mechanism.sampler.max_passes
    return most <= mechanism.noise_multiplier * _GRID / 4


def _batch(program: AuditedProgram, source: BatchSource, step: int) -> tuple[int, int]:
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


class _Fresh(NamedTuple):
    """What is fresh in the release of a step."""

    noise: np.ndarray
    size: np.ndarray
    """Of what it was made of, in all."""
    share: float
    """Of it in a step that has none before it."""
    reach: float
    """Most that it is of releases of size 1."""


def _fresh(
    mechanism: Mechanism, first: int, rows: np.ndarray, steps: set[int]
) -> dict[int, _Fresh]:
    """Returns what is fresh in some steps of blocks that begin at `first`, with no history."""
    noise, matrix = mechanism.noise, np.eye(len(rows))
    if noise.bands > 1:
        if first > PADDED:
            rows, matrix = rows[:1], noise.whiten(np.eye(1))
        else:
            matrix = noise.whiten(np.eye(first + len(rows), len(rows), -first))[first:]
    size, reach = np.abs(matrix) @ np.abs(rows), np.abs(matrix).sum(axis=1)
    fresh = matrix @ rows
    return {
        first + k: _Fresh(fresh[k], size[k], matrix[k, k], reach[k])
        for k in range(len(rows))
        if first + k in steps
    }


def _same(
    program: AuditedProgram,
    mechanism: Mechanism,
    step: int,
    release: _Fresh,
    places: list[np.ndarray],
) -> bool:
    """Whether a step of a block released what the executable does by itself."""
    sampler = mechanism.sampler
    expected = program.release((), mechanism, step=step, generation=_GENERATION)
    b, start = sampler.expected_batch_size, 0
    stddev = mechanism.noise_multiplier * mechanism.l2_clip_norm
    for number, (leaf, at, dtype) in enumerate(zip(expected, places, program.dtypes, strict=True)):
        here = slice(start, start + at.size)
        start += at.size
        if number in program.tables:  # of which `late` says what blocks leave
            continue
        found, wanted = release.noise[here] * b, release.share * leaf[at].astype(np.float64)
        allowed = _GRID * stddev * release.reach + _CASTS[dtype.itemsize] * release.size[here] * b
        if not np.all(np.abs(found - wanted) <= allowed):
            return False
    return True
