"""An audit calls the executable that trains, on rows that are nobody's."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpsgd import Mechanism, dpsgd
from dpsgd.audit.probe import Probe
from dpsgd.engine import loop
from dpsgd.engine.copies import host_copy
from dpsgd.engine.feed import Layout
from dpsgd.engine.loop import train_blocks
from dpsgd.engine.step import Watch
from dpsgd.noise.keys import RootKey
from samplers import Poisson

pytestmark = pytest.mark.audit

N, D = 40, 5
ROWS = {
    "x": np.random.default_rng(0).normal(size=(20, D)).astype(np.float32),
    "ids": np.random.default_rng(1).integers(1, 9, (20, 2)).astype(np.int32),
}
POISSON = Poisson(N, 8, 3)
SEVERAL = Poisson(N, 8, 3, overflow="accumulate", max_batch_size=4)


def loss_fn(params, example):
    return jnp.dot(params["w"], example["x"]) + params["table"][example["ids"]].sum()


PARAMS = {"table": jnp.zeros(9), "w": jnp.zeros(D)}
ALGORITHM = dpsgd(loss_fn, optax.adam(1e-2), microbatch_size=3)


def program_of(sampler=POISSON, data_on="device", noise=None, clip=1e3):
    mechanism = Mechanism(sampler, 2.0**-10, clip)
    if noise is not None:
        mechanism = dataclasses.replace(mechanism, noise=noise)
    state = ALGORITHM.init(PARAMS, mechanism)
    columns = {"x": np.zeros((N, D), np.float32), "ids": np.zeros((N, 2), np.int32)}
    layout = Layout.choose(sampler, columns, block_steps=4, data_on=data_on)
    root = RootKey.from_insecure_seed(0)
    return Probe(ALGORITHM, mechanism, state, ROWS, layout=layout, root=root)


KINDS = {
    "on the device": {},
    "several passes, streamed": {"sampler": SEVERAL, "data_on": "host"},
}


def test_held_first_state_is_exact_and_shares_parameter_memory():
    params = {"table": -jnp.zeros(9), "w": jnp.arange(float(D))}
    state = ALGORITHM.init(params, Mechanism(POISSON, 1.0, 1.0))
    copied = host_copy(state._replace(noise=jnp.ones(3)), params)
    of_both = map(jax.tree.leaves, (copied, state._replace(noise=())))
    for here, original in zip(*of_both, strict=True):
        assert here.dtype == original.dtype
        assert np.ascontiguousarray(here).tobytes() == np.asarray(original).tobytes()
    of_params = jax.tree.leaves(copied.raw_params), jax.tree.leaves(params)
    assert all(np.shares_memory(*pair) for pair in zip(*of_params, strict=True))
    assert not any(any(leaf.strides) for leaf in jax.tree.leaves(copied.opt_state))


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS)
def program(request):
    return program_of(**request.param)


def gradient(program, unit):
    """Of the linear loss, by the rows themselves."""
    x = np.asarray(program.columns["x"])[program.starts[unit]]
    ids = np.asarray(program.columns["ids"])[program.starts[unit]]
    return [np.bincount(ids, minlength=9).astype(np.float32), x]


@pytest.mark.short("on the device")
def test_releases_show_the_sum_of_whoever_takes_part(program):
    nobody = program.release()
    assert [leaf.size for leaf in nobody] == program.sizes == [9, D]
    members = [0, program.units - 1, 0, 1]
    for positions in (None, [0, program.places - 1, 3, 2]):
        moved = [
            8 * (a - b) for a, b in zip(program.release(members, at=positions), nobody, strict=True)
        ]
        sums = [
            sum(gradients)
            for gradients in zip(*(gradient(program, m) for m in members), strict=True)
        ]
        for a, b in zip(moved, sums, strict=True):
            np.testing.assert_allclose(a, b, atol=2e-3)
    # An example whose ids are all alike, the first row and the last; and one of NaN.
    assert gradient(program, 1)[0].max() == 2
    assert program.starts[:16].min() == 0
    assert program.starts[:16].max() == N - 1
    for leaf, empty in zip(program.release([program.poison]), nobody, strict=True):
        assert leaf.tobytes() == empty.tobytes()


def test_noise_depends_on_step_and_attempt_and_scales_with_clip(program):
    first, again = program.release(), program.release()
    assert all(a.tobytes() == b.tobytes() for a, b in zip(first, again, strict=True))
    doubled = dataclasses.replace(program.mechanism, l2_clip_norm=2e3)
    for variant in (
        program.release(step=1),
        program.release(attempt=1),
        program.release((), doubled),
    ):
        assert not np.array_equal(first[1], variant[1])
    assert np.array_equal(2 * first[1], variant[1])


def test_probe_runs_the_training_executable_with_equal_releases(program, monkeypatch):
    ran = []
    compiled_block = loop.compiled_block
    monkeypatch.setattr(
        loop, "compiled_block", lambda *of: ran.append(compiled_block(*of)) or ran[-1]
    )
    state = ALGORITHM.init(PARAMS, program.mechanism)
    columns = jax.tree.map(np.array, program.columns)
    data_on = "host" if program.layout.streamed else "device"
    blocks = train_blocks(
        ALGORITHM, program.mechanism, state, columns, insecure_seed=9,
        block_steps=4, data_on=data_on,
    )  # fmt: skip
    next(blocks)
    blocks.close()
    # Sums far below the noise: what is watched is the noise of each step.
    quiet = dataclasses.replace(program.mechanism, noise_multiplier=2.0**10, l2_clip_norm=2.0**-10)
    places = [np.asarray(indices) for indices in Watch.nothing(program.state.params).places]
    block = next(
        program.blocks(program.begun(3), quiet, attempt=0, places=places, return_gradient=True)
    )
    assert block.steps.start == 3
    recorded = np.split(
        np.asarray(block.watched), np.cumsum([len(indices) for indices in places])[:-1], axis=1
    )
    for j, step in enumerate(block.steps):
        alone = program.release((), quiet, step=step)
        for a, b, indices in zip(alone, recorded, places, strict=True):
            np.testing.assert_allclose(a[indices], b[j], atol=0.1 / 8)
    assert len(set(map(id, [*ran, program.program]))) == 1


def test_advancing_takes_a_training_step_and_shows_its_release(program):
    states, return_gradient = (
        program.called(program.begun(), [0, 1], return_gradient=return_gradient)[0]
        for return_gradient in (False, True)
    )
    assert int(states.step) == int(return_gradient.step) == 1
    for a, b in zip(jax.tree.leaves(states[2:]), jax.tree.leaves(return_gradient[2:]), strict=True):
        assert np.array_equal(a, b)
    release = program.release([0, 1])
    for a, b in zip(jax.tree.leaves(return_gradient.raw_params), release, strict=True):
        np.testing.assert_array_equal(np.ravel(a), b)
    assert np.all(np.abs(states.params["w"]) <= 1.01e-2)


def test_without_noise_or_rows_there_is_nothing_to_audit():
    state = ALGORITHM.init(PARAMS, Mechanism(POISSON, 0.0, 1.0))
    with pytest.raises(ValueError, match="noise_multiplier is 0"):
        Probe(ALGORITHM, Mechanism(POISSON, 0.0, 1.0), state, ROWS)
    for rows in ({**ROWS, "x": ROWS["x"][:-1]}, jax.tree.map(lambda leaf: leaf[:0], ROWS)):
        with pytest.raises(ValueError, match="equally many rows"):
            Probe(ALGORITHM, Mechanism(POISSON, 1.0, 1.0), state, rows)


def test_the_sum_of_a_loss_that_draws_is_one_whatever_the_noise():
    def drawing(w, example, key):
        return jnp.dot(w, jax.random.normal(key, (D,))) + 0 * example["ids"].sum()

    algorithm, mechanism = dpsgd(drawing, optax.sgd(1.0)), Mechanism(POISSON, 2.0**-10, 1e3)
    state = algorithm.init(jnp.zeros(D), mechanism)
    program = Probe(algorithm, mechanism, state, ROWS)
    sums = [
        8 * (program.release([0, 1], attempt=g)[0] - program.release(attempt=g)[0]) for g in (0, 1)
    ]
    assert np.linalg.norm(sums[0]) > 1
    np.testing.assert_allclose(*sums, atol=1e-3)
