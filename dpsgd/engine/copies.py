"""Copies of arrays between hosts and devices."""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from dpsgd.core.state import TrainState
from dpsgd.engine.programs import in_32_bits

PyTree = Any


def hosted(tree: PyTree) -> PyTree:
    """Returns NumPy arrays with all rows of `tree`.

    Every process must call it. Random keys stay keys.
    """
    return jax.tree.map(_hosted, tree)


def host_copy(state: TrainState, params: PyTree = None) -> TrainState:
    """Copies a state without its noise state to the host.

    Arrays of one repeated value, such as the moments of a first state, take no memory.

    Args:
      state: State of a run.
      params: Parameters with which the run begins, if `state` is its first: the copy shares them.
    """

    def narrow(leaf: Any) -> Any:
        """Broadcasts one scalar for a leaf of equal entries."""
        if not isinstance(leaf, np.ndarray) or not leaf.size or leaf.dtype.itemsize > 8:
            return leaf
        bits = leaf.view(f"u{leaf.dtype.itemsize}")  # 0 and -0 are two
        same = bits.min() == bits.max()
        return (
            np.broadcast_to(leaf.reshape(-1)[:1].copy().reshape(()), leaf.shape) if same else leaf
        )

    def shared(copy: Any, own: Any) -> Any:
        """Returns `own` unless the copy has another shape or dtype."""
        return own if (copy.shape, copy.dtype) == (own.shape, own.dtype) else copy

    copied = jax.tree.map(narrow, hosted(state._replace(noise=())))
    if params is None:
        return copied
    return copied._replace(raw_params=jax.tree.map(shared, copied.params, hosted(params)))


def placement_mismatch(tree: PyTree) -> str | None:
    """Returns the first array whose device copies differ.

    The result is its path in the tree, or None. Every process must call it. JAX itself reads a
    single copy.

    >>> placement_mismatch({"w": jax.numpy.ones(3)}) is None
    True
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

        digests = multihost_utils.process_allgather(np.stack([word for _, word in words]))
        for number, (name, _) in enumerate(words):
            if (digests[:, number] != digests[0, number]).any():
                return name
    return None


def on_one_device(tree: PyTree) -> PyTree:
    """Returns arrays whole on one device; every process must call it."""

    def leaf(x: Any) -> Any:
        """Returns one array with all its rows on one device."""
        if not isinstance(x, jax.Array) or len(x.sharding.device_set) == 1:
            return x
        if x.is_fully_replicated:
            return x.addressable_data(0)
        return jax.device_put(_hosted(x), x.addressable_shards[0].device)

    return jax.tree.map(leaf, tree)


_WIDE = np.float64, np.int64, np.uint64
"""Types of 64 bits, which JAX narrows."""


def placed(leaf: Any, sharding: NamedSharding) -> jax.Array:
    """Returns an array of 32 bits with a sharding, copied unless it already is one."""
    is_narrow, is_array = leaf.dtype not in _WIDE, isinstance(leaf, jax.Array)
    if is_narrow and is_array and leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
        return leaf
    if is_array and _is_key(leaf):
        words = placed(jax.random.key_data(leaf), sharding)
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(leaf))
    # Via the host: an array that is put where it already lies would share its buffer. Of arrays in
    # files, each process reads only the pieces of its devices.
    in_files = not is_array and hasattr(leaf, "pieces")
    array = leaf if in_files else np.asarray(leaf)
    with in_32_bits():
        dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    return jax.make_array_from_callback(
        array.shape, sharding, lambda index: np.asarray(array[index], dtype)
    )


def _is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _hosted(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array) or _is_key(leaf):
        return leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
    if not (leaf.is_fully_addressable or leaf.is_fully_replicated):
        from jax.experimental import multihost_utils

        leaf = multihost_utils.process_allgather(leaf, tiled=True)
    return np.asarray(leaf)
