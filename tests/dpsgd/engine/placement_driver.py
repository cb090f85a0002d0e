"""Trains, audits and compiles on eight fake devices; prints what it finds as JSON.

    python placement_driver.py short|long

In a process of its own, as JAX is told how many devices a CPU has before it starts.
"""

import dataclasses
import functools
import json
import os
import re
import sys
import time
import unittest.mock
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
# Eight devices on a busy machine wait for each other longer than XLA thinks right.
os.environ["XLA_FLAGS"] = " ".join(
    [os.environ.get("XLA_FLAGS", ""), "--xla_cpu_collective_call_terminate_timeout_seconds=600"]
)
sys.path.insert(0, str(Path(__file__).parents[3]))

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpsgd import BandedToeplitz, Independent, Mechanism, RootKey, Secure, dpsgd, train_blocks
from dpsgd.audit.audit import audit_program
from dpsgd.engine import feed
from dpsgd.engine.feed import Layout
from dpsgd.engine.placement import AXIS, Placement
from dpsgd.engine.planning import collectives
from dpsgd.engine.programs import executable
from dpsgd.noise.buffered import BufferedToeplitz
from samplers import Deterministic, Poisson

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
ROOT = RootKey.from_insecure_seed(0)


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
    how = {"root": ROOT, "block_steps": 8, **how}
    seen = []
    for block in train_blocks(
        algorithm, mechanism, state, ROWS, placement=placement, data_on=data_on, **how
    ):
        seen.append(jax.tree.map(np.asarray, block.state))
    return seen, block


def flat(state):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(state.params)])


def same_bits(one, other):
    return all(map(np.array_equal, jax.tree.leaves(one), jax.tree.leaves(other)))


@functools.cache
def reference(loss_fn, sampler, noise):
    return flat(trained(algorithm_of(loss_fn), mechanism_of(sampler, noise), None)[0][-1])


def algorithm_of(loss_fn):
    return dpsgd(loss_fn, optax.adam(1e-2), microbatch_size=1)


def mechanism_of(sampler, noise):
    # So little noise that what rounding does to sums is not lost in that of the release.
    return Mechanism(sampler, 1.0 if noise.exact else 1e-3, 1.0, noise)


BANDED = BandedToeplitz((0.8, 0.5, 0.3))
LAWS = {
    "independent": Independent(),
    "bands": BANDED,
    "buffered": BufferedToeplitz((0.5, 0.25), (0.75, 0.5)),
    "exact": Secure(),
}
TRAINED = {
    "1": (on(1), dropped, POISSON, Independent(), "device"),
    "2": (on(2), dropped, POISSON, Independent(), "device"),
    "4, streamed": (on(4), dropped, POISSON, Independent(), "host"),
    "8": (on(8), dropped, SEVERAL, Independent(), "device"),
    "8, exact": (on(8), loss, POISSON, Secure(), "device"),
    "4, sharded": (on(4, SHARE), dropped, POISSON, Independent(), "device"),
    "8, sharded": (on(8, SHARE), dropped, SEVERAL, Independent(), "host"),
    "8, sharded, bands": (on(8, SHARE), loss, ORDERED, BANDED, "device"),
}


def trips(program):
    """How often the loops of a program run whose number is known, as that of microbatches is."""
    return [int(n) for n in re.findall(r'known_trip_count":{"n":"(\d+)"', program.as_text())]


def parameters(names):
    """How far the parameters after 20 steps are from those of one device; collectives of a step."""
    found = {}
    for name in names:
        placement, loss_fn, sampler, noise, data_on = TRAINED[name]
        algorithm, mechanism = algorithm_of(loss_fn), mechanism_of(sampler, noise)
        seen, last = trained(algorithm, mechanism, placement, data_on=data_on)
        alone = reference(loss_fn, sampler, noise)
        layout = Layout.of(sampler, ROWS, block_steps=8, data_on=data_on, placement=placement)
        program = layout.program(algorithm, mechanism, last.state, ROWS)
        found[name] = {
            "steps": last.steps.stop,
            "off": float(np.abs(flat(seen[-1]) - alone).max() / np.abs(alone).max()),
            "table": str(last.state.params["table"].sharding.spec),
            "collectives": [one._asdict() for one in collectives(program)],
            "trips": trips(program),
        }
    return found


