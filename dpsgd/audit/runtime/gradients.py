"""Computes gradients of synthetic examples, and bounds their rounding errors.

Bounds: docs/explanation/audit-of-steps.md.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from dpsgd.audit.probe import Probe
from dpsgd.audit.reference_step import clip_factors, leaf_groups, require_reference
from dpsgd.audit.runtime.releases import LARGE, UNIT
from dpsgd.core.mechanism import Mechanism
from dpsgd.engine.programs import in_32_bits
from dpsgd.gradients.losses import example_keys

PyTree = Any

OWN_ERROR = 2.0**-10
"""Least relative error of a gradient due to its own arithmetic."""

_MOVES = 4, 16  # random moves of the parameters by 2^8 unit roundoffs, and by fewer
_FARTHEST = 2.0**-5  # largest relative size of a move
_UNSTEADY = 2.0**-4  # of an example's norm: error above which it is left out


class Clipped(NamedTuple):
    """Contributions of synthetic examples under one clip norm.

    Attributes:
      values: Compared coordinates of each contribution, by leaf: float64[examples, places].
      norms: Norm of each contribution: float64[examples].
      errors: Bound on the rounding error in each contribution, as a norm: float64[examples].
    """

    values: np.ndarray
    norms: np.ndarray
    errors: np.ndarray


class Gradients:
    """Gradients of synthetic examples, computed one by one.

    Attributes:
      norms: Norms of the gradients: float64[examples].
      steady: bool[examples], True for nonzero finite gradients with a small rounding error.
      fault: Reason why no gradient can be compared; empty if some can.
    """

    def __init__(self, probe: Probe, numbers: np.ndarray, places: list[np.ndarray]):
        """Computes the gradients of examples.

        Args:
          probe: Probe of the program.
          numbers: Indices of the examples.
          places: Compared flat indices of each leaf of a release.
        """
        places = [
            (probe.table_places(k, indices) if k in probe.tables else indices).astype(np.int32)
            for k, indices in enumerate(places)
        ]
        self._clipping, self._known = probe.algorithm.clipping, dict[float, Clipped]()
        self._leaf = np.repeat(np.arange(len(places)), [len(indices) for indices in places])
        trained = [k for k in range(len(places)) if k not in probe.frozen]
        groups = leaf_groups(self._clipping, probe.state.params, trained)
        self._groups = [[trained[k] for k in group] for group in groups]
        with in_32_bits():  # as the program that trains
            gradients, unit = _gradients(probe, numbers, places)
        self._norms, values, moved = jax.tree.map(lambda x: np.asarray(x, np.float64), gradients)
        self._values = np.nan_to_num(np.concatenate(values, axis=1), posinf=0, neginf=0)
        # Two factors of a gradient, a derivative and an input, are rounded without any parameter.
        self._moved, self._own = np.nan_to_num(moved), max(OWN_ERROR, 2 * unit)
        self.norms = np.sqrt(np.square(self._norms).sum(axis=1))
        with np.errstate(invalid="ignore"):
            is_nonzero = np.isfinite(self.norms) & (self.norms > 0)
            self.steady = is_nonzero & (moved <= _UNSTEADY * self.norms)
        self.fault = (
            "" if self.steady.any() else "all gradients of generated rows are sensitive to rounding"
        )

    def clipped(self, mechanism: Mechanism) -> Clipped:
        """Returns the clipped gradients at a mechanism's clip norm."""
        clip = mechanism.l2_clip_norm
        if clip not in self._known:
            norms, factors = self._norms, np.zeros(self._norms.shape)
            of_leaves = [norms[:, k : k + 1] for k in range(norms.shape[1])]
            of_groups = clip_factors(self._clipping, of_leaves, self._groups, clip)
            for group, factor in zip(self._groups, of_groups, strict=True):
                factors[:, group] = factor[:, None]
            largest = factors.max(axis=1, initial=0.0)
            lengths = np.where(largest > 0, self.norms, 0.0)
            errors = largest * (np.where(largest > 0, self._moved, 0.0) + self._own * lengths)
            values = self._values * factors[:, self._leaf]
            self._known[clip] = Clipped(values, largest * lengths, errors)
        return self._known[clip]


def why_no_gradients(probe: Probe, *, large: bool) -> str:
    """Returns the obstacle to computing a run's gradients.

    Args:
      probe: Probe of the program.
      large: True for a model of more than `LARGE` coordinates.

    Returns:
      Reason in words; empty if the gradients can be computed.
    """
    algorithm = probe.algorithm
    if algorithm.loss_fn is None:
        return "the algorithm has a clipped_sum but no loss_fn"
    if algorithm.takes_key and probe.mechanism.sampler.num_shards > 1:
        return "keys of a loss depend on the shard of a row"
    if probe.tables and large:
        return "gradients of large tables take too much memory"
    try:
        require_reference(algorithm.clipping)
    except TypeError as error:
        return str(error)
    return ""


