"""Models on random rows, and compiled steps that own their state."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from dpsgd import (
    Diagnostics,
    LazyTables,
    Mechanism,
    RootKey,
    dpsgd,
)
from dpsgd.core.algorithm import Algorithm, Schedules
from dpsgd.core.state import TrainState, defer_noise, join_leaves, split_leaves
from dpsgd.engine.lazy.look_ups import Row as RowOfTables
from dpsgd.engine.lazy.look_ups import TableLoss
from dpsgd.engine.programs import compiler_options
from dpsgd.engine.step import Watch, block_function, flush_noise
from experiments.benchmarks.timing import Spent, in_turns
from experiments.tasks.clicks.model import functional, pure_functions, shaped
from experiments.tasks.clicks.schema import DISPLAY_ADS, Schema
from experiments.tasks.clicks.sizes import PRESETS, ModelConfig
from samplers import Deterministic
from samplers.batches import IndexBlock

PyTree = Any
LossFn = Callable[[PyTree, PyTree], jax.Array]

SIZES = {
    "1M": ModelConfig(embedding_dim=14, max_buckets=2**11, hidden=(256, 256)),
    "8M": ModelConfig(embedding_dim=14, max_buckets=2**15, hidden=(598, 598, 598)),
    "85M": PRESETS["large"],
}
RESIDENT_ROWS = 2**16
"""Of the data, from which batches are drawn."""
BLOCK_STEPS = 8
NUM_STEPS = 45_000
"""Of the run: an epoch of 46M rows in batches of 1,024."""
BYTES_PER_PARAMETER = 24
"""Parameter and two moments in float32, each read and written once."""
ADAM = optax.adam(1e-3)
SGD = optax.sgd(optax.cosine_decay_schedule(1.0, NUM_STEPS))


def lazy(momentum: float = 0.0) -> LazyTables:
    """Returns how tables are trained."""
    return LazyTables(optax.cosine_decay_schedule(1.0, NUM_STEPS), momentum)


def num_params(params: PyTree) -> int:
    """Returns how many numbers there are."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


# ---------------------------------------------------------------------------------------- programs


class Program:
    """A compiled (state, *inputs) -> (state, ...) that owns its state; called, it moves it on.

    `start` makes the state, which is given away, and every call gets the inputs, and last, where
    steps of an `algorithm` are taken, the schedules of its block, made on the host in its time. Its
    `options` are by default those of training; `compiling` is what it took to trace and compile it.
    """

    def __init__(
        self,
        function: Callable[..., tuple],
        start: Callable[[], PyTree],
        *inputs: PyTree,
        options: Any = None,
        block_steps: int = 1,
        algorithm: Algorithm | None = None,
    ) -> None:
        self._algorithm, self.inputs = algorithm, inputs
        self._done, self._block_steps = 0, block_steps
        self._schedules = Schedules(algorithm.groups, NUM_STEPS) if algorithm else None
        options = compiler_options() if options is None else options
        program = jax.jit(function, donate_argnums=0, compiler_options=options)
        arguments = jax.eval_shape(start), *inputs, *self.known()
        made: list[Any] = []
        self.compiling = Spent.on(lambda: made.append(program.lower(*arguments).compile()))
        self.compiled = made[0]
        self.state = start()

    @property
    def temporary_bytes(self) -> int:
        """What a call needs beside state and inputs."""
        memory: Any = self.compiled.memory_analysis()
        return memory.temp_size_in_bytes

    def known(self) -> tuple[Any, ...]:
        """Returns what the next block is given of its algorithm's schedules."""
        if self._schedules is None:
            return ()
        steps = range(self._done, self._done + self._block_steps)
        return (self._schedules.block_arrays(steps, self._block_steps),)

    def __call__(self) -> None:
        known = self.known()
        self.state, *_ = jax.block_until_ready(self.compiled(self.state, *self.inputs, *known))
        self._done += self._block_steps

    def flush(self) -> None:
        """Draws all pending noise; the steps go on from there."""
        assert self._algorithm is not None
        assert self._schedules is not None
        _, _, noise_key, scales, *_ = self.inputs
        known = self._schedules.flush_arrays(self._done)
        state = flush_noise(self._algorithm, self.state, known, noise_key, scales)
        self.state = jax.block_until_ready(defer_noise(state))


