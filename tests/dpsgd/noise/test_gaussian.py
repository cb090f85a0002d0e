"""The noise is normal far into its tails, secret, keyed, on one grid, and the same on any devices.

Statistical tests reject a right sampler with probability 1e-6 or less each (and keys are fixed, so
that they either always pass or always fail).
"""

import itertools
import math

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dpsgd.core import gaussian as noise
from dpsgd.core import normals, philox
from dpsgd.core.gaussian import add_gaussian_noise, grid, standard_normal
from dpsgd.core.philox import Coordinates, StepKey
from dpsgd.noise.keys import RootKey

pytestmark = pytest.mark.usefixtures("optimised")  # bits are the claim

FALSE_ALARM = 1e-6
KEY = RootKey.from_insecure_seed(2024).noise_key(0)
STDDEV = 1.3


normal = jax.jit(standard_normal, static_argnums=3)  # (key, step, leaf, shape)
noised = jax.jit(add_gaussian_noise)  # (tree, key, step, stddev, divisor=)
SIZE = 20_000
words = jax.jit(lambda step: noise.words_at(StepKey(KEY, step), Coordinates(0), (SIZE,)))


# --- the generator ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape",
    [(7,), (3, 5), (2, 3, 4), (2**31, 3), (2**31, 2**20), (3, 2**32 - 1, 5), (2**21, 2**21, 2**21)],
)
def test_coordinates_count_by_row_major_index_beyond_32_bits(shape):
    rng = np.random.default_rng(1)
    positions = [np.r_[0, size - 1, rng.integers(0, size, 50)].astype(np.uint32) for size in shape]
    low, high = philox._flat_index([jnp.asarray(p) for p in positions], shape)
    for i in range(52):
        exact = 0
        for along, size in zip(positions, shape, strict=True):
            exact = exact * size + int(along[i])
        assert (int(high[i]) << 32) + int(low[i]) == exact


@pytest.fixture
def traced_anew():
    """What is patched is traced, and nothing that is traced with it stays."""
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.long
def test_one_position_counts_all_axes_only_where_32_bits_do(monkeypatch, traced_anew):
    """Two coordinates of one position would share their noise."""
    sums = [jnp.zeros(20), jnp.zeros((5, 4)), jnp.zeros((3, 2))]
    flat, sound = [], noise.words_at

    def words(key, coordinates, shape):
        flat.append(coordinates.one_axis)
        return sound(key, coordinates, shape)

    def noised(sums):
        return jax.jit(lambda sums: add_gaussian_noise(sums, KEY, 3, 1.0))(sums)

    monkeypatch.setattr(noise, "words_at", words)
    as_usual = noised(sums)
    assert all(flat)
    flat.clear()
    monkeypatch.setattr(noise, "COUNTED", 20)
    with pytest.raises(ValueError, match=r"leaf 0 has shape \(20,\): an axis exceeds 32 bits"):
        noised(sums)
    sums[0] = jnp.zeros(19)
    counted = noised(sums)
    assert False in flat
    np.testing.assert_array_equal(counted[1], as_usual[1])
    np.testing.assert_array_equal(counted[2], as_usual[2])


def test_the_whole_key_counts():
    """Flipping any one of the 128 bits of the key changes the noise."""
    draw = jax.jit(lambda key: standard_normal(key, 0, 0, (4,)))
    outputs = {tuple(draw(KEY).tolist())}
    for word, bit in itertools.product(range(4), range(32)):
        flipped = KEY.copy()
        flipped[word] ^= np.uint32(1 << bit)
        outputs.add(tuple(draw(flipped).tolist()))
    assert len(outputs) == 129


# --- the transform ---------------------------------------------------------------------------


def exact_radius(high, low):
    with mpmath.workdps(40):
        u = (mpmath.mpf(int(high)) * 2**32 + int(low) + mpmath.mpf(1) / 2) / mpmath.mpf(2) ** 64
        return mpmath.sqrt(-2 * mpmath.log(u))


def test_radius_is_right_at_both_ends_and_every_scale():
    rng = np.random.default_rng(2)
    top, cut = 0xFFFFFFFF, 0xB504F334
    pairs = [(0, 0), (0, 1), (0, top), (1, 0), (top, top), (top, top - 1), (top, 0)]
    pairs += [(cut + i, low) for i in range(-3, 4) for low in (0, top)]
    for bits in range(64):  # 2^bits from the lower end, and from the upper
        for value in (2**bits + int(rng.integers(0, 2**bits, dtype=np.uint64)),):
            pairs += [(value >> 32, value & top), (top - (value >> 32), top - (value & top))]
    pairs += rng.integers(0, 2**32, (300, 2)).tolist()
    high, low = np.array(pairs, np.uint64).astype(np.uint32).T
    result = np.asarray(jax.jit(normals.radius)(high, low))
    for first, second, radius in zip(high, low, result, strict=True):
        assert abs(float(radius) / exact_radius(first, second) - 1) < 3e-7


