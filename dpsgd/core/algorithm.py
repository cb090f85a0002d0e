"""Private training algorithm as pure functions, and the one place that adds noise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from dpsgd.core.gaussian import add_row_noise
from dpsgd.core.philox import StepKey
from dpsgd.core.state import Diagnostics, Scales, TrainState

PyTree = Any


class Context(NamedTuple):
    """Inputs of lazy tables in a step, beside the training state."""

    noise_key: Any
    scales: Scales
    laws: Any
    """Laws of the step, or of a flush."""
    shapes: PyTree
    """Global shapes of all parameters, sharded ones included."""
    placement: Any
    """Devices that compute, a `dpsgd.engine.placement.Placement`."""
    return_gradient: Any = False
    """True to return the private mean gradient in place of updated rows, for an audit."""


class View(NamedTuple):
    """Inputs of a step's derivative: parameters, and examples that read them."""

    params: PyTree
    batch: PyTree
    """Examples, [B, ...] each leaf."""
    weights: jax.Array
    """[B]; 0 for padding."""
    keys: tuple[Any, ...]
    """Keys [B] of the examples, if the loss takes one."""


def nothing_frozen(params: PyTree, example: PyTree) -> frozenset[int]:
    """Returns the empty set: all parameters are trained."""
    return frozenset()


class Algorithm(NamedTuple):
    """Private training algorithm as pure functions of explicit state, scales and keys.

    Algorithms made by `dpsgd` from the same functions and equal settings share compiled programs.
    The functions that run an algorithm take its mechanism.
    """

    init: Callable[..., TrainState]
    """(params, mechanism, rows) -> state before the first step, in new buffers, which blocks may
    overwrite. The mechanism is needed for correlated noise, the rows of the data (some of them, or
    their shapes) for lazy tables and frozen leaves."""
    clipped_sum: Callable[..., tuple[PyTree, Diagnostics]]
    """(params, batch, weights, scales) -> (sum of clipped per-example gradients, diagnostics).

    The sum is in float32. A loss with a key needs the keys of the batch's examples as the fifth
    argument. Keyword arguments are `devices`, the number of devices over which the compiler shards
    the batch if it shards the parameters, and `frozen`, the indices of the leaves without a sum."""
    update: Callable[..., tuple[TrainState, PyTree]]
    """(state, sum, noise_key, scales) -> (state after one noisy update, private mean gradient of
    `dense_params`, in their types). Keyword arguments are `viewed` and `context`, for lazy
    tables."""
    takes_key: bool = False
    """True if the loss takes a key."""
    lazy: Any = None
    """Lazy tables, a `dpsgd.engine.lazy.group.LazyRows`; None if all leaves are dense."""
    frozen: Callable[[PyTree, PyTree], frozenset[int]] = nothing_frozen
    """(params, example), or their shapes -> indices of the leaves that no derivative reaches."""
    foreign_calls: bool = False
    """True if the loss may call the host and foreign functions, which no guarantee covers."""
    loss_fn: Callable[..., jax.Array] | None = None
    """Loss of one clipped example or unit, which the audit differentiates."""
    clipping: Any = None
    """The `ClippingRule`; None without `loss_fn`."""
    optimizer: Any = None
    """The optax transformation of dense leaves, as the scan of closures reads it."""

    @property
    def tables(self) -> Any:
        """Settings `LazyTables` of the algorithm; None without lazy tables."""
        return self.lazy and self.lazy.tables

    def gap_laws(self, num_steps: int) -> Any:
        """Returns the `RunLaws` of lazy tables in a run, or None."""
        return self.lazy and self.lazy.run_laws(num_steps)


def privatize(
    clipped_sum: PyTree,
    noise_state: PyTree,
    noise_key: Any,
    step: Any,
    scales: Scales,
    rows: tuple[int, jax.Array] | None = None,
) -> tuple[PyTree, PyTree]:
    """Returns the private mean gradient and the next noise state.

    The mean is (sum + sigma C n) / b: sum, then noise, then division, in this one place. The
    divisor b is the sampler's *expected* batch size, a public constant: the realised size depends
    on the participants, and dividing by it would release it without noise.

    Args:
      clipped_sum: Sum over the batch of gradients of L2 norm at most C, float32. With `rows`, the
        sum of these rows of a table, float32 [U, ...].
      noise_state: State of the noise n after the previous step.
      noise_key: Key of the run's noise stream; key, step and leaf name the fresh part of n.
      step: int scalar, number of the update.
      scales: Scales C, sigma C and b, and the law of n, if any.
      rows: (index of the leaf that is a table, indices of its rows, int32 [U]). Their noise is
        independent, and not shared with a dense leaf.
    """
    divisor = scales.expected_batch_size
    if scales.noise is None:
        return jax.tree.map(lambda s: s / divisor, clipped_sum), noise_state
    if rows is not None:
        noised = add_row_noise(clipped_sum, *rows, StepKey(noise_key, step), scales)
        return noised, noise_state
    return scales.noise.add(clipped_sum, noise_state, noise_key, step, scales)
