"""Claims about inverting moments: every error bound holds the truth, and is small."""

import math

import mpmath
import numpy as np
import pytest

from accounting import GaussianProfile, PoissonProfile
from accounting.algebra.inversion import Inversion, Inverted, _Add
from accounting.algebra.moments import Line, NotInvertibleError, Releases
from accounting.algebra.refinement import Point
from accounting.algebra.tilts import Tilts


def exact_moment(sigma, rate, z):
    """E[((1 - q) + q e^Y)^z] to 25 digits."""
    with mpmath.workdps(25):
        sigma, rate = mpmath.mpf(sigma), mpmath.mpf(rate)

        def term(u):
            return mpmath.npdf(u) * (1 - rate + rate * mpmath.exp((u - 0.5 / sigma) / sigma)) ** z

        return mpmath.quad(term, [-30, -8, -3, 0, 3, 6, 10, 20, 40])


@pytest.mark.parametrize(
    ("sigma", "rate", "z"),
    [
        pytest.param(1.0, 0.01, 7.6 + 29j, marks=pytest.mark.long),
        (0.502, 0.0064, 1.9 + 7j),
        (5.0, 0.1, -16 + 20j),
        (1.0, 0.9, -3 + 1j),
        (0.7, 0.05, 0.5 + 9j),
    ],
)
def test_a_moment_is_within_its_error(sigma, rate, z):
    line = Line(Releases(sigma, rate, 1), z.real, Releases(sigma, rate, 1).height(z.real), 45.0)
    found, error = line.log_moment(np.array([z]))
    exact = complex(mpmath.log(exact_moment(sigma, rate, mpmath.mpc(z))))
    assert abs(np.exp(found[0] - exact) - 1.0) <= error[0] <= 1e-11
    assert line.log_decay(z.imag) >= exact.real


LOSSES = pytest.mark.parametrize(
    ("sigma", "rate", "count", "loss"),
    [(1.0, 0.01, 1000, 1.8), (1.0, 0.01, 1000, -0.5), (5.0, 0.1, 10_000, 10.0), (1.0, 0.1, 5, 1.0)],
)


@LOSSES
def test_a_coarse_sum_s_interval_holds_the_sharp_value(sigma, rate, count, loss):
    """Aliases, the sum's end and the rule's error are large at these accuracies."""
    releases = Releases(sigma, rate, count)
    tilts = Tilts(releases)
    tilt = tilts.for_loss(loss)
    low, high = Inversion(releases, loss, tilt, tilts, 37.0).value(loss)
    assert high - low <= 1e-9 * high
    for accuracy in (2.0, 4.0, 7.0, 12.0):
        coarse = Inversion(releases, loss, tilt, tilts, accuracy)
        for moved in (loss, 0.97 * loss):
            wide_low, wide_high = coarse.value(moved)
            sharp_low, sharp_high = Inversion(releases, moved, tilt, tilts, 37.0).value(moved)
            assert wide_low <= sharp_high
            assert sharp_low <= wide_high


@LOSSES
@pytest.mark.parametrize("accuracy", [6.0, 12.0])
def test_what_a_sum_leaves_out_at_its_end_is_bounded_and_counted(
    sigma, rate, count, loss, accuracy
):
    releases = Releases(sigma, rate, count)
    tilts = Tilts(releases)
    sums = Inversion(releases, loss, tilts.for_loss(loss), tilts, accuracy)
    z = sums._z[-1] + 1j * sums._step * np.arange(1, 4 * sums._z.size)
    power = np.exp(count * sums._line.log_moment(z)[0])
    if sums._deviation:
        power -= np.exp(0.5 * sums._deviation**2 * z * (z - 1.0))
    rest = np.sum(sums._step / math.pi * power * np.exp(-(z - 1.0) * loss) / (z * (z - 1.0)))
    bound = math.exp(sums._log_end - (sums.tilt - 1.0) * loss)
    assert abs(rest) <= bound
    # As the moduli fall in Im z, no bound can be less than the last one's share.
    last = float(sums._line.log_moment(sums._z[-1:])[0].real[0])
    decay = math.exp(count * last - (sums.tilt - 1.0) * loss) / (math.pi * sums._z[-1].imag)
    assert 1e-4 * bound <= decay <= bound
    low, high = sums.value(loss)
    assert 0.0 < low < high
    assert high - low >= 2.0 * bound


