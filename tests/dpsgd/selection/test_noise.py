"""The noise of the candidates is the least at which the whole meets its target."""

import functools

import pytest

from accounting import (
    GaussianProfile,
    PoissonProfile,
    SelectionProfile,
    TrialCount,
    calibrate,
    epsilon,
)
from accounting.releases import EnvelopeProfile
from dpsgd.selection import noise
from samplers import BallsAndBins

COUNT = TrialCount(10.0, 0.0)
DELTA = 1e-5


def steps(count):
    """The profile of so many Gaussian releases, as a function of their noise."""
    return lambda sigma: GaussianProfile(sigma / count**0.5)


def sampled(sigma):
    """Of another shape."""
    return PoissonProfile(sigma, 0.1, 10)


def profiles_of(privacies, sigmas):
    return tuple(p(s) for p, s in zip(privacies, sigmas, strict=True))


def whole_of(privacies, sigmas):
    return SelectionProfile(EnvelopeProfile(profiles_of(privacies, sigmas)), COUNT)


@pytest.mark.parametrize(
    ("third", "target"),
    [
        (steps(9), 1.0),
        pytest.param(sampled, 1.0, marks=pytest.mark.long),
        pytest.param(sampled, 8.0, marks=pytest.mark.long),
        pytest.param(BallsAndBins(1000, 100, 2).privacy, 1.0, marks=pytest.mark.long),
        pytest.param(BallsAndBins(1000, 100, 2).privacy, 8.0, marks=pytest.mark.long),
    ],
)
def test_the_whole_costs_at_most_the_target_and_hardly_less(third, target):
    privacies = [steps(1), steps(4), third]
    profiles = functools.partial(profiles_of, privacies)
    sigmas = noise.for_epsilon(privacies, COUNT, epsilon=target, delta=DELTA, profiles=profiles)
    whole = epsilon(whole_of(privacies, sigmas), DELTA).upper
    assert 0.995 * target <= whole <= target
    assert sigmas[1] == pytest.approx(2 * sigmas[0], rel=2e-3)  # one profile, at another scale
    for i in range(3):  # each has the least noise that will do
        less = [s * (0.98 if i == j else 1.0) for j, s in enumerate(sigmas)]
        assert epsilon(whole_of(privacies, less), DELTA).upper > whole


@pytest.mark.long  # of the real rows' size
def test_the_default_law_costs_at_most_1_47_trials():
    sampler = BallsAndBins(num_examples=88_000, batch_size=1024, epochs=10)
    sigma = calibrate(sampler.privacy, epsilon=2.999, delta=1 / 88_000)
    whole = whole_of([sampler.privacy], [sigma])
    assert epsilon(whole, 1 / 88_000).upper <= 1.4675 * 2.999 <= 4.402


def test_noise_is_raised_for_trials_dearer_than_the_search():
    dearer = lambda sigmas: [GaussianProfile(sigma / 1.004) for sigma in sigmas]  # noqa: E731
    (sigma,) = noise.for_epsilon([steps(1)], COUNT, epsilon=2.0, delta=DELTA, profiles=dearer)
    assert 1.99 <= epsilon(whole_of([steps(1)], [sigma / 1.004]), DELTA).upper <= 2.0
