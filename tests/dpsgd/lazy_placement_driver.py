"""Trains lazy tables on eight fake devices; prints what it finds as JSON.

    python lazy_placement_driver.py short|long

In a process of its own, as JAX is told how many devices a CPU has before it starts.
"""

import json
import os
import sys
import time
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
# Eight devices on a busy machine wait for each other longer than XLA thinks right; and what runs
# once is compiled in half the time at level 0.
os.environ["XLA_FLAGS"] = " ".join(
    [os.environ.get("XLA_FLAGS", ""), "--xla_cpu_collective_call_terminate_timeout_seconds=600"]
    + ["--xla_backend_optimization_level=0"] * (sys.argv[1:] == ["short"])
)
sys.path.insert(0, str(Path(__file__).parents[2]))

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpsgd import LazyTables, Mechanism, RootKey, dpsgd, train_blocks
from dpsgd.training.collectives import collectives
from dpsgd.training.lazy import RunLaws, flush_program
from dpsgd.training.lazy_state import opened
from dpsgd.training.loop import Layout
from dpsgd.training.placement import Placement
from samplers import Poisson

jax.config.update("jax_num_cpu_devices", 8)

N, R, WIDTH, STEPS, DUE = 200, 2048, 6, 20, 8
rng = np.random.default_rng(0)
PARAMS = {
    "odd": jnp.asarray(rng.normal(size=(R - 2, 4)), jnp.float32),
    "table": jnp.asarray(rng.normal(size=(R, WIDTH)), jnp.float32),
    "w": jnp.asarray(rng.normal(size=WIDTH), jnp.float32),
}
ROWS = {  # some beyond the table, or counted from its end
    "ids": rng.integers(-9, R + 9, (N, 2)).astype(np.int32),
    "odd": rng.integers(0, R - 2, N).astype(np.int32),
    "y": rng.normal(size=N).astype(np.float32),
}
POISSON = Poisson(N, batch_size=20, epochs=2)
ROOT = RootKey.from_insecure_seed(0)
TABLES = LazyTables(optax.cosine_decay_schedule(0.3, STEPS), 0.9, 0.01)


OPTIMIZER = optax.sgd(0.1)


def loss(params, example):
    x = params["table"][example["ids"]].sum(axis=0)
    y = jnp.tanh(x) @ params["w"] + params["odd"][example["odd"]].sum()
    return jnp.square(y - example["y"])


def on(count):
    return Placement(tuple(jax.devices()[:count])) if count else None


def trained(placement, loss_fn=loss, sigma=1e-3, tables=TABLES):
    """Returns the states after 8, 16 and 20 steps on the host, and the last one.

    By default with so little noise that what rounding does to sums is not lost in it.
    """
    algorithm = dpsgd(loss_fn, OPTIMIZER, tables=tables)
    mechanism = Mechanism(POISSON, sigma, 1.0)
    state = algorithm.init(PARAMS, mechanism, ROWS)
    how = {"root": ROOT, "block_steps": DUE, "placement": placement}
    seen = []
    for block in train_blocks(algorithm, mechanism, state, ROWS, **how):
        seen.append(jax.tree.map(np.array, block.state))
    return seen, block.state


def programs(placement, like, tables=TABLES):
    """Returns the compiled block, and what flushes."""
    algorithm, mechanism = dpsgd(loss, OPTIMIZER, tables=tables), Mechanism(POISSON, 1e-3, 1.0)
    layout = Layout.of(POISSON, ROWS, block_steps=DUE, placement=placement)
    state = jax.eval_shape(opened, like)
    laws = RunLaws(tables.of_run(STEPS)).after(DUE)
    key = jax.ShapeDtypeStruct((4,), jnp.uint32)
    flush = flush_program((state, laws, key, mechanism.scales()), placement)
    return layout.program(algorithm, mechanism, like, ROWS), flush


def off(found, expected):
    """The largest difference of two states, relative to the largest number of each leaf."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return max(float(np.abs(x - y).max() / max(np.abs(y).max(), 1e-9)) for x, y in pairs)


def equal():
    """How far the states of eight devices are from those of one, and what they hold and send."""
    alone, _ = trained(None)
    found, last = trained(on(8))
    block, flush = programs(on(8), last)
    return {
        "off": [off(x, y) for x, y in zip(found, alone, strict=True)],
        "kinds": [type(x).__name__ for x in found],
        "where": {name: str(leaf.sharding.spec) for name, leaf in last.params.items()},
        "collectives": [one._asdict() for one in collectives(block)],
        "flush": [one._asdict() for one in collectives(flush)],
        "given_away": [x.memory_analysis().alias_size_in_bytes for x in (block, flush)],
        "whole": [f"f32[{R},{WIDTH}]" in x.as_text() for x in (block, flush)],
        "places": on(8).width(POISSON.padded_batch_size, 1),
    }


SHORT = {"equal": equal}
LONG = {}

if __name__ == "__main__":
    found = {}
    for part, find in {"short": SHORT, "long": LONG}[sys.argv[1]].items():
        began = time.process_time()
        found[part] = find()
        print(part, time.process_time() - began, file=sys.stderr)
    print(json.dumps(found))
