"""Banded noise: its law, what it costs, where it is refused, and the error that it leaves."""

import functools
import json
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest

from accounting import epsilon
from dpsgd import BandedToeplitz, Independent, Mechanism
from dpsgd.core.gaussian import grid, standard_normal
from dpsgd.noise.correlated import banded_square_root, error_of_sums, rounded
from dpsgd.noise.keys import RootKey
from dpsgd.noise.registry import NOISES
from samplers import BallsAndBins, Deterministic, Poisson, Shuffle, UserPoisson

THREE = BandedToeplitz((1.0, 0.6, 0.3))
TWO = BandedToeplitz((1.0, -0.5))
KEY = jnp.asarray(RootKey.from_insecure_seed(0).noise_key(0))
normal = jax.jit(standard_normal, static_argnums=3)
LIKE = {"large": (70, 70), "scalar": (), "small": (3, 5)}


@functools.cache
def adding(noise):
    """The compiled program that adds the noise of a step to sums."""
    scales = Mechanism(Deterministic(64, 8, 8), 0.7, 3.0, noise=noise).scales()
    return jax.jit(lambda sums, state, step: noise.add(sums, state, KEY, step, scales))


def noises_of(noise, steps, first=0, total=0.0):
    """What is added to constant sums in some steps, in standard deviations, by leaf."""
    sums = {name: jnp.full(shape, total, jnp.float32) for name, shape in LIKE.items()}
    state, releases, states = noise.init(sums), [], []
    for step in range(first, first + steps):
        release, state = adding(noise)(sums, state, step)
        releases.append(jax.tree.map(lambda x: np.asarray(x, np.float64) * 8, release))
        states.append(state)
    return releases, states


# ----------------------------------------------------------------------------- what is computed


@pytest.mark.short("*noise of 2 bands")
@pytest.mark.parametrize("noise", [THREE, BandedToeplitz((1.0,)), TWO], ids=str)
@pytest.mark.parametrize("first", [pytest.param(0, marks=pytest.mark.long), 5])
def test_whitened_noise_is_the_fresh_noise_of_each_leaf(noise, first):
    releases, _ = noises_of(noise, 7, first)
    stddev = 0.7 * 3.0
    for number, (name, shape) in enumerate(LIKE.items()):
        n = np.stack([release[name].ravel() for release in releases]) / stddev
        z = [normal(KEY, t, number, shape).ravel() for t in range(first, first + 7)]
        # The grid has 2^18 cells to a standard deviation, and rounding moves by one at most.
        np.testing.assert_allclose(noise.whiten(n), np.stack(z), atol=8 * 2.0**-18)


@pytest.mark.parametrize("noise", [THREE, TWO], ids=str)
def test_noise_and_what_is_kept_of_it_depend_on_no_data(noise):
    one, kept = noises_of(noise, 6)
    other, also_kept = noises_of(noise, 6, total=1000.37)
    jax.tree.map(np.testing.assert_array_equal, kept, also_kept)
    for a, b in zip(one, other, strict=True):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(y - x, 1000.37, atol=3e-4), a, b)


@pytest.mark.parametrize(
    ("noise", "coarser"), [(THREE, 1), (BandedToeplitz((1.0, -0.99)), 4)], ids=str
)
def test_releases_lie_on_one_public_grid(noise, coarser):
    assert noise.spread / 3.2 <= coarser
    cell = float(grid(0.7 * 3.0)) * coarser
    for release in noises_of(noise, 4, total=0.1234567)[0]:
        for leaf in release.values():
            assert (leaf / cell == np.round(leaf / cell)).all()
            assert abs(leaf / cell).max() < 2**24
    assert (np.mod(release["large"] / (2 * cell), 1) == 0.5).any()  # and on no coarser one


# --------------------------------------------------------------------------------------- the law


def matrix_of(noise, steps):
    return noise.whiten(np.eye(steps))


@pytest.mark.parametrize(
    "noise",
    [
        THREE,
        BandedToeplitz((1.0, -0.9)),
        BandedToeplitz((1.0, 0.2, -0.4, 0.3)),
    ],
    ids=repr,
)
def test_column_norm_and_spread_match_the_matrix_and_the_ledger(noise):
    steps = 3000
    column = noise.whiten(np.eye(steps, 1))[:, 0]
    assert 1 - 2e-7 <= np.linalg.norm(column) <= 1
    last = np.linalg.solve(matrix_of(noise, 600).T, np.eye(600, 1, -599))
    assert np.linalg.norm(last) == pytest.approx(noise.spread, rel=1e-6)
    assert NOISES.read(json.loads(json.dumps(noise.record()))) == noise