def test_the_angle_is_right_to_float32_everywhere():
    rng = np.random.default_rng(3)
    word = np.r_[np.arange(-5, 6), 2**31 - 1, -(2**31), rng.integers(-(2**31), 2**31, 1000)]
    result = np.asarray(
        normals.half_circle_sine(jnp.asarray(word.astype(np.int32).view(np.uint32)))
    )
    exact = np.sin(np.pi * (word + 0.5) / 2**32)
    np.testing.assert_allclose(result, exact, rtol=3e-7)


@pytest.mark.parametrize("sign", [-1, 1])
def test_noise_reaches_beyond_nine_sigma_on_both_sides(sign, monkeypatch, traced_anew):
    """The extreme block goes through the very code that training runs; 8 sigma is required."""
    word = 0x7FFFFFFF if sign > 0 else 0x80000000  # psi at the end of its range

    def extreme(counter, key):
        return tuple(jnp.full_like(counter[0], value) for value in (0, 0, word, 0))

    monkeypatch.setattr(philox, "philox4x32", extreme)
    draw = jax.jit(lambda: sign * standard_normal(KEY, 0, 0, (3,)))
    assert draw().min() > 9.4
    add = jax.jit(lambda stddev: add_gaussian_noise(jnp.zeros(3), KEY, 0, stddev))
    for stddev in (np.float32(1), np.nextafter(np.float32(2), np.float32(0))):
        out = np.asarray(add(stddev), np.float64)
        cells = out / float(grid(stddev))
        assert np.all(sign * out / stddev > 9.4)
        assert np.all(
            np.abs(cells) < 2**24
        )  # float32 holds the integer exactly: the proof needs it


# --- the law ---------------------------------------------------------------------------------

