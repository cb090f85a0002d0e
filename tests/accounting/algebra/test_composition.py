"""Claims about composition by tilted FFT: its certified errors hold the truth."""

import dataclasses
import math
from fractions import Fraction

import numpy as np
import pytest
from scipy import fft

from accounting import GaussianProfile, PoissonProfile
from accounting.algebra.composition import composed
from accounting.algebra.likelihood_ratio import ROUNDING
from accounting.algebra.lower import LowerLoss, LowerRatio
from accounting.algebra.refinement import Point
from accounting.algebra.upper import UpperLoss, UpperRatio

SIDES = LowerRatio, UpperRatio


@pytest.mark.parametrize("epsilon", [1.0, 5.0, 15.0, 25.0])
def test_gaussians_compose_exactly_far_below_the_fft_error(epsilon):
    exact = GaussianProfile(3.0 / math.sqrt(30)).delta(epsilon)
    low, high = (composed([(kind.gaussian(3.0, 0.005), 30)], Point(1.0, epsilon)) for kind in SIDES)
    for below, above in zip(low, high, strict=True):
        assert below.delta(epsilon) <= exact.upper
        assert exact.lower <= above.delta(epsilon)
        assert above.delta(epsilon) - below.delta(epsilon) <= 0.03 * exact.upper


def convolved(ratios, epsilon):
    """Both directions' deltas of releases, outcome by outcome."""
    loss, p, q = np.zeros(1), np.ones(1), np.ones(1)
    for ratio in ratios:
        loss = np.add.outer(loss, ratio.log_values).ravel()
        p, q = (np.outer(x, y).ravel() for x, y in ((p, ratio.p), (q, ratio.q)))
    shares = -np.expm1(np.minimum(epsilon - np.stack([loss, -loss]), 0.0))
    return shares[0] @ p, shares[1] @ q


@pytest.mark.short("1.0-*", "0.2-*-Upper*")
@pytest.mark.parametrize("kind", SIDES)
@pytest.mark.parametrize("counts", [(1, 0), (2, 0), (2, 1)])
@pytest.mark.parametrize("epsilon", [0.2, 1.0])
def test_composition_agrees_with_all_outcomes_one_by_one(kind, counts, epsilon):
    laws = [kind.subsampled_gaussian(0.8, 0.2, 0.05, 1e-9), kind.gaussian(2.0, 0.05, 1e-9)]
    parts = [(law, count) for law, count in zip(laws, counts, strict=True) if count]
    remove, add = composed(parts, Point(1.0, epsilon))
    exact = convolved([law for law, count in parts for _ in range(count)], epsilon)
    assert remove.delta(epsilon) == pytest.approx(exact[0], rel=2e-3, abs=1e-8)
    assert add.delta(epsilon) == pytest.approx(exact[1], rel=2e-3, abs=1e-8)
    with pytest.raises(ValueError, match="of equal step"):
        composed([(laws[0], 2), (kind.gaussian(2.0, 0.02), 1)], Point(1.0, epsilon))


def upper_law(masses, drift=0.0, base=-1.0):
    return UpperLoss(step=0.25, base=base, masses=masses, drift=drift)


def lower_law(masses, drift=0.0):
    return LowerLoss(step=0.25, base=-1.0, masses=masses, partners=masses.copy(), drift=drift)


def composed_loss(law, count, tilt):
    """Composes equal releases between two that release nothing, and have no errors."""
    ones = {name: np.ones(1) for name in ("masses", "partners") if hasattr(law, name)}
    nothing = dataclasses.replace(law, base=0.0, drift=0.0, shift=0.0, **ones)
    return type(law).compose([(nothing, 1), (law, count), (nothing, 1)], tilt)


def exact_power(masses, count):
    power = [Fraction(1)]
    for _ in range(count):
        new = [Fraction(0)] * (len(power) + len(masses) - 1)
        for i, a in enumerate(power):
            for j, b in enumerate(masses):
                new[i + j] += a * Fraction(b)
        power = new
    return power


def window(total, count, exact):
    """The exact power's entries in the window of a composed loss."""
    first = round((total.loss[0] - count * -1.0) / 0.25)
    entries = exact[first : first + total.loss.size]
    return entries + [Fraction(0)] * (total.loss.size - len(entries))


