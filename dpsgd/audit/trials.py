"""Runs many complete runs for the black-box audit, and scores them.

Most scores are likelihood ratios of a run with and without the canary:
docs/explanation/black-box-audit.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from scipy import special

from dpsgd.core.mechanism import Mechanism
from dpsgd.engine.algorithm import Algorithm
from dpsgd.engine.blocks import in_background
from dpsgd.engine.programs import compiler_options
from dpsgd.engine.step import BlockInputs, Watch, block_function
from dpsgd.noise.keys import RootKey
from samplers import BatchSampler, BatchSource
from samplers.batches import IndexBlock

_MOST_INDICES = 4_000_000  # in one dispatch

Scores = Mapping[str, np.ndarray]
"""Values of each score, by name, one for each trial: float64[trials]."""


class Runs:
    """Complete runs of a mechanism on data with and without the canary."""

    def __init__(
        self,
        mechanism: Mechanism,
        root: RootKey,
        build: Callable[..., Algorithm],
        progress: Callable[[str], None],
    ):
        sampler = mechanism.sampler
        self.sampler, self.mechanism = sampler, mechanism
        self._root, self._progress = root, progress
        self._drawn = self._noised = 0  # trials so far: each has randomness of its own
        algorithm = build(lambda w, x: w * x, optax.sgd(0.0))
        # One compiled step over many independent runs; the worlds differ in the data alone.
        shared: Any = None
        over_runs = None, BlockInputs(None, IndexBlock(0, 0, 0, None), 0, shared, shared)
        run_block = jax.vmap(block_function(algorithm, sampler), in_axes=over_runs)
        self._run = jax.jit(run_block, compiler_options=compiler_options())
        self._state = algorithm.init(jnp.zeros((), jnp.float32), mechanism)
        self._scales = mechanism.scales()
        cells = sampler.num_steps * sampler.padded_batch_size
        self._chunk = int(np.clip(_MOST_INDICES // cells, 1, 10_000))

    def scores(self, others: int, trials: int) -> tuple[Scores, Scores]:
        """Returns scores of fresh runs with and without the canary."""
        chunk = min(self._chunk, trials)
        clip = float(self._scales.l2_clip_norm)
        data = jnp.full(self.sampler.num_examples, others * clip, jnp.float32)
        worlds = data.at[0].set(clip), data.at[0].set(0.0)
        starts, chunks = range(0, trials, chunk), list[tuple[Scores, ...]]()
        with closing(in_background(self._plans(chunk) for _ in starts)) as plans:
            for start, plan in zip(starts, plans, strict=True):
                chunks.append(tuple(self._of_world(x, plan, others, chunk) for x in worlds))
                self._progress(f"{min(trials, start + chunk):,} of {trials:,} runs")
        present, absent = (
            {name: np.concatenate([x[name] for x in scores])[:trials] for name in scores[0]}
            for scores in zip(*chunks, strict=True)
        )
        return present, absent

    def _of_world(self, data: Any, plan: IndexBlock, others: int, chunk: int) -> Scores:
        keys = jnp.asarray([self._root.noise_key(self._noised + k) for k in range(chunk)])
        self._noised += chunk
        watch = Watch(np.bool_(True), (np.zeros(1, np.int32),))
        *_, watched = self._run(self._state, BlockInputs(data, plan, keys, self._scales, watch))
        released = np.asarray(watched, np.float64)  # [chunk, steps, 1]
        b = float(self._scales.expected_batch_size)
        x = released * b / float(self._scales.l2_clip_norm) - others * b
        return scores_of(
            x.reshape(chunk, self.sampler.epochs, self.sampler.steps_per_epoch),
            others,
            self.mechanism.noise_multiplier,
            min(1.0, b / self.sampler.num_examples),
        )

    def _plans(self, chunk: int) -> IndexBlock:
        """Draws the batches of `chunk` runs, each from a fresh seed."""
        seeds = [self._root.sampling_seed(self._drawn + k) for k in range(chunk)]
        self._drawn += chunk
        blocks = [_index_block(self.sampler, seed) for seed in seeds]
        rows = max(len(block.indices) for block in blocks)
        shape = chunk, rows, self.sampler.padded_batch_size
        indices, weights = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
        starts = np.empty((chunk, self.sampler.num_steps + 1), np.int32)
        for k, block in enumerate(blocks):
            indices[k, : len(block.indices)] = block.indices
            weights[k, : len(block.weights)] = block.weights
            starts[k] = block.starts
        return IndexBlock(indices, weights, starts, np.int32(self.sampler.num_steps))


def _index_block(sampler: BatchSampler, seed: int) -> IndexBlock:
    """Returns the batches of a complete run, equal to training's."""
    steps = np.arange(sampler.num_steps + 1)
    plans = [sampler.plan(seed, sampler.drawn_epoch(epoch)) for epoch in range(sampler.epochs)]
    sizes = np.concatenate([np.diff(plan.starts) for plan in plans])
    # Cut, or taken in several passes; or of several shards, which are all held.
    if sampler.num_shards > 1 or sizes.max() > sampler.padded_batch_size:
        block = BatchSource(sampler, seed).fill(0, sampler.num_steps)
        indices = block.indices if block.places is None else block.places
        return block._replace(indices=indices, places=None, shards=None)
    # The same as `fill` in a few array operations: thousands of runs are drawn.
    members = np.concatenate([plan.examples for plan in plans])
    row = np.repeat(steps[:-1], sizes)
    column = np.arange(members.size) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    indices = np.zeros((sampler.num_steps, sampler.padded_batch_size), np.int32)
    weights = np.zeros(indices.shape, np.float32)
    indices[row, column], weights[row, column] = members, 1.0
    return IndexBlock(indices, weights, steps, np.int32(sampler.num_steps))


