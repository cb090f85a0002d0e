"""Taps: the uses of parameters in a loss, and the cotangents there.

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

from dpsgd.gradients.isolation import require_isolated
from dpsgd.gradients.losses import allows_foreign_calls

PyTree = Any
Path = tuple[int, ...]
"""Position of an equation: its index in the jaxpr, after the indices of the calls around it."""

_VIEWS = {"transpose", "reshape", "squeeze", "broadcast_in_dim", "convert_element_type", "slice"}
_REMAT = {"remat", "remat2", "checkpoint"}
CALLS = {"jit", "pjit", "closed_call", "core_call"} | _REMAT
"""Primitives of calls that only wrap their body."""


@dataclass(frozen=True)
class View:
    """Variable that holds a parameter, or part of it, in another layout.

    Attributes:
      leaf: Index of the parameter.
      chain: Pairs (primitive, its parameters) that lead from the parameter to the variable.
      labels: One name for each axis, equal for two views of one slice only for the same axis of the
        parameter; None for an axis of length 1 that the view has added.
      slicing: Name of the visible coordinates of the parameter, by the slices that led to them.
      isometric: True if each coordinate of the parameter occurs at most once.
      identity: True if the variable is the parameter itself up to casts: every coordinate occurs
        exactly once, in its place.
    """

    leaf: int
    chain: tuple[tuple[core.Primitive, dict[str, Any]], ...]
    labels: tuple[str | None, ...]
    slicing: str = ""
    isometric: bool = True
    identity: bool = True

    def __call__(self, x: Array) -> Array:
        """Applies the view to `x`, keeping its dtype: casts of the parameter are left out."""
        for primitive, params in self.chain:
            if primitive.name != "convert_element_type":
                x = primitive.bind(x, **params)
        return x


@dataclass(frozen=True)
class Use:
    """Operation, linear in one parameter, whose output is tapped.

    Attributes:
      path: Position of the equation.
      op: Name of its primitive.
      params: Parameters of the primitive.
      position: Index of the operand that views the parameter.
      view: View of the parameter that the operation reads.
      operand: Shape and dtype of that operand.
      out: Shape and dtype of the output.
      primitive: Primitive of the equation.
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
        """Applies the operation to a float32 parameter, in highest precision.

        Args:
          parameter: float32 array in the parameter's layout.
          others: Operands beside the parameter, in order.
        """
        x = self.view(parameter)
        if self.op in ("add", "add_any", "sub"):
            is_subtracted = self.op == "sub" and self.position == 1
            return jnp.broadcast_to(-x if is_subtracted else x, self.out.shape)
        if self.op == "mul":
            return x * others[0]
        params = dict(self.params)
        if self.op in ("dot_general", "conv_general_dilated"):
            params |= {"precision": lax.Precision.HIGHEST, "preferred_element_type": jnp.float32}
        if params.get("feature_group_count", 1) > 1:
            others, params = _in_batch_groups(others[0], params)
        return self.primitive.bind(*others[: self.position], x, *others[self.position :], **params)