@pytest.mark.short("*-0.0", "0.6-*", "2.0-*")
@pytest.mark.parametrize("epsilon", [0.0, 1e-9, 1e-3, 0.1, 0.6125, 1.0])
@pytest.mark.parametrize(
    ("sigma", "rate", "steps"),
    [
        (0.5, 1 / 36_000, 36_000),
        (0.45, 1 / 36_000, 36_000),
        (0.6, 1 / 36_000, 36_000),
        (0.8, 0.01, 1000),
        (0.3, 0.2, 50),
        (2.0, 0.5, 100),
    ],
)
def test_delta_is_sharp_down_to_epsilon_0_and_equals_grids(sigma, rate, steps, epsilon):
    """Near 0 the saddle point is between the poles, or on the other side of them."""
    profile = PoissonProfile(sigma, rate, steps)
    bound = profile.delta(epsilon)
    assert not bound.note
    assert bound.width <= 1e-3 * bound.lower
    grids = profile._grids()
    step = 0.05 if sigma < 0.7 else 0.2 * grids.deviation
    resolution, point = step / min(1.0, grids.deviation), Point(1.0, epsilon)
    assert grids.lower(resolution, point)(epsilon) <= bound.upper
    assert bound.lower <= grids.upper(resolution, point)(epsilon)


@pytest.mark.parametrize(("sigma", "rate", "count"), [(0.5, 0.3, 300), (0.3, 0.2, 50)])
def test_sum_near_0_is_short_and_sharp_only_at_the_saddle_point(sigma, rate, count):
    """On a line right of 1 the first is 22 % wide."""
    bound = Inverted(Releases(sigma, rate, count), 20.0).delta(0.0)
    assert 0.0 < bound.lower <= bound.upper <= bound.lower * (1.0 + 1e-6)


@pytest.mark.parametrize("loss", [1.0, -1.0])
def test_a_line_gives_values_on_the_other_side_of_0(loss):
    """Where nothing is subtracted the sum is that of a call, or of a put."""
    releases = Releases(2.0, 0.1, 1000)
    tilts = Tilts(releases)
    tilt = 4.0 if loss > 0.0 else -2.0
    sums = Inversion(releases, loss, tilt, tilts, 37.0)
    assert not sums._deviation
    for other in (-0.2 * loss, -0.02 * loss):
        low, high = sums.value(other)
        sharp_low, sharp_high = Inversion(
            releases, other, tilts.for_loss(other), tilts, 37.0
        ).value(other)
        assert low <= sharp_high
        assert sharp_low <= high <= low * (1.0 + 1e-6)


@pytest.mark.parametrize(
    ("sigma", "rate", "steps", "delta"),
    [
        (0.3, 0.1, 10**4, 1e-6),
        (0.3, 0.01, 10**5, 1e-6),
        (0.3, 1e-3, 10**6, 1e-6),
        (0.5, 0.1, 10**5, 1e-6),
        (0.5, 0.01, 10**6, 1e-6),
        (0.7, 0.1, 10**6, 1e-6),
        (1.0, 0.1, 10**6, 1e-6),
        (0.502, 0.0064, 8583, 7.7e-8),
        (8e5, 0.01, 1000, 1e-9),
        (41.0, 0.1, 1000, 1e-8),
        (2.1, 5e-4, 5391, 2e-9),
    ],
)
def test_hard_costs_have_many_digits(sigma, rate, steps, delta):
    bound = PoissonProfile(sigma, rate, steps).epsilon(delta)
    assert not bound.note
    assert bound.width <= 1e-6 * bound.upper


def test_adding_at_a_huge_epsilon_has_a_positive_bound():
    """o(-epsilon) <= e^-epsilon underflows there, and e^epsilon is no float."""
    releases, epsilon = Releases(3.22, 0.9999991, 50_342), 3635.0
    tilts = Tilts(releases)
    low, high = _Add(releases, epsilon, tilts, 37.0).value(epsilon)
    # Where the rate is almost 1, both directions are almost the Gaussian's.
    exact = GaussianProfile(3.22 / math.sqrt(50_342)).delta(epsilon).upper
    assert 0.0 < low <= high <= low * (1.0 + 1e-5)
    assert 0.3 * exact <= high <= exact


@pytest.mark.parametrize("epsilon", [100.0, 130.0, 300.0])
def test_what_underflows_is_no_lower_bound_and_no_zero(epsilon):
    bound = Inverted(Releases(1.0, 0.01, 1000), 37.0).delta(epsilon)
    assert bound.lower == 0.0 < bound.upper <= 1e-290


def test_a_line_whose_results_underflow_is_refused():
    releases = Releases(1.0, 0.01, 1000)
    tilts = Tilts(releases)
    with pytest.raises(NotInvertibleError, match="range of floats"):
        Inversion(releases, 130.0, tilts.for_loss(130.0), tilts, 37.0)
