"""A loss with a key: every example draws by its row number and the step, and by nothing else."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from recording import recorder

from dpsgd import (
    Mechanism,
    clipped_grad,
    dpsgd,
    explain,
    train_blocks,
)
from dpsgd.audit.audit import audit_program
from dpsgd.gradients.losses import example_keys, takes_key
from dpsgd.noise.keys import Keys, RootKey
from samplers import BallsAndBins, BatchSource, Multistage, Poisson, Shuffle, UnitTree
from samplers.shards import Shards

N, D = 40, 2
SEED = 7
ROOT = RootKey.from_insecure_seed(SEED)


def drawn(key):
    """D numbers in [0, 1) that are the key itself, to 24 bits each."""
    return (jax.random.key_data(key) >> 8).astype(jnp.float32) / 2**24


def draws_loss(params, example, key):
    """Its gradient is what is drawn, in the row of the example."""
    return jnp.dot(params[example["me"]], drawn(key))


def columns():
    return {"me": np.arange(N, dtype=np.int32)}


def expected(attempt, steps, shards=1):
    """The draws of every example in each step, for the keys as they are defined: [steps, N, D]."""
    key, numbers, of = ROOT.loss_key(attempt), np.arange(N), None
    if shards > 1:
        of = Shards(N, shards).shard_of(numbers)
        numbers = numbers - of * N // shards
    keys = jax.jit(jax.vmap(example_keys, (None, 0, None, None)))(
        key, jnp.arange(steps), numbers, of
    )
    return np.asarray(drawn(keys))


@functools.cache
def recording(microbatch_size):
    return dpsgd(draws_loss, recorder(10), microbatch_size=microbatch_size)


def releases(sampler, *, microbatch_size=None, attempt=0, block_steps=10, **how):
    """The sum of every step, without noise and clipping: float32[steps, N, D]."""
    algorithm = recording(microbatch_size)
    for block in train_blocks(
        algorithm,
        Mechanism(sampler, 0.0, np.inf),
        algorithm.init(jnp.zeros((N, D))),
        columns(),
        keys=Keys(ROOT, attempt),
        block_steps=block_steps,
        **how,
    ):
        found = block.state.opt_state.releases
    return np.asarray(found) * np.float32(sampler.expected_batch_size)


# Batches of a power of two, so that the mean over them is exact.
LAYOUTS = {
    "at once": (Shuffle(N, 8, 2), {}),
    "another attempt": (Shuffle(N, 8, 2), {"attempt": 5}),
    "microbatches, few steps at once": (
        BallsAndBins(N, 8, 2, max_batch_size=24),
        {"microbatch_size": 5, "block_steps": 3},
    ),
    "passes, of rows that travel": (
        Poisson(N, 8, 2, overflow="accumulate", max_batch_size=3),
        {"data_on": "host", "block_steps": 4},
    ),
    "three shards": (Poisson(N, 8, 2, max_batch_size=14, num_shards=3), {}),
    "two shards, of rows that travel": (Shuffle(N, 8, 2, num_shards=2), {"data_on": "host"}),
}


@pytest.mark.short("at once", "another attempt")
@pytest.mark.parametrize(("sampler", "how"), LAYOUTS.values(), ids=LAYOUTS)
def test_draws_depend_on_row_and_step_alone_in_every_layout(sampler, how):
    attempt = how.get("attempt", 0)
    found = releases(sampler, **how)
    source = BatchSource(sampler, ROOT.sampling_seed(attempt))
    taken = np.zeros((sampler.num_steps, N, 1), np.float32)
    for step in range(sampler.num_steps):
        for one in source.passes(step):
            taken[step, one.indices[one.weights > 0]] = 1.0
    assert taken.sum() > N
    np.testing.assert_array_equal(
        found, taken * expected(attempt, sampler.num_steps, sampler.num_shards)
    )


def test_draws_differ_between_examples_steps_and_attempts():
    draws = np.concatenate([expected(attempt, 10) for attempt in (0, 1)])
    assert np.unique(draws).size > 0.999 * draws.size  # of 2^24 values


def test_unit_clipped_as_one_has_the_key_of_its_first_row():
    tree = UnitTree.from_columns({"unit": np.repeat(np.arange(8), 5)})
    sampler = Multistage(tree, (4, 2), steps=6, clipped_level=1)

    def loss(params, unit, key):
        assert unit["me"].shape == (2,)
        return jnp.dot(params[unit["me"][0]], drawn(key))

    algorithm, mechanism = dpsgd(loss, recorder(6)), Mechanism(sampler, 0.0, np.inf)
    state = algorithm.init(jnp.zeros((N, D)))
    for block in train_blocks(algorithm, mechanism, state, columns(), insecure_seed=SEED):
        found = np.asarray(block.state.opt_state.releases) * 4
    for step, draws in enumerate(expected(0, 6)):
        first = sampler.episode(ROOT.sampling_seed(0), step).examples[:, 0]
        np.testing.assert_array_equal(found[step, first], draws[first])
        assert np.count_nonzero(found[step].any(axis=1)) == 4


def by_place(algorithm):
    """Keys by the place in the batch."""

    def clipped_sum(params, batch, weights, scales, keys):
        keys = jax.random.split(keys[0], len(keys))
        return algorithm.clipped_sum(params, batch, weights, scales, keys)

    return algorithm._replace(clipped_sum=clipped_sum)


@pytest.mark.short("keys by place")
@pytest.mark.parametrize("planted", [False, True], ids=["sound", "keys by place"])
def test_audit_catches_loss_keys_that_depend_on_the_batch(planted):
    mechanism = Mechanism(Shuffle(N, 8, 2), 1.0, 0.5)

    algorithm = dpsgd(draws_loss, optax.sgd(0.1))
    algorithm = by_place(algorithm) if planted else algorithm
    root = RootKey.from_insecure_seed(1)
    report = audit_program(algorithm, mechanism, jnp.zeros((N, D)), columns(), root=root)
    assert report.passed != planted, report.lines()


def two(params, example):
    return 0.0


def with_default(params, example, scale=1.0):
    return 0.0


def optional_key(params, example, key=None):
    return 0.0


def by_name(params, example, *, key):
    return 0.0


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (two, False),
        (with_default, False),
        (jax.jit(two), False),
        (jax.checkpoint(draws_loss), True),
        (functools.partial(draws_loss, jnp.zeros((N, D))), False),
        (functools.partial(optional_key, key=None), False),
        (draws_loss, True),
    ],
)
def test_a_loss_takes_a_key_if_it_requires_a_third_argument(loss, expected):
    assert takes_key(loss) is expected


@pytest.mark.parametrize(
    "loss", [lambda params: 0.0, lambda *args: 0.0, optional_key, by_name, lambda a, b, c, d: 0.0]
)
def test_loss_of_ambiguous_arguments_is_refused_in_one_line(loss):
    for make in (
        lambda: dpsgd(loss, optax.sgd(0.1)),
        lambda: clipped_grad(loss, l2_clip_norm=1.0),
        lambda: explain(loss, jnp.ones(3), jnp.ones(3)),
    ):
        with pytest.raises(ValueError, match=r"whether this loss takes a key; define it") as error:
            make()
        assert "\n" not in str(error.value)


def test_keys_are_given_if_and_only_if_the_loss_takes_them():
    batch, weights = jnp.ones((4, D)), jnp.ones(4)
    with pytest.raises(ValueError, match=r"takes a key: give keys\[B\]"):
        clipped_grad(draws_loss, l2_clip_norm=1.0)(jnp.ones(D), batch, weights)
    keys = jax.random.split(jax.random.key(0), 4)
    with pytest.raises(ValueError, match="keys are given, but loss_fn"):
        clipped_grad(jnp.dot, l2_clip_norm=1.0)(jnp.ones(D), batch, weights, keys)
    with jax.default_prng_impl("rbg"):
        for key in (jax.random.key(0), jax.random.PRNGKey(0)):
            rbg = jax.random.split(key, 4)
            with pytest.raises(ValueError, match="draw by the batch"):
                clipped_grad(draws_loss, l2_clip_norm=1.0)(jnp.ones(D), batch, weights, rbg)
    with pytest.raises(ValueError, match="leading axis"):
        clipped_grad(draws_loss, l2_clip_norm=1.0)(jnp.ones(D), batch, weights, keys[:3])
