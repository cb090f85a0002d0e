"""What no derivative of the loss reaches stays as it is: no noise, no update, and no data."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

from dpsgd import (
    Independent,
    LazyTables,
    Mechanism,
    dpsgd,
    explain,
    split_module,
    train,
    with_rows,
)
from dpsgd.audit.runtime.flow import flow_checks
from dpsgd.core.state import join_leaves, split_leaves
from dpsgd.engine.feed import Layout
from dpsgd.engine.loop import train_blocks
from dpsgd.gradients.frozen import RunLoss, frozen_leaves, leaf_names
from dpsgd.gradients.rules import PerLayerClipping
from dpsgd.noise.correlated import BandedToeplitz
from samplers import Deterministic

pytestmark = pytest.mark.usefixtures("unoptimised")

N = 60
RNG = np.random.default_rng(0)
ROWS = {
    "x": RNG.normal(size=(N, 4)).astype(np.float32),
    "ids": RNG.integers(0, 9, (N, 2)).astype(np.int32),
}
FROZEN = {"weight", "stopped table", "unused"}
SAMPLER = Deterministic(N, 20, 1)


def start():
    params = {name: np.full((9, 4), 0.1, np.float32) for name in ("table", "stopped table")}
    params |= {"weight": np.full(4, -0.0, np.float32), "bias": np.ones((), np.float32)}
    return params | {"unused": np.ones(3, np.float32)}


def loss_of_rows(params, rows, example):
    frozen = lax.stop_gradient(params["stopped table"][example["ids"]] + params["weight"])
    return jnp.sum(jnp.tanh((rows["table"] + frozen) @ example["x"] + params["bias"]))


def lookups(example):
    return {"table": example["ids"]}


loss_fn = with_rows(lookups, loss_of_rows)


# Weight decay would move what gets no gradient.
ADAMW = optax.adamw(0.1, weight_decay=0.1)
KINDS = {
    "dense": (Independent(), None),
    "banded": (BandedToeplitz((4, 3)), None),
    "lazy tables": (Independent(), LazyTables(0.1, momentum=0.5)),
}


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_leaf_without_a_path_to_the_loss_stays_constant(kind):
    noise, tables = KINDS[kind]
    mechanism = Mechanism(SAMPLER, 1.0, 1.0, noise)
    before = start()
    found, guarantee = train(
        dpsgd(loss_fn, ADAMW, tables=tables), mechanism, before, ROWS, delta=1e-5
    )
    assert any("audit before training: passed" in note for note in guarantee.notes)
    for name, leaf in found.items():
        same = np.asarray(leaf).tobytes() == np.asarray(before[name]).tobytes()
        assert same == (name in FROZEN), name


@pytest.mark.short("dense")
@pytest.mark.parametrize("kind", KINDS)
def test_frozen_leaf_has_no_state_and_changes_no_other_leaf(kind):
    noise, tables = KINDS[kind]
    mechanism, kept = Mechanism(SAMPLER, 1.0, 1.0, noise), {}
    alone = {name: leaf for name, leaf in start().items() if name not in FROZEN}
    held = {name: jnp.asarray(leaf) for name, leaf in start().items() if name in FROZEN}
    for params in (alone, start()):
        loss = with_rows(lookups, lambda p, rows, example: loss_of_rows(held | p, rows, example))
        algorithm = dpsgd(loss, ADAMW, tables=tables, clipping=PerLayerClipping())
        state = algorithm.init(params, mechanism, ROWS)
        for block in train_blocks(algorithm, mechanism, state, ROWS, insecure_seed=0):
            after = jax.device_get(block.state)
        for name in FROZEN & {*params}:
            assert after.raw_params[name].tobytes() == np.asarray(params[name]).tobytes(), name
        rest = after.opt_state, after.noise, [after.raw_params[name] for name in alone]
        kept[len(params)] = [np.asarray(x).tobytes() for x in jax.tree.leaves(rest)]
        total, _ = jax.eval_shape(
            lambda p, algorithm=algorithm, frozen=state.frozen: algorithm.clipped_sum(
                p, ROWS, jnp.ones(N), mechanism.scales(), frozen=frozen
            ),
            params,
        )
        assert len(jax.tree.leaves(total)) == len(alone)
    if not tables:  # whose noise is named by the number of the leaf
        assert kept[2] == kept[5]
    assert list(map(len, kept[2])) == list(map(len, kept[5]))


def test_frozen_leaves_need_rows_and_have_no_clipping_budget():
    mechanism, algorithm = Mechanism(SAMPLER, 1.0, 1.0), dpsgd(loss_fn, ADAMW)
    state = algorithm.init(start(), mechanism)
    with pytest.raises(
        ValueError, match=r"params\['stopped table'\].*init\(params, mechanism, rows"
    ):
        next(train_blocks(algorithm, mechanism, state, ROWS, insecure_seed=0))
    rule = PerLayerClipping(("table", "bias", "weight"), (1.0, 1.0, 1.0))
    with pytest.raises(ValueError, match="'weight' is the first match of no trained parameter"):
        train(dpsgd(loss_fn, ADAMW, clipping=rule), mechanism, start(), ROWS, delta=1e-5)


def test_frozen_leaves_are_those_of_each_algorithm_and_shape():
    trained = []

    def loss(params, x):
        is_frozen = len(x) == 2 and not trained
        return (
            x.sum() * (lax.stop_gradient(params["a"]) if is_frozen else params["a"]) + params["b"]
        )

    params = {"a": jnp.ones(()), "b": jnp.ones(())}
    frozen = dpsgd(loss, optax.sgd(1.0)).frozen
    assert [frozen(params, jnp.ones(size)) for size in (2, 3, 2)] == [{0}, set(), {0}]
    trained.append("a")  # another algorithm is traced anew
    assert dpsgd(loss, optax.sgd(1.0)).frozen(params, jnp.ones(2)) == set()


def test_the_audit_sees_a_frozen_leaf_that_moves():
    sound = dpsgd(loss_fn, ADAMW)

    def planted(state, total, noise_key, scales):
        after, gradient = sound.update(state, total, noise_key, scales)
        moved = jax.tree.map(lambda p: p + gradient["bias"], after.params)
        found = join_leaves(after.dense_params, split_leaves(moved, state.frozen)[1])
        return after._replace(raw_params=found), gradient

    mechanism, layout = Mechanism(SAMPLER, 1.0, 1.0), Layout.choose(SAMPLER, ROWS)
    for update in (sound.update, planted):
        algorithm = sound._replace(update=update)
        state = algorithm.init(start(), mechanism, ROWS)
        checks = flow_checks(algorithm, mechanism, state, ROWS, layout)
        details = [check.detail for check in checks if not check.passed]
        assert any("frozen" in detail for detail in details) == (update is planted), details


@jax.custom_vjp
def half_blind(a, b):
    return a * b


half_blind.defvjp(lambda a, b: (a * b, b), lambda b, g: (g * b, jnp.zeros_like(b)))

LOSSES = {
    "jit": lambda p, x: x * jax.jit(lambda a, b: a * lax.stop_gradient(jnp.exp(b)))(p["a"], p["b"]),
    "checkpoint": lambda p, x: x * jax.checkpoint(lambda a, b: a * jnp.round(b))(p["a"], p["b"]),
    "scan": lambda p, x: lax.scan(
        lambda c, _: (c * p["a"] + lax.stop_gradient(p["b"]), None), x, None, length=3
    )[0],
    "cond": lambda p, x: lax.cond(
        x > 0, lambda: p["a"] * lax.stop_gradient(p["b"]), lambda: lax.stop_gradient(p["b"])
    ),
    "while": lambda p, x: (
        p["a"] * lax.while_loop(lambda c: c < 9.0, lambda c: c + x, lax.stop_gradient(p["b"]))
    ),
    "a rule of its own": lambda p, x: x * half_blind(p["a"], p["b"]),
    "downstream": lambda p, x: p["a"] * lax.stop_gradient(jnp.exp(p["b"]) * x),
    "the loss itself": lambda p, x: p["a"],
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_path_is_found_wherever_it_ends(name):
    loss = LOSSES[name]
    assert frozen_leaves(loss, {"a": 1.0, "b": 2.0}, 1.0) == {1}
    both = frozen_leaves(lambda p, x: loss(p, x) + 0.0 * p["b"], {"a": 1.0, "b": 2.0}, 1.0)
    assert not both


def test_explain_names_frozen_leaves_and_refuses_a_constant_loss():
    shown = explain(loss_fn, start(), jax.tree.map(lambda x: x[0], ROWS))
    assert {line.split("'")[1] for line in shown.splitlines() if " frozen " in line} == FROZEN
    stopped = dpsgd(lambda p, row: loss_fn(lax.stop_gradient(p), row), ADAMW)
    with pytest.raises(ValueError, match="no parameter has a path to the loss"):
        train(stopped, Mechanism(SAMPLER, 1.0, 1.0), start(), ROWS, delta=1e-5)


class Adapted(nnx.Module):
    def __init__(self, rngs):
        self.wrapped = nnx.LoRA(4, 2, 4, base_module=nnx.Linear(4, 4, rngs=rngs), rngs=rngs)
        self.linear = nnx.LoRALinear(4, 4, lora_rank=2, rngs=rngs)
        self.head = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x):
        return self.head(jnp.tanh(self.linear(jnp.tanh(self.wrapped(x)))))[0]


def test_what_is_not_asked_for_has_no_path_to_the_loss():
    adapted, apply = split_module(Adapted(nnx.Rngs(0)), trained=nnx.LoRAParam)
    losses = {
        "bias|^table": (RunLoss.restrict(loss_fn, "bias|^table"), start()),
        "lora_": (lambda params, row: apply(params, row["x"]), adapted),
    }
    row = jax.tree.map(lambda x: x[0], ROWS)
    for pattern, (loss, params) in losses.items():
        asked = [re.search(pattern, name) is not None for name in leaf_names(params)]
        moved = jax.tree.map(lambda x: np.asarray(x) + np.float32(0.1), params)
        gradient = map(np.asarray, jax.tree.leaves(jax.jit(jax.grad(loss))(moved, row)))
        assert [bool(leaf.any()) for leaf in gradient] == asked
        assert frozen_leaves(loss, params, row) == {k for k, own in enumerate(asked) if not own}


def test_filter_without_a_match_is_refused_with_all_names():
    with pytest.raises(ValueError, match=r"trained matches no parameter .* head\.kernel"):
        split_module(Adapted(nnx.Rngs(0)), trained=nnx.PathContains("tail"))
