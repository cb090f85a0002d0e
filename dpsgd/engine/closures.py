"""Checks that the parts of a program hold no private rows and make no host calls.

Data in a closure bypass clipping and noise. An array of the shape of rows is refused, unless
declared public: docs/explanation/non-interference-of-the-program.md.
"""

from __future__ import annotations

import functools
import hashlib
import numbers
import operator
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.extend import core, source_info_util

from dpsgd.core.marks import mark
from dpsgd.core.state import TrainState
from dpsgd.engine.algorithm import Algorithm
from dpsgd.engine.programs import MOST_PROGRAMS, Parts, in_32_bits
from dpsgd.gradients.clipping import ClippedSum
from dpsgd.gradients.isolation import host_fault, inner_jaxprs
from samplers import BatchSampler

PyTree = Any

_HANDFUL = 8
"""Largest array that is never refused, entries; biases of tiny models are allowed."""

_LIBRARIES = {
    *("beartype", "flax", "jax", "jaxlib", "jaxtyping", "numpy", "optax", "scipy"),
    *("accounting", "dpsgd", "samplers"),
}

_ARRAYS = np.ndarray, jax.Array
_declared: set[bytes] = set()


def public(arrays: PyTree) -> PyTree:
    """Declares arrays as public.

    A loss or an optimizer may then hold them. Their values must depend on no private row: no
    epsilon covers them.

    Args:
      arrays: Array or tree of arrays; arrays computed from them need their own declaration.

    Returns:
      The same arrays.

    >>> scale = public(np.linspace(1.0, 2.0, 1_000, dtype=np.float32))
    """
    _declared.update(map(_digest, jax.tree.leaves(arrays)))
    return arrays


def _digest(array: Any) -> bytes:
    """Returns a hash of an array in a program's 32 bits."""
    array = np.asarray(array)
    with in_32_bits():
        array = array.astype(jax.dtypes.canonicalize_dtype(array.dtype))
    digest = hashlib.blake2b(f"{array.dtype}{array.shape}".encode(), digest_size=32)
    digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.digest()


def held_arrays(trace: Any) -> Iterator[tuple[Any, str]]:
    """Yields a trace's arrays, and the place of first use.

    Arrays of calls in the trace are included; declared arrays, arrays of a handful of entries and
    constant booleans, which JAX makes from known indices, are not.

    >>> trace = jax.make_jaxpr(lambda x: x + np.arange(9.0))(np.float32(1))
    >>> [array.shape for array, _ in held_arrays(trace)]
    [(9,)]
    """
    for const, jaxpr, variable in _constants(trace):
        if _may_be_rows(const):
            yield const, _first_use(jaxpr, variable)


@functools.lru_cache(maxsize=MOST_PROGRAMS)  # every run of a program asks again
def _constants(trace: Any) -> list[tuple[Any, core.Jaxpr, Any]]:
    """Returns a trace's constants, with the jaxprs and variables that hold them."""
    return [
        (const, jaxpr, variable)
        for jaxpr, consts in _traces(trace, set())
        for variable, const in zip(jaxpr.constvars, consts, strict=True)
    ]


def _may_be_rows(array: Any) -> bool:
    if np.size(array) <= _HANDFUL or jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        return False
    alike = array.dtype == bool and bool(np.all(array)) == bool(np.any(array))
    return not (alike or _digest(array) in _declared)


def _is_table(x: Any) -> bool:
    """Returns True for a data frame, a buffer, and a container of numbers or rows of numbers."""
    if isinstance(x, str | bytes | range | type) or operator.length_hint(x) <= _HANDFUL:
        return False
    if not isinstance(x, Mapping | list | tuple | set | frozenset):
        return not callable(x)
    first = next(iter(x.values() if isinstance(x, Mapping) else x))
    return isinstance(first, numbers.Number | list | tuple | np.ndarray)


