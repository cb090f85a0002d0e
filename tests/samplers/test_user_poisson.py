"""Examples of which a user has several are sampled at the cost for users."""

from __future__ import annotations

import math

import pytest

from accounting import UserPoissonProfile, epsilon
from samplers import Poisson, UserPoisson


def test_examples_may_be_sampled_at_the_cost_of_several_a_user():
    sampler = UserPoisson(1000, 20, 2, max_contributions=5, max_batch_size=1000)
    assert sampler.unit == "user"
    assert sampler.privacy(2.0) == UserPoissonProfile(2.0, 100, 0.02, 5)
    one = UserPoisson(1000, 20, 2, max_contributions=1).privacy(2.0)
    assert epsilon(one, 1e-5).upper == pytest.approx(
        epsilon(Poisson(1000, 20, 2).privacy(2.0), 1e-5).upper, abs=2e-3
    )
    # The default cap on batches is part of the cost, as for Poisson.
    capped = UserPoisson(1000, 20, 2, max_contributions=5)
    assert capped.padded_batch_size == Poisson(1000, 20, 2).padded_batch_size < 1000
    assert math.isfinite(epsilon(capped.privacy(2.0), 1e-5).upper)
    assert capped.plan(1, 0).examples.tolist() == Poisson(1000, 20, 2).plan(1, 0).examples.tolist()
