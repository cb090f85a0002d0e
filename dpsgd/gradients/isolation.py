"""Isolation of examples: a loss mapped over the batch sees one example at a time.

A loss is traced on one example, and `jax.vmap` maps the trace: each of its primitives must act row
by row. Claim, proof and limits: docs/explanation/isolation-of-examples.md.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core, source_info_util

PyTree = Any

_ARITHMETIC = """
abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e
bitcast_convert_type cbrt ceil clamp clz complex conj convert_element_type copy copy_p cos cosh
device_put digamma div empty2 eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma
igamma_grad_a igammac imag integer_pow is_finite le le_to lgamma log log1p logistic lt lt_to max min
mul mulhi name ne neg nextafter not optimization_barrier or platform_index polygamma
population_count pow real reduce_precision rem round rsqrt select_n
sharding_constraint shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square
stop_gradient sub tan tanh xor zeta
"""
_ARRAYS = """
argmax argmin broadcast_in_dim concatenate conv_general_dilated cumlogsumexp cummax cummin cumprod
cumsum dot_general dynamic_slice dynamic_update_slice fft gather iota pad reduce reduce_and
reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_window reduce_window_max
reduce_window_min reduce_window_sum reduce_xor reshape rev scatter scatter-add scatter-max
scatter-min scatter-mul scatter-sub select_and_gather_add select_and_scatter select_and_scatter_add
slice sort split squeeze stack tile top_k transpose unstack
"""
_DECOMPOSITIONS = """
cholesky cholesky_update custom_linear_solve eig eigh geqp3 geqrf hessenberg householder_product lu
lu_pivots_to_permutation ormqr qr schur svd symmetric_product triangular_solve tridiagonal
tridiagonal_solve
"""
_CALLS = """
call checkpoint closed_call cond core_call custom_jvp_call custom_vjp_call jit linear_call pjit
remat remat2 scan while
"""
_RANDOM = """
iota_2x32_shape random_bits random_clone random_fold_in random_gamma random_seed random_split
random_unwrap random_wrap threefry2x32
"""
_ROW_BY_ROW = frozenset(" ".join([_ARITHMETIC, _ARRAYS, _DECOMPOSITIONS, _CALLS, _RANDOM]).split())
"""Names of JAX primitives whose batching rule acts on every row alone."""

_BY_CALL = {"pure_callback", "ffi_call"}
"""Primitives batched according to their parameter `vmap_method`; only with `foreign_calls`."""
_ONE_BY_ONE = {"sequential", "sequential_unrolled"}

_OVER_AXES = {"psum", "pmax", "pmin"}
"""Primitives that reduce over named or numbered axes."""

_KERNEL = "hands a kernel the arrays of the whole batch", "write it with jax.numpy or jax.lax"
_CALLBACK = "hands the host private rows", "leave it out, and try the loss on rows that are public"
_KINDS = {
    "custom_vmap_call": (
        "treats a batch by a rule of its own, which sees all its examples",
        "call the function without jax.custom_batching.custom_vmap",
    ),
    "pallas_call": _KERNEL,
    "shard_map": _KERNEL,
    "custom_partitioning": _KERNEL,
    "io_callback": _CALLBACK,
    "debug_callback": _CALLBACK,
    "debug_print": _CALLBACK,
    "rng_uniform": ("draws from a state that examples share", "take a key as the third argument"),
    "rng_bit_generator": (
        "draws by the first key of a batch and the place in it",
        "take a key as the third argument, and draw by jax.random",
    ),
}
"""Reason to refuse a primitive, and the remedy."""


@dataclass(frozen=True)
class Isolated:
    """Function that evaluates its trace on one example, see `isolated`."""

    trace: core.ClosedJaxpr
    structure: Any
    """Tree structure of the result."""

    def __call__(self, *values: PyTree) -> PyTree:
        """Returns the function's result."""
        leaves = core.jaxpr_as_fun(self.trace)(*jax.tree.leaves(values))
        return jax.tree.unflatten(self.structure, leaves)

    def map_rows(self, *arguments: PyTree) -> PyTree:
        """Returns the results for all rows of the last argument."""

        def evaluate(row: PyTree) -> PyTree:
            """Returns the result for one row."""
            return self(*arguments[:-1], row)

        equations = _equations(self.trace.jaxpr, set())
        # XLA multiplies all examples' batch groups with each other and masks: 0 * NaN is NaN.
        one_by_one = any(eqn.params.get("batch_group_count", 1) > 1 for eqn in equations)
        return (functools.partial(lax.map, evaluate) if one_by_one else jax.vmap(evaluate))(
            arguments[-1]
        )


def is_narrow(array: Any) -> bool:
    """Returns True for floats narrower than float32."""
    dtype = getattr(array, "dtype", np.float32)
    return bool(jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32)