def _gradients(
    probe: Probe, numbers: np.ndarray, places: list[np.ndarray]
) -> tuple[tuple[Any, ...], float]:
    """Returns leaf norms, coordinates and sensitivities of gradients, and the unit roundoff.

    A sensitivity is the largest change of a gradient under small moves of the parameters.
    """
    shape = len(numbers), *probe.mechanism.sampler.clipped_shape
    batch = jax.tree.map(lambda x: x[numbers].reshape(*shape, *x.shape[2:]), probe.examples)
    keys: tuple[Any, ...] = ()
    if probe.algorithm.takes_key:
        key = jnp.asarray(probe.root.loss_key(0))
        first_rows = jnp.asarray(probe.starts[numbers], jnp.int32)
        keys = (example_keys(key, probe.first_step, first_rows, None),)
    loss: Any = probe.algorithm.loss_fn
    params = probe.state.params
    example = jax.tree.map(lambda x: x[0], (batch, *keys))
    unit = _coarsest(jax.make_jaxpr(lambda p, inputs: loss(p, *inputs))(params, example))
    size = 2.0**8 * unit
    # Rounding may hide the effects of a few small moves, so more of these are made.
    size, moves = min(size, _FARTHEST), _MOVES[size > _FARTHEST]
    options = None
    if jax.default_backend() == "cpu":  # it runs once: compiling dominates
        options = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    run = jax.jit(_of_examples, static_argnums=0, compiler_options=options)
    return run(loss, params, (batch, *keys), places, np.float32(size), _signs(params, moves)), unit


def _signs(params: PyTree, count: int) -> list[np.ndarray]:
    """Returns random signs of each leaf: int8[count, *shape], one for all of a large leaf."""
    rng, leaves = np.random.default_rng(0), jax.tree.leaves(params)
    shapes = [x.shape if x.size <= LARGE else (1,) * x.ndim for x in leaves]
    return [2 * rng.integers(0, 2, (count, *shape), np.int8) - 1 for shape in shapes]


def _of_examples(loss, params, batch, places, size, signs):
    leaves, structure = jax.tree.flatten(params)

    def gradient(of, move):
        """Returns the gradient at moved parameters; move 0 leaves them unchanged."""
        step = jnp.where(move > 0, size, 0.0)
        moved = [
            (x.astype(jnp.float32) * (1 + step * d[move - 1].astype(jnp.float32))).astype(x.dtype)
            for x, d in zip(leaves, signs, strict=True)
        ]
        gradients = jax.grad(loss)(jax.tree.unflatten(structure, moved), *of)
        return [x.astype(jnp.float32).ravel() for x in jax.tree.leaves(gradients)]

    def norm(x):
        """Returns the norm of an array without overflow."""
        top = jnp.max(jnp.abs(x), initial=0.0)
        scale = jnp.where((top > 0) & jnp.isfinite(top), top, 1.0)
        return jnp.where(jnp.isfinite(top), scale * jnp.sqrt(jnp.sum(jnp.square(x / scale))), top)

    def one(of):
        """Returns leaf norms, compared coordinates and sensitivity of a gradient."""
        reference = gradient(of, 0)

        def apart(move):
            """Returns the change of the gradient under a move."""
            moved_gradient = gradient(of, move)
            return jnp.linalg.norm(
                jnp.stack([norm(x - y) for x, y in zip(reference, moved_gradient, strict=True)])
            )

        moves = jnp.max(jax.lax.map(apart, jnp.arange(1, 1 + len(signs[0]))))
        norms = jnp.stack([norm(x) for x in reference])
        return norms, [x[indices] for x, indices in zip(reference, places, strict=True)], moves

    return jax.lax.map(one, batch)


def _coarsest(of: Any) -> float:
    """Returns the largest unit roundoff in a trace, and of this device."""
    unit = {"cpu": UNIT, "gpu": 2.0**-12}.get(jax.default_backend(), 2.0**-9)
    jaxpr = of.jaxpr if isinstance(of, core.ClosedJaxpr) else of
    for equation in jaxpr.eqns:
        for variable in equation.outvars:
            if jnp.issubdtype(variable.aval.dtype, jnp.floating):
                unit = max(unit, float(jnp.finfo(variable.aval.dtype).eps) / 2)
    for inner in core.subjaxprs(jaxpr):
        unit = max(unit, _coarsest(inner))
    return unit