def copies_of(tree: PyTree) -> Callable[[], PyTree]:
    """Returns what makes copies of arrays, each to be given away."""
    return lambda: jax.tree.map(lambda leaf: jnp.array(leaf, leaf.dtype), tree)


def copy_rate(size: int, clock: Callable[[], float] = time.process_time) -> float:
    """Returns bytes a second, read and written, of copies in place of `size` floats."""
    copy = jax.jit(lambda x: x + 1.0, donate_argnums=0)
    cell = [jnp.zeros(size)]

    def ten_times() -> None:
        for _ in range(10):
            cell[0] = copy(cell[0])
        jax.block_until_ready(cell[0])

    return 10 * 8 * size / in_turns({"copy": ten_times}, 5, clock).median("copy")


def one_step(
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    mechanism: Mechanism,
    params: PyTree,
    batch: PyTree,
) -> tuple[Callable[..., tuple[TrainState]], tuple[Any, ...]]:
    """Returns (state, batch, weights, noise_key, scales) -> (state,), a DP step, and its arguments.

    As in the training loop, scales and key are arguments: of a constant stddev XLA would know that
    the noise's loop has one round, unroll it, and make the noise once for each moment.
    """
    algorithm = dpsgd(loss_fn, optimizer)

    def step(state: Any, batch: PyTree, weights: Any, noise_key: Any, scales: Any) -> Any:
        how = {"frozen": frozenset(state.frozen)} if state.frozen else {}
        total, _ = algorithm.clipped_sum(state.params, batch, weights, scales, **how)
        return (algorithm.update(state, total, noise_key, scales)[0],)

    noise_key = jnp.asarray(RootKey.from_insecure_seed(0).noise_key(0))
    weights = jnp.ones(len(jax.tree.leaves(batch)[0]))
    state = algorithm.init(params, mechanism, batch)
    return step, (state, batch, weights, noise_key, mechanism.scales())


def whole_batch(batch_size: int) -> Mechanism:
    """Returns steps of all of so many examples, with noise and clipping norm 1."""
    return Mechanism(Deterministic(batch_size, batch_size), 1.0, 1.0)


def total_loss(loss_fn: LossFn) -> LossFn:
    """Returns the sum of the losses of a batch."""
    return lambda params, batch: jnp.sum(jax.vmap(loss_fn, (None, 0))(params, batch))


# ------------------------------------------------------------------------------------------ models


class Model(NamedTuple):
    """The loss of an example, what makes the parameters, and rows to train on."""

    loss_fn: LossFn
    params: Callable[[], PyTree]
    columns: dict[str, np.ndarray]

    @property
    def num_params(self) -> int:
        """How many parameters it has."""
        return num_params(jax.eval_shape(self.params))


def random_batch(
    size: int, config: ModelConfig, seed: int = 0, schema: Schema = DISPLAY_ADS
) -> dict[str, np.ndarray]:
    """Returns `size` examples of random values, as columns of the store."""
    rng = np.random.default_rng(seed)
    rows, integers = np.array(schema.table_sizes(config.max_buckets)), len(schema.integers)
    return {
        "label": rng.integers(0, 2, size).astype(np.uint8),
        "integers": rng.normal(size=(size, integers)).astype(np.float32),
        "integers_missing": rng.random((size, integers)) < 0.1,
        "categories": rng.integers(0, rows, (size, len(rows))).astype(np.int32),
    }


class Problem(NamedTuple):
    """An initial model, the loss of an example, and a batch of random rows on the device."""

    params: PyTree
    loss_fn: LossFn
    batch: PyTree


def problem(config: ModelConfig, batch_size: int) -> Problem:
    """Returns the click model of this size, initialised by seed 0."""
    params, _, loss_fn = functional(config, DISPLAY_ADS, 0)
    return Problem(params, loss_fn, jax.device_put(random_batch(batch_size, config)))


