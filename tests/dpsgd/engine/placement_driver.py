"""Trains, audits and compiles on eight fake devices: tests of a process of their own.

JAX is told how many devices a CPU has before it starts; `test_placement.py` runs these.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpsgd import BandedToeplitz, Independent, Mechanism, dpsgd, train_blocks
from dpsgd.audit.audit import audit_program
from dpsgd.engine import feed
from dpsgd.engine.feed import Layout
from dpsgd.engine.placement import AXIS, Placement
from dpsgd.engine.programs import program
from dpsgd.noise.keys import RootKey
from samplers import Deterministic, Poisson
from tests.dpsgd.engine.collectives import Collective, collectives

jax.config.update("jax_num_cpu_devices", 8)

N, WIDTH = 200, 6
SHARE = 2**14
"""Bytes from which a table is sharded."""
rng = np.random.default_rng(0)
PARAMS = {
    "scale": jnp.ones(WIDTH),
    "table": jnp.asarray(rng.normal(size=(1024, WIDTH)), jnp.float32),
}
ROWS = {
    "ids": rng.integers(0, 1024, (N, 2)).astype(np.int32),
    "y": rng.normal(size=N).astype(np.float32),
}
POISSON = Poisson(N, batch_size=20, epochs=2)
SEVERAL = dataclasses.replace(POISSON, overflow="accumulate", max_batch_size=11)
ORDERED = Deterministic(N, batch_size=20, epochs=2)
SEED = 0
ROOT = RootKey.from_insecure_seed(SEED)


def loss(params, example):
    x = params["table"][example["ids"]].sum(axis=0)
    return jnp.square(jnp.tanh(x) @ params["scale"] - example["y"])


def dropped(params, example, key):
    return loss(params, example) * jax.random.bernoulli(key, 0.7)


def nothing(params, example):
    return 0.0 * loss(params, example)


def on(count, shard_rows_from=None):
    return Placement(tuple(jax.devices()[:count]), shard_rows_from)


def trained(algorithm, mechanism, placement, state=None, data_on="device", **how):
    """Returns all blocks' last states on the host, and the last block."""
    state = algorithm.init(PARAMS, mechanism) if state is None else state
    how = {"insecure_seed": SEED, "block_steps": 8, **how}
    seen = []
    for block in train_blocks(
        algorithm, mechanism, state, ROWS, placement=placement, data_on=data_on, **how
    ):
        seen.append(jax.tree.map(np.asarray, block.state))
    return seen, block


def flat(state):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(state.params)])


def assert_same_bits(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


@functools.cache
def reference(loss_fn, sampler, noise):
    return flat(trained(algorithm_of(loss_fn), mechanism_of(sampler, noise), None)[0][-1])


def algorithm_of(loss_fn):
    return dpsgd(loss_fn, optax.adam(1e-2), microbatch_size=1)


def mechanism_of(sampler, noise):
    # So little noise that what rounding does to sums is not lost in that of the release.
    return Mechanism(sampler, 1e-3, 1.0, noise)


BANDED = BandedToeplitz((0.8, 0.5, 0.3))
LAWS = {
    "independent": Independent(),
    "bands": BANDED,
}
TRAINED = {
    "1": (on(1), dropped, POISSON, Independent(), "device"),
    "2": (on(2), dropped, POISSON, Independent(), "device"),
    "4, streamed": (on(4), dropped, POISSON, Independent(), "host"),
    "8": (on(8), dropped, SEVERAL, Independent(), "device"),
    "4, sharded": (on(4, SHARE), dropped, POISSON, Independent(), "device"),
    "8, sharded": (on(8, SHARE), dropped, SEVERAL, Independent(), "host"),
    "8, sharded, bands": (on(8, SHARE), loss, ORDERED, BANDED, "device"),
}


def trips(program):
    """How often the loops of a program run whose number is known, as that of microbatches is."""
    return [int(n) for n in re.findall(r'known_trip_count":{"n":"(\d+)"', program.as_text())]


@pytest.mark.parametrize("name", TRAINED)
def test_parameters_after_20_steps_are_those_of_one_device(name):
    placement, loss_fn, sampler, noise, data_on = TRAINED[name]
    algorithm, mechanism = algorithm_of(loss_fn), mechanism_of(sampler, noise)
    seen, last = trained(algorithm, mechanism, placement, data_on=data_on)
    alone = reference(loss_fn, sampler, noise)
    assert last.steps.stop == 20
    assert np.abs(flat(seen[-1]) - alone).max() <= 1e-6 * np.abs(alone).max()
    spec = str(last.state.params["table"].sharding.spec)
    assert spec == ("P('devices',)" if "sharded" in name else "P()")
    if not name.startswith("8"):
        return
    layout = Layout.choose(sampler, ROWS, block_steps=8, data_on=data_on, placement=placement)
    program = layout.program(algorithm, mechanism, last.state, ROWS)
    if sampler is SEVERAL:  # 11 places of a pass are 16 on 8 devices: 2 microbatches of 1 on each
        assert 2 in trips(program)
    numbers, diagnostics = flat(seen[-1]).size, 4
    if name == "8":  # at depth 1: in the loop over steps, and in none over passes or microbatches
        size = 4 * (numbers + diagnostics)
        assert collectives(program) == [Collective("all-reduce", size, 1)]
    elif name == "8, sharded":
        assert 0 < max(one.size for one in collectives(program)) < numbers


@pytest.mark.parametrize("placement", [on(8), on(8, SHARE)], ids=["replicated", "sharded"])
def test_layout_repeats_its_bits_and_leaves_the_callers_state(placement):
    algorithm, mechanism = algorithm_of(dropped), mechanism_of(SEVERAL, Independent())
    seen, _ = trained(algorithm, mechanism, placement)
    again, _ = trained(algorithm, mechanism, placement)
    resumed, _ = trained(algorithm, mechanism, placement, state=seen[0])
    for end in (again, resumed):
        assert_same_bits(end[-1], seen[-1])
    mine = algorithm.init(PARAMS, mechanism)
    assert_same_bits(trained(algorithm, mechanism, placement, state=mine)[0][0], seen[0])
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((mine, PARAMS)))


