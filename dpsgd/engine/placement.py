"""Where a step is computed, and how its state lies on the devices of one mesh.

Why the guarantee does not depend on it: docs/explanation/placement-of-a-step-on-devices.md.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dpsgd.core.state import Table, TrainState
from dpsgd.engine.programs import put
from dpsgd.packing import SMALL
from samplers import BatchSampler, IndexBlock

PyTree = Any

AXIS = "devices"
"""The one axis of the mesh."""

TABLE_BYTES = 2**26
"""Bytes from which on a leaf is dealt out where nobody says so, and the state is too large."""


@dataclass(frozen=True)
class Placement:
    """The devices of a run, and which arrays of its state are dealt out among them.

    Attributes:
      devices: In order of process, then of number; one or more.
      shard_rows_from: Bytes from which on a leaf of the parameters is dealt out by rows, and what
        is like it in the state of optimizer and noise; by default none is.

    Raises:
      ValueError: if there is no device, they are not in that order, or `shard_rows_from` below 1.
    """

    devices: tuple[jax.Device, ...]
    shard_rows_from: int | None = None

    def __post_init__(self) -> None:
        if not self.devices or tuple(sorted(set(self.devices), key=_order)) != self.devices:
            raise ValueError(
                "devices must be one or more, each once, in order of process and number, got "
                f"{list(self.devices)}"
            )
        if self.shard_rows_from is not None and self.shard_rows_from < 1:
            raise ValueError(f"shard_rows_from must be at least 1, got {self.shard_rows_from}")

    @classmethod
    def default(cls, *, shard_rows_from: int | None = None) -> Placement:
        """Returns that of all devices of all processes."""
        return cls(tuple(sorted(jax.devices(), key=_order)), shard_rows_from)

    @functools.cached_property
    def mesh(self) -> Mesh:
        """Of one axis, `AXIS`."""
        return Mesh(np.array(self.devices), (AXIS,))

    @property
    def num_processes(self) -> int:
        """Of the devices."""
        return len({device.process_index for device in self.devices})

    @property
    def here(self) -> range:
        """Which of the devices are of this process."""
        processes = [device.process_index for device in self.devices]
        first = processes.index(jax.process_index())
        return range(first, first + processes.count(jax.process_index()))

    def shards(self, sampler: BatchSampler) -> range:
        """Returns the shards whose parts of batches are of this process's devices.

        All of them, unless they can be shared out evenly, and so can the devices.
        """
        processes = [device.process_index for device in self.devices]
        each = sorted(set(processes))
        even = len({processes.count(one) for one in each}) == 1
        if not even or sampler.num_shards % len(each):
            return range(sampler.num_shards)
        share = sampler.num_shards // len(each)
        first = each.index(jax.process_index()) * share
        return range(first, first + share)

    @property
    def replicated(self) -> NamedSharding:
        """Of what lies whole on every device."""
        return self._sharding()

    @property
    def by_rows(self) -> NamedSharding:
        """Of an array whose axis 0 is dealt out."""
        return self._sharding(AXIS)

    @property
    def memory(self) -> float:
        """Bytes of the smallest device of this process; infinite where they do not say."""
        here = [d for d in self.devices if d.process_index == jax.process_index()]
        return min((d.memory_stats() or {}).get("bytes_limit", math.inf) for d in here)

    def fitting(self, state: TrainState, memory: float) -> Placement:
        """Returns this placement; or one that deals out tables where a state would fill devices.

        That is where it leaves open what is dealt out, and the whole state would take more than
        half of a device. A table stays whole whose rows do not divide by the devices.

        Args:
          state: A state, or its shapes.
          memory: Bytes of a device.
        """
        size = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(state))
        if state.tables or self.shard_rows_from is not None or size <= memory / 2:
            return self
        dealt = dataclasses.replace(self, shard_rows_from=TABLE_BYTES)
        try:
            return dealt if dealt.deals(state) else self
        except ValueError:
            return self

    def deals(self, state: TrainState) -> bool:
        """Whether a leaf of the state is dealt out; see `state` for what it raises."""
        return any(not where.is_fully_replicated for where in jax.tree.leaves(self.state(state)))

    def params(self, shapes: PyTree) -> PyTree:
        """Returns the sharding of each leaf of the parameters, see `state`."""
        return self._like(self._tables(shapes), shapes)

    def state(self, shapes: TrainState) -> Any:
        """Returns the sharding of each leaf of a state.

        A leaf of the parameters of `shard_rows_from` bytes or more, with as many rows as devices or
        more, is dealt out by rows; with it, by shape, what is like it in the optimizer's state, and
        rows of as many numbers in that of the noise.

        Lazy tables are dealt out whatever `shard_rows_from` is, unless they are small or their rows
        do not divide by the devices; all else then lies whole on every device.

        Args:
          shapes: A state, or its shapes.

        Raises:
          ValueError: if the rows of such a leaf do not divide by the devices; or if it is no table,
            beside lazy tables.
        """
        rows = self._tables(shapes.dense_params)
        if rows and shapes.tables:
            raise ValueError(
                f"a parameter of shape {min(rows)} is to be dealt out by rows, and beside lazy "
                "tables, which always are, all others lie whole on every device: leave out "
                "shard_rows_from"
            )
        numbers = {math.prod(shape) for shape in rows}

        def of_noise(leaf: Any) -> NamedSharding:
            *rows, line = leaf.shape or (0,)
            lined = len(rows) < 2 and line in numbers
            return self._sharding(*(None,) * len(rows), AXIS) if lined else self.replicated

        where = TrainState(
            self.replicated,
            self._like(rows, shapes.raw_params),
            self._like(rows, shapes.opt_state),
            jax.tree.map(of_noise, shapes.noise),
        )
        return where.with_tables({k: self._of_rows(t) for k, t in shapes.lazy_tables.items()})

    def specs(self, state: TrainState) -> Any:
        """Returns what `state` does, for `on_each`."""
        return jax.tree.map(lambda where: where.spec, self.state(state))

    def _of_rows(self, table: Table) -> Any:
        """Returns the sharding of each array of a lazy table: each has a row for each of it."""
        # Of values that are read from a checkpoint in parts, there is a shape alone.
        shape = table.values.shape
        sharded = math.prod(shape) > SMALL and shape[0] % len(self.devices) == 0
        where = self.by_rows if sharded else self.replicated
        return jax.tree.map(lambda _: where, table)

    def _like(self, tables: set[tuple[int, ...]], shapes: PyTree) -> PyTree:
        return jax.tree.map(
            lambda leaf: self.by_rows if leaf.shape in tables else self.replicated, shapes
        )

    def _tables(self, params: PyTree) -> set[tuple[int, ...]]:
        """Returns the shapes of the leaves that are dealt out."""
        found: set[tuple[int, ...]] = set()
        if self.shard_rows_from is None or len(self.devices) == 1:
            return found
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            size, rows = math.prod(leaf.shape), leaf.shape[0] if leaf.shape else 0
            if size * leaf.dtype.itemsize < max(self.shard_rows_from, 4 * SMALL + 1):
                continue
            if rows < len(self.devices):
                continue
            if rows % len(self.devices):
                more = -rows % len(self.devices)
                raise ValueError(
                    f"params{jax.tree_util.keystr(path)} is to be dealt out by rows, and {rows:,} "
                    f"do not divide by {len(self.devices)} devices: give it {more} more, which "
                    "nobody looks up, or raise shard_rows_from"
                )
            found.add(leaf.shape)
        return found

    def plan(self, plan: IndexBlock) -> IndexBlock:
        """Returns the shardings of a plan: each device has its places of every pass."""
        columns = self._sharding(None, AXIS)
        return IndexBlock(
            columns,
            columns,
            *(self.replicated,) * 2,
            None if plan.places is None else columns,
            None if plan.shards is None else self.by_rows,
        )

    def width(self, size: int, unit: int) -> int:
        """Returns the least multiple of `unit`s for each device that has `size` places."""
        together = unit * len(self.devices)
        return -(-size // together) * together

    def put(self, tree: PyTree, shardings: PyTree) -> PyTree:
        """Puts arrays on the devices, in 32 bits: each process what its own devices hold of them.

        Args:
          tree: Arrays, whole in every process.
          shardings: A tree that is a prefix of it.
        """
        return put(tree, lambda tree: jax.tree.map(_placed, tree, _broadcast(shardings, tree)))

    def put_parts(self, tree: PyTree, shardings: PyTree) -> PyTree:
        """Puts arrays on the devices of which each process has the part of its own devices.

        Args:
          tree: Arrays of NumPy: what the process's devices hold, device after device.
          shardings: A tree that is a prefix of it.
        """

        def part(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
            array = array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)
            return jax.make_array_from_process_local_data(sharding, array)

        return put(tree, lambda tree: jax.tree.map(part, tree, _broadcast(shardings, tree)))

    def put_state(self, state: PyTree) -> PyTree:
        """Puts a state on the devices: in buffers of its own, or as it is where it lies there."""
        return jax.tree.map(_placed, state, self.state(state))

    def on_each(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable:
        """Returns a function that each device computes of its parts, see `jax.shard_map`."""
        # Checked, it would put primitives of its own into the trace of a loss.
        how: Any = {"in_specs": in_specs, "out_specs": out_specs, "check_vma": False}
        return jax.shard_map(function, mesh=self.mesh, **how)

    def total(self, tree: PyTree) -> PyTree:
        """Returns the sum over the devices of what each has, in `jax.shard_map`: the same in all.

        On CPUs numbers are added up in the order of the devices, however many processes these are
        of, so that bits do not depend on it. An all-reduce does so within a process; Gloo's begins
        each part of an array with another device, and from three on adds up in another order.
        """
        if self.num_processes == 1 or self.devices[0].platform != "cpu":
            return jax.lax.psum(tree, AXIS)
        leaves, structure = jax.tree.flatten(tree)
        totals: dict[Any, jax.Array] = {}
        for dtype in dict.fromkeys(leaf.dtype for leaf in leaves):
            flat = jnp.concatenate([leaf.ravel() for leaf in leaves if leaf.dtype == dtype])
            totals[dtype] = _in_order(flat, len(self.devices))
        found = []
        for leaf in leaves:
            mine, totals[leaf.dtype] = jnp.split(totals[leaf.dtype], [leaf.size])
            found.append(mine.reshape(leaf.shape))
        return jax.tree.unflatten(structure, found)

    def describe(self) -> dict[str, Any]:
        """Returns what decides the bits of a step, as JSON values."""
        return {
            "devices": [[device.process_index, device.id] for device in self.devices],
            "processes": self.num_processes,
            "shard_rows_from": self.shard_rows_from,
        }

    def _sharding(self, *axes: str | None) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(*axes))


@dataclass(frozen=True)
class Exchange:
    """What the devices of a step tell each other, in `Placement.on_each`; one alone says nothing.

    Attributes:
      placement: Of the step; None is one device.
    """

    placement: Placement | None = None

    def gathered(self, columns: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns what all devices have of arrays [B, ...], [devices B, ...] each, in one go."""
        if self.placement is None:
            return list(columns)
        flat = [x.reshape(len(x), -1) for x in columns]
        every = jax.lax.all_gather(jnp.concatenate(flat, axis=1), AXIS, tiled=True)
        parts = jnp.split(every, np.cumsum([x.shape[1] for x in flat])[:-1], axis=1)
        shapes = [(len(every), *x.shape[1:]) for x in columns]
        return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]

    def total(self, tree: PyTree) -> PyTree:
        """Returns the sum over the devices, the same in all, see `Placement.total`."""
        return tree if self.placement is None else self.placement.total(tree)

    def first_row(self, here: int, rows: int) -> Any:
        """Returns the number of the first row that lies here, where `here` of so many do."""
        return 0 if here == rows else jax.lax.axis_index(AXIS) * here


