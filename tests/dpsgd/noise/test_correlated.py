"""Correlated noise, banded and buffered: its law, what it costs, and where it is refused."""

import functools
import itertools
import json
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest

from accounting import GaussianProfile, epsilon
from dpsgd import BandedToeplitz, BufferedToeplitz, Independent, Mechanism, RootKey
from dpsgd.noise.correlated import rounded
from dpsgd.noise.gaussian import grid, standard_normal
from dpsgd.noise.recursion import empty_buffers, next_buffered_noise
from dpsgd.noise.registry import noise_from_record, noise_record
from dpsgd.noise.sensitivity import squared_sensitivity
from experiments.benchmarks.correlated import counterexamples, simulation
from samplers import BallsAndBins, Deterministic, Poisson, Shuffle, UserPoisson

THREE = BandedToeplitz((1.0, 0.6, 0.3))
TWO = BufferedToeplitz(weights=(0.4, 0.2), decays=(0.5, 0.96))
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
@pytest.mark.parametrize(
    "noise", [THREE, BandedToeplitz((1.0,)), BandedToeplitz((1, -0.5)), TWO], ids=str
)
@pytest.mark.parametrize("first", [pytest.param(0, marks=pytest.mark.long), 5])
def test_whitened_noise_is_the_fresh_noise_of_each_step_in_every_leaf(noise, first):
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
def test_releases_lie_on_one_public_grid_on_which_the_noise_is_exact(noise, coarser):
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
        TWO,
        BufferedToeplitz((0.3,), (0.0,)),
        BufferedToeplitz((0.8, 0.1, 0.01), (0.1, 0.9, 0.95)),
    ],
    ids=repr,
)
def test_column_norm_and_spread_are_those_of_the_matrix_and_exact_in_a_ledger(noise):
    steps = 3000
    column = noise.whiten(np.eye(steps, 1))[:, 0]
    stated = noise.column(steps)
    if stated is not None:
        np.testing.assert_allclose(stated, column, rtol=2e-7)
    assert 1 - 2e-7 <= np.linalg.norm(column) <= 1
    last = np.linalg.solve(matrix_of(noise, 600).T, np.eye(600, 1, -599))
    assert np.linalg.norm(last) == pytest.approx(noise.spread, rel=1e-6)
    assert noise_from_record(json.loads(json.dumps(noise_record(noise)))) == noise


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


def test_the_inverse_of_buffers_is_that_of_their_column():
    for noise in (TWO, BufferedToeplitz((0.8, 0.1, 0.01), (0.1, 0.9, 0.999))):
        column, inverse = noise.column(3000), noise.inverse(3000)
        powers = [
            w * np.array(d) ** np.arange(9)
            for w, d in zip(noise.weights, noise.decays, strict=True)
        ]
        np.testing.assert_allclose(column[1:10] / column[0], sum(powers), rtol=1e-12)
        np.testing.assert_allclose(
            np.convolve(column, inverse)[:3000], np.eye(1, 3000)[0], atol=1e-12
        )
        assert np.linalg.norm(noise.inverse(20_000)) == pytest.approx(noise.spread, rel=1e-6)


def test_the_numbers_of_the_law_are_those_of_the_program():
    noise = BufferedToeplitz((1 / 3, 0.1), (0.7, 1 / 7))
    for value in (*noise.weights, *noise.decays, noise.gain):
        assert float(np.float32(value)) == value
    assert BufferedToeplitz(list(noise.weights), list(noise.decays)) == noise
    assert noise.kept == 2


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


BANDS, BUFFERS = BandedToeplitz, BufferedToeplitz


@pytest.mark.parametrize(
    ("kind", "numbers", "message"),
    [
        (BANDS, [()], "at least one"),
        (BANDS, [(0.0, 1.0)], "the first > 0"),
        (BANDS, [(-1.0, 0.5)], "the first > 0"),
        (BANDS, [(1.0, math.nan)], "must be finite"),
        (BANDS, [(1.0, 1.0)], "grows from step to step"),
        (BANDS, [(1.0, -1.0)], "grows from step to step"),
        (BANDS, [(1.0, 0.0, 1.5)], "grows from step to step"),
        (BANDS, [(1.0, -2.5, 1.0)], "grows from step to step"),
        (BANDS, [(1.0, -0.99999)], "more than 32 times"),
        (BUFFERS, [(), ()], "at least one of each"),
        (BUFFERS, [(0.5,), (0.5, 0.6)], "1 weights and 2 decays"),
        (BUFFERS, [(0.5, -0.1), (0.5, 0.6)], r"weights must be > 0 and finite, number 2 is -0.1"),
        (BUFFERS, [(math.inf,), (0.5,)], "weights must be > 0 and finite"),
        (BUFFERS, [(math.nan,), (0.5,)], "weights must be > 0 and finite"),
        (BUFFERS, [(0.5,), (1.0,)], "decays must be >= 0 and below 1"),
        (BUFFERS, [(0.5,), (-0.1,)], "decays must be >= 0 and below 1"),
        (BUFFERS, [(0.5,), (1 - 1e-9,)], "decays must be .* below 1, number 1 is 1.0"),  # 32 bits
        (BUFFERS, [(1.6,), (0.5,)], "grows from step to step"),
    ],
)
def test_numbers_that_make_no_noise_or_explode_are_refused_in_one_line(kind, numbers, message):
    with pytest.raises(ValueError, match=message) as error:
        kind(*numbers)
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
}


@pytest.mark.parametrize("noise", [THREE, TWO], ids=str)
@pytest.mark.parametrize(("sampler", "reach"), DRAWN.items(), ids=map(repr, DRAWN))
def test_noise_is_refused_where_steps_of_an_example_may_be_nearer_than_it_reaches(
    sampler, reach, noise
):
    mechanism = Mechanism(sampler, 0.8, 1.0, noise=noise)
    over = "3 steps" if noise == THREE else "all steps"
    why = f"is correlated over {over}, .* holds for noise with up to {reach}, .* a fixed order"
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
def test_noise_costs_what_independent_noise_does_where_all_possible_steps_are_apart(sampler):
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


@pytest.mark.parametrize("coefficients", [(1.0, 0.3, 0.2), (0.9, 0.1), (0.7, -0.5, 0.3)])
@pytest.mark.parametrize("at", [1e-6, 1.0])
def test_ends_hold_the_cost_of_the_columns_that_are_computed_with(coefficients, at):
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


@pytest.mark.parametrize("measured", [simulation, counterexamples])
def test_certified_ends_hold_what_is_simulated_and_other_samplers_cost_more(measured):
    assert all(row.holds for row in measured(draws=20_000))


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
