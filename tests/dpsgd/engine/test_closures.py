"""A part that holds rows, or calls the host, is refused before every run."""

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pyarrow
import pytest
from jax import lax
from jax.experimental import io_callback

from dpsgd import LazyTables, Mechanism, dpsgd, public, train, train_blocks, with_rows
from dpsgd.gradients import norms
from dpsgd.gradients.rules import FlatClipping
from samplers import Deterministic, UserPoisson

N, D = 90, 3
RNG = np.random.default_rng(0)
ROWS = RNG.normal(size=(N, D)).astype(np.float32)
PARAMS = {"w": np.zeros(D, np.float32), "b": np.zeros((), np.float32)}
MECHANISM = Mechanism(Deterministic(N, 9), 0.0, 1.0)  # whose program is traced fastest


def trained(loss=None, optimizer=None, mechanism=MECHANISM):
    """Trains on rows of the sampler's number, without an audit."""
    rows = RNG.normal(size=(mechanism.sampler.num_examples, D)).astype(np.float32)
    algorithm = dpsgd(loss or sound_loss, optimizer or optax.sgd(0.1))
    return train(algorithm, mechanism, PARAMS, rows, audit=False)


def sound_loss(params, example):
    return jnp.tanh(jnp.dot(params["w"], example) + params["b"])


def in_derivative(array):
    """Returns a function whose derivative alone holds an array."""

    @jax.custom_vjp
    def identity(x):
        return x

    identity.defvjp(lambda x: (x, None), lambda _, g: (g + jnp.asarray(array).sum(),))
    return identity


class Held:
    """A callable that holds an array."""

    def __init__(self, array):
        self.array = array

    def __call__(self, x):
        return x + float(np.sum(self.array))


def uses_a_global(x):
    return x + float(ROWS.sum())


def uses_a_global_within(x):
    def inner():
        return float(ROWS[:40].sum())

    return x + inner()


class Calls:
    """A callable, and a method, of which a global or an attribute is sliced on the host."""

    def __init__(self, array=None):
        self.array = array

    def __call__(self, x):
        return x + float(ROWS[:40].sum())

    def method(self, x):
        return x + sum(float(self.array[:40].sum()) for _ in range(1))


HOLDERS = {
    "nested global": lambda array: uses_a_global_within,
    "call of an object": lambda array: Calls(),
    "method": lambda array: Calls(array.astype(np.float64)).method,
    "closure": lambda array: lambda x: x + jnp.asarray(array).sum(),
    "partial": lambda array: functools.partial(lambda a, x: x + a["k"][0].sum(), {"k": [array]}),
    "jit": lambda array: jax.jit(lambda x: x + jnp.asarray(array).sum()),
    "nested": lambda array: jax.jit(lambda x: jax.jit(lambda y: y + jnp.asarray(array).mean())(x)),
    "scan": lambda array: (
        lambda x: lax.scan(lambda c, _: (c + jnp.asarray(array).sum(), None), x, None, 2)[0]
    ),
    "branch": lambda array: (
        lambda x: lax.cond(jnp.sum(x) > 0, lambda y: y + jnp.asarray(array).sum(), lambda y: y, x)
    ),
    "numpy": lambda array: lambda x: x + np.asarray(array).mean(),
    "default": lambda array: lambda x, held=array: x + np.sum(held),
    "keyword default": lambda array: lambda x, *, held=array: x + np.sum(held),
    "keyword of a partial": lambda array: functools.partial(lambda x, a: x + np.sum(a), a=array),
    "object": lambda array: Held(array),
    "global": lambda array: uses_a_global,
    "gather": lambda array: lambda x: x + jnp.asarray(array).ravel()[(x > 0).astype(int).sum()],
    "derivative": in_derivative,
}
ARRAYS = {
    "rows": ROWS,
    "labels": ROWS[:, 0],
    "integers": (100 * ROWS[:, 0]).astype(np.int32),
    "float64": ROWS.astype(np.float64),
    "one less": ROWS[1:],
    "one more": np.concatenate([ROWS, ROWS[:1]]),
    "transposed": ROWS.T,
    "middle axis": ROWS.T[:, :, None],
    "gram": ROWS @ ROWS.T,
}


def optimizer_of(hold):
    return optax.stateless(lambda updates, params: jax.tree.map(hold, updates))


CASES = [(h, "rows") for h in HOLDERS] + [("closure", a) for a in ARRAYS if a != "rows"]


@pytest.mark.short("*-rows", "closure-integers", "closure-one*", "closure-transposed")
@pytest.mark.parametrize(("holder", "array"), CASES, ids=map("-".join, CASES))
def test_rows_that_a_loss_or_an_optimizer_holds_are_refused(holder, array):
    hold = HOLDERS[holder](ARRAYS[array])
    with pytest.raises(ValueError, match=r"holds .* in a closure.*dpsgd\.public") as of_loss:
        trained(loss=lambda params, example: hold(sound_loss(params, example)))
    shape = str(list(ARRAYS[array].shape))
    assert shape in str(of_loss.value)
    assert re.search(rf"\((a?array|ROWS|held|an argument.*|.*{__name__}.*)\)", str(of_loss.value))
    if holder == "derivative":
        return  # an optimizer takes none
    with pytest.raises(ValueError, match=r"the optimizer holds .* in a closure"):
        trained(optimizer=optimizer_of(hold))


