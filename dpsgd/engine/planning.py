"""The memory, exchanges and time of a step over several devices, from shapes alone.

No array of the run's size is made. Bytes and exchanges are those of the compiled program. Time is
a prediction from stated rates, in which nothing overlaps.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpsgd.core.algorithm import Algorithm
from dpsgd.core.mechanism import Mechanism
from dpsgd.core.state import TrainState
from dpsgd.engine.feed import Layout
from dpsgd.engine.programs import shapes_of_rows
from dpsgd.gradients.losses import LossFn, takes_key

PyTree = Any

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


class Collective(NamedTuple):
    """One exchange between all devices of a program.

    Attributes:
      kind: One of `KINDS`.
      size: Bytes of what is exchanged, whole: the sum of an all-reduce, what an all-gather
        gathers and a reduce-scatter adds up, and what a device sends in the others.
      depth: Loops that it stands in. In a block of steps those of depth 0 happen once a block, of
        depth 1 once a step, and deeper ones several times in each step.
    """

    kind: str
    size: int
    depth: int


def collectives(program: jax.stages.Compiled | str) -> list[Collective]:
    """Returns the collectives of a program for several devices, or of its HLO, in its order.

    >>> found = collectives('''
    ... %body (x: f32[8]) -> f32[8] {
    ...   ROOT %r = (f32[8]{0}, f32[]) all-reduce(%x, %y), replica_groups={{0,1}}, to_apply=%add
    ... }
    ...
    ... ENTRY %main (x: f32[8]) -> f32[8] {
    ...   %g = s32[4,2]{1,0} all-gather(%x), dimensions={0}
    ...   ROOT %w = f32[8]{0} while(%x), condition=%less, body=%body
    ... }''')
    >>> [tuple(one) for one in found]
    [('all-gather', 32, 0), ('all-reduce', 36, 1)]
    """
    text = program if isinstance(program, str) else program.as_text()
    assert text is not None, "it is compiled"
    bodies = {match[1]: match[0] for match in re.finditer(r"^%(\S+) \(.*?^}", text, re.M | re.S)}
    entry = re.search(r"^ENTRY .*?^}", text, re.M | re.S)
    assert entry is not None, "a program has an entry"
    return _of_computation(entry[0], bodies, 0)


def _of_computation(computation: str, bodies: dict[str, str], depth: int) -> list[Collective]:
    found = []
    for result, op, rest in re.findall(
        r"^\s+(?:ROOT )?%\S+ = (.*?) ([a-z][a-z0-9-]*)\((.*)$", computation, re.M
    ):
        kind = op.removesuffix("-start")
        if kind in KINDS:
            size = _bytes(result)
            if kind == "reduce-scatter":
                size *= _group_size(rest)
            found.append(Collective(kind, size, depth))
        elif op in ("while", "call", "conditional"):
            called = re.findall(r"%([\w.-]+)", rest.partition("), ")[2].partition("metadata=")[0])
            for name in called:
                if name in bodies:
                    found += _of_computation(bodies[name], bodies, depth + (op == "while"))
    return found


_ITEM_BYTES = {"pred": 1, "bf16": 2}


def _bytes(shapes: str) -> int:
    """Returns the bytes of the shapes in a text, such as "(f32[8,2]{1,0}, s32[])"."""
    total = 0
    for kind, sizes in re.findall(r"([a-z]+[0-9]*[a-z0-9]*)\[([0-9,]*)\]", shapes):
        item = _ITEM_BYTES.get(kind) or int(re.findall("[0-9]+", kind)[0]) // 8
        total += item * math.prod(int(size) for size in sizes.split(",") if size)
    return total


def _group_size(attributes: str) -> int:
    """Returns how many devices take part in each group of a collective."""
    mesh = re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", attributes)
    if mesh:  # such as mesh['a'=4,'b'=2] {'a'}
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", mesh[2]))
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]", attributes):
        return int(iota[1])
    groups = re.search(r"replica_groups=\{\{(.*?)\}", attributes)
    assert groups is not None, f"a collective names its groups: {attributes[:200]}"
    return groups[1].count(",") + 1


BYTES_PER_PARAMETER = 33
"""That a step moves of each parameter that a device updates, in a program compiled for a GPU: two
moments and the parameter read and written, and the gradient."""


@dataclass(frozen=True)
class Rates:
    """What a prediction assumes of devices and of what connects them; the defaults are an H200's.

    Attributes:
      memory: Of a device, bytes/s that programs reach.
      arithmetic: Of a device, floating-point operations/s that matrix products reach.
      link: Between the devices of a host, bytes/s for each device and direction (NVLink).
      network: Between hosts, bytes/s for each device and direction (InfiniBand NDR, one adapter a
        device).
      latency: Seconds that any exchange takes at least.
      overhead: Seconds of a step that devices do not share: its kernels begin one by one.
    """

    memory: float = 4.3e12
    arithmetic: float = 1.3e14
    link: float = 450e9
    network: float = 50e9
    latency: float = 20e-6
    overhead: float = 100e-6

    def step_seconds(self, parameters: float, flops: float) -> float:
        """Returns the time of a step of one device without what it exchanges.

        Args:
          parameters: That it noises and updates.
          flops: Of the gradients of its examples.
        """
        update = BYTES_PER_PARAMETER * parameters / self.memory
        return self.overhead + update + flops / self.arithmetic

    def exchange_seconds(self, one: Collective, devices: int, hosts: int) -> float:
        r"""Returns the time of one exchange, by rings within the hosts and between them.

        Of S bytes on g devices of each of h hosts, a gathering ring sends :math:`S (g - 1) / g`
        over each link, and :math:`(S / g) (h - 1) / h` over each adapter: g rings share the hosts'
        network. What is added up and given to all goes round twice.

        Args:
          one: What is exchanged.
          devices: Of all hosts.
          hosts: On which they lie, equally many on each.
        """
        here = devices // hosts
        if one.kind == "collective-permute":
            return self.latency + one.size / (self.network if hosts > 1 else self.link)
        if one.kind == "all-to-all":
            # Each device keeps its own part, and sends every other one its part.
            within = one.size * (here - 1) / devices / self.link
            return self.latency + within + one.size * (devices - here) / devices / self.network
        rounds = 2 if one.kind == "all-reduce" else 1
        within = one.size * (here - 1) / here / self.link
        between = one.size / here * (hosts - 1) / hosts / self.network
        return self.latency + rounds * (within + between)


@dataclass(frozen=True)
class StepPlan:
    """What a step over several devices holds, sends and takes.

    Attributes:
      devices: How many compute.
      num_params: Parameters of the model.
      updated: Parameters that one device updates: its own shares, and all that lie everywhere.
      held: What one device holds, in bytes, by what it is; the program's own memory last.
      sharded: Names of the leaves of the parameters that are sharded, and their rows.
      exchanged: Collectives of the program.
      expected_batch_size: Examples b of a step.
      places: Of a step's batch, with those that are padding.
      num_shards: In which they are drawn.
      flops: Of an example's loss and its gradient.
    """

    devices: int
    num_params: int
    updated: int
    held: dict[str, int]
    sharded: tuple[str, ...]
    exchanged: tuple[Collective, ...]
    expected_batch_size: float
    places: int
    num_shards: int
    flops: float

    @classmethod
    def of(
        cls,
        loss_fn: LossFn,
        algorithm: Algorithm,
        mechanism: Mechanism,
        state: TrainState,
        rows: PyTree,
        layout: Layout,
    ) -> StepPlan:
        """Returns the plan of a run, whose step is compiled.

        Args:
          loss_fn: Of the algorithm.
          algorithm: Of the run.
          mechanism: Of the run; any noise serves, as the program is the same.
          state: Shapes of the state of the run.
          rows: Shapes of its training rows.
          layout: Of its blocks.
        """
        program = layout.program(algorithm, mechanism, state, rows)
        placement = layout.placement
        assert placement is not None
        shardings = placement.state(state)
        memory = program.memory_analysis()
        assert memory is not None
        sampler, devices = mechanism.sampler, len(placement.devices)
        places = placement.width(sampler.padded_batch_size, math.prod(sampler.clipped_shape))
        row = sum(math.prod(x.shape[1:]) * _itemsize(x) for x in jax.tree.leaves(rows))
        # Two blocks are under way, and one waits; of what is indexed there are places and weights.
        blocks = layout.passes * places // devices * (8 + (4 + row) * layout.streamed)
        held = {
            "parameters": _here(state.raw_params, shardings.raw_params),
            "optimizer's state": _here(state.opt_state, shardings.opt_state),
            "noise of earlier steps": _here(state.noise, shardings.noise),
            "training rows": 0 if layout.streamed else sampler.num_examples * row,
            "blocks of batches": 3 * blocks,
            "gradients and activations": memory.temp_size_in_bytes,
        }
        leaves = jax.tree_util.tree_leaves_with_path(state.params)
        parts = zip(leaves, jax.tree.leaves(shardings.raw_params), strict=True)
        return cls(
            devices=devices,
            num_params=sum(math.prod(leaf.shape) for _, leaf in leaves),
            updated=_here(state.raw_params, shardings.raw_params, numbers=True),
            held=held,
            sharded=tuple(
                jax.tree_util.keystr(at)
                for (at, _), sharding in parts
                if not sharding.is_fully_replicated
            ),
            exchanged=tuple(collectives(program)) if devices > 1 else (),
            expected_batch_size=sampler.expected_batch_size,
            places=places,
            num_shards=sampler.num_shards,
            flops=_flops(loss_fn, state.params, rows, sampler.clipped_shape),
        )

    @property
    def total(self) -> int:
        """Bytes that one device holds."""
        return sum(self.held.values())

    def seconds(self, rates: Rates) -> float:
        """Returns the time of a step without what is exchanged."""
        return rates.step_seconds(self.updated, self._flops_here)

    def exchange_seconds(self, rates: Rates, hosts: int) -> float:
        """Returns the time of what a step exchanges; of what stands in a loop of it, one round."""
        each = (c for c in self.exchanged if c.depth)
        return sum(rates.exchange_seconds(one, self.devices, hosts) for one in each)

    def efficiency(self, rates: Rates, hosts: int) -> float:
        """Returns examples/s of all devices over those of as many that train by themselves.

        Each of these would take its share of the batch, and hold and update all parameters: it is
        the efficiency of weak scaling. Where parameters are sharded it may exceed 1.
        """
        alone = rates.step_seconds(self.num_params, self._flops_here)
        return alone / (self.seconds(rates) + self.exchange_seconds(rates, hosts))

    @property
    def _flops_here(self) -> float:
        return self.places / self.devices * self.flops


def _here(shapes: PyTree, shardings: PyTree, *, numbers: bool = False) -> int:
    """Returns the bytes of a tree that lie on one device, or how many numbers."""
    parts = zip(jax.tree.leaves(shapes), jax.tree.leaves(shardings), strict=True)
    return sum(
        math.prod(where.shard_shape(leaf.shape)) * (1 if numbers else _itemsize(leaf))
        for leaf, where in parts
    )


def _itemsize(leaf: Any) -> int:
    return np.dtype(jax.dtypes.canonicalize_dtype(leaf.dtype)).itemsize


def _flops(loss_fn: LossFn, params: PyTree, rows: PyTree, clipped_shape: tuple[int, ...]) -> float:
    """Returns the operations of a row's loss and gradient: what a second batch adds to a first."""

    def total(params, batch, keys):
        given = (batch, keys) if takes_key(loss_fn) else (batch,)
        return jnp.sum(jax.vmap(loss_fn, (None, *(0,) * len(given)))(params, *given))

    def flops(count: int) -> float:
        batch = shapes_of_rows(rows, count, *clipped_shape)
        keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), count))
        found = jax.jit(jax.grad(total)).lower(params, batch, keys).cost_analysis()
        return float((found or {}).get("flops", 0.0))

    return (flops(2) - flops(1)) / math.prod(clipped_shape)
