"""Losses with declared look-ups get their own rows, and nothing else of a table."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dpsgd import clipped_grad, module_with_rows, split_module, with_rows
from dpsgd.gradients.frozen import RunLoss
from dpsgd.gradients.ghost import choose_route
from dpsgd.gradients.losses import row_loss
from dpsgd.gradients.rows import (
    LocatedExample,
    declared_rows,
    index_ranges,
    lookups_read_keys,
    traced_places,
)
from dpsgd.gradients.taps import find_taps

pytestmark = pytest.mark.usefixtures("unoptimised")  # two programs of one loss have equal bits

R, D = 50, 4
PARAMS = {
    "dense": np.linspace(-1, 1, 4 * D + 2, dtype=np.float32),
    "small": np.arange(2 * R, dtype=np.float32).reshape(R, 2) / R,
    "table": np.sin(np.arange(R * D, dtype=np.float32)).reshape(R, D),
}
EXAMPLES = [
    {"ids": np.array([3, 7, 3], np.int32), "one": np.uint8(2)},
    {"ids": np.array([-1, 0, 70], np.int32), "one": np.uint8(255)},  # before the table, and beyond
]


def lookups(example):
    one = example["one"].astype(jnp.int32)
    return {"table": jnp.append(example["ids"], one), "small": example["one"]}


def loss_of_rows(params, rows, example):
    features = jnp.concatenate([rows["table"].ravel(), rows["small"]])
    return jnp.sum(jnp.tanh(features * params["dense"]))


def plain_loss(params, example):
    """The same loss of whole tables, by NumPy's indices."""
    at = np.clip(np.append(example["ids"], int(example["one"])), 0, R - 1)
    features = jnp.concatenate([params["table"][at].ravel(), params["small"][at[-1]]])
    return jnp.sum(jnp.tanh(features * params["dense"]))


LOSS = with_rows(lookups, loss_of_rows)
EACH_EXAMPLE = pytest.mark.parametrize("example", EXAMPLES, ids=["inside", "outside"])


@EACH_EXAMPLE
def test_declared_loss_equals_the_loss_of_whole_tables(example):
    value, gradient = jax.jit(jax.value_and_grad(LOSS))(PARAMS, example)
    plain = jax.value_and_grad(lambda params: plain_loss(params, example))
    expected, plain_gradient = jax.jit(plain)(PARAMS)
    assert value == expected
    assert jax.tree.all(jax.tree.map(np.array_equal, gradient, plain_gradient))


@pytest.mark.parametrize("wrapped", [LOSS, RunLoss(LOSS, "table|dense", "bfloat16")])
@EACH_EXAMPLE
def test_declared_loss_equals_itself_on_a_table_of_its_rows(example, wrapped):
    declared = declared_rows(wrapped)
    places = jax.jit(traced_places(declared, wrapped, PARAMS, example))(example)
    kept = {name: np.unique(x)[::-1] for name, x in places.items()}
    small = PARAMS | {name: PARAMS[name][rows] for name, rows in kept.items()}
    moved = {
        name: np.argmax(kept[name] == np.asarray(x)[..., None], axis=-1).astype(np.int32)
        for name, x in places.items()
    }
    located = jax.jit(lambda params: wrapped(params, LocatedExample(example, moved)))
    assert located(small) == jax.jit(wrapped)(PARAMS, example)


def test_clipped_gradients_of_declared_rows_form_no_table():
    taps = find_taps(row_loss(LOSS), PARAMS, EXAMPLES[0])
    kinds = [choose_route(taps, k, x.shape).kind for k, x in enumerate(jax.tree.leaves(PARAMS))]
    assert kinds[1:] == ["rows", "rows"]


