"""The secure mode is exact: the sampler's law, the integer sensitivity and the integer sum."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dpsgd.noise import secure as secure_noise
from dpsgd.noise.grid import secure_grid
from dpsgd.noise.keys import RootKey
from dpsgd.noise.secure import (
    CHUNK,
    add_secure_noise,
    quantize,
    rounded_gaussian,
)

pytestmark = pytest.mark.usefixtures("optimised")  # bits are the claim

FALSE_ALARM = 1e-6
KEY_WORDS = RootKey.from_insecure_seed(11).secure_noise_key(0)
KEY = KEY_WORDS.tobytes()


def pvalue_of_rounded_normal(samples: np.ndarray, cells: float) -> float:
    """Chi-square of integers against the law of round(cells Z), over about 60 bins."""
    edges = np.unique(np.floor(np.linspace(-3.1, 3.1, 60) * cells)) + 0.5  # between two integers
    counts = np.histogram(samples, np.r_[-np.inf, edges, np.inf])[0]
    expected = np.diff(np.r_[0, stats.norm.cdf(edges / cells), 1]) * samples.size
    assert expected.min() > 5
    return float(stats.chisquare(counts, expected * counts.sum() / expected.sum()).pvalue)


@pytest.mark.short("7-1000", "32-1")
@pytest.mark.parametrize(
    ("digit_bits", "cells"),
    [(1, 1), (2, 3), (7, 1000), (32, 1), (32, 2**20)]
    + [pytest.param(*x, marks=pytest.mark.long) for x in [(1, 40), (2, 40), (32, 3), (32, 1000)]],
)
def test_the_law_is_the_rounded_normal_however_few_digits_are_drawn_at_a_time(
    digit_bits, cells, monkeypatch
):
    """With one digit at a time every other comparison is a tie, so that ties must be exact too."""
    monkeypatch.setattr(secure_noise, "_DIGIT_BITS", digit_bits)
    samples = rounded_gaussian(KEY, 0, 0, (30_000,), cells)
    assert pvalue_of_rounded_normal(samples, cells) > FALSE_ALARM


def test_moments_and_tails_of_a_large_sample_are_normal():
    n, cells = 2**18, 2**20
    z = rounded_gaussian(KEY, 1, 0, (n,), cells) / cells
    quantile = stats.norm.isf(FALSE_ALARM / 8)
    assert abs(z.mean()) < quantile * math.sqrt(1 / n)
    assert abs((z**2).mean() - 1) < quantile * math.sqrt(2 / n)
    assert abs((z**2).mean() * 1.04 - 1) > quantile * math.sqrt(2 / n)  # the test can tell 2 %
    assert abs((z**3).mean()) < quantile * math.sqrt(15 / n)
    assert abs((z**4).mean() - 3) < quantile * math.sqrt(96 / n)
    assert stats.kstest(z, "norm").pvalue > FALSE_ALARM
    for threshold in (2.0, 3.0, 4.0):
        count = int((np.abs(z) > threshold).sum())
        assert stats.binomtest(count, n, 2 * stats.norm.sf(threshold)).pvalue > FALSE_ALARM


def test_low_bits_of_the_samples_are_uniform():
    samples = rounded_gaussian(KEY, 2, 0, (2**17,), 2**20)
    assert stats.chisquare(np.bincount(samples % 16)).pvalue > FALSE_ALARM


def test_neighbouring_samples_steps_leaves_and_keys_are_independent():
    n = CHUNK + 1000
    x = rounded_gaussian(KEY, 5, 1, (n,), 2**20) / 2**20
    other = RootKey.from_insecure_seed(12).secure_noise_key(0).tobytes()
    quantile = stats.norm.isf(FALSE_ALARM / 2)
    for key, step, leaf in [(KEY, 6, 1), (KEY, 5, 2), (KEY, 1, 5), (other, 5, 1)]:
        y = rounded_gaussian(key, step, leaf, (n,), 2**20) / 2**20
        assert abs((x * y).sum()) < quantile * math.sqrt(n)
    for lag in (1, 2, CHUNK):
        assert abs((x[lag:] * x[:-lag]).sum()) < quantile * math.sqrt(n - lag)


def test_samples_are_a_pure_function_and_a_chunk_does_not_depend_on_the_others():
    long = rounded_gaussian(KEY, 3, 0, (2, CHUNK), 999)
    np.testing.assert_array_equal(long, rounded_gaussian(KEY, 3, 0, (2, CHUNK), 999))
    np.testing.assert_array_equal(long[0], rounded_gaussian(KEY, 3, 0, (CHUNK,), 999))
    assert np.mean(long[0] == long[1]) < 0.01  # two whole chunks have streams of their own
    assert rounded_gaussian(KEY, 3, 0, (0, 4), 999).shape == (0, 4)
    assert rounded_gaussian(KEY, 3, 0, (), 999).shape == ()


def test_samples_are_these_very_numbers():
    """A change of the sampler would make earlier secure runs impossible to repeat."""
    assert rounded_gaussian(bytes(32), 1, 2, (4,), 1000).tolist() == [109, 1592, -493, 437]


class FixedSource(secure_noise._Source):
    """A source whose words are prescribed."""

    def __init__(self, words):
        super().__init__(KEY, 0, 0, 0)
        self.left = list(words)

    def words(self, count):
        taken, self.left = self.left[:count], self.left[count:]
        return np.array(taken, np.uint32)


@given(
    st.integers(1, 2**20),
    st.integers(0, 40),
    st.lists(st.integers(0, 2**32 - 1), min_size=4, max_size=4),
    st.integers(0, 2**20),
    st.booleans(),
)
def test_rounding_is_exact_next_to_the_boundary_as_well(cells, k, words, at, near):
    """floor(s (k + x) + 1/2) agrees with rational arithmetic, also where x sits on a boundary."""
    if near:  # the 64-bit prefix of an x with s (k + x) + 1/2 an integer, whose next bits decide
        boundary = Fraction(2 * (at % cells) + 1, 2 * cells)
        prefix = math.floor(boundary * 2**64)
        words = [prefix >> 32, prefix & 0xFFFFFFFF, *words[2:]]
    source = FixedSource(words)
    x = secure_noise._Uniforms(source, 1)
    result = int(secure_noise._round_half_up(cells, np.array([k]), x)[0])
    used = words[: 4 - len(source.left)]
    low = sum(Fraction(word, 2 ** (32 * (i + 1))) for i, word in enumerate(used))
    high = low + Fraction(1, 2 ** (32 * len(used)))  # x is in (low, high), whatever follows
    half = Fraction(1, 2)
    assert result == math.floor(cells * (k + low) + half)
    assert result == math.ceil(cells * (k + high) + half) - 1


@pytest.mark.parametrize("bound", [1, 2, 3, 10, 2**31 + 2**30])
def test_bounded_integers_are_uniform(bound):
    """At 3 * 2^30 a quarter of the words must be thrown away, or the first third is favoured."""
    source = secure_noise._Source(KEY, 0, 0, 0)
    values = source.below(np.full(50_000, bound))
    assert values.min() >= 0
    assert values.max() < bound
    bins = min(bound, 12)
    counts = np.bincount(values * bins // bound, minlength=bins)
    assert bins == 1 or stats.chisquare(counts).pvalue > FALSE_ALARM


def test_every_coin_has_its_bias():
    source = secure_noise._Source(KEY, 0, 1, 0)
    n = 200_000
    heads = int(secure_noise._exp_minus_half(source, n).sum())
    assert stats.binomtest(heads, n, math.exp(-0.5)).pvalue > FALSE_ALARM
    for k in (0, 1, 4):
        x = secure_noise._Uniforms(source, n)
        values = (x.digit(0, np.arange(n)) + 0.5) / 2**32
        coins = secure_noise._keep_fraction(source, np.full(n, k), x, np.arange(n))
        chance = np.exp(-values * (2 * k + values) / (2 * k + 2))
        score = (coins - chance) * np.cos(3 * values)  # a test of the bias as a function of x
        assert abs(score.sum()) < stats.norm.isf(FALSE_ALARM / 6) * math.sqrt((score**2).sum())


# --- the grid --------------------------------------------------------------------------------


def number(words) -> int:
    return int(words[0]) + (int(words[1]) << 32)


@given(st.floats(0.1, 100), st.floats(1e-6, 1e6), st.integers(1, 10**6))
def test_the_grid_holds_the_sum_and_never_lowers_the_noise(sigma, clip, batch):
    grid = secure_grid(sigma, clip, batch)
    spacing, cells = Fraction(float(grid.spacing)), int(grid.cells)
    assert math.frexp(grid.spacing)[0] == 0.5
    assert cells * spacing >= Fraction(sigma) * Fraction(clip)
    assert (cells - 1) * spacing < Fraction(sigma) * Fraction(clip)
    assert 2 <= cells <= 2**20
    assert batch * Fraction(clip) <= 2**30 * spacing
    assert number(grid.max_square) <= (Fraction(clip) / spacing) ** 2 < number(grid.max_square) + 1
    finer = spacing / 2  # and no finer grid would do
    assert batch * Fraction(clip) > 2**30 * finer or Fraction(sigma * clip) > 2**20 * finer * 0.999


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.0, 1.0, 10), "noise_multiplier > 0"),
        ((math.inf, 1.0, 10), "finite"),
        ((1.0, math.inf, 10), "finite"),
        ((1.0, math.nan, 10), "finite"),
        ((1.0, 1.0, 0), "at least 1"),
        ((1e-4, 1.0, 2**24), "coarser than the noise"),
        ((1.0, 1e-40, 10), "outside float32"),
    ],
)
def test_a_grid_that_cannot_be_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        secure_grid(*arguments)


# --- the sensitivity -------------------------------------------------------------------------

GRID = secure_grid(1.0, 1.0, 64)
MAX_SQUARE = number(GRID.max_square)


def exact_square(tree) -> int:
    return sum(int(v) ** 2 for leaf in jax.tree.leaves(tree) for v in np.asarray(leaf).reshape(-1))


quantized = jax.jit(lambda tree: quantize(tree, GRID))


@settings(max_examples=30)
@given(
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=6, max_size=6),
    st.sampled_from([None, 1.0, 1.01, 1 + 2**-11, 1 - 1e-6]),
)
def test_the_integers_never_exceed_the_clip_norm(values, norm):
    """Whatever comes in: clipped, not clipped, or clipped too little."""
    vector = np.array(values, np.float32)
    if norm is not None and np.any(vector):
        wide = vector.astype(np.float64)
        vector = (wide / np.linalg.norm(wide) * norm).astype(np.float32)
    q = quantized({"a": jnp.asarray(vector[:2]), "b": jnp.asarray(vector[2:].reshape(2, 2))})
    assert exact_square(q) <= MAX_SQUARE
    flat = np.concatenate([np.asarray(q["a"]), np.asarray(q["b"]).reshape(-1)])
    limit = np.abs(vector.astype(np.float64)) / GRID.spacing
    assert np.all(np.abs(flat) <= limit)  # towards zero
    if norm is not None and norm <= 1 and np.any(vector):
        assert np.all(limit * (1 - 2.0**-11) - 1 <= np.abs(flat))  # and nothing was dropped


def test_integers_are_truncated_towards_zero():
    """Rounding to nearest could lengthen a vector of many small coordinates by half of itself."""
    cells = jnp.array([0.7, -0.7, 1.9, -1.9, 0.0, 3.5], jnp.float32) * GRID.spacing
    assert jax.jit(lambda v: quantize(v, GRID))(cells).tolist() == [0, 0, 1, -1, 0, 3]


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 1e30])
def test_an_example_that_was_not_clipped_contributes_nothing(poison):
    tree = {"a": jnp.array([0.1, poison], jnp.float32), "b": jnp.full((2, 2), 0.1)}
    assert exact_square(quantized(tree)) == 0
    just_over = {"a": jnp.array([1.001, 0], jnp.float32), "b": jnp.zeros((2, 2))}
    assert exact_square(quantized(just_over)) == 0


@pytest.mark.short("0-1", "1-*", "65536-65535", "65537-*")
@pytest.mark.parametrize(
    ("size", "largest"),
    [(0, 1), (1, 2**30), (2**16, 2**16 - 1), (2**16 + 1, 2**30), (3 * 2**16 + 5, 2**30)],
)
def test_the_squared_norm_is_added_up_exactly(size, largest):
    rng = np.random.default_rng(5)
    values = rng.integers(-largest, largest, size, endpoint=True).astype(np.int32)
    values[:2] = -largest
    exact = exact_square(values)
    leaves = [jnp.asarray(values[: size // 3]), jnp.asarray(values[size // 3 :])]
    at_most = jax.jit(lambda bound: secure_noise._norm_is_at_most(leaves, bound))
    for bound in (exact, exact - 1, exact + 1, exact - 2**32, exact + 2**32, exact >> 1, 2**64 - 1):
        bound = min(max(bound, 0), 2**64 - 1)
        words = np.array([bound % 2**32, bound >> 32], np.uint32)
        assert bool(at_most(words)) == (exact <= bound)


# --- the mechanism ---------------------------------------------------------------------------


@jax.jit
def noised_sum(integers, step):
    total = jnp.sum(integers, dtype=jnp.int32)[None]
    return add_secure_noise(total, KEY_WORDS, step, GRID._replace(spacing=1.0))


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=9, max_size=9), st.integers(0, 9))
def test_a_sum_too_long_for_int32_is_the_exact_sum_modulo_2_to_the_32(integers, step):
    """So it is post-processing of the exact sum plus noise: it betrays no more than that does."""
    out = int(noised_sum(np.array(integers, np.int32), step)[0])
    exact = sum(integers) + int(rounded_gaussian(KEY, step, 0, (1,), int(GRID.cells))[0])
    wrapped = (exact + 2**31) % 2**32 - 2**31
    assert out == int(np.float32(wrapped))


def test_sums_that_are_not_int32_and_keys_that_are_too_short_are_refused():
    with pytest.raises(ValueError, match="int32 sums only, but leaf 0 is float32"):
        add_secure_noise(jnp.zeros(3), KEY_WORDS, 0, GRID)
    with pytest.raises(ValueError, match="32 bytes, got 16"):
        rounded_gaussian(KEY[:16], 0, 0, (3,), 5)
    for cells in (0, 2**20 + 1):
        with pytest.raises(ValueError, match="cells must be in"):
            rounded_gaussian(KEY, 0, 0, (3,), cells)
    for key in (KEY_WORDS[:4], KEY_WORDS.astype(np.int32), np.frombuffer(KEY, np.uint64)):
        with pytest.raises(ValueError, match=r"a secure noise key is uint32 \[8\]"):
            add_secure_noise(jnp.zeros(3, jnp.int32), key, 0, GRID)


def test_without_the_cpu_secure_noise_says_what_to_set(monkeypatch):
    def no_cpu(backend=None):
        raise RuntimeError(f"Unknown backend {backend}")

    monkeypatch.setattr(jax, "local_devices", no_cpu)
    chosen = secure_grid(1.0, 1.0, 10)
    with pytest.raises(ValueError, match="JAX_PLATFORMS=cuda,cpu"):
        add_secure_noise([jnp.zeros(3, jnp.int32)], np.zeros(8, np.uint32), 0, chosen)
