"""The training loop is DP-SGD: plain training without noise, and with it sum, noise, division."""

import logging
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpsgd import Mechanism, dpsgd, train, train_blocks, trainer
from dpsgd.engine import feed
from dpsgd.engine.placement import Placement
from dpsgd.noise.keys import RootKey
from samplers import BallsAndBins, BatchSource, Deterministic, Poisson, Shuffle

N = 60
SAMPLERS = {
    "deterministic": Deterministic(N, 8, 2),
    "shuffle": Shuffle(N, 8, 2),
    "poisson": Poisson(N, 8, 2, max_batch_size=24),  # of one width: they share programs
    "balls-and-bins": BallsAndBins(N, 8, 2, max_batch_size=24),
    "accumulating poisson": Poisson(N, 8, 2, overflow="accumulate", max_batch_size=3),
    "passes beyond a block": Poisson(N, 20, 2, overflow="accumulate", max_batch_size=2),
}


def of_samplers(*, long=()):
    """Every sampler; those named `long`, for which another stands, in the long tier alone."""
    return [
        pytest.param(sampler, id=name, marks=pytest.mark.long if name in long else ())
        for name, sampler in SAMPLERS.items()
    ]


def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(N, 5)).astype(np.float32)
    return {"x": x, "y": (x[:, 0] > x[:, 1]).astype(np.float32)}


def start():
    return {"w": jnp.full(5, 0.1), "b": jnp.zeros(())}


def loss_fn(params, example):
    logit = jnp.dot(params["w"], example["x"]) + params["b"]
    return optax.sigmoid_binary_cross_entropy(logit, example["y"])


OPTIMIZER = optax.adam(0.1)


@jax.jit
def plain_step(params, opt_state, taken):
    """A step of optax on the mean loss, `taken` being the weight of each row in it."""

    def mean_loss(params):
        return jnp.dot(taken, jax.vmap(loss_fn, (None, 0))(params, data()))

    updates, opt_state = OPTIMIZER.update(jax.grad(mean_loss)(params), opt_state, params)
    return optax.apply_updates(params, updates), opt_state


ALGORITHM = dpsgd(loss_fn, OPTIMIZER)
SHUFFLED = Mechanism(SAMPLERS["shuffle"], 1.0, 1.0)


def blocks(sampler, sigma, clip, *, of=ALGORITHM, columns=None, **how):
    mechanism, state = Mechanism(sampler, sigma, clip), of.init(start())
    rows = data() if columns is None else columns
    how = {"insecure_seed": 3, "block_steps": 4, **how}
    return train_blocks(of, mechanism, state, rows, **how)


def trained(of=ALGORITHM, params=None, columns=None, **how):
    """Parameters of a whole run, in blocks as above: they share one program."""
    rows = data() if columns is None else columns
    return train(of, SHUFFLED, params or start(), rows, audit=False, block_steps=4, **how).params


SHARDS = pytest.param(Poisson(N, 8, 2, max_batch_size=12, num_shards=2), id="shards")


@pytest.mark.short("shuffle", "poisson", "balls-and-bins")
@pytest.mark.parametrize("sampler", [*of_samplers(long=["accumulating poisson"]), SHARDS])
def test_without_noise_and_clipping_training_equals_plain_optax(sampler):
    for block in blocks(sampler, 0.0, np.inf):
        got = jax.tree.map(np.asarray, block.state.params)
    source = BatchSource(sampler, RootKey.from_insecure_seed(3).sampling_seed())
    params, opt_state = start(), OPTIMIZER.init(start())
    for step in range(sampler.num_steps):
        taken = np.zeros(N, np.float32)
        for one in source.passes(step):
            np.add.at(taken, one.indices[one.weights > 0], 1 / sampler.expected_batch_size)
        params, opt_state = plain_step(params, opt_state, taken)
    for name, value in params.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-5, atol=1e-6)


def test_empty_batches_are_noise_only_steps_of_the_same_program():
    sampler = Poisson(N, 1, 1, max_batch_size=24)
    sizes = [block.diagnostics.batch_size for block in blocks(sampler, 1.0, 1.0)]
    sizes = np.concatenate(sizes)
    assert len(sizes) == sampler.num_steps
    assert (sizes == 0).any()
    assert (sizes > 0).any()


@pytest.mark.short("shuffle")
@pytest.mark.parametrize("sampler", of_samplers())
def test_data_on_the_host_train_to_the_same_bits(sampler, tmp_path):
    mapped = {}
    for name, column in data().items():
        np.save(tmp_path / f"{name}.npy", column)
        mapped[name] = np.load(tmp_path / f"{name}.npy", mmap_mode="r")

    def bits(**how):
        return [
            (block.steps, [np.array(leaf).tobytes() for leaf in jax.tree.leaves(block.state)])
            for block in blocks(sampler, 1.0, 1.0, **how)
        ]

    found = bits(data_on="host", columns=mapped)
    assert len(found) >= 3
    assert found == bits(data_on="device")


