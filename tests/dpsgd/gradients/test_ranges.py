"""Look-ups that can never coincide are known as such, and no others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import dpsgd
from dpsgd.gradients.clipping import clipped_grad

ROWS, OFFSETS = 64, np.array([0, 20, 40], np.int32)
EXTREMES = np.array([-(2**31), -65, -1, 0, 1, 19, 20, 63, 64, 2**31 - 21, 2**31 - 1], np.int32)
PAIRS = np.stack(np.meshgrid(EXTREMES, EXTREMES), -1).reshape(-1, 2)
IDS = np.concatenate([PAIRS, PAIRS[:, :1]], axis=1)
"""Rows of three ids: all pairs of extremes."""

DISTINCT = {
    "masked": lambda ids: (ids & 15) + OFFSETS,
    "masked, missing ids apart": lambda ids: (ids > 0) * (1 + ((ids - 1) & 15)) + OFFSETS,
    "clipped": lambda ids: jnp.clip(ids, 0, 19) + OFFSETS,
    "bytes": lambda ids: (ids.astype(jnp.uint8) & 15).astype(jnp.int32) + OFFSETS,
    "a remainder": lambda ids: (ids.astype(jnp.uint32) % 20).astype(jnp.int32) + OFFSETS,
    "in another order": lambda ids: ((ids & 15) + OFFSETS)[::-1],
    "in two parts": lambda ids: jnp.concatenate([ids[:1] & 15, (ids[1:] & 15) + OFFSETS[1:]]),
    "one by one": lambda ids: jnp.stack([(ids[k] & 7) * 2 + 20 * k for k in range(3)]),
    "one by one, chosen": lambda ids: jnp.stack(
        [jnp.where(ids[k] > 3, jnp.clip(ids[k], 0, 9) % 10, 2) + 20 * k for k in range(3)]
    ),
    "the mask first": lambda ids: lax.bitwise_and(jnp.int32(15), ids) + OFFSETS,
    "offsets that are counted": lambda ids: (ids & 15) + 20 * jnp.arange(3),
    "chosen": lambda ids: jnp.where(ids > 5, ids & 7, 9) + OFFSETS,
    "in a call": jax.jit(lambda ids: (ids & 15) + OFFSETS),
    "rematerialised": jax.checkpoint(lambda ids: (ids & 15) + OFFSETS),
    "negative steps": lambda ids: OFFSETS + 19 - (ids & 15),
}
NOT_DISTINCT = {
    "one table": lambda ids: ids & 15,
    "one table, the mask first": lambda ids: lax.bitwise_and(15, ids),
    "no case": lambda ids: lax.select_n(np.full(3, 7, np.int32), *3 * (ids & 15,)),
    "one row in common": lambda ids: (ids & 31) % 21 + OFFSETS,
    "a mask too long": lambda ids: (ids & 31) + OFFSETS,
    "no mask": lambda ids: ids + OFFSETS,
    "negative ids": lambda ids: ids % 16 - 16 + OFFSETS,
    "a sum that overflows": lambda ids: ((ids & 15) + (2**31 - 1)) + OFFSETS,
    "a product that overflows": lambda ids: (ids & 15) * 2**29 + OFFSETS,
    "beyond the table": lambda ids: (ids & 15) + OFFSETS * 3,
    "floats": lambda ids: (ids & 15).astype(jnp.float32).astype(jnp.int32) + OFFSETS,
    "a cast that wraps": lambda ids: ((ids & 15) + 250).astype(jnp.uint8).astype(jnp.int32) % 40,
}


def loss_of(rows_of):
    def loss(table, example):
        rows = table.at[rows_of(example["ids"])].get(mode="clip")
        return jnp.sum(jnp.tanh(rows) * example["x"])

    return loss


@pytest.mark.parametrize("name", [*DISTINCT, *NOT_DISTINCT])
def test_repeated_rows_are_summed_unless_they_cannot_be(name):
    loss = loss_of((DISTINCT | NOT_DISTINCT)[name])
    table = np.linspace(0.1, 1, 2 * ROWS, dtype=np.float32).reshape(ROWS, 2)
    x = np.random.default_rng(0).normal(size=(len(IDS), 3, 2)).astype(np.float32)
    batch = {"ids": IDS, "x": x}
    plan = dpsgd.explain(loss, table, jax.tree.map(lambda v: v[0], batch))
    assert ("distinct" in plan) == (name in DISTINCT), plan
    ones = np.ones(len(IDS), np.float32)
    ghost, vmap = (
        clipped_grad(loss, l2_clip_norm=0.5, method=method)(table, batch, ones)[0]
        for method in ("ghost", "vmap")
    )
    np.testing.assert_allclose(ghost, vmap, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("shift", "distinct"), [(24, True), (23, False), (0, False)])
def test_look_ups_of_one_table_are_distinct_all_together_or_not_at_all(shift, distinct):
    def loss(table, example):
        first, second = (example["ids"] & 7) + 8 * np.arange(3), (example["ids"] & 7) + shift
        return jnp.sum(table[first]) * jnp.sum(table[second[:1]])

    example = {"ids": np.zeros(3, np.int32)}
    plan = dpsgd.explain(loss, np.zeros((ROWS, 2), np.float32), example)
    assert ("distinct" in plan) == distinct, plan


def test_arrays_that_are_too_large_to_follow_are_taken_for_anything():
    size = 2**15

    def loss(table, example):
        return jnp.sum(table[np.arange(size) + (example["ids"] & 0)])

    example = {"ids": np.zeros((), np.int32)}
    plan = dpsgd.explain(loss, np.zeros((size, 1), np.float32), example)
    assert "distinct" not in plan
