"""Steps with lazy tables, with dense noise and without privacy, as programs that take turns.

A program is a block of steps, as in training, on batches of random rows: all rows of a table alike,
so that a batch reads as many different ones as it can. That of lazy tables is given the laws of its
gaps by the host, whose time counts.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from dpsgd import Algorithm, LazyTables, Mechanism, RootKey, TrainState, dpsgd
from dpsgd.core.algorithm import Schedules
from dpsgd.core.state import joined, opened, parted
from dpsgd.engine.lazy.look_ups import Row as RowOfTables
from dpsgd.engine.lazy.look_ups import TableLoss
from dpsgd.engine.programs import compiler_options
from dpsgd.engine.step import Watch, block_function, flushed
from experiments.benchmarks.timing import Series
from experiments.tasks.clicks.model import functional, pure_functions, shaped
from experiments.tasks.clicks.schema import DISPLAY_ADS, Schema
from experiments.tasks.clicks.sizes import PRESETS
from samplers import Deterministic, IndexBlock

PyTree = Any

RESIDENT_ROWS = 2**16
"""Of the data, from which batches are drawn."""
BLOCK_STEPS = 8
NUM_STEPS = 45_000
"""Of the run: an epoch of 46M rows in batches of 1,024."""
ADAM = optax.adam(1e-3)
SGD = optax.sgd(optax.cosine_decay_schedule(1.0, NUM_STEPS))


def lazy(momentum: float = 0.0) -> LazyTables:
    """Returns how tables are trained."""
    return LazyTables(optax.cosine_decay_schedule(1.0, NUM_STEPS), momentum)


def step_seconds(blocks: Series, name: str, block_steps: int = BLOCK_STEPS) -> float:
    """Returns the seconds of a step."""
    return blocks.median(name) / block_steps


class Model(NamedTuple):
    """What is trained, and rows to train it on."""

    loss_fn: Callable[[PyTree, PyTree], jax.Array]
    params: Callable[[], PyTree]
    """Makes the parameters."""
    columns: dict[str, np.ndarray]

    @property
    def num_params(self) -> int:
        """How many parameters it has."""
        return sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(self.params)))


def clicks(max_buckets: int, hidden: tuple[int, ...] = PRESETS["paper"].hidden) -> Model:
    """Returns the papers' click model.

    Args:
      max_buckets: Of a column, at most. Beyond 2^20, all that the papers have, the columns with
        most values have so many.
      hidden: Units of each dense layer.
    """
    schema = DISPLAY_ADS
    if max_buckets > 2**20:
        wide = [max_buckets if count == 2**20 else count for count in schema.buckets]
        schema = dataclasses.replace(schema, buckets=tuple(wide))
    config = dataclasses.replace(PRESETS["paper"], max_buckets=max_buckets, hidden=hidden)
    dense = functional(dataclasses.replace(config, max_buckets=1), schema, 0)[0]

    def params() -> PyTree:
        # A table in one pass, and in no other array.
        def filled(shape: Any, leaf: Any) -> Any:
            if shape.shape == leaf.shape:
                return leaf
            numbers = lax.broadcasted_iota(jnp.float32, shape.shape, 0)
            return 0.01 * jnp.sin(numbers + lax.broadcasted_iota(jnp.float32, shape.shape, 1))

        return jax.tree.map(filled, shaped(config, schema)[0], dense)

    return Model(pure_functions(config, schema).loss, params, _columns(schema, max_buckets))


def _columns(schema: Schema, max_buckets: int) -> dict[str, np.ndarray]:
    rng, sizes = np.random.default_rng(0), schema.table_sizes(max_buckets)
    shape = RESIDENT_ROWS, len(schema.integers)
    return {
        "label": rng.integers(0, 2, RESIDENT_ROWS).astype(np.uint8),
        "integers": rng.normal(size=shape).astype(np.float32),
        "integers_missing": rng.random(shape) < 0.1,
        "categories": rng.integers(0, sizes, (RESIDENT_ROWS, len(sizes))).astype(np.int32),
    }


class Blocks:
    """A compiled block of steps that owns its state; called, it takes all of them.

    Args:
      block: (state, data, plan, ...) -> (state, ...).
      state: Makes the state.
      rest: What else the block is called with.
      block_steps: Of the block.
      algorithm: Whose parameter groups have a schedule, if one has.

    Attributes:
      compiled: The block.
      compile_seconds: Of CPU time, to trace and compile it.
    """

    def __init__(
        self,
        block: Callable[..., Any],
        state: Callable[[], PyTree],
        rest: tuple[Any, ...],
        block_steps: int,
        algorithm: Algorithm | None = None,
    ) -> None:
        self._algorithm, self._done, self._rest, self._block_steps = algorithm, 0, rest, block_steps
        self._schedules = Schedules(algorithm.groups, NUM_STEPS) if algorithm else None
        options = compiler_options()
        program = jax.jit(block, donate_argnums=0, compiler_options=options)
        begin = time.process_time()
        self.compiled = program.lower(jax.eval_shape(state), *rest, *self._known()).compile()
        self.compile_seconds = time.process_time() - begin
        self.state = jax.jit(state, compiler_options=options)()

    def _known(self) -> tuple[Any, ...]:
        if self._schedules is None:
            return ()
        steps = range(self._done, self._done + self._block_steps)
        return (self._schedules.of(steps, self._block_steps),)

    def __call__(self) -> None:
        known = self._known()
        self.state, *_ = jax.block_until_ready(self.compiled(self.state, *self._rest, *known))
        self._done += self._block_steps

    def flush(self) -> None:
        """Draws all pending noise; the steps go on from there."""
        assert self._algorithm is not None
        assert self._schedules is not None
        _, _, noise_key, scales, *_ = self._rest
        known = self._schedules.after(self._done)
        state = flushed(self._algorithm, self.state, known, noise_key, scales)
        self.state = jax.block_until_ready(opened(state))


class Setting:
    """What the programs of one model and batch size have in common.

    Args:
      model: That is trained.
      batch_size: Examples of a step.
      block_steps: Steps of a block.
    """

    def __init__(self, model: Model, batch_size: int, block_steps: int = BLOCK_STEPS) -> None:
        self.model, self.batch_size, self.block_steps = model, batch_size, block_steps
        sampler = Deterministic(batch_size, batch_size, epochs=NUM_STEPS)
        self.mechanism = Mechanism(sampler, 1.0, 1.0)
        shape = block_steps, batch_size
        self._plan = IndexBlock(
            np.random.default_rng(0).integers(0, RESIDENT_ROWS, shape, np.int32),
            np.ones(shape, np.float32),
            np.arange(block_steps + 1, dtype=np.int32),
            np.int32(block_steps),
        )

    def private(self, optimizer: optax.GradientTransformation, tables: LazyTables | None = None):
        """Returns blocks of DP steps: with lazy tables, or with noise in all parameters."""
        algorithm = dpsgd(self.model.loss_fn, optimizer, tables=tables)
        noise_key = jnp.asarray(self.mechanism.noise_key(RootKey.from_insecure_seed(0), 0))
        watch = Watch.nothing(jax.eval_shape(lambda: self._start(algorithm)).raw_params)
        rest = self.model.columns, self._plan, noise_key, self.mechanism.scales(), watch
        return Blocks(
            block_function(algorithm, self.mechanism.sampler),
            lambda: self._start(algorithm),
            (*jax.device_put(rest), None),
            self.block_steps,
            algorithm,
        )

    def _start(self, algorithm: Algorithm) -> Any:
        return opened(algorithm.init(self.model.params(), self.mechanism, self.model.columns))

    def ordinary(self, optimizer: optax.GradientTransformation, tables: LazyTables) -> Blocks:
        """Returns blocks of steps without privacy: of tables by SGD, in the rows that are read.

        Each look-up gets a row of its own, one batched gradient is of these alone, and is added to
        the table where they came from.
        """
        model, batch_size = self.model, self.batch_size
        shapes = jax.eval_shape(model.params)
        example = {k: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for k, x in model.columns.items()}
        loss = TableLoss(model.loss_fn, shapes, example)

        def start() -> TrainState:
            params = model.params()
            return TrainState(jnp.int32(0), params, optimizer.init(parted(params, loss.tables)[0]))

        def one_step(state: TrainState, batch: PyTree) -> tuple[TrainState, jax.Array]:
            dense, tables_now = parted(state.raw_params, loss.tables)
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
                    return loss.loss(joined(dense, rows), RowOfTables(example, places))

                return jnp.sum(jax.vmap(of_one)(rows, batch)) / batch_size

            value, (gradient, of_rows) = jax.value_and_grad(mean, (0, 1))(dense, rows)
            updates, opt_state = optimizer.update(gradient, state.opt_state, dense)
            assert callable(tables.learning_rate)
            rate = tables.learning_rate(state.step)
            moved = {
                k: table.at[numbers[k]].add(-rate * of_rows[k]) for k, table in tables_now.items()
            }
            params = joined(optax.apply_updates(dense, updates), moved)
            return TrainState(state.step + 1, params, opt_state), value

        def block(state: TrainState, data: PyTree, plan: IndexBlock) -> tuple[TrainState, Any]:
            def body(j: jax.Array, carry: Any) -> Any:
                state, losses = carry
                state, value = one_step(state, jax.tree.map(lambda x: x[plan.indices[j]], data))
                return state, losses.at[j].set(value)

            return lax.fori_loop(0, plan.num_steps, body, (state, jnp.zeros(self.block_steps)))

        return Blocks(block, start, jax.device_put((model.columns, self._plan)), self.block_steps)
