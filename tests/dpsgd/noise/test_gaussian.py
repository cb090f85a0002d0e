"""The noise is normal far into its tails, secret, keyed, on one grid, and the same on any devices.

Statistical tests reject a right sampler with probability 1e-6 or less each (and keys are fixed, so
that they either always pass or always fail).
"""

import hashlib
import itertools
import math
import os
import re
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dpsgd.noise import gaussian as noise
from dpsgd.noise import philox
from dpsgd.noise.gaussian import add_gaussian_noise, grid, standard_normal
from dpsgd.noise.keys import RootKey
from dpsgd.noise.philox import philox4x32

pytestmark = pytest.mark.usefixtures("optimised")  # bits are the claim

FALSE_ALARM = 1e-6
KEY = RootKey.from_insecure_seed(2024).noise_key(0)
OTHER_KEY = RootKey.from_insecure_seed(2025).noise_key(0)
STDDEV = 1.3


normal = jax.jit(standard_normal, static_argnums=3)  # (key, step, leaf, shape)
noised = jax.jit(add_gaussian_noise)  # (tree, key, step, stddev, divisor=)


def as_words(*values):
    return tuple(jnp.uint32(value) for value in values)


# --- the generator ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "block"),
    [
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_known_answers(counter, key, block):
    result = philox4x32(as_words(*counter), as_words(*key))
    assert tuple(int(word) for word in result) == block


@pytest.mark.parametrize(
    "shape", [(7,), (3, 5), (2, 3, 4), (2**31, 2**20), (3, 2**32 - 1, 5), (2**21, 2**21, 2**21)]
)
def test_a_coordinate_is_counted_by_its_row_major_index_also_beyond_32_bits(shape):
    rng = np.random.default_rng(1)
    positions = [np.r_[0, size - 1, rng.integers(0, size, 50)].astype(np.uint32) for size in shape]
    low, high = philox._flat_index([jnp.asarray(p) for p in positions], shape)
    for i in range(52):
        exact = 0
        for along, size in zip(positions, shape, strict=True):
            exact = exact * size + int(along[i])
        assert (int(high[i]) << 32) + int(low[i]) == exact


@pytest.mark.long
@pytest.mark.parametrize(
    "shape", [*(pytest.param(shape, marks=pytest.mark.long) for shape in [(7,), (3, 5)]), (2, 3, 4)]
)
def test_one_position_for_all_axes_counts_as_one_for_each(shape):
    line = philox.words_at(KEY, 3, 1, shape, one_axis=True)
    for one, each in zip(line, philox.words_at(KEY, 3, 1, shape), strict=True):
        np.testing.assert_array_equal(one, each)


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
    flat, drawn = [], noise.words_at

    def words(*arguments, one_axis=False, **named):
        flat.append(one_axis)
        return drawn(*arguments, one_axis=one_axis, **named)

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


def test_the_radius_is_right_at_both_ends_and_at_every_scale_between():
    rng = np.random.default_rng(2)
    top, cut = 0xFFFFFFFF, 0xB504F334
    pairs = [(0, 0), (0, 1), (0, top), (1, 0), (top, top), (top, top - 1), (top, 0)]
    pairs += [(cut + i, low) for i in range(-3, 4) for low in (0, top)]
    for bits in range(64):  # 2^bits from the lower end, and from the upper
        for value in (2**bits + int(rng.integers(0, 2**bits, dtype=np.uint64)),):
            pairs += [(value >> 32, value & top), (top - (value >> 32), top - (value & top))]
    pairs += rng.integers(0, 2**32, (300, 2)).tolist()
    high, low = np.array(pairs, np.uint64).astype(np.uint32).T
    result = np.asarray(jax.jit(noise._radius)(high, low))
    for first, second, radius in zip(high, low, result, strict=True):
        assert abs(float(radius) / exact_radius(first, second) - 1) < 3e-7


def test_the_angle_is_right_to_float32_everywhere():
    rng = np.random.default_rng(3)
    word = np.r_[np.arange(-5, 6), 2**31 - 1, -(2**31), rng.integers(-(2**31), 2**31, 1000)]
    result = np.asarray(noise._half_circle_sine(jnp.asarray(word.astype(np.int32).view(np.uint32))))
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
    """Statistics of many draws by `add_gaussian_noise`: powers, tails, residues, cells."""
    draws, size = request.param, 2**22
    draw = jax.jit(lambda step: add_gaussian_noise(jnp.zeros(size), KEY, step, STDDEV))
    spacing = float(grid(STDDEV))

    @jax.jit
    def measure(out):
        z = out / STDDEV
        square = z * z
        integer = jnp.abs(out / spacing).astype(jnp.int32)
        # float32 sums over 1024 at a time, the rest on the host in float64
        powers = [p.reshape(-1, 1024).sum(1) for p in (z, square, square * z, square * square)]
        tails = [(sign * z > t).sum() for t in TAILS for sign in (-1, 1)]
        shells = [(0.0, 1.0), (1.0, 2.0), (2.0, 4.0), (4.0, 9.0)]
        inside = [(jnp.abs(z) >= a) & (jnp.abs(z) < b) for a, b in shells]
        residues = [[(inside_ & (integer % 4 == r)).sum() for r in range(4)] for inside_ in inside]
        return powers, tails, residues

    powers, tails, residues = np.zeros(4), np.zeros(6, int), np.zeros((4, 4), int)
    cells = np.zeros(65, int)
    for step in range(draws // size):
        out = draw(step)
        p, t, r = measure(out)
        powers += [np.asarray(x, np.float64).sum() for x in p]
        tails += np.array(t)
        residues += np.array(r)
        near = np.asarray(out)
        near = near[np.abs(near) < 32.5 * spacing].astype(np.float64) / spacing
        cells += np.bincount((near + 32).astype(int), minlength=65)
    return {
        "draws": draws,
        "powers": powers / draws,
        "tails": tails,
        "residues": residues,
        "cells": cells,
    }


def variance_is_right(variance: float, sigma: float, draws: int) -> bool:
    """Whether the mean square of normal draws is within its law around sigma^2."""
    quantile = stats.norm.isf(FALSE_ALARM / 2)
    return abs(variance / sigma**2 - 1) < quantile * math.sqrt(2 / draws)


def test_the_variance_is_right_and_one_percent_either_way_is_caught(law):
    assert variance_is_right(law["powers"][1], 1.0, law["draws"])
    for factor in (0.99, 1.01):
        assert not variance_is_right(law["powers"][1] * factor**2, 1.0, law["draws"])


def test_mean_skewness_and_kurtosis_are_right(law):
    mean, _, third, fourth = law["powers"]
    quantile = stats.norm.isf(FALSE_ALARM / 6)
    assert abs(mean) < quantile * math.sqrt(1 / law["draws"])
    assert abs(third) < quantile * math.sqrt(15 / law["draws"])
    assert abs(fourth - 3) < quantile * math.sqrt(96 / law["draws"])


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


def test_cells_are_equally_likely_modulo_4_in_every_shell(law):
    """Rounding to nearest would favour even cells where float32 has few values per cell."""
    for counts in law["residues"]:
        assert stats.chisquare(counts).pvalue > FALSE_ALARM


def test_the_law_is_normal_by_chi_square_and_kolmogorov_smirnov():
    size = 2**20
    for z in (
        normal(KEY, 1000, 3, (size,)),
        noised(jnp.zeros(size), KEY, 1000, np.float32(1e-3)) / np.float32(1e-3),
    ):
        uniform = stats.norm.cdf(np.asarray(z, np.float64))
        counts = np.bincount((uniform * 1000).astype(int), minlength=1000)
        assert stats.chisquare(counts).pvalue > FALSE_ALARM
        assert stats.kstest(uniform, "uniform").pvalue > FALSE_ALARM


def correlation_is_absent(x, y) -> bool:
    """Neither x y nor x^2 y^2 is correlated: both score within the law of independent normals."""
    quantile = stats.norm.isf(FALSE_ALARM / 4)
    n = x.size
    plain = (x * y).sum() / math.sqrt(n)
    squares = ((x * x - 1) * (y * y - 1)).sum() / (2 * math.sqrt(n))
    return abs(plain) < quantile and abs(squares) < quantile


@pytest.mark.parametrize(
    "other",
    [
        pytest.param((KEY, 1, 0), id="next step"),
        pytest.param((KEY, np.uint32(2**31), 0), id="far step"),
        pytest.param((KEY, 0, 1), id="next leaf"),
        pytest.param((OTHER_KEY, 0, 0), id="other root"),
    ],
)
def test_noise_of_other_steps_leaves_and_roots_is_independent(other):
    shape = (2**20,)
    x = np.asarray(normal(KEY, 0, 0, shape), np.float64)
    y = np.asarray(normal(*other, shape), np.float64)
    assert correlation_is_absent(x, y)
    assert not correlation_is_absent(x, 0.99 * x + 0.01 * y)


@pytest.mark.parametrize("lag", [1, 2, 3, 4, 7, 8, 64, 1024, 2**16, 2**19])
def test_noise_of_other_coordinates_is_independent(lag):
    x = np.asarray(normal(KEY, 5, 0, (2**20,)), np.float64)
    assert correlation_is_absent(x[lag:], x[:-lag])


# --- purity ----------------------------------------------------------------------------------


def test_a_coordinate_does_not_depend_on_the_shape_around_it():
    long = np.asarray(normal(KEY, 7, 2, (1003,)))
    for shape in [(17,), (), (10, 100), (5, 10, 20)]:
        part = np.asarray(normal(KEY, 7, 2, shape)).reshape(-1)
        np.testing.assert_array_equal(part, long[: part.size])


def test_a_leaf_is_numbered_by_its_place_in_the_tree():
    tree = {"b": jnp.zeros((3, 4)), "a": [jnp.zeros(5), jnp.zeros(())]}
    out = noised(tree, KEY, 9, np.float32(1))
    assert jax.tree.structure(out) == jax.tree.structure(tree)
    for number, leaf in enumerate(jax.tree.leaves(out)):
        z = normal(KEY, 9, number, leaf.shape)
        np.testing.assert_allclose(leaf, z, atol=2 * float(grid(1.0)))


def test_the_divisor_divides_the_noised_sum_exactly():
    sums = {"w": jnp.linspace(-5, 5, 1001)}
    whole = noised(sums, KEY, 12, np.float32(STDDEV))
    exact = np.asarray(whole["w"]) / np.float32(48.0)
    mean = noised(sums, KEY, 12, np.float32(STDDEV), divisor=np.float32(48.0))
    np.testing.assert_array_equal(mean["w"], exact)


SHAPES = [(8 * 1001,), (8, 3, 5)]


def digest_on_mesh(devices: int) -> str:
    """SHA-256 of the noised sums, computed with every leaf sharded over `devices` devices."""
    mesh = jax.make_mesh((devices,), ("x",), devices=jax.devices()[:devices])
    shard = jax.NamedSharding(mesh, jax.P("x"))
    sums = [jax.device_put(np.arange(math.prod(s), dtype=np.float32).reshape(s), shard)
            for s in SHAPES]  # fmt: skip
    last = jax.NamedSharding(mesh, jax.P(None, "x"))
    sums.append(jax.device_put(np.ones((9, 8 * 7), np.float32), last))
    sums.append(jax.device_put(np.ones(1003, np.float32), jax.NamedSharding(mesh, jax.P())))
    out = noised(sums, KEY, jnp.int32(3), jnp.float32(STDDEV))
    for before, after in zip(sums, out, strict=True):
        assert after.sharding.is_equivalent_to(before.sharding, after.ndim)
    return hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in out)).hexdigest()


