"""Claims about composition by tilted FFT: its certified errors hold the truth."""

import math

import pytest

from accounting import GaussianProfile
from accounting.composition import compose_both
from accounting.likelihood_ratio import LikelihoodRatio


@pytest.mark.parametrize("epsilon", [1.0, 5.0, 15.0, 25.0])
def test_gaussians_compose_to_the_gaussian_far_below_the_fft_s_own_error(epsilon):
    exact = GaussianProfile(3.0 / math.sqrt(30)).delta(epsilon)
    low, high = (
        compose_both(LikelihoodRatio.gaussian(3.0, 0.005, side), 30, epsilon=epsilon)
        for side in ("lower", "upper")
    )
    for below, above in zip(low, high, strict=True):
        assert below.delta(epsilon) <= exact.upper
        assert exact.lower <= above.delta(epsilon)
        assert above.delta(epsilon) - below.delta(epsilon) <= 0.03 * exact.upper
        assert above.floor(epsilon) <= 1e-6 * exact.upper


@pytest.mark.parametrize("side", ["lower", "upper"])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_it_agrees_with_direct_convolutions(side, count):
    one = LikelihoodRatio.subsampled_gaussian(0.8, 0.2, 0.01, side)
    direct = one
    for _ in range(count - 1):
        direct = direct.product(one)
    remove, _ = compose_both(one, count, epsilon=1.0)
    _, add = compose_both(one, count, epsilon=0.2)  # its largest loss is count log(1 / 0.8)
    assert remove.delta(1.0) == pytest.approx(direct.remove(1.0), rel=1e-6)
    assert add.delta(0.2) == pytest.approx(direct.add(0.2), rel=1e-5)


@pytest.mark.parametrize("tilted_for", [0.5, 8.0])
def test_a_tilt_for_another_epsilon_loosens_but_never_breaks_the_bound(tilted_for):
    for epsilon in (1.0, 4.0, 10.0):
        exact = GaussianProfile(1.0 / math.sqrt(3)).delta(epsilon)
        low, high = (
            compose_both(LikelihoodRatio.gaussian(1.0, 0.01, side), 3, epsilon=tilted_for)
            for side in ("lower", "upper")
        )
        assert low[0].delta(epsilon) <= exact.upper
        assert exact.lower <= high[0].delta(epsilon)


def test_a_point_must_be_named():
    with pytest.raises(ValueError, match="delta or epsilon"):
        compose_both(LikelihoodRatio.gaussian(1.0, 0.1, "upper"), 2)