@pytest.mark.parametrize("coefficients", [(3.0, 1.0), (1.0, 0.5, 0.375), (0.1, -0.03, 0.01), (7,)])
def test_columns_have_norm_one_at_most(coefficients):
    noise = BandedToeplitz(coefficients)
    c = [Fraction(x) for x in noise.coefficients]
    assert 1 - Fraction(1, 2**48) <= sum(x * x for x in c) <= 1
    np.testing.assert_allclose(
        noise.coefficients, np.array(coefficients) / np.linalg.norm(coefficients), rtol=1e-14
    )
    assert BandedToeplitz(noise.coefficients) == noise
    assert hash(BandedToeplitz(list(noise.coefficients))) == hash(noise)
    ratios, gain = rounded(tuple(noise.coefficients))  # what the program computes with
    assert 1 + sum(Fraction(float(r)) ** 2 for r in ratios) <= Fraction(float(gain)) ** 2
    assert gain == pytest.approx(1 / noise.coefficients[0], rel=2e-7)


@pytest.mark.parametrize(
    ("coefficients", "message"),
    [
        ((), "at least one"),
        ((0.0, 1.0), "the first > 0"),
        ((-1.0, 0.5), "the first > 0"),
        ((1.0, math.nan), "must be finite"),
        ((1.0, 1.0), "coefficients=.* grows beyond"),
        ((1.0, -1.0), "coefficients=.* grows beyond"),
        ((1.0, 0.0, 1.5), "coefficients=.* grows beyond"),
        ((1.0, -2.5, 1.0), "coefficients=.* grows beyond"),
        ((1.0, -0.99999), "beyond 32 times"),
    ],
)
def test_invalid_or_exploding_coefficients_are_refused(coefficients, message):
    with pytest.raises(ValueError, match=message) as error:
        BandedToeplitz(coefficients)
    assert "\n" not in str(error.value)


# --------------------------------------------------------------------------------- what it costs


DRAWN = {
    BallsAndBins(64, 8, 2): 1,
    BallsAndBins(64, 8, 2, assignment="fixed"): 1,
    BallsAndBins(64, 8, 2, cycle_length=2): 2,
    Poisson(64, 8, 2): 1,
    Poisson(64, 8, 2, cycle_length=2): 2,
    UserPoisson(64, 8, 2, max_contributions=2): 1,
    Shuffle(64, 8, 2): 1,
    Deterministic(4, 2, 3): 2,
}


@pytest.mark.parametrize(("sampler", "reach"), DRAWN.items(), ids=map(repr, DRAWN))
def test_noise_of_more_bands_than_the_separation_is_refused(sampler, reach):
    mechanism = Mechanism(sampler, 0.8, 1.0, noise=THREE)
    why = f"is correlated over 3 steps, more than the minimum separation {reach} .* a fixed order"
    for ask in (mechanism.privacy, lambda: mechanism.privacy_of([range(4)])):
        with pytest.raises(ValueError, match=why) as error:
            ask()
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "sampler",
    [
        BallsAndBins(64, 8, 2, cycle_length=3),
        BallsAndBins(64, 8, 2, assignment="fixed", cycle_length=4),
        Poisson(64, 8, 2, cycle_length=4),
        Deterministic(64, 8, 2),
        Shuffle(64, 8, 2, order="fixed"),
    ],
    ids=repr,
)
def test_noise_costs_as_independent_if_possible_steps_are_apart(sampler):
    correlated, independent = (
        Mechanism(sampler, 0.8, 1.0, noise=n) for n in (THREE, Independent())
    )
    one, other = (epsilon(m.privacy(), 1e-3) for m in (correlated, independent))
    assert one.upper == other.upper
    least = 0.0 if isinstance(sampler, Shuffle) else other.lower
    assert least * (1.0 - 1e-4) <= one.lower <= least
    segments = [range(5), range(3, 11)]
    one, other = (epsilon(m.privacy_of(segments), 1e-3) for m in (correlated, independent))
    assert one.upper == other.upper
    # Three bands: the columns of the last two steps of a range are cut off.
    uncut = epsilon(independent.privacy_of([range(3), range(3, 9)]), 1e-3).lower
    least = 0.0 if isinstance(sampler, Shuffle) else min(uncut, other.upper)
    assert least * (1.0 - 1e-4) <= one.lower <= least
    assert one.lower > 0.0 or isinstance(sampler, Shuffle)