TABLES = {
    "list": ROWS[:, 0].tolist(),
    "list of rows": ROWS.tolist(),
    "dict": dict(enumerate(ROWS[:, 0].tolist())),
    "buffer": memoryview(ROWS),
    "data frame": pyarrow.table({"x": ROWS[:, 0]})["x"],
}


class OfTable:
    """An object whose method computes with a table on the host."""

    def __init__(self, table):
        self.table = table

    def loss(self, params, example):
        return sound_loss(params, example) * len(self.table)


@pytest.mark.short("list", "data frame")
@pytest.mark.parametrize("kind", TABLES)
def test_rows_in_lists_buffers_and_data_frames_are_refused(kind):
    table = TABLES[kind]
    closure = lambda params, x: sound_loss(params, x) * len(table)  # noqa: E731
    for loss in (closure, OfTable(table).loss):
        with pytest.raises(ValueError, match=r"the loss holds \w+\[90(, 3)?\] in a closure"):
            trained(loss)


@dataclass(frozen=True, eq=False)
class FieldRule(FlatClipping):
    """A rule with an array as a field, of which factors are computed on the host."""

    rows: np.ndarray = field(default_factory=lambda: ROWS)

    def factors(self, group_norms, l2_clip_norm, counts):
        share = 0.5 + 0.4 * float(np.tanh(self.rows.mean()))
        return [norms.clip_factor(group_norms[0], l2_clip_norm, counts, share=share)]


def scaled_by_rows(algorithm, held=ROWS):
    """Returns the algorithm with an own clipped sum, scaled by the mean of rows on the host."""

    def clipped_sum(*batch, **how):
        total, diagnostics = algorithm.clipped_sum(*batch, **how)
        return jax.tree.map(lambda x: x * float(np.tanh(held.mean())), total), diagnostics

    return algorithm._replace(clipped_sum=clipped_sum)


def moved_by_rows(algorithm, held=ROWS):
    """Returns the algorithm with an own update that adds the mean of rows, computed on the host."""

    def update(*step):
        state, gradient = algorithm.update(*step)
        moved = jax.tree.map(lambda x: x + float(held.mean()), state.raw_params)
        return state._replace(raw_params=moved), gradient

    return algorithm._replace(update=update)


SOUND_ALGORITHM = dpsgd(sound_loss, optax.sgd(0.1))
PARTS = {
    "the clipping rule": dpsgd(sound_loss, optax.sgd(0.1), clipping=FieldRule()),
    "the clipped sum": scaled_by_rows(SOUND_ALGORITHM),
    "the update": moved_by_rows(SOUND_ALGORITHM),
}


@pytest.mark.parametrize("part", PARTS)
def test_rows_that_another_part_reads_on_the_host_are_refused(part):
    with pytest.raises(ValueError, match=rf"{part} holds float32\[90, 3\] in a closure"):
        train(PARTS[part], MECHANISM, PARAMS, ROWS, audit=False)


def test_rows_that_step_sizes_of_tables_read_are_refused():
    loss = with_rows(
        lambda example: {"b": jnp.int32(0)},
        lambda params, rows, example: sound_loss(params | {"b": rows["b"].sum()}, example),
    )
    tables = LazyTables(lambda step: 0.1 + float(np.tanh(ROWS.mean())))
    algorithm, mechanism = (
        dpsgd(loss, optax.sgd(0.1), tables=tables),
        Mechanism(MECHANISM.sampler, 1.0, 1.0),
    )
    with pytest.raises(ValueError, match=r"the optimizer of tables holds float32\[90, 3\]"):
        train(algorithm, mechanism, PARAMS | {"b": np.zeros((2, 1))}, ROWS, audit=False)


def test_rows_in_the_first_state_of_an_optimizer_are_refused():
    kept = optax.GradientTransformation(
        lambda params: jnp.asarray(ROWS), lambda g, s, p=None: (jax.tree.map(jnp.ones_like, g), s)
    )
    with pytest.raises(ValueError, match="the optimizer holds"):
        trained(optimizer=kept)


@pytest.mark.parametrize(
    ("sampler", "size"),
    [(Deterministic(9, 3), 9), (UserPoisson(N, 9, max_contributions=5, num_users=30), 30)],
)
def test_values_of_few_rows_or_of_units_are_refused(sampler, size):
    hold = HOLDERS["numpy"](RNG.normal(size=size).astype(np.float32))
    algorithm = dpsgd(lambda params, example: hold(sound_loss(params, example)), optax.sgd(0.1))
    mechanism, rows = Mechanism(sampler, 1.0, 1.0), ROWS[: sampler.num_examples]
    state = algorithm.init(PARAMS, mechanism, rows)
    with pytest.raises(ValueError, match="rows or units"):
        next(train_blocks(algorithm, mechanism, state, rows))


