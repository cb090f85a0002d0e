"""The audit sees the noise of tables that comes late: what it catches is in tests/mutants."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpsgd import LazyTables, Mechanism, RootKey, dpsgd
from dpsgd.audit.coupled import coupled_audit
from dpsgd.audit.late import _Late
from dpsgd.audit.lent import SomeRows
from samplers import BallsAndBins

pytestmark = [pytest.mark.audit, pytest.mark.usefixtures("unoptimised")]

N, R, D = 300, 2_000, 3
STEPS = 60
RNG = np.random.default_rng(0)
IDS = np.minimum(RNG.zipf(1.3, size=(N, 4)) - 1, R - 1).astype(np.int32)
IDS[:, 1] = IDS[:, 0]  # some rows several times in one example
ROWS = {"ids": IDS, "y": RNG.normal(size=N).astype(np.float32)}
START = {
    "table": RNG.normal(size=(R, D)).astype(np.float32),
    "w": RNG.normal(size=4 * D).astype(np.float32),
}


def loss_fn(params, example):
    return (params["table"][example["ids"]].ravel() @ params["w"] - example["y"]) ** 2


def cosine(step):
    return 0.1 * (1 + np.cos(np.pi * step / STEPS))


def test_sound_training_with_lazy_tables_passes():
    algorithm = dpsgd(loss_fn, optax.adam(0.01), tables=LazyTables(cosine, 0.9, 0.02))
    mechanism = Mechanism(BallsAndBins(N, 20, epochs=4), 1.0, 0.5)
    root = RootKey.from_insecure_seed(0)
    before = jax.tree.map(jnp.array, START)
    report = coupled_audit(algorithm, mechanism, START, ROWS, root=root)
    assert report.passed, report.lines()
    assert not report.left_out
    assert jax.tree.all(jax.tree.map(jnp.array_equal, before, START))


@pytest.mark.parametrize("count", [26_650, 70_000, 200_000])
def test_of_a_table_that_is_not_looked_at_whole_each_row_is_looked_at_once(count):
    looking = object.__new__(_Late)
    read = np.array([1, 6, count - 1], np.int32)
    lent = SimpleNamespace(tables={0: SomeRows(np.zeros((count, 8)), None, None)}, rows={0: read})
    looking._lent = lent
    rows = looking._looked_at(0)
    assert np.all(np.diff(rows) > 0)
    assert rows[0] == 0
    assert rows[-1] == count - 1
    assert np.isin(read, rows).all()
    assert len(rows) < count