@pytest.mark.parametrize("coefficients", [(1.0, 0.3, 0.2), (0.9, 0.1), (0.7, -0.5, 0.3)])
@pytest.mark.parametrize("at", [1e-6, 1.0])
def test_cost_interval_covers_the_programs_float32_columns(coefficients, at):
    """Of norm r just below 1: a known order costs one Gaussian release at sigma / r."""
    noise = BandedToeplitz(coefficients)
    ratios, gain = rounded(tuple(noise.coefficients))
    with mpmath.workdps(40):
        square = 1 + sum(mpmath.mpf(float(ratio)) ** 2 for ratio in ratios)
        sigma = 0.8 * float(gain) / mpmath.sqrt(square)
        a, b = (sign / (2 * sigma) - sigma * at for sign in (1, -1))
        exact = mpmath.ncdf(a) - mpmath.exp(at) * mpmath.ncdf(b)
        bound = Mechanism(Deterministic(64, 8, 1), 0.8, 1.0, noise=noise).privacy().delta(at)
        assert bound.lower <= exact <= bound.upper
        assert bound.upper <= bound.lower * (1 + 1e-6)


def test_columns_of_norm_below_one_are_priced_at_enough_noise():
    noise, sampler = BandedToeplitz((1.0, 0.3, 0.2)), Deterministic(64, 8, 1)
    for sigma in np.linspace(0.5, 2.0, 50):
        raised = noise.privacy(sampler, float(sigma)).below.noise_multiplier
        assert Fraction(raised) * Fraction(noise.least_norm()) >= Fraction(float(sigma))


# ---------------------------------------------------------------------------------- what it leaves


@pytest.mark.parametrize(
    ("steps", "bands"), [(100, 1), (100, 4), (400, 16), (1000, 64), (300, 256)]
)
def test_the_error_of_running_sums_is_about_that_of_the_matrices(steps, bands):
    """Prefix sums A of noise S^{-1} z: |A S^{-1}|_F / sqrt(N)."""
    inverse = np.linalg.inv(banded_square_root(bands).whiten(np.eye(steps)))
    exact = np.linalg.norm(np.cumsum(inverse, axis=0)) / np.sqrt(steps)
    assert exact * 0.97 <= error_of_sums(bands, steps) <= exact * 1.15


REFERENCE = {
    16: {1.0: (0.7089, 0.4001), 5.0: (0.4894, 0.3674)},
    64: {1.0: (0.8333, 0.2601), 5.0: (0.5398, 0.2241)},
    256: {1.0: (1.0190, 0.1757), 5.0: (0.6035, 0.1384)},
    1024: {1.0: (1.3226, 0.1322), 5.0: (0.6858, 0.0911)},
}
"""Sigma of cyclic balls-and-bins over 36,000 steps at delta 2.7e-8, by bands and epsilon, and the
error of banded square roots over that of independent noise, as published."""
ALONE = {1.0: 0.5520, 5.0: 0.4150}


@pytest.mark.parametrize("bands", REFERENCE)
def test_the_error_of_running_sums_is_that_of_the_reference(bands):
    for at, (sigma, error) in REFERENCE[bands].items():
        found = sigma / ALONE[at] * error_of_sums(bands, 36_000) / error_of_sums(1, 36_000)
        assert found == pytest.approx(error, rel=0.03)


@pytest.mark.parametrize("bands", [256, 1024])
def test_noise_of_cyclic_balls_and_bins_equals_the_reference(bands):
    noise, (sigma, _) = banded_square_root(bands), REFERENCE[bands][5.0]
    sampler = BallsAndBins(36_000 * 1024, 1024, cycle_length=bands, overflow="accumulate")
    assert epsilon(noise.privacy(sampler, sigma * 1.005), 2.7e-8).upper <= 5.0
    assert epsilon(noise.privacy(sampler, sigma * 0.995), 2.7e-8).lower >= 5.0


def test_square_roots_need_a_band():
    with pytest.raises(ValueError, match="bands must be at least 1, got 0"):
        banded_square_root(0)
