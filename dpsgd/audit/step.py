"""One step of the program that trains, as an audit runs it: its releases, written down."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpsgd.noise.keys import RootKey
from dpsgd.training.algorithm import Algorithm
from dpsgd.training.loop import Watch, compiled_block
from dpsgd.training.mechanism import Mechanism, Scales
from samplers import IndexBlock

PyTree = Any

_ROWS = 16  # examples of the batches that are added up


class Recording(NamedTuple):
    """State of the optimizer that `recorder` returns."""

    count: Any  # int32 scalar: updates seen
    releases: PyTree  # like the parameters, float32, with a leading axis of slots


@functools.cache
def recorder(slots: int = 1) -> optax.GradientTransformation:
    """Returns an optimizer that keeps the parameters and writes down the private mean gradients.

    Args:
      slots: How many of the last gradients are kept; gradient k goes to slot k mod `slots`.

    The same object for the same slots, by which compiled programs can be shared.
    """

    def init(params: PyTree) -> Recording:
        zeros = jax.tree.map(lambda p: jnp.zeros((slots, *jnp.shape(p)), jnp.float32), params)
        return Recording(jnp.zeros((), jnp.int32), zeros)

    def update(gradient, state, params=None):
        releases = jax.tree.map(
            lambda kept, g: kept.at[state.count % slots].set(g.astype(jnp.float32)),
            state.releases,
            gradient,
        )
        return jax.tree.map(jnp.zeros_like, gradient), Recording(state.count + 1, releases)

    return optax.GradientTransformation(init, update)


class CompiledStep:
    """The loop's compiled program, one step at a time, as a function of who takes part."""

    def __init__(
        self,
        algorithm: Algorithm,
        mechanism: Mechanism,
        params: PyTree,
        data: PyTree,
        root: RootKey,
        max_batch_size: int | None,
    ):
        self.mechanism = mechanism
        if self.mechanism.noise_multiplier == 0:
            raise ValueError("there is nothing to audit: noise_multiplier is 0")
        rows = {len(leaf) for leaf in jax.tree.leaves(data)}
        if len(rows) != 1 or 0 in rows:
            raise ValueError(f"the audit needs data with equally many rows, got {sorted(rows)}")
        # Where blocks of rows are clipped as one, a block stands for an example from here on.
        self.block = math.prod(self.mechanism.sampler.clipped_shape)
        # With room for at least one row of padding.
        width = max_batch_size or self.mechanism.sampler.padded_batch_size
        self.width = -(-max(width, (_ROWS + 2) * self.block) // self.block) * self.block
        self.passes = 2 if self.mechanism.sampler.accumulates else 1
        self.rows = min(_ROWS, min(rows) // self.block)
        self.poison = self.rows
        self.poisoned, self._data = _with_poison(data, self.rows * self.block, self.block)
        self.scales = self.mechanism.scales()
        self._algorithm = algorithm
        self._key = jnp.asarray(self.mechanism.noise_key(root, 0))
        self._loss_key = jnp.asarray(root.loss_key(0)) if algorithm.takes_key else None
        self.sampling_seed = root.sampling_seed(0)
        self._state = algorithm.init(params, mechanism)
        self._first_noise = jax.tree.map(np.array, self._state.noise)

    @property
    def params(self) -> PyTree:
        """The parameters, at which all steps are taken."""
        return self._state.params

    def __call__(
        self,
        members: Sequence[int],
        scales: Scales,
        *,
        step: int = 3,
        padding: int = 0,
        follows: bool = False,
    ) -> list[np.ndarray]:
        """Returns the noised sum, the release times b: one float32 array a leaf.

        Args:
          members: Rows of the data that take part.
          scales: C, sigma C and b.
          step: Number of the update, which names the noise.
          padding: Row of the data to which the indices of the padding point.
          follows: Whether the noise goes on from the call before; else as if this step were first.
        """
        shape = self.passes, self.width // self.block, self.block
        # Strewn among the padding, so that they meet in some microbatches and not in others.
        taking = np.array(members, np.int32)
        places = np.random.default_rng(0).permutation(math.prod(shape[:2]))[: taking.size]
        where = np.unravel_index(places, shape[:2])
        blocks, weights = np.full(shape, padding, np.int32), np.zeros(shape, np.float32)
        blocks[where], weights[where] = taking[:, None], 1.0
        indices = blocks * self.block + np.arange(self.block, dtype=np.int32)
        plan = IndexBlock(
            indices.reshape(self.passes, self.width),
            weights.reshape(self.passes, self.width),
            np.array([0, self.passes], np.int32),
            np.int32(1),
        )
        state = self._state._replace(step=jnp.int32(step))
        if not follows:
            state = state._replace(noise=jax.tree.map(jnp.array, self._first_noise))
        watch = Watch.nothing(state.params)
        arguments = state, self._data, plan, self._key, scales, watch, self._loss_key
        run = compiled_block(self._algorithm, self.mechanism.sampler, arguments)
        self._state, *_ = run(*arguments)
        releases = jax.tree.leaves(self._state.opt_state.releases)
        # A copy: the recording is donated to the next call.
        return [np.array(leaf[0]).ravel() * scales.expected_batch_size for leaf in releases]


def _with_poison(data: PyTree, rows: int, block: int) -> tuple[bool, PyTree]:
    """Returns the first rows and `block` whose floats are NaN, and whether there are floats."""
    poisoned = False

    def column(leaf):
        nonlocal poisoned
        leaf = np.asarray(leaf[:rows])
        last = leaf[-block:]
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            poisoned, last = True, np.full_like(last, np.nan)
        return np.concatenate([leaf, last])

    columns = jax.tree.map(column, data)
    return poisoned, columns
