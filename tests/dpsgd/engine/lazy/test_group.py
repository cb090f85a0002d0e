"""Lazy tables have the law of the dense algorithm, and nothing leaves with noise that is due."""

import functools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats
from stepwise import stepwise_law

from dpsgd import BandedToeplitz, LazyTables, Mechanism, dpsgd, train, with_rows
from dpsgd.core.algorithm import Context, View
from dpsgd.core.gaussian import (
    MOMENTUM,
    STEP,
    VALUE,
    TableRows,
    add_row_noise,
    grid,
    normal_at,
    standard_normal,
    uniform_at,
)
from dpsgd.core.philox import StepKey
from dpsgd.core.state import Scales, Table, TrainState, defer_noise
from dpsgd.engine.feed import Layout
from dpsgd.engine.lazy.gaps import LinearSgd
from dpsgd.engine.lazy.laws import RunLaws
from dpsgd.engine.lazy.rows import (
    FLUSHED_BITS,
    flushed_table,
    on_grid,
    read,
    unique_rows,
    written,
)
from dpsgd.engine.loop import train_blocks
from dpsgd.engine.placement import Placement
from dpsgd.noise.keys import RootKey
from samplers import BallsAndBins, Deterministic, Poisson

N, R, D, B = 300, 2_000, 3, 20
SEED = 3
ROOT = RootKey.from_insecure_seed(SEED)
KEY = jnp.asarray(ROOT.noise_key(0))
STEPS = 30


@functools.partial(jax.jit, static_argnums=(1, 2, 4))  # one program in place of many small ones
def normals(step, leaf, purpose, numbers, width):
    return normal_at(KEY, step, TableRows(leaf, purpose, numbers, width))


def rows():
    """Examples that look up some rows several times, most rows never, and one row beyond all."""
    rng = np.random.default_rng(0)
    ids = np.minimum(rng.zipf(1.3, size=(N, 4)) - 1, R - 1).astype(np.int32)
    ids[:, 1] = ids[:, 0]
    return {"ids": ids, "y": rng.normal(size=N).astype(np.float32)}


def start():
    rng = np.random.default_rng(1)
    return {
        "table": rng.normal(size=(R, D)).astype(np.float32),
        "w": rng.normal(size=4 * D).astype(np.float32),
    }


def lookups(example):
    return {"table": example["ids"]}


loss_fn = with_rows(
    lookups,
    lambda params, rows, example: (rows["table"].ravel() @ params["w"] - example["y"]) ** 2,
)


SCHEDULE = optax.cosine_decay_schedule(0.2, STEPS)
TABLES = [LazyTables(SCHEDULE), LazyTables(SCHEDULE, 0.9)]
EACH_KIND = pytest.mark.parametrize(
    "tables",
    [pytest.param(TABLES[0], marks=pytest.mark.long), TABLES[1]],
    ids=["sgd", "momentum"],
)
SAMPLERS = [
    BallsAndBins(N, B, epochs=2),
    Poisson(N, B, epochs=2),
    Deterministic(N, B, epochs=2),
]


def trained(algorithm, mechanism, **how):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the seed
        how = {"insecure_seed": 3, "delta": 1e-3, "audit": False, **how}
        return train(algorithm, mechanism, start(), rows(), **how)


@functools.cache
def lazy(tables):
    """One algorithm for all tests, and so one program."""
    return dpsgd(loss_fn, optax.adam(0.01), tables=tables)


@functools.cache
def dense(tables):
    """The dense algorithm of the same law."""
    sgd = optax.sgd(tables.learning_rate, tables.momentum or None)
    parts = optax.multi_transform({"t": sgd, "w": optax.adam(0.01)}, {"table": "t", "w": "w"})
    return dpsgd(loss_fn, parts)


@EACH_KIND
@pytest.mark.parametrize("sampler", SAMPLERS[:1], ids=lambda s: type(s).__name__)
def test_without_noise_it_is_the_dense_algorithm(sampler, tables):
    mechanism = Mechanism(sampler, 0.0, l2_clip_norm=0.5)
    expected = trained(dense(tables), mechanism).params
    for look in (None, lambda step, params: None):  # flushed at the end, or before every look
        found = trained(lazy(tables), mechanism, on_block=look, block_steps=4).params
        for name, leaf in expected.items():
            np.testing.assert_allclose(found[name], leaf, rtol=0, atol=1e-6 * np.abs(leaf).max())


