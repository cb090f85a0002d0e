"""Epsilons over a grid of 490: bracketed, monotone, closed where they must be, and below Renyi's.

The accountants are independent: ours by likelihood ratios on a grid, dp_accounting's by Renyi
divergences, whose epsilon is a looser upper bound on the same truth.
"""

import functools
import itertools

import pytest

from accounting import (
    BallsAndBinsProfile,
    GaussianProfile,
    PoissonProfile,
    ShuffleProfile,
    epsilon,
)

SIGMAS = [0.5, 0.6, 0.8, 1.0, 1.5, 2.5, 5.0]
DELTAS = [1e-4, 1e-8]
TOLERANCE = 1e-3
ROUNDING = 1e-13
"""Of a delta of dp_accounting's, by its fast Fourier transform, whose errors it does not bound. At
(0.5, 1e-3, 100, 1e-8) its epsilon is 4.4e-7 below that of its own masses composed by a transform
that is tilted towards large losses, as they differ by some 1e-14 in delta."""
# Where each kind is asked: its axes besides sigma and delta, each in the order of falling cost.
AXES = {
    "deterministic": {"epochs": [10, 3, 1]},
    "shuffle": {"steps": [100, 10, 1], "epochs": [3, 1]},
    "poisson": {"sampling_prob": [1.0, 0.1, 0.01, 1e-3], "steps": [1000, 100, 10, 1]},
    "balls-and-bins": {"bins": [1, 2, 10, 100, 1000], "epochs": [3, 1]},
}
SOME_AXES = {
    "deterministic": AXES["deterministic"],
    "shuffle": {"steps": [10, 1], "epochs": [3, 1]},
    "poisson": {"sampling_prob": [1.0, 0.1, 1e-3], "steps": [100, 1]},
    "balls-and-bins": {"bins": [1, 10], "epochs": [3, 1]},
}
PROFILES = {
    "deterministic": lambda sigma, epochs: GaussianProfile(sigma / epochs**0.5),
    "shuffle": lambda sigma, steps, epochs: ShuffleProfile(sigma, steps, epochs),
    "poisson": lambda sigma, q, steps: PoissonProfile(sigma, q, steps),
    "balls-and-bins": lambda sigma, bins, epochs: BallsAndBinsProfile(sigma, bins, epochs),
}
pytestmark = pytest.mark.timeout(1800)  # the cost of a grid falls on the first test

EVERY_KIND = pytest.mark.parametrize("kind", AXES)
SOME = [0.5, 0.8], SOME_AXES
ALL = SIGMAS, AXES
EVERY_POINT = pytest.mark.parametrize(
    "points", [SOME, pytest.param(ALL, marks=pytest.mark.long)], ids=["some", "all"]
)


@functools.cache
def epsilon_of(kind, sigma, values, delta):
    return epsilon(PROFILES[kind](sigma, *values), delta)


def epsilons(kind, points):
    """(sigma, values of the axes ..., delta) -> certified interval of epsilon."""
    sigmas, axes = points
    return {
        (sigma, *values, delta): epsilon_of(kind, sigma, tuple(values), delta)
        for sigma, *values in itertools.product(sigmas, *axes[kind].values())
        for delta in DELTAS
    }


@EVERY_POINT
@EVERY_KIND
def test_intervals_are_ordered_and_as_narrow_as_promised(kind, points):
    for where, bound in epsilons(kind, points).items():
        assert bound.confidence == 1.0, where
        assert 0 <= bound.lower <= bound.upper < float("inf"), where
        if kind != "shuffle":  # whose truth is not known more closely
            assert bound.width <= TOLERANCE, where


@EVERY_POINT
@EVERY_KIND
def test_cost_falls_in_noise_and_delta_rises_in_participation(kind, points):
    found = epsilons(kind, points)
    axes = {"sigma": points[0], **points[1][kind], "delta": DELTAS[::-1]}
    for at, (name, axis) in enumerate(axes.items()):
        if (kind, name) == ("shuffle", "steps"):
            continue  # not ordered: more batches need not cost less
        for where, bound in found.items():
            for cheaper in axis[axis.index(where[at]) + 1 :][:1]:
                other = found[(*where[:at], cheaper, *where[at + 1 :])]
                assert other.lower <= bound.upper, (name, where, cheaper)
                assert other.upper <= bound.upper + TOLERANCE, (name, where, cheaper)


@EVERY_POINT
@pytest.mark.parametrize(
    ("kind", "gaussian"),
    [
        ("poisson", lambda sigma, q, steps: q == 1 and sigma / steps**0.5),
        ("balls-and-bins", lambda sigma, bins, epochs: bins == 1 and sigma / epochs**0.5),
        ("shuffle", lambda sigma, steps, epochs: steps == 1 and sigma / epochs**0.5),
    ],
    ids=["poisson", "balls-and-bins", "shuffle"],
)
def test_without_a_choice_every_cost_is_the_closed_form(kind, gaussian, points):
    compared = 0
    for (sigma, *values, delta), bound in epsilons(kind, points).items():
        if stddev := gaussian(sigma, *values):
            exact = GaussianProfile(stddev).epsilon(delta)
            assert bound.lower <= exact.upper
            assert exact.lower <= bound.upper
            assert bound.upper - exact.upper <= TOLERANCE
            compared += 1
    assert compared


@EVERY_POINT
def test_no_cost_exceeds_that_of_renyi_divergences(points):
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
    from dp_accounting.rdp import RdpAccountant

    orders = [*range(2, 65), 80, 100, 128, 256, 512]

    @functools.cache
    def theirs(sigma, q, steps):
        accountant = RdpAccountant(orders)
        accountant.compose(PoissonSampledDpEvent(q, GaussianDpEvent(sigma)), steps)
        return accountant

    for (sigma, q, steps, delta), bound in epsilons("poisson", points).items():
        assert bound.upper <= theirs(sigma, q, steps).get_epsilon(delta)
    for (sigma, epochs, delta), bound in epsilons("deterministic", points).items():
        assert bound.upper <= theirs(sigma, 1.0, epochs).get_epsilon(delta)


@EVERY_POINT
def test_bins_cost_at_most_shuffling_and_that_a_known_order(points):
    kinds = ("deterministic", "balls-and-bins", "shuffle")
    known, bins, shuffled = (epsilons(kind, points) for kind in kinds)
    for (sigma, count, epochs, delta), bound in bins.items():
        assert bound.lower <= known[sigma, epochs, delta].upper
        if (sigma, count, epochs, delta) in shuffled:
            shuffle = shuffled[sigma, count, epochs, delta]
            assert bound.lower <= shuffle.upper
            assert shuffle.upper <= known[sigma, epochs, delta].upper + TOLERANCE


@pytest.mark.long
def test_two_accountants_agree_over_the_grid():
    from dp_accounting.pld import privacy_loss_distribution as pld

    for (sigma, q, steps, delta), bound in epsilons("poisson", ALL).items():
        one = pld.from_gaussian_mechanism(
            sigma, sampling_prob=q, value_discretization_interval=min(1e-3, 0.1 * q)
        )
        peer = one.self_compose(steps)  # from above, and pessimistic, but for what rounding does
        assert bound.lower <= peer.get_epsilon_for_delta(delta - ROUNDING)
        assert bound.upper <= peer.get_epsilon_for_delta(delta) + TOLERANCE
