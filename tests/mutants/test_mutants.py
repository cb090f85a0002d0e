"""Planted bugs: each breaks training in one way, and the coupled audit must say in which.

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
from dpsgd.audit.coupled import coupled_audit
from dpsgd.audit.sampler import sampler_checks
from dpsgd.noise.gaussian import add_gaussian_noise
from samplers import BallsAndBins, Deterministic, Poisson, Shuffle
from samplers.base import Participations

pytestmark = [pytest.mark.mutants, pytest.mark.usefixtures("unoptimised")]

N, B, EPOCHS = 200, 10, 2
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
    half_noise: "noise has standard deviation sigma C, in every leaf",
    no_noise_on_one_leaf: "noise has standard deviation sigma C, in every leaf",
    noise_after_the_mean: "noise has standard deviation sigma C, in every leaf",
    noise_scaled_for_the_mean: "noise has standard deviation sigma C, in every leaf",
    one_noise_for_all_steps: "noise of different steps is independent",
    one_noise_for_all_leaves: "noise of different leaves is independent",
    one_noise_for_two_coordinates: "noise of different coordinates is independent",
    uniform_noise: "noise is normal",
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
STEPS = {divided_by_the_realised_size: "noise and divisor do not depend on the batch"}
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
    mechanism = Mechanism(Poisson(N, B, EPOCHS), noise_multiplier=1.0, l2_clip_norm=CLIP)
    return coupled_audit(algorithm, mechanism, params, data, root=RootKey.from_insecure_seed(0))


def failed(checks):
    return {check.name for check in checks if not check.passed}


@pytest.fixture(scope="module", autouse=True)
def one_audit_of_the_sampler():
    """The steps differ and the sampler is one: what was found of it is not found again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dpsgd.audit.coupled.sampler_checks", functools.cache(sampler_checks))
        yield


@pytest.mark.parametrize(("bug", "check"), STEPS.items(), ids=[bug.__name__ for bug in STEPS])
def test_a_planted_bug_of_the_step_is_caught(bug, check):
    assert check in failed(audit(with_every_bug(), bug).checks)


@pytest.fixture(scope="module")
def report():
    return audit(with_every_bug())


def test_without_a_bug_the_same_audit_passes(report):
    assert report.passed, report.lines()


@pytest.mark.long  # measures time
def test_an_audit_takes_at_most_ten_seconds_of_one_core():
    started = time.process_time()
    audit(dpsgd(loss_fn, optax.sgd(0.1)))
    sampler_checks(POISSON, POISSON, seed=0)
    assert time.process_time() - started < 10


# Bugs of the sampler: who draws, and whose price is claimed.


class SamplingKeyReused(BallsAndBins):
    """Draws every epoch by the key of the first."""

    def participations(self, seed, epoch, chunk):
        return super().participations(seed, 0, chunk)


class PoissonKeyReused(Poisson):
    """Draws every epoch by the key of the first."""

    def participations(self, seed, epoch, chunk):
        return super().participations(seed, 0, chunk)


class FirstEpochRepeated(Poisson):
    """Trains on the first epoch's batches again and again; the rows know nothing of it."""

    def drawn_epoch(self, epoch):
        return 0


class SeedIgnored(Poisson):
    """Draws the same batches in every run: whoever has the program knows them."""

    def participations(self, seed, epoch, chunk):
        return super().participations(0, epoch, chunk)


class NeighboursTogether(BallsAndBins):
    """Lets an example follow its neighbour."""

    def participations(self, seed, epoch, chunk):
        examples, steps = super().participations(seed, epoch, chunk)
        return Participations(examples, np.repeat(steps[::2], 2)[: steps.size])


class EarlyStepsFavoured(BallsAndBins):
    """Draws a step by a generator that is not uniform."""

    def participations(self, seed, epoch, chunk):
        examples, steps = super().participations(seed, epoch, chunk)
        _, others = super().participations(seed + 2**128, epoch, chunk)
        return Participations(
            examples, np.where(examples % 8 == 0, np.minimum(steps, others), steps)
        )