@pytest.mark.parametrize(
    "schedule", [SCHEDULE, lambda k: 0.1 * (k + 1) if k < 3 else 0.2, lambda k: np.cos(k) ** 2]
)
def test_schedules_are_of_any_kind_of_numbers(schedule):
    found = LazyTables(schedule).of_run(5).step_sizes
    assert found == pytest.approx([float(schedule(k)) for k in range(5)], rel=1e-6)


nothing = with_rows(
    lookups,
    lambda params, rows, example: 0.0 * jnp.sum(rows["table"]) + 0.0 * jnp.sum(params["w"]),
)
"""Loss that reads rows, and has no gradient."""


def standardised(found, tables, sigma):
    """What training has added to every coordinate of the table, in standard deviations."""
    law = stepwise_law(tables.of_run(STEPS), 0, STEPS)
    stddev = sigma * 1.0 / B * np.sqrt(law.covariance[-1, -1])
    moved = np.asarray(found["table"], np.float64) - law.transition[-1, -1] * start()["table"]
    return moved / stddev


@pytest.mark.long
@EACH_KIND
def test_noise_has_one_law_however_often_rows_are_read(tables):
    """False alarms: below 1e-7 for each of six tests."""
    mechanism = Mechanism(SAMPLERS[0], 2.0, l2_clip_norm=1.0)
    algorithm = dpsgd(nothing, optax.adam(0.01), tables=tables)
    found = standardised(trained(algorithm, mechanism).params, tables, 2.0)
    times = np.bincount(rows()["ids"].ravel(), minlength=R)
    for part in (times == 0, (times > 0) & (times < 4), times >= 4):
        z = found[part].ravel()
        square = float(z @ z)
        assert stats.chi2.sf(square, z.size) > 1e-8
        assert stats.chi2.cdf(square, z.size) > 1e-8
    assert stats.kstest(found.ravel(), "norm").pvalue > 1e-8


def test_step_noises_every_coordinate_of_the_rows_it_reads():
    numbers = np.array([0, 1, 7, R - 1], np.int32)
    total, stddev = np.float32([[1], [0], [0], [1]]) * np.ones(D, np.float32), 2.0
    scales = Scales(1.0, stddev, 4.0)
    noised = jax.jit(add_row_noise, static_argnums=1)(total, 3, numbers, StepKey(KEY, 5), scales)
    noise = stddev * np.asarray(normals(5, 3, STEP, numbers, D))
    assert np.abs(4.0 * np.asarray(noised) - total - noise).max() <= 2 * grid(stddev)


@pytest.mark.short("0.9")
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_draws_for_a_gap_have_its_covariance(momentum):
    """Of 200,000 rows, within 5.5 standard errors: false alarms below 4e-8 each."""
    run, count = LazyTables(SCHEDULE, momentum).of_run(STEPS), 200_000
    none = jnp.zeros((count, 1))
    table = Table(
        none,
        none if momentum else None,
        jnp.full(count, 7, jnp.int32),
    )
    how = {
        "laws": RunLaws(run).flush_arrays(23),
        "noise_key": KEY,
        "leaf": 0,
        "stddev": jnp.float32(2.0),
    }
    after = jax.jit(lambda table: flushed_table(table, 2**18, step=jnp.int32(23), **how))(table)
    parts = [part for part in (after.momentum, after.values) if part is not None]
    x = np.concatenate([np.asarray(part, np.float64) for part in parts], axis=1) / 2.0
    expected = stepwise_law(run, 7, 23).covariance
    scale = np.sqrt(np.outer(np.diag(expected), np.diag(expected)))
    errors = np.sqrt((scale**2 + expected**2) / count)
    assert np.all(np.abs(x.T @ x / count - expected) <= 5.5 * errors)
    assert np.all(np.asarray(after.steps) == 23)


