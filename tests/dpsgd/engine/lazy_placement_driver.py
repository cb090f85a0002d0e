"""Trains lazy tables on eight fake devices; prints what it finds as JSON.

    python lazy_placement_driver.py short|long

In a process of its own, as JAX is told how many devices a CPU has before it starts.
"""

import dataclasses
import itertools
import json
import os
import sys
import time
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
# Eight devices on a busy machine wait for each other longer than XLA thinks right; and what runs
# once is compiled in half the time at level 0. Long, bits and memory are those of users.
os.environ["XLA_FLAGS"] = " ".join(
    [os.environ.get("XLA_FLAGS", ""), "--xla_cpu_collective_call_terminate_timeout_seconds=600"]
    + ["--xla_backend_optimization_level=0"] * (sys.argv[1:] == ["short"])
)
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = str(int(sys.argv[1:] == ["short"]))
sys.path.insert(0, str(Path(__file__).parents[3]))
sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from placements import LAZY_BUGS

from dpsgd import LazyTables, Mechanism, RootKey, TrainState, dpsgd, train_blocks
from dpsgd.core.algorithm import Schedules
from dpsgd.core.state import opened
from dpsgd.engine.feed import Layout
from dpsgd.engine.lazy import group as lazy
from dpsgd.engine.lazy import rows
from dpsgd.engine.placement import (
    AXIS,
    Exchange,
    Placement,
    hosted,
    on_one_device,
    placement_mismatch,
)
from dpsgd.engine.planning import collectives
from dpsgd.engine.step import flush_program
from dpsgd.noise.base import Independent
from samplers import Deterministic, Multistage, Poisson, UnitTree

jax.config.update("jax_num_cpu_devices", 8)