@dataclass
class Taps:
    """Loss of one example as a jaxpr, and its tapped outputs.

    Attributes:
      closed: Jaxpr of the loss; its inputs are the leaves of the parameters, then the example's
        leaves.
      uses: Tapped uses of each parameter; empty for an unused parameter.
      obstacle: Operation that prevents tapping, for each parameter without taps.
    """

    closed: core.ClosedJaxpr
    uses: list[list[Use]]
    obstacle: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        tapped = [u for uses in self.uses for u in uses]
        self._tapped = {u.path: u for u in tapped}
        self._calls = {u.path[:n] for u in tapped for n in range(1, len(u.path))}

    def zeros(self) -> dict[Path, Array]:
        """Returns the taps: a zero for each tapped output."""
        return {path: jnp.zeros(u.out.shape, u.out.dtype) for path, u in self._tapped.items()}

    def activation_bytes(self, num_leaves: int) -> int:
        """Returns the bytes of all values computed from the example.

        Args:
          num_leaves: Number of leading inputs that are parameters, whose values do not count.
        """
        inputs = self.closed.jaxpr.invars
        return _value_bytes(self.closed.jaxpr, [k >= num_leaves for k in range(len(inputs))])[0]

    def loss(
        self, leaves: Sequence[Array], example: PyTree, taps: Mapping[Path, Array]
    ) -> tuple[Array, dict[Path, list[ArrayLike]]]:
        """Returns an example's loss and each tap's other operands.

        Operands may be constants of the trace, which `jax.checkpoint` passes on unconverted.

        Args:
          leaves: Leaves of the parameters.
          example: Tree of one example.
          taps: Arrays added to tapped outputs, by path.
        """
        args = [*leaves, *jax.tree.leaves(example)]
        outs, beside = self._evaluate(self.closed.jaxpr, self.closed.consts, args, taps, ())
        return outs[0], beside

    def _evaluate(
        self,
        jaxpr: core.Jaxpr,
        consts: Sequence[Any],
        args: Sequence[Any],
        taps: Mapping[Path, Array],
        path: Path,
    ) -> tuple[list[Any], dict[Path, list[ArrayLike]]]:
        env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
        beside_parameter: dict[Path, list[ArrayLike]] = {}

        def read(atom: Any) -> Any:
            """Returns the value of a variable or literal."""
            return atom.val if isinstance(atom, core.Literal) else env[atom]

        for index, eqn in enumerate(jaxpr.eqns):
            place = (*path, index)
            operands = [read(atom) for atom in eqn.invars]
            if place in self._calls:
                inner, inner_consts = body_of(eqn)

                def call(operands, taps, inner=inner, inner_consts=inner_consts, place=place):
                    """Evaluates the body of a call with its taps."""
                    return self._evaluate(inner, inner_consts, operands, taps, place)

                if eqn.primitive.name in _REMAT:
                    call = jax.checkpoint(
                        call, policy=eqn.params["policy"], prevent_cse=eqn.params["prevent_cse"]
                    )
                inside = {p: x for p, x in taps.items() if p[: len(place)] == place}
                outs, inner_operands = call(operands, inside)
                beside_parameter |= inner_operands
            else:
                single = jaxpr.replace(
                    constvars=[], invars=_variables(eqn), outvars=eqn.outvars, eqns=[eqn]
                )
                outs = core.jaxpr_as_fun(core.ClosedJaxpr(single, []))(
                    *(env[v] for v in single.invars)
                )
            if place in self._tapped:
                position = self._tapped[place].position
                beside_parameter[place] = [
                    jnp.asarray(x, _aval(atom).dtype)
                    for k, (x, atom) in enumerate(zip(operands, eqn.invars, strict=True))
                    if k != position
                ]
                outs = [outs[0] + taps[place]]
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(atom) for atom in jaxpr.outvars], beside_parameter


def _value_bytes(jaxpr: core.Jaxpr, varies: Sequence[bool]) -> tuple[int, list[bool]]:
    """Returns the bytes of values that depend on the varying inputs, and the varying outputs.

    All rounds of a scan count. In loops and branches every input counts as varying.
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


def _in_batch_groups(images: Array, params: dict[str, Any]) -> tuple[list[Array], dict[str, Any]]:
    """Returns images and parameters of a convolution with batch in place of feature groups.

    Its transpose has feature groups, not batch groups, which XLA multiplies with each other.
    """
    groups, axes = params["feature_group_count"], params["dimension_numbers"].lhs_spec[:2]
    x = jnp.moveaxis(images, axes, (0, 1))
    count, features, *window = x.shape
    x = x.reshape(count, groups, features // groups, *window).swapaxes(0, 1)
    x = jnp.moveaxis(x.reshape(groups * count, features // groups, *window), (0, 1), axes)
    return [x], params | {"feature_group_count": 1, "batch_group_count": groups}


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
    or a function with its own derivative rule reads it.

    Args:
      loss_fn: (params, example) -> scalar.
      params: Tree of floating-point arrays.
      example: One example, arrays or `jax.ShapeDtypeStruct`.

    Raises:
      ValueError: If examples could mix, see `dpsgd.gradients.isolation`.
    """
    closed = jax.make_jaxpr(loss_fn)(params, example)
    require_isolated(closed, foreign_calls=allows_foreign_calls(loss_fn))
    leaves = jax.tree.leaves(params)
    uses: list[list[Use]] = [[] for _ in leaves]
    finder = _Finder(uses)
    identities = [
        View(k, (), tuple(str(axis) for axis in range(jnp.ndim(leaf))))
        for k, leaf in enumerate(leaves)
    ]
    inputs = [*identities, *(None for _ in closed.jaxpr.invars[len(leaves) :])]
    for result in finder.visit(closed.jaxpr, inputs, ()):
        if result is not None:
            finder.obstacle.setdefault(result.leaf, "the loss itself")
    used = [[] if k in finder.obstacle else u for k, u in enumerate(uses)]
    return Taps(closed, used, finder.obstacle)