def test_tables_and_their_parts_are_flushed_with_other_noise():
    """Of 600 numbers, within 5.5 standard errors: false alarms below 2e-7."""
    laws, zeros = RunLaws(LazyTables(SCHEDULE, 0.9).of_run(STEPS)), jnp.zeros((300, 2))
    table = Table(zeros, zeros, jnp.full(300, 7, jnp.int32))
    how = {"laws": laws.flush_arrays(23), "noise_key": KEY, "stddev": jnp.float32(2.0)}

    @functools.partial(jax.jit, static_argnums=0)
    def flushed(leaf, first):
        return flushed_table(table, 300, first, leaf=leaf, step=jnp.int32(23), **how).values

    parts = [np.ravel(flushed(leaf, first)) for leaf, first in [(1, 0), (2, 0), (1, 300)]]
    assert np.abs(np.triu(np.corrcoef(parts), 1)).max() <= 5.5 / 600**0.5


def test_noise_is_independent_over_steps_gaps_and_leaves():
    """Correlations of 1e5 pairs each: false alarms below 1e-7 for all 15 together."""
    numbers = np.arange(10**5, dtype=np.int32)
    names = [(5, 1, of) for of in (STEP, MOMENTUM, VALUE)] + [(6, 1, VALUE)]
    names += [(5, 2, VALUE)]
    draws = [np.ravel(normals(step, leaf, purpose, numbers, 1)) for step, leaf, purpose in names]
    draws += [jax.jit(standard_normal, static_argnums=3)(KEY, 5, 1, (10**5,))]
    z = np.stack([np.asarray(x, np.float64) for x in draws])
    products = z @ z.T / np.sqrt(z.shape[1]) - np.sqrt(z.shape[1]) * np.eye(len(z))
    assert np.abs(products).max() < 8.5  # of the diagonal, over sqrt(2)
    uniform = jax.jit(lambda rows: uniform_at(KEY, 5, TableRows(1, VALUE, rows, 1)))(numbers)
    u = np.sqrt(12) * (np.ravel(uniform).astype(np.float64) - 0.5)  # rounds what draw 2 is part of
    assert np.abs([u @ z[2], u @ (z[2] ** 2 - 1) / np.sqrt(2)]).max() < 6 * np.sqrt(u.size)


def blocks(tables=TABLES[1], sigma=1.0, state=None, stop=None, insecure_seed=SEED, **how):
    """States after blocks of 4 steps, up to one."""
    mechanism = Mechanism(SAMPLERS[0], sigma, l2_clip_norm=1.0)
    algorithm = lazy(tables)
    state = state or algorithm.init(start(), mechanism, rows())
    found = []
    how = {"insecure_seed": insecure_seed, "block_steps": 4, **how}
    for block in train_blocks(algorithm, mechanism, state, rows(), **how):
        found.append(jax.tree.map(np.array, block.state))
        if block.steps.stop == stop:
            break
    return found


def test_parameters_are_available_only_after_a_flush():
    params, steps = start(), jnp.zeros(R, jnp.int32)
    for pending in (False, True):
        table = Table(params["table"], None, steps if pending else None)
        state = TrainState(jnp.int32(0), params, (), tables={0: table})
        assert state.pending == pending
        if pending:
            with pytest.raises(ValueError, match="noise of lazy tables is pending"):
                print(state.params)
        else:
            assert state.params is params


def test_states_with_and_without_lazy_tables_are_told_apart():
    """A dense algorithm adds no pending noise, and would call the rest covered."""
    lazy_state = blocks(stop=4)[-1]
    assert lazy_state.pending
    mechanism = Mechanism(Poisson(N, B, 1), 1.0, 1.0)
    both = [dpsgd(loss_fn, optax.sgd(0.1), tables=tables) for tables in (LazyTables(0.1), None)]
    states = [algorithm.init(start(), mechanism, rows()) for algorithm in both]
    for algorithm, state in [(both[1], lazy_state), (both[1], states[0]), (both[0], states[1])]:
        with pytest.raises(ValueError, match="lazy tables, and this one is"):
            next(train_blocks(algorithm, mechanism, state, rows(), insecure_seed=SEED))


