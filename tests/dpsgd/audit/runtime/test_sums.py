"""What is wrong with a sum is seen, wherever in the batch it is: one bug at a time is planted."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpsgd import Diagnostics, Mechanism, RootKey, dpsgd
from dpsgd.audit.probe import Probe
from dpsgd.audit.runtime.scales import loud, scales_check
from dpsgd.audit.runtime.sums import ADDS_UP, UNCLIPPED, sum_checks
from samplers import Deterministic, Poisson

pytestmark = [pytest.mark.audit, pytest.mark.usefixtures("unoptimised")]

N, B, D, CLIP = 400, 90, 20, 0.5
RNG = np.random.default_rng(0)
ROWS = {
    "x": RNG.normal(size=(32, D)).astype(np.float32),
    "y": RNG.integers(0, 2, 32).astype(np.float32),
}
BOUNDARY = "an example just above C is clipped"
LOWER = "a lower C clips to it"
SINGLE = "an example moves the sum by at most C"
PLACES = "an example is clipped wherever it lies"
ADD_UP = "examples are clipped one by one: sums add up"
NEIGHBOURS = "neighbours of a full batch differ by at most C"
PADDING = "padding is inert"
NAN = "a NaN example moves the sum by at most C"
HUGE = "huge examples move the sum by at most C each"
READ = "the rows that are drawn are those that are read"
SCALES = "the program is given the scales of the configuration"


def loss_fn(params, example):
    logit = jnp.dot(params["w"], example["x"]) + params["b"]
    return optax.sigmoid_binary_cross_entropy(logit, example["y"])


class Batch:
    """Gradients of a batch, and what a sound rule makes of them."""

    def __init__(self, params, batch, weights, clip):
        grads = jax.vmap(jax.grad(loss_fn), (None, 0))(params, batch)
        self.g = jnp.concatenate([grads["b"][:, None], grads["w"]], axis=1)
        self.norm = jnp.linalg.norm(self.g, axis=1)
        self.weights, self.clip = weights, clip
        self.real, self.count, self.size = weights > 0, weights.sum(), len(weights)
        self.place = jnp.arange(self.size)
        self.at_an_end = (self.place == 0) | (self.place == self.size - 1)

    def shortened(self, clip=None, norm=None):
        clip, norm = self.clip if clip is None else clip, self.norm if norm is None else norm
        return self.g * jnp.minimum(1, clip * (1 - 1e-6) / norm)[:, None]

    def rows(self, clip=None, norm=None, real=None, kept=False):
        """What each example adds, of those that count."""
        x = jnp.where(jnp.reshape(kept, (-1, 1)), self.g, self.shortened(clip, norm))
        real = self.real if real is None else real
        return jnp.where((real & jnp.isfinite(self.norm))[:, None], x, 0)

    def times(self, factor):
        return self.rows() * factor[:, None]


def clipped(x, clip):
    norm = jnp.linalg.norm(x, axis=-1, keepdims=True)
    return x * jnp.minimum(1, clip / jnp.maximum(norm, 1e-30))


def overflowing(b):
    over = jnp.isinf(b.norm) & jnp.isfinite(b.g).all(axis=1) & b.real
    return jnp.where(over[:, None], b.g, b.rows())


# Which check has to catch what is wrong with what is added up.
BUGS = {
    "none": (None, lambda b: b.rows()),
    "1 % more than C": (SINGLE, lambda b: b.rows(1.01 * b.clip)),
    "norms up to 1.01 C are left as they are": (
        BOUNDARY, lambda b: b.rows(kept=b.norm <= 1.01 * b.clip)),
    "norms from C / 2 to C above it are left as they are": (
        BOUNDARY, lambda b: b.rows(kept=(b.norm >= 1.5 * b.clip) & (b.norm <= 2 * b.clip))),
    "a constant in the place of C": (LOWER, lambda b: b.rows(CLIP)),
    "the last row is clipped to 2 C": (
        PLACES, lambda b: b.rows(b.clip * (1 + (b.place == b.size - 1)))),
    "one row in the middle counts twice": (
        PLACES, lambda b: b.times(1 + (b.place == b.size // 3))),
    "the neighbour's norm, in microbatches above 64": (
        PLACES, lambda b: b.rows(norm=jnp.roll(b.norm, int(b.size > 64)))),
    "2 C in batches above 16": (PLACES, lambda b: b.rows(b.clip * (1 + (b.count > 16)))),
    "the batch is clipped": (ADD_UP, lambda b: clipped(b.rows(jnp.inf).sum(0)[None], b.clip)),
    "pairs are clipped": (
        ADD_UP, lambda b: clipped(
            b.rows(jnp.inf)[: b.size // 2 * 2].reshape(-1, 2, D + 1).sum(1), b.clip)),
    "the mean is taken away": (ADD_UP, lambda b: b.rows() * (1 - 1 / jnp.maximum(b.count, 2))),
    "rows lean to the batch's mean": (
        ADDS_UP, lambda b: b.rows() + 0.01 * b.real[:, None] * b.rows().mean(0)),
    "rows that are not clipped lean to the mean": (
        UNCLIPPED, lambda b: b.rows()
        + 0.01 * (b.real & (b.norm < b.clip))[:, None] * b.rows().mean(0)),
    "a member more is twice itself in a full batch": (
        NEIGHBOURS, lambda b: b.times(1 + (b.at_an_end & (b.count == b.size)))),
    "padding counts": (PADDING, lambda b: b.rows(real=b.place >= 0)),
    "padding is multiplied away": (PADDING, lambda b: b.weights[:, None] * b.shortened()),
    "NaN is not looked for": (NAN, lambda b: jnp.where(b.real[:, None], b.shortened(), 0)),
    "a norm that overflows clips nothing": (HUGE, overflowing),
}  # fmt: skip


def of(change):
    """An algorithm whose sum is that of the rows that `change(batch)` gives."""

    def clipped_sum(params, batch, weights, scales):
        total = change(Batch(params, batch, weights, scales.l2_clip_norm)).sum(0)
        return {"b": total[0], "w": total[1:]}, Diagnostics(*(jnp.float32(0),) * 4)

    return dpsgd(loss_fn, optax.sgd(0.1))._replace(clipped_sum=clipped_sum)


def start(dtype=jnp.float32):
    return {"w": jnp.full(D, 0.1, dtype), "b": jnp.zeros((), dtype)}


def checks_of(algorithm, sampler=None, rows=ROWS, noise=None, dtype=jnp.float32):
    mechanism = Mechanism(sampler or Deterministic(N, B), 1.0, CLIP)
    if noise is not None:
        mechanism = dataclasses.replace(mechanism, noise=noise)
    state = algorithm.init(start(dtype), mechanism, rows)
    root = RootKey.from_insecure_seed(0)
    program = Probe(algorithm, mechanism, state, rows, root=root)
    return {check.name: check for check in sum_checks(program)}


@pytest.mark.short(
    "none", "1 %*", "norms up to*", "a constant*", "the last*", "pairs*", "a member*",
    "padding is*", "NaN*", "a norm that*",
)  # fmt: skip
@pytest.mark.parametrize(("check", "change"), BUGS.values(), ids=BUGS)
def test_the_check_that_is_there_for_a_bug_catches_it(check, change):
    checks = checks_of(of(change))
    failed = {name for name, found in checks.items() if not found.passed}
    assert {of for of, _ in BUGS.values()} - {None} | {SCALES} == set(checks) - {READ}
    assert all(found.made or name == READ for name, found in checks.items())
    assert check in failed if check else not failed, checks


def mixed(params, example):
    logit = jnp.dot(params["w"], example["x"].astype(params["w"].dtype)) + params["b"]
    return optax.sigmoid_binary_cross_entropy(logit, example["y"].astype(logit.dtype))


LONG = pytest.mark.long  # the audit of each is tested with the audit
KINDS = {
    "more places than are added up at once": {"sampler": Deterministic(6000, 3000)},
    "one example a batch": {"sampler": Deterministic(N, 1)},
    "several passes": {"sampler": Poisson(N, 90, overflow="accumulate", max_batch_size=40)},
    "bfloat16": {"dtype": jnp.bfloat16},
    "float16": {"dtype": jnp.float16},
    "one row": {"sampler": Deterministic(1, 1)},
}
SHORT = 2


@pytest.mark.short("one example a batch")
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, id=name, marks=[LONG] * (k >= SHORT))
        for k, (name, kind) in enumerate(KINDS.items())
    ],
)
def test_sound_sums_of_every_kind_pass_and_rounding_stays_far_below_c(kind):
    checks = checks_of(dpsgd(mixed, optax.sgd(0.1), microbatch_size=700), **kind)
    assert all(check.passed for check in checks.values()), checks
    alone = kind.get("sampler", Deterministic(N, B)).padded_batch_size == 1
    left_out = {PADDING, NAN, ADDS_UP, UNCLIPPED} if alone else set()
    if kind.get("sampler") == Deterministic(1, 1):
        left_out |= {HUGE, READ}
    assert {name for name in checks if not checks[name].made} == left_out
    for name in (ADD_UP, NEIGHBOURS):
        found, allowed = (float(checks[name].detail.split()[k]) for k in (0, 2))
        assert found <= allowed <= 1.3 * CLIP


def test_where_rounding_hides_an_example_the_check_is_not_made():
    sampler = Deterministic(4000, 2000)
    checks = checks_of(dpsgd(mixed, optax.sgd(0.1)), sampler, dtype=jnp.bfloat16)
    assert not checks[PLACES].made
    assert "rounding hides an example among more than 16 at a time" in checks[PLACES].detail


def test_without_gradients_nothing_is_said_to_be_clipped():
    algorithm = dpsgd(lambda params, example: 0.0 * params["b"] * example["y"], optax.sgd(0.1))
    checks = checks_of(algorithm)
    assert all(check.passed for check in checks.values())
    assert not any(checks[name].made for name in (LOWER, PLACES, ADD_UP, NEIGHBOURS, PADDING, NAN))


@pytest.mark.parametrize("field", ["noise_stddev", "l2_clip_norm", "expected_batch_size"])
@pytest.mark.parametrize("factor", [0.5, 2])
def test_scales_that_are_not_those_of_the_configuration_are_caught(field, factor, monkeypatch):
    sound = Mechanism.scales

    def planted(mechanism):
        scales = sound(mechanism)
        return dataclasses.replace(scales, **{field: np.float32(factor) * getattr(scales, field)})

    mechanism = Mechanism(Deterministic(N, B), 1.0, CLIP)
    assert scales_check([mechanism]).passed
    monkeypatch.setattr(Mechanism, "scales", planted)
    assert not scales_check([mechanism]).passed


def short(numbers):
    """What is left of numbers that are read as 16 bits."""
    return numbers % 2**16


@pytest.mark.short("short")
@pytest.mark.parametrize("planted", [None, short])
def test_rows_whose_numbers_are_cut_short_are_seen(planted, monkeypatch):
    sound = Probe._plan

    def plan(program, *of):
        found = sound(program, *of)
        return found._replace(indices=found.indices if planted is None else planted(found.indices))

    monkeypatch.setattr(Probe, "_plan", plan)
    checks = checks_of(dpsgd(loss_fn, optax.sgd(0.1)), Deterministic(70_000, 16))
    assert checks[READ].made
    assert checks[READ].passed == (planted is None), checks[READ]


def test_loud_noise_is_that_of_the_run_and_hides_every_sum():
    mechanism = Mechanism(Deterministic(N, B), 2.0, 0.25)
    noisy = loud(mechanism)
    assert noisy.noise_multiplier * noisy.l2_clip_norm == 0.5
    assert noisy.l2_clip_norm < 2.0**-60
    least = Mechanism(Deterministic(N, B), 2.0, 2.0**-98)
    assert loud(least).noise_multiplier * loud(least).l2_clip_norm == 2.0**-97