def hosted(tree: PyTree) -> PyTree:
    """Returns arrays of NumPy with all rows of `tree`, in every process; leaf by leaf.

    Every process must call it. Keys of random generators stay what they are.
    """
    return jax.tree.map(_hosted, tree)


def unlike(tree: PyTree) -> str | None:
    """Returns the path of the first array that devices have copies of, and not all the same.

    Every process must call it. Nothing that JAX does looks at more than one of them.
    """
    words = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if _is_key(leaf):
            leaf = jax.random.key_data(leaf)
        first: dict[str, np.ndarray] = {}
        for shard in leaf.addressable_shards:
            data = np.ascontiguousarray(shard.data).reshape(-1).view(np.uint8)
            if not np.array_equal(first.setdefault(str(shard.index), data), data):
                return jax.tree_util.keystr(path)
        if leaf.is_fully_replicated and not leaf.is_fully_addressable:
            digest = hashlib.blake2b(next(iter(first.values())).data, digest_size=8).digest()
            words.append((jax.tree_util.keystr(path), np.frombuffer(digest, np.uint32)))
    if words:
        from jax.experimental import multihost_utils

        every = multihost_utils.process_allgather(np.stack([word for _, word in words]))
        for number, (name, _) in enumerate(words):
            if (every[:, number] != every[0, number]).any():
                return name
    return None


