"""Integer ranges in a jaxpr for every input, to prove look-ups distinct.

Interval arithmetic, entry by entry: the least and the greatest value of each variable. An operation
without a rule, and one that may overflow, gives the whole range of its dtype.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from dpsgd.gradients.ghost.uses import row_axes
from dpsgd.gradients.taps import CALLS, Path, Use, body_of

Integers = np.ndarray
"""Array of dtype object, whose Python integers do not overflow."""

_MOST = 2**14
"""Largest array followed entry by entry; of a larger one only the dtype is known."""


class Range(NamedTuple):
    """Least and greatest value of each entry of an integer or boolean array."""

    low: Integers
    high: Integers


def _equal(a: Range, b: Range) -> tuple[Any, Any]:
    overlap = (a.low <= b.high) & (b.low <= a.high)
    return overlap & (a.low == a.high) & (b.low == b.high) & (a.low == b.low), overlap


_COMPARED: dict[str, Callable[[Range, Range], tuple[Any, Any]]] = {
    # (True if it holds for all values, True if it holds for any).
    "eq": _equal,
    "ne": lambda a, b: (1 - _equal(a, b)[1] * 1, 1 - _equal(a, b)[0] * 1),
    "lt": lambda a, b: (a.high < b.low, a.low < b.high),
    "le": lambda a, b: (a.high <= b.low, a.low <= b.high),
    "gt": lambda a, b: (a.low > b.high, a.high > b.low),
    "ge": lambda a, b: (a.low >= b.high, a.high >= b.low),
}
_ARITHMETIC = {"add": operator.add, "sub": operator.sub, "mul": operator.mul}
_MONOTONE = {"max": np.maximum, "min": np.minimum}
_MOVED = {
    "broadcast_in_dim", "reshape", "squeeze", "transpose", "slice", "concatenate", "stack", "rev",
}  # fmt: skip


def never_coincide(closed: core.ClosedJaxpr, uses: Sequence[Use]) -> bool:
    """Returns True if look-ups provably read distinct rows.

    The proof covers every input; False means that no proof was found.

    Args:
      closed: Jaxpr of the loss of one example.
      uses: All uses of the parameter.
    """
    ranges_by_path = _find_look_up_ranges(closed)
    rows: list[Range] = []
    for use in uses:
        axes = row_axes(use)
        if use.op != "gather" or axes is None or len(axes) != 1 or use.path not in ranges_by_path:
            return False
        if ranges_by_path[use.path].low.size > _MOST:
            return False
        index, limit = ranges_by_path[use.path], use.operand.shape[axes[0]]
        if np.any(index.low < 0) or np.any(index.high >= limit):
            return False  # a row that is clamped may be one that another look-up reads
        rows.append(Range(index.low.ravel(), index.high.ravel()))
    low, high = (np.concatenate(bounds) for bounds in zip(*rows, strict=True))
    order = np.argsort(low)
    return bool(np.all(high[order][:-1] < low[order][1:]))


def _find_look_up_ranges(closed: core.ClosedJaxpr) -> dict[Path, Range]:
    """Returns the ranges of the indices of all look-ups."""
    ranges_by_path: dict[Path, Range] = {}

    def visit(jaxpr: core.Jaxpr, args: Sequence[Range | None], path: Path) -> list[Range | None]:
        env: dict[Any, Range | None] = {}

        def define(variables: Sequence[Any], values: Sequence[Range | None]) -> None:
            for v, x in zip(variables, values, strict=True):
                # A constant of 64 bits may be one of 32 in the program, where it wraps.
                env[v] = _fitted(x, v.aval) or _dtype_range(v.aval)

        def read(atom: Any) -> Range | None:
            if isinstance(atom, core.Literal):
                return _fitted(_constant(atom.val), atom.aval) or _dtype_range(atom.aval)
            return env[atom]

        define([*jaxpr.constvars, *jaxpr.invars], args)

        for number, eqn in enumerate(jaxpr.eqns):
            place, operands = (*path, number), [read(atom) for atom in eqn.invars]
            if eqn.primitive.name in CALLS:
                inner, consts = body_of(eqn)
                outs = visit(inner, [*map(_constant, consts), *operands], place)
            else:
                if eqn.primitive.name == "gather" and operands[1] is not None:
                    ranges_by_path[place] = operands[1]
                outs = [_result(eqn, operands)] if len(eqn.outvars) == 1 else []
                outs += [None] * (len(eqn.outvars) - len(outs))
            define(eqn.outvars, outs)
        return [read(atom) for atom in jaxpr.outvars]

    inputs = [_dtype_range(v.aval) for v in closed.jaxpr.invars]
    visit(closed.jaxpr, [*map(_constant, closed.consts), *inputs], ())
    return ranges_by_path


def _is_integer(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, np.integer) or dtype == np.bool_


def _limits(dtype: Any) -> tuple[int, int]:
    return (0, 1) if dtype == np.bool_ else (int(jnp.iinfo(dtype).min), int(jnp.iinfo(dtype).max))


def _dtype_range(aval: Any) -> Range | None:
    """Returns the whole range of the dtype; None if it is not an integer."""
    if not _is_integer(aval.dtype):
        return None
    low, high = (np.broadcast_to(np.array(x, object), aval.shape) for x in _limits(aval.dtype))
    return Range(low, high)


def _fitted(x: Range | None, aval: Any) -> Range | None:
    """Returns a range in its variable's shape; None if empty or beyond the dtype."""
    if x is None:
        return None
    # An operand without axes goes with every entry of the other one.
    x = Range(*(np.broadcast_to(np.asarray(bound, object), aval.shape) for bound in x))
    low, high = _limits(aval.dtype)
    fits = np.all(x.low >= low) and np.all(x.low <= x.high) and np.all(x.high <= high)
    return x if fits else None