def clicks(max_buckets: int, hidden: tuple[int, ...] = PRESETS["large"].hidden) -> Model:
    """Returns the click model; beyond 2^20 buckets, the largest columns have so many."""
    schema = DISPLAY_ADS
    if max_buckets > 2**20:
        wide = [max_buckets if count == 2**20 else count for count in schema.buckets]
        schema = dataclasses.replace(schema, buckets=tuple(wide))
    config = dataclasses.replace(PRESETS["large"], max_buckets=max_buckets, hidden=hidden)
    dense = functional(dataclasses.replace(config, max_buckets=1), schema, 0)[0]

    def params() -> PyTree:
        # A table in one pass, and in no other array.
        def filled(shape: Any, leaf: Any) -> Any:
            if shape.shape == leaf.shape:
                return leaf
            numbers = lax.broadcasted_iota(jnp.float32, shape.shape, 0)
            return 0.01 * jnp.sin(numbers + lax.broadcasted_iota(jnp.float32, shape.shape, 1))

        return jax.tree.map(filled, shaped(config, schema)[0], dense)

    rows = random_batch(RESIDENT_ROWS, config, schema=schema)
    return Model(pure_functions(config, schema).loss, params, rows)


DLRM_WIDTH = 128
DLRM_BOTTOM = 13, 512, 256, DLRM_WIDTH
DLRM_TOP = 1024, 1024, 512, 256, 1


def dlrm(rows: int, tables: int) -> Model:
    """Returns the model of LazyDP (arXiv 2404.08847), MLPerf's DLRM, with `tables` of `rows` each.

    An example looks up one row of 128 numbers of each table; its 13 numbers go through 512, 256 and
    128 units, the products of all pairs of the vectors through 1024, 1024, 512 and 256.
    """
    top = tables * (tables + 1) // 2 + DLRM_WIDTH, *DLRM_TOP

    def layers(widths: Sequence[int]) -> list[dict[str, np.ndarray]]:
        rng = np.random.default_rng(0)
        return [
            {
                "kernel": (rng.normal(size=(m, n)) * np.sqrt(2 / m)).astype(np.float32),
                "bias": np.zeros(n, np.float32),
            }
            for m, n in itertools.pairwise(widths)
        ]

    def params() -> dict[str, Any]:
        def table(k: int) -> jax.Array:
            along = (lax.broadcasted_iota(jnp.float32, (rows, DLRM_WIDTH), axis) for axis in (0, 1))
            return 0.01 * jnp.sin(sum(along, jnp.float32(k)))

        every = [table(k) for k in range(tables)]
        return {"tables": every, "bottom": layers(DLRM_BOTTOM), "top": layers(top)}

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
        "integers": rng.normal(size=(RESIDENT_ROWS, DLRM_BOTTOM[0])).astype(np.float32),
        "categories": rng.integers(0, rows, (RESIDENT_ROWS, tables)).astype(np.int32),
    }
    return Model(loss_fn, params, columns)


# --------------------------------------------------------------------------------- blocks of steps


