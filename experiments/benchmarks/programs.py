"""Models on random rows, and compiled blocks of their training steps that own their state."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from dpsgd import LazyTables, Mechanism, clipped_grad, dpsgd
from dpsgd.core.state import TrainState, defer_noise, join_leaves, split_leaves
from dpsgd.engine.algorithm import Algorithm
from dpsgd.engine.lazy.group import find_tables
from dpsgd.engine.placement import Placement
from dpsgd.engine.programs import compiler_options
from dpsgd.engine.step import BlockInputs, Watch, block_function, flush_noise
from dpsgd.gradients.frozen import leaf_names
from dpsgd.gradients.rows import LocatedExample, declared_rows
from dpsgd.noise.keys import RootKey
from experiments.tasks.clicks.model import pure_functions, shaped
from experiments.tasks.clicks.schema import DISPLAY_ADS
from experiments.tasks.clicks.sizes import PRESETS
from samplers import Deterministic
from samplers.batches import IndexBlock

PyTree = Any
LossFn = Callable[[PyTree, PyTree], jax.Array]

RESIDENT_ROWS = 2**16
"""Number of rows of the data."""


def num_params(params: PyTree) -> int:
    """Returns the number of parameters."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


class Model(NamedTuple):
    """Per-example loss, function that makes the parameters, and training rows."""

    loss_fn: LossFn
    params: Callable[[], PyTree]
    columns: dict[str, np.ndarray]

    @property
    def num_params(self) -> int:
        """Number of parameters."""
        return num_params(jax.eval_shape(self.params))

    def batch(self, size: int) -> PyTree:
        """Returns the first rows, on the device."""
        return jax.device_put({name: column[:size] for name, column in self.columns.items()})


def clicks(
    table_rows: int, hidden: Sequence[int], interaction: Literal["none", "dot", "cross"] = "none"
) -> Model:
    """Returns the click model on random rows.

    Args:
      table_rows: Largest number of rows of a table; above 2^20 it applies to the tables of the
        largest columns only.
      hidden: Widths of the layers.
      interaction: Interaction of the embeddings.
    """
    schema = DISPLAY_ADS
    if table_rows > 2**20:
        wide = [table_rows if count == 2**20 else count for count in schema.buckets]
        schema = dataclasses.replace(schema, buckets=tuple(wide))
    config = dataclasses.replace(
        PRESETS["large"],
        max_buckets=table_rows,
        hidden=tuple(hidden),
        interaction=interaction,
    )
    dense = pure_functions(dataclasses.replace(config, max_buckets=1), schema).init(0)

    def params() -> PyTree:
        """Makes the parameters, each table in one pass without another array."""

        def filled(shape: Any, leaf: Any) -> Any:
            """Returns the initial value of one parameter."""
            if shape.shape == leaf.shape:
                return leaf
            numbers = lax.broadcasted_iota(jnp.float32, shape.shape, 0)
            return 0.01 * jnp.sin(numbers + lax.broadcasted_iota(jnp.float32, shape.shape, 1))

        return jax.tree.map(filled, shaped(config, schema)[0], dense)

    rng = np.random.default_rng(0)
    rows, integers = np.array(schema.table_sizes(table_rows)), len(schema.integers)
    columns: dict[str, np.ndarray] = {
        "label": rng.integers(0, 2, RESIDENT_ROWS).astype(np.uint8),
        "integers": rng.normal(size=(RESIDENT_ROWS, integers)).astype(np.float32),
        "integers_missing": rng.random((RESIDENT_ROWS, integers)) < 0.1,
        "categories": rng.integers(0, rows, (RESIDENT_ROWS, len(rows))).astype(np.int32),
    }
    return Model(pure_functions(config, schema).loss, params, columns)


NUM_STEPS = 45_000
"""Steps of the run: an epoch of 46M rows in batches of 1,024."""
ADAM = optax.adam(1e-3)
SGD = optax.sgd(optax.cosine_decay_schedule(1.0, NUM_STEPS))


def lazy(momentum: float = 0.0) -> LazyTables:
    """Returns the training of tables with deferred noise."""
    return LazyTables(optax.cosine_decay_schedule(1.0, NUM_STEPS), momentum)


def clock() -> Callable[[], float]:
    """Returns the clock of CPU time on CPUs, else wall-clock time."""
    return time.process_time if jax.default_backend() == "cpu" else time.perf_counter


