"""Claims about composed mixtures: small rates are amplified, and edges may err."""

from __future__ import annotations

from dataclasses import replace

import pytest

from accounting import MultistageProfile, UnitsThenPoissonProfile, UserPoissonProfile
from accounting.algebra.composition import composed
from accounting.algebra.mixtures import EDGE_DRIFT
from accounting.algebra.refinement import Point


# About what Poisson sampling at the same rate costs, where others' gradients hide nothing.
@pytest.mark.short("ten thousand")
@pytest.mark.parametrize(
    ("profile", "most"),
    [
        pytest.param(MultistageProfile(1.0, 10**7, (1,), (10**6,)), 0.25, id="a million"),
        pytest.param(MultistageProfile(1.0, 10**3, (1,), (10**5,)), 0.25, id="one stage"),
        pytest.param(MultistageProfile(2.0, 10**3, (1,), (10**4,)), 0.02, id="ten thousand"),
        pytest.param(UnitsThenPoissonProfile(1.0, 10**6, 1e-3, 1e-4), 0.02, id="units"),
        pytest.param(UserPoissonProfile(1.0, 10**6, 1e-6, 3), 0.02, id="users"),
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
    ratio = profile.upper_ratio(0.5 * profile.deviation(), 1e-16)
    # Edges that are solved for are off the grid, and so are the means of cells by their masses.
    solved = not isinstance(profile, UnitsThenPoissonProfile)
    assert ratio.shift >= solved * (EDGE_DRIFT + 1.9 * ratio.drift) + 1e-14
    parts = composed([(ratio, 10**5)], Point(1.0, 0.1))
    exact = composed([(replace(ratio, shift=0.0), 10**5)], Point(1.0, 0.1))
    for part, other in zip(parts, exact, strict=True):
        moved = other.delta(0.1 - 0.999 * 10**5 * ratio.shift)
        assert part.delta(0.1) >= moved > other.delta(0.1)