EIGHT_DEVICES = """
import sys
sys.path.insert(0, sys.argv[1])
import test_gaussian as t
print(*[t.digest_on_mesh(int(devices)) for devices in sys.argv[2:]])
print(t.communicates_on_mesh(8))
"""


def communicates_on_mesh(devices: int) -> bool:
    """Whether the compiled noising of a sharded array moves anything between devices."""
    mesh = jax.make_mesh((devices,), ("x",), devices=jax.devices()[:devices])
    sums = jax.device_put(np.zeros((64, 129), np.float32), jax.NamedSharding(mesh, jax.P("x")))
    text = noised.lower(sums, KEY, jnp.int32(0), jnp.float32(1)).compile().as_text()
    return any(word in text for word in ("all-", "collective", "permute"))


@pytest.mark.long
@pytest.mark.parametrize("devices", ["8", pytest.param("2 4 8", marks=pytest.mark.long)])
def test_noise_is_bit_equal_on_1_2_4_and_8_devices_and_needs_no_communication(devices):
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    result = subprocess.run(
        [sys.executable, "-c", EIGHT_DEVICES, os.path.dirname(__file__), *devices.split()],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    *digests, communicates = result.stdout.split()
    assert len(digests) == len(devices.split())
    assert set(digests) == {digest_on_mesh(1)}  # and as in this process, which has one device
    assert communicates == "False"


# --- the grid --------------------------------------------------------------------------------


@given(st.floats(2.0**-99, 2.0**100, width=32))
def test_the_grid_is_a_power_of_two_that_stddev_spans_2_to_the_18_to_19_times(stddev):
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
def test_output_is_the_exact_sum_plus_noise_rounded_stochastically_to_the_grid(stddev, magnitude):
    """It is g ceil((S + stddev z) / g - U), as the module claims, by the key's own z and U."""
    stddev, size, step = float(np.float32(stddev)), 20_000, 21
    rng = np.random.default_rng(4)
    sums = (rng.standard_normal(size) * magnitude * stddev).astype(np.float32)
    spacing = float(grid(stddev))
    output = np.asarray(noised(sums, KEY, step, np.float32(stddev)), np.float64) / spacing
    assert np.all(output == np.round(output))

    scaled = np.asarray(normal(KEY, step, 0, (size,)), np.float64) * (stddev / spacing)
    word = np.asarray(noise.words_at(KEY, step, 0, (size,))[3])
    uniform = ((word >> 9) + 0.5) * 2.0**-23
    whole = np.rint(sums.astype(np.float64) / spacing)
    rest = scaled + (sums.astype(np.float64) / spacing - whole) - uniform
    error = 4 * 2.0**-24 * np.abs(scaled) + 2.0**-22  # float32 products, and the one inexact sum
    # Integers that float64 holds, or (beyond 2^53) whose float32 is that of `whole`.
    least, most = ((whole + np.ceil(rest + e)).astype(np.float32) for e in (-error, error))
    assert np.all((least <= output) & (output <= most))
    assert np.mean(least == most) > 0.7


@pytest.mark.parametrize(
    "fraction", [0.25, -0.3, *(pytest.param(f, marks=pytest.mark.long) for f in (0.5, 1e-3))]
)
def test_fractions_of_a_cell_are_rounded_with_the_noise_and_not_before(fraction):
    """Sums rounded by themselves would differ by a whole cell, or by none, in every coordinate."""
    size = 2**20
    zero, moved = (
        np.asarray(noised(jnp.full(size, sums, jnp.float32), KEY, 33, np.float32(STDDEV)), float)
        for sums in (0.0, fraction * float(grid(STDDEV)))
    )
    difference = (moved - zero) / float(grid(STDDEV))
    assert set(difference.tolist()) == {0.0, math.copysign(1, fraction)}
    chance = abs(fraction)
    quantile = stats.norm.isf(FALSE_ALARM / 2)
    error = quantile * math.sqrt(chance * (1 - chance) / size)
    assert abs(abs(difference.mean()) - chance) < error


# --- arguments -------------------------------------------------------------------------------


@pytest.mark.parametrize("stddev", [-1.0, -1e-30, math.nan, math.inf])
def test_a_bad_stddev_is_refused_and_when_traced_spoils_the_result(stddev):
    with pytest.raises(ValueError, match="stddev must be finite"):
        add_gaussian_noise(jnp.zeros(3), KEY, 0, stddev)
    out = noised(jnp.zeros(3), KEY, 0, jnp.float32(stddev))
    assert not np.any(np.isfinite(np.asarray(out)))


@pytest.mark.parametrize("stddev", [0.0, 1e-38, 1e-44, 2.0**-101])
def test_a_stddev_below_the_range_of_the_grid_is_rounded_up(stddev):
    """0 too: processors may take subnormal numbers for it, and then noise would silently vanish."""
    out = np.asarray(noised(jnp.zeros(10_000), KEY, 0, stddev), np.float64)
    assert out.std() / 2.0**-100 == pytest.approx(1, rel=0.05)


@pytest.mark.parametrize("divisor", [0.0, -1.0, math.inf, math.nan])
def test_a_divisor_that_is_no_batch_size_is_refused(divisor):
    with pytest.raises(ValueError, match="divisor must be finite and positive"):
        add_gaussian_noise(jnp.zeros(3), KEY, 0, 1.0, divisor=divisor)


@pytest.mark.parametrize("bad", [-1, 2**32])
def test_a_step_or_leaf_outside_32_bits_is_refused(bad):
    with pytest.raises(ValueError, match="step must be in"):
        standard_normal(KEY, bad, 0, (3,))
    with pytest.raises(ValueError, match="leaf must be in"):
        standard_normal(KEY, 0, bad, (3,))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.int32])