@pytest.mark.parametrize("first", [0.0, 0.01])
def test_last_bits_of_a_flushed_row_hide_whether_it_was_read(first):
    """All lie on one grid: else only a row that nobody read is its start plus one product."""
    run, width, stddev = LinearSgd((0.1,) * 20), 4_000, jnp.float32(0.013)
    how = {"noise_key": KEY, "leaf": 0, "stddev": stddev}
    before = first * np.random.default_rng(0).normal(size=(2, width)).astype(np.float32)
    laws = RunLaws(run)

    @jax.jit
    def trained(before):
        table = Table(before, None, steps=jnp.zeros(2, jnp.int32))
        one = read(
            table, jnp.array([1], jnp.int32), laws=laws.flush_arrays(7), step=jnp.int32(7), **how
        )
        key, scales = StepKey(KEY, 7), Scales(1.0, 1.3, 100.0)
        noise = add_row_noise(jnp.zeros((1, width)), 0, one.numbers, key, scales)
        values = one.table.values - jnp.float32(0.1) * noise
        stepped = one.table._replace(values=values, steps=one.table.steps + 1)
        table = written(table, one._replace(table=stepped))
        return flushed_table(table, 2, laws=laws.flush_arrays(20), step=jnp.int32(20), **how)[0]

    after = np.asarray(trained(before))
    scale = np.sqrt(np.float32(stepwise_law(run, 0, 20).covariance.item()))
    product = ((after - before.astype(np.float64)) / scale).astype(np.float32)
    near = np.stack([product.view(np.int32) + k for k in range(-3, 4)]).view(np.float32)
    once = ((scale.astype(np.float64) * near + before).astype(np.float32) == after).any(axis=0)
    cells = after * 2.0 ** (FLUSHED_BITS - np.floor(np.log2(float(stddev) * scale)))
    assert np.array_equal(cells, np.round(cells))
    assert len(np.unique(cells)) > 1_000
    # Numbers that no product and one addition reach are as frequent in both: 86 to 93 % and all
    # were those that do in the row that was read, and in the other, without the grid.
    assert abs(once[0].mean() - once[1].mean()) < 6 * np.sqrt(0.5 / width)


@pytest.mark.long
def test_step_copies_neither_a_table_nor_its_row_steps():
    mechanism, algorithm = Mechanism(SAMPLERS[0], 1.0, l2_clip_norm=1.0), lazy(TABLES[1])
    layout = Layout.choose(mechanism.sampler, rows(), block_steps=4)
    state = algorithm.init(start(), mechanism, rows())
    text = layout.program(algorithm, mechanism, state, rows()).as_text()
    assert re.search(rf"= s32\[{R}\]", text)
    assert re.search(rf"= f32\[{R},{D}\]", text)
    assert not re.search(rf"= \(?[sf]32\[{R}\b.* copy", text)


ON_GRID = jax.jit(on_grid)


@pytest.mark.parametrize("size", [1.0, 2.0**13, 1e6, 1e30])
def test_flushed_numbers_have_cells_of_many_floats(size):
    """Else large ones under little noise tell by their last bits in how many steps they were read.

    Means within 6 standard errors: false alarms below 2e-9 each.
    """
    rng = np.random.default_rng(0)
    x = (size * rng.uniform(1, 2, 10**5)).astype(np.float32)
    uniform = rng.uniform(size=x.size).astype(np.float32)
    found = np.asarray(ON_GRID(x, np.float32(1.0), uniform))
    assert not np.any(found.view(np.uint32) & 2**10 - 1)
    off = found / size - x.astype(np.float64) / size
    assert abs(off.mean()) <= 6 * off.std() / np.sqrt(x.size)
    assert np.array_equal(ON_GRID(found, np.float32(1.0), uniform), found)


@pytest.mark.parametrize("size", [1.0, 2.0**13, 1e6])
def test_rounding_of_each_flushed_number_has_no_bias(size):
    """The mean over 4,096 uniforms is within Hoeffding's bound: false alarms below 1e-6 in all."""
    rng = np.random.default_rng(0)
    x = np.tile((size * rng.uniform(-2, 2, (32, 1))).astype(np.float32), 4096)
    uniform = rng.uniform(size=x.shape).astype(np.float32)
    found = np.asarray(ON_GRID(x, np.float32(1.0), uniform), np.float64)
    cell = np.ptp(found, axis=1)
    bias = np.abs(found.mean(axis=1) - x[:, 0])
    assert np.all(cell > 0)
    assert np.all(bias <= cell * np.sqrt(np.log(2 * 32 * 3 / 1e-6) / (2 * 4096)))


