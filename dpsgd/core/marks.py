"""Names in a program's trace for what its privacy rests on; a compiled program has none of them.

A mark is the identity on its first argument. The others say what that was made of, so that the
static audit (`dpsgd.audit.runtime.flow`) finds sums, draws and releases without a guess. XLA sees
nothing.
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


def marked(x: Any, kind: Kind, **made_of: Any) -> Any:
    """Returns `x`, which the trace names from here on.

    Args:
      x: An array.
      kind: "sum" is a sum of clipped gradients, "clip" the clipping norm as the clipping rule reads
        it, "draw" fresh noise, "ring" the place of a step in a ring of fixed length, and "release"
        a noised sum.
      **made_of: Arrays from which it was made, by name: of a draw its `key` and `step`; of a
        release `total`, and what else the noise was given.
    """
    given = {name: value for name, value in made_of.items() if value is not None}
    return mark.bind(x, *given.values(), kind=kind, names=tuple(given))
