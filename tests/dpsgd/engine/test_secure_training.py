"""With secure noise, training releases exact integer sums plus exact noise, and says so."""

import functools
import json

import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from recording import recorder

from dpsgd import Independent, Mechanism, RootKey, Secure, dpsgd, train_blocks
from dpsgd.engine import programs
from dpsgd.noise.registry import noise_record
from dpsgd.noise.secure import rounded_gaussian
from dpsgd.runs.history import NO_HEAD, LedgerError
from dpsgd.runs.ledger import Ledger, read
from dpsgd.runs.terms import Terms
from samplers import BallsAndBins, BatchSource, Deterministic, Poisson, Shuffle

pytestmark = pytest.mark.usefixtures("optimised")  # bits are the claim

N, D, CLIP = 64, 5, 2.0
SAMPLERS = [
    Deterministic(N, 8, 2),
    Shuffle(N, 8, 2),
    Poisson(N, 8, 2),
    BallsAndBins(N, 8, 2),
    Poisson(N, 8, 2, overflow="accumulate", max_batch_size=3),
]
EVERY_SAMPLER = pytest.mark.parametrize(  # in one pass and in several; the others are long
    "sampler",
    [
        pytest.param(
            sampler, marks=() if sampler in (SAMPLERS[1], SAMPLERS[4]) else pytest.mark.long
        )
        for sampler in SAMPLERS
    ],
    ids=repr,
)
ROOT = RootKey(bytes(range(32)), insecure=True)  # several tests train under it


def secure(sampler, clip=CLIP, sigma=1.5):
    return Mechanism(sampler, sigma, clip, noise=Secure())


def linear_loss(params, example):
    """A loss whose gradient is the example itself, exactly, in both of its leaves."""
    return jnp.dot(params["w"], example[: D - 1]) + params["b"] * example[D - 1]


def start():
    return {"w": jnp.zeros(D - 1), "b": jnp.zeros(())}


def rows(size=N):
    """Gradients shorter than C, so that clipping multiplies them by exactly one."""
    return np.random.default_rng(0).uniform(-0.5, 0.5, (size, D)).astype(np.float32)


def flat(tree):
    return np.concatenate([np.ravel(leaf) for leaf in (tree["w"], tree["b"])])


def exact_release(mechanism, source, step):
    """What a step must release: the truncated rows and the noise, added up as integers."""
    grid, key = mechanism.scales().grid, ROOT.secure_noise_key(0).tobytes()
    taken = np.concatenate([p.indices[p.weights > 0] for p in source.passes(step)])
    exact = np.trunc(rows()[taken] * np.float32(1 - 2.0**-12) / grid.spacing).astype(np.int64)
    # Leaves in the order of jax.tree: b, then w.
    noise = [
        rounded_gaussian(key, step, leaf, (n,), int(grid.cells)) for leaf, n in ((1, 4), (0, 1))
    ]
    total = (exact.sum(axis=0) + np.concatenate(noise)).astype(np.float32) * grid.spacing
    return total.astype(np.float32) / 8


@pytest.mark.short("Poisson*")
@EVERY_SAMPLER
def test_each_release_is_the_exact_integer_sum_plus_the_exact_noise_of_its_step(sampler):
    mechanism, data = secure(sampler), rows()
    grid = mechanism.scales().grid
    assert int(grid.cells) * float(grid.spacing) >= 1.5 * CLIP
    source = BatchSource(sampler, ROOT.sampling_seed(0))
    algorithm = dpsgd(linear_loss, recorder())
    steps, state = [], algorithm.init(start())
    for block in train_blocks(algorithm, mechanism, state, data, root=ROOT, block_steps=1):
        released = flat(jax.tree.map(lambda leaf: leaf[0], block.state.opt_state.releases))
        expected = exact_release(mechanism, source, block.steps.start)
        np.testing.assert_array_equal(released, expected)
        steps.append(tuple(released))
    assert len(set(steps)) == sampler.num_steps == 16


# --- Sensitivity ---------------------------------------------------------------------------------

B = 4
FLOAT32 = st.floats(width=32, allow_nan=True, allow_infinity=True, allow_subnormal=True)
EDGES = st.sampled_from([0.0, 1e-45, -1e-38, 1e-30, 1.0, 1e30, -3.4e38, np.inf, -np.inf, np.nan])
CLIPS = {clip: secure(Deterministic(B, B), clip) for clip in (2.0**-60, 1e-3, 1.0, 3.7, 1e6)}
COMPILED_SUM = jax.jit(dpsgd(linear_loss, optax.sgd(1.0), microbatch_size=3).clipped_sum)


def integer_sum(clip, batch, weights):
    """The sum of one step, by the very function that training compiles."""
    total, _ = COMPILED_SUM(start(), batch, weights, CLIPS[clip].scales())
    assert {leaf.dtype for leaf in jax.tree.leaves(total)} == {jnp.dtype("int32")}
    return flat(total).astype(object)  # Python's integers: the test's own sums are exact


def max_square(mechanism):
    low, high = mechanism.scales().grid.max_square.tolist()
    return low + (high << 32)


