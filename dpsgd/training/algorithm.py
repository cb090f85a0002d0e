"""DP-SGD as a product: sampler x per-example clipping x Gaussian noise x optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dpsgd.gradients.clipping import Diagnostics, clipped_grad
from dpsgd.gradients.losses import LossFn, takes_key
from dpsgd.noise.gaussian import add_gaussian_noise
from dpsgd.noise.secure import add_secure_noise
from dpsgd.training.mechanism import Mechanism, Scales

PyTree = Any


class TrainState(NamedTuple):
    """What the guarantee covers: everything here depends on the data through noised sums alone."""

    step: Any  # int32 scalar: updates done
    params: PyTree
    opt_state: optax.OptState


class Algorithm(NamedTuple):
    """A private training algorithm as pure functions of explicit state and keys."""

    mechanism: Mechanism
    """What the functions below enforce, and what accounting prices."""
    init: Callable[[PyTree], TrainState]
    """params -> state before the first step: in buffers of its own, which blocks may overwrite."""
    clipped_sum: Callable[..., tuple[PyTree, Diagnostics]]
    """(params, batch, weights, scales) -> (sum of clipped per-example gradients, diagnostics).

    The sum is in float32, or in the secure mode in integers, int32. Where the loss takes a key, a
    fifth argument is the keys of the batch's examples."""
    update: Callable[[TrainState, PyTree, Any, Scales], TrainState]
    """(state, sum, noise_key, scales) -> state after one noisy update."""
    programs: dict[Any, Any]
    """What was compiled of the functions above, by what it was made of; freed with them."""
    takes_key: bool = False
    """Whether the loss takes a key."""

    def with_mechanism(self, mechanism: Mechanism) -> Algorithm:
        """Returns this algorithm under another mechanism, with the same compiled programs.

        sigma, C and b are arguments of the programs. So runs that differ in them, or in a sampler
        with equally many examples and an equal `max_batch_size`, compile once among them all.

        Raises:
          ValueError: if noise would be switched on or off: without it the program has no generator.
        """
        if bool(mechanism.noise_multiplier) != bool(self.mechanism.noise_multiplier):
            raise ValueError(
                f"noise_multiplier would change from {self.mechanism.noise_multiplier} to "
                f"{mechanism.noise_multiplier}, but with and without noise are different programs: "
                "make another algorithm by dpsgd()"
            )
        return self._replace(mechanism=mechanism)


def owned(tree: PyTree) -> PyTree:
    """Returns a copy of the arrays of `tree`, which nobody else holds, and of no weak type."""
    return jax.tree.map(lambda leaf: jnp.array(leaf, jnp.result_type(leaf)), tree)


def privatize(clipped_sum: PyTree, noise_key: Any, step: Any, scales: Scales) -> PyTree:
    """Returns the private mean gradient (sum + sigma C z) / b, z standard normal.

    Sum, then noise, then division, in this one place. The divisor b is the sampler's *expected*
    batch size, a public constant: the realised size depends on who took part, and dividing by it
    would release that without noise.

    Args:
      clipped_sum: Sum over the batch of gradients of L2 norm at most C; float32 leaves, or int32
        ones on the secure grid.
      noise_key: Key of the run's noise stream; with `step` and the leaf it names z completely.
      step: int scalar, the number of the update.
      scales: C, sigma C and b, and the grid of the secure mode.
    """
    stddev, divisor = scales.noise_stddev, scales.expected_batch_size
    if scales.grid is None:
        return add_gaussian_noise(clipped_sum, noise_key, step, stddev, divisor=divisor)
    noised = add_secure_noise(clipped_sum, noise_key, step, scales.grid)
    return jax.tree.map(lambda total: total / divisor, noised)


def dpsgd(
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    mechanism: Mechanism,
    *,
    microbatch_size: int | None = None,
) -> Algorithm:
    """Returns DP-SGD (Abadi et al. 2016, Algorithm 1) for any per-example loss and optimizer.

    g_t = (sum_{i in B_t} clip_C(grad loss(theta_t, x_i)) + sigma C z_t) / b, and theta_{t+1} is
    what the optimizer makes of theta_t and g_t.

    Args:
      loss_fn: Pure function (params, example) -> scalar loss of what is clipped as one: an example,
        or a unit, of which it sees all rows of the batch, [*sampler.clipped_shape, ...] each leaf.
        Or (params, example, key), for dropout: the key is fresh for each row of the data and each
        step, and a function of these two alone. The price is the same, for any such loss: given
        all keys, which depend on no data, an example's clipped gradient is a function of the
        parameters and of itself, and neighbours have the same keys (`dpsgd.gradients.losses` has
        the proof).
      optimizer: Any optax transformation; it sees only the private mean gradient.
      mechanism: Sampler, sigma and C. With sigma = 0 the noise is left out of the program.
      microbatch_size: Examples whose gradients are formed together; None for as many as fit, see
        `clipped_grad`.

    Raises:
      ValueError: if `microbatch_size` is below one, or the signature of `loss_fn` does not tell
        whether it takes a key.
    """
    keyed = takes_key(loss_fn)
    if microbatch_size is not None and microbatch_size < 1:
        raise ValueError(f"microbatch_size must be at least 1, got {microbatch_size}")

    def init(params: PyTree) -> TrainState:
        # The optimizer's state may hold the very parameters, and arrays that its maker gave it.
        params = owned(params)
        return TrainState(jnp.zeros((), jnp.int32), params, owned(optimizer.init(params)))

    def clipped_sum(params, batch, weights, scales, keys=None):
        gradient = clipped_grad(
            loss_fn,
            l2_clip_norm=scales.l2_clip_norm,
            microbatch_size=microbatch_size,
            grid=scales.grid,
        )
        return gradient(params, batch, weights, keys)

    def update(state, total, noise_key, scales):
        if mechanism.noise_multiplier:
            gradient = privatize(total, noise_key, state.step, scales)
        else:
            gradient = jax.tree.map(lambda leaf: leaf / scales.expected_batch_size, total)
        gradient = jax.tree.map(lambda g, p: g.astype(p.dtype), gradient, state.params)
        updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
        return TrainState(state.step + 1, optax.apply_updates(state.params, updates), opt_state)

    return Algorithm(mechanism, init, clipped_sum, update, programs={}, takes_key=keyed)
