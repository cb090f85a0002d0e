"""Shuffling in buckets: every order of the examples, also across buckets, is equally likely."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy import stats

from samplers import BallsAndBins, Shuffle

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


def test_binomial_sizes_after_a_shuffle_have_the_law_of_balls_and_bins(small_chunks):
    small_chunks(3)
    sampler, found = BallsAndBins(5, 2, epochs=2), np.zeros(3**5, dtype=np.int64)
    for seed in range(2_500):
        plan = sampler.plan_after_shuffle(seed, 1)
        assert sorted(plan.examples) == list(range(5))
        assert all(np.all(np.diff(plan.members(step)) > 0) for step in range(3))
        steps = np.repeat(np.arange(3), np.diff(plan.starts))
        found[np.sum(steps * 3**plan.examples)] += 1
    # Each assignment of five examples to three bins is as likely.
    assert stats.chisquare(found).pvalue > FALSE_ALARM
    again = BallsAndBins(5, 3, 2, assignment="fixed")
    for one, other in zip(*(again.plan_after_shuffle(7, epoch) for epoch in (0, 1)), strict=True):
        np.testing.assert_array_equal(one, other)
    with pytest.raises(ValueError, match="cycle_length must be 1"):
        BallsAndBins(6, 3, cycle_length=2).plan_after_shuffle(0, 0)
