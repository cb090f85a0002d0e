"""Trains on shards by several processes, and by one process that has them all: to the same bits.

    python shards_driver.py SAMPLER SHARDS PROCESSES FOLDER

Or has the audit of two processes look for a shard that both take, and so another that nobody takes:

    python shards_driver.py SAMPLER audit FOLDER

Every process is forked from this one, which has imported what they need, and begun no thread.
"""

import os
import socket
import sys
import traceback
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpsgd import Mechanism, RootKey, dpsgd, train_blocks
from dpsgd.audit.probe import Probe
from dpsgd.audit.runtime.blocks import block_checks
from dpsgd.engine.feed import Layout
from dpsgd.engine.placement import Placement
from dpsgd.runs.processes import connect, disconnect
from samplers import BallsAndBins, BatchSource, Poisson, Shuffle

N = 101
KINDS = {"bins": BallsAndBins, "poisson": Poisson, "shuffle": Shuffle}


class Guarded:
    """A column of which some rows may be read."""

    def __init__(self, rows, own):
        self.rows, self.own = rows, own
        self.shape, self.dtype, self.ndim = rows.shape, rows.dtype, rows.ndim

    def __getitem__(self, some):
        numbers = np.arange(len(self.rows))[some]
        assert numbers.min() >= self.own.start, "rows of a shard before are read"
        assert numbers.max() < self.own.stop, "rows of a shard behind are read"
        return self.rows[some]


def loss(params, example, key):
    dropped = example["x"] * jax.random.bernoulli(key, 0.5, (5,))
    return (jnp.dot(params["w"], dropped) - example["y"] / N) ** 2


def train(kind, shards, processes, process_id, port, out):
    """Writes the parameters after all steps."""
    devices = shards // processes
    jax.config.update("jax_num_cpu_devices", devices)
    if processes > 1:
        connect(f"127.0.0.1:{port}", processes, process_id)
    sampler, placement = kind(N, 12, 2, num_shards=shards), Placement.default()
    rng = np.random.default_rng(0)
    data = {"x": rng.normal(size=(N, 5)).astype(np.float32), "y": np.arange(N, dtype=np.float32)}
    held = placement.shards(sampler)
    assert held == range(process_id * devices, (process_id + 1) * devices)
    own = BatchSource(sampler, 0, shards=held).rows
    data = {name: Guarded(rows, own) for name, rows in data.items()}
    algorithm = dpsgd(loss, optax.adam(0.05))
    state = algorithm.init({"w": jnp.zeros(5)})
    for block in train_blocks(
        algorithm,
        Mechanism(sampler, 0.7, 1.0),
        state,
        data,
        root=RootKey.from_insecure_seed(3),
        block_steps=4,
        data_on="host" if processes == 1 else None,
        placement=placement,
    ):
        state = block.state
    np.save(out, np.asarray(state.params["w"].addressable_data(0)))
    if processes > 1:
        disconnect()


def audit(kind, shards, processes, process_id, port, out):
    """Writes which checks of the dispatched blocks fail, without a bug and with it."""
    connect(f"127.0.0.1:{port}", processes, process_id)
    sampler, placement = kind(N, 12, 2, num_shards=shards), Placement.default()
    rows = {"x": np.ones((8, 5), np.float32), "y": np.ones(8, np.float32)}
    algorithm, mechanism = dpsgd(loss, optax.adam(0.05)), Mechanism(sampler, 0.7, 1.0)
    state = algorithm.init({"w": jnp.zeros(5)})
    columns = {name: np.resize(x, (N, *x.shape[1:])) for name, x in rows.items()}
    layout = Layout.of(sampler, columns, block_steps=4, placement=placement)
    program = Probe(
        algorithm, mechanism, state, rows, layout=layout, root=RootKey.from_insecure_seed(4)
    )
    failed = []
    for shards_of in (Placement.shards, lambda self, sampler: range(1)):
        Placement.shards = shards_of
        checks = block_checks(program)
        failed.append([check.name for check in checks if not check.passed])
    np.save(out, np.array([len(names) for names in failed]))
    disconnect()


def together(work, kind, shards, processes, folder):
    """Returns what each of so many processes ends with."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    children, outs = [], [folder / f"{processes}-{index}.npy" for index in range(processes)]
    for index, out in enumerate(outs):
        child = os.fork()
        if not child:
            try:
                work(kind, shards, processes, index, port, out)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        children.append(child)
    assert all(os.waitpid(child, 0)[1] == 0 for child in children), "a process failed"
    return [np.load(out) for out in outs]


if __name__ == "__main__":
    name, *numbers, folder = sys.argv[1:]
    if numbers == ["audit"]:
        for sound, planted in together(audit, KINDS[name], 2, 2, Path(folder)):
            assert (sound, planted > 0) == (0, True), (sound, planted)
        print("caught")
    else:
        shards, processes = map(int, numbers)
        (alone,) = together(train, KINDS[name], shards, 1, Path(folder))
        assert np.abs(alone).max() > 0.01
        for params in together(train, KINDS[name], shards, processes, Path(folder)):
            assert params.tobytes() == alone.tobytes(), (params, alone)
        print("the same bits")