def test_a_loop_of_blocks_refuses_held_rows_too():
    algorithm = dpsgd(sound_loss, optimizer_of(HOLDERS["closure"](ROWS)))
    mechanism = Mechanism(MECHANISM.sampler, 1.0, 1.0)
    state = algorithm.init(PARAMS, mechanism, ROWS)
    with pytest.raises(ValueError, match="the optimizer holds"):
        next(train_blocks(algorithm, mechanism, state, ROWS))


def like(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def ordered(x):
    io_callback(lambda x: None, None, x, ordered=True)
    return x


def printed(x):
    jax.debug.print("{}", x)
    return x


def shown(x):
    jax.debug.callback(lambda x: None, x)
    return x


HOST = {
    "pure_callback": lambda x: jax.pure_callback(lambda x: np.asarray(x), like(x), x),
    "io_callback": lambda x: io_callback(lambda x: np.asarray(x), like(x), x),
    "ordered io_callback": ordered,
    "debug_callback": shown,
    "debug_print": printed,
    "ffi_call": lambda x: jax.ffi.ffi_call("nowhere", like(x))(x),
    "pure_callback in jit": lambda x: jax.jit(HOST["pure_callback"])(x),
    "pure_callback in a loop": lambda x: lax.fori_loop(0, 2, lambda _, y: HOST["ffi_call"](y), x),
    "callback in a branch": lambda x: lax.cond(jnp.sum(x) > 0, HOST["io_callback"], jnp.abs, x),
}


@pytest.mark.short("*-update", "pure_callback-init")
@pytest.mark.parametrize("where", ["init", "update"])
@pytest.mark.parametrize("kind", HOST)
def test_an_optimizer_that_calls_the_host_is_refused(kind, where):
    call = functools.partial(jax.tree.map, HOST[kind])
    calling = {
        "init": optax.GradientTransformation(call, lambda g, s, p=None: (g, s)),
        "update": optax.stateless(lambda updates, params: call(updates)),
    }[where]
    with pytest.raises(ValueError, match=r"the optimizer uses \w+ at .*the host or foreign code"):
        trained(optimizer=calling)


@pytest.mark.parametrize("part", ["update", "clipped_sum"])
def test_own_sums_and_updates_that_call_the_host_are_refused(part):
    sound = getattr(SOUND_ALGORITHM, part)

    def calling(*of, **how):
        first, second = sound(*of, **how)
        return jax.tree.map(HOST["pure_callback"], first), second

    with pytest.raises(ValueError, match="uses pure_callback"):
        train(SOUND_ALGORITHM._replace(**{part: calling}), MECHANISM, PARAMS, ROWS)


@dataclass(frozen=True)
class EqualFields:
    """A function of an optimizer; its equality leaves out what it computes."""

    function: Callable = field(compare=False)

    def __call__(self, params, *state):
        return jax.tree.map(self.function, params), *state[:1]


def test_host_call_of_an_optimizer_is_refused_despite_equality():
    sound = {"init": EqualFields(jnp.abs), "update": EqualFields(jnp.abs)}
    trained(optimizer=optax.GradientTransformation(**sound))
    for place in sound:
        calling = {**sound, place: EqualFields(HOST["pure_callback"])}
        with pytest.raises(ValueError, match="the optimizer uses pure_callback"):
            trained(optimizer=optax.GradientTransformation(**calling))


PUBLIC = public(RNG.normal(size=(N, D)))
SOUND = {
    "frozen weights of another width": np.ones((2 * N, D)) + RNG.normal(size=(2 * N, D)),
    "booleans alike": np.ones(N, bool),
    "a handful": np.arange(8.0),
    "declared": PUBLIC,
    "two more": RNG.normal(size=(N + 2, D)),
}


def test_sound_arrays_are_held():
    def hold(x):
        return x + sum(jnp.asarray(array).sum() for array in SOUND.values())

    trained(lambda params, example: hold(sound_loss(params, example)), optimizer_of(hold))


@pytest.mark.short("3")
@pytest.mark.parametrize("n", [D, D + 1, 12])
def test_optimizers_of_optax_train_on_any_number_of_rows(n):
    kinds = optax.adam, optax.adamw, optax.lion, optax.adafactor, optax.lamb
    chained = optax.chain(*(kind(0.1) for kind in kinds))
    trained(optimizer=chained, mechanism=Mechanism(Deterministic(n, 1), 1.0, 1.0))


def test_an_array_computed_from_a_declared_one_is_not_declared():
    hold = HOLDERS["closure"](2 * PUBLIC)
    with pytest.raises(ValueError, match="in a closure"):
        trained(lambda params, example: hold(sound_loss(params, example)))
