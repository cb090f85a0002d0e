"""Buffered noise: its law, what it costs in a known order, where it is refused, what audits see."""

import itertools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from accounting import GaussianProfile, epsilon
from dpsgd import BandedToeplitz, BufferedToeplitz, Independent, Mechanism, RootKey
from dpsgd.noise.gaussian import standard_normal
from dpsgd.noise.recursion import empty_buffers, next_buffered_noise
from dpsgd.noise.registry import noise_from_record, noise_record
from dpsgd.noise.sensitivity import squared_sensitivity
from samplers import BallsAndBins, Deterministic, Poisson, Shuffle, UserPoisson

TWO = BufferedToeplitz(weights=(0.4, 0.2), decays=(0.5, 0.96))
KEY = jnp.asarray(RootKey.from_insecure_seed(0).noise_key(0))


def matrix_of(noise, steps):
    return noise.whiten(np.eye(steps))


# ----------------------------------------------------------------------------------------- the law


@pytest.mark.parametrize(
    "noise",
    [TWO, BufferedToeplitz((0.3,), (0.0,)), BufferedToeplitz((0.8, 0.1, 0.01), (0.1, 0.9, 0.999))],
    ids=str,
)
def test_column_inverse_norm_and_spread_are_those_of_the_matrix(noise):
    steps = 3000
    column = noise.column(steps)
    np.testing.assert_allclose(noise.whiten(np.eye(steps, 1))[:, 0], column, rtol=1e-10)
    exponentials = zip(noise.weights, noise.decays, strict=True)
    powers = [w * np.array(d) ** np.arange(9) for w, d in exponentials]
    np.testing.assert_allclose(column[1:10] / column[0], sum(powers), rtol=1e-12)
    inverse = noise.inverse(steps)
    product = np.convolve(column, inverse)[:steps]
    np.testing.assert_allclose(product, np.eye(1, steps)[0], atol=1e-12)
    assert 1 - 2e-7 <= np.linalg.norm(noise.column(20_000)) <= 1
    assert np.linalg.norm(noise.inverse(20_000)) == pytest.approx(noise.spread, rel=1e-6)


def test_the_numbers_of_the_law_are_those_of_the_program_and_exact_in_a_ledger():
    noise = BufferedToeplitz((1 / 3, 0.1), (0.7, 1 / 7))
    for value in (*noise.weights, *noise.decays, noise.gain):
        assert float(np.float32(value)) == value
    assert noise_from_record(json.loads(json.dumps(noise_record(noise)))) == noise
    assert BufferedToeplitz(list(noise.weights), list(noise.decays)) == noise
    assert noise.kept == 2


@pytest.mark.parametrize(
    ("weights", "decays", "message"),
    [
        ((), (), "at least one of each"),
        ((0.5,), (0.5, 0.6), "1 weights and 2 decays"),
        ((0.5, -0.1), (0.5, 0.6), r"weights must be > 0 and finite, number 2 is -0.1"),
        ((math.inf,), (0.5,), "weights must be > 0 and finite"),
        ((math.nan,), (0.5,), "weights must be > 0 and finite"),
        ((0.5,), (1.0,), "decays must be >= 0 and below 1"),
        ((0.5,), (-0.1,), "decays must be >= 0 and below 1"),
        ((0.5,), (1 - 1e-9,), "decays must be >= 0 and below 1, number 1 is 1.0"),  # in 32 bits
        ((1.6,), (0.5,), "grows from step to step"),
    ],
)
def test_buffers_that_make_no_noise_or_explode_are_refused_in_one_line(weights, decays, message):
    with pytest.raises(ValueError, match=message) as error:
        BufferedToeplitz(weights, decays)
    assert "\n" not in str(error.value)


