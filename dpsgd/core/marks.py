"""Marks: names in a program's trace for the values on which privacy rests.

A mark is the identity on its first argument; the further arguments name its inputs, so that the
static audit (`dpsgd.audit.runtime.flow`) finds sums, draws and releases without guessing. Marks
vanish in compilation.
"""

from __future__ import annotations

from typing import Any, Literal

from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

Kind = Literal["sum", "clip", "draw", "ring", "release"]

mark = Primitive("dpsgd_mark")
mark.def_impl(lambda x, *_, **how: x)
mark.def_abstract_eval(lambda x, *_, **how: x)
mlir.register_lowering(mark, lambda context, x, *_, **how: [x])


def _batched(arguments: Any, axes: Any, **how: Any) -> Any:
    return mark.bind(*arguments, **how), axes[0]


batching.primitive_batchers[mark] = _batched


def mark_value(x: Any, kind: Kind, **inputs: Any) -> Any:
    """Returns `x` under a mark in the trace.

    Args:
      x: Array to mark.
      kind: "sum" is a sum of clipped gradients, "clip" the clipping norm as the clipping rule reads
        it, "draw" fresh noise, "ring" the place of a step in a ring of fixed length, and "release"
        a noised sum.
      **inputs: Arrays that `x` was computed from, by name: `key` and `step` of a draw; `total` and
        the inputs of the noise of a release.
    """
    named = {name: value for name, value in inputs.items() if value is not None}
    return mark.bind(x, *named.values(), kind=kind, names=tuple(named))