POISSON, BINS = Poisson(N, B, EPOCHS), BallsAndBins(N, B, EPOCHS)
SHUFFLE, IN_ORDER = Shuffle(N, B, EPOCHS), Deterministic(N, B, EPOCHS)
FIXED = dataclasses.replace(BINS, assignment="fixed")
SAMPLERS = {
    "shuffle claimed as Poisson": (
        SHUFFLE, POISSON, "how often an example takes part is binomial"),
    "the order of the file claimed as Poisson": (
        IN_ORDER, POISSON, "draws of different seeds are independent"),
    "balls-and-bins claimed as Poisson": (
        BINS, POISSON, "how often an example takes part is binomial"),
    "Poisson claimed as balls-and-bins": (
        POISSON, BINS, "everybody takes part once an epoch"),
    "shuffle claimed as balls-and-bins": (
        SHUFFLE, BINS, "batch sizes vary as they should"),
    "fixed bins claimed as redrawn": (
        FIXED, BINS, "epochs are independent, as claimed"),
    "redrawn bins claimed as fixed": (
        BINS, FIXED, "epochs are alike, as claimed"),
    "two epochs priced as one": (
        POISSON, POISSON.with_epochs(1), "the run has no more steps than priced"),
    "two orders priced as one": (
        SHUFFLE, SHUFFLE.with_epochs(1), "nobody takes part more often than priced"),
    "sampling key reused in every epoch, bins": (
        SamplingKeyReused(N, B, EPOCHS), BINS, "epochs are independent, as claimed"),
    "sampling key reused in every epoch, Poisson": (
        PoissonKeyReused(N, B, EPOCHS), POISSON, "epochs are independent, as claimed"),
    "the first epoch's batches repeated": (
        FirstEpochRepeated(N, B, EPOCHS), POISSON, "the batches are the rows that were claimed"),
    "seed ignored": (
        SeedIgnored(N, B, EPOCHS), POISSON, "draws of different seeds are independent"),
    "neighbours drawn together": (
        NeighboursTogether(N, B, EPOCHS), BINS, "examples are independent of one another"),
    "early steps favoured": (
        EarlyStepsFavoured(N, B, EPOCHS), BINS, "all steps take their share of the examples"),
}  # fmt: skip


@pytest.mark.parametrize(("sampler", "claimed", "check"), SAMPLERS.values(), ids=SAMPLERS)
def test_a_planted_bug_of_the_sampler_is_caught(sampler, claimed, check):
    assert check in failed(sampler_checks(sampler, claimed, seed=2**128 + 1))


@pytest.mark.parametrize("sampler", [POISSON, BINS, FIXED, SHUFFLE, IN_ORDER], ids=repr)
def test_without_a_bug_the_same_checks_of_the_sampler_pass(sampler):
    assert not failed(sampler_checks(sampler, sampler, seed=2**128 + 1))


def test_every_check_of_the_audit_has_a_bug_to_catch(report):
    wanted = {*STEPS.values(), *(check for _, _, check in SAMPLERS.values())}
    wanted |= {  # whose bugs are in test_noise_mutants.py
        "no noise is used twice",
        "other generations and roots have other keys of noise",
        "the program is given sigma, C and b of the configuration",
    }
    wanted |= {  # whose bugs are quick, in audit/test_{sampler,sums,update} and noise/test_base
        "the program is given the scales of the configuration",
        "an example is clipped wherever it lies",
        "neighbours of a full batch differ by at most C",
        "the update sees the release alone",
        "batches of one release leave one state",
        "noise has the bands and the columns that were claimed",
        "all examples take part at the rate that was claimed",
        "batches hold as many rows and units as claimed",
        "everybody is where the order says",
        "pairs of examples take part together as often as claimed",
    }
    made = {check.name for check in report.checks}
    for sampler in (BINS, FIXED, SHUFFLE, IN_ORDER):
        made |= {check.name for check in sampler_checks(sampler, sampler, seed=1)}
    assert made == wanted
