"""Balls-and-bins from a shuffled order: every assignment is equally likely."""

import numpy as np
import pytest
from scipy import stats

from experiments.papers.shuffled_bins import plan_after_shuffle
from samplers import BallsAndBins

FALSE_ALARM = 1e-6


def test_binomial_sizes_after_a_shuffle_have_the_law_of_balls_and_bins(monkeypatch):
    monkeypatch.setattr("samplers.base.CHUNK", 3)
    sampler, found = BallsAndBins(5, 2, epochs=2), np.zeros(3**5, dtype=np.int64)
    for seed in range(2_500):
        plan = plan_after_shuffle(sampler, seed, 1)
        assert sorted(plan.examples) == list(range(5))
        assert all(np.all(np.diff(plan.members(step)) > 0) for step in range(3))
        steps = np.repeat(np.arange(3), np.diff(plan.starts))
        found[np.sum(steps * 3**plan.examples)] += 1
    # Each assignment of five examples to three bins is as likely.
    assert stats.chisquare(found).pvalue > FALSE_ALARM
    again = BallsAndBins(5, 3, 2, assignment="fixed")
    for one, other in zip(*(plan_after_shuffle(again, 7, epoch) for epoch in (0, 1)), strict=True):
        np.testing.assert_array_equal(one, other)
    with pytest.raises(ValueError, match="cycle_length must be 1"):
        plan_after_shuffle(BallsAndBins(6, 3, cycle_length=2), 0, 0)
