"""The tests of the noise's law are calibrated, and each sees what it is there for.

Every test here fails by chance once in a million times, and seeds are fixed.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

from dpsgd import Mechanism, RootKey, Secure, dpsgd
from dpsgd.audit.probe import Probe
from dpsgd.audit.report import FALSE_ALARM, CheckResult, correlation_pvalue, variance_pvalue
from dpsgd.audit.runtime import normality
from dpsgd.audit.runtime.blocks import STEPS, block_checks
from dpsgd.audit.runtime.noise import FULL, noise_checks
from dpsgd.engine.feed import Layout
from samplers import Poisson

pytestmark = pytest.mark.audit

CELL = 2.0**-18


def correlation(draws):
    other = np.linspace(-1, 2, draws.size)
    return correlation_pvalue(draws @ other / np.sqrt(draws @ draws * (other @ other)), draws.size)


@pytest.mark.parametrize("size", [2, 3, 100])
@pytest.mark.parametrize(
    "pvalue",
    [lambda draws: variance_pvalue(draws @ draws, draws.size), correlation],
    ids=["variance", "correlation"],
)
def test_p_values_of_normal_draws_are_uniform(pvalue, size):
    rng = np.random.default_rng(1)
    found = [pvalue(rng.normal(size=size)) for _ in range(2_000)]
    assert stats.kstest(found, "uniform").pvalue > 1e-6


EVERY = {
    "energies": normality.energies,
    "counts": lambda draws: normality.counts(draws, CELL),
    "lags": normality.lags,
    "repeats": lambda draws: normality.repeats([draws], CELL),
}


def pvalue_of(test, leaf):
    """Of all that one of the tests finds in a leaf."""
    tests = list(EVERY[test](leaf.astype(np.float32).ravel()))
    count = sum(np.size(pvalues) for _, pvalues in tests)
    return min(1.0, count * min(np.min(pvalues) for _, pvalues in tests))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_is_never_likely(value):
    assert variance_pvalue(value, 10) == 0
    assert correlation_pvalue(np.nan, 10) == 0
    assert not CheckResult.of("name", np.nan).passed
    leaf = np.random.default_rng(0).normal(size=(40, 20))
    leaf[3, 4] = value
    for test in ("energies", "counts", "lags"):
        assert pvalue_of(test, leaf) == 0


@pytest.mark.parametrize("test", EVERY)
def test_sound_draws_have_p_values_that_are_valid(test):
    """P(p <= x) <= x, up to chance."""
    rng = np.random.default_rng(2)
    grid = 2.0**18
    shapes = [(7,), (300,), (40, 30), (2, 3, 400)]
    found = [
        pvalue_of(test, np.round(rng.normal(size=shapes[k % 4]) * grid) / grid)
        for k in range(200)
        if k % 4 or test != "lags"  # 7 are too few
    ]
    for x in (0.01, 0.1, 0.3):
        count = int(np.sum(np.array(found) <= x))
        assert stats.binomtest(count, len(found), x, alternative="greater").pvalue > 1e-6
    assert min(found) > FALSE_ALARM


def part_without(leaf):
    leaf.ravel()[-300:] = 0


def row_halved(leaf):
    leaf[70] /= 2


def one_percent_without(leaf):
    leaf[np.random.default_rng(1).random(leaf.shape) < 0.01] = 0


def three_percent_less(leaf):
    leaf *= 0.97


def cut_at_three(leaf):
    np.clip(leaf, -3, 3, out=leaf)


def heavy_tails(leaf):
    few = np.random.default_rng(1).random(leaf.shape) < 1e-4
    leaf[few] = np.copysign(5.2, leaf[few])


def of_two_modes(leaf):
    leaf[:] = np.copysign(0.8, leaf) + 0.6 * np.random.default_rng(1).normal(size=leaf.shape)


def never_negative(leaf):
    np.abs(leaf, out=leaf)


def in_pairs(leaf):
    leaf[:, 1::2] = leaf[:, ::2]


def counter_wraps(leaf):
    leaf.ravel()[2**18 :] = leaf.ravel()[: leaf.size - 2**18]


def negated(leaf):
    leaf.ravel()[-1000:] = -leaf.ravel()[77:1077]


def with_other_signs(leaf):
    leaf[300] = leaf[7] * np.random.default_rng(1).choice([-1, 1], 1024)


def constant_stretch(leaf):
    leaf[5, 100:109] = leaf[5, 100]


BROKEN = {
    "energies": [part_without, row_halved, three_percent_less],
    "counts": [one_percent_without, cut_at_three, heavy_tails, of_two_modes, never_negative],
    "lags": [in_pairs],
    "repeats": [counter_wraps, negated, with_other_signs, constant_stretch],
}


@pytest.mark.parametrize(
    ("test", "broken"), [(test, broken) for test, some in BROKEN.items() for broken in some]
)
def test_draws_of_another_law_are_seen(test, broken):
    leaf = np.random.default_rng(0).normal(size=(512, 1024)).astype(np.float32)
    broken(leaf)
    assert pvalue_of(test, leaf) <= FALSE_ALARM


def test_arrays_that_share_draws_are_seen_and_named():
    rng = np.random.default_rng(0)
    sizes = [96, 20, 96, 5, 40]
    sound = {f"leaf {k}": rng.normal(size=size) for k, size in enumerate(sizes)}
    assert normality.normality_check(sound, CELL).passed
    for one, other in [(0, 2), (2, 4), (1, 4)]:
        shared, common = dict(sound), min(sizes[one], sizes[other])
        copy = sound[f"leaf {other}"].copy()
        copy[:common] = -3 * sound[f"leaf {one}"][:common]
        check = normality.normality_check(shared | {f"leaf {other}": copy}, CELL)
        assert not check.passed
        assert f"leaf {one} and leaf {other}" in check.detail
    large = {"large": rng.normal(size=2**18), "small": rng.normal(size=3000)}
    large["large"][1000:4000] = -large["small"]
    assert "equal coordinates" in normality.normality_check(large, CELL).detail


def loss_fn(params, example):
    return jnp.dot(params["w"], example)


def loss_of_a_key(params, example, key):
    return jnp.dot(params["w"], example * jax.random.bernoulli(key, 0.5, (40,)))


SAMPLER = Poisson(60, 6, 2)
KINDS = {
    "a loss that takes keys": (loss_of_a_key, Mechanism(SAMPLER, 0.05, 0.5)),
    "an integer grid of few cells": (loss_fn, Mechanism(SAMPLER, 2.0**-23, 0.5, Secure())),
    "hardly any noise": (loss_fn, Mechanism(SAMPLER, 2.0**-20, 0.5)),
    "next to the least C": (loss_fn, Mechanism(SAMPLER, 2.0, 2.0**-95)),
}


def loss_of_a_number(params, example):
    return (params["b"] * example.astype(params["b"].dtype)).astype(jnp.float32)


def test_noise_of_a_single_bfloat16_number_passes_whatever_the_root():
    """A release whose sum and noise cancel has little rounding, and the other one has much."""
    algorithm, mechanism = dpsgd(loss_of_a_number, optax.sgd(0.1)), Mechanism(SAMPLER, 1.0, 0.5)
    state = algorithm.init({"b": jnp.ones((), jnp.bfloat16)}, mechanism)
    rows = np.resize(np.array([1, -1], np.float32), 20)
    for seed in range(100):
        program = Probe(algorithm, mechanism, state, rows, root=RootKey.from_insecure_seed(seed))
        checks = noise_checks(program)
        assert all(check.passed for check in checks), (seed, checks)


@pytest.mark.short("hardly any noise", "next to the least C")
@pytest.mark.parametrize(("loss", "mechanism"), KINDS.values(), ids=KINDS)
def test_sound_noise_of_every_kind_passes_and_what_was_not_seen_is_told(loss, mechanism):
    algorithm = dpsgd(loss, optax.sgd(0.1))
    rows = np.random.default_rng(0).normal(size=(20, 40)).astype(np.float32)
    program = Probe(
        algorithm,
        mechanism,
        algorithm.init({"w": jnp.zeros(40)}, mechanism),
        rows,
        layout=Layout.of(SAMPLER, np.zeros((60, 40), np.float32), block_steps=8),
        root=RootKey.from_insecure_seed(0),
    )
    checks = noise_checks(program) + block_checks(program)
    assert all(check.passed for check in checks), checks
    left_out = [check.name for check in checks if not check.made]
    too_little_room = mechanism.l2_clip_norm < 2.0**-90
    assert left_out == too_little_room * [FULL, STEPS]