@pytest.mark.long
def test_slow_buffers_lose_no_more_in_32_bits_than_is_said():
    noise = BufferedToeplitz((0.5, 0.1, 0.01), (0.3, 0.9, 1 - 2**-12))
    like = jax.ShapeDtypeStruct((1000,), jnp.float32)
    exponentials = tuple(zip(noise.weights, noise.decays, strict=True))

    def step(buffers, t):
        n, buffers = next_buffered_noise(like, buffers, KEY, t, noise.gain, exponentials)
        return buffers, (n, standard_normal(KEY, t, 0, like.shape))

    _, found = jax.lax.scan(step, empty_buffers(like, 3), jnp.arange(2000))
    n, z = (np.asarray(of_steps, np.float64) for of_steps in found)
    error = noise.whiten(n) - z
    assert np.sqrt(np.mean(error[-500:] ** 2)) < 2e-7
    assert np.abs(error).max() < 5e-6


# -------------------------------------------------------------------------------- what it costs

T, E = 3, 3


def longest(matrix, steps):
    """Largest |sum_k u_k m_k|^2 over signs u_k, for columns of one example's steps."""
    columns = matrix[:, list(steps)]
    signs = itertools.product((-1.0, 1.0), repeat=len(steps))
    return max(float(np.sum((columns @ np.array(u)) ** 2)) for u in signs)


@pytest.mark.parametrize("end", [T * E, T * E - 1, T * E - 2, T, 2], ids="{} steps".format)
@pytest.mark.parametrize(
    "noise",
    [TWO, BufferedToeplitz((0.1, 0.2), (0.3, 0.999)), BandedToeplitz((1, 0, 0, 0.1, 0.6, 0.2))],
    ids=str,
)
def test_no_pattern_and_no_signs_of_gradients_are_longer_than_the_sensitivity(noise, end):
    matrix, square = matrix_of(noise, end), squared_sensitivity(noise.column(end), T)
    found = []
    for first in range(min(T, end)):
        steps = range(first, end, T)
        for count in range(1, len(steps) + 1):  # also those that stay away at times
            found += [longest(matrix, some) for some in itertools.combinations(steps, count)]
    assert max(found) == pytest.approx(square, rel=1e-6)
    assert max(found) == pytest.approx(longest(matrix, range(0, end, T)))


def test_were_coefficients_negative_other_patterns_would_be_longer_and_they_are_refused():
    noise = BandedToeplitz((1.0, 0.0, 0.0, -0.5))
    matrix = matrix_of(noise, T * E)
    alike = np.sum(matrix[:, ::T].sum(axis=1) ** 2)
    assert longest(matrix, range(0, T * E, T)) > 1.5 * alike
    assert noise.column(T * E) is None
    with pytest.raises(ValueError, match="must not be negative"):
        squared_sensitivity(matrix[:, 0], T)
    mechanism = Mechanism(Deterministic(6, 2, E), 1.0, 1.0, noise=noise)
    with pytest.raises(ValueError, match=r"up to 3, .* or without negative coefficients") as error:
        mechanism.privacy()
    assert "\n" not in str(error.value)


def cost(noise, sampler, sigma=1.0):
    return Mechanism(sampler, sigma, 1.0, noise=noise).privacy()


@pytest.mark.parametrize("noise", [TWO, BandedToeplitz((1, 0.7, 0.5, 0.4, 0.3))], ids=str)
def test_a_known_order_costs_one_release_of_the_sensitivity(noise):
    length = np.linalg.norm(matrix_of(noise, T * E)[:, ::T].sum(axis=1))
    wanted = epsilon(GaussianProfile(1 / length), 1e-3)
    found = epsilon(cost(noise, Deterministic(6, 2, E)), 1e-3)
    assert found.lower == pytest.approx(wanted.lower, rel=1e-6)
    assert wanted.upper * (1 - 1e-6) < found.upper <= wanted.upper * (1 + 1e-6)
    shuffled = epsilon(cost(noise, Shuffle(6, 2, E, order="fixed")), 1e-3)
    assert (shuffled.lower, shuffled.upper) == (0.0, found.upper)  # the order may be revealed
    independent = epsilon(cost(Independent(), Deterministic(6, 2, E)), 1e-3)
    assert found.upper > 1.05 * independent.upper  # columns overlap