class Program:
    """Compiled (state, *inputs) -> (state, ...) that owns and advances its state.

    Args:
      function: Function to compile; its state is donated.
      start: Function that makes the first state.
      *inputs: Further arguments of every call.
      block_steps: Steps of a call.
      algorithm: Algorithm of the steps, whose only input is `BlockInputs`.
    """

    def __init__(
        self,
        function: Callable[..., tuple],
        start: Callable[[], PyTree],
        *inputs: PyTree,
        block_steps: int = 1,
        algorithm: Algorithm | None = None,
    ) -> None:
        self._algorithm, self._inputs = algorithm, inputs
        self._done, self._block_steps = 0, block_steps
        self._laws = algorithm and algorithm.gap_laws(NUM_STEPS)
        program = jax.jit(function, donate_argnums=0, compiler_options=compiler_options())
        arguments = jax.eval_shape(start), *self._scheduled()
        self._compiled: Any = program.lower(*arguments).compile()
        self._state = start()

    @property
    def lazy(self) -> bool:
        """True if there is pending noise to flush."""
        return self._laws is not None

    @property
    def temporary_bytes(self) -> int:
        """Memory of a call beside state and inputs, in bytes."""
        return self._compiled.memory_analysis().temp_size_in_bytes

    def _scheduled(self) -> tuple[Any, ...]:
        """Returns the inputs of the next block, with the laws of lazy tables."""
        if self._laws is None:
            return self._inputs
        steps = range(self._done, self._done + self._block_steps)
        laws = self._laws.block_arrays(steps, self._block_steps)
        return (self._inputs[0]._replace(laws=laws),)

    def __call__(self) -> None:
        arguments = self._state, *self._scheduled()
        self._state, *_ = jax.block_until_ready(self._compiled(*arguments))
        self._done += self._block_steps

    def flush(self) -> None:
        """Adds all pending noise to the state."""
        assert self._algorithm is not None
        assert self._laws is not None
        inputs, laws = self._inputs[0], self._laws.flush_arrays(self._done)
        arguments = self._state, laws, inputs.noise_key, inputs.scales
        state = flush_noise(self._algorithm, arguments, Placement.one())
        self._state = jax.block_until_ready(defer_noise(state))


