"""Sums over different rows add up; what couples them is seen with rows of any generator."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from dpsgd import LazyTables, Mechanism, dpsgd, train
from dpsgd.audit.probe import Probe
from dpsgd.audit.runtime.sums import ADDS_UP, UNCLIPPED, sum_checks
from dpsgd.audit.synthetic import generated_rows, varied_rows
from dpsgd.engine.lazy import look_ups
from dpsgd.engine.lazy.look_ups import index_ranges
from samplers import BallsAndBins

N, R, WIDTH, READS = 320, 4_000, 3, 4
MECHANISM = Mechanism(BallsAndBins(N, 32), 1.0, 1.0)
COLUMNS = {
    "ids": np.zeros((N, READS), np.int32),
    "x": np.zeros((N, WIDTH), np.float32),
    "y": np.zeros(N, np.int32),
}
PARAMS = {
    "table": jnp.asarray(np.random.default_rng(1).normal(size=(R, WIDTH)), jnp.float32),
    "w": jnp.ones(WIDTH),
}


def stopped(params, example):
    """Reads the table under stop_gradient too, as a ridge regression inside a loss does."""
    read = params["table"][example["ids"]]
    weights = jnp.tanh(lax.stop_gradient(params["table"])[example["ids"]])
    return jnp.sum(read * weights * params["w"]) + jnp.dot(params["w"], example["x"]) * example["y"]


def plain(params, example):
    read = params["table"][example["ids"]]
    return jnp.sum(jnp.tanh(read) * params["w"]) + jnp.dot(params["w"], example["x"]) * example["y"]


def uniform(count):
    rng = np.random.default_rng(2)
    return {
        "ids": rng.integers(0, R, (count, READS)).astype(np.int32),
        "x": rng.normal(size=(count, WIDTH)).astype(np.float32),
        "y": rng.integers(0, 2, count).astype(np.int32),
    }


def frequent(count):
    return uniform(count) | {
        "ids": np.random.default_rng(3).zipf(1.3, (count, READS)).clip(0, R - 1).astype(np.int32)
    }


def two_examples(count):
    return {k: x[np.arange(count) % 2] for k, x in uniform(count).items()}


def low(count):
    return uniform(count) | {
        "ids": np.random.default_rng(4).integers(0, 2, (count, READS)).astype(np.int32)
    }


GENERATED = {
    "default": None,
    "uniform": uniform,
    "frequent": frequent,
    "two examples": two_examples,
    "0 and 1": low,
}


def algorithm(loss, lazy=True):
    tables = LazyTables(0.1) if lazy else None
    return dpsgd(loss, optax.sgd(0.1), tables=tables)


def failed(loss, generated=None, lazy=True):
    """Returns the names of the checks of sums that fail."""
    made = algorithm(loss, lazy)
    state = made.init(PARAMS, MECHANISM, COLUMNS)
    rows = generated_rows(COLUMNS, 64, generated)
    checks = sum_checks(Probe(made, MECHANISM, state, rows))
    assert sum(check.name.startswith(ADDS_UP) and check.made for check in checks) == 2
    return [check.name for check in checks if not check.passed]


@pytest.fixture
def without_the_guard(monkeypatch):
    """Has tables that are read under stop_gradient be lazy, as they once were."""
    sound = look_ups.find_taps
    monkeypatch.setattr(
        look_ups, "find_taps", lambda *a: dataclasses.replace(sound(*a), stopped=frozenset())
    )


@pytest.mark.usefixtures("without_the_guard")
@pytest.mark.parametrize("generated", GENERATED.values(), ids=GENERATED)
def test_a_table_read_under_stop_gradient_is_seen(generated):
    found = failed(stopped, generated)
    assert {ADDS_UP, UNCLIPPED} <= set(found)


@pytest.mark.usefixtures("without_the_guard")
def test_a_run_with_a_coupled_table_is_refused():
    with pytest.raises(ValueError, match=ADDS_UP):
        train(algorithm(stopped), MECHANISM, PARAMS, COLUMNS)


@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize("generated", GENERATED.values(), ids=GENERATED)
def test_sound_sums_add_up(generated, lazy):
    assert not failed(plain, generated, lazy)
    if not lazy:
        assert not failed(stopped, generated, lazy)


def test_numbers_that_look_up_rows_are_of_the_whole_table():
    ranges = index_ranges(algorithm(plain), PARAMS, jax.eval_shape(lambda: COLUMNS))
    rows = generated_rows(COLUMNS, 64)
    found = varied_rows(rows, ranges)
    assert np.array_equal(found["y"], rows["y"])
    assert np.array_equal(found["ids"][::2], rows["ids"][::2])
    beyond = (found["ids"] == R).all(axis=1)
    assert np.flatnonzero(beyond).tolist() == list(range(7, 64, 8))
    inside = found["ids"][1::2][~beyond[1::2]]
    assert inside.min() >= 0
    assert inside.max() < R
    assert (inside > R // 4).mean() > 0.1
    assert (inside < 100).mean() > 0.3
    assert found["ids"].dtype == np.int32