TAILS = (4.0, 5.0, 5.5)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(2**22, id="4e6 draws"),
        pytest.param(24 * 2**22, id="1e8 draws", marks=[pytest.mark.long, pytest.mark.noise]),
    ],
)
def law(request):
    """Statistics of many draws by `add_gaussian_noise`: mean square, tails, cells around 0."""
    draws, size = request.param, 2**22
    draw = jax.jit(lambda step: add_gaussian_noise(jnp.zeros(size), KEY, step, STDDEV))
    square, tails, cells = 0.0, np.zeros(6, int), np.zeros(65, int)
    for step in range(draws // size):
        z = np.asarray(draw(step), np.float64) / STDDEV
        square += np.dot(z, z)
        tails += [np.count_nonzero(sign * z > t) for t in TAILS for sign in (-1, 1)]
        near = z / (float(grid(STDDEV)) / STDDEV)
        near = near[np.abs(near) < 32.5]
        cells += np.bincount(np.rint(near + 32).astype(int), minlength=65)
    return {"draws": draws, "variance": square / draws, "tails": tails, "cells": cells}


def test_variance_is_right_and_one_percent_off_is_caught(law):
    allowed = stats.norm.isf(FALSE_ALARM / 2) * math.sqrt(2 / law["draws"])
    for factor in (0.99, 1.0, 1.01):
        assert (abs(law["variance"] * factor**2 - 1) < allowed) == (factor == 1.0)


def test_tails_at_4_5_and_5_5_sigma_are_right_on_both_sides(law):
    """At 1e8 draws also within 5 standard errors of Phi, where the counts are large enough."""
    sides = itertools.product(TAILS, (-1, 1))
    for count, (threshold, sign) in zip(law["tails"].tolist(), sides, strict=True):
        p = stats.norm.sf(threshold)
        expected = law["draws"] * p
        test = stats.binomtest(count, law["draws"], p)
        assert test.pvalue > FALSE_ALARM / 6, (sign * threshold, count, expected)
        if law["draws"] > 1e8:
            assert abs(count - expected) < 5 * math.sqrt(expected)


def test_every_cell_around_zero_is_reached_and_equally_often(law):
    """At 1e8 draws each of the 65 cells nearest to 0 is hit about 118 times."""
    expected = law["draws"] * stats.norm.pdf(0) * float(grid(STDDEV)) / STDDEV
    assert law["cells"].min() > 0  # false alarm: 65 exp(-expected), 2e-7 at the smaller size
    chi2 = ((law["cells"] - expected) ** 2 / expected).sum()
    assert stats.chi2.sf(chi2, law["cells"].size) > FALSE_ALARM


def test_the_divisor_divides_the_noised_sum_exactly():
    sums = np.linspace(-5, 5, SIZE, dtype=np.float32)
    whole = noised(sums, KEY, 12, np.float32(STDDEV))
    exact = np.asarray(whole) / np.float32(48.0)
    mean = noised(sums, KEY, 12, np.float32(STDDEV), divisor=np.float32(48.0))
    np.testing.assert_array_equal(mean, exact)


# --- the grid --------------------------------------------------------------------------------


@given(st.floats(2.0**-99, 2.0**100, width=32))
def test_grid_is_the_power_of_two_18_bits_below_stddev(stddev):
    spacing = float(grid(stddev))
    assert math.frexp(spacing)[0] == 0.5
    assert 2**18 <= stddev / spacing < 2**19


MAGNITUDES = [
    pytest.param(
        stddev, magnitude, marks=() if stddev == 1.3 or magnitude == 1e3 else pytest.mark.long
    )
    for stddev in (1.0, 1.3, 1.9999999, 3e-5, 7e8)
    for magnitude in (0.0, 1e-30, 1e-3, 1.0, 1e3, 1e6, 1e12)
]


@pytest.mark.parametrize(("stddev", "magnitude"), MAGNITUDES)
def test_output_is_sum_plus_noise_rounded_to_the_grid(stddev, magnitude):
    """It is g ceil((S + stddev z) / g - U), as the module claims, by the key's own z and U."""
    stddev, size, step = float(np.float32(stddev)), SIZE, 21
    rng = np.random.default_rng(4)
    sums = (rng.standard_normal(size) * magnitude * stddev).astype(np.float32)
    spacing = float(grid(stddev))
    output = np.asarray(noised(sums, KEY, step, np.float32(stddev)), np.float64) / spacing
    assert np.all(output == np.round(output))

    scaled = np.asarray(normal(KEY, step, 0, (size,)), np.float64) * (stddev / spacing)
    word = np.asarray(words(step)[3])
    uniform = ((word >> 9) + 0.5) * 2.0**-23
    whole = np.rint(sums.astype(np.float64) / spacing)
    rest = scaled + (sums.astype(np.float64) / spacing - whole) - uniform
    error = 4 * 2.0**-24 * np.abs(scaled) + 2.0**-22  # float32 products, and the one inexact sum
    # Integers that float64 holds, or (beyond 2^53) whose float32 is that of `whole`.
    least, most = ((whole + np.ceil(rest + e)).astype(np.float32) for e in (-error, error))
    assert np.all((least <= output) & (output <= most))
    assert np.mean(least == most) > 0.7


# --- arguments -------------------------------------------------------------------------------


def refuses(why, *arguments, **how):
    with pytest.raises(ValueError, match=why):
        add_gaussian_noise(*arguments, **how)


def test_arguments_that_no_noise_has_are_refused():
    zeros = np.zeros(SIZE, np.float32)
    for stddev in (-1.0, -1e-30, math.nan, math.inf):
        refuses("stddev must be finite", zeros, KEY, 0, stddev)
        traced = noised(zeros, KEY, 0, np.float32(stddev))
        assert not np.any(np.isfinite(np.asarray(traced)))
    for divisor in (0.0, -1.0, math.inf, math.nan):
        refuses("divisor must be finite and positive", zeros, KEY, 0, 1.0, divisor=divisor)
    for bad in (-1, 2**32):
        with pytest.raises(ValueError, match="step must be in"):
            standard_normal(KEY, bad, 0, (3,))
        with pytest.raises(ValueError, match="leaf must be in"):
            standard_normal(KEY, 0, bad, (3,))
    for key in (np.zeros(2, np.uint32), np.zeros(4, np.int32), np.zeros((), np.uint32)):
        refuses(r"a noise key is uint32 \[4\]", zeros, key, 0, 1.0)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.int32])
def test_sums_that_are_not_float32_are_refused(dtype):
    refuses(
        "float32 sums only, but leaf 1", [np.zeros(2, np.float32), np.zeros(2, dtype)], KEY, 0, 1.0
    )


@pytest.mark.parametrize("stddev", [0.0, 1e-38, 1e-44, 2.0**-101])
def test_a_stddev_below_the_range_of_the_grid_is_rounded_up(stddev):
    """0 too: processors may take subnormal numbers for it, and then noise would silently vanish."""
    zeros = np.zeros(SIZE, np.float32)
    out = np.asarray(noised(zeros, KEY, 0, np.float32(stddev)), np.float64)
    assert out.std() / 2.0**-100 == pytest.approx(1, rel=0.05)
