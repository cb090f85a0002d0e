"""A loss of tables is taken apart: which rows it reads, and the same loss of these alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from dpsgd.engine.lazy.look_ups import Row, TableLoss, unique_rows
from dpsgd.gradients.ghost import choose_route
from dpsgd.gradients.taps import find_taps

R, D = 50, 4
PARAMS = {
    "dense": jnp.linspace(-1, 1, 3 * D + D + 2),
    "small": jnp.arange(2.0 * R).reshape(R, 2) / R,
    "table": jnp.sin(jnp.arange(R * D, dtype=jnp.float32)).reshape(R, D),
}


def loss_fn(params, example):
    several = params["table"][example["ids"]].ravel()
    several += lax.stop_gradient(params["table"][example["ids"]]).ravel()
    one = jnp.take(params["table"], example["one"], axis=0, mode="clip")
    other = jax.jit(lambda table, i: table[i])(params["small"], example["one"])
    return jnp.sum(jnp.tanh(jnp.concatenate([several, one, other]) * params["dense"]))


EXAMPLES = [
    {"ids": jnp.array([3, 7, 3]), "one": jnp.int32(2)},
    {"ids": jnp.array([-1, 0, 70]), "one": jnp.int32(60)},  # counted from the end; beyond it
]


def of_rows(taken_apart, params, example, order):
    """The parameters with the rows that an example reads alone, and the example of these."""
    leaves, structure = jax.tree.flatten(params)
    found, places = taken_apart.rows(example), {}
    for k in taken_apart.tables:
        paths = [use.path for use in taken_apart.uses(k)]
        numbers = order(np.unique(np.concatenate([found[path] for path in paths])))
        rows = jnp.take(leaves[k], numbers, axis=0, mode="fill")
        for path in paths:
            at = np.array([list(numbers).index(number) for number in found[path]], np.int32)
            places[path] = jnp.where(found[path] == len(leaves[k]), len(numbers), at)
        leaves[k] = rows
    return jax.tree.unflatten(structure, leaves), Row(example, places)


@pytest.mark.parametrize("order", [np.sort, lambda x: np.sort(x)[::-1]], ids=["up", "down"])
@pytest.mark.parametrize("example", EXAMPLES, ids=["inside", "outside"])
def test_the_loss_of_the_rows_is_the_loss(example, order):
    taken_apart = TableLoss(loss_fn, PARAMS, example)
    assert taken_apart.tables == (1, 2)
    params, row = of_rows(taken_apart, PARAMS, example, order)
    assert np.array_equal(loss_fn(PARAMS, example), taken_apart.loss(params, row), equal_nan=True)


def test_rows_have_numbers_as_the_table_has_them():
    taken_apart = TableLoss(loss_fn, PARAMS, EXAMPLES[1])
    found = sorted(np.concatenate(list(taken_apart.rows(EXAMPLES[1]).values())).tolist())
    assert found == [
        0,
        0,
        49,
        49,
        49,
        49,
        49,
        49,
    ]  # three are beyond the table: all of JAX's indexing clips


def test_gradients_of_rows_go_the_way_of_rows():
    taken_apart = TableLoss(loss_fn, PARAMS, EXAMPLES[0])
    params, row = of_rows(taken_apart, PARAMS, EXAMPLES[0], np.sort)
    taps = find_taps(taken_apart.loss, params, row)
    kinds = [choose_route(taps, k, x.shape).kind for k, x in enumerate(jax.tree.leaves(params))]
    assert kinds[1:] == ["slice", "rows"]  # neither forms a gradient of a whole table


@pytest.mark.parametrize("num_rows", [5, 30, 31, 10_000])
def test_a_batch_reads_each_row_once(num_rows):
    every = np.random.default_rng(num_rows).integers(0, num_rows + 1, 30).astype(np.int32)
    every[:4] = every[4:8]
    numbers, place_of = unique_rows(jnp.asarray(every), num_rows)
    assert len(numbers) == min(30, num_rows)
    found = np.asarray(numbers)[numbers < num_rows]
    assert np.array_equal(np.sort(found), np.unique(every[every < num_rows]))
    beyond = np.append(numbers, num_rows)
    assert np.array_equal(beyond[place_of(jnp.asarray(every))], every)


def of_stopped(table, e):
    return lax.stop_gradient(jnp.tanh(lax.stop_gradient(table[:, None]))[e, 0])


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (lambda p, e: jnp.sum(p["t"][e] ** 2) + jnp.sum(p["t"]), "reduce_sum"),
        (lambda p, e: jnp.sum(p["t"] @ jnp.ones(D)) * e.sum(), "dot_general"),
        (lambda p, e: jnp.sum(jnp.tanh(p["t"])[e]), "tanh"),
        (lambda p, e: jnp.sum(p["t"].T[:, e]), "transpose"),
        (lambda p, e: jnp.sum(p["t"][:, e]), "does not read whole rows"),
        (lambda p, e: jnp.sum(p["t"][e] * lax.stop_gradient(p["t"])[e]), "under stop_gradient"),
        (lambda p, e: jnp.sum(p["t"][e] * jax.jit(of_stopped)(p["t"], e)), "under stop_gradient"),
        (lambda p, e: 0.0 * e.sum(), "no derivative of the loss reaches it"),
    ],
)
def test_what_is_no_table_is_named_by_the_use_that_prevents_it(loss, why):
    taken_apart = TableLoss(loss, {"t": jnp.ones((R, D))}, jnp.array([1, 2]))
    assert taken_apart.tables == ()
    assert why in taken_apart.why_not[0]


@pytest.mark.long
def test_a_leaf_whose_rows_depend_on_parameters_is_no_table_and_hides_no_other():
    def loss(params, example):
        where = jnp.argmax(params["w"]) + example[0]
        return jnp.sum(params["codes"][where]) + jnp.sum(params["t"][example])

    leaves = {"codes": jnp.ones((R, D)), "t": jnp.ones((R, D)), "w": jnp.ones(3)}
    example = jnp.array([3, 1])
    found = TableLoss(loss, leaves, example)
    assert found.tables == (1,)
    assert "depends on parameters" in found.why_not[0]
    assert [rows.tolist() for rows in found.rows(example).values()] == [[3, 1]]
    params, row = of_rows(found, leaves, example, np.sort)
    assert found.loss(params, row) == loss(leaves, example)