def repeats():
    """Whether a layout repeats its bits, in one go and from a state that was read back."""
    algorithm, mechanism = algorithm_of(dropped), mechanism_of(SEVERAL, Independent())
    found = {}
    for name, placement in {"replicated": on(8), "sharded": on(8, SHARE)}.items():
        seen, _ = trained(algorithm, mechanism, placement)
        again, _ = trained(algorithm, mechanism, placement)
        resumed, _ = trained(algorithm, mechanism, placement, state=seen[0])
        mine = algorithm.init(PARAMS, mechanism)
        first = trained(algorithm, mechanism, placement, state=mine)[0][0]
        twice = [same_bits(seen[-1], end[-1]) for end in (again, resumed)]
        kept = [not leaf.is_deleted() for leaf in jax.tree.leaves((mine, PARAMS))]
        found[name] = {"same": twice, "kept": all(kept) and same_bits(first, seen[0])}
    return found


def noise():
    """Whether noise is bit-equal on all layouts: parameters that nothing but noise moves."""
    found = {}
    for name, law in LAWS.items():
        algorithm, mechanism = dpsgd(nothing, optax.sgd(1.0)), Mechanism(ORDERED, 1.0, 1.0, law)
        alone = trained(algorithm, mechanism, None)[0][-1]
        places = [on(2), on(8)] + [on(8, SHARE)] * (name != "exact")
        ends = [trained(algorithm, mechanism, place)[0][-1] for place in places]
        found[name] = [same_bits(alone, end) for end in ends]
    return found


def silent():
    """The collectives of an update by itself, of a sum that is sharded as it is."""
    placement, found = on(8, SHARE), {}
    for name, law in LAWS.items():
        if name == "exact":
            continue
        algorithm, mechanism = algorithm_of(loss), mechanism_of(ORDERED, law)
        state, update = algorithm.init(PARAMS, mechanism), algorithm.update
        shardings, whole = placement.state(state), placement.replicated
        arguments = state, PARAMS, mechanism.noise_key(ROOT, 0), mechanism.scales()
        program = executable(
            lambda *of, update=update: update(*of)[0],
            (), arguments,
            shardings=((shardings, shardings.params, whole, whole), shardings),
        )  # fmt: skip
        found[name] = [one._asdict() for one in collectives(program)]
    return found


def large():
    """A table of 85 million parameters and a batch of 8,192, from shapes alone."""
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
    table = 4 * rows * dim
    found = {"table": table, "dense": 3 * 4 * (features * dim * 256 + 256)}
    for name, placement in {"alone": None, "8": on(8), "sharded": on(8, 2**24)}.items():
        layout = Layout.of(mechanism.sampler, data, block_steps=2, placement=placement)
        program = layout.program(algorithm, mechanism, state, data)
        memory = program.memory_analysis()
        found[name] = {
            "collectives": [one._asdict() for one in collectives(program)],
            "given_away": memory.alias_size_in_bytes,
            "temporary": memory.temp_size_in_bytes,
            "trips": trips(program),
            "rows": sorted(set(map(int, re.findall(r"f32\[(\d+),256\]", program.as_text())))),
        }
    return found


def refused():
    """What losses and arrays that cannot be are told."""
    mechanism = Mechanism(POISSON, 1.0, 1.0)

    @jax.custom_vjp
    def sneaky(x):
        return x

    sneaky.defvjp(lambda x: (x, x), lambda x, g: (jax.lax.psum(g, AXIS),))
    losses = {
        "psum": lambda p, e: jax.lax.psum(loss(p, e), AXIS),
        "pmean": lambda p, e: jax.lax.pmean(loss(p, e), AXIS),
        "all_gather": lambda p, e: jnp.sum(jax.lax.all_gather(loss(p, e), AXIS)),
        "ppermute": lambda p, e: jax.lax.ppermute(loss(p, e), AXIS, [(0, 1), (1, 0)]),
        "axis_index": lambda p, e: loss(p, e) * jax.lax.axis_index(AXIS),
        "psum of gradients": lambda p, e: sneaky(loss(p, e)),
    }
    found = {}

    def tried(name, placement, loss_fn=loss, params=PARAMS, mechanism=mechanism):
        algorithm = dpsgd(loss_fn, optax.sgd(1.0))
        layout = Layout.of(POISSON, ROWS, placement=placement)
        try:
            state = algorithm.init(params, mechanism)
            layout.program(algorithm, mechanism, state, ROWS)
            found[name] = None
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"

    for name, loss_fn in losses.items():
        tried(name, on(8), loss_fn)
    tried("psum, sharded", on(8, SHARE), losses["psum"])
    tried("rows", on(8, SHARE), params={**PARAMS, "table": jnp.zeros((1022, WIDTH))})
    exact = dataclasses.replace(mechanism, noise=Secure())
    tried("exact, sharded", on(8, SHARE), mechanism=exact)
    return found


