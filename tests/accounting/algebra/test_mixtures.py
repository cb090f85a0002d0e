"""Claims about composed mixtures: wide bounds say why, small rates are amplified, edges may err."""

from __future__ import annotations

from dataclasses import replace

import pytest

from accounting import (
    MultistageProfile,
    UnitsThenPoissonProfile,
    UserPoissonProfile,
)
from accounting.algebra.composition import compose_both
from accounting.algebra.mixtures import EDGE_DRIFT
from accounting.profile import EPSILON_TOLERANCE, wanted_width

LONG = pytest.mark.long

HARD = {
    "users": (UserPoissonProfile(0.5, 850, 0.0064, 2), 7.7e-8),
    "users, tiny rate and delta": (UserPoissonProfile(1.0, 1000, 1e-3, 2), 1e-20),
    "one stage": (MultistageProfile(0.6, 5000, (1,), (200,)), 1e-8),
    "one stage, tiny delta": (MultistageProfile(1.0, 1000, (1,), (100,)), 1e-300),
    "two stages": (MultistageProfile(1.0, 1000, (1, 5), (100, 10)), 1e-6),
    "units": (UnitsThenPoissonProfile(0.5, 1000, 0.1, 0.1), 1e-6),
    "no noise": (UserPoissonProfile(0.01, 10, 0.1, 5), 1e-6),
}


@pytest.mark.parametrize("case", HARD.values(), ids=HARD)
def test_an_interval_wider_than_asked_says_why(case):
    profile, delta = case
    bound = profile.epsilon(delta)
    wanted = wanted_width(EPSILON_TOLERANCE, bound.upper) * max(1.0, 0.1 * bound.lower)
    assert bound.note or bound.width <= wanted


@pytest.mark.parametrize(
    ("profile", "most"),
    [
        # About what Poisson sampling at the same rate costs, where others' gradients hide nothing.
        pytest.param(
            MultistageProfile(1.0, 10**7, (1,), (10**6,)), 0.25, id="a million", marks=LONG
        ),
        pytest.param(
            MultistageProfile(1.0, 10**3, (1,), (10**5,)), 0.25, id="one stage", marks=LONG
        ),
        pytest.param(MultistageProfile(2.0, 10**3, (1,), (10**4,)), 0.02, id="ten thousand"),
        pytest.param(UnitsThenPoissonProfile(1.0, 10**6, 1e-3, 1e-4), 0.02, id="units", marks=LONG),
        pytest.param(UserPoissonProfile(1.0, 10**6, 1e-6, 3), 0.02, id="users", marks=LONG),
    ],
)
def test_a_tiny_rate_is_amplified_however_many_steps(profile, most):
    bound = profile.epsilon(1e-6, tolerance=0.5)
    assert 0.0 < bound.lower <= bound.upper <= most


@pytest.mark.parametrize(
    "profile",
    [
        UserPoissonProfile(1.0, 10**5, 1e-3, 2),
        MultistageProfile(1.0, 10**5, (1,), (1000,)),
        UnitsThenPoissonProfile(1.0, 10**5, 0.1, 0.01),
    ],
    ids=["users", "one stage", "units"],
)
def test_errors_of_all_releases_edges_move_epsilon_outward(profile):
    (ratio,) = profile.ratios("upper", 0.5 * profile.deviation(), 1e-16)
    # Edges that are solved for are off the grid, and so are the means of cells by their masses.
    solved = not isinstance(profile, UnitsThenPoissonProfile)
    assert ratio.shift >= solved * (EDGE_DRIFT + 1.9 * ratio.drift) + 1e-14
    parts = compose_both(ratio, 10**5, epsilon=0.1)
    exact = compose_both(replace(ratio, shift=0.0), 10**5, epsilon=0.1)
    for part, other in zip(parts, exact, strict=True):
        moved = other.delta(0.1 - 0.999 * 10**5 * ratio.shift)
        assert part.delta(0.1) >= moved > other.delta(0.1)
