"""A loop that takes its own steps releases what the audited program does, or is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpsgd import Mechanism, dpsgd
from dpsgd.audit.conformance import check_loop
from dpsgd.engine.loop import train_blocks
from samplers import BatchSource, Deterministic, Poisson

ROWS = {"x": np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)}
MECHANISM = Mechanism(Poisson(128, 16, overflow="accumulate"), 1.0, 1.0)


def loss_fn(w, example):
    return jnp.square(example["x"] @ w - 1).sum()


ALGORITHM = dpsgd(loss_fn, optax.adam(0.1))


def loop(fault=""):
    clipped_sum, update = jax.jit(ALGORITHM.clipped_sum), jax.jit(ALGORITHM.update)

    def run(state, data, keys):
        scales, seed = MECHANISM.scales(), keys.sampling
        source = BatchSource(MECHANISM.sampler, 1 if fault == "other batches" else seed)
        noise_key = keys.noise ^ np.uint32(fault == "other noise")
        for step in range(MECHANISM.sampler.num_steps - (fault == "fewer steps")):
            total, last = jnp.zeros(3), state
            for indices, weights in source.passes(step):
                if fault == "padding counts":
                    weights = np.ones_like(weights)
                rows = {"x": data["x"][indices]}
                total += clipped_sum(state.params, rows, weights, scales)[0]
            if fault == "clipped again":
                total /= jnp.maximum(1, jnp.linalg.norm(total))
            if fault == "divided by the batch":
                total *= 16 / weights.sum()
            state, _ = update(state, total, noise_key, scales)
            if fault == "noise twice":
                state = state._replace(step=last.step)
        return state

    return run


def test_a_loop_of_sampler_sum_and_update_passes():
    assert check_loop(loop(), ALGORITHM, MECHANISM, jnp.zeros(3), ROWS).passed


@pytest.mark.parametrize(
    "fault",
    [
        "other batches",
        "other noise",
        "fewer steps",
        "padding counts",
        "clipped again",
        "divided by the batch",
        "noise twice",
    ],
)
@pytest.mark.usefixtures("unaudited")
def test_a_faulty_loop_is_refused(fault):
    with pytest.raises(AssertionError, match="reaches the state of the audited program"):
        check_loop(loop(fault), ALGORITHM, MECHANISM, jnp.zeros(3), ROWS)


def last_array_is_nan(state):
    *others, last = jax.tree.leaves(state.opt_state)
    opt_state = jax.tree.unflatten(
        jax.tree.structure(state.opt_state), [*others, jnp.full_like(last, jnp.nan)]
    )
    return state._replace(opt_state=opt_state)


@pytest.mark.parametrize(
    "change", [last_array_is_nan, lambda state: state._replace(step=state.step - 1)]
)
@pytest.mark.usefixtures("unaudited")
def test_a_small_or_hidden_fault_of_a_state_is_refused(change):
    """NaN beside sound arrays; one step of 2,000, less than the rounding allowed of floats."""
    mechanism = Mechanism(Deterministic(2_000, 1), 1.0, 1.0)

    def run(state, data, keys):
        *_, block = train_blocks(ALGORITHM, mechanism, state, data, keys=keys)
        return change(block.state)

    with pytest.raises(AssertionError, match="reaches the state of the audited program"):
        check_loop(run, ALGORITHM, mechanism, jnp.zeros(3), ROWS)
