"""A Gaussian release composes with any profile as the product of their pairs, from both sides."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest

from accounting import BallsAndBinsProfile, Bound, GaussianProfile, PrivacyProfile
from accounting.profile import UpperEnd
from accounting.releases import EnvelopeProfile, with_gaussian_release

DELTA = 1e-5


@dataclass(frozen=True)
class Opaque:
    """A profile of which nothing is known but its answers."""

    profile: PrivacyProfile
    confidence: float = 1.0

    def delta(self, epsilon, tolerance=1e-3):
        found = self.profile.delta(epsilon, tolerance)
        return Bound(found.lower, found.upper, self.confidence)

    def epsilon(self, delta, tolerance=1e-3):
        found = self.profile.epsilon(delta, tolerance)
        return Bound(found.lower, found.upper, self.confidence)


@pytest.mark.short("0.5-3.0-*", "2.0-20.0-*", "3.0-1000000.0-*")
@pytest.mark.parametrize("delta", [1e-2, 1e-5, 1e-12])
@pytest.mark.parametrize(("sigma", "release"), [(2.0, 20.0), (0.5, 3.0), (2.0, 0.4), (3.0, 1e6)])
def test_two_gaussian_releases_cost_as_one_of_less_noise(sigma, release, delta):
    both = GaussianProfile(1.0 / math.hypot(1.0 / sigma, 1.0 / release))
    closed = with_gaussian_release(GaussianProfile(sigma), release)
    truth, found = both.epsilon(delta), closed.epsilon(delta)
    assert found.lower == pytest.approx(truth.lower, rel=1e-9)
    assert found.upper == pytest.approx(truth.upper, rel=1e-9)
    parts = [GaussianProfile(sigma), GaussianProfile(release)]
    basic = with_gaussian_release(Opaque(parts[0]), release)
    bound = basic.epsilon(delta)
    assert bound.lower <= truth.upper <= bound.upper
    assert bound.upper == pytest.approx(sum(p.epsilon(delta / 2).upper for p in parts), rel=1e-6)
    for epsilon in (0.0, 0.5 * truth.lower, truth.upper, bound.upper):
        upper = basic.delta(epsilon).upper
        assert both.delta(epsilon).lower <= upper
        assert upper <= (1.0 + 1e-6) * sum(p.delta(epsilon / 2).upper for p in parts)


def test_of_an_upper_end_the_product_s_alone_is_proved():
    product = with_gaussian_release(UpperEnd(BallsAndBinsProfile(1.0, 10)), 2.0)
    whole = with_gaussian_release(BallsAndBinsProfile(1.0, 10), 2.0)
    for found, known in (
        (product.epsilon(DELTA), whole.epsilon(DELTA)),
        (product.delta(0.5), whole.delta(0.5)),
    ):
        assert (found.lower, found.upper) == (0.0, known.upper)
        assert found.note


def test_an_estimate_is_not_composed():
    product = with_gaussian_release(Opaque(GaussianProfile(1.0), 0.99), 2.0)
    for question, at in ((product.epsilon, DELTA), (product.delta, 1.0)):
        with pytest.raises(ValueError, match="must be proved"):
            question(at)


@pytest.mark.parametrize("profiles", [(2.0, 1.0), (1.0, 2.0)])
def test_an_envelope_adds_the_release_to_each_profile(profiles):
    envelope = EnvelopeProfile(tuple(map(GaussianProfile, profiles)))
    both = GaussianProfile(0.5**0.5).delta(1.0).lower
    assert with_gaussian_release(envelope, 1.0).delta(1.0).upper >= both * (1.0 - 1e-12)
