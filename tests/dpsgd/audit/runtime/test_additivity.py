"""Sums over different rows add up; what couples them is seen with rows of any generator."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from dpsgd import LazyTables, Mechanism, dpsgd, train, with_rows
from dpsgd.audit.probe import Probe
from dpsgd.audit.runtime.differential import ADDS_UP, UNCLIPPED, step_checks
from dpsgd.audit.synthetic import generated_rows, varied_rows
from dpsgd.gradients.rows import LocatedExample, RowLoss, index_ranges
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


def loss_of_rows(params, rows, example):
    looked_up = jnp.sum(jnp.tanh(rows["table"]) * params["w"])
    return looked_up + jnp.dot(params["w"], example["x"]) * example["y"]


plain = with_rows(lambda example: {"table": example["ids"]}, loss_of_rows)


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
    program_algorithm = algorithm(loss, lazy)
    state = program_algorithm.init(PARAMS, MECHANISM, COLUMNS)
    rows = generated_rows(COLUMNS, 64, generated)
    checks = step_checks(Probe(program_algorithm, MECHANISM, state, rows))
    assert sum(check.name.startswith(ADDS_UP) and check.performed for check in checks) == 2
    return [check.name for check in checks if not check.passed]


@pytest.fixture
def coupled(monkeypatch):
    """Plants a loss that reads the batch's small table by the indices of the whole one."""
    sound = RowLoss.__call__

    def call(self, params, example):
        inner = example.example if isinstance(example, LocatedExample) else example
        rows_of_others = lax.stop_gradient(params["table"])[inner["ids"]]
        return sound(self, params, example) * jnp.sum(jnp.tanh(rows_of_others))

    monkeypatch.setattr(RowLoss, "__call__", call)


@pytest.mark.short("0 and 1")
@pytest.mark.usefixtures("coupled")
@pytest.mark.parametrize("generated", GENERATED.values(), ids=GENERATED)
def test_coupled_tables_do_not_add_up(generated):
    failures = failed(fresh(), generated)
    assert {ADDS_UP, UNCLIPPED} <= set(failures)


@pytest.mark.long
@pytest.mark.usefixtures("coupled")
def test_a_run_with_a_coupled_table_is_refused():
    with pytest.raises(ValueError, match=ADDS_UP):
        train(algorithm(fresh()), MECHANISM, PARAMS, COLUMNS)


def fresh():
    """Returns the loss as a new function, so that no compiled program is shared."""
    return with_rows(plain.lookups, lambda params, rows, x: loss_of_rows(params, rows, x))


@pytest.mark.short("two examples-True")
@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize("generated", GENERATED.values(), ids=GENERATED)
def test_sound_sums_add_up(generated, lazy):
    assert not failed(plain, generated, lazy)


def test_numbers_that_look_up_rows_are_of_the_whole_table():
    ranges = index_ranges(plain, PARAMS, jax.tree.map(lambda x: x[0], COLUMNS))
    rows = generated_rows(COLUMNS, 64)
    varied = varied_rows(rows, ranges)
    assert np.array_equal(varied["y"], rows["y"])
    assert np.array_equal(varied["ids"][::2], rows["ids"][::2])
    beyond = (varied["ids"] == R).all(axis=1)
    assert np.flatnonzero(beyond).tolist() == list(range(7, 64, 8))
    inside = varied["ids"][1::2][~beyond[1::2]]
    assert inside.min() >= 0
    assert inside.max() < R
    assert (inside > R // 4).mean() > 0.1
    assert (inside < 100).mean() > 0.3
    assert varied["ids"].dtype == np.int32