def reachable_arrays(part: Any) -> Iterator[tuple[Any, str]]:
    """Yields arrays and other tables reachable from a function, with their names.

    The search follows variables of closures, globals named in the code and in functions within it,
    default values, partials, containers, and attributes and `__call__` of callable objects. The
    object of a method, such as a task with its data, is searched only for arrays that the method
    names. Globals of libraries are skipped: `_LIBRARIES`.
    """
    waiting, visited = [(part, "")], set[int]()
    while waiting:
        x, name = waiting.pop()
        if id(x) in visited or isinstance(x, jax.core.Tracer):
            continue
        visited.add(id(x))
        if isinstance(x, _ARRAYS):
            if x.dtype != object and _may_be_rows(x):
                yield x, name
            continue
        if _is_table(x):
            yield x, name
        if isinstance(x, Mapping):
            waiting += [(v, f"{name}[{k!r}]") for k, v in x.items()]
        elif isinstance(x, list | tuple | set | frozenset):
            waiting += [(v, name) for v in x]
        elif isinstance(x, functools.partial):
            waiting += [(x.func, name), (x.args, "an argument"), (x.keywords, "an argument")]
        elif isinstance(x, types.MethodType):
            attrs, code = getattr(x.__self__, "__dict__", {}), getattr(x.__func__, "__code__", None)
            named = [(attrs[k], f"self.{k}") for k in _names(code) if k in attrs]
            waiting += [(v, k) for v, k in named if isinstance(v, _ARRAYS) or _is_table(v)]
            waiting.append((x.__func__, name))
        elif isinstance(x, types.FunctionType):
            cells = zip(x.__code__.co_freevars, x.__closure__ or (), strict=True)
            waiting += [(_content(cell), variable) for variable, cell in cells]
            waiting += [(x.__defaults__, "a default"), (x.__kwdefaults__, "a default")]
            if x.__module__ and x.__module__.partition(".")[0] not in _LIBRARIES:
                names = _names(x.__code__)
                waiting += [(x.__globals__[k], k) for k in names if k in x.__globals__]
        elif callable(x) and not isinstance(x, type):
            call = type(x).__call__
            waiting.append((call if isinstance(call, types.FunctionType) else None, name))
            waiting.append((getattr(x, "__wrapped__", None), name))
            waiting += [(v, f"{name}.{k}") for k, v in getattr(x, "__dict__", {}).items()]


def _names(code: types.CodeType | None) -> list[str]:
    """Returns the globals and attributes named in code and in functions within it."""
    if code is None:
        return []
    inner = [_names(const) for const in code.co_consts if isinstance(const, types.CodeType)]
    return [*code.co_names, *(name for names in inner for name in names)]


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not yet bound
        return None


def _first_use(jaxpr: core.Jaxpr, variable: Any) -> str:
    """Returns file and line of the first use of a value, also within calls, or ""."""
    for equation in jaxpr.eqns:
        for distance, operand in enumerate(reversed(equation.invars), 1):
            if operand is not variable:
                continue
            for inner in inner_jaxprs(equation.params):  # its last operands are the call's last
                body = inner.jaxpr if isinstance(inner, core.ClosedJaxpr) else inner
                inside = body.invars[-distance] if distance <= len(body.invars) else None
                if inside is not None and (location := _first_use(body, inside)):
                    return location
            return source_info_util.summarize(equation.source_info)
    return ""


def _traces(body: Any, visited: set[int]) -> Iterator[tuple[core.Jaxpr, Any]]:
    """Yields all jaxprs within a trace, each once, with their constants."""
    jaxpr, consts = (body.jaxpr, body.consts) if isinstance(body, core.ClosedJaxpr) else (body, ())
    if id(jaxpr) in visited:
        return
    visited.add(id(jaxpr))
    yield jaxpr, consts or [np.zeros(0)] * len(jaxpr.constvars)
    for equation in jaxpr.eqns:
        for inner in inner_jaxprs(equation.params):
            yield from _traces(inner, visited)