class Steps:
    """Blocks of steps of one model and batch size, on uniformly drawn rows."""

    def __init__(self, model: Model, batch_size: int, block_steps: int) -> None:
        self.model, self.batch_size, self.block_steps = model, batch_size, block_steps
        shape, rows = (block_steps, batch_size), len(model.columns["label"])
        self._plan = IndexBlock(
            np.random.default_rng(0).integers(0, rows, shape, np.int32),
            np.ones(shape, np.float32),
            np.arange(block_steps + 1, dtype=np.int32),
            np.int32(block_steps),
        )

    def program(self, kind: str) -> Program:
        """Returns the program of a key of `KINDS`."""
        return KINDS[kind](self)

    def private(
        self, optimizer: optax.GradientTransformation, tables: LazyTables | None = None
    ) -> Program:
        """Returns the program of DP steps.

        Args:
          optimizer: Optimizer of the parameters, without tables if `tables` is given.
          tables: Settings of lazy tables; None for noise in all parameters.
        """
        algorithm = dpsgd(self.model.loss_fn, optimizer, tables=tables)
        sampler = Deterministic(self.batch_size, self.batch_size, epochs=NUM_STEPS)
        mechanism = Mechanism(sampler, 1.0, 1.0)

        def start() -> Any:
            """Returns the first state."""
            return defer_noise(algorithm.init(self.model.params(), mechanism, self.model.columns))

        key = jnp.asarray(RootKey.from_insecure_seed(0).noise_key(0))
        watch = Watch.nothing(jax.eval_shape(start).raw_params)
        inputs = BlockInputs(self.model.columns, self._plan, key, mechanism.scales(), watch)
        return self._block(block_function(algorithm, sampler), start, inputs, algorithm=algorithm)

    def plain(self, optimizer: optax.GradientTransformation) -> Program:
        """Returns the program of steps without privacy."""

        def start() -> TrainState:
            """Returns the first state."""
            params = self.model.params()
            return TrainState(jnp.int32(0), params, optimizer.init(params))

        def one_step(state: TrainState, batch: PyTree) -> TrainState:
            """Returns the state after a step by the mean gradient."""

            def mean(params: PyTree) -> jax.Array:
                """Returns the mean loss of the batch."""
                return jnp.mean(jax.vmap(self.model.loss_fn, (None, 0))(params, batch))

            gradient = jax.grad(mean)(state.raw_params)
            updates, moments = optimizer.update(gradient, state.opt_state, state.raw_params)
            params = optax.apply_updates(state.raw_params, updates)
            return TrainState(state.step + 1, params, moments)

        return self._looped(one_step, start)

    def _looped(self, one_step: Callable[..., TrainState], start: Callable) -> Program:
        """Returns a block of steps on the planned batches."""

        def block(state: TrainState, data: PyTree, plan: IndexBlock) -> tuple[TrainState]:
            """Returns the state after a block of steps."""

            def body(j: jax.Array, state: TrainState) -> TrainState:
                """Returns the state after the block's step `j`."""
                return one_step(state, jax.tree.map(lambda x: x[plan.indices[j]], data))

            return (lax.fori_loop(0, plan.num_steps, body, state),)

        return self._block(block, start, self.model.columns, self._plan)

    def _block(self, block: Callable, start: Callable, *inputs: Any, **options: Any) -> Program:
        start_program = jax.jit(start, compiler_options=compiler_options())
        inputs = jax.device_put(inputs)
        return Program(block, start_program, *inputs, block_steps=self.block_steps, **options)

    def gradient(self, clipped: bool) -> Program:
        """Returns the program of one batch's gradient sum."""
        loss_fn, weights = self.model.loss_fn, jnp.ones(self.batch_size)

        def total(params: PyTree, batch: PyTree) -> jax.Array:
            """Returns the summed loss of the batch."""
            return jnp.sum(jax.vmap(loss_fn, (None, 0))(params, batch))

        def function(params: PyTree, batch: PyTree) -> tuple:
            """Returns the parameters and the gradient sum."""
            if clipped:
                return params, clipped_grad(loss_fn, l2_clip_norm=1.0)(params, batch, weights)[0]
            return params, jax.grad(total)(params, batch)

        return Program(function, jax.jit(self.model.params), self.model.batch(self.batch_size))

    def sparse(self, optimizer: optax.GradientTransformation, tables: LazyTables) -> Program:
        """Returns the program of sparse steps without privacy.

        Tables are trained by SGD in the rows that are read: one batched gradient of the looked-up
        rows alone is added to the tables.

        Args:
          optimizer: Optimizer of the parameters that are no tables.
          tables: Settings of the tables, whose learning rate is used.
        """
        model, batch_size = self.model, self.batch_size
        shapes = jax.eval_shape(model.params)
        example = {k: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for k, x in model.columns.items()}
        table_look_ups, names = find_tables(model.loss_fn, shapes, example), leaf_names(shapes)
        declared = declared_rows(model.loss_fn)
        assert declared is not None

        def start() -> TrainState:
            """Returns the first state."""
            params = model.params()
            return TrainState(
                jnp.int32(0), params, optimizer.init(split_leaves(params, table_look_ups)[0])
            )

        def one_step(state: TrainState, batch: PyTree) -> TrainState:
            """Returns the state after a sparse step."""
            dense, tables_now = split_leaves(state.raw_params, table_look_ups)
            read = jax.vmap(lambda example: declared.places(shapes, example))(batch)
            numbers = {k: read[names[k]].reshape(batch_size, -1) for k in table_look_ups}
            places = {
                names[k]: jnp.arange(table_look_ups[k], dtype=jnp.int32).reshape(
                    read[names[k]].shape[1:]
                )
                for k in table_look_ups
            }
            rows = {k: table[numbers[k]] for k, table in tables_now.items()}

            def mean(dense: PyTree, rows: dict[int, jax.Array]) -> jax.Array:
                def of_one(rows: dict[int, jax.Array], example: PyTree) -> jax.Array:
                    return model.loss_fn(join_leaves(dense, rows), LocatedExample(example, places))

                return jnp.sum(jax.vmap(of_one)(rows, batch)) / batch_size

            gradient, of_rows = jax.grad(mean, (0, 1))(dense, rows)
            updates, opt_state = optimizer.update(gradient, state.opt_state, dense)
            assert callable(tables.learning_rate)
            rate = tables.learning_rate(state.step)
            moved = {
                k: table.at[numbers[k]].add(-rate * of_rows[k]) for k, table in tables_now.items()
            }
            params = join_leaves(optax.apply_updates(dense, updates), moved)
            return TrainState(state.step + 1, params, opt_state)

        return self._looped(one_step, start)


KINDS: dict[str, Callable[[Steps], Program]] = {
    "ordinary step": lambda steps: steps.plain(ADAM),
    "step without privacy, tables by sparse SGD": lambda steps: steps.sparse(ADAM, lazy()),
    "DP step": lambda steps: steps.private(ADAM),
    "DP step, all by SGD": lambda steps: steps.private(SGD),
    "DP step, tables lazy by SGD": lambda steps: steps.private(ADAM, lazy()),
    "DP step, tables lazy by momentum 0.9": lambda steps: steps.private(ADAM, lazy(0.9)),
    "gradient": lambda steps: steps.gradient(clipped=False),
    "clipped gradient": lambda steps: steps.gradient(clipped=True),
}
"""Kinds of steps, and of their parts, by name."""
