"""Planted bugs: each breaks training in one way, and the audit must say in which.

The bugs are those that happened, or nearly, in programs for private training. Each names the check
that has to catch it, and each check of the audit has a bug that it alone is there for: a check that
is taken out, or blunted, turns a test red.
"""

import dataclasses
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpsgd import Mechanism, RootKey, dpsgd
from dpsgd.audit.audit import audit_program
from dpsgd.audit.runtime.flow import GIVEN, LEAVES
from dpsgd.audit.samplers.checks import sampler_checks
from dpsgd.noise.gaussian import add_gaussian_noise
from samplers import Poisson

pytestmark = [pytest.mark.mutants, pytest.mark.usefixtures("unoptimised")]

N, B, EPOCHS = 200, 10, 2
POISSON = Poisson(N, B, EPOCHS)
CLIP = 0.5


def loss_fn(params, example):
    logit = jnp.dot(params["w"], example["x"]) + params["b"]
    return optax.sigmoid_binary_cross_entropy(logit, example["y"])


# Bugs of the step. One program holds them all, and which is at work is one of its arguments: a
# column of the data.


@functools.cache
def with_every_bug():
    """Returns a sound algorithm into which the bug is planted that the rows' "bug" numbers."""
    algorithm = dpsgd(loss_fn, optax.sgd(0.1))
    sound = functools.partial(_sum_of, algorithm)
    sums = [bug if bug in SUMS else _as_it_is for bug in BUGS]
    noises = [bug if bug in NOISES else add_gaussian_noise for bug in BUGS]
    seen = []  # by the sum, for the update after it

    def clipped_sum(params, batch, weights, scales):
        number = batch["bug"].max()  # the audit has rows of zeros, too, and padding that is not
        seen.append((number, jnp.maximum(weights.sum(), 1)))
        _, diagnostics = algorithm.clipped_sum(params, batch, weights, scales)
        total = _switch(sums, number, sound, params, batch, weights, scales)
        return total, diagnostics

    def update(state, total, key, scales):
        number, size = seen.pop()
        zeros = jax.tree.map(jnp.zeros_like, total)
        noise = _switch(noises, number, zeros, key, state.step, scales.noise_stddev)
        divided = number == BUGS.index(divided_by_the_realised_size)
        scales = dataclasses.replace(
            scales,
            # The least there is, 2^-100: without any, it would be another program.
            noise_stddev=jnp.zeros_like(scales.noise_stddev),
            expected_batch_size=jnp.where(divided, size, scales.expected_batch_size),
        )
        return algorithm.update(state, jax.tree.map(jnp.add, total, noise), key, scales)

    return algorithm._replace(clipped_sum=clipped_sum, update=update)


def _switch(functions, number, *arguments):
    """Calls `functions[number]`; what is several times among them is compiled once."""
    distinct = list(dict.fromkeys(functions))
    places = jnp.array([distinct.index(function) for function in functions])
    return jax.lax.switch(places[number], [lambda f=f: f(*arguments) for f in distinct])


def _as_it_is(sound, params, batch, weights, scales):
    return sound(params, batch, weights, scales)


def no_bug():
    """What the audit passes."""


def divided_by_the_realised_size():
    """Planted in the update."""


def _sum_of(algorithm, params, batch, weights, scales):
    return algorithm.clipped_sum(params, batch, weights, scales)[0]


def _clip(tree, norm):
    return jax.tree.map(lambda x: x * jnp.minimum(1, norm / optax.tree.norm(tree)), tree)


def half_noise(zeros, key, step, stddev):
    return add_gaussian_noise(zeros, key, step, stddev / 2)


def no_noise_on_one_leaf(zeros, key, step, stddev):
    return add_gaussian_noise(zeros, key, step, stddev) | {"b": zeros["b"]}


def noise_after_the_mean(zeros, key, step, stddev):
    return add_gaussian_noise(zeros, key, step, stddev * B)  # of the mean, yet scaled for the sum


def noise_scaled_for_the_mean(zeros, key, step, stddev):
    return add_gaussian_noise(zeros, key, step, stddev / B)  # of the sum, and divided with it


def one_noise_for_all_steps(zeros, key, step, stddev):
    return add_gaussian_noise(zeros, key, jnp.zeros_like(step), stddev)


def one_noise_for_all_leaves(zeros, key, step, stddev):
    return jax.tree.map(lambda leaf: add_gaussian_noise(leaf, key, step, stddev), zeros)


def one_noise_for_two_coordinates(zeros, key, step, stddev):
    noise = add_gaussian_noise(zeros, key, step, stddev)
    return jax.tree.map(lambda z: z if z.ndim == 0 else jnp.repeat(z[::2], 2)[: z.size], noise)


def uniform_noise(zeros, key, step, stddev):
    normal = add_gaussian_noise(zeros, key, step, stddev)
    cdf = jax.tree.map(lambda z: jax.scipy.stats.norm.cdf(z / stddev), normal)
    return jax.tree.map(lambda u: stddev * jnp.sqrt(12.0) * (u - 0.5), cdf)


def padding_counted(sound, params, batch, weights, scales):
    return sound(params, batch, jnp.ones_like(weights), scales)


def clipped_too_loosely(sound, params, batch, weights, scales):
    return sound(
        params, batch, weights, dataclasses.replace(scales, l2_clip_norm=1.01 * scales.l2_clip_norm)
    )


def clipped_to_a_constant(sound, params, batch, weights, scales):
    return sound(
        params, batch, weights, dataclasses.replace(scales, l2_clip_norm=jnp.float32(CLIP))
    )


