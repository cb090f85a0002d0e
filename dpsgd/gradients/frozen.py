"""Frozen parameters: no derivative of the loss reaches them, as under `jax.lax.stop_gradient`.

Their gradient is 0 for every example: a fact of the trace, so that their sum needs no noise
(docs/explanation/isolation-of-examples.md).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import partial_eval

from dpsgd.gradients.losses import WrappedLoss

PyTree = Any


def frozen_leaves(
    loss_fn: Callable[[PyTree, PyTree], Any], params: PyTree, example: PyTree
) -> frozenset[int]:
    """Returns indices of leaves without a path to the loss.

    >>> def loss(w, x):
    ...     return jax.lax.stop_gradient(w["a"]) * x + w["b"]
    >>> sorted(frozen_leaves(loss, {"a": 1.0, "b": 1.0, "c": 1.0}, 2.0))
    [0, 2]
    """

    def backward(cotangent: Any, params: PyTree, example: PyTree) -> list[Any]:
        """Returns the gradient of the loss, leaf after leaf."""
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
            _, used = partial_eval.dce_jaxpr(alone, [out is outvar for outvar in eqn.outvars])
            if reached.intersection(v for v, read in zip(inputs, used, strict=True) if read):
                reached.add(out)
    return reached


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class AbsentTable:
    """Table without values, in the parameters that a loss with declared look-ups gets.

    Attributes:
      name: Name of the table, see `leaf_names`.
    """

    name: str

    def tree_flatten(self) -> tuple[tuple[()], str]:
        """Returns no children, and the name."""
        return (), self.name

    @classmethod
    def tree_unflatten(cls, name: str, _: Any) -> AbsentTable:
        """Returns the table of this name."""
        return cls(name)

    def __getattr__(self, attribute: str) -> NoReturn:
        # Of AttributeError, as Python asks for attributes that an object may lack.
        raise AttributeError(f"{self._why()} (asked for .{attribute})")

    def __getitem__(self, index: Any) -> NoReturn:
        raise ValueError(self._why())

    def __jax_array__(self) -> NoReturn:
        raise ValueError(self._why())

    def _why(self) -> str:
        return (
            f"the loss reads the table {self.name!r}, whose look-ups are declared; read "
            f"rows[{self.name!r}], or declare no look-ups of it"
        )


def _is_absent(x: Any) -> bool:
    return isinstance(x, AbsentTable)


def stopped(params: PyTree, numbers: Collection[int]) -> PyTree:
    """Returns `params` with some leaves under `jax.lax.stop_gradient`.

    Raises:
      ValueError: If one of these leaves is an `AbsentTable`.
    """
    leaves, structure = jax.tree.flatten(params, is_leaf=_is_absent)
    for k in numbers:
        if _is_absent(leaves[k]):
            raise ValueError(
                f"the table {leaves[k].name!r} is not trained, but its look-ups are declared; "
                "declare those of trained tables alone"
            )
    read = [jax.lax.stop_gradient(x) if k in numbers else x for k, x in enumerate(leaves)]
    return jax.tree.unflatten(structure, read)


@dataclass(frozen=True)
class RunLoss(WrappedLoss):
    """Loss of a task as a run computes it, with frozen parameters and casts.

    Attributes:
      pattern: Regular expression searched in the names of parameters, see `leaf_names`; parameters
        without a match are read under `stop_gradient`. None trains all.
      compute: Dtype to which float32 parameters are cast before the loss reads them.

    Raises:
      ValueError: When called, if no name matches.
    """

    pattern: str | None = None
    compute: str = "float32"

    @classmethod
    def restrict(
        cls, loss_fn: Callable[..., Any], pattern: str | None, compute: str = "float32"
    ) -> Callable[..., Any]:
        """Returns the run's loss, or `loss_fn` without pattern and cast."""
        plain = pattern is None and compute == "float32"
        return loss_fn if plain else cls(loss_fn, pattern, compute)

    def __call__(self, params: PyTree, *example: Any) -> Any:
        """Returns the loss."""
        if self.pattern is not None:
            frozen = {*range(len(leaf_names(params)))} - matching_leaves(params, self.pattern)
            params = stopped(params, frozen)
        if self.compute != "float32":
            params = jax.tree.map(self._cast, params)
        return self.loss_fn(params, *example)

    def _cast(self, leaf: Any) -> Any:
        leaf = jnp.asarray(leaf)
        return leaf.astype(self.compute) if leaf.dtype == jnp.float32 else leaf


def leaf_names(params: PyTree) -> list[str]:
    """Returns parameter names, such as `dense.kernel`, by leaf index.

    The last part `value` of a `flax.nnx` parameter is dropped if the name stays unique.
    """
    names: list[str] = []
    for path, _ in jax.tree_util.tree_leaves_with_path(params, is_leaf=_is_absent):
        label = jax.tree_util.keystr(path, simple=True, separator=".")
        unique = (name for name in (label.removesuffix(".value"), label) if name not in names)
        names.append(next(unique, jax.tree_util.keystr(path)))
    return names


def named_leaves(params: PyTree) -> dict[str, Any]:
    """Returns the leaves of parameters by name, see `leaf_names`.

    Raises:
      ValueError: If two parameters have one path, such as {"a.b": x, "a": {"b": y}}.
    """
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=_is_absent)
    labels = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]
    if len(set(labels)) < len(labels):
        twice = next(label for label in labels if labels.count(label) > 1)
        raise ValueError(f"two parameters have the name {twice!r}; rename one")
    return dict(zip(leaf_names(params), (leaf for _, leaf in leaves), strict=True))


def matching_leaves(params: PyTree, pattern: str) -> set[int]:
    """Returns indices of leaves whose names match a pattern.

    >>> sorted(matching_leaves({"bias": 0.0, "kernel": 0.0}, "kern"))
    [1]

    Args:
      params: Pytree of parameters.
      pattern: Regular expression, found anywhere in a name.

    Raises:
      ValueError: If no name matches.
    """
    names = leaf_names(params)
    if matches := {k for k, name in enumerate(names) if re.search(pattern, name)}:
        return matches
    listed = ", ".join(names[:20]) + (f" and {len(names) - 20} more" if names[20:] else "")
    raise ValueError(f"train: {pattern!r} matches no parameter; choose among {listed}")
