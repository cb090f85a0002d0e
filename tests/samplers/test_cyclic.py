"""Cyclic sampling: examples of a public group share the steps that they may take part in."""

from __future__ import annotations

import numpy as np
import pytest

from accounting import PoissonProfile
from samplers import BallsAndBins, Deterministic, Poisson, Shuffle
from tests.samplers.conftest import matrix

KINDS = pytest.mark.parametrize("kind", [BallsAndBins, Poisson])


@KINDS
@pytest.mark.parametrize("cycle", [1, 2, 3, 5])
def test_examples_stay_in_their_group_in_every_epoch_and_chunk(kind, cycle, small_chunks):
    small_chunks(7)
    sampler = kind(31, 5, 3, cycle_length=cycle)
    assert sampler.steps_per_epoch == -(-7 // cycle) * cycle
    assert sampler.separation == cycle
    apart = np.arange(31)[:, None] - np.arange(sampler.num_steps)
    seen = np.concatenate([matrix(sampler, 1, epoch) for epoch in range(3)], axis=1)
    assert not seen[apart % cycle != 0].any()
    if kind is BallsAndBins:
        assert (seen.reshape(31, 3, -1).sum(axis=2) == 1).all()


@pytest.mark.parametrize(
    ("segments", "most"),
    [
        ([range(8)], 2),
        ([range(3, 4)], 1),
        ([range(3, 8)], 2),
        ([range(1, 4), range(5, 9)], 2),
        ([range(1, 2), range(2, 3)], 2),  # of two runs, in which a unit lies in other groups
        ([range(0, 5), range(1, 6)], 4),
    ],
)
def test_cyclic_poisson_segment_counts_the_largest_groups_steps(segments, most):
    sampler = Poisson(4000, 40, cycle_length=4, overflow="accumulate")
    of_groups = [[sum(t % 4 == g for t in steps) for g in range(4)] for steps in segments]
    assert most == sum(map(max, of_groups))
    price = sampler.privacy_of(1.0, segments).delta(0.5)
    assert price.upper == PoissonProfile(1.0, 0.04, most).delta(0.5).upper
    assert price.lower > 0.0


@KINDS
def test_means_of_batches_are_close_to_the_public_divisor(kind):
    sampler = kind(31, 5, cycle_length=3)
    groups = np.bincount(np.arange(31) % 3)
    apart = np.abs(groups * sampler.sampling_prob - sampler.expected_batch_size)
    assert apart.max() <= sampler.sampling_prob
    assert sampler.expected_batch_size == pytest.approx(5 if kind is Poisson else 31 / 9, rel=1e-15)


def test_known_orders_keep_participations_an_epoch_apart():
    assert Deterministic(100, 10, 3).separation == 10
    fixed = Shuffle(100, 10, 3, order="fixed")
    assert fixed.separation == 10
    assert Shuffle(100, 10, 3).separation == 1
    assert fixed.permutes_sums  # no lower end is proved under correlated noise
    assert not Deterministic(100, 10, 3).permutes_sums