class Steps:
    """Blocks of steps of one model and batch size, on rows that are looked up all alike."""

    def __init__(self, model: Model, batch_size: int, block_steps: int = BLOCK_STEPS) -> None:
        self.model, self.batch_size, self.block_steps = model, batch_size, block_steps
        sampler = Deterministic(batch_size, batch_size, epochs=NUM_STEPS)
        self.mechanism = Mechanism(sampler, 1.0, 1.0)
        shape, rows = (block_steps, batch_size), len(model.columns["label"])
        self._plan = IndexBlock(
            np.random.default_rng(0).integers(0, rows, shape, np.int32),
            np.ones(shape, np.float32),
            np.arange(block_steps + 1, dtype=np.int32),
            np.int32(block_steps),
        )

    def _program(self, block: Callable, start: Callable, *rest: Any, **others: Any) -> Program:
        inputs = jax.device_put((self.model.columns, self._plan, *rest))
        made = jax.jit(start, compiler_options=compiler_options())
        return Program(block, made, *inputs, block_steps=self.block_steps, **others)

    def private(
        self, optimizer: optax.GradientTransformation, tables: LazyTables | None = None
    ) -> Program:
        """Returns DP steps: with lazy tables, or with noise in all parameters."""
        return self.of(dpsgd(self.model.loss_fn, optimizer, tables=tables))

    def plain(self, optimizer: optax.GradientTransformation) -> Program:
        """Returns steps without privacy in the same loop: the mean gradient, and no noise."""
        loss_fn = self.model.loss_fn

        def summed(params, batch, weights, scales):
            def total(params):
                losses = jax.vmap(loss_fn, (None, 0))(params, batch)
                return jnp.sum(jnp.where(weights > 0, losses, 0.0))

            loss, gradient = jax.value_and_grad(total)(params)
            return gradient, Diagnostics(loss, *(jnp.float32(0) for _ in Diagnostics._fields[1:]))

        silent = dataclasses.replace(self.mechanism, noise_multiplier=0.0)
        return self.of(dpsgd(loss_fn, optimizer)._replace(clipped_sum=summed), silent)

    def of(
        self,
        algorithm: Algorithm,
        mechanism: Mechanism | None = None,
        changed: Callable[[Callable], Callable] = lambda block: block,
        options: Any = None,
    ) -> Program:
        """Returns the steps of an algorithm as they are trained, but for what is `changed`.

        By default with noise of 1, and the compiler's options of training.
        """
        model = self.model
        mechanism = self.mechanism if mechanism is None else mechanism

        def start() -> Any:
            return defer_noise(algorithm.init(model.params(), mechanism, model.columns))

        return self._program(
            changed(block_function(algorithm, mechanism.sampler)),
            start,
            jnp.asarray(RootKey.from_insecure_seed(0).noise_key(0)),
            mechanism.scales(),
            Watch.nothing(jax.eval_shape(start).raw_params),
            None,
            algorithm=algorithm,
            options=options,
        )

    def ordinary(self, optimizer: optax.GradientTransformation, tables: LazyTables) -> Program:
        """Returns steps without privacy: of tables by SGD, in the rows that are read.

        Each look-up gets a row of its own, one batched gradient is of these alone, and is added to
        the table where they came from.
        """
        model, batch_size = self.model, self.batch_size
        shapes = jax.eval_shape(model.params)
        example = {k: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for k, x in model.columns.items()}
        loss = TableLoss(model.loss_fn, shapes, example)

        def start() -> TrainState:
            params = model.params()
            return TrainState(
                jnp.int32(0), params, optimizer.init(split_leaves(params, loss.tables)[0])
            )

        def one_step(state: TrainState, batch: PyTree) -> tuple[TrainState, jax.Array]:
            dense, tables_now = split_leaves(state.raw_params, loss.tables)
            names = jax.vmap(loss.rows)(batch)
            numbers, places = {}, {}
            for k in loss.tables:
                paths = [use.path for use in loss.uses(k)]
                numbers[k] = jnp.concatenate([names[path] for path in paths], axis=1)
                ends = np.cumsum([names[path].shape[1] for path in paths])
                for path, end in zip(paths, ends, strict=True):
                    places[path] = jnp.arange(end - names[path].shape[1], end, dtype=jnp.int32)
            rows = {k: table[numbers[k]] for k, table in tables_now.items()}

            def mean(dense: PyTree, rows: dict[int, jax.Array]) -> jax.Array:
                def of_one(rows: dict[int, jax.Array], example: PyTree) -> jax.Array:
                    return loss.loss(join_leaves(dense, rows), RowOfTables(example, places))

                return jnp.sum(jax.vmap(of_one)(rows, batch)) / batch_size

            value, (gradient, of_rows) = jax.value_and_grad(mean, (0, 1))(dense, rows)
            updates, opt_state = optimizer.update(gradient, state.opt_state, dense)
            assert callable(tables.learning_rate)
            rate = tables.learning_rate(state.step)
            moved = {
                k: table.at[numbers[k]].add(-rate * of_rows[k]) for k, table in tables_now.items()
            }
            params = join_leaves(optax.apply_updates(dense, updates), moved)
            return TrainState(state.step + 1, params, opt_state), value

        def block(state: TrainState, data: PyTree, plan: IndexBlock) -> tuple[TrainState, Any]:
            def body(j: jax.Array, carry: Any) -> Any:
                state, losses = carry
                state, value = one_step(state, jax.tree.map(lambda x: x[plan.indices[j]], data))
                return state, losses.at[j].set(value)

            return lax.fori_loop(0, plan.num_steps, body, (state, jnp.zeros(self.block_steps)))

        return self._program(block, start)