def scores_of(x: np.ndarray, others: int, sigma: float, rate: float | None = None) -> Scores:
    """Returns the scores of runs.

    Args:
      x: Noised sums minus `others` times the expected batch size, in units of C: float64[trials, E,
        T].
      others: Gradient of all other examples in units of C: -1, 0 or 1.
      sigma: Noise multiplier.
      rate: Approximate probability that an example takes part in a step; 1 / T by default.
    """
    epochs, steps = x.shape[1:]
    rate = 1 / steps if rate is None else rate

    def log_ratio(x: np.ndarray, mean: float, variance: float) -> np.ndarray:
        """Returns log N(x; mean, variance) - log N(x; 0, variance)."""
        return (mean * x - 0.5 * mean**2) / variance

    def one_of(x: np.ndarray, scale: float, variance: float) -> np.ndarray:
        """Returns log likelihood ratios for a canary in one step."""
        present = special.logsumexp(log_ratio(x, (1 - others) * scale, variance), axis=-1)
        return present - special.logsumexp(log_ratio(x, -others * scale, variance), axis=-1)

    def by_lot(x: np.ndarray, mean: float) -> np.ndarray:
        """Returns log likelihood ratios of participation at `rate`."""
        ratio = log_ratio(x, mean, sigma**2)
        if rate == 1:
            return ratio
        return np.logaddexp(math.log1p(-rate), ratio + math.log(rate))

    scores = {
        "one step of each epoch": np.sum(one_of(x, 1.0, sigma**2), axis=1),
        "each step, sampled independently": np.sum(
            by_lot(x, 1 - others) - by_lot(x, -others), axis=(1, 2)
        ),
        "the first step of each epoch": np.sum(x[:, :, 0], axis=1),
        "the largest sum": np.max(x, axis=(1, 2)),
    }
    if epochs > 1:
        scores["one step, the same in every epoch"] = one_of(
            np.sum(x, axis=1), epochs, sigma**2 * epochs
        )
    return scores
