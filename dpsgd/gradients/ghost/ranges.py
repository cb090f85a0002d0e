"""Ranges of integers in a jaxpr, for every input: whether look-ups of one example can coincide.

Interval arithmetic, entry by entry: a variable is known by its least and its greatest values. An
operation without a rule, and one that may overflow, gives the whole range of its dtype.
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
"""Of dtype object: Python's integers do not overflow."""

_MOST = 2**14
"""Entries of an array that are followed one by one; of a larger one only the dtype is known."""


class Range(NamedTuple):
    """The least and the greatest value of each entry of an array of integers or booleans."""

    low: Integers
    high: Integers


def _equal(a: Range, b: Range) -> tuple[Any, Any]:
    overlap = (a.low <= b.high) & (b.low <= a.high)
    return overlap & (a.low == a.high) & (b.low == b.high) & (a.low == b.low), overlap


_COMPARED: dict[str, Callable[[Range, Range], tuple[Any, Any]]] = {
    # Whether it holds for all values, and whether for any.
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
    """Returns whether no two look-ups of rows, in all `uses` of one parameter, can be of one row.

    It is proved for every input, whatever it holds; False says only that it was not.
    """
    found = _found(closed)
    rows: list[Range] = []
    for use in uses:
        axes = row_axes(use)
        if use.op != "gather" or axes is None or len(axes) != 1 or use.path not in found:
            return False
        if found[use.path].low.size > _MOST:
            return False
        index, limit = found[use.path], use.operand.shape[axes[0]]
        if np.any(index.low < 0) or np.any(index.high >= limit):
            return False  # a row that is clamped may be one that another look-up reads
        rows.append(Range(index.low.ravel(), index.high.ravel()))
    low, high = (np.concatenate(ends) for ends in zip(*rows, strict=True))
    order = np.argsort(low)
    return bool(np.all(high[order][:-1] < low[order][1:]))


def _found(closed: core.ClosedJaxpr) -> dict[Path, Range]:
    """Returns the ranges of the indices of all look-ups."""
    found: dict[Path, Range] = {}

    def visit(jaxpr: core.Jaxpr, args: Sequence[Range | None], path: Path) -> list[Range | None]:
        env: dict[Any, Range | None] = {}

        def define(variables: Sequence[Any], values: Sequence[Range | None]) -> None:
            for v, x in zip(variables, values, strict=True):
                # A constant of 64 bits may be one of 32 in the program, where it wraps.
                env[v] = _fitted(x, v.aval) or _whole(v.aval)

        def read(atom: Any) -> Range | None:
            if isinstance(atom, core.Literal):
                return _fitted(_constant(atom.val), atom.aval) or _whole(atom.aval)
            return env[atom]

        define([*jaxpr.constvars, *jaxpr.invars], args)

        for number, eqn in enumerate(jaxpr.eqns):
            here, operands = (*path, number), [read(atom) for atom in eqn.invars]
            if eqn.primitive.name in CALLS:
                inner, consts = body_of(eqn)
                outs = visit(inner, [*map(_constant, consts), *operands], here)
            else:
                if eqn.primitive.name == "gather" and operands[1] is not None:
                    found[here] = operands[1]
                outs = [_result(eqn, operands)] if len(eqn.outvars) == 1 else []
                outs += [None] * (len(eqn.outvars) - len(outs))
            define(eqn.outvars, outs)
        return [read(atom) for atom in jaxpr.outvars]

    inputs = [_whole(v.aval) for v in closed.jaxpr.invars]
    visit(closed.jaxpr, [*map(_constant, closed.consts), *inputs], ())
    return found


def _is_integer(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, np.integer) or dtype == np.bool_


def _limits(dtype: Any) -> tuple[int, int]:
    return (0, 1) if dtype == np.bool_ else (int(jnp.iinfo(dtype).min), int(jnp.iinfo(dtype).max))


def _whole(aval: Any) -> Range | None:
    """Returns the range of the dtype; None for what holds no integers."""
    if not _is_integer(aval.dtype):
        return None
    low, high = (np.broadcast_to(np.array(end, object), aval.shape) for end in _limits(aval.dtype))
    return Range(low, high)


def _fitted(x: Range | None, aval: Any) -> Range | None:
    """Returns a range in the shape of its variable; None if it is empty or beyond the dtype."""
    if x is None:
        return None
    # An operand without axes goes with every entry of the other one.
    x = Range(*(np.broadcast_to(np.asarray(end, object), aval.shape) for end in x))
    low, high = _limits(aval.dtype)
    fits = np.all(x.low >= low) and np.all(x.low <= x.high) and np.all(x.high <= high)
    return x if fits else None


def _constant(value: Any) -> Range | None:
    if isinstance(value, jax.core.Tracer) or not _is_integer(jnp.result_type(value)):
        return None
    if np.size(value) > _MOST:
        return _whole(np.asarray(value))
    exact = np.asarray(value).astype(object)
    return Range(exact, exact)


def _result(eqn: Any, operands: Sequence[Range | None]) -> Range | None:
    """Returns the range of the one output of an equation; None if it is not known."""
    known = [x for x in operands if x is not None]
    name, dtype = eqn.primitive.name, eqn.outvars[0].aval.dtype
    sizes = [eqn.outvars[0].aval.size, *(x.low.size for x in known)]
    if len(known) < len(operands) or not _is_integer(dtype) or max(sizes) > _MOST:
        return None
    if name == "iota":
        return _constant(_evaluated(eqn))
    if name in _ARITHMETIC:
        a, b = known
        ends = [_ARITHMETIC[name](x, y) for x in a for y in b]
        return Range(functools.reduce(np.minimum, ends), functools.reduce(np.maximum, ends))
    if name in _COMPARED:
        always, ever = _COMPARED[name](*known)
        return Range(np.asarray(always, object) * 1, np.asarray(ever, object) * 1)
    monotone = np.minimum if name == "and" and dtype == np.bool_ else _MONOTONE.get(name)
    if monotone is not None:
        return Range(*(monotone(*ends) for ends in zip(*known, strict=True)))
    if name == "rem" and np.all(known[1].low > 0):
        (low, high), most = known[0], known[1].high - 1
        return Range(np.where(low < 0, -most, 0), np.where(high < 0, 0, most))
    if name == "and":
        # Where one side has no sign bit, the result has none, and is at most that side.
        sure = [np.where(x.low >= 0, x.high, _limits(dtype)[1] + 1) for x in known]
        return Range(np.zeros((), object), np.minimum(*sure))
    if name == "select_n":
        which, *cases = known
        if np.any(which.low < 0) or np.any(which.high >= len(cases)):
            return None  # what is selected then is not defined
        chosen = [(which.low <= k) & (which.high >= k) for k in range(len(cases))]
        lows = [np.where(c, x.low, np.inf) for c, x in zip(chosen, cases, strict=True)]
        highs = [np.where(c, x.high, -np.inf) for c, x in zip(chosen, cases, strict=True)]
        return Range(functools.reduce(np.minimum, lows), functools.reduce(np.maximum, highs))
    if name == "clamp":
        return Range(*(np.minimum(np.maximum(x, a), b) for a, x, b in zip(*known, strict=True)))
    if name == "convert_element_type":
        return known[0]
    if name in _MOVED:
        return Range(*(_moved(eqn, [x[end] for x in known]) for end in (0, 1)))
    return None


def _moved(eqn: Any, operands: Sequence[Integers]) -> Integers:
    """Moves entries as the equation does: it is applied to their numbers."""
    starts = np.cumsum([0, *(x.size for x in operands[:-1])])
    numbers = [
        np.arange(start, start + x.size, dtype=np.int32).reshape(x.shape)
        for start, x in zip(starts, operands, strict=True)
    ]
    return np.asarray(np.concatenate([x.ravel() for x in operands])[_evaluated(eqn, *numbers)])


def _evaluated(eqn: Any, *operands: np.ndarray) -> np.ndarray:
    """Returns what one equation makes of known operands."""
    with jax.ensure_compile_time_eval():
        return np.asarray(eqn.primitive.bind(*map(jnp.asarray, operands), **eqn.params))