def test_sums_that_are_not_float32_are_refused(dtype):
    with pytest.raises(ValueError, match="float32 sums only, but leaf 1"):
        add_gaussian_noise([jnp.zeros(2), jnp.zeros(2, dtype)], KEY, 0, 1.0)


@pytest.mark.parametrize(
    "key", [jnp.zeros(2, jnp.uint32), jnp.zeros(4, jnp.int32), jnp.zeros((), jnp.uint32)]
)
def test_a_key_of_another_form_is_refused(key):
    with pytest.raises(ValueError, match=r"a noise key is uint32 \[4\]"):
        standard_normal(key, 0, 0, (3,))


# --- cost ------------------------------------------------------------------------------------


LINE, TABLE = (2**20,), (2**17, 8)
LAYOUTS = [(LINE, "stddev"), (TABLE, "stddev, key and step")]
LAYOUTS += [
    pytest.param(shape, constant, marks=pytest.mark.long)
    for shape, constant in [
        (LINE, "nothing"),
        (TABLE, "nothing"),
        (TABLE, "stddev"),
        (LINE, "stddev, key and step"),
    ]
]


@pytest.mark.long
@pytest.mark.parametrize(("shape", "constant"), LAYOUTS)
def test_noise_is_made_once_and_never_stored_where_two_moments_read_it(shape, constant):
    """With Adam, noise takes no temporary of the parameters' size, and no coordinate two blocks.

    Nor does the division by the batch size. Whatever of its arguments the compiler knows.
    """
    size = math.prod(shape)
    adam = optax.adam(1e-3)

    def update(params, moments, row, key, step, stddev, divisor, noisy):
        total = jnp.zeros(shape).at[row + jnp.arange(5)].add(1.0)
        if "stddev" in constant:
            stddev = STDDEV
        if "key" in constant:
            key, step = KEY, 3
        if noisy:
            mean = add_gaussian_noise(total, key, step, stddev, divisor=divisor)
        else:
            mean = total / divisor
        updates, moments = adam.update(mean, moments, params)
        return optax.apply_updates(params, updates), moments

    params = jax.ShapeDtypeStruct(shape, jnp.float32)
    moments = jax.eval_shape(adam.init, params)
    stddev, integer = (jax.ShapeDtypeStruct((), d) for d in (jnp.float32, jnp.int32))
    key = jax.ShapeDtypeStruct((4,), jnp.uint32)
    arguments = params, moments, integer, key, integer, stddev, stddev
    update = jax.jit(update, donate_argnums=(0, 1), static_argnums=7)
    plain, noisy = (update.lower(*arguments, on).compile() for on in (False, True))
    temporary = [c.memory_analysis().temp_size_in_bytes for c in (plain, noisy)]
    one = 4 * size  # the sum itself
    assert temporary[1] < min(temporary[0], one) + size / 16
    products = re.findall(rf"= u64\[{size}\]\S* multiply\(", noisy.as_text())
    assert 0 < len(products) <= 20  # two products in each of ten rounds


@pytest.mark.noise
@pytest.mark.long
def test_noise_costs_no_more_than_jax_random_normal():
    """CPU time of noised sums over 2^23 coordinates, best of 5, interleaved in one process."""
    size = 2**23
    stock = jax.jit(lambda s, t: s + jax.random.normal(jax.random.key(t), (size,)))
    ours = jax.jit(lambda s, t: add_gaussian_noise(s, KEY, t, jnp.float32(STDDEV)))
    sums, best = jnp.zeros(size), {"stock": math.inf, "ours": math.inf}
    for repeat in range(6):
        for name, add in (("stock", stock), ("ours", ours)):
            start = time.process_time()
            jax.block_until_ready(add(sums, np.uint32(repeat)))
            if repeat:  # the first includes compilation
                best[name] = min(best[name], time.process_time() - start)
    assert best["ours"] <= best["stock"]