def batch_clipped(sound, params, batch, weights, scales):
    total = sound(
        params, batch, weights, dataclasses.replace(scales, l2_clip_norm=jnp.float32(jnp.inf))
    )
    return _clip(total, scales.l2_clip_norm)


def microbatch_clipped(sound, params, batch, weights, scales):
    def of_pair(batch, weights):
        return batch_clipped(sound, params, batch, weights, scales)

    count = weights.size // 2
    pairs = jax.tree.map(lambda x: x[: 2 * count].reshape(count, 2, *x.shape[1:]), batch)
    sums = jax.vmap(of_pair)(pairs, weights[: 2 * count].reshape(count, 2))
    return jax.tree.map(lambda x: jnp.nan_to_num(x).sum(axis=0), sums)


def nan_poisons(sound, params, batch, weights, scales):
    def clipped(example, weight):
        gradient = _clip(jax.grad(loss_fn)(params, example), scales.l2_clip_norm)
        return jax.tree.map(lambda g: jnp.where(weight > 0, g, 0), gradient)

    return jax.tree.map(lambda g: g.sum(axis=0), jax.vmap(clipped)(batch, weights))


def masked_by_multiplication(sound, params, batch, weights, scales):
    def clipped(example, weight):
        gradient = _clip(jax.grad(loss_fn)(params, example), scales.l2_clip_norm)
        return jax.tree.map(lambda g: weight * g, gradient)  # 0 * NaN is NaN

    return jax.tree.map(lambda g: g.sum(axis=0), jax.vmap(clipped)(batch, weights))


NOISES = {
    half_noise: "noise is what key, step and place give, in every leaf",
    no_noise_on_one_leaf: "noise is what key, step and place give, in every leaf",
    noise_after_the_mean: "noise is what key, step and place give, in every leaf",
    noise_scaled_for_the_mean: "noise is what key, step and place give, in every leaf",
    one_noise_for_all_steps: "noise is what key, step and place give, in every leaf",
    one_noise_for_all_leaves: "noise is what key, step and place give, in every leaf",
    one_noise_for_two_coordinates: "noise is what key, step and place give, in every leaf",
    uniform_noise: "noise is what key, step and place give, in every leaf",
}
SUMS = {
    padding_counted: "padding is inert",
    clipped_too_loosely: "an example moves the sum by at most C",
    clipped_to_a_constant: "a lower C clips to it",
    batch_clipped: "examples are clipped one by one: sums add up",
    microbatch_clipped: "examples are clipped one by one: sums add up",
    nan_poisons: "a NaN example moves the sum by at most C",
    masked_by_multiplication: "padding is inert",
}
STEPS = {divided_by_the_realised_size: "noise is what key, step and place give, in every leaf"}
STEPS |= NOISES | SUMS
BUGS = [no_bug, *STEPS]


def audit(algorithm, bug=no_bug):
    rng = np.random.default_rng(0)
    data = {
        "x": rng.normal(size=(N, 100)).astype(np.float32),
        "y": rng.integers(0, 2, N).astype(np.float32),
        "bug": np.full(N, BUGS.index(bug), np.int32),
    }
    params = {"w": jnp.full(100, 0.1), "b": jnp.zeros(())}
    mechanism = Mechanism(POISSON, noise_multiplier=1.0, l2_clip_norm=CLIP)
    return audit_program(algorithm, mechanism, params, data, root=RootKey.from_insecure_seed(0))


def failed(checks):
    return {check.name for check in checks if not check.passed}


@pytest.fixture(scope="module", autouse=True)
def one_audit_of_the_sampler():
    """The steps differ and the sampler is one: what was found of it is not found again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dpsgd.audit.audit.sampler_checks", functools.cache(sampler_checks))
        yield


@pytest.mark.parametrize(("bug", "check"), STEPS.items(), ids=[bug.__name__ for bug in STEPS])
def test_a_planted_bug_of_the_step_is_caught(bug, check):
    assert check in failed(audit(with_every_bug(), bug).checks)


@pytest.fixture(scope="module")
def report():
    return audit(with_every_bug())


def test_without_a_bug_the_same_audit_passes(report):
    # Rows say which bug there is, and the trace has all of them.
    assert failed(report.checks) <= {LEAVES, GIVEN}, report.lines()


@pytest.mark.long  # measures time
def test_an_audit_takes_at_most_ten_seconds_of_one_core():
    started = time.process_time()
    audit(dpsgd(loss_fn, optax.sgd(0.1)))
    sampler_checks(POISSON, POISSON, seed=0)
    assert time.process_time() - started < 10


def test_every_check_of_the_audit_has_a_bug_to_catch(report):
    wanted = {
        *STEPS.values(),
        # whose bugs are in test_noise_mutants.py
        "other attempts and roots have other keys",
        # in audit/test_flow.py
        LEAVES,
        GIVEN,
        # in audit/test_sums.py, audit/test_blocks.py and noise/test_base.py
        "blocks train on the batches that are drawn",
        "blocks are given the keys, scales and steps of the run",
        "the program is given the scales of the configuration",
        "an example is clipped wherever it lies",
        "an example just above C is clipped",
        "huge examples move the sum by at most C each",
        "the rows that are drawn are those that are read",
        "neighbours of a full batch differ by at most C",
        "noise has the bands and the columns that were claimed",
    }
    of_sampler = {check.name for check in sampler_checks(POISSON, POISSON, seed=1)}
    assert {check.name for check in report.checks} - of_sampler == wanted