@pytest.mark.long
def test_blocks_of_more_passes_than_expected_train_alike(monkeypatch):
    sampler = SAMPLERS["accumulating poisson"]
    *_, expected = blocks(sampler, 1.0, 1.0)
    monkeypatch.setattr(Poisson, "max_passes", 1)
    *_, trained = blocks(sampler, 1.0, 1.0)
    for got, want in zip(*map(jax.tree.leaves, (trained.state, expected.state)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_runs_that_differ_in_numbers_share_one_program(caplog):
    # A learning rate that is injected is state, and so an argument of the program.
    algorithm = dpsgd(loss_fn, optax.inject_hyperparams(optax.adam)(learning_rate=0.1))
    runs = {
        0.1: Mechanism(BallsAndBins(N, 8, 2, max_batch_size=16), 0.5, 1.0),
        0.2: Mechanism(BallsAndBins(N, 8, 2, max_batch_size=16), 1.0, 3.0),
        0.3: Mechanism(Poisson(N, 6, 3, max_batch_size=16), 1.0, 1.0),
        0.4: Mechanism(Shuffle(N, 16, 1), 2.0, 0.5),
    }

    def final(algorithm, learning_rate):
        state = algorithm.init(start())
        state.opt_state.hyperparams["learning_rate"] = jnp.float32(learning_rate)
        how = {"insecure_seed": 3, "block_steps": 4}
        *_, last = train_blocks(algorithm, runs[learning_rate], state, data(), **how)
        return np.asarray(last.state.params["w"])

    with jax.log_compiles(), caplog.at_level(logging.WARNING, "jax"):
        shared = [final(algorithm, learning_rate) for learning_rate in runs]
    assert sum("Compiling jit(_run_block)" in message for message in caplog.messages) == 1
    own = algorithm._replace(update=lambda *of: algorithm.update(*of))
    np.testing.assert_array_equal(shared[-1], final(own, 0.4))


@pytest.mark.parametrize(("free", "stays"), [(2 * 24 * N + 1, False), (2 * 24 * N - 1, True)])
def test_data_above_half_of_the_free_memory_stay_on_the_host(free, stays, monkeypatch):
    gathered = []
    with_rows = feed.with_rows
    monkeypatch.setattr(Placement, "free_memory", free)
    monkeypatch.setattr(feed, "with_rows", lambda *of: gathered.append(of) or with_rows(*of))
    next(blocks(SAMPLERS["shuffle"], 1.0, 1.0))  # 24 bytes an example
    assert bool(gathered) == stays


def test_streamed_blocks_are_cut_to_a_bounded_size(monkeypatch):
    monkeypatch.setattr(feed, "STREAMED_BYTES", 4 * 8 * 24)
    ran = blocks(SAMPLERS["shuffle"], 1.0, 1.0, block_steps=6, data_on="host")
    assert [len(block.steps) for block in ran][:2] == [4, 4]


def test_no_more_than_two_blocks_are_ever_under_way(monkeypatch):
    # The caller looks at nothing, and yet no block begins before the last but one has ended.
    waited = []
    monkeypatch.setattr(jax, "block_until_ready", lambda log: waited.append(len(ran)))
    ran = []
    for block in blocks(SAMPLERS["shuffle"], 1.0, 1.0, block_steps=4):
        ran.append(block)
    assert len(ran) == 4
    assert waited == [2, 3]


def test_an_optimizer_with_a_random_key_draws_from_it():
    def moved(key):
        noisy = optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(key)), optax.sgd(0.1))
        mechanism = Mechanism(Deterministic(8, 4, 1), 0.0, 1.0)
        algorithm = dpsgd(lambda w, x: (w * x).sum(), noisy)
        rows = np.ones((8, 2), np.float32)
        return train(algorithm, mechanism, jnp.ones(2), rows, insecure_seed=0).params

    np.testing.assert_array_equal(moved(0), moved(0))
    assert np.all(moved(0) != moved(1))


@pytest.mark.short("poisson", "deterministic", "shuffle", "balls-and-bins")
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_two_calls_share_neither_noise_nor_draws(sampler):
    noised, silent = (
        [next(blocks(SAMPLERS[sampler], sigma, clip, insecure_seed=None)) for _ in range(2)]
        for sigma, clip in ((1e3, 1.0), (0.0, np.inf))
    )
    for runs, alike in ((noised, False), (silent, sampler == "deterministic")):
        ends = (block.state.params for block in runs)
        assert jax.tree.all(jax.tree.map(np.array_equal, *ends)) == alike


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_nonfinite_data_give_a_warning_with_their_location_alone(bad, on_device, monkeypatch):
    monkeypatch.setattr(trainer, "_READ_BYTES", 100)  # a few rows at a time
    said = []
    for count in (1, 3):
        rows = data()
        rows["x"][-count:, 1] = bad
        rows = jax.tree.map(jnp.asarray, rows) if on_device else rows
        with pytest.warns(UserWarning, match=r"^data\['x'\]: NaN or infinity") as caught:
            params = trained(columns=rows)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))
        said += [str(warning.message) for warning in caught]
    assert len(said) == 2
    assert len(set(said)) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained()


@pytest.mark.short("parameters")
@pytest.mark.parametrize("kept", ["parameters", "step size"])
def test_blocks_overwrite_no_array_of_the_caller(kept):
    params, rate = start(), jnp.float32(0.1)
    if kept == "step size":  # an optimizer whose state holds an array of the caller
        optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=rate)
    else:  # and one whose state holds the parameters
        optimizer = optax.GradientTransformation(lambda p: p, lambda g, s, p: (g, s))
    algorithm, silent = dpsgd(loss_fn, optimizer), Mechanism(SAMPLERS["shuffle"], 0.0, 1.0)
    state = algorithm.init(params)
    before = jax.tree.map(np.array, (params, rate, state))
    # Handed over, the state is overwritten, and nothing of which it was made.
    own = algorithm.init(params)
    [*_, last] = train_blocks(algorithm, silent, own, data(), insecure_seed=3, donate=True)
    [*_, again] = train_blocks(algorithm, silent, state, data(), insecure_seed=3)
    jax.tree.map(np.testing.assert_array_equal, (params, rate, state), before)
    jax.tree.map(np.testing.assert_array_equal, last.state, again.state)
