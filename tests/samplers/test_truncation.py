"""Batches of random size: who is cut, what it costs, and the groups of cyclic sampling."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
from scipy import stats

from accounting import default_delta
from samplers import BallsAndBins, BatchSource, Poisson, UnitsThenPoisson, UnitTree
from samplers.randomness import Key
from tests.samplers.conftest import matrix

FALSE_ALARM = 1e-6
VARIABLE = [Poisson, BallsAndBins]


@pytest.fixture(params=VARIABLE)
def variable(request):
    """Each sampler whose batches vary in size."""
    return request.param


# A sampler, and the most rows of a shard that may be in one batch.
DEFAULT_CAPS = [
    *((kind(n, b, epochs, num_shards=shards), math.ceil(n / shards))
      for kind in VARIABLE
      for n, b, epochs, shards in (
          (36_864_000, 1024, 1, 1), (100_000, 500, 30, 1), (20, 3, 1, 1), (100_000, 500, 3, 8))),
    (UnitsThenPoisson(UnitTree.even((20, 500), ("unit",)), (4,), 0.1, steps=100), 2000),
]  # fmt: skip


@pytest.mark.parametrize(("sampler", "rows"), DEFAULT_CAPS, ids=str)
def test_default_cap_is_the_smallest_at_a_hundredth_of_delta(sampler, rows):
    q, steps = sampler.sampling_prob, sampler.num_steps

    def spent(cap):  # that an example's own batch overflows and keeps it; or several bins are full
        pi = steps * cap / rows * stats.binom.sf(cap, rows, q)
        if cap < rows * q:
            pi = steps * q * stats.binom.sf(cap - 1, rows - 1, q)
        tails = [0.0]
        if isinstance(sampler, BallsAndBins):
            bins, full = sampler.steps_per_epoch, stats.binom.sf(cap - 1, rows - 1, q)
            some = range(min(6, bins))
            tails = [sampler.epochs * math.comb(bins, o + 1) * full ** (o + 1) for o in some]
        return pi + pi**2 / 2 + min(tails)

    delta = default_delta(sampler.num_examples)
    assert spent(sampler.shard_batch_size) <= 0.01 * delta * (1 + 1e-6)
    assert spent(sampler.shard_batch_size - 1) > 0.01 * delta
    assert sampler.padded_batch_size == sampler.num_shards * sampler.shard_batch_size
    less = dataclasses.replace(sampler, target_delta=1e-3 * delta)
    assert less.padded_batch_size >= sampler.padded_batch_size
    assert sampler.with_epochs(200).padded_batch_size == sampler.padded_batch_size


PADDING = [(1024, 1, 0.21), (8192, 1, 0.075), (1024, 8, 0.65), (1024, 64, 2.07)]


@pytest.mark.parametrize(("b", "shards", "at_most"), PADDING)
def test_default_padding_is_small(variable, b, shards, at_most):
    sampler = variable(37_000_000, b, num_shards=shards, target_delta=2.7e-8)
    assert sampler.padded_batch_size / b - 1 <= at_most


def test_several_passes_hold_any_batch_but_with_a_rare_chance(variable):
    sampler = variable(100_000, 500, 3, max_batch_size=100, overflow="accumulate")
    largest = sampler.max_passes * 100
    chance = sampler.num_steps * stats.binom.sf(largest, 100_000, sampler.sampling_prob)
    assert chance <= 1e-5 * default_delta(100_000)


def test_default_cap_is_rechosen_and_a_given_cap_stays(variable):
    chosen = variable(10_000, 100, 1)
    again = dataclasses.replace(chosen, batch_size=400)
    assert again == variable(10_000, 400, 1)
    assert again.padded_batch_size > 400 > chosen.padded_batch_size
    given = variable(10_000, 100, 1, max_batch_size=120)
    assert dataclasses.replace(given, epochs=7).padded_batch_size == 120


def test_batch_refuses_a_step_of_several_passes():
    source = BatchSource(BallsAndBins(10, 10, max_batch_size=4, overflow="accumulate"), 0)
    with pytest.raises(ValueError, match="step 0 needs 3 passes of 4 examples"):
        source.batch(0)
    assert [one.weights.sum() for one in source.passes(0)] == [4, 4, 2]
    assert source.sampler.accumulates
    assert not BallsAndBins(10, 10).accumulates


@pytest.mark.parametrize(
    "sampler",
    [
        *(kind(100, 3, 400, max_batch_size=3) for kind in VARIABLE),
        UnitsThenPoisson(UnitTree.even((2, 50), ("unit",)), (1,), 0.06, max_batch_size=3),
    ],
    ids=str,
)
def test_every_set_of_survivors_is_equally_likely_in_every_step(sampler):
    # A step of six with a cap of three: 20 sets. The members' numbers must not matter.
    for members in ([0, 1, 2, 3, 4, 5], [3, 14, 15, 92, 95, 99]):
        sets = {kept: 0 for kept in itertools.combinations(members, 3)}
        for step, shard in itertools.product(range(500), range(8)):  # each draws by itself
            (kept,) = sampler.passes(np.array(members, np.int32), 11, step, shard)
            sets[tuple(kept.tolist())] += 1
        assert stats.chisquare(list(sets.values())).pvalue > FALSE_ALARM


def test_a_cut_reads_no_words_that_drew_its_batch(variable, small_chunks, monkeypatch):
    small_chunks(7)
    init, read = Key.__init__, []

    def watched(key, *fields):
        init(key, *fields)
        read.append(key.words64(1).tobytes())

    monkeypatch.setattr(Key, "__init__", watched)
    sampler = variable(60, 6, 2, max_batch_size=6)
    for epoch in range(2):
        sampler.plan(1234, epoch)
    drawn = set(read)
    read.clear()
    for step in range(sampler.num_steps):
        sampler.passes(np.arange(20, dtype=np.int32), 1234, step)
    assert drawn
    assert len(set(read)) == sampler.num_steps
    assert drawn.isdisjoint(read)


def test_a_batch_may_be_empty_and_is_then_all_padding():
    source = BatchSource(Poisson(20, 1, 20), 3)
    empty = 0
    for step in range(400):
        one = source.batch(step)
        assert one.indices.shape == one.weights.shape == (source.sampler.padded_batch_size,)
        if one.weights.sum() == 0:
            empty += 1
            assert not one.indices.any()
    assert stats.binomtest(empty, 400, 0.95**20).pvalue > FALSE_ALARM


# --- cyclic sampling: examples of a public group share the steps that they may take part in


@pytest.mark.parametrize("cycle", [1, 2, 3, 5])
def test_examples_stay_in_their_group_in_every_epoch_and_chunk(variable, cycle, small_chunks):
    small_chunks(7)
    sampler = variable(31, 5, 3, cycle_length=cycle)
    assert sampler.steps_per_epoch == -(-7 // cycle) * cycle
    assert sampler.separation == cycle
    apart = np.arange(31)[:, None] - np.arange(sampler.num_steps)
    seen = np.concatenate([matrix(sampler, 1, epoch) for epoch in range(3)], axis=1)
    assert not seen[apart % cycle != 0].any()
    if variable is BallsAndBins:
        assert (seen.reshape(31, 3, -1).sum(axis=2) == 1).all()
