"""What a run resumes with of its noise is that of its key and steps, or it is seen."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpsgd import (
    BandedToeplitz,
    Independent,
    LazyTables,
    Mechanism,
    RootKey,
    dpsgd,
    train_blocks,
    with_rows,
)
from dpsgd.audit.runtime.resume import wrong_noise
from samplers import Deterministic

pytestmark = [pytest.mark.audit, pytest.mark.usefixtures("unoptimised")]

N, STEPS = 24, 7
ROOT = RootKey.from_insecure_seed(4)
PARAMS = {"a": jnp.ones(5), "b": jnp.zeros((80, 70)), "c": jnp.zeros(()), "d": jnp.zeros((0, 3))}
ROWS = np.random.default_rng(0).normal(size=(N, 5)).astype(np.float32)
NOISES = {
    "two bands": BandedToeplitz((1.0, 0.5)),
    "four bands": BandedToeplitz((1.0, 0.6, 0.3, -0.2)),
    "one band": BandedToeplitz((1.0,)),
    "nothing": Independent(),
}


def loss_fn(params, example):
    return jnp.vdot(params["a"], example) + params["b"].sum() * params["c"]


@functools.cache
def state_of(noise, first=0):
    algorithm = dpsgd(loss_fn, optax.sgd(0.1))
    mechanism = Mechanism(Deterministic(N, 2), 1.0, 0.5, noise)
    state = algorithm.init(PARAMS, mechanism, ROWS)._replace(step=jnp.int32(first))
    how = {"root": ROOT, "attempt": 2, "block_steps": STEPS}
    block = next(train_blocks(algorithm, mechanism, state, ROWS, **how))
    return block.state


def wrong(noise, state, *, attempt=2, first=0):
    return wrong_noise(noise, state, PARAMS, ROOT.noise_key(attempt), first)


@pytest.mark.short("nothing", "two bands")
@pytest.mark.parametrize("noise", NOISES.values(), ids=NOISES)
def test_noise_of_the_steps_before_is_recomputed(noise):
    assert not wrong(noise, state_of(noise))
    assert not wrong(noise, state_of(noise, first=3), first=3)


def of_every_row(change):
    return lambda state: state._replace(noise=jax.tree.map(change, state.noise))


FAULTS = {
    "one percent less": of_every_row(lambda row: 0.99 * row),
    "rows in another order": lambda state: state._replace(
        noise=tuple(tuple(pack)[::-1] for pack in state.noise)
    ),
    "none": of_every_row(jnp.zeros_like),
    "of the step before": lambda state: state._replace(step=state.step + 1),
    "one coordinate": of_every_row(lambda row: row.at[..., -1].add(1e-3)),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_another_history_is_seen(fault):
    noise = NOISES["four bands"]
    state = state_of(noise)
    assert "that the noise keeps is" in wrong(noise, fault(state))
    assert wrong(noise, state, attempt=1)
    assert wrong(noise, state, first=1)


def test_rows_that_no_step_has_read_are_the_first_ones():
    params = {"table": jnp.arange(24.0).reshape(8, 3), "w": jnp.ones(3)}

    loss = with_rows(
        lambda example: {"table": example},
        lambda params, rows, example: rows["table"] @ params["w"],
    )

    rows = np.arange(N, dtype=np.int32) % 4
    algorithm = dpsgd(loss, optax.sgd(0.1), tables=LazyTables(0.1, 0.9))
    mechanism = Mechanism(Deterministic(N, 2), 1.0, 0.5)
    state = algorithm.init(params, mechanism, rows)
    block = next(train_blocks(algorithm, mechanism, state, rows, root=ROOT, block_steps=STEPS))
    state, key = block.state, ROOT.noise_key(0)

    def found(**change):
        tables = {k: table._replace(**change) for k, table in state.lazy_tables.items()}
        return wrong_noise(Independent(), state.with_tables(tables), params, key, 0)

    (table,) = state.lazy_tables.values()
    assert not found()
    assert "have moved" in found(values=table.values.at[7, 2].add(1e-6))
    assert "have moved" in found(momentum=table.momentum.at[6, 0].set(1e-9))
    assert "not taken" in found(steps=table.steps.at[0].set(STEPS + 1))
