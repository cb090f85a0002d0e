"""The audit sees the noise of tables that comes late: what it catches is in tests/mutants."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from dpsgd import LazyTables, Mechanism, dpsgd, module_with_rows, with_rows
from dpsgd.audit.audit import audit_program
from dpsgd.audit.probe import Probe
from dpsgd.audit.runtime import deferred
from dpsgd.audit.runtime.deferred import FLUSHED, FRESH, LAW, SIZES, WRITTEN, deferred_checks
from dpsgd.audit.runtime.differential import step_checks
from dpsgd.audit.tables import TableSnapshot
from dpsgd.engine import loop
from dpsgd.engine.feed import Layout
from dpsgd.engine.lazy.gaps import Gaps
from dpsgd.engine.lazy.laws import RunLaws
from dpsgd.noise.keys import RootKey
from samplers import BallsAndBins

pytestmark = [pytest.mark.audit, pytest.mark.usefixtures("unoptimised")]

N, R, D = 300, 2_000, 3
STEPS = 6_000
RNG = np.random.default_rng(0)
IDS = np.minimum(RNG.zipf(1.3, size=(N, 4)) - 1, R - 1).astype(np.int32)
IDS[:, 1] = IDS[:, 0]  # some rows several times in one example
ROWS = {"ids": IDS, "y": RNG.normal(size=N).astype(np.float32)}
START = {
    "table": RNG.normal(size=(R, D)).astype(np.float32),
    "w": RNG.normal(size=4 * D).astype(np.float32),
}


loss_fn = with_rows(
    lambda example: {"table": example["ids"]},
    lambda params, rows, example: (rows["table"].ravel() @ params["w"] - example["y"]) ** 2,
)


def from_0(step):
    return 0.1 * jnp.minimum(1, step / 1_500)


ALGORITHM = dpsgd(loss_fn, optax.adam(0.01), tables=LazyTables(from_0, 0.9))
MECHANISM = Mechanism(BallsAndBins(N, 10, epochs=200), 1.0, 0.5)
ROOT = RootKey.from_insecure_seed(0)
LAYOUT = Layout.choose(MECHANISM.sampler, ROWS, block_steps=8)  # the audit follows a block's steps


@pytest.fixture(scope="module")
def program():
    state = ALGORITHM.init(START, MECHANISM, ROWS)
    return Probe(ALGORITHM, MECHANISM, state, ROWS, layout=LAYOUT, root=ROOT)


def failed(program):
    return {check.name for check in deferred_checks(program) if not check.passed}


def test_a_schedule_that_begins_near_0_has_the_digits_of_the_run(program):
    assert not failed(program)


@pytest.mark.long
def test_sound_training_with_lazy_tables_passes():
    start_state = jax.tree.map(jnp.array, START)
    report = audit_program(ALGORITHM, MECHANISM, START, ROWS, root=ROOT)
    assert report.passed, report.lines()
    assert not report.left_out
    assert jax.tree.all(jax.tree.map(jnp.array_equal, start_state, START))


keyed_loss_fn = with_rows(
    lambda example, key: {"table": jax.random.permutation(key, R)[example["ids"]]},
    lambda params, rows, example, key: loss_fn.loss(params, rows, example),
)


class Words(nnx.Module):
    def __init__(self, rngs):
        self.table, self.dropout = nnx.Embed(R, D, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)


def module_loss(module, example, key):
    ids = jax.random.permutation(key, R)[example["ids"]]
    return (module.dropout(module.table(ids)).sum() - example["y"]) ** 2


KEYED = {
    "declared": (START, keyed_loss_fn),
    "of a module": module_with_rows(Words(nnx.Rngs(0)), module_loss),
}


@pytest.mark.long
@pytest.mark.parametrize(("params", "loss"), KEYED.values(), ids=KEYED)
def test_look_ups_that_depend_on_keys_pass(params, loss):
    algorithm = dpsgd(loss, optax.sgd(0.01), tables=LazyTables(0.1, 0.9))
    state = algorithm.init(params, MECHANISM, ROWS)
    probe = Probe(algorithm, MECHANISM, state, ROWS, root=ROOT)
    assert not failed(probe)
    assert all(check.passed for check in step_checks(probe))


@pytest.mark.long
def test_some_rows_of_a_large_table_are_compared(program, monkeypatch):
    monkeypatch.setattr(deferred, "_NUMBERS", 600)
    monkeypatch.setattr(deferred, "_PASS", 500)
    (rows,) = deferred._Tables(program, program.snapshot).rows.values()
    assert rows.tolist() == sorted(set(rows.tolist()))
    assert {0, 499, 500, 1_499, 1_500, R - 1} <= set(rows.tolist())
    assert np.intersect1d(rows, program.snapshot.rows[0]).size >= 20
    assert rows.size < 400
    assert not failed(program)


def first_steps_sizes(self, steps, room):
    laws = OF(self, steps, room)
    sizes = np.zeros(room, np.float32)
    sizes[: len(steps)] = self.optimizer.step_sizes[: len(steps)]
    return laws._replace(step_size=sizes)


def first_steps_gaps(self, step):
    return AT(self, step % self.spacing)


def one_step_more(self, step):
    return AT(self, min(step + 1, STEPS))


def others_are_given(self, num_steps):
    return OF_RUN(dataclasses.replace(self, learning_rate=lambda k: from_0(k // 2)), num_steps)


def not_flushed(algorithm, arguments, placement):
    state = arguments[0]
    tables = {k: table._replace(steps=None) for k, table in state.lazy_tables.items()}
    return state.with_tables(tables)


OF, AT, OF_RUN = RunLaws.block_arrays, Gaps.ending_at, LazyTables.of_run


@pytest.mark.short("a gap's prefix")
@pytest.mark.parametrize(
    ("owner", "name", "planted", "check"),
    [
        (RunLaws, "block_arrays", first_steps_sizes, LAW),
        (Gaps, "ending_at", first_steps_gaps, LAW),
        (Gaps, "ending_at", one_step_more, LAW),
        (LazyTables, "of_run", others_are_given, SIZES),
    ],
    ids=["the schedule's prefix", "a gap's prefix", "a gap to the next step", "another schedule"],
)
def test_laws_of_other_steps_are_caught(program, monkeypatch, owner, name, planted, check):
    """The program stays what it is: what the host hands to it is wrong."""
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, planted)
        state = ALGORITHM.init(START, MECHANISM, ROWS)
        probe = Probe(ALGORITHM, MECHANISM, state, ROWS, layout=LAYOUT, root=ROOT)
        assert check in failed(probe)


def up_to_date(self, *of, rows=None, step=None, sound=Probe.release, **how):
    """A release that takes the rows that it is given for rows with all of their noise."""
    if rows:
        rows = {k: x._replace(steps=np.full_like(x.steps, step)) for k, x in rows.items()}
    return sound(self, *of, rows=rows, step=step, **how)


def test_stale_gradients_stray_rows_and_a_missed_flush_are_seen(program, monkeypatch):
    row, flushes = np.setdiff1d(np.arange(R), program.snapshot.rows[0])[0], []

    def take_back(self, tables, step, sound=TableSnapshot.take_back):
        moved = {k: x._replace(values=x.values.at[row].add(1.0)) for k, x in tables.items()}
        return sound(self, moved, step)

    def flush(*arguments, sound=loop.flush_noise):
        flushes.append(arguments)
        return sound(*arguments) if len(flushes) < 3 else not_flushed(*arguments)

    monkeypatch.setattr(Probe, "release", up_to_date)
    monkeypatch.setattr(TableSnapshot, "take_back", take_back)
    monkeypatch.setattr(loop, "flush_noise", flush)
    assert failed(program) == {FRESH, WRITTEN, FLUSHED}
    monkeypatch.setattr(deferred, "noise_dominated", lambda mechanism: None)  # as with a tiny C
    assert failed(program) == {FRESH, WRITTEN}


def test_rows_written_beside_those_looked_up_are_caught(program, monkeypatch):
    """The block also moves a row that its batches do not look up."""

    def compiled(*of, sound=loop.compiled_block):
        block = sound(*of)

        def run(state, inputs):
            next_state, *outputs = block(state, inputs)
            tables = {
                k: table._replace(values=table.values.at[R - 1].add(1.0))
                for k, table in next_state.lazy_tables.items()
            }
            return next_state.with_tables(tables), *outputs

        return run

    monkeypatch.setattr(loop, "compiled_block", compiled)
    assert failed(program)


def test_only_rows_changed_beside_those_looked_up_are_stray(program):
    looked_up = {k: rows[:-1] for k, rows in program.snapshot.rows.items()}
    for number, name in itertools.product((-2, -1), ("values", "momentum")):
        snapshot, row = TableSnapshot(program.state, looked_up), program.snapshot.rows[0][number]
        tables = {
            k: table._replace(**{name: getattr(table, name).at[row].add(1.0)})
            for k, table in snapshot.borrow(3).items()
        }
        snapshot.take_back(tables, 3)
        assert bool(snapshot.stray()) == (number == -1)


def test_a_row_marked_as_read_and_not_looked_up_is_caught(program, monkeypatch):
    def looked_up(self, plan, step, *attempt, sound=Probe.looked_up):
        return {k: rows[:-1] for k, rows in sound(self, plan, step, *attempt).items()}

    monkeypatch.setattr(Probe, "looked_up", looked_up)
    assert WRITTEN in failed(program)


def test_training_that_leaves_out_its_last_flush_is_caught(program, monkeypatch):
    monkeypatch.setattr(loop, "flush_noise", not_flushed)
    assert failed(program) >= {FLUSHED}


@pytest.mark.long
@pytest.mark.parametrize(
    "rate",
    [
        lambda step: 0.1 * (1 - step / (STEPS - 1)),
        lambda step: 0.05 * (1 + jnp.cos(jnp.pi * step / STEPS)),
    ],
    ids=["to 0", "cosine"],
)
def test_schedules_that_end_near_0_have_the_digits_of_the_run(rate):
    algorithm = dpsgd(loss_fn, optax.sgd(0.01), tables=LazyTables(rate))
    state = algorithm.init(START, MECHANISM, ROWS)
    assert not failed(Probe(algorithm, MECHANISM, state, ROWS, root=ROOT))