@pytest.mark.long
def test_keyed_loss_draws_its_look_ups_by_its_key():
    def drawn(example, key):
        return {"table": jax.random.randint(key, (2,), 0, R)}

    loss = with_rows(drawn, lambda params, rows, example, key: rows["table"].sum() + example)
    params = jax.tree.map(jnp.asarray, PARAMS)
    keys = jax.random.split(jax.random.key(0), 5)
    for key in keys:
        expected = params["table"][jax.random.randint(key, (2,), 0, R)].sum() + 1.0
        assert loss(params, 1.0, key) == expected
    gradient = clipped_grad(loss, l2_clip_norm=100.0)
    total, _ = gradient(params, jnp.ones(5), jnp.ones(5), keys)
    counts = np.zeros(R)
    for key in keys:
        np.add.at(counts, np.asarray(jax.random.randint(key, (2,), 0, R)), 1)
    np.testing.assert_allclose(total["table"], counts[:, None] * np.ones(D), rtol=1e-6)


def test_index_ranges_name_the_columns_of_row_indices():
    example = {**EXAMPLES[0], "unused": jnp.int32(1)}
    names = list(dict(sorted(example.items())))
    ranges = index_ranges(LOSS, PARAMS, example)
    assert {names[k]: size for k, size in ranges.items()} == {"ids": R, "one": R}
    assert index_ranges(plain_loss, PARAMS, example) == {}


@pytest.mark.parametrize(
    ("of_key", "reads"),
    [(lambda key: 0, False), (lambda key: jax.random.randint(key, (3,), 0, 2), True)],
    ids=["ignored", "read"],
)
def test_key_counts_where_look_ups_read_it(of_key, reads):
    keyed = with_rows(
        lambda e, key: {"table": e["ids"] + of_key(key)}, lambda p, r, e, key: r["table"].sum()
    )
    assert lookups_read_keys(keyed, PARAMS, EXAMPLES[0]) == reads
    assert not lookups_read_keys(LOSS, PARAMS, EXAMPLES[0])


def mixing(example):
    @jax.custom_batching.custom_vmap
    def first(x):
        return x

    first.def_vmap(lambda size, batched, x: (jnp.broadcast_to(x[:1], x.shape), True))
    return {"table": first(example["ids"])}


def called(lookups=lookups, loss=loss_of_rows):
    return lambda: with_rows(lookups, loss)(PARAMS, EXAMPLES[0])


