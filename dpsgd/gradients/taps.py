"""Where a loss uses its parameters, and the cotangents there.

A *tap* is a zero added to the output of an operation that is linear in a parameter. Its derivative
is the cotangent of that output, which gives the parameter's gradient: `dpsgd.gradients.ghost`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend import core
from jax.typing import ArrayLike

from dpsgd.gradients.isolation import ForeignCalls, require_isolated

PyTree = Any
Path = tuple[int, ...]
"""Position of an equation: its index in the jaxpr, preceded by those of the calls around it."""

_VIEWS = {"transpose", "reshape", "squeeze", "broadcast_in_dim", "convert_element_type", "slice"}
_REMAT = {"remat", "remat2", "checkpoint"}
CALLS = {"jit", "pjit", "closed_call", "core_call"} | _REMAT
"""Calls that are mere wrappers."""


@dataclass(frozen=True)
class View:
    """A variable that holds a parameter, or part of it, in another layout.

    Attributes:
      leaf: Index of the parameter.
      chain: The (primitive, its parameters) that lead from the parameter to the variable.
      labels: One name for each axis, equal for two views of one part only if the axes are the same
        axis of its coordinates; None for an axis of length 1 that the view has added.
      part: Names the coordinates of the parameter that are in view: how they were sliced out.
      isometric: Each coordinate of the parameter occurs at most once.
      whole: Each coordinate of the parameter occurs exactly once, and none has been rearranged but
        by casts: the variable is the parameter itself.
    """

    leaf: int
    chain: tuple[tuple[core.Primitive, dict[str, Any]], ...]
    labels: tuple[str | None, ...]
    part: str = ""
    isometric: bool = True
    whole: bool = True

    def __call__(self, x: Array) -> Array:
        """Applies the view to `x`, keeping its dtype: casts of the parameter are left out."""
        for primitive, params in self.chain:
            if primitive.name != "convert_element_type":
                x = primitive.bind(x, **params)
        return x


@dataclass(frozen=True)
class Use:
    """An operation, linear in one parameter, whose output is tapped.

    Attributes:
      path: Where it is.
      op: Name of its primitive.
      params: Parameters of the primitive.
      position: Which of its operands is the view of the parameter.
      view: How the parameter gets there.
      operand: Shape and dtype of that operand.
      out: Shape and dtype of the output.
      primitive: The primitive.
    """

    path: Path
    op: str
    params: dict[str, Any]
    position: int
    view: View
    operand: jax.ShapeDtypeStruct
    out: jax.ShapeDtypeStruct
    primitive: core.Primitive

    def linear(self, parameter: Array, others: Sequence[Array]) -> Array:
        """Applies the operation to a float32 `parameter` and the `others`, in highest precision."""
        x = self.view(parameter)
        if self.op in ("add", "add_any"):
            return jnp.broadcast_to(x, self.out.shape)
        if self.op == "sub":
            return jnp.broadcast_to(-x if self.position else x, self.out.shape)
        if self.op == "mul":
            return x * others[0]
        params = dict(self.params)
        if self.op in ("dot_general", "conv_general_dilated"):
            params |= {"precision": lax.Precision.HIGHEST, "preferred_element_type": jnp.float32}
        operands = list(others)
        operands.insert(self.position, x)
        return self.primitive.bind(*operands, **params)


@dataclass
class Taps:
    """The loss of one example as a jaxpr, and what is tapped in it.

    Attributes:
      closed: The jaxpr; its inputs are the leaves of the parameters, then those of the example.
      uses: For each parameter its uses, all of which are tapped; empty if it is not used.
      obstacle: For the parameters that are not tapped, the use that prevents it.
      stopped: Parameters that are read under `stop_gradient`, which is no use, as well or alone.
    """

    closed: core.ClosedJaxpr
    uses: list[list[Use]]
    obstacle: dict[int, str] = field(default_factory=dict)
    stopped: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        tapped = [u for uses in self.uses for u in uses]
        self._tapped = {u.path: u for u in tapped}
        self._calls = {u.path[:n] for u in tapped for n in range(1, len(u.path))}

    def zeros(self) -> dict[Path, Array]:
        """Returns the taps: a zero for each tapped output."""
        return {path: jnp.zeros(u.out.shape, u.out.dtype) for path, u in self._tapped.items()}

    def activation_bytes(self, num_leaves: int) -> int:
        """Returns the bytes of all values that the loss computes from the example.

        Args:
          num_leaves: How many inputs are parameters, on which alone no value that counts depends.
        """
        inputs = self.closed.jaxpr.invars
        return _value_bytes(self.closed.jaxpr, [k >= num_leaves for k in range(len(inputs))])[0]

    def loss(
        self,
        leaves: Sequence[Array],
        example: PyTree,
        taps: Mapping[Path, Array],
        others: Mapping[Path, Sequence[Array]] | None = None,
    ) -> tuple[Array, dict[Path, list[ArrayLike]]]:
        """Returns the loss of one example and, for each tap, the operands beside the parameter.

        These may be constants of the trace, which `jax.checkpoint` hands on as no arrays yet.

        Args:
          leaves: The parameters.
          example: The example.
          taps: What is added to the outputs, where it is.
          others: What takes the place of the operands beside the parameter, for some of the uses.
        """
        args = [*leaves, *jax.tree.leaves(example)]
        given = taps, others or {}
        outs, found = self._evaluate(self.closed.jaxpr, self.closed.consts, args, given, ())
        return outs[0], found

    def _evaluate(
        self,
        jaxpr: core.Jaxpr,
        consts: Sequence[Any],
        args: Sequence[Any],
        given: tuple[Mapping[Path, Array], Mapping[Path, Sequence[Array]]],
        path: Path,
    ) -> tuple[list[Any], dict[Path, list[ArrayLike]]]:
        env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
        others: dict[Path, list[ArrayLike]] = {}

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, core.Literal) else env[atom]

        for index, eqn in enumerate(jaxpr.eqns):
            here = (*path, index)
            operands = [read(atom) for atom in eqn.invars]
            if here in self._calls:
                inner, inner_consts = body_of(eqn)

                def call(operands, given, inner=inner, inner_consts=inner_consts, here=here):
                    return self._evaluate(inner, inner_consts, operands, given, here)

                if eqn.primitive.name in _REMAT:
                    call = jax.checkpoint(
                        call, policy=eqn.params["policy"], prevent_cse=eqn.params["prevent_cse"]
                    )
                taps, replaced = (
                    {p: x for p, x in those.items() if p[: len(here)] == here} for those in given
                )
                outs, found = call(operands, (taps, replaced))
                others |= found
            elif here in given[1]:
                use = self._tapped[here]
                beside = list(given[1][here])
                beside.insert(use.position, operands[use.position])
                outs = [use.primitive.bind(*beside, **use.params)]
            else:
                single = jaxpr.replace(
                    constvars=[], invars=_variables(eqn), outvars=eqn.outvars, eqns=[eqn]
                )
                outs = core.jaxpr_as_fun(core.ClosedJaxpr(single, []))(
                    *(env[v] for v in single.invars)
                )
            if here in self._tapped:
                position = self._tapped[here].position
                others[here] = [
                    jnp.asarray(x, _aval(atom).dtype)
                    for k, (x, atom) in enumerate(zip(operands, eqn.invars, strict=True))
                    if k != position
                ]
                if here in given[0]:
                    outs = [outs[0] + given[0][here]]
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(atom) for atom in jaxpr.outvars], others


def _value_bytes(jaxpr: core.Jaxpr, varies: Sequence[bool]) -> tuple[int, list[bool]]:
    """Returns the bytes of the values that depend on certain inputs, and which outputs are such.

    All rounds of a scan count. In loops and branches every input is taken for one that varies.
    """
    counted = {v for v, flag in zip(jaxpr.invars, varies, strict=True) if flag}
    total = 0
    for eqn in jaxpr.eqns:
        flags = [not isinstance(v, core.Literal) and v in counted for v in eqn.invars]
        if not any(flags):
            continue
        name, inside = eqn.primitive.name, 0
        results = [True] * len(eqn.outvars)
        for body in core.jaxprs_in_params(eqn.params):
            wrapped = name in CALLS
            size, outs = _value_bytes(body, flags if wrapped else [True] * len(body.invars))
            inside = max(inside, size * (eqn.params["length"] if name == "scan" else 1))
            results = outs if wrapped else results
        counted.update(v for v, flag in zip(eqn.outvars, results, strict=True) if flag)
        outputs = (_aval(v) for v in eqn.outvars)
        total += max(inside, sum(x.size * x.dtype.itemsize for x in outputs))
    return total, [not isinstance(v, core.Literal) and v in counted for v in jaxpr.outvars]


def _variables(eqn: Any) -> list[Any]:
    return list(dict.fromkeys(v for v in eqn.invars if not isinstance(v, core.Literal)))


def _aval(atom: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype)


def body_of(eqn: Any) -> tuple[core.Jaxpr, Sequence[Any]]:
    """Returns the jaxpr that a call evaluates, and its constants."""
    body = eqn.params["jaxpr"] if "jaxpr" in eqn.params else eqn.params["call_jaxpr"]
    return (body.jaxpr, body.consts) if isinstance(body, core.ClosedJaxpr) else (body, [])


def find_taps(loss_fn: Callable[[PyTree, PyTree], Array], params: PyTree, example: PyTree) -> Taps:
    """Traces `loss_fn` and decides where to tap it.

    A parameter is tapped if each of its uses, seen through views and wrappers (jit, remat), is a
    contraction, a convolution, a look-up, or a sum or product of entries; not if a loop, a branch,
    or a function with its own derivative rule gets hold of it.

    Raises:
      ValueError: if examples could mix, see `dpsgd.gradients.isolation`.
    """
    closed = jax.make_jaxpr(loss_fn)(params, example)
    require_isolated(closed, foreign_calls=isinstance(loss_fn, ForeignCalls))
    leaves = jax.tree.leaves(params)
    uses: list[list[Use]] = [[] for _ in leaves]
    obstacle: dict[int, str] = {}
    stopped: set[int] = set()

    def visit(jaxpr: core.Jaxpr, views: Sequence[View | None], path: Path) -> list[View | None]:
        env = {v: view for v, view in zip(jaxpr.invars, views, strict=True) if view is not None}

        def lookup(atom: Any) -> View | None:
            return None if isinstance(atom, core.Literal) else env.get(atom)

        for index, eqn in enumerate(jaxpr.eqns):
            operands = [lookup(atom) for atom in eqn.invars]
            present = [(k, view) for k, view in enumerate(operands) if view is not None]
            if not present:
                continue
            here, name = (*path, index), eqn.primitive.name
            if name == "stop_gradient":
                stopped.update(view.leaf for _, view in present)
                continue  # a value like others: no gradient flows back
            if name in CALLS:
                results = visit(body_of(eqn)[0], operands, here)
                env.update(
                    (v, view)
                    for v, view in zip(eqn.outvars, results, strict=True)
                    if view is not None
                )
                continue
            position, view = present[0]
            seen = _seen_through(view, eqn) if name in _VIEWS and len(eqn.invars) == 1 else None
            if seen is not None:
                env[eqn.outvars[0]] = seen
            elif len(present) == 1 and _is_linear(name, position, eqn):
                operand, out = _aval(eqn.invars[position]), _aval(eqn.outvars[0])
                use = Use(
                    path=here,
                    op=name,
                    params=dict(eqn.params),
                    position=position,
                    view=view,
                    operand=operand,
                    out=out,
                    primitive=eqn.primitive,
                )
                uses[view.leaf].append(use)
            else:
                for _, view in present:
                    obstacle.setdefault(view.leaf, name)
        return [lookup(atom) for atom in jaxpr.outvars]

    whole = [
        View(k, (), tuple(str(axis) for axis in range(jnp.ndim(leaf))))
        for k, leaf in enumerate(leaves)
    ]
    inputs = [*whole, *(None for _ in closed.jaxpr.invars[len(leaves) :])]
    for result in visit(closed.jaxpr, inputs, ()):
        if result is not None:
            obstacle.setdefault(result.leaf, "the loss itself")
    used = [[] if k in obstacle else u for k, u in enumerate(uses)]
    return Taps(closed, used, obstacle, frozenset(stopped))


def _seen_through(view: View, eqn: Any) -> View | None:
    """Returns the view that the equation makes of another, or None if it makes something else."""
    name, params = eqn.primitive.name, dict(eqn.params)
    before, after = _aval(eqn.invars[0]), _aval(eqn.outvars[0])
    longer = replace(view, chain=(*view.chain, (eqn.primitive, params)), whole=False)
    # Axes that are not those of the parameter any more are named after the way they came about.
    history = "/".join(f"{p.name}{q}" for p, q in longer.chain if p.name != "convert_element_type")
    fresh = tuple(f"{history}:{axis}" for axis in range(len(after.shape)))
    if name == "convert_element_type":
        if not jnp.issubdtype(after.dtype, jnp.floating):
            return None
        return replace(longer, whole=view.whole)
    if name == "transpose":
        return replace(longer, labels=tuple(view.labels[axis] for axis in params["permutation"]))
    if name == "slice":
        return replace(longer, labels=fresh, part=history)
    if name == "broadcast_in_dim":
        labels: list[str | None] = [None] * len(after.shape)
        for axis, target in enumerate(params["broadcast_dimensions"]):
            labels[target] = view.labels[axis]
        return replace(
            longer,
            labels=tuple(labels),
            isometric=view.isometric and before.size == after.size,
        )
    kept = [label for label, size in zip(view.labels, before.shape, strict=True) if size != 1]
    in_order = name == "squeeze" or params["dimensions"] is None  # a reshape may transpose first
    if in_order and [n for n in before.shape if n != 1] == [n for n in after.shape if n != 1]:
        names = iter(kept)
        return replace(longer, labels=tuple(None if n == 1 else next(names) for n in after.shape))
    return replace(longer, labels=fresh)


def _is_linear(name: str, position: int, eqn: Any) -> bool:
    """Whether the equation is an operation with a rule, linear in the operand at `position`."""
    if not jnp.issubdtype(_aval(eqn.outvars[0]).dtype, jnp.floating):
        return False
    if name in ("dot_general", "add", "add_any", "sub", "mul"):
        return True
    if name == "conv_general_dilated":
        return position == 1
    return name in ("gather", "dynamic_slice") and position == 0