def test_tables_of_2_to_the_31_numbers_are_refused():
    mechanism, algorithm = Mechanism(SAMPLERS[0], 1.0, l2_clip_norm=1.0), lazy(TABLES[0])
    shapes = start() | {"table": jax.ShapeDtypeStruct((2**31 // D + 1, D), jnp.float32)}
    state = jax.eval_shape(lambda params: algorithm.init(params, mechanism, rows()), shapes)
    with pytest.raises(ValueError, match=r"table.* has 2,147,483,649 entries"):
        Layout.choose(mechanism.sampler, rows()).program(algorithm, mechanism, state, rows())


def test_what_a_flush_draws_is_another_noise_in_each_attempt():
    late = blocks(stop=28)[-1]
    assert late.pending
    ((leaf, table),) = late.tables.items()
    unread = np.asarray(table.steps) == 0
    assert unread.any()
    ends = [blocks(state=late, insecure_seed=seed)[-1] for seed in (3, 3, 4)]
    first, again, other = (jax.tree.leaves(end.params)[leaf][unread] for end in ends)
    assert np.array_equal(first, again)
    assert np.mean(first == other) < 0.01  # one key would make all of them equal


@pytest.mark.long
def test_resumed_run_is_flushed_at_the_same_multiples():
    whole = blocks(flush_every=6)
    kinds = [(int(state.step), state.pending) for state in whole]
    assert [step for step, _ in kinds] == [4, 6, 10, 12, 16, 18, 22, 24, 28, 30]
    assert {step for step, kind in kinds if not kind} == {6, 12, 18, 24, 30}
    for first in (2, 3):  # rows with pending noise, and none
        resumed = blocks(state=whole[first], flush_every=6)
        assert int(resumed[0].step) in {step for step, _ in kinds}
        assert jax.tree.all(jax.tree.map(np.array_equal, whole[-1], resumed[-1]))
    with pytest.raises(ValueError, match="flush_every must be at least 1"):
        blocks(flush_every=0)


def test_a_flush_on_demand_draws_what_a_scheduled_one_does():
    mechanism, algorithm = Mechanism(SAMPLERS[0], 1.0, l2_clip_norm=1.0), lazy(TABLES[1])
    state = algorithm.init(start(), mechanism, rows())
    how = {"insecure_seed": SEED, "block_steps": 4}
    demanded = next(train_blocks(algorithm, mechanism, state, rows(), **how)).flush()
    scheduled = blocks(flush_every=4, stop=4)[-1]
    assert not scheduled.pending
    assert jax.tree.all(jax.tree.map(np.array_equal, demanded.params, scheduled.params))


def test_callbacks_and_stopped_runs_see_flushed_parameters():
    mechanism = Mechanism(SAMPLERS[0], 1.0, l2_clip_norm=1.0)
    seen = []

    def look(step, params):
        seen.append(np.array(params["table"]))
        return step >= 8

    found = trained(lazy(TABLES[1]), mechanism, on_block=look, block_steps=4).params["table"]
    assert len(seen) == 2
    assert np.array_equal(found, seen[-1])
    for table in (start()["table"], seen[0]):
        assert np.mean(table != seen[1]) > 0.99  # but where two points of the grid are one


def of_mechanism(sampler, *noise):
    return lambda: trained(lazy(TABLES[0]), Mechanism(sampler, 1.0, 1.0, *noise))


NO_NUMBER = "learning_rate must return one number a step"
REFUSED = [
    (
        of_mechanism(BallsAndBins(N, B, cycle_length=2), BandedToeplitz((1, 0.5))),
        "lazy tables take Independent",
    ),
    (of_mechanism(Poisson(N, B, overflow="accumulate")), "one pass per step"),
    (lambda: LazyTables("fast"), "learning_rate"),
    (lambda: LazyTables(0.1, momentum=None), "momentum"),
    (lambda: LazyTables(0.1, momentum=1), "momentum must lie in"),  # as all that no run has
    (lambda: dpsgd(loss_fn, optax.adam(0.01), tables=0.1), "tables"),
    (lambda: LazyTables(lambda k: "a").of_run(3), NO_NUMBER),
    (lambda: LazyTables(lambda k: jnp.ones(2)).of_run(3), NO_NUMBER),
    (lambda: LazyTables(lambda k: None).of_run(3), NO_NUMBER),
]


@pytest.mark.parametrize(("ask", "named"), REFUSED)
def test_lazy_tables_that_have_no_law_are_refused_by_name(ask, named):
    with pytest.raises((TypeError, ValueError), match=named):
        ask()


def test_noise_that_float32_cannot_hold_is_never_due():
    small = LazyTables(lambda k: 1e-25).of_run(3)  # its square, and a gap's noise, would be 0
    assert small.step_sizes == (0, 0, 0)


@pytest.mark.parametrize(
    ("loss", "named"),
    [
        (lambda params, example: params["w"].sum() * example["y"], "declares no look-ups"),
        (with_rows(lookups, lambda params, rows, example: params["w"].sum()), "no derivative"),
    ],
)
def test_losses_without_a_trained_table_are_refused(loss, named):
    algorithm = dpsgd(loss, optax.adam(0.01), tables=TABLES[0])
    with pytest.raises(ValueError, match=named):
        trained(algorithm, Mechanism(SAMPLERS[0], 1.0, 1.0))


@pytest.mark.parametrize("platform", ["cpu", "default"])
@pytest.mark.parametrize("num_rows", [5, 30, 31, 10_000])
def test_a_batch_reads_each_row_once(num_rows, platform, monkeypatch):
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *of, **by: by[platform](*of))
    every = np.random.default_rng(num_rows).integers(0, num_rows + 1, 30).astype(np.int32)
    every[:4] = every[4:8]

    @jax.jit
    def unique(every):
        numbers, place_of = unique_rows(every, num_rows)
        return numbers, place_of(every)

    numbers, places = map(np.asarray, unique(every))
    assert len(numbers) == min(30, num_rows)
    distinct = numbers[numbers < num_rows]
    assert np.array_equal(np.sort(distinct), np.unique(every[every < num_rows]))
    padded = np.append(numbers, num_rows)
    assert np.array_equal(padded[places], every)


def test_rows_that_no_batch_reads_do_not_reach_others():
    """Four steps with NaN in all unread rows equal those without, bit by bit."""
    first = blocks(stop=4)[-1]
    ((_, table),) = first.tables.items()
    read_rows, emptied = np.asarray(table.steps) > 0, start()
    emptied["table"][~read_rows] = np.nan
    mechanism = Mechanism(SAMPLERS[0], 1.0, l2_clip_norm=1.0)
    other = blocks(state=lazy(TABLES[1]).init(emptied, mechanism, rows()), stop=4)[-1]
    assert 0 < read_rows.sum() < R / 2
    assert np.array_equal(first.raw_params["w"], other.raw_params["w"])
    ends = [state.raw_params["table"][read_rows] for state in (first, other)]
    assert np.array_equal(*ends)
    assert np.isfinite(ends[1]).all()


@pytest.mark.usefixtures("optimised")  # of the rest of the module: it stands last
def test_row_indices_of_a_batch_are_computed_once():
    """With other roundings, an index that is computed from floats would name another row."""
    loss = with_rows(
        lambda example: {"table": jnp.floor(example["x"] * example["y"]).astype(jnp.int32)},
        lambda params, rows, example: rows["table"].sum(),
    )
    algorithm = dpsgd(loss, optax.sgd(0.1), tables=LazyTables(0.1))
    mechanism = Mechanism(Deterministic(40, 8, epochs=1), 0.0, l2_clip_norm=1.0)
    data = {name: np.ones((40, 4), np.float32) for name in "xy"}
    state = defer_noise(algorithm.init({"table": jnp.zeros((500, D))}, mechanism, data))
    shapes = jax.eval_shape(lambda: state.raw_params)
    laws = algorithm.gap_laws(5).flush_arrays(0)
    context = Context(KEY, mechanism.scales(), laws, shapes, Placement.one())
    view = View(state.raw_params, jax.tree.map(lambda x: x[:8], data), jnp.ones(8), ())
    read_rows = jax.jit(lambda view: algorithm.lazy.view(state, view, context))
    text = read_rows.lower(view).compile().as_text()
    assert text.count(" floor(") == 1