def require_closed(
    algorithm: Algorithm, sampler: BatchSampler, trace: core.ClosedJaxpr, state: TrainState
) -> None:
    """Refuses closures with rows, and parts that call the host.

    Args:
      algorithm: Algorithm with the loss, the clipping and the optimizer.
      sampler: Sampler of the run; an array with an axis of its number of rows or units, or one less
        or more, may be rows.
      trace: Trace of the training program, with the loss, its derivatives and the update.
      state: First state of the run, or its shapes.

    Raises:
      ValueError: If an undeclared table may be rows, or a part calls host or foreign code.
    """
    traces: tuple[core.ClosedJaxpr, ...] = ()
    optimizer = algorithm.optimizer
    if optimizer is not None:
        leaves, tree = jax.tree.flatten((state.dense_params, state.opt_state))
        shapes = tuple(jax.ShapeDtypeStruct(jax.numpy.shape(x), x.dtype) for x in leaves)
        traces = _traced(Parts(optimizer), tree, shapes)
    programs = [("the optimizer", t) for t in traces]
    if not algorithm.foreign_calls:  # a user's sum, update or noise may do so
        programs.append(("the program", trace))
    for owner, t in programs:
        for equation in (equation for jaxpr, _ in _traces(t, set()) for equation in jaxpr.eqns):
            marked = owner == "the program" and equation.primitive is mark
            if fault := None if marked else host_fault(equation):
                location = source_info_util.summarize(equation.source_info)
                raise ValueError(
                    f"{owner} uses {equation.primitive.name} at {location}, which {fault}; build "
                    "it from jax.numpy, jax.lax and optax alone"
                )
    clipped_sum = algorithm.clipped_sum
    searched: dict[str, Any] = {"the optimizer": optimizer, "the update": algorithm.update}
    if algorithm.tables is not None:  # whose step sizes are computed on the host
        searched["the optimizer of tables"] = algorithm.tables.learning_rate
    if isinstance(clipped_sum, ClippedSum):
        rule = clipped_sum.clipping
        searched["the loss"] = clipped_sum.loss_fn
        searched["the clipping rule"] = rule.groups, rule.factors
    else:
        searched["the clipped sum"] = clipped_sum
    pairs = [("the optimizer", held_arrays(t)) for t in traces]
    pairs += [(owner, reachable_arrays(functions)) for owner, functions in searched.items()]
    refuse_rows([*pairs, ("the loss or the optimizer", held_arrays(trace))], sampler)


def refuse_rows(
    arrays_by_owner: Iterable[tuple[str, Iterable[tuple[Any, str]]]], sampler: BatchSampler
) -> None:
    """Refuses undeclared tables with about as many entries as there are rows or units.

    Args:
      arrays_by_owner: Owners in words, each with its arrays or other tables and their places.
      sampler: Sampler of the run.

    Raises:
      ValueError: For the first such table.
    """
    counts = {sampler.num_examples, sampler.num_units}
    near = {count + offset for count in counts for offset in (-1, 0, 1)}
    for owner, arrays in arrays_by_owner:
        for array, location in arrays:
            shape = getattr(array, "shape", None) or (len(array),)
            for size in near & set(shape):
                kind = array.dtype if isinstance(array, _ARRAYS) else type(array)
                raise ValueError(
                    f"{owner} holds {getattr(kind, '__name__', kind)}{list(shape)} in a closure"
                    f"{f' ({location})' if location else ''} with about as many entries as the "
                    f"data have rows or units ({size}): pass it in `data`, or hold "
                    "dpsgd.public(array) if it depends on no private row"
                )


@functools.lru_cache(maxsize=MOST_PROGRAMS)  # as programs, with equal updates
def _traced(parts: Parts, tree: Any, shapes: Any) -> tuple[core.ClosedJaxpr, ...]:
    """Returns traces of an optimizer's `init` and `update`, kept by `identity`.

    Equal functions may hold different arrays, and JAX caches traces by the equality of functions: a
    new lambda has no cached trace.
    """
    (optimizer,) = parts.values
    params, state = jax.tree.unflatten(tree, shapes)
    with in_32_bits():
        return (
            jax.make_jaxpr(lambda params: optimizer.init(params))(params),
            jax.make_jaxpr(lambda *arguments: optimizer.update(*arguments))(params, state, params),
        )