@pytest.mark.parametrize("size", [2**4, 2**9, 2**16])
def test_a_transform_of_unit_impulses_is_well_within_its_bound(size):
    """By linearity, errors of impulses bound those of every input, but for the last additions."""
    bound = 8 * ROUNDING * math.log2(size)
    frequency = np.arange(size // 2 + 1)
    circle = np.longdouble("6.28318530717958647692528676655900577")
    worst = 0.0
    for place in (1, 3, size // 2 - 1, size - 1, size // 3):
        turn = (frequency * place % size) * circle / size
        exact = np.cos(turn) - 1j * np.sin(turn)
        impulse = np.zeros(size)
        impulse[place] = 1.0
        worst = max(worst, float(np.abs(fft.rfft(impulse) - exact).max()))
        back = fft.irfft(exact.astype(np.complex128), size)
        worst = max(worst, float(np.abs(back - impulse).max()))
    assert 0.0 < worst <= 0.25 * bound


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("seed", range(3))
def test_masses_far_below_the_transform_s_own_error_are_bounded(count, seed):
    masses = 10.0 ** np.random.default_rng(seed).uniform(-25.0, 0.0, 12)
    masses /= masses.sum()
    exact = exact_power(masses, count)
    for tilt in (1e-3, 5.0):
        above = composed_loss(upper_law(masses), count, tilt)
        below = composed_loss(lower_law(masses), count, tilt)
        for high, value in zip(above.masses, window(above, count, exact), strict=True):
            assert value <= Fraction(float(high)) * (1 + Fraction(2 * above.drift))
        pairs = zip(below.masses, below.partners, window(below, count, exact), strict=True)
        for low, partner, value in pairs:
            assert Fraction(float(low)) * (1 - Fraction(2 * below.drift)) <= value
            # The offsets' mean is 0 here: partners are masses.
            assert value <= Fraction(float(partner)) * (1 + Fraction(2 * below.drift))


@pytest.mark.parametrize("tilt", [1e-3, 3.0])
def test_rare_losses_of_many_releases_are_sharp(tilt):
    """The atom of no loss has all of the mass but 3e-5: far more than what errors may hide."""
    count, rare = 30_000, 1e-9
    masses = np.array([1.0 - rare, *[0.0] * 6, rare])
    above = composed_loss(upper_law(masses), count, tilt)
    below = composed_loss(lower_law(masses), count, tilt)
    for k in range(3):
        chances = math.comb(count, k), Fraction(rare) ** k, Fraction(masses[0]) ** (count - k)
        exact = math.prod(map(Fraction, chances))
        at = int(np.argmin(np.abs(above.loss - (0.25 * 7 * k - count))))
        high, low = float(above.masses[at]), float(below.masses[at])
        assert Fraction(low) * (1 - Fraction(below.drift)) <= exact
        assert exact <= Fraction(high) * (1 + Fraction(above.drift))
        assert high <= low * (1 + 1e-6)


def test_roundings_of_the_tilt_s_exponents_are_part_of_the_drift():
    """Here they are some 60,000, and undone again."""
    count, start, tilt = 4, 20_000, 12.0
    few = np.random.default_rng(5).uniform(0.5, 1.0, 12)
    masses = np.concatenate([np.zeros(start), few])
    exact = exact_power(few, count)
    above = composed_loss(upper_law(masses), count, tilt)
    below = composed_loss(lower_law(masses), count, tilt)
    # Where the tilted masses are: there the transform's error is the smallest.
    for k in range(len(exact) - 5, len(exact)):
        at = np.flatnonzero(np.abs(above.loss - (0.25 * (count * start + k) - count)) < 0.1)
        high, low = float(above.masses[at[0]]), float(below.masses[at[0]])
        assert exact[k] <= Fraction(high) * (1 + Fraction(2 * above.drift))
        assert Fraction(low) * (1 - Fraction(2 * below.drift)) <= exact[k]
        assert high <= low * (1 + 1e-7)


@pytest.mark.parametrize("wrong", ["masses", "losses"])
def test_errors_of_one_release_s_law_are_carried_through(wrong):
    true = np.full(16, 1.0 / 16.0)
    count, epsilon, error = 3, 0.2, 1e-3
    exact = exact_power(true, count)
    delta = sum(
        float(value) * -math.expm1(epsilon - (-count + 0.25 * k))
        for k, value in enumerate(exact)
        if -count + 0.25 * k > epsilon
    )
    if wrong == "masses":
        less = upper_law(true * (1.0 - error), 1.1 * error)
        more = lower_law(true * (1.0 + error), 1.1 * error)
    else:
        less = dataclasses.replace(upper_law(true), base=-1.0 - error, shift=1.1 * error)
        more = dataclasses.replace(lower_law(true), base=-1.0 + error, shift=1.1 * error)
    assert composed_loss(more, count, 2.0).delta(epsilon) <= delta
    assert delta <= composed_loss(less, count, 2.0).delta(epsilon)


def test_mass_above_the_window_is_counted():
    masses, count = np.zeros(256), 2000
    masses[[0, 255]] = 0.5
    above = composed_loss(upper_law(masses, base=-32.0), count, 1e-9)
    last = above.loss[-1] + 1.0
    steps = [-32.0 * count + 0.25 * 255 * k for k in range(count + 1)]
    truth = sum(
        Fraction(math.comb(count, k), 2**count) * Fraction(-math.expm1(last - loss))
        for k, loss in enumerate(steps)
        if loss > last
    )
    assert truth > Fraction(1e-100)
    assert truth <= Fraction(above.delta(float(last)))


@pytest.mark.parametrize(
    ("sigma", "rate", "count", "epsilon"),
    [(0.3, 0.1, 10**4, 3660.0), (0.5, 0.01, 10**6, 1650.0), (0.502, 0.0064, 8583, 30.0)],
)
def test_many_releases_at_little_noise_have_two_proved_ends(sigma, rate, count, epsilon):
    """Offsets of a contraction add up to thousands of e-folds in the sum of their indices."""
    truth = PoissonProfile(sigma, rate, count).delta(epsilon)
    assert truth.width <= 1e-5 * truth.upper
    step = 0.2 * min(1.0, rate * math.sqrt(math.expm1(1.0 / sigma**2)))
    low, high = (
        composed(
            [(kind.subsampled_gaussian(sigma, rate, step, 1e-20), count)], Point(1.0, epsilon)
        )[0]
        for kind in SIDES
    )
    assert low.delta(epsilon) <= truth.upper
    assert truth.lower <= high.delta(epsilon)
    assert high.delta(epsilon) <= 30.0 * low.delta(epsilon)
