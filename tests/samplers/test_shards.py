"""Shards: parts of the examples whose part of every batch is drawn, cut and padded by itself."""

from __future__ import annotations

import math

import numpy as np
import pytest

from samplers import BallsAndBins, Deterministic, Poisson, Shuffle
from samplers.shards import Shards

SHARDS = (1, 2, 4, 7)


@pytest.mark.parametrize("n", [1, 2, 7, 12, 31])
def test_shards_partition_examples_and_turns_order_them_all(n):
    for count in range(1, min(n, 9) + 1):
        shards, every = Shards(n, count), np.arange(n)
        assert [i for shard in range(count) for i in shards.examples(shard)] == every.tolist()
        assert np.ptp([len(shards.examples(shard)) for shard in range(count)]) <= 1
        of = [shard for shard in range(count) for _ in shards.examples(shard)]
        assert shards.shard_of(every).tolist() == of
        in_turn = shards.in_turn(every)
        assert sorted(in_turn) == every.tolist()
        for b in range(1, n + 1):
            steps = -(-n // b)
            for shard in range(count):
                parts = np.diff(shards.batch_starts(shard, b, steps))
                own = in_turn[np.array(shards.examples(shard))] // b
                np.testing.assert_array_equal(parts, np.bincount(own, minlength=steps))
                assert parts.max() <= -(-b // count)
                assert (parts[: (n // count) * count // b] >= b // count).all()


@pytest.mark.parametrize("kind", [Deterministic, Shuffle])
@pytest.mark.parametrize("shards", SHARDS)
def test_orders_take_b_examples_in_turn(kind, shards):
    sampler = kind(100, 12, 2, num_shards=shards)
    sizes = np.diff(sampler.plan(3, 0).starts)
    np.testing.assert_array_equal(sizes, [12] * 8 + [4])
    np.testing.assert_array_equal(sizes, sampler.row_law().batch_sizes)
    assert sampler.padded_batch_size == shards * math.ceil(12 / shards)


def test_shards_are_shuffled_each_by_itself():
    # Of 64 rows in one batch of each shard and step: equal orders would be equal for all.
    sampler = Shuffle(6400, 64, num_shards=2)
    one, other = (sampler.shard_plan(1, 0, shard) for shard in range(2))
    together = [np.intersect1d(one.members(t), other.members(t)).size for t in range(100)]
    assert 0 < sum(together) < 100  # 32 are expected


def test_shard_of_a_data_set_beyond_32_bits_is_drawn_in_32_bits(monkeypatch):
    # Shard 1 of 2 begins beyond 2^31: of the last chunk alone, as the whole would take a minute.
    n = 2 * (2**31 - 1)
    for kind in (Poisson, BallsAndBins, Deterministic):
        sampler = kind(n, 2**20, num_shards=2)
        chunk = sampler.num_chunks - 1
        examples, steps = sampler.participations(5, 0, chunk)
        assert (examples.dtype, steps.dtype) == (np.int64, np.int32)
        assert examples.min() >= chunk * 65_536
        assert examples.max() < n
        with monkeypatch.context() as patch:
            last = range(n - 65_534, n)
            patch.setattr(kind, "shard_range", lambda self, shard, last=last: last)
            plan = sampler.shard_plan(5, 0, 1)
        assert plan.examples.dtype == np.int32
        order = np.lexsort((examples, steps))
        np.testing.assert_array_equal(plan.examples, examples[order] - last.start)


def test_shards_fill_their_buckets_independently(small_chunks):
    small_chunks(32)
    sampler = Shuffle(256, 8, num_shards=2)
    buckets = [sampler.bucket(seed=1, epoch=0, chunk=1, shard=shard).tolist() for shard in (0, 1)]
    assert buckets[0] != buckets[1]


def test_known_orders_keep_participations_an_epoch_apart():
    assert Deterministic(100, 10, 3).separation == 10
    fixed = Shuffle(100, 10, 3, order="fixed")
    assert fixed.separation == 10
    assert Shuffle(100, 10, 3).separation == 1
    assert fixed.permutes_sums  # no lower end is proved under correlated noise
    assert not Deterministic(100, 10, 3).permutes_sums