@pytest.mark.parametrize("law", LAWS)
def test_noise_has_equal_bits_on_every_layout_without_exchanges(law):
    algorithm, mechanism = dpsgd(nothing, optax.sgd(1.0)), Mechanism(ORDERED, 1.0, 1.0, LAWS[law])
    alone = trained(algorithm, mechanism, None)[0][-1]
    for place in (on(2), on(8), on(8, SHARE)):
        assert_same_bits(alone, trained(algorithm, mechanism, place)[0][-1])
    placement, algorithm = on(8, SHARE), algorithm_of(loss)
    state = algorithm.init(PARAMS, mechanism)
    shardings, whole = placement.state(state), placement.replicated
    found = program(
        lambda *of: algorithm.update(*of)[0],
        (),
        (state, PARAMS, ROOT.noise_key(0), mechanism.scales()),
        shardings=((shardings, shardings.params, whole, whole), shardings),
    )
    assert collectives(found.compiled) == []


def test_each_of_8_devices_has_an_eighth_of_85m_parameters():
    """From shapes alone."""
    rows, dim, features, batch = 6_071_296, 14, 26, 8_192
    shapes = {
        "table": jax.ShapeDtypeStruct((rows, dim), jnp.float32),
        "w": jax.ShapeDtypeStruct((features * dim, 256), jnp.float32),
        "out": jax.ShapeDtypeStruct((256,), jnp.float32),
    }

    def deep(params, example):
        x = params["table"][example["ids"]].ravel()
        return jnp.square(jax.nn.relu(x @ params["w"]) @ params["out"] - example["y"])

    n = 10 * batch
    data = {
        "ids": jax.ShapeDtypeStruct((n, features), jnp.int32),
        "y": jax.ShapeDtypeStruct((n,), jnp.float32),
    }
    algorithm = dpsgd(deep, optax.adam(1e-3), microbatch_size=512)
    mechanism = Mechanism(Deterministic(n, batch_size=batch), 1.0, 1.0)
    state = jax.eval_shape(lambda params: algorithm.init(params, mechanism), shapes)
    table, dense = 4 * rows * dim, 4 * (features * dim * 256 + 256)
    temporary = {}
    for name, placement in {"alone": None, "8": on(8), "sharded": on(8, 2**24)}.items():
        layout = Layout.choose(mechanism.sampler, data, block_steps=2, placement=placement)
        program = layout.program(algorithm, mechanism, state, data)
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
    "psum": lambda p, e: jax.lax.psum(loss(p, e), AXIS),
    "pmean": lambda p, e: jax.lax.pmean(loss(p, e), AXIS),
    "all_gather": lambda p, e: jnp.sum(jax.lax.all_gather(loss(p, e), AXIS)),
    "ppermute": lambda p, e: jax.lax.ppermute(loss(p, e), AXIS, [(0, 1), (1, 0)]),
    "axis_index": lambda p, e: loss(p, e) * jax.lax.axis_index(AXIS),
    "psum of gradients": lambda p, e: sneaky(loss(p, e)),
}


def compiled(placement, loss_fn=loss, params=PARAMS, noise=None):
    algorithm = dpsgd(loss_fn, optax.sgd(1.0))
    mechanism = Mechanism(POISSON, 1.0, 1.0, noise or Independent())
    layout = Layout.choose(POISSON, ROWS, placement=placement)
    layout.program(algorithm, mechanism, algorithm.init(params, mechanism), ROWS)


@pytest.mark.parametrize("name", REACHING)
def test_a_loss_that_reaches_for_other_devices_is_refused(name):
    with pytest.raises(ValueError, match="examples could mix"):
        compiled(on(8), REACHING[name])


def test_what_cannot_be_sharded_is_refused():
    with pytest.raises(NameError, match="unbound axis name"):  # where tables are sharded
        compiled(on(8, SHARE), REACHING["psum"])
    odd = {**PARAMS, "table": jnp.zeros((1022, WIDTH))}
    why = r"\['table'\] has 1,022 rows, which do not divide by 8 devices"
    with pytest.raises(ValueError, match=why):
        compiled(on(8, SHARE), params=odd)


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
