"""Trains, audits and compiles on eight fake devices: tests of a process of their own.

JAX is told how many devices a CPU has before it starts; `test_placement.py` runs these.
"""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpsgd import BandedToeplitz, Independent, LazyTables, Mechanism, dpsgd, train_blocks, with_rows
from dpsgd.audit.audit import audit_program
from dpsgd.core.state import Scales, defer_noise
from dpsgd.engine import feed
from dpsgd.engine.copies import hosted, on_one_device, placement_mismatch
from dpsgd.engine.feed import Layout
from dpsgd.engine.placement import AXIS, Placement
from dpsgd.engine.programs import program
from dpsgd.engine.step import flush_program
from dpsgd.gradients.clipping import ClippedSum
from dpsgd.gradients.rules import FLAT
from dpsgd.noise.keys import RootKey
from samplers import Deterministic, Multistage, Poisson, UnitTree
from tests.dpsgd.engine.collectives import Collective, collectives

jax.config.update("jax_num_cpu_devices", 8)

N, R, WIDTH, STEPS, BLOCK = 200, 2048, 6, 20, 8
SHARE = 2**15
"""Bytes from which a table is sharded: more than "odd" has."""
rng = np.random.default_rng(0)
PARAMS = {
    "odd": jnp.asarray(0.3 * rng.normal(size=(R - 2, 4)), jnp.float32),
    "table": jnp.asarray(0.3 * rng.normal(size=(R, WIDTH)), jnp.float32),
    "w": jnp.asarray(rng.normal(size=WIDTH), jnp.float32),
}
ROWS = {  # some look-ups are counted from the end of the table, or beyond it
    "ids": rng.integers(-9, R + 9, (N, 4)).astype(np.int32),
    "odd": rng.integers(0, R - 2, N).astype(np.int32),
    "y": rng.normal(size=N).astype(np.float32),
}
POISSON = Poisson(N, batch_size=20, epochs=2)
SEVERAL = dataclasses.replace(POISSON, overflow="accumulate", max_batch_size=11)
ORDERED = Deterministic(N, batch_size=20, epochs=2)
USERS = UnitTree.from_columns({"user": np.repeat(np.arange(20), N // 20)})
UNITS = Multistage(USERS, (5, 4), steps=STEPS, clipped_level=1)
TABLES = LazyTables(optax.cosine_decay_schedule(0.3, STEPS), 0.9)
FRESH, BANDED = Independent(), BandedToeplitz((0.8, 0.5, 0.3))
KEY = RootKey.from_insecure_seed(0).noise_key(0)


def look_ups(example):
    return {"table": example["ids"], "odd": example["odd"]}


def of_rows(params, rows, example):
    w = params["w"].reshape(-1, WIDTH).sum(axis=0)
    y = jnp.tanh(rows["table"].sum(axis=0)) @ w + rows["odd"].sum()
    return jnp.square(y - example["y"])


@functools.partial(with_rows, look_ups)
def dropped(params, rows, example, key):
    return of_rows(params, rows, example) * jax.random.bernoulli(key, 0.7)


@functools.partial(with_rows, look_ups)
def of_unit(params, rows, unit):
    return jax.vmap(of_rows, (None, 0, 0))(params, rows, unit).sum()


@functools.partial(with_rows, look_ups)
def nothing(params, rows, example):
    return 0.0 * of_rows(params, rows, example)


loss = with_rows(look_ups, of_rows)


def on(count, shard_rows_from=None):
    return Placement(tuple(jax.devices()[:count]), shard_rows_from)


def algorithm_of(loss_fn=loss, tables=None):
    optimizer = optax.sgd(0.1) if tables else optax.adam(1e-2)
    return dpsgd(loss_fn, optimizer, tables=tables, microbatch_size=1)


def trained(placement, *made, sampler=POISSON, noise=FRESH, sigma=1e-3, state=None, **how):
    """Returns the states after 8, 16 and 20 steps on the host, and the last one.

    By default with so little noise that what rounding does to sums is not lost in it.
    """
    algorithm = algorithm_of(*made)
    mechanism = Mechanism(sampler, sigma, 1.0, noise)
    state = algorithm.init(PARAMS, mechanism, ROWS) if state is None else state
    how = {"insecure_seed": 0, "block_steps": BLOCK, "placement": placement, **how}
    seen = []
    for block in train_blocks(algorithm, mechanism, state, ROWS, **how):
        seen.append(jax.tree.map(np.array, block.state))
    return seen, block.state


alone = functools.cache(functools.partial(trained, None))


def off(found, expected):
    """The largest difference of two trees, relative to the largest number of each leaf.

    One in a hundred numbers that are flushed may have been rounded to the next of their grid.
    """
    largest = 0.0
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        away = np.abs(x - y) / max(np.abs(y).max(), 1e-9)
        largest = max(
            largest, float(np.quantile(away, 0.99) if away.max() <= 2**-12 else away.max())
        )
    return largest


def assert_same_bits(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


HOST = {"data_on": "host"}
DENSE: dict[str, Any] = {
    "1": (on(1), dropped, {}),
    "2": (on(2), dropped, {}),
    "4, streamed": (on(4), dropped, HOST),
    "8": (on(8), dropped, {"sampler": SEVERAL}),
    "4, sharded": (on(4, SHARE), dropped, {}),
    "8, sharded": (on(8, SHARE), dropped, {"sampler": SEVERAL, **HOST}),
    "8, sharded, bands": (on(8, SHARE), loss, {"sampler": ORDERED, "noise": BANDED}),
}
LAZY = {
    "resident": (8, loss, {}),
    "streamed": (4, loss, HOST),
    "a key": (8, dropped, {}),
    "shards": (4, loss, {"sampler": dataclasses.replace(POISSON, num_shards=2)}),
    "units": (8, of_unit, {"sampler": UNITS}),
    "flushed in between": (8, loss, {"flush_every": 5}),
}


def trips(program):
    """How often the loops of a program run whose number is known, as that of microbatches is."""
    return [int(n) for n in re.findall(r'known_trip_count":{"n":"(\d+)"', program.as_text())]


def placed(state):
    return {name for name, leaf in state.raw_params.items() if not leaf.is_fully_replicated}


@pytest.mark.parametrize("name", DENSE)
def test_parameters_after_20_steps_are_those_of_one_device(name):
    placement, loss_fn, how = DENSE[name]
    seen, last = trained(placement, loss_fn, **how)
    expected = alone(loss_fn, **{key: how[key] for key in {"sampler", "noise"} & set(how)})
    assert off(seen[-1].params, expected[0][-1].params) <= 1e-6
    assert placed(last) == ({"table"} if "sharded" in name else set())
    if not name.startswith("8"):
        return
    sampler = how["sampler"]
    where = {"block_steps": BLOCK, "data_on": how.get("data_on", "device"), "placement": placement}
    mechanism = Mechanism(sampler, 1e-3, 1.0, how.get("noise", FRESH))
    program = Layout.choose(sampler, ROWS, **where).program(
        algorithm_of(loss_fn), mechanism, last, ROWS
    )
    if sampler is SEVERAL:  # 11 places of a pass are 16 on 8 devices: 2 microbatches of 1 on each
        assert 2 in trips(program)
    numbers, diagnostics = sum(x.size for x in PARAMS.values()), 4
    if name == "8":  # at depth 1: in the loop over steps, and in none over passes or microbatches
        size = 4 * (numbers + diagnostics)
        assert collectives(program) == [Collective("all-reduce", size, 1)]
    elif name == "8, sharded":
        assert 0 < max(one.size for one in collectives(program)) < 4 * PARAMS["table"].size


@pytest.mark.parametrize(("count", "loss_fn", "how"), LAZY.values(), ids=LAZY)
def test_states_of_lazy_tables_are_those_of_one_device(count, loss_fn, how):
    seen, last = trained(on(count), loss_fn, TABLES, **how)
    expected, _ = trained(None, loss_fn, TABLES, **how)
    assert max(off(x, y) for x, y in zip(seen, expected, strict=True)) <= 1e-6
    assert placed(last) == {"table"}  # if its rows divide
    if not how:
        assert [x.pending for x in seen] == [True, True, False]


REPEATED = {
    "replicated": (on(8), dropped, None, {"sampler": SEVERAL}),
    "sharded": (on(8, SHARE), dropped, None, {"sampler": SEVERAL}),
    "pending rows": (on(8), loss, TABLES, {}),
}


@pytest.mark.parametrize(("placement", "loss_fn", "tables", "how"), REPEATED.values(), ids=REPEATED)
def test_layout_repeats_its_bits_and_leaves_the_callers_state(placement, loss_fn, tables, how):
    run = functools.partial(trained, placement, loss_fn, tables, **how)
    seen, last = run()
    mechanism = Mechanism(how.get("sampler", POISSON), 1e-3, 1.0)
    mine = algorithm_of(loss_fn, tables).init(PARAMS, mechanism, ROWS)
    for state in (None, mine, seen[0]):
        assert_same_bits(run(state=state)[0][-1], seen[-1])
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((mine, PARAMS)))
    for whole in (hosted(last), on_one_device(last)):  # states are read back whole
        assert_same_bits(jax.tree.map(np.asarray, whole), seen[-1])
    assert placement_mismatch(last) is None


NOISES = {
    "independent": (None, FRESH, (on(2), on(8), on(8, SHARE)), (0, 0, 0)),
    "bands": (None, BANDED, (on(2), on(8), on(8, SHARE)), (0, 0, 0)),
    # The last bits of a row that a step has caught up differ, on some processors more.
    # No guarantee needs them to be one: another placement is another attempt.
    "lazy": (TABLES, FRESH, (on(1), on(2), on(4), on(8)), (2**-22, 2**-22, 0)),
}


@pytest.mark.parametrize(("tables", "noise", "places", "most"), NOISES.values(), ids=NOISES)
def test_noise_of_every_layout_is_that_of_one_device(tables, noise, places, most):
    run = functools.partial(trained, sampler=ORDERED, noise=noise, sigma=1.0)
    expected, _ = run(None, nothing, tables)
    for place in places:
        for allowed, *states in zip(most, run(place, nothing, tables)[0], expected, strict=True):
            pairs = zip(*(jax.tree.leaves(state.raw_params) for state in states), strict=True)
            assert max(np.abs(x - y).max() for x, y in pairs) <= allowed


@pytest.mark.parametrize("noise", [FRESH, BANDED])
def test_noise_and_update_exchange_nothing(noise):
    placement, algorithm = on(8, SHARE), algorithm_of()
    mechanism = Mechanism(ORDERED, 1.0, 1.0, noise)
    state = algorithm.init(PARAMS, mechanism)
    shardings, whole = placement.state(state), placement.replicated
    found = program(
        lambda *of: algorithm.update(*of)[0],
        (),
        (state, PARAMS, KEY, mechanism.scales()),
        shardings=((shardings, shardings.params, whole, whole), shardings),
    )
    assert collectives(found.compiled) == []


def lazy_programs(made, data, block_steps):
    """Returns the compiled block on eight devices, and what flushes."""
    algorithm, mechanism, state = made
    layout = Layout.choose(mechanism.sampler, data, block_steps=block_steps, placement=on(8))
    laws = algorithm.gap_laws(STEPS).flush_arrays(block_steps)
    key = jax.ShapeDtypeStruct((4,), jnp.uint32)
    arguments = jax.eval_shape(defer_noise, state), laws, key, mechanism.scales()
    block = layout.program(algorithm, mechanism, state, data)
    return block, flush_program(algorithm, arguments, layout.placement).compiled


def test_step_exchanges_only_read_rows_and_their_gradients():
    @functools.partial(with_rows, lambda example: {"table": example["ids"]})
    def one_table(params, rows, example):
        return jnp.square(jnp.tanh(rows["table"].sum(axis=0)) @ params["w"] - example["y"])

    algorithm, mechanism = algorithm_of(one_table, LazyTables(0.3)), Mechanism(POISSON, 1e-3, 1.0)
    params = {name: PARAMS[name] for name in ("table", "w")}
    state = algorithm.init(params, mechanism, ROWS)
    block, flush = lazy_programs((algorithm, mechanism, state), ROWS, BLOCK)
    look_ups = 4 * on(8).width(POISSON.padded_batch_size, 1)
    dense, diagnostics, watched = WIDTH, 4, 128
    assert collectives(block) == [
        Collective("all-gather", 4 * look_ups, 1),
        Collective("all-reduce", 4 * look_ups * WIDTH, 1),
        Collective("all-reduce", 4 * (look_ups * WIDTH + dense + diagnostics), 1),
        Collective("all-reduce", 4 * watched, 1),
    ]
    assert collectives(flush) == []
    for compiled, width in ((block, WIDTH + 1), (flush, WIDTH)):  # a step's with the steps of rows
        assert f"f32[{R},{WIDTH}]" not in compiled.as_text()  # no device makes a whole table
        assert compiled.memory_analysis().alias_size_in_bytes >= 4 * R // 8 * width


def test_look_up_beyond_a_table_reads_its_nearest_row():
    """Without noise: lazily, and by momentum on whole tables with each look-up in the table."""
    lazily, _ = trained(on(8), loss, TABLES, sigma=0.0)
    of_tables = optax.sgd(TABLES.learning_rate, TABLES.momentum)
    labels = {"odd": "tables", "table": "tables", "w": "others"}
    parts = optax.multi_transform({"tables": of_tables, "others": optax.sgd(0.1)}, labels)
    algorithm, mechanism = dpsgd(loss, parts, microbatch_size=5), Mechanism(POISSON, 0.0, 1.0)
    inside = ROWS | {"ids": np.clip(ROWS["ids"], 0, R - 1)}
    state = algorithm.init(PARAMS, mechanism)
    for block in train_blocks(algorithm, mechanism, state, inside, insecure_seed=0):
        end = block.state
    momenta = [x for x in jax.tree.leaves(end.opt_state) if x.ndim == 2]
    found = [table.momentum for table in lazily[-1].tables.values()]
    assert off(lazily[-1].params, end.params) <= 1e-6
    assert off(found, momenta) <= 2e-6  # in which more cancels, in the sums of any


ROWS_85M, DIM, FEATURES, BATCH = 6_071_296, 14, 26, 8_192
COLUMNS = {
    "ids": jax.ShapeDtypeStruct((10 * BATCH, FEATURES), jnp.int32),
    "y": jax.ShapeDtypeStruct((10 * BATCH,), jnp.float32),
}


@pytest.mark.parametrize("groups", [1, 2, 6])
def test_filters_get_gradients_from_rows_of_all_devices(groups):
    """XLA shards the feature groups of their gradients as if one device had all."""
    layouts = ("NWC", "WIO", "NWC")

    def loss_fn(params, x):
        convolve = functools.partial(
            jax.lax.conv_general_dilated, window_strides=(1,), padding="SAME"
        )
        y = convolve(x[None], params, feature_group_count=groups, dimension_numbers=layouts)
        return jnp.sum(jnp.sin(y))

    draw = np.random.default_rng(groups)
    kernel = draw.normal(size=(3, 6 // groups, 6)).astype(np.float32)
    x, scales = draw.normal(size=(16, 16, 6)).astype(np.float32), Scales(1.0, None, None)
    mesh = jax.make_mesh((8,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows"))

    def summed(devices, **how):
        sums = ClippedSum(loss_fn, FLAT, None)
        run = functools.partial(sums, devices=devices)
        return jax.jit(lambda x: run(kernel, x, jnp.ones(16), scales)[0], **how)(x)

    np.testing.assert_allclose(summed(8, in_shardings=sharded), summed(1), atol=1e-5)


def large(loss_fn, rows, optimizer, tables=None, **others):
    """Returns algorithm, mechanism and shapes of the first state of a table of so many rows."""
    shapes = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in others.items()}
    shapes["table"] = jax.ShapeDtypeStruct((rows, DIM), jnp.float32)
    algorithm = dpsgd(loss_fn, optimizer, tables=tables, microbatch_size=512)
    mechanism = Mechanism(Deterministic(10 * BATCH, batch_size=BATCH), 1.0, 1.0)
    state = jax.eval_shape(lambda params: algorithm.init(params, mechanism, COLUMNS), shapes)
    return algorithm, mechanism, state


def test_each_of_8_devices_has_an_eighth_of_85m_parameters():
    """From shapes alone."""

    def deep(params, example):
        x = params["table"][example["ids"]].ravel()
        return jnp.square(jax.nn.relu(x @ params["w"]) @ params["out"] - example["y"])

    wide = FEATURES * DIM
    sizes = {"w": (wide, 256), "out": (256,)}
    algorithm, mechanism, state = large(deep, ROWS_85M, optax.adam(1e-3), **sizes)
    table, dense = 4 * ROWS_85M * DIM, 4 * (wide * 256 + 256)
    temporary = {}
    for name, placement in {"alone": None, "8": on(8), "sharded": on(8, 2**24)}.items():
        layout = Layout.choose(mechanism.sampler, COLUMNS, block_steps=2, placement=placement)
        program = layout.program(algorithm, mechanism, state, COLUMNS)
        memory, sent = program.memory_analysis(), collectives(program)
        temporary[name] = memory.temp_size_in_bytes
        if name == "8":
            assert sent == [Collective("all-reduce", table + dense + 4 * 4, 1)]
        elif name == "sharded":
            assert max(one.size for one in sent) < table / 4
            least = 3 * (table / 8 + dense)
            assert least <= memory.alias_size_in_bytes <= least + 4_096
        # In microbatches of 512; activations have 256 columns, and so has a layer of 364 rows.
        assert (16 in trips(program)) == (placement is None)
        if placement:
            assert 2 in trips(program)
            assert max(map(int, re.findall(r"f32\[(\d+),256\]", program.as_text()))) == 512
    assert temporary["sharded"] < temporary["alone"] / 2


def test_each_of_8_devices_holds_an_eighth_of_85m_lazy_numbers():
    """From shapes alone."""

    @functools.partial(with_rows, lambda example: {"table": example["ids"]})
    def clicks(params, rows, example):
        return jnp.square(rows["table"].ravel() @ params["w"] - example["y"])

    sgd, shape = optax.sgd(0.1), (FEATURES * DIM,)
    once, doubled = (large(clicks, k * ROWS_85M, sgd, TABLES, w=shape) for k in (1, 2))
    pairs = [lazy_programs(made, COLUMNS, 2) for made in (once, doubled)]
    shard = 4 * ROWS_85M // 8 * (2 * DIM + 1)  # values, momentum and steps
    for one, other in zip(*pairs, strict=True):
        memory, of_twice = one.memory_analysis(), other.memory_analysis()
        assert shard <= memory.alias_size_in_bytes <= shard + 8_192
        assert memory.temp_size_in_bytes < shard
        assert of_twice.temp_size_in_bytes <= memory.temp_size_in_bytes + 8_192
    assert max(one.size for one in collectives(pairs[0][0])) < shard / 4
    assert on(8).fitting(once[2], 1e6).shard_rows_from is None


def looked_up(params, example):
    return (params["table"][example["id"]] @ params["out"] - example["y"]) ** 2


def test_tables_are_sharded_if_a_state_fills_half_of_a_device():
    def fitted(rows, memory, given=None):
        table = jax.ShapeDtypeStruct((rows, 16), jnp.float32)
        algorithm = dpsgd(looked_up, optax.adam(0.1))
        state = jax.eval_shape(algorithm.init, {"table": table, "out": jnp.zeros(2**20)})
        return on(8, given).fitting(state, memory).shard_rows_from

    size = 3 * 4 * (2**22 * 16 + 2**20) + 8  # with two moments, and two counts of steps
    assert fitted(2**22, 2 * size) is None
    assert fitted(2**22, 2 * size - 1) == 2**26
    assert fitted(2**22, 1, given=2**30) == 2**30
    assert fitted(2**22 + 1, 1) is None
    assert fitted(2**16, 1) is None


@jax.custom_vjp
def sneaky(x):
    return x


sneaky.defvjp(lambda x: (x, x), lambda x, g: (jax.lax.psum(g, AXIS),))

REACHING = {
    "psum": lambda x: jax.lax.psum(x, AXIS),
    "pmean": lambda x: jax.lax.pmean(x, AXIS),
    "all_gather": lambda x: jnp.sum(jax.lax.all_gather(x, AXIS)),
    "ppermute": lambda x: jax.lax.ppermute(x, AXIS, [(0, 1), (1, 0)]),
    "axis_index": lambda x: x * jax.lax.axis_index(AXIS),
    "psum of gradients": sneaky,
}


def compiled(placement, reach=lambda x: x, params=PARAMS, tables=None):
    def reaching(params, rows, example):
        return reach(of_rows(params, rows, example))

    loss_fn = with_rows(look_ups, reaching)
    algorithm, mechanism = algorithm_of(loss_fn, tables), Mechanism(POISSON, 1.0, 1.0)
    state = algorithm_of(loss, tables).init(params, mechanism, ROWS if tables else None)
    Layout.choose(POISSON, ROWS, placement=placement).program(algorithm, mechanism, state, ROWS)


@pytest.mark.parametrize("name", REACHING)
@pytest.mark.parametrize("tables", [None, TABLES], ids=["dense", "lazy"])
def test_a_loss_that_reaches_for_other_devices_is_refused(name, tables):
    with pytest.raises(ValueError, match="examples could mix"):
        compiled(on(8), REACHING[name], tables=tables)


def test_what_cannot_be_sharded_is_refused():
    with pytest.raises(NameError, match="unbound axis name"):  # where tables are sharded
        compiled(on(8, SHARE), REACHING["psum"])
    why = r"\['odd'\] has 2,046 rows, which do not divide by 8 devices"
    with pytest.raises(ValueError, match=why):
        compiled(on(8, SHARE // 2))
    with pytest.raises(ValueError, match="whole on every device; leave it out"):
        compiled(on(8, SHARE), params=PARAMS | {"w": jnp.ones((R, WIDTH))}, tables=TABLES)


SOUND = dpsgd(loss, optax.sgd(0.1), microbatch_size=3)


def failed(algorithm=SOUND, placement=None, sampler=POISSON, data_on="device"):
    """The checks of the audit that fail on eight devices."""
    few = jax.tree.map(lambda column: column[:40], ROWS)
    layout = Layout.choose(
        sampler, ROWS, block_steps=8, data_on=data_on, placement=placement or on(8)
    )
    mechanism, root = Mechanism(sampler, 1.0, 1.0), RootKey.from_insecure_seed(1)
    report = audit_program(algorithm, mechanism, PARAMS, few, layout=layout, root=root)
    return [check.name for check in report.checks if not check.passed]


@pytest.mark.parametrize(
    "how",
    [{}, {"sampler": SEVERAL, "data_on": "host"}, {"placement": on(8, SHARE)}],
    ids=["replicated", "streamed, several passes", "sharded"],
)
def test_an_audit_passes_what_devices_do_right(how):
    assert not failed(**how)


def noisy_sum(params, batch, weights, scales):
    total, log = SOUND.clipped_sum(params, batch, weights, scales)
    leaves, structure = jax.tree.flatten(total)
    key = jax.random.fold_in(jax.random.key(7), jax.lax.axis_index(AXIS))
    noised = [
        leaf + scales.noise_stddev * jax.random.normal(jax.random.fold_in(key, k), leaf.shape)
        for k, leaf in enumerate(leaves)
    ]
    return jax.tree.unflatten(structure, noised), log


def first_alone(state, total, noise_key, scales):
    after, gradient = SOUND.update(state, total, noise_key, scales)
    silent = jax.tree.map(lambda x: x / scales.expected_batch_size, total)
    whole = jax.sharding.PartitionSpec()

    @functools.partial(
        jax.shard_map, mesh=on(8).mesh, in_specs=whole, out_specs=whole, check_vma=False
    )
    def chosen(pair):
        return jax.tree.map(lambda x, y: jnp.where(jax.lax.axis_index(AXIS), y, x), *pair)

    gradient = chosen((gradient, silent))
    params = jax.tree.map(lambda p, g: p - 0.1 * g, state.params, gradient)
    return after._replace(raw_params=params), gradient


def one_for_all(self, plan):
    return type(plan)(*(None if part is None else self.replicated for part in plan))


def counting(plan, width, *parts, sound=feed.pad_columns):
    wide = sound(plan, width, *parts)
    return wide._replace(weights=np.where(np.arange(width) < 1, 1, wide.weights))


def shifted(*of, sound=feed.with_rows):
    rows, plan = sound(*of)
    return jax.tree.map(lambda x: np.roll(x, 1, axis=0), rows), plan


FAULTS = {
    "noise once a device": SOUND._replace(clipped_sum=noisy_sum),
    "noise on the first alone": SOUND._replace(update=first_alone),
    "the batch on every device": (Placement, "plan", one_for_all),
    "parts that are not added up": (Placement, "total", lambda _, tree: tree),
    "padding that counts": (feed, "pad_columns", counting),
    "rows of another device": (feed, "with_rows", shifted),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_an_audit_finds_out_what_devices_do_wrong(fault, monkeypatch):
    if type(fault) is not tuple:  # an algorithm
        assert failed(fault)
        return
    monkeypatch.setattr(*fault)
    # Programs are known by their parts: one of another size of microbatches is compiled anew.
    algorithm = dpsgd(loss, optax.sgd(0.1), microbatch_size=4 + len(fault[1]))
    assert failed(algorithm, data_on="host" if fault[1] == "with_rows" else "device")
