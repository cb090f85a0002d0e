"""The certified interval against a peer's: never above its upper bound, never below its lower one.

The constants were computed with PLD_accounting 2.0 from PyPI (V. Feldman, M. Shenfeld, Efficient
privacy loss accounting for subsampling and random allocation, arXiv:2602.17284):
gaussian_allocation_epsilon_configurable with ConvolutionMethod.GEOM, num_selected 1,
tail_truncation at its default 1e-12, loss_discretization as listed, and both bound types.
"""

import pytest

from accounting.profiles.balls_and_bins import BallsAndBinsProfile

LONG = pytest.mark.long
# sigma, T, E, delta, loss_discretization, lower (IS_DOMINATED), upper (DOMINATES)
PEER_INTERVALS = [
    pytest.param(1.0, 565, 1, 2.7e-8, 0.01, 0.40001712620286006, 0.4072043959041394, marks=LONG),
    pytest.param(0.5, 36_000, 1, 2.7e-8, 0.05, 2.036686783180733, 2.045916549701446, marks=LONG),
    (1.0, 3, 1, 1e-5, 0.01, 3.301706009564773, 3.3068550709028823),
    (0.5, 565, 1, 2.7e-8, 0.02, 6.057912566388523, 6.060101280660816),
    pytest.param(0.5, 4_492, 1, 2.7e-8, 0.05, 3.9990776976335214, 4.003983322578952, marks=LONG),
    pytest.param(2.0, 50, 1, 1e-6, 0.01, 0.29446007296655907, 0.3025081910307472, marks=LONG),
    pytest.param(1.0, 100, 5, 1e-5, 0.02, 1.1980835815154331, 1.2126822012714418, marks=LONG),
    (0.7, 1_000, 3, 1e-6, 0.05, 1.19524180511932, 1.2222416653351686),
    (0.4, 20, 2, 1e-5, 0.02, 14.689041997454035, 14.692847665343479),
]


@pytest.mark.parametrize(
    ("sigma", "bins", "epochs", "delta", "discretization", "lower", "upper"), PEER_INTERVALS
)
def test_certified_interval_of_a_tenth_of_the_width_lies_within_the_peers(
    sigma, bins, epochs, delta, discretization, lower, upper
):
    ours = BallsAndBinsProfile(sigma, bins, epochs).epsilon(delta, 0.1 * (upper - lower))
    assert lower <= ours.lower
    assert ours.upper <= upper