@dataclass
class _Finder:
    """Search for uses of parameters in a jaxpr.

    Attributes:
      uses: Uses found, by parameter.
      obstacle: First operation that prevents tapping, by parameter.
    """

    uses: list[list[Use]]
    obstacle: dict[int, str] = field(default_factory=dict)

    def visit(
        self, jaxpr: core.Jaxpr, views: Sequence[View | None], path: Path
    ) -> list[View | None]:
        """Returns the parameter views among a jaxpr's outputs.

        Args:
          jaxpr: Jaxpr to search.
          views: View that each input holds, or None.
          path: Position of the call that evaluates it; empty for the loss itself.
        """
        env = {v: view for v, view in zip(jaxpr.invars, views, strict=True) if view is not None}

        def lookup(atom: Any) -> View | None:
            """Returns the view that a variable holds, or None."""
            return None if isinstance(atom, core.Literal) else env.get(atom)

        for index, eqn in enumerate(jaxpr.eqns):
            operands = [lookup(atom) for atom in eqn.invars]
            # Under stop_gradient a value is like others: no gradient flows back.
            if not any(operands) or eqn.primitive.name == "stop_gradient":
                continue
            if eqn.primitive.name in CALLS:
                results = self.visit(body_of(eqn)[0], operands, (*path, index))
            else:
                results = [self._view_or_use(eqn, operands, (*path, index))]
            outputs = zip(eqn.outvars, results, strict=False)
            env.update((v, view) for v, view in outputs if view is not None)
        return [lookup(atom) for atom in jaxpr.outvars]

    def _view_or_use(self, eqn: Any, operands: Sequence[View | None], place: Path) -> View | None:
        """Returns the output of an equation if it is a view; notes a use or an obstacle if not."""
        name = eqn.primitive.name
        present = [(k, view) for k, view in enumerate(operands) if view is not None]
        position, view = present[0]
        viewed = _apply_view(view, eqn) if name in _VIEWS and len(eqn.invars) == 1 else None
        if viewed is not None:
            return viewed
        if len(present) == 1 and _is_linear(name, position, eqn):
            use = Use(
                path=place,
                op=name,
                params=dict(eqn.params),
                position=position,
                view=view,
                operand=_aval(eqn.invars[position]),
                out=_aval(eqn.outvars[0]),
                primitive=eqn.primitive,
            )
            self.uses[view.leaf].append(use)
        else:
            for _, view in present:
                self.obstacle.setdefault(view.leaf, name)
        return None


def _apply_view(view: View, eqn: Any) -> View | None:
    """Returns the view after an equation, or None if its result is not a view."""
    name, params = eqn.primitive.name, dict(eqn.params)
    old, new = _aval(eqn.invars[0]), _aval(eqn.outvars[0])
    longer = replace(view, chain=(*view.chain, (eqn.primitive, params)), identity=False)
    # Axes that are no longer the parameter's are named after the operations that made them.
    history = "/".join(f"{p.name}{q}" for p, q in longer.chain if p.name != "convert_element_type")
    fresh = tuple(f"{history}:{axis}" for axis in range(len(new.shape)))
    if name == "convert_element_type":
        if not jnp.issubdtype(new.dtype, jnp.floating):
            return None
        return replace(longer, identity=view.identity)
    if name == "transpose":
        return replace(longer, labels=tuple(view.labels[axis] for axis in params["permutation"]))
    if name == "slice":
        return replace(longer, labels=fresh, slicing=history)
    if name == "broadcast_in_dim":
        labels: list[str | None] = [None] * len(new.shape)
        for axis, target in enumerate(params["broadcast_dimensions"]):
            labels[target] = view.labels[axis]
        return replace(
            longer,
            labels=tuple(labels),
            isometric=view.isometric and old.size == new.size,
        )
    named = [label for label, size in zip(view.labels, old.shape, strict=True) if size != 1]
    in_order = name == "squeeze" or params["dimensions"] is None  # a reshape may transpose first
    if in_order and [n for n in old.shape if n != 1] == [n for n in new.shape if n != 1]:
        names = iter(named)
        return replace(longer, labels=tuple(None if n == 1 else next(names) for n in new.shape))
    return replace(longer, labels=fresh)


def _is_linear(name: str, position: int, eqn: Any) -> bool:
    """True if an equation has a rule and is linear in the operand at `position`."""
    if not jnp.issubdtype(_aval(eqn.outvars[0]).dtype, jnp.floating):
        return False
    if name in ("dot_general", "add", "add_any", "sub", "mul"):
        return True
    if name == "conv_general_dilated":
        return position == 1
    return name in ("gather", "dynamic_slice") and position == 0
