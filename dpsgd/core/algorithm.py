"""A private training algorithm as pure functions, and the one place where its sums get noise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import optax

from dpsgd.core.state import TrainState
from dpsgd.gradients.clipping import Diagnostics
from dpsgd.gradients.losses import LossFn
from dpsgd.noise.base import Scales

PyTree = Any


jax.tree_util.register_dataclass(
    Scales,
    data_fields=["l2_clip_norm", "noise_stddev", "expected_batch_size", "grid"],
    meta_fields=["noise"],
)


@runtime_checkable
class TableTraining(Protocol):
    """How leaves are trained of which the loss only looks rows up, such as `LazyTables`."""

    def algorithm(
        self,
        loss_fn: LossFn,
        optimizer: optax.GradientTransformation,
        microbatch_size: int | None,
    ) -> Algorithm:
        """Returns the algorithm that trains tables so, and all else by `optimizer`."""

    def of_run(self, num_steps: int) -> Any:
        """Returns what the tables' noise depends on in a run of so many steps."""


def nothing_frozen(params: PyTree, example: PyTree) -> frozenset[int]:
    """Returns that all parameters are trained."""
    return frozenset()


class Algorithm(NamedTuple):
    """A private training algorithm as pure functions of explicit state, scales and keys.

    A value: what `dpsgd` makes of equal arguments is equal, and shares what was compiled of it.
    Which mechanism it runs under is said where it is run.
    """

    init: Callable[..., TrainState]
    """(params, mechanism) -> state before the first step: in buffers of its own, which blocks may
    overwrite. The mechanism may be left out where its noise keeps nothing from step to step."""
    clipped_sum: Callable[..., tuple[PyTree, Diagnostics]]
    """(params, batch, weights, scales) -> (sum of clipped per-example gradients, diagnostics).

    The sum is in float32, or in the secure mode in integers, int32. Where the loss takes a key, a
    fifth argument is the keys of the batch's examples. By name it takes `devices`, among how many
    the compiler deals the batch out where the parameters are."""
    update: Callable[..., tuple[Any, PyTree]]
    """(state, sum, noise_key, scales) -> (state after one noisy update, what the update was made
    of: the private mean gradient, in the types of the parameters). By name it takes `frozen`, the
    numbers of the leaves that stay as they are, if there are any."""
    takes_key: bool = False
    """Whether the loss takes a key."""
    tables: TableTraining | None = None
    """How tables are trained with deferred noise, see `dpsgd.engine.lazy.group`: then `init` takes
    rows of the data as well, or their shapes, and `update` is a whole step."""
    frozen: Callable[[PyTree, PyTree], frozenset[int]] = nothing_frozen
    """(params, example), or their shapes -> numbers of the leaves that no derivative reaches."""
    foreign_calls: bool = False
    """Whether the loss may call the host and foreign functions, which no guarantee covers."""


def privatize(
    clipped_sum: PyTree, noise_state: PyTree, noise_key: Any, step: Any, scales: Scales
) -> tuple[PyTree, PyTree]:
    """Returns the private mean gradient (sum + sigma C n) / b, and the state of the noise n.

    Sum, then noise, then division, in this one place. The divisor b is the sampler's *expected*
    batch size, a public constant: the realised size depends on who took part, and dividing by it
    would release that without noise.

    Args:
      clipped_sum: Sum over the batch of gradients of L2 norm at most C; float32 leaves, or int32
        ones on the secure grid.
      noise_state: What n needs from the steps before.
      noise_key: Key of the run's noise stream; with `step` and the leaf it names what in n
        is fresh.
      step: int scalar, the number of the update.
      scales: C, sigma C and b, the grid of integer sums, and the law of n, if any.
    """
    if scales.noise is None:
        return jax.tree.map(lambda s: s / scales.expected_batch_size, clipped_sum), noise_state
    return scales.noise.add(clipped_sum, noise_state, noise_key, step, scales)