def isolated(
    function: Callable[..., PyTree], *arguments: PyTree, foreign_calls: bool = False
) -> Isolated:
    """Returns `function` as its trace, which cannot mix examples.

    `jax.vmap` then maps the trace: Python code of the function, its derivative rules included,
    meets the abstract values of one example and never a batch.

    Args:
      function: Pure function of the arguments, such as a loss or its gradient.
      arguments: Trees of arrays or `jax.ShapeDtypeStruct`; an example lacks the batch axis.
      foreign_calls: True to allow host calls and foreign functions.

    Raises:
      ValueError: If an equation of the trace may see more than one example.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    require_isolated(closed, foreign_calls=foreign_calls)
    return Isolated(closed, jax.tree.structure(shapes))


def require_isolated(closed: core.ClosedJaxpr, *, foreign_calls: bool = False) -> None:
    """Refuses a trace whose equations may mix examples."""
    for const in closed.consts:
        if isinstance(const, jax.core.Tracer):
            raise ValueError(
                f"the loss closes over a traced value, {const.aval.str_short()}, that may depend "
                "on other examples; make it part of the example, or a parameter under "
                "jax.lax.stop_gradient"
            )
    for eqn in _equations(closed.jaxpr, set()):
        if fault := _fault(eqn, foreign_calls):
            reason, remedy = fault
            location = source_info_util.summarize(eqn.source_info)
            raise ValueError(
                f"examples could mix: the loss uses {eqn.primitive.name}"
                f"{f' at {location}' if location else ''}, which {reason}; {remedy}"
            )


def _equations(jaxpr: core.Jaxpr, seen: set[int]) -> Iterator[core.JaxprEqn]:
    """Yields a trace's equations, each call after the equations inside it."""
    if id(jaxpr) in seen:  # a jaxpr called twice is visited once
        return
    seen.add(id(jaxpr))
    for eqn in jaxpr.eqns:
        inside = eqn.params if eqn.primitive.name in _ROW_BY_ROW else {}
        for inner in inner_jaxprs(inside):
            inner = inner.jaxpr if isinstance(inner, core.ClosedJaxpr) else inner
            yield from _equations(inner, seen)
        yield eqn


def inner_jaxprs(params: Any) -> Iterator[Any]:
    """Yields the jaxprs, closed or open, in the parameters of an equation."""
    for value in params.values() if isinstance(params, dict) else params:
        if isinstance(value, core.Jaxpr | core.ClosedJaxpr):
            yield value
        elif isinstance(value, dict | list | tuple):
            yield from inner_jaxprs(value)


def _fault(eqn: core.JaxprEqn, foreign_calls: bool) -> tuple[str, str] | None:
    """Returns the reason why an equation may mix examples and the remedy, or None."""
    name = eqn.primitive.name
    if not _stands_in_jax(eqn.primitive):
        return (
            "is not defined in JAX, so that its batching rule is unknown",
            "write it with jax.numpy or jax.lax",
        )
    if name in _KINDS:
        return _KINDS[name]
    if eqn.effects:
        return f"has effects ({', '.join(map(str, eqn.effects))})", "use pure functions alone"
    if name in _BY_CALL and not foreign_calls:
        return (
            "hands private rows to code that may keep them from call to call",
            "write it with jax.numpy or jax.lax, or give dpsgd(..., foreign_calls=True), whose "
            "guarantee says that it is not covered",
        )
    if name in _BY_CALL:
        method = eqn.params.get("vmap_method")
        if method in _ONE_BY_ONE:
            return None
        return f"is given the whole batch (vmap_method={method!r})", 'give vmap_method="sequential"'
    if name in _OVER_AXES and all(isinstance(axis, int) for axis in eqn.params["axes"]):
        return None  # axes of the example itself, as of a `jax.vmap` within the loss
    if name not in _ROW_BY_ROW:
        return (
            "is not known to treat the examples of a batch one by one",
            "write it with other functions of jax.numpy or jax.lax",
        )
    for atom in [*eqn.invars, *eqn.outvars]:
        dtype = getattr(atom.aval, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, jax.dtypes.prng_key):
            continue
        if dtype != _threefry():
            return (
                f"draws by a {dtype}, and JAX may take the first of a batch for all of them",
                'take a key as the third argument, or jax.random.key(..., impl="threefry2x32")',
            )
    return None


def host_fault(eqn: core.JaxprEqn) -> str | None:
    """Returns why an equation may exchange values with the host, or None."""
    name = eqn.primitive.name
    if not _stands_in_jax(eqn.primitive):
        return "is not defined in JAX, so that its calls are unknown"
    effects = {type(effect).__name__ for effect in eqn.effects} - {"NamedAxisEffect"}
    if name in _BY_CALL or _KINDS.get(name) is _CALLBACK or effects:
        return "calls the host or foreign code, which may bring private rows in or keep releases"
    return None


def _threefry() -> Any:
    return jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32")).dtype


_known: set[core.Primitive] = set()


def _stands_in_jax(primitive: core.Primitive) -> bool:
    """True if a module of JAX holds this very object, not a namesake."""
    if primitive not in _known:
        modules = [m for name, m in sys.modules.items() if name.partition(".")[0] == "jax"]
        _known.update(x for m in modules for x in vars(m).values() if _is_primitive(x))
    return primitive in _known


def _is_primitive(x: Any) -> bool:
    return isinstance(x, core.Primitive)
