"""The estimator that integrates the example's own coordinate: about the truth, and finite."""

import numpy as np
import pytest

from accounting import BallsAndBinsProfile
from experiments.papers.monte_carlo import MonteCarloProfile


@pytest.mark.parametrize(
    ("sigma", "bins", "epsilon"), [(0.5, 4_492, 4.0), (0.35, 1_000, 3.0), (0.7, 2, 1.0)]
)
@pytest.mark.parametrize("inequality", ["bennett", "chernoff-hoeffding"])
def test_its_bounds_hold_the_certified_delta_and_are_near_it(sigma, bins, epsilon, inequality):
    certified = BallsAndBinsProfile(sigma, bins).delta(epsilon)
    profile = MonteCarloProfile(
        sigma, bins, num_samples=4_000, beta=1e-9, sampled="other bins", inequality=inequality
    )
    [(mean, bound)] = profile.estimates([epsilon])
    assert bound.confidence == 1 - 1e-9
    assert bound.lower <= certified.upper
    assert certified.lower <= bound.upper < 1.8 * certified.upper
    assert mean.value == pytest.approx(certified.upper, rel=0.1)


def test_epsilon_is_finite_at_deltas_far_below_the_inverse_of_the_number_of_samples():
    bound = MonteCarloProfile(0.5, 4_492, num_samples=20_000, sampled="other bins").epsilon(2.7e-8)
    certified = BallsAndBinsProfile(0.5, 4_492).epsilon(2.7e-8)
    assert certified.lower <= bound.upper < certified.upper + 0.2
    assert bound.lower <= certified.upper


def test_upper_ends_fall_in_epsilon_and_one_bin_has_nothing_to_sample(quadrature):
    profile = MonteCarloProfile(1.0, 1, num_samples=10, sampled="other bins")
    uppers = [bound.upper for _, bound in profile.estimates([0.2, 0.5, 1.0, 2.0])]
    assert np.all(np.diff(uppers) < 0)
    assert quadrature(1.0, 1.0, 1, "remove") <= profile.delta(1.0).upper


def test_other_bins_of_several_epochs_are_refused_and_those_of_a_fixed_assignment_are_one_epoch():
    with pytest.raises(ValueError, match="for one epoch, got 2"):
        MonteCarloProfile(1.0, 10, epochs=2, sampled="other bins")
    kept = MonteCarloProfile(1.0, 10, 4, "fixed", num_samples=100, sampled="other bins")
    single = MonteCarloProfile(0.5, 10, num_samples=100, sampled="other bins")
    assert kept.delta(1.0) == single.delta(1.0)
