"""Placement of a step's computation and state on the devices of one mesh.

The guarantee does not depend on it: docs/explanation/placement-of-a-step-on-devices.md.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dpsgd.core.state import Table, TrainState
from dpsgd.engine.copies import placed
from dpsgd.engine.programs import in_32_bits
from dpsgd.packing import SMALL
from samplers import BatchSampler
from samplers.batches import IndexBlock

PyTree = Any

AXIS = "devices"
"""Name of the mesh's only axis."""

TABLE_BYTES = 2**26
"""Least size of a leaf sharded to fit the devices, bytes."""


@dataclass(frozen=True)
class Placement:
    """Devices of a run, and the sharding of its state over them.

    Attributes:
      devices: Devices in order of process, then of number; one or more.
      shard_rows_from: Least size, bytes, of a leaf of the parameters that is sharded by rows,
        together with its like in the state of optimizer and noise; by default no leaf is.

    Raises:
      ValueError: If devices are absent or not in that order, or `shard_rows_from` < 1.
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
        """Returns the placement on all devices of all processes."""
        return cls(tuple(sorted(jax.devices(), key=_order)), shard_rows_from)

    @classmethod
    def one(cls) -> Placement:
        """Returns the placement on JAX's default device."""
        device = jax.config.values["jax_default_device"]
        return cls((device if isinstance(device, jax.Device) else jax.local_devices()[0],))

    @functools.cached_property
    def mesh(self) -> Mesh:
        """Mesh of the devices, with the one axis `AXIS`."""
        return Mesh(np.array(self.devices), (AXIS,))

    @property
    def processes(self) -> frozenset[int]:
        """Indices of the processes that own the devices."""
        return frozenset(device.process_index for device in self.devices)

    @property
    def num_processes(self) -> int:
        """Number of processes that own the devices."""
        return len(self.processes)

    @property
    def here(self) -> range:
        """Indices of this process's devices."""
        processes = [device.process_index for device in self.devices]
        first = processes.index(jax.process_index())
        return range(first, first + processes.count(jax.process_index()))

    def shards(self, sampler: BatchSampler) -> range:
        """Returns this process's data shards: an even share or all."""
        counts = collections.Counter(device.process_index for device in self.devices)
        if len(set(counts.values())) > 1 or sampler.num_shards % len(counts):
            return range(sampler.num_shards)
        share = sampler.num_shards // len(counts)
        first = sorted(counts).index(jax.process_index()) * share
        return range(first, first + share)

    @property
    def replicated(self) -> NamedSharding:
        """Sharding of an array that lies whole on every device."""
        return self._sharding()

    @property
    def by_rows(self) -> NamedSharding:
        """Sharding of an array by its rows."""
        return self._sharding(AXIS)

    @property
    def memory(self) -> float:
        """Memory of this process's smallest device, bytes; infinite for CPUs."""
        return min(limit for limit, _ in self._memory)

    @property
    def free_memory(self) -> float:
        """Free memory of this process's fullest device, bytes; infinite for CPUs."""
        return min(limit - used for limit, used in self._memory)

    @property
    def _memory(self) -> list[tuple[float, float]]:
        stats = [self.devices[k].memory_stats() or {} for k in self.here]
        return [(s.get("bytes_limit", math.inf), s.get("bytes_in_use", 0)) for s in stats]

    def fitting(self, state: TrainState, memory: float) -> Placement:
        """Returns this placement, or one that shards tables to fit.

        Tables are sharded if `shard_rows_from` is None, the state would take more than half of the
        memory, and rows divide by the devices.

        Args:
          state: Training state, or its shapes.
          memory: Memory of a device, bytes.
        """
        size = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(state))
        if state.tables or self.shard_rows_from is not None or size <= memory / 2:
            return self
        sharded = dataclasses.replace(self, shard_rows_from=TABLE_BYTES)
        try:
            return sharded if sharded.shards_rows(state) else self
        except ValueError:
            return self

    def shards_rows(self, state: TrainState) -> bool:
        """Returns True if a leaf of the state is sharded.

        Raises:
          ValueError: As from `state`.
        """
        return any(
            not sharding.is_fully_replicated for sharding in jax.tree.leaves(self.state(state))
        )

    def state(self, shapes: TrainState) -> Any:
        """Returns the sharding of each leaf of a state.

        A leaf of the parameters of `shard_rows_from` bytes or more, with at least one row per
        device, is sharded by rows; with it arrays of its shape in the optimizer's state, and rows
        of its size in the noise's state. Lazy tables are always sharded, unless they are
        small or their rows do not divide by the devices.

        Raises:
          ValueError: If the rows of a sharded leaf do not divide by the devices, or it lies beside
            lazy tables, whose other leaves are whole on every device.
        """
        rows = self._tables(shapes.params_without_tables)
        if rows and shapes.tables:
            raise ValueError(
                f"shard_rows_from shards a parameter of shape {min(rows)}, but beside lazy tables "
                "other parameters are whole on every device; leave it out"
            )
        numbers = {math.prod(shape) for shape in rows}

        def noise_sharding(leaf: Any) -> NamedSharding:
            """Returns the sharding of an array in the noise's state."""
            *rows, line = leaf.shape or (0,)
            lined = len(rows) < 2 and line in numbers
            return self._sharding(*(None,) * len(rows), AXIS) if lined else self.replicated

        shardings = TrainState(
            self.replicated,
            self._like(rows, shapes.raw_params),
            self._like(rows, shapes.opt_state),
            jax.tree.map(noise_sharding, shapes.noise),
            frozen=shapes.frozen,
        )
        return shardings.with_tables(
            {k: self._table_sharding(t) for k, t in shapes.lazy_tables.items()}
        )

    def specs(self, state: TrainState) -> Any:
        """Returns the `PartitionSpec`s of `state`, for `on_each`."""
        return jax.tree.map(lambda sharding: sharding.spec, self.state(state))

    def _table_sharding(self, table: Table) -> Any:
        shape = table.values.shape  # all that values in parts of a checkpoint have
        sharded = math.prod(shape) > SMALL and shape[0] % len(self.devices) == 0
        sharding = self.by_rows if sharded else self.replicated
        return jax.tree.map(lambda _: sharding, table)

    def _like(self, tables: set[tuple[int, ...]], shapes: PyTree) -> PyTree:
        return jax.tree.map(
            lambda leaf: self.by_rows if leaf.shape in tables else self.replicated, shapes
        )

    def _tables(self, params: PyTree) -> set[tuple[int, ...]]:
        """Returns the shapes of the sharded leaves."""
        sharded: set[tuple[int, ...]] = set()
        if self.shard_rows_from is None or len(self.devices) == 1:
            return sharded
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            size, rows = math.prod(leaf.shape), leaf.shape[0] if leaf.shape else 0
            if size * leaf.dtype.itemsize < max(self.shard_rows_from, 4 * SMALL + 1):
                continue
            if rows < len(self.devices):
                continue
            if rows % len(self.devices):
                missing = -rows % len(self.devices)
                raise ValueError(
                    f"params{jax.tree_util.keystr(path)} has {rows:,} rows, which do not divide by "
                    f"{len(self.devices)} devices; give it {missing} more, which are never looked "
                    "up, or raise shard_rows_from"
                )
            sharded.add(leaf.shape)
        return sharded

    def plan(self, plan: IndexBlock) -> IndexBlock:
        """Returns the shardings of a plan, by its places."""
        columns = self._sharding(None, AXIS)
        return IndexBlock(
            columns,
            columns,
            *(self.replicated,) * 2,
            None if plan.places is None else columns,
            None if plan.shards is None else self.by_rows,
        )

    def width(self, size: int, unit: int) -> int:
        """Returns `size` rounded up to `unit` times the devices.

        Args:
          size: Number of places of a pass.
          unit: Number of places that stay on one device.

        >>> Placement.one().width(10, 4)
        12
        """
        together = unit * len(self.devices)
        return -(-size // together) * together

    def put_whole(self, tree: PyTree, shardings: PyTree) -> PyTree:
        """Puts arrays on the devices in 32 bits, in new buffers unless they lie there already.

        Args:
          tree: Tree of arrays, whole in each process.
          shardings: Sharding of each leaf, a prefix of the tree.
        """
        return jax.tree.map(placed, tree, jax.tree.broadcast(shardings, tree))

    def put_parts(self, tree: PyTree, shardings: PyTree) -> PyTree:
        """Puts arrays on the devices from each process's own parts.

        Args:
          tree: Tree of this process's parts of the arrays.
          shardings: Sharding of each leaf, a prefix of the tree.
        """

        def place_part(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
            """Returns the global array with this process's part."""
            # JAX would print the values of an array that it does not know.
            array = np.asarray(array, jax.dtypes.canonicalize_dtype(array.dtype))
            return jax.make_array_from_process_local_data(sharding, array)

        with in_32_bits():
            return jax.tree.map(place_part, tree, jax.tree.broadcast(shardings, tree))

    def on_each(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable:
        """Maps a function over the devices' parts, see `jax.shard_map`.

        With one device the result is the function itself.

        Args:
          function: Function of the parts.
          in_specs: Partition of the arguments.
          out_specs: Partition of the results.
        """
        if len(self.devices) == 1:
            return function
        # Checked, it would put primitives of its own into the trace of a loss.
        specs: Any = {"in_specs": in_specs, "out_specs": out_specs}
        return jax.shard_map(function, mesh=self.mesh, check_vma=False, **specs)

    def total(self, tree: PyTree) -> PyTree:
        """Returns the float32 sums over the devices, within `on_each`.

        CPUs of several processes add in the order of the devices.
        """
        if len(self.devices) == 1:
            return tree
        if self.num_processes == 1 or self.devices[0].platform != "cpu":
            return jax.lax.psum(tree, AXIS)
        vector, unravel = ravel_pytree(tree)
        return unravel(_in_order(vector, len(self.devices)))

    def gathered(self, columns: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns all devices' rows of arrays, within `on_each`.

        Arrays [B, ...] become [devices B, ...].
        """
        if len(self.devices) == 1:
            return list(columns)
        flat = [x.reshape(len(x), -1) for x in columns]
        table = jax.lax.all_gather(jnp.concatenate(flat, axis=1), AXIS, tiled=True)
        pieces = jnp.split(table, np.cumsum([x.shape[1] for x in flat])[:-1], axis=1)
        shapes = [(len(table), *x.shape[1:]) for x in columns]
        return [column.reshape(shape) for column, shape in zip(pieces, shapes, strict=True)]

    def first_row(self, here: int, rows: int) -> Any:
        """Returns the index of a device's first row, within `on_each`.

        Args:
          here: Number of rows on each device.
          rows: Number of rows on all devices.
        """
        return 0 if here == rows else jax.lax.axis_index(AXIS) * here

    def describe(self) -> dict[str, Any]:
        """Returns the settings that decide bits, as JSON values."""
        return {
            "devices": [[device.process_index, device.id] for device in self.devices],
            "processes": self.num_processes,
            "shard_rows_from": self.shard_rows_from,
        }

    def _sharding(self, *axes: str | None) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(*axes))


def check_placement(placement: Any) -> None:
    """Refuses a `placement` that is no `Placement`, or has no device of this process.

    Raises:
      TypeError: Unless `placement` is a `Placement` or None.
      ValueError: If none of its devices is this process's.
    """
    if placement is None:
        return
    if not isinstance(placement, Placement):
        raise TypeError(
            f"placement must be a Placement, such as Placement.default(), got {placement!r}"
        )
    if (process := jax.process_index()) not in placement.processes:
        raise ValueError(
            f"placement has no device of this process, {process}, only of "
            f"{sorted(placement.processes)}: pass Placement.default(), all devices of all processes"
        )


def _in_order(vector: jax.Array, devices: int) -> jax.Array:
    size = vector.size
    part_size = -(-size // devices)
    padded_parts = jnp.pad(vector, (0, part_size * devices - size)).reshape(devices, part_size)
    own_parts = jax.lax.all_to_all(padded_parts, AXIS, 0, 0)  # row r: my part on device r
    total = functools.reduce(jnp.add, [own_parts[device] for device in range(devices)])
    return jax.lax.all_gather(total, AXIS, tiled=True)[:size]


def _order(device: jax.Device) -> tuple[int, int]:
    return device.process_index, device.id