def _constant(value: Any) -> Range | None:
    if isinstance(value, jax.core.Tracer) or not _is_integer(jnp.result_type(value)):
        return None
    if np.size(value) > _MOST:
        return _dtype_range(np.asarray(value))
    exact = np.asarray(value).astype(object)
    return Range(exact, exact)


def _result(eqn: Any, operands: Sequence[Range | None]) -> Range | None:
    """Returns the range of an equation's output; None if it is not known."""
    ranges = [x for x in operands if x is not None]
    name, dtype = eqn.primitive.name, eqn.outvars[0].aval.dtype
    sizes = [eqn.outvars[0].aval.size, *(x.low.size for x in ranges)]
    if len(ranges) < len(operands) or not _is_integer(dtype) or max(sizes) > _MOST:
        return None
    if name == "iota":
        return _constant(_evaluated(eqn))
    if name in _ARITHMETIC:
        a, b = ranges
        bounds = [_ARITHMETIC[name](x, y) for x in a for y in b]
        return Range(functools.reduce(np.minimum, bounds), functools.reduce(np.maximum, bounds))
    if name in _COMPARED:
        always, ever = _COMPARED[name](*ranges)
        return Range(np.asarray(always, object) * 1, np.asarray(ever, object) * 1)
    monotone = np.minimum if name == "and" and dtype == np.bool_ else _MONOTONE.get(name)
    if monotone is not None:
        return Range(*(monotone(*bounds) for bounds in zip(*ranges, strict=True)))
    if name == "rem" and np.all(ranges[1].low > 0):
        (low, high), largest = ranges[0], ranges[1].high - 1
        return Range(np.where(low < 0, -largest, 0), np.where(high < 0, 0, largest))
    if name == "and":
        # Where one side has no sign bit, the result has none, and is at most that side.
        sure = [np.where(x.low >= 0, x.high, _limits(dtype)[1] + 1) for x in ranges]
        return Range(np.zeros((), object), np.minimum(*sure))
    if name == "select_n":
        selector, *cases = ranges
        if np.any(selector.low < 0) or np.any(selector.high >= len(cases)):
            return None  # what is selected then is not defined
        chosen = [(selector.low <= k) & (selector.high >= k) for k in range(len(cases))]
        lows = [np.where(c, x.low, np.inf) for c, x in zip(chosen, cases, strict=True)]
        highs = [np.where(c, x.high, -np.inf) for c, x in zip(chosen, cases, strict=True)]
        return Range(functools.reduce(np.minimum, lows), functools.reduce(np.maximum, highs))
    if name == "clamp":
        return Range(*(np.minimum(np.maximum(x, a), b) for a, x, b in zip(*ranges, strict=True)))
    if name == "convert_element_type":
        return ranges[0]
    if name in _MOVED:
        return Range(*(_moved(eqn, [x[index] for x in ranges]) for index in (0, 1)))
    return None


def _moved(eqn: Any, operands: Sequence[Integers]) -> Integers:
    """Rearranges entries as the equation does, by applying it to their numbers."""
    starts = np.cumsum([0, *(x.size for x in operands[:-1])])
    numbers = [
        np.arange(start, start + x.size, dtype=np.int32).reshape(x.shape)
        for start, x in zip(starts, operands, strict=True)
    ]
    return np.asarray(np.concatenate([x.ravel() for x in operands])[_evaluated(eqn, *numbers)])


def _evaluated(eqn: Any, *operands: np.ndarray) -> np.ndarray:
    """Evaluates one equation on concrete operands."""
    with jax.ensure_compile_time_eval():
        return np.asarray(eqn.primitive.bind(*map(jnp.asarray, operands), **eqn.params))
