"""Parameters that no derivative of the loss reaches, as those under `jax.lax.stop_gradient`.

Their gradient is 0 for every example: a fact of the trace, so that their sum needs no noise
(docs/explanation/isolation-of-examples.md).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import partial_eval

PyTree = Any


def frozen_leaves(
    loss_fn: Callable[[PyTree, PyTree], Any], params: PyTree, example: PyTree
) -> frozenset[int]:
    """Returns the numbers of the leaves of `params` without a path to the loss.

    >>> def loss(w, x):
    ...     return jax.lax.stop_gradient(w["a"]) * x + w["b"]
    >>> sorted(frozen_leaves(loss, {"a": 1.0, "b": 1.0, "c": 1.0}, 2.0))
    [0, 2]

    Args:
      loss_fn: (params, example) -> scalar.
      params: Tree of arrays, or of their shapes.
      example: One example, arrays or shapes.
    """

    def backward(cotangent: Any, params: PyTree, example: PyTree) -> list[Any]:
        _, pulled_back = jax.vjp(lambda params: loss_fn(params, example), params)
        return jax.tree.leaves(pulled_back(cotangent))

    loss = jax.eval_shape(loss_fn, params, example)
    jaxpr = jax.make_jaxpr(backward)(loss, params, example).jaxpr
    reached, outputs = _reached(jaxpr), enumerate(jaxpr.outvars)
    return frozenset(k for k, v in outputs if isinstance(v, core.Literal) or v not in reached)


def _reached(jaxpr: core.Jaxpr) -> set[Any]:
    """Returns the variables that depend on the first input."""
    reached: set[Any] = {jaxpr.invars[0]}
    for eqn in jaxpr.eqns:
        inputs = list(dict.fromkeys(v for v in eqn.invars if isinstance(v, core.Var)))
        if not reached.intersection(inputs):
            continue
        if not any(core.jaxprs_in_params(eqn.params)):
            reached.update(eqn.outvars)
            continue
        alone = jaxpr.replace(constvars=[], invars=inputs, outvars=eqn.outvars, eqns=[eqn])
        for out in eqn.outvars:  # of a call or a loop, each output reads some of its inputs
            _, used = partial_eval.dce_jaxpr(alone, [out is other for other in eqn.outvars])
            if reached.intersection(v for v, read in zip(inputs, used, strict=True) if read):
                reached.add(out)
    return reached


def stopped(params: PyTree, numbers: Collection[int]) -> PyTree:
    """Returns `params`, whose leaves of these numbers are read under `jax.lax.stop_gradient`."""
    leaves, structure = jax.tree.flatten(params)
    read = [jax.lax.stop_gradient(x) if k in numbers else x for k, x in enumerate(leaves)]
    return jax.tree.unflatten(structure, read)


@dataclass(frozen=True)
class RunLoss:
    """The loss of a task as a run computes it: of some parameters alone, or in a narrower type.

    Attributes:
      loss_fn: (params, example) -> scalar, or (params, example, key) -> scalar.
      pattern: Regular expression that is found in the names of what is trained, see `leaf_names`;
        all others are read under `stop_gradient`. None for all.
      compute: Type to which parameters in float32 are cast before the loss reads them.

    Raises:
      ValueError: when called, if no name matches.
    """

    loss_fn: Callable[..., Any]
    pattern: str | None = None
    compute: str = "float32"

    @classmethod
    def of(
        cls, loss_fn: Callable[..., Any], pattern: str | None, compute: str = "float32"
    ) -> Callable[..., Any]:
        """Returns the loss of a run; the loss itself where it is that of all, in float32."""
        plain = pattern is None and compute == "float32"
        return loss_fn if plain else cls(loss_fn, pattern, compute)

    @property
    def __signature__(self) -> inspect.Signature:
        """Returns that of the loss."""
        return inspect.signature(self.loss_fn)

    def __call__(self, params: PyTree, *example: Any) -> Any:
        """Returns the loss."""
        if self.pattern is not None:
            others = {*range(len(jax.tree.leaves(params)))} - matching_leaves(params, self.pattern)
            params = stopped(params, others)
        if self.compute != "float32":
            params = jax.tree.map(self._cast, params)
        return self.loss_fn(params, *example)

    def _cast(self, leaf: Any) -> Any:
        leaf = jnp.asarray(leaf)
        return leaf.astype(self.compute) if leaf.dtype == jnp.float32 else leaf


def leaf_names(params: PyTree) -> list[str]:
    """Returns the names of the parameters, such as `dense.kernel`, by the numbers of the leaves.

    What `flax.nnx` has below a parameter, its `value`, is left out where the name stays unique.
    """
    names: list[str] = []
    for path, _ in jax.tree_util.tree_leaves_with_path(params):
        whole = jax.tree_util.keystr(path, simple=True, separator=".")
        likely = (name for name in (whole.removesuffix(".value"), whole) if name not in names)
        names.append(next(likely, jax.tree_util.keystr(path)))
    return names


def matching_leaves(params: PyTree, pattern: str) -> set[int]:
    """Returns the numbers of the leaves in whose names a regular expression is found.

    Raises:
      ValueError: if there are none; it lists the names.
    """
    names = leaf_names(params)
    if found := {k for k, name in enumerate(names) if re.search(pattern, name)}:
        return found
    shown = ", ".join(names[:20]) + (f" and {len(names) - 20} more" if names[20:] else "")
    raise ValueError(f"train: {pattern!r} is found in no parameter; there are {shown}")
