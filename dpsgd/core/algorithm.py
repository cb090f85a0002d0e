"""Private training algorithm as pure functions, and the one place that adds noise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax

from dpsgd.core.gaussian import add_row_noise
from dpsgd.core.mechanism import Mechanism
from dpsgd.core.state import Diagnostics, Scales, TrainState

PyTree = Any


class Context(NamedTuple):
    """Inputs of a parameter group in a step, beside the training state."""

    noise_key: Any
    scales: Scales
    schedule: Any = None
    """Arrays of the group's `Schedule`; None for a group without one."""
    place: Any = 0
    """Index of the step in its block."""
    shapes: PyTree = None
    """Global shapes of all parameters, sharded ones included."""
    exchange: Any = None
    """Communication between devices, see `dpsgd.engine.placement.Exchange`."""
    return_gradient: Any = False
    """True to return the private mean gradient in place of updated parameters, for an audit."""


class View(NamedTuple):
    """Inputs of a step's derivative: parameters and examples as parameter groups view them."""

    params: PyTree
    batch: PyTree
    """Examples, [B, ...] each leaf."""
    weights: jax.Array
    """[B]; 0 for padding."""
    keys: tuple[Any, ...]
    """Keys [B] of the examples, if the loss takes one."""


@runtime_checkable
class Schedule(Protocol):
    """Public numbers for all steps of a run, known beforehand."""

    def block_arrays(self, steps: range, room: int) -> Any:
        """Returns the arrays of consecutive steps, padded to `room` steps."""

    def flush_arrays(self, steps: int) -> Any:
        """Returns the arrays of a flush after `steps` steps."""


@runtime_checkable
class ParamGroup(Protocol):
    """Group of parameter leaves with its own noise and update.

    Each function takes the whole training state and returns it with the group's part changed. The
    last group of an algorithm has all leaves that no other group has. By default a group views the
    parameters unchanged and has no pending noise.
    """

    def leaves(self, params: PyTree, mechanism: Mechanism | None, rows: PyTree) -> tuple[int, ...]:
        """Returns the group's leaf indices; none for the last group.

        Args:
          params: Parameters, or their shapes.
          mechanism: Mechanism of the run.
          rows: Training rows, or their shapes; None if unknown.

        Raises:
          ValueError: If the group cannot train these parameters under this mechanism.
        """

    def init(self, state: TrainState, leaves: tuple[int, ...]) -> TrainState:
        """Returns the first state with the group's part added.

        Args:
          state: State before the first step, without the group's part.
          leaves: Indices of the group's leaves.
        """

    def schedule(self, num_steps: int) -> Schedule | None:
        """Returns the group's schedule for `num_steps` steps, or None."""
        return None

    def view(self, state: TrainState, view: View, context: Context) -> tuple[View, Any]:
        """Returns the inputs of the derivative, and data for `update`.

        Args:
          state: Training state before the step.
          view: Inputs of the derivative after the groups before this one.
          context: Context of the step.
        """
        return view, None

    def update(
        self,
        state: TrainState,
        total: PyTree,
        viewed: Any,
        context: Context,
    ) -> tuple[TrainState, PyTree]:
        """Returns the state after a noisy update of the group's leaves.

        The step count stays unchanged.

        Args:
          state: Training state before the update.
          total: Sum of clipped gradients, a tree like the differentiated parameters, with
            `optax.MaskedNode` for frozen leaves.
          viewed: Data that `view` returned.
          context: Context of the step.

        Returns:
          The state, and the private mean gradient of the last group's leaves; None from other
          groups.
        """

    def flush(self, state: TrainState, context: Context) -> TrainState:
        """Returns the state with the group's pending noise added."""
        return state


class Schedules:
    """Schedules of all parameter groups of a run."""

    def __init__(self, groups: tuple[ParamGroup, ...], num_steps: int) -> None:
        self._by_group = [group.schedule(num_steps) for group in groups]

    def block_arrays(self, steps: range, room: int) -> tuple[Any, ...]:
        """Returns `Schedule.block_arrays` of each group."""
        return tuple(s and s.block_arrays(steps, room) for s in self._by_group)

    def flush_arrays(self, steps: int) -> tuple[Any, ...]:
        """Returns `Schedule.flush_arrays` of each group."""
        return tuple(s and s.flush_arrays(steps) for s in self._by_group)


def nothing_frozen(params: PyTree, example: PyTree) -> frozenset[int]:
    """Returns the empty set: all parameters are trained."""
    return frozenset()


class Algorithm(NamedTuple):
    """Private training algorithm as pure functions of explicit state, scales and keys.

    Algorithms made by `dpsgd` from equal arguments are equal and share compiled programs. The
    functions that run an algorithm take its mechanism.
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
    `dense_params`, in their types). Keyword arguments are `viewed` and `contexts`, inputs of each
    parameter group that needs them."""
    takes_key: bool = False
    """True if the loss takes a key."""
    groups: tuple[ParamGroup, ...] = ()
    """Parameter groups; the last one has all leaves that are in no other."""
    frozen: Callable[[PyTree, PyTree], frozenset[int]] = nothing_frozen
    """(params, example), or their shapes -> indices of the leaves that no derivative reaches."""
    foreign_calls: bool = False
    """True if the loss may call the host and foreign functions, which no guarantee covers."""
    loss_fn: Callable[..., jax.Array] | None = None
    """Loss of one clipped example or unit; the audit differentiates it by itself."""
    clipping: Any = None
    """The `ClippingRule`; None without `loss_fn`."""

    @property
    def tables(self) -> Any:
        """Settings `LazyTables` of the algorithm; None without lazy tables."""
        tables_by_group = (getattr(group, "tables", None) for group in self.groups)
        return next((tables for tables in tables_by_group if tables is not None), None)


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
        leaf, numbers = rows
        stddev = scales.noise_stddev
        noised = add_row_noise(clipped_sum, numbers, noise_key, step, leaf, stddev, divisor)
        return noised, noise_state
    return scales.noise.add(clipped_sum, noise_state, noise_key, step, scales)