def audits(names):
    """The checks that fail of programs of eight devices: of sound ones, and of broken ones."""
    few = jax.tree.map(lambda column: column[:40], ROWS)

    def audited(algorithm, placement=None, sampler=POISSON, data_on="device"):
        mechanism, placement = Mechanism(sampler, 1.0, 1.0), placement or on(8)
        layout = Layout.of(sampler, ROWS, block_steps=8, data_on=data_on, placement=placement)
        root = RootKey.from_insecure_seed(1)
        report = audit_program(algorithm, mechanism, PARAMS, few, layout=layout, root=root)
        return [check.name for check in report.checks if not check.passed]

    sound = dpsgd(loss, optax.sgd(0.1), microbatch_size=3)

    def noisy_sum(params, batch, weights, scales):
        total, log = sound.clipped_sum(params, batch, weights, scales)
        leaves, structure = jax.tree.flatten(total)
        key = jax.random.fold_in(jax.random.key(7), jax.lax.axis_index(AXIS))
        noised = [
            leaf + scales.noise_stddev * jax.random.normal(jax.random.fold_in(key, k), leaf.shape)
            for k, leaf in enumerate(leaves)
        ]
        return jax.tree.unflatten(structure, noised), log

    def first_alone(state, total, noise_key, scales):
        after, gradient = sound.update(state, total, noise_key, scales)
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

    def patched(owner, name, other, **how):
        # Programs are known by their parts: one of another size of microbatches is compiled anew.
        with unittest.mock.patch.object(owner, name, other):
            return audited(dpsgd(loss, optax.sgd(0.1), microbatch_size=4 + len(name)), **how)

    def one_for_all(self, plan):
        return type(plan)(*(None if part is None else self.replicated for part in plan))

    def counting(plan, width, *parts, sound=feed.widened):
        wide = sound(plan, width, *parts)
        return wide._replace(weights=np.where(np.arange(width) < 1, 1, wide.weights))

    def shifted(*of, sound=feed.with_rows):
        rows, plan = sound(*of)
        return jax.tree.map(lambda x: np.roll(x, 1, axis=0), rows), plan

    cases = {
        "sound": lambda: audited(sound),
        "sound, streamed, several passes": lambda: audited(sound, None, SEVERAL, "host"),
        "sound, sharded": lambda: audited(sound, on(8, SHARE)),
        "noise once a device": lambda: audited(sound._replace(clipped_sum=noisy_sum)),
        "noise on the first alone": lambda: audited(sound._replace(update=first_alone)),
        "the batch on every device": lambda: patched(Placement, "plan", one_for_all),
        "parts that are not added up": lambda: patched(Placement, "total", lambda _, tree: tree),
        "padding that counts": lambda: patched(feed, "widened", counting),
        "rows of another device": lambda: patched(feed, "with_rows", shifted, data_on="host"),
    }
    return {name: cases[name]() for name in names}


SHORT = {
    "parameters": lambda: parameters(("8", "8, sharded")),
    "refused": refused,
    "audits": lambda: audits(("the batch on every device",)),
}
LONG = {
    "parameters": lambda: parameters(
        ("1", "2", "4, streamed", "8, exact", "4, sharded", "8, sharded, bands")
    ),
    "repeats": repeats,
    "noise": noise,
    "silent": silent,
    "large": large,
    "audits": lambda: audits(
        ("sound", "sound, streamed, several passes", "sound, sharded", "noise once a device",
         "noise on the first alone", "parts that are not added up", "padding that counts",
         "rows of another device")
    ),
}  # fmt: skip

if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    found = {}
    for part, find in {"short": SHORT, "long": LONG}[sys.argv[1]].items():
        began = time.process_time()
        found[part] = find()
        print(part, time.process_time() - began, file=sys.stderr)
    print(json.dumps(found))
