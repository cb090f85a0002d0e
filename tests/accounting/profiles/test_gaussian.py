"""Claims about the Gaussian mechanism's closed form."""

import mpmath
import pytest

from accounting import GaussianProfile

mpmath.mp.dps = 60


def exact_delta(sigma: float, epsilon: float) -> mpmath.mpf:
    s, e = mpmath.mpf(sigma), mpmath.mpf(epsilon)
    first = mpmath.ncdf(1 / (2 * s) - s * e)
    return first - mpmath.exp(e) * mpmath.ncdf(-1 / (2 * s) - s * e)


@pytest.mark.parametrize("sigma", [0.1, 0.5, 1.0, 3.0, 50.0, 1e4])
@pytest.mark.parametrize("epsilon", [0.0, 1e-6, 0.01, 1.0, 5.0, 20.0, 80.0])
def test_delta_brackets_the_exact_value_tightly(sigma, epsilon):
    exact = exact_delta(sigma, epsilon)
    bound = GaussianProfile(sigma).delta(epsilon)
    assert bound.lower <= exact <= bound.upper
    if exact > 1e-290:
        assert bound.upper - bound.lower <= 1e-6 * exact


@pytest.mark.parametrize("sigma", [0.1, 1.0, 20.0])
@pytest.mark.parametrize("delta", [0.3, 1e-5, 1e-20, 1e-100, 1e-280])
def test_epsilon_inverts_delta_however_small(sigma, delta):
    bound = GaussianProfile(sigma).epsilon(delta)
    assert bound.width <= 1e-8 * max(1.0, bound.upper)
    assert exact_delta(sigma, bound.upper) <= delta
    assert bound.lower == 0.0 or exact_delta(sigma, bound.lower) >= delta


def test_both_ends_allow_for_an_inexact_noise_multiplier():
    rough = GaussianProfile(2.0, relative_error=0.01)
    for ends in (
        lambda profile: profile.delta(0.5),
        lambda profile: profile.epsilon(1e-4),
        lambda profile: profile.with_gaussian_release(3.0).epsilon(1e-4),
    ):
        for truth in (1.98, 2.0, 2.02):
            assert ends(rough).lower <= ends(GaussianProfile(truth)).lower
            assert ends(rough).upper >= ends(GaussianProfile(truth)).upper
    with pytest.raises(ValueError, match="relative_error must be a finite number >= 0 and < 1"):
        GaussianProfile(2.0, relative_error=1.0)
