"""The setting of LazyDP (arXiv 2404.08847): its tables and layers, as far as they fit.

26 tables of rows of 128 numbers, 96 GB in all, of each of which an example looks up one row;
batches of 2,048; the layers of MLPerf's DLRM: 13 numbers through 512, 256 and 128 units, the
products of all pairs of the 27 vectors, and 1024, 1024, 512 and 256 units on top of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from experiments.benchmarks.rows import Row
from experiments.benchmarks.tables_steps import (
    RESIDENT_ROWS,
    SGD,
    Model,
    Setting,
    lazy,
    step_seconds,
)
from experiments.benchmarks.timing import in_turns

TABLES, WIDTH, BATCH = 26, 128, 2048
BYTES = 96e9
BOTTOM = 13, 512, 256, WIDTH
TOP = 1024, 1024, 512, 256, 1
THEIRS = 119
"""Times the throughput of DP-SGD, as the paper says of its own on a CPU with a GPU, on average."""


def _layers(widths: Sequence[int]) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [
        {
            "kernel": (rng.normal(size=(m, n)) * np.sqrt(2 / m)).astype(np.float32),
            "bias": np.zeros(n, np.float32),
        }
        for m, n in itertools.pairwise(widths)
    ]


def dlrm(rows: int, tables: int = TABLES) -> Model:
    """Returns the model with so many tables, of so many rows each."""
    top = tables * (tables + 1) // 2 + WIDTH, *TOP

    def params() -> dict[str, Any]:
        def table(k: int) -> jax.Array:
            along = (lax.broadcasted_iota(jnp.float32, (rows, WIDTH), axis) for axis in (0, 1))
            return 0.01 * jnp.sin(sum(along, jnp.float32(k)))

        every = [table(k) for k in range(tables)]
        return {"tables": every, "bottom": _layers(BOTTOM), "top": _layers(top)}

    def through(layers: list[dict[str, Any]], x: jax.Array) -> jax.Array:
        for layer in layers[:-1]:
            x = jax.nn.relu(x @ layer["kernel"] + layer["bias"])
        return x @ layers[-1]["kernel"] + layers[-1]["bias"]

    pairs = np.tril_indices(tables + 1, -1)

    def loss_fn(params: dict[str, Any], example: dict[str, Any]) -> jax.Array:
        x = jax.nn.relu(through(params["bottom"], example["integers"]))
        looked_up = [t[example["categories"][k]] for k, t in enumerate(params["tables"])]
        vectors = jnp.stack([x, *looked_up])
        products = (vectors @ vectors.T)[pairs]
        logit = through(params["top"], jnp.concatenate([x, products]))[0]
        label = example["label"].astype(jnp.float32)
        return optax.sigmoid_binary_cross_entropy(logit, label)

    rng = np.random.default_rng(0)
    columns: dict[str, np.ndarray] = {
        "label": rng.integers(0, 2, RESIDENT_ROWS).astype(np.uint8),
        "integers": rng.normal(size=(RESIDENT_ROWS, BOTTOM[0])).astype(np.float32),
        "categories": rng.integers(0, rows, (RESIDENT_ROWS, tables)).astype(np.int32),
    }
    return Model(loss_fn, params, columns)


def lazydp_rows(sizes: tuple[int, int], tables: int, batch: int, rounds: int) -> Iterator[Row]:
    """Yields what steps take, tables by SGD, lazy or not, and what that is with 96 GB of them.

    Args:
      sizes: Rows of a table: of two models.
      tables: How many there are.
      batch: Examples of a step.
      rounds: For each median.
    """
    seconds = []
    for rows in sizes:
        setting = Setting(dlrm(rows, tables), batch)
        work = {"dense": setting.private(SGD), "lazy": setting.private(SGD, lazy())}
        steps = in_turns(work, rounds)
        held = 4 * tables * WIDTH * rows
        at = f"{tables} tables of {WIDTH} columns, {held / 1e9:.3g} GB, batch {batch:,}"
        seconds.append((held, *(step_seconds(steps, name) for name in work)))
        yield Row(f"DP step, SGD, {at}", seconds[-1][1], "s")
        yield Row(f"DP step, SGD, tables lazy, {at}", seconds[-1][2], "s")
        yield Row(f"DP step, SGD, all / tables lazy, {at}", steps.ratio("dense", "lazy"), "x")
        for name, what in {"dense": "all", "lazy": "tables lazy"}.items():
            yield Row(f"compiling that step, SGD, {what}, {at}", work[name].compile_seconds, "s")
        del work
    (x, y, _), (x2, y2, late) = seconds
    scaled = y + (y2 - y) / (x2 - x) * (BYTES - x)
    name = (
        f"DP step, SGD, all (scaled from {x / 1e9:.3g} and {x2 / 1e9:.3g} GB to {BYTES / 1e9:g} GB)"
    )
    yield Row(name, scaled, "s")
    yield Row(f"{name} / tables lazy ({x2 / 1e9:.3g} GB); LazyDP: {THEIRS}", scaled / late, "x")