REFUSED = {
    "no table": (called(lambda e: {"tabel": e["ids"]}), "'tabel', which is no table; .*table"),
    "scalar": (
        lambda: with_rows(lambda e: {"s": e}, loss_of_rows)({"s": 1.0}, 3), "'s', which is no table"
    ),
    "floats": (called(lambda e: {"table": e["ids"] * 1.0}), "must be integers, not float32"),
    "no dict": (called(lambda e: e["ids"]), "must return a dict"),
    "indexed": (called(loss=lambda p, r, e: p["table"][3].sum()), r"read rows\['table'\]"),
    "summed": (called(loss=lambda p, r, e: jnp.sum(p["table"])), r"read rows\['table'\]"),
    "added": (called(loss=lambda p, r, e: jnp.ones(D) + p["table"]), r"read rows\['table'\]"),
    "two of one name": (
        lambda: with_rows(lambda e: {"a.b": e}, lambda p, r, e: 0.0)(
            {"a.b": jnp.ones(2), "a": {"b": jnp.ones(2)}}, 1
        ),
        "two parameters have the name 'a.b'; rename one",
    ),
    "two arguments": (called(loss=lambda p, e: 0.0), r"define it as loss\(params, rows, example"),
    "no arguments": (called(lambda: {}), r"define it as lookups\(example\)"),
    "key": (called(lambda e, key: {}), "give loss a key argument"),
    "examples mixed": (
        lambda: traced_places(
            with_rows(mixing, loss_of_rows), LOSS, PARAMS, EXAMPLES[0]
        ),
        "examples could mix",
    ),
    "frozen": (
        called(loss=lambda p, r, e: RunLoss(lambda p, e: p["dense"].sum(), "dense")(p, e)),
        "'small' is not trained, but its look-ups are declared",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("ask", "named"), REFUSED.values(), ids=REFUSED)
def test_look_ups_that_are_none_are_refused_in_one_line(ask, named):
    with pytest.raises(ValueError, match=named) as error:
        ask()
    assert "\n" not in str(error.value)


class Network(nnx.Module):
    def __init__(self, rngs):
        self.embeddings = nnx.List(
            [nnx.Embed(30, D, rngs=rngs), nnx.Embed(20, D, dtype=jnp.bfloat16, rngs=rngs)]
        )
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.layer = nnx.Linear(4 * D, 1, rngs=rngs)

    def __call__(self, ids):
        first, second = self.embeddings
        x = [first(ids[:2]).ravel(), second(ids[2]), first(ids[2])]
        return self.layer(self.dropout(jnp.concatenate(x)))[0]


@pytest.mark.short("key")
@pytest.mark.parametrize("keyed", [False, True], ids=["no key", "key"])
def test_module_with_rows_equals_the_split_module(keyed):
    module = Network(nnx.Rngs(0))
    module = module if keyed else nnx.view(module, deterministic=True)
    params, apply = split_module(module)
    if keyed:
        same, loss = module_with_rows(module, lambda module, x, key: jnp.square(module(x)))
    else:
        same, loss = module_with_rows(module, lambda module, x: jnp.square(module(x)))
    assert jax.tree.all(jax.tree.map(np.array_equal, params, same))
    ids, key = jnp.array([3, 9, 3]), [jax.random.key(1)] * keyed
    value, gradient = jax.jit(jax.value_and_grad(loss))(params, ids, *key)
    how = {"key": key[0]} if keyed else {}
    split = jax.jit(jax.value_and_grad(lambda p: jnp.square(apply(p, ids, **how))))
    expected, split_gradient = split(params)
    assert value == expected
    assert jax.tree.all(jax.tree.map(np.array_equal, gradient, split_gradient))
    assert set(declared_rows(loss).places(params, ids, *key)) == {
        "embeddings.0.embedding",
        "embeddings.1.embedding",
    }


class Word(nnx.Module):
    def __init__(self):
        self.table = nnx.Embed(9, D, rngs=nnx.Rngs(0))
        self.weight = nnx.Param(jnp.ones(D))


class Tied(Word):
    def __init__(self):
        super().__init__()
        self.twin = nnx.Embed(9, D, rngs=nnx.Rngs(0))
        self.twin.embedding = self.table.embedding


def looped(module, x):
    return jax.lax.map(module.table, x).sum()


@pytest.mark.parametrize(
    ("module", "loss", "named"),
    [
        (Word(), lambda m, x: m.table.attend(m.table(x[0])).sum(), r"than by look-ups, as .attend"),
        (Word(), lambda m, x: m.table.embedding[x[0]].sum(), r"than by look-ups, as .embedding"),
        (Word(), lambda m, x: m.table(jnp.argmax(m.weight[...]) + x).sum(), "depend on its param"),
        (Word(), lambda m, x: m.table(jnp.argmax(m.table(x[0]))).sum(), "depend on its param"),
        (Word(), looped, "inside a loop"),
        (Tied(), lambda m, x: (m.table(x) * m.twin(x)).sum(), "reads the table 'table.embedding'"),
        (nnx.Linear(2, 1, rngs=nnx.Rngs(0)), lambda m, x: m(x).sum(), "has no nnx.Embed"),
    ],
    ids=[
        "tied weights",
        "table",
        "ids of parameters",
        "ids of rows",
        "loop",
        "two layers",
        "no layer",
    ],
)
def test_modules_whose_look_ups_cannot_be_declared_are_refused(module, loss, named):
    def ask():
        params, declared = module_with_rows(module, loss)
        return declared(params, jnp.array([1, 2]))

    with pytest.raises(ValueError, match=named):
        ask()
