"""Cyclic sampling: examples of a public group share the steps that they may take part in."""

from __future__ import annotations

import numpy as np
import pytest

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


def test_known_orders_keep_participations_an_epoch_apart():
    assert Deterministic(100, 10, 3).separation == 10
    fixed = Shuffle(100, 10, 3, order="fixed")
    assert fixed.separation == 10
    assert Shuffle(100, 10, 3).separation == 1
    assert fixed.permutes_sums  # no lower end is proved under correlated noise
    assert not Deterministic(100, 10, 3).permutes_sums
