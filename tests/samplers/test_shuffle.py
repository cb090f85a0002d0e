"""Shuffling in buckets: every order of the examples, also across buckets, is equally likely."""

from __future__ import annotations

import itertools

from scipy import stats

from samplers import Shuffle

FALSE_ALARM = 1e-6


def test_every_order_of_examples_is_equally_likely_over_several_buckets(small_chunks):
    # Batches of one show the whole order. Two chunks and two buckets of about two examples each: if
    # chunks shared a key, or buckets did, or a bucket's order used the bits that filled it, the 24
    # orders would not be equally likely.
    small_chunks(2)
    sampler = Shuffle(4, 1)
    assert sampler.num_chunks == 2
    counts = {order: 0 for order in itertools.permutations(range(4))}
    for seed in range(2400):
        counts[tuple(sampler.plan(seed, 0).examples.tolist())] += 1
    assert stats.chisquare(list(counts.values())).pvalue > FALSE_ALARM


def test_shards_fill_their_buckets_independently(small_chunks):
    small_chunks(32)
    sampler = Shuffle(256, 8, num_shards=2)
    buckets = [sampler.bucket(seed=1, epoch=0, chunk=1, shard=shard).tolist() for shard in (0, 1)]
    assert buckets[0] != buckets[1]