def test_one_epoch_costs_no_more_than_under_independent_noise():
    found, alone = (epsilon(cost(n, Deterministic(40, 2)), 1e-3) for n in (TWO, Independent()))
    assert 0.95 * alone.upper < found.upper <= alone.upper  # decays outlast 20 steps


def test_segments_begin_without_buffers_and_their_squares_add_up():
    sampler = Deterministic(6, 2, E)
    mechanism = Mechanism(sampler, 1.0, 1.0, noise=TWO)
    whole = epsilon(mechanism.privacy(), 1e-3)
    as_one = epsilon(mechanism.privacy_of([range(T * E)]), 1e-3)
    assert as_one == whole  # all steps in one stretch are the run
    # 5 steps from anywhere, and 4 others: as blocks of a matrix, whatever the patterns in each.
    blocks = [matrix_of(TWO, n) for n in (5, 4)]
    square = sum(max(np.sum(block[:, r::T].sum(axis=1) ** 2) for r in range(T)) for block in blocks)
    found = epsilon(mechanism.privacy_of([range(1, 6), range(4, 8)]), 1e-3)
    wanted = epsilon(GaussianProfile(1 / math.sqrt(square)), 1e-3)
    assert found.upper == pytest.approx(wanted.upper, rel=1e-9)
    part = epsilon(mechanism.privacy_of([range(4)]), 1e-3)
    assert part.upper < whole.upper


@pytest.mark.parametrize(
    "sampler",
    [
        BallsAndBins(64, 8, 2),
        BallsAndBins(64, 8, 2, cycle_length=8),
        BallsAndBins(64, 8, 2, assignment="fixed"),
        Poisson(64, 8, 2, cycle_length=4),
        UserPoisson(64, 8, 2, max_contributions=2),
        Shuffle(64, 8, 2),
    ],
    ids=repr,
)
def test_samplers_that_draw_refuse_buffered_noise_and_say_why(sampler):
    mechanism = Mechanism(sampler, 0.8, 1.0, noise=TWO)
    for ask in (mechanism.privacy, lambda: mechanism.privacy_of([range(4)])):
        with pytest.raises(
            ValueError, match=r"2 buffers is correlated over all steps, .* a fixed order"
        ) as error:
            ask()
        assert "\n" not in str(error.value)


GRADIENTS = {
    "constant": lambda past: np.ones(len(past)),
    "of the last row's sign": lambda past: (
        np.sign(past[:, -1]) if past.size else np.ones(len(past))
    ),
    "large after large rows": lambda past: np.where(past.sum(axis=1) > 0, 1.0, 0.2),
    "small once it shows": lambda past: np.where(past.max(axis=1, initial=-9) > 1.2, 0.1, 1.0),
}


@pytest.mark.parametrize("what", GRADIENTS)
@pytest.mark.parametrize("first", [0, 2])
def test_the_simulated_loss_is_never_above_the_cost_whatever_gradients_look_at(what, first):
    steps, sigma, eps, draws = T * E, 2.0, 0.4, 60_000
    rng, matrix, own = np.random.default_rng(3), matrix_of(TWO, steps), range(first, steps, T)
    certified = cost(TWO, Deterministic(6, 2, E), sigma).delta(eps)
    found = []
    for present in (True, False):
        rows, log = np.zeros((draws, steps)), np.zeros(draws)
        mean = np.zeros((draws, steps))
        for t in range(steps):
            if t in own:
                mean += GRADIENTS[what](rows[:, :t])[:, None] * matrix[:, t]
            rows[:, t] = sigma * rng.normal(size=draws) + (mean[:, t] if present else 0.0)
            log += (rows[:, t] * mean[:, t] - mean[:, t] ** 2 / 2) / sigma**2
        lost = np.maximum(0.0, -np.expm1(eps + (-log if present else log)))
        # Of bounded draws: beyond 5.4 standard errors once in 10^7 times.
        found.append((lost.mean(), 5.4 * lost.std() / math.sqrt(draws)))
    assert max(mean - error for mean, error in found) <= certified.upper
    if (what, first) == ("constant", 0):
        assert max(mean + error for mean, error in found) >= certified.lower
        assert certified.lower > 0.02