N, R, WIDTH, STEPS, DUE = 200, 2048, 6, 20, 8
rng = np.random.default_rng(0)
PARAMS = {
    "odd": jnp.asarray(0.3 * rng.normal(size=(R - 2, 4)), jnp.float32),
    "table": jnp.asarray(0.3 * rng.normal(size=(R, WIDTH)), jnp.float32),
    "w": jnp.asarray(rng.normal(size=WIDTH), jnp.float32),
}
ROWS = {  # some counted from the end of the table, or beyond it
    "ids": rng.integers(-9, R + 9, (N, 4)).astype(np.int32),
    "odd": rng.integers(0, R - 2, N).astype(np.int32),
    "y": rng.normal(size=N).astype(np.float32),
}
POISSON = Poisson(N, batch_size=20, epochs=2)
USERS = UnitTree.from_columns({"user": np.repeat(np.arange(20), N // 20)})
UNITS = Multistage(USERS, (5, 4), steps=STEPS, clipped_level=1)
ROOT = RootKey.from_insecure_seed(0)
QUICK = sys.argv[1:] == ["short"]
if QUICK:  # one table, without momentum: half as much to compile
    del PARAMS["odd"]
TABLES = LazyTables(optax.cosine_decay_schedule(0.3, STEPS), 0.9 * (not QUICK), 0.01)


OPTIMIZER = optax.sgd(0.1)


def loss(params, example):
    x = params["table"][example["ids"]].sum(axis=0)
    y = jnp.tanh(x) @ params["w"]
    if not QUICK:
        y += params["odd"][example["odd"]].sum()
    return jnp.square(y - example["y"])


def on(count):
    return Placement(tuple(jax.devices()[:count])) if count else None


def dropped(params, example, key):
    return loss(params, example) * jax.random.bernoulli(key, 0.7)


def of_unit(params, unit):
    return jax.vmap(loss, (None, 0))(params, unit).sum()


def nothing(params, example):
    return 0.0 * loss(params, example)


def reaching(params, example):
    return jax.lax.psum(loss(params, example), AXIS)


def trained(placement, loss_fn=loss, sampler=POISSON, sigma=1e-3, state=None, blocks=None, **how):
    """Returns the states after 8, 16 and 20 steps on the host, and the last one.

    By default with so little noise that what rounding does to sums is not lost in it.
    """
    algorithm = dpsgd(loss_fn, OPTIMIZER, tables=TABLES, microbatch_size=5)
    mechanism = Mechanism(sampler, sigma, 1.0)
    state = algorithm.init(PARAMS, mechanism, ROWS) if state is None else state
    how = {"root": ROOT, "block_steps": DUE, "placement": placement, **how}
    seen = []
    taken = train_blocks(algorithm, mechanism, state, ROWS, **how)
    for block in itertools.islice(taken, blocks):
        seen.append(jax.tree.map(np.array, block.state))
    return seen, block.state


def programs(placement, like):
    """Returns the compiled block, and what flushes."""
    algorithm = dpsgd(loss, OPTIMIZER, tables=TABLES, microbatch_size=5)
    mechanism = Mechanism(POISSON, 1e-3, 1.0)
    layout = Layout.of(POISSON, ROWS, block_steps=DUE, placement=placement)
    known = Schedules(algorithm.groups, STEPS).after(DUE)
    key = jax.ShapeDtypeStruct((4,), jnp.uint32)
    arguments = jax.eval_shape(opened, like), known, key, mechanism.scales()
    return layout.program(algorithm, mechanism, like, ROWS), flush_program(
        algorithm, arguments, placement
    )


def off(found, expected):
    """The largest difference of two states, relative to the largest number of each leaf.

    One in a hundred numbers that are flushed may have been rounded to the next of their grid.
    """
    flushed, largest = isinstance(found, TrainState), 0.0
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        away = np.abs(x - y) / max(np.abs(y).max(), 1e-9)
        rounded = flushed and away.max() <= 2.0**-12
        largest = max(largest, float(np.quantile(away, 0.99) if rounded else away.max()))
    return largest


def equal():
    """How far the states of eight devices are from those of one, and what they hold and send."""
    alone, _ = trained(None)
    found, last = trained(on(8))
    block, flush = programs(on(8), last)
    return {
        "off": [off(x, y) for x, y in zip(found, alone, strict=True)],
        "pending": [x.pending for x in found],
        "where": {name: str(leaf.sharding.spec) for name, leaf in last.raw_params.items()},
        "collectives": [one._asdict() for one in collectives(block)],
        "flush": [one._asdict() for one in collectives(flush)],
        "given_away": [x.memory_analysis().alias_size_in_bytes for x in (block, flush)],
        "whole": [f"f32[{R},{WIDTH}]" in x.as_text() for x in (block, flush)],
        "places": on(8).width(POISSON.padded_batch_size, 1),
    }


def layouts():
    """How far states are from those of one device, of whatever a run reads and however."""
    cases = {
        "streamed": (on(4), {"data_on": "host"}),
        "a key": (on(8), {"loss_fn": dropped}),
        "shards": (on(4), {"sampler": dataclasses.replace(POISSON, num_shards=2)}),
        "units": (on(8), {"sampler": UNITS, "loss_fn": of_unit}),
        "flushed in between": (on(8), {"flush_every": 5}),
    }
    found = {}
    for name, (placement, how) in cases.items():
        alone, _ = trained(None, **how)
        mine, _ = trained(placement, **how)
        found[name] = [off(x, y) for x, y in zip(mine, alone, strict=True)]
    return found


def noise():
    """How many numbers differ from those of one device where nothing but noise moves them."""
    alone, _ = trained(None, nothing, sigma=1.0)
    return {
        count: [
            differing(x, y)
            for x, y in zip(trained(on(count), nothing, sigma=1.0)[0], alone, strict=True)
        ]
        for count in (1, 2, 4, 8)
    }


def differing(found, expected):
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return int(sum(np.sum(x != y) for x, y in pairs))


def repeats():
    """Whether eight devices repeat their bits, in one go and from a state whose noise is due."""
    seen, last = trained(on(8))
    again, _ = trained(on(8))
    resumed, _ = trained(on(8), state=seen[0])
    whole = [hosted(last), on_one_device(last)]
    return {
        "numbers": [differing(x[-1], seen[-1]) for x in (again, resumed)],
        "whole": [differing(jax.tree.map(np.asarray, x), seen[-1]) for x in whole],
        "unlike": placement_mismatch(last),
    }


def large():
    """A table of 85 million numbers and a batch of 8,192, from shapes alone."""
    rows = 6_071_296
    (block, flush), state = large_programs(rows)
    twice, _ = large_programs(2 * rows)
    return {
        "shard": 4 * rows // 8 * (2 * 14 + 1),  # values, momentum and steps
        "given_away": [x.memory_analysis().alias_size_in_bytes for x in (block, flush)],
        "temporary": [x.memory_analysis().temp_size_in_bytes for x in (block, flush)],
        "of_twice": [x.memory_analysis().temp_size_in_bytes for x in twice],
        "exchanged": [one._asdict() for one in collectives(block)],
        "fitting": on(8).fitting(state, 1e6).shard_rows_from,
    }


def large_programs(rows):
    """Returns block and flush of a table of so many rows on eight devices, and a state's shapes."""
    dim, features, batch = 14, 26, 8_192
    shapes = {
        "table": jax.ShapeDtypeStruct((rows, dim), jnp.float32),
        "w": jax.ShapeDtypeStruct((features * dim,), jnp.float32),
    }

    def clicks(params, example):
        x = params["table"][example["ids"]].ravel()
        return jnp.square(x @ params["w"] - example["y"])

    n = 10 * batch
    data = {
        "ids": jax.ShapeDtypeStruct((n, features), jnp.int32),
        "y": jax.ShapeDtypeStruct((n,), jnp.float32),
    }
    algorithm = dpsgd(clicks, OPTIMIZER, tables=TABLES, microbatch_size=512)
    mechanism = Mechanism(Deterministic(n, batch_size=batch), 1.0, 1.0)
    state = jax.eval_shape(lambda params: algorithm.init(params, mechanism, data), shapes)
    layout = Layout.of(mechanism.sampler, data, block_steps=2, placement=on(8))
    block = layout.program(algorithm, mechanism, state, data)
    known = Schedules(algorithm.groups, 10).after(2)
    key = jax.ShapeDtypeStruct((4,), jnp.uint32)
    arguments = jax.eval_shape(opened, state), known, key, mechanism.scales()
    return (block, flush_program(algorithm, arguments, on(8))), state


def refused():
    """What cannot be is told, before anything is done."""
    found = {}

    def tried(name, begun):
        try:
            begun()
            found[name] = None
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"

    tried("psum", lambda: trained(on(8), reaching))
    begun = dpsgd(loss, OPTIMIZER, tables=TABLES).init(PARAMS, Mechanism(POISSON, 1.0, 1.0), ROWS)
    tried("psum of a state", lambda: trained(on(8), reaching, state=begun))

    wide = PARAMS | {"w": jnp.ones((R, WIDTH))}
    algorithm = dpsgd(lambda p, e: loss(p | {"w": p["w"].sum(axis=0)}, e), OPTIMIZER, tables=TABLES)
    mechanism = Mechanism(POISSON, 1.0, 1.0)
    layout = Layout.of(POISSON, ROWS, placement=Placement(on(8).devices, 4 * R))
    state = algorithm.init(wide, mechanism, ROWS)
    tried("a dense leaf", lambda: layout.program(algorithm, mechanism, state, ROWS))
    return found


BUGS = ["none", *LAZY_BUGS]
"""One program holds them all, and which is at work is the first word of its key."""


def planted():
    """How far states of eight devices are from those of one, with each bug, after five steps."""
    found = {}
    for number, name in enumerate(BUGS):

        def key(self, root, attempt, number=number):
            words = root.noise_key(attempt)
            words[0] = number
            return words

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Independent, "key", key)
            (mine,), (alone,) = (
                trained(where, sigma=0.1, flush_every=5, blocks=1)[0] for where in (on(8), None)
            )
        found[name] = off(mine, alone)
    return found


def plant_all():
    """Plants every bug: none is to be seen where one device has all rows."""
    step, read, caught_up = lazy.LazyRows.view, lazy.read, rows.caught_up
    flushed_table, gathered, total = lazy.flushed_table, Exchange.gathered, Exchange.total
    read_share, write_share = lazy.Share.read, lazy.Share.written
    at_work = {}

    def choose(sound, **planted):
        for name, wrong in planted.items():
            chosen = at_work["key"][0] == BUGS.index(name.replace("_", " "))
            sound = jax.tree.map(lambda a, b, c=chosen: jnp.where(c, b, a), sound, wrong)
        return sound

    def stepped(self, state, view, context):
        at_work["key"] = context.noise_key
        return step(self, state, view, context)

    def read_wrongly(table, numbers, first=0, **how):
        at_work["first"] = first
        found = read(table, numbers, first, **how)
        at_work["first"] = 0
        return found

    def caught_up_wrongly(values, momentum, steps, numbers, **how):
        local = numbers - at_work.get("first", 0)
        numbers = choose(numbers, rows_are_caught_up_with_the_keys_of_local_ones=local)
        return caught_up(values, momentum, steps, numbers, **how)

    def flushed_wrongly(table, chunk, first, **how):
        at_work["key"] = how["noise_key"]
        first = choose(first, rows_are_flushed_with_the_keys_of_local_ones=0)
        return flushed_table(table, chunk, first, **how)

    def gathered_wrongly(self, columns):
        every = gathered(self, columns)
        own = [
            jnp.concatenate([x] * (len(y) // len(x))) for x, y in zip(columns, every, strict=True)
        ]
        return choose(every, a_device_knows_of_its_own_look_ups_alone=own)

    def total_wrongly(self, tree):
        if self.placement is None:
            return tree
        devices = len(self.placement.devices)
        noisy = jax.tree.map(lambda x: x + jax.random.normal(jax.random.key(0), x.shape), tree)
        if not isinstance(tree, dict):  # gradients, of small tables and all else
            tree = choose(tree, every_device_adds_noise_to_its_sums=noisy)
        what = "small_tables" if isinstance(tree, dict) else "gradients"
        sound = total(self, tree)
        twice = jax.tree.map(lambda x: devices * x, sound)
        wrong = {f"{what}_are_not_summed": tree, f"{what}_are_summed_twice": twice}
        return choose(sound, **wrong)

    def of_all(share):
        count = jnp.int32(len(share.numbers))
        places = jnp.minimum(jnp.arange(len(share.places), dtype=jnp.int32), count)
        return share._replace(places=places, count=count)

    def share_read(self, table, **how):
        if self.sharded:
            self = chosen(self, foreign_rows_are_read=of_all(self))
        return read_share(self, table, **how)

    def share_written(self, *what):
        if self.sharded:
            self = chosen(self, foreign_rows_are_written=of_all(self))
        return write_share(self, *what)

    def chosen(share, **planted):
        return choose(share, **planted)._replace(size=share.size)

    lazy.LazyRows.view, lazy.read, rows.caught_up = stepped, read_wrongly, caught_up_wrongly
    lazy.flushed_table = flushed_wrongly
    Exchange.gathered, Exchange.total = gathered_wrongly, total_wrongly
    lazy.Share.read, lazy.Share.written = share_read, share_written


def nearest():
    """How far lazy tables are from dense ones without noise; there each look-up is in the table."""
    lazily, _ = trained(on(8), sigma=0.0)
    parts = {"tables": sgd_of_tables(), "others": OPTIMIZER}
    labels = {"odd": "tables", "table": "tables", "w": "others"}
    algorithm = dpsgd(loss, optax.multi_transform(parts, labels), microbatch_size=5)
    mechanism = Mechanism(POISSON, 0.0, 1.0)
    ids = np.clip(np.where(ROWS["ids"] < 0, ROWS["ids"] + R, ROWS["ids"]), 0, R - 1)
    state = algorithm.init(PARAMS, mechanism)
    for block in train_blocks(algorithm, mechanism, state, ROWS | {"ids": ids}, root=ROOT):
        end = block.state
    momenta = [m for m in jax.tree.leaves(end.opt_state) if m.ndim == 2]
    found = [table.momentum for table in lazily[-1].tables.values()]
    return [off(lazily[-1].params, end.params), off(list(found), momenta)]


def sgd_of_tables():
    decay = optax.add_decayed_weights(TABLES.weight_decay)
    return optax.chain(decay, optax.sgd(TABLES.learning_rate, TABLES.momentum))


SHORT = {"equal": equal, "planted": planted}
LONG = {
    "equal": equal,
    "nearest": nearest,
    "layouts": layouts,
    "noise": noise,
    "repeats": repeats,
    "large": large,
    "refused": refused,
}

if __name__ == "__main__":
    found = {}
    if QUICK:
        plant_all()
    for part, find in {"short": SHORT, "long": LONG}[sys.argv[1]].items():
        began = time.process_time()
        found[part] = find()
        print(part, time.process_time() - began, file=sys.stderr)
    print(json.dumps(found))
