"""Memory of one example, which decides the size of a microbatch.

The estimate uses shapes alone: a resumed run adds up its gradients in the same order.
"""

from __future__ import annotations

import math
from typing import Any

import jax

from dpsgd.gradients import ghost
from dpsgd.gradients.frozen import frozen_leaves
from dpsgd.gradients.losses import LossFn, loss_row, row_loss
from dpsgd.gradients.taps import find_taps

PyTree = Any

MICROBATCH_BYTES = 2**31
"""Memory for the examples of a microbatch, bytes by the estimate of `bytes_per_example`."""
CACHED_EXAMPLES = 2**11
"""Most examples of a microbatch on a CPU: values of more leave the cache before they are read."""


def bytes_per_example(loss_fn: LossFn, params: PyTree, example: PyTree) -> int:
    """Estimates one example's memory in a clipped sum, bytes.

    It counts all values that the loss computes from the example, and the numbers that clipping
    needs for each parameter.

    Args:
      loss_fn: (params, example) -> scalar, or (params, example, key) -> scalar.
      params: Tree of floating-point arrays.
      example: One example, arrays or `jax.ShapeDtypeStruct`.
    """
    params = jax.eval_shape(lambda params: params, params)
    loss_fn, example = row_loss(loss_fn), loss_row(loss_fn, example)
    taps = find_taps(loss_fn, params, example)
    leaves = jax.tree.leaves(params)
    routes = (ghost.choose_route(taps, k, leaf.shape) for k, leaf in enumerate(leaves))
    floats = sum(route.floats for route in routes)
    return 4 * floats + taps.activation_bytes(len(leaves))


def microbatch_size(batch_size: int, example_bytes: int, most: int = 2**31) -> int:
    """Returns the number of examples differentiated together, at least one.

    The microbatches are as few as `MICROBATCH_BYTES` allow, of sizes as equal as possible.

    Args:
      batch_size: Number of examples.
      example_bytes: Memory of an example.
      most: Most examples of a microbatch.

    >>> microbatch_size(8192, 20_000)  # all of them
    8192
    >>> microbatch_size(1000, 3 * 2**20)  # 682 would fit: two halves
    500
    >>> microbatch_size(8, 2**40)
    1
    >>> microbatch_size(8192, 20_000, most=3000)
    2731
    """
    fitting = max(1, min(most, MICROBATCH_BYTES // max(1, example_bytes)))
    return math.ceil(batch_size / math.ceil(batch_size / fitting))


def explain(loss_fn: LossFn, params: PyTree, example: PyTree) -> str:
    """Tabulates each parameter's ghost route, its memory and reason.

    The memory is per example, beyond an ordinary backward pass; the last line has the activations
    of that pass, and the number of examples differentiated together by default.

    Args:
      loss_fn: (params, example) -> scalar, or (params, example, key) -> scalar.
      params: Tree of floating-point arrays.
      example: One example, arrays or `jax.ShapeDtypeStruct`.

    >>> import jax.numpy as jnp
    >>> def loss_fn(params, example):
    ...     x = params["table"][example["ids"]].ravel()
    ...     return jnp.sum(jnp.tanh(x @ params["kernel"]) * jnp.cumsum(params["scale"]))
    >>> params = {"table": jnp.ones((1000, 4)), "kernel": jnp.ones((8, 2)), "scale": jnp.ones(2)}
    >>> print(explain(loss_fn, params, {"ids": jnp.array([1, 2])}))
    ['kernel']  [8, 2]     outer  0 B   dot_general without a sequence axis
    ['scale']   [2]        vmap   16 B  used by cumsum, which has no rule
    ['table']   [1000, 4]  rows   64 B  look-up of 2 rows of 4
    activations 118 B an example; up to 10791376 examples together
    """
    params = jax.eval_shape(lambda params: params, params)
    loss_fn, example = row_loss(loss_fn), loss_row(loss_fn, example)
    taps = find_taps(loss_fn, params, example)
    frozen, lines = frozen_leaves(loss_fn, params, example), []
    for k, (path, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(params)):
        route = ghost.FROZEN if k in frozen else ghost.choose_route(taps, k, leaf.shape)
        name = jax.tree_util.keystr(path) or "params"
        lines.append((name, str(list(leaf.shape)), route.kind, _bytes(4 * route.floats), route.why))
    widths = [max(len(line[column]) for line in lines) for column in range(4)]
    table = [
        "  ".join([*(cell.ljust(w) for cell, w in zip(line, widths, strict=False)), line[4]])
        for line in lines
    ]
    activations = taps.activation_bytes(len(lines))
    fitting = microbatch_size(2**31, bytes_per_example(loss_fn, params, example))
    table.append(f"activations {_bytes(activations)} an example; up to {fitting} examples together")
    return "\n".join(table)


def _bytes(count: int) -> str:
    power = min(3, max(0, count.bit_length() - 1) // 10)
    return f"{count / 1024**power:.4g} {('B', 'KiB', 'MiB', 'GiB')[power]}"
