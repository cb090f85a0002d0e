"""What is wrong with a sum is seen, wherever in the batch it is: one bug at a time is planted."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpsgd import Diagnostics, Mechanism, RootKey, Secure, dpsgd
from dpsgd.audit.probe import Probe
from dpsgd.audit.runtime.scales import loud, scales_check
from dpsgd.audit.runtime.sums import sum_checks
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

# Which check has to catch what is wrong.
BUGS = {
    "none": None,
    "1 % more than C": SINGLE,
    "norms up to 1.01 C are left as they are": BOUNDARY,
    "norms from C / 2 to C above it are left as they are": BOUNDARY,
    "a constant in the place of C": LOWER,
    "the last row is clipped to 2 C": PLACES,
    "one row in the middle counts twice": PLACES,
    "the neighbour's norm, in microbatches above 64": PLACES,
    "2 C in batches above 16": PLACES,
    "the batch is clipped": ADD_UP,
    "pairs are clipped": ADD_UP,
    "the mean is taken away": ADD_UP,
    "a member more is twice itself in a full batch": NEIGHBOURS,
    "padding counts": PADDING,
    "padding is multiplied away": PADDING,
    "NaN is not looked for": NAN,
    "a norm that overflows clips nothing": HUGE,
}
NAMES = list(BUGS)


def loss_fn(params, example):
    logit = jnp.dot(params["w"], example["x"]) + params["b"]
    return optax.sigmoid_binary_cross_entropy(logit, example["y"])


@functools.cache
def with_every_bug():
    """A sound algorithm into which the bug is planted that the rows' "bug" numbers."""
    sound = dpsgd(loss_fn, optax.sgd(0.1))

    def clipped_sum(params, batch, weights, scales):
        def is_(name):
            return batch["bug"][0] == NAMES.index(name)

        grads = jax.vmap(jax.grad(loss_fn), (None, 0))(params, batch)
        g = jnp.concatenate([grads["b"][:, None], grads["w"]], axis=1)
        size, place = len(weights), jnp.arange(len(weights))
        norm = jnp.linalg.norm(g, axis=1)
        real = (weights > 0) | is_("padding counts")
        count = weights.sum()
        shift = 1 if size > 64 else 0
        norm_used = jnp.where(
            is_("the neighbour's norm, in microbatches above 64"), jnp.roll(norm, shift), norm
        )
        clip = scales.l2_clip_norm * jnp.where(is_("1 % more than C"), 1.01, 1.0)
        clip = jnp.where(is_("a constant in the place of C"), CLIP, clip)
        clip = clip * jnp.where(is_("2 C in batches above 16") & (count > 16), 2.0, 1.0)
        last = is_("the last row is clipped to 2 C") & (place == size - 1)
        clip = clip * jnp.where(last, 2.0, 1.0)
        factor = jnp.minimum(1, clip * (1 - 1e-6) / norm_used)
        above = norm / clip
        kept = is_("norms up to 1.01 C are left as they are") & (above <= 1.01)
        kept |= is_("norms from C / 2 to C above it are left as they are") & (above >= 1.5)
        factor = jnp.where(kept & (above <= 2), 1.0, factor)
        factor *= jnp.where(is_("one row in the middle counts twice") & (place == size // 3), 2, 1)
        full = is_("a member more is twice itself in a full batch") & (count == size)
        factor *= jnp.where(full & ((place == 0) | (place == size - 1)), 2, 1)
        x = jnp.where((real & jnp.isfinite(norm))[:, None], g * factor[:, None], 0)
        careless = jnp.where(real[:, None], g * factor[:, None], 0)
        x = jnp.where(is_("NaN is not looked for"), careless, x)
        multiplied = weights[:, None] * g * factor[:, None]
        x = jnp.where(is_("padding is multiplied away"), multiplied, x)
        overflows = jnp.isinf(norm) & jnp.isfinite(g).all(axis=1) & real
        overflows &= is_("a norm that overflows clips nothing")
        x = jnp.where(overflows[:, None], g, x)
        total = x.sum(0)
        whole = jnp.where((real & jnp.isfinite(norm))[:, None], g, 0).sum(0)
        short = whole * jnp.minimum(1, scales.l2_clip_norm / jnp.linalg.norm(whole))
        total = jnp.where(is_("the batch is clipped"), short, total)
        pairs = jnp.where((real & jnp.isfinite(norm))[:, None], g, 0)[: size // 2 * 2]
        pairs = pairs.reshape(size // 2, 2, D + 1).sum(axis=1)
        norms = jnp.maximum(jnp.linalg.norm(pairs, axis=1, keepdims=True), 1e-30)
        of_pairs = (pairs * jnp.minimum(1, scales.l2_clip_norm / norms)).sum(0)
        total = jnp.where(is_("pairs are clipped"), of_pairs, total)
        centred = total * (1 - 1 / jnp.maximum(count, 2))
        total = jnp.where(is_("the mean is taken away"), centred, total)
        return {"b": total[0], "w": total[1:]}, Diagnostics(*(jnp.float32(0),) * 4)

    return sound._replace(clipped_sum=clipped_sum)


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


@pytest.mark.parametrize("bug", BUGS)
def test_the_check_that_is_there_for_a_bug_catches_it(bug):
    rows = ROWS | {"bug": np.full(32, NAMES.index(bug), np.int32)}
    checks = checks_of(with_every_bug(), rows=rows)
    failed = {name for name, check in checks.items() if not check.passed}
    assert set(BUGS.values()) - {None} | {SCALES} == set(checks) - {READ}
    assert all(check.made or name == READ for name, check in checks.items())
    if bug == "none":
        assert not failed, checks
    else:
        assert BUGS[bug] in failed, checks


def mixed(params, example):
    logit = jnp.dot(params["w"], example["x"].astype(params["w"].dtype)) + params["b"]
    return optax.sigmoid_binary_cross_entropy(logit, example["y"].astype(logit.dtype))


LONG = pytest.mark.long  # the audit of each is tested with the audit
KINDS = {
    "more places than are added up at once": {"sampler": Deterministic(6000, 3000)},
    "one example a batch": {"sampler": Deterministic(N, 1)},
    "several passes": {"sampler": Poisson(N, 90, overflow="accumulate", max_batch_size=40)},
    "exact noise": {"noise": Secure()},
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
    left_out = {PADDING, NAN} if alone else set()
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
@pytest.mark.parametrize("noise", [None, Secure()], ids=["fast", "exact"])
def test_scales_that_are_not_those_of_the_configuration_are_caught(
    field, factor, noise, monkeypatch
):
    sound = Mechanism.scales

    def planted(mechanism):
        scales = sound(mechanism)
        grid = scales.grid
        if grid is not None and field == "noise_stddev":
            grid = grid._replace(cells=np.int32(grid.cells * factor))
        return dataclasses.replace(
            scales, **{field: np.float32(factor) * getattr(scales, field)}, grid=grid
        )

    mechanism = Mechanism(Deterministic(N, B), 1.0, CLIP)
    mechanism = dataclasses.replace(mechanism, noise=noise or mechanism.noise)
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