@settings(max_examples=100)
@given(
    batch=hnp.arrays(np.float32, (B, D), elements=FLOAT32 | EDGES),
    clip=st.sampled_from(list(CLIPS)),
    out=st.integers(0, B - 1),
    weights=hnp.arrays(np.float32, B, elements=st.sampled_from([0.0, 1.0])),
)
@example(np.full((B, D), 3.4e38, np.float32), 1.0, 0, np.ones(B, np.float32))
@example(np.full((B, D), 1e-45, np.float32), 2.0**-60, 0, np.ones(B, np.float32))
@example(np.full((B, D), np.nan, np.float32), 1.0, 3, np.ones(B, np.float32))
def test_neighbouring_sums_differ_by_at_most_the_clip_norm_exactly(batch, clip, out, weights):
    """And what the rest contributes does not change by as much as one integer."""
    whole = integer_sum(clip, batch, weights)
    neighbour = batch.copy()
    neighbour[out] = 0  # the null example, whose gradient is 0
    difference = whole - integer_sum(clip, neighbour, weights)
    limit = max_square(CLIPS[clip])
    assert sum(x * x for x in difference) <= limit
    alone = integer_sum(clip, batch, weights * (np.arange(B) == out))
    assert list(difference) == list(alone)
    if not (weights[out] and np.isfinite(batch[out]).all()):
        assert not any(alone)


def test_a_clipped_gradient_comes_close_to_the_clip_norm():
    """So the bound above is that of the clip norm, and not of a sum that lost its examples."""
    batch = np.full((B, D), 1e3, np.float32)
    total = integer_sum(1.0, batch, np.ones(B, np.float32))
    assert sum(x * x for x in total) >= 0.999 * B**2 * max_square(CLIPS[1.0])


# --- What is said of it --------------------------------------------------------------------------


def terms(mechanism):
    return Terms(mechanism, 1e-5, False, {"code": "x"})


@pytest.mark.parametrize("first", [False, True])
def test_the_ledger_says_how_noise_was_drawn_and_refuses_to_mix(tmp_path, first):
    path = tmp_path / "ledger.jsonl"
    laws = {False: Independent(), True: Secure()}
    kinds = {s: Mechanism(SAMPLERS[3], 1.5, CLIP, noise=law) for s, law in laws.items()}
    with Ledger.create(path, terms(kinds[first])) as ledger:
        ledger.declare(range(4))
        before = path.read_bytes()
        with pytest.raises(
            LedgerError, match=f"begun with {'secure' if first else 'independent'} noise"
        ):
            ledger.resume(terms(kinds[not first]), step=0, origin=NO_HEAD, repeatable=True)
        assert path.read_bytes() == before
    assert json.loads(before.splitlines()[0])["noise"] == noise_record(laws[first])
    history = read(path)
    assert history.attempts[0].terms.mechanism.noise == laws[first]
    assert history.guarantee().secure_noise is first


def test_a_ledger_that_mixes_them_is_not_believed(tmp_path, monkeypatch):
    path = tmp_path / "ledger.jsonl"
    with monkeypatch.context() as patch:
        for module in ("history", "ledger"):
            patch.setattr(f"dpsgd.runs.{module}.check_same_noise", lambda before, after: None)
        with Ledger.create(path, terms(secure(SAMPLERS[3]))) as ledger:
            ledger.declare(range(4))
            other = terms(Mechanism(SAMPLERS[3], 1.5, CLIP))
            ledger.resume(other, step=0, origin=NO_HEAD, repeatable=True)
    with pytest.raises(LedgerError, match="line 3: this run was begun with secure noise"):
        read(path)


@pytest.mark.parametrize(
    ("sigma", "clip", "message"),
    [(0.0, 1.0, "noise_multiplier > 0"), (1.0, 1e-40, "rescale the loss")],
)
def test_a_mechanism_that_cannot_be_secure_is_refused(sigma, clip, message):
    with pytest.raises(ValueError, match=message):
        Mechanism(Deterministic(N, 8), sigma, clip, noise=Secure())


@pytest.mark.long
def test_one_program_serves_every_grid_and_another_the_fast_noise(monkeypatch):
    """A grid that stayed behind in a shared program would be the noise of another mechanism."""
    kept = functools.lru_cache(programs._executable.__wrapped__)
    monkeypatch.setattr(programs, "_executable", kept)
    algorithm = dpsgd(linear_loss, recorder())

    def first_release(mechanism):
        state = algorithm.init(start())
        blocks = train_blocks(algorithm, mechanism, state, rows(), root=ROOT, block_steps=1)
        return flat(jax.tree.map(lambda leaf: leaf[0], next(blocks).state.opt_state.releases))

    releases = []
    for sigma, clip in ((1.5, 2.0), (40.0, 2.0), (1.5, 90.0)):
        mechanism = secure(SAMPLERS[0], clip, sigma)
        releases.append(tuple(first_release(mechanism)))
        source = BatchSource(SAMPLERS[0], ROOT.sampling_seed(0))
        assert releases[-1] == tuple(exact_release(mechanism, source, 0))
    assert kept.cache_info().misses == 1
    releases.append(tuple(first_release(Mechanism(SAMPLERS[0], 3.0, 7.0))))
    assert len(set(releases)) == 4
    assert kept.cache_info().misses == 2
