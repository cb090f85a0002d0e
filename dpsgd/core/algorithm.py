"""A private training algorithm as pure functions, and the one place where its sums get noise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax

from dpsgd.core.mechanism import Mechanism
from dpsgd.core.state import TrainState
from dpsgd.gradients.clipping import Diagnostics
from dpsgd.noise.base import Scales
from dpsgd.noise.gaussian import add_row_noise

PyTree = Any


jax.tree_util.register_dataclass(
    Scales,
    data_fields=["l2_clip_norm", "noise_stddev", "expected_batch_size"],
    meta_fields=["noise"],
)


class Context(NamedTuple):
    """What a parameter group knows of a step, beside the state."""

    noise_key: Any
    scales: Scales
    known: Any = None
    """What `Schedule.of` or `Schedule.after` returned; None for a group without one."""
    place: Any = 0
    """Number of the step in its block."""
    shapes: PyTree = None
    """Shapes of all parameters, also where a device holds a part of them."""
    exchange: Any = None
    """Between devices, see `dpsgd.engine.placement.Exchange`."""
    return_gradient: Any = False
    """Whether the private mean gradient takes the place of the updated parameters, for an audit."""


class View(NamedTuple):
    """What is differentiated in a step: parameters and examples as parameter groups see them."""

    params: PyTree
    batch: PyTree
    """Examples, [B, ...] each leaf."""
    weights: jax.Array
    """[B]; 0 for padding."""
    keys: tuple[Any, ...]
    """Keys [B] of the examples, if the loss takes one."""
    loss: dict[str, Any]
    """By the name `loss_fn` the loss of such parameters and examples, if it is another one."""


@runtime_checkable
class Schedule(Protocol):
    """What a parameter group knows of all steps of a run before it begins: public numbers."""

    def of(self, steps: range, room: int) -> Any:
        """Returns arrays of consecutive steps, with room for `room` of them."""

    def after(self, steps: int) -> Any:
        """Returns arrays for a flush after so many steps of the run."""


@runtime_checkable
class ParamGroup(Protocol):
    """How some leaves of the parameters get their noise and their update.

    Each function takes the whole training state and returns it with the group's part changed. The
    last group of an algorithm has all leaves that no other group has. A class that derives from
    this one views the parameters as they are, and has no pending noise.
    """

    def leaves(self, params: PyTree, mechanism: Mechanism | None, rows: PyTree) -> tuple[int, ...]:
        """Returns the numbers of the group's own leaves: none for the last group.

        Args:
          params: Parameters, or their shapes.
          mechanism: Of the run.
          rows: Training rows, or their shapes; None if they were not given.

        Raises:
          ValueError: if the group cannot train such parameters under such a mechanism.
        """

    def init(self, state: TrainState, leaves: tuple[int, ...]) -> TrainState:
        """Returns the first state, with the group's part in it."""

    def schedule(self, num_steps: int) -> Schedule | None:
        """Returns what the group knows of a run of so many steps; None for nothing."""
        return None

    def view(self, state: TrainState, view: View, context: Context) -> tuple[View, Any]:
        """Returns what is differentiated, and what `update` needs to know of it."""
        return view, None

    def update(
        self,
        state: TrainState,
        total: PyTree,
        viewed: Any,
        context: Context,
    ) -> tuple[TrainState, PyTree]:
        """Returns the state after a noisy update of the group's leaves, but for its step.

        Args:
          state: Before the update.
          total: Sum of clipped gradients, a tree like the parameters that were differentiated,
            with `optax.MaskedNode` in the place of frozen leaves.
          viewed: As `view` returned it.
          context: Of the step.

        Returns:
          The state, and the private mean gradient of the last group's leaves; None of others.
        """

    def flush(self, state: TrainState, context: Context) -> TrainState:
        """Returns the state with all pending noise of the group's leaves added."""
        return state


class Schedules:
    """The schedules of all parameter groups of a run."""

    def __init__(self, groups: tuple[ParamGroup, ...], num_steps: int) -> None:
        self._each = [group.schedule(num_steps) for group in groups]

    def of(self, steps: range, room: int) -> tuple[Any, ...]:
        """Returns `Schedule.of` of each group."""
        return tuple(one and one.of(steps, room) for one in self._each)

    def after(self, steps: int) -> tuple[Any, ...]:
        """Returns `Schedule.after` of each group."""
        return tuple(one and one.after(steps) for one in self._each)


def nothing_frozen(params: PyTree, example: PyTree) -> frozenset[int]:
    """Returns that all parameters are trained."""
    return frozenset()


class Algorithm(NamedTuple):
    """A private training algorithm as pure functions of explicit state, scales and keys.

    A value: what `dpsgd` makes of equal arguments is equal, and shares what was compiled of it.
    Which mechanism it runs under is said where it is run.
    """

    init: Callable[..., TrainState]
    """(params, mechanism, rows) -> state before the first step, in buffers of its own, which blocks
    may overwrite. The mechanism may be left out where its noise keeps nothing from step to step,
    and the rows of the data, some of them or their shapes, where there are no lazy tables and no
    derivative of the loss misses a leaf."""
    clipped_sum: Callable[..., tuple[PyTree, Diagnostics]]
    """(params, batch, weights, scales) -> (sum of clipped per-example gradients, diagnostics).

    The sum is in float32. Where the loss takes a key, a fifth argument is the keys of the batch's
    examples. By name it takes `devices`, the number of devices over which the compiler shards the
    batch where it shards the parameters, `loss_fn`, the loss in place of its own where a parameter
    group views the parameters otherwise, and `frozen`, the numbers of the leaves that get no sum,
    if there are any."""
    update: Callable[..., tuple[TrainState, PyTree]]
    """(state, sum, noise_key, scales) -> (state after one noisy update, what the update was made
    of: the private mean gradient of `dense_params`, in their types). By name it takes `viewed` and
    `contexts`, what each parameter group needs, if a group needs it."""
    takes_key: bool = False
    """Whether the loss takes a key."""
    groups: tuple[ParamGroup, ...] = ()
    """How which leaves are trained; the last group has all that are in no other."""
    frozen: Callable[[PyTree, PyTree], frozenset[int]] = nothing_frozen
    """(params, example), or their shapes -> numbers of the leaves that no derivative reaches."""
    foreign_calls: bool = False
    """Whether the loss may call the host and foreign functions, which no guarantee covers."""

    @property
    def tables(self) -> Any:
        """The `LazyTables` of the algorithm; None if all leaves get their noise in each step."""
        found = (getattr(group, "tables", None) for group in self.groups)
        return next((tables for tables in found if tables is not None), None)


def privatize(
    clipped_sum: PyTree,
    noise_state: PyTree,
    noise_key: Any,
    step: Any,
    scales: Scales,
    rows: tuple[int, jax.Array] | None = None,
) -> tuple[PyTree, PyTree]:
    """Returns the private mean gradient (sum + sigma C n) / b, and the state of the noise n.

    Sum, then noise, then division, in this one place. The divisor b is the sampler's *expected*
    batch size, a public constant: the realised size depends on who took part, and dividing by it
    would release that without noise.

    Args:
      clipped_sum: Sum over the batch of gradients of L2 norm at most C, in float32. With `rows`,
        that of some rows of a table: float32 [U, ...].
      noise_state: What n needs from the steps before.
      noise_key: Key of the run's noise stream; with `step` and the leaf it names what in n
        is fresh.
      step: int scalar, the number of the update.
      scales: C, sigma C and b, and the law of n, if any.
      rows: Number of the leaf that is a table, and of its rows: int32 [U]. Their noise is
        independent, and that of no dense leaf.
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