def on_one_device(tree: PyTree) -> PyTree:
    """Returns arrays with all rows of `tree` on one device of this process, to compute with.

    Every process must call it. What is no array of JAX's stays what it is.
    """

    def leaf(x: Any) -> Any:
        if not isinstance(x, jax.Array) or len(x.sharding.device_set) == 1:
            return x
        if x.is_fully_replicated:
            return x.addressable_data(0)
        return jax.device_put(_hosted(x), x.addressable_shards[0].device)

    return jax.tree.map(leaf, tree)


def _in_order(vector: jax.Array, devices: int) -> jax.Array:
    """Returns the sum over all devices in their order; as many bytes travel as in an all-reduce."""
    size = vector.size
    part = -(-size // devices)
    parts = jnp.pad(vector, (0, part * devices - size)).reshape(devices, part)
    mine = jax.lax.all_to_all(parts, AXIS, 0, 0)  # row r: what device r has of my part
    total = functools.reduce(jnp.add, [mine[device] for device in range(devices)])
    return jax.lax.all_gather(total, AXIS, tiled=True)[:size]


def _order(device: jax.Device) -> tuple[int, int]:
    return device.process_index, device.id


def _broadcast(prefix: PyTree, tree: PyTree) -> PyTree:
    """Returns a tree like `tree` of the leaves of a prefix of it."""
    return jax.tree.map(lambda one, part: jax.tree.map(lambda _: one, part), prefix, tree)


def _is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _hosted(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array) or _is_key(leaf):
        return leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
    if not (leaf.is_fully_addressable or leaf.is_fully_replicated):
        from jax.experimental import multihost_utils

        leaf = multihost_utils.process_allgather(leaf, tiled=True)
    return np.asarray(leaf)


def _placed(leaf: Any, sharding: NamedSharding) -> jax.Array:
    if isinstance(leaf, jax.Array) and leaf.sharding == sharding:
        return leaf
    if isinstance(leaf, jax.Array) and _is_key(leaf):
        words = _placed(jax.random.key_data(leaf), sharding)
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(leaf))
    # By way of the host: an array that is put where it lies already would share its buffer. Of what
    # lies in files, each process reads what its devices hold.
    in_files = not isinstance(leaf, jax.Array) and hasattr(leaf, "pieces")
    array = leaf if in_files else np.asarray(leaf)
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    return jax.make_array_from_callback(
        array.shape, sharding, lambda index: np.asarray(array[index], dtype)
    )
