"""A release of pure epsilon composes with any profile as randomised response."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from accounting import GaussianProfile, PrivacyProfile
from experiments.papers.pure_release import WithPureReleaseProfile

DELTA = 1e-5


@pytest.mark.parametrize("eps", [0.9, 0.1])  # above epsilon_0 and below it
def test_a_pure_release_is_composed_as_randomised_response(eps):
    # Both orders of the exact product of the Gaussian pair with randomised response.
    sigma, pure = 1.5, 0.4
    right = 1 / (1 + math.exp(-pure))
    z = np.linspace(-20, 20, 400_001)
    p, q = stats.norm.pdf(z, 1, sigma), stats.norm.pdf(z, 0, sigma)
    exact = sum(
        np.maximum(a * p - math.exp(eps) * b * q, 0).sum() * (z[1] - z[0])
        for a, b in ((right, 1 - right), (1 - right, right))
    )
    composed = WithPureReleaseProfile(GaussianProfile(sigma), pure)
    assert isinstance(composed, PrivacyProfile)
    assert composed.delta(eps).upper == pytest.approx(exact, rel=1e-6)


def test_a_pure_release_costs_at_most_its_epsilon():
    inner = GaussianProfile(1.0)
    composed = WithPureReleaseProfile(inner, 0.25)
    bound = composed.epsilon(DELTA)
    assert bound.upper == inner.epsilon(DELTA).upper + 0.25
    assert bound.lower == inner.epsilon(DELTA).lower
    assert composed.delta(bound.upper).upper <= DELTA * (1 + 1e-9)
    assert WithPureReleaseProfile(inner, 0.0).delta(1.0).upper == pytest.approx(
        inner.delta(1.0).upper
    )
    with pytest.raises(ValueError, match="epsilon must be >= 0"):
        WithPureReleaseProfile(inner, -1.0)
