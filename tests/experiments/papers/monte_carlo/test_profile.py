"""The estimators' profile brackets quadrature, and the certified interval lies within it."""

import math

import pytest

from accounting import BallsAndBinsProfile
from experiments.papers.monte_carlo import MonteCarloProfile, geometric_ranks

DIRECTIONS = ["remove", "add"]


@pytest.mark.parametrize(
    ("sigma", "bins"), [(0.5, 2), pytest.param(0.8, 3, marks=pytest.mark.long)]
)
def test_profile_brackets_quadrature_in_delta_and_in_epsilon(quadrature, sigma, bins):
    profile = MonteCarloProfile(sigma, bins, num_samples=50_000, beta=1e-9)
    assert profile.delta(1.0).confidence == 1 - 1e-9
    estimated = dict(zip((0.3, 1.0, 2.0), profile.estimates([0.3, 1.0, 2.0]), strict=True))
    for epsilon in (0.3, 1.0, 2.0):
        truth = max(quadrature(epsilon, sigma, bins, direction) for direction in DIRECTIONS)
        bound = profile.delta(epsilon)
        assert bound.lower <= truth <= bound.upper < 1.3 * truth
        assert estimated[epsilon][1] == bound
        assert estimated[epsilon][0].value == pytest.approx(truth, rel=0.05)
        inverse = profile.epsilon(truth)
        assert inverse.lower <= epsilon + 1e-6
        assert epsilon <= inverse.upper < epsilon + 0.2


@pytest.mark.parametrize("changed", [{"sampled": "losses"}, {"inequality": "bennett"}])
def test_every_estimator_of_one_delta_holds(quadrature, changed):
    profile = MonteCarloProfile(0.5, 2, num_samples=20_000, beta=1e-9, **changed)
    truth = max(quadrature(1.0, 0.5, 2, direction) for direction in DIRECTIONS)
    assert truth <= profile.delta(1.0).upper < 1.3 * truth
    assert 1.0 <= profile.epsilon(truth).upper < 1.2


def test_profile_of_fixed_bins_is_one_epoch_at_the_averaged_noise():
    fixed = MonteCarloProfile(1.0, 10, epochs=4, assignment="fixed", num_samples=10_000)
    single = MonteCarloProfile(0.5, 10, num_samples=10_000)
    assert fixed.delta(1.0) == single.delta(1.0)
    assert fixed.epsilon(1e-2) == single.epsilon(1e-2)


def test_profile_reports_infinity_where_samples_are_too_few():
    profile = MonteCarloProfile(1.0, 565, num_samples=100, ranks=geometric_ranks(565))
    bound = profile.epsilon(1e-8)
    assert bound.upper == math.inf
    assert 0.0 < bound.lower < 1.0


# --- the certified interval

SHORT = [(2, (0.3, 8.0)), (2, (1.0, 0.1)), (30, (0.5, 2.0)), (36_000, (0.3, 2.0))]


POINTS = [(0.3, 0.1), (0.3, 2.0), (0.3, 8.0), (0.5, 0.1), (0.5, 2.0), (1.0, 0.1), (2.0, 0.02)]


@pytest.mark.parametrize(
    ("bins", "sigma", "epsilon"),
    [
        pytest.param(bins, *point, marks=() if (bins, point) in SHORT else pytest.mark.long)
        for bins in (2, 30, 36_000)
        for point in POINTS
    ],
)
def test_certified_interval_lies_between_the_event_bound_and_the_confidence_bound(
    bins, sigma, epsilon
):
    certified = BallsAndBinsProfile(sigma, bins).delta(epsilon)
    ranks = geometric_ranks(bins, 1.05) if bins > 100 else None
    sampled = MonteCarloProfile(sigma, bins, num_samples=5_000, beta=1e-9, ranks=ranks)
    bound = sampled.delta(epsilon)
    assert bound.lower <= certified.upper
    # The confidence bound fails with probability 1e-9; then it would lie below the certified one.
    assert certified.lower <= bound.upper
    assert certified.upper <= bound.upper * (1 + 2e-3) + 1e-3 * certified.lower


def test_too_few_samples_are_known_without_drawing_them(monkeypatch):
    monkeypatch.setattr("experiments.papers.monte_carlo.profile.sample_losses", None)
    profile = MonteCarloProfile(0.5, 4_492, num_samples=100_000)
    bound = profile.epsilon(2.7e-8)
    assert bound.upper == math.inf
    assert bound.note
    assert bound.lower == pytest.approx(4.0, rel=1e-3)
