"""Compiled programs: one for equal functions of equal shapes, and few of them kept."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Hashable
from typing import Any

import jax

MOST_PROGRAMS = 32
"""Different programs that a process keeps compiled; a training step's takes 5 to 90 MB.

JAX itself keeps what it compiled of a function for every shape that it has seen, for as long as
the function lives, and of an operation that is run by itself for as long as the process does: a
process of many different runs would grow forever.
"""


def compiler_options() -> dict[str, Any] | None:
    """Returns the options of XLA under which a training step is fastest on the default backend."""
    # LLVM takes half the width of AVX-512 by itself. The noise is all arithmetic: at the full width
    # it takes a fifth less.
    return {"xla_cpu_prefer_vector_width": 512} if jax.default_backend() == "cpu" else None


def compiled(
    function: Callable[..., Any],
    parts: tuple[Hashable, ...],
    arguments: tuple[Any, ...],
    *,
    donate_argnums: tuple[int, ...] = (),
):
    """Returns `function` with `parts` as its first arguments, jitted: the same for equal shapes.

    The `MOST_PROGRAMS` that were used last are kept; the executable of any other is freed.

    Args:
      function: Pure.
      parts: What the program is made of, compared by value.
      arguments: Those that it will be called with, or others of their shapes and types.
      donate_argnums: Which of them give their buffers away.
    """
    leaves, structure = jax.tree.flatten(arguments)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        # Part of another program, which is compiled by its own options: there, others are refused.
        return functools.partial(function, *parts)
    shapes = tuple(map(jax.typeof, leaves))
    return _compiled(function, parts, donate_argnums, structure, shapes)


def executable(
    function: Callable[..., Any],
    parts: tuple[Hashable, ...],
    arguments: tuple[Any, ...],
    *,
    donate_argnums: tuple[int, ...] = (),
) -> jax.stages.Compiled:
    """Returns what `compiled` does, compiled already: it runs nothing but these shapes.

    Its text can be read before it has run, see `digest`. The arguments may be shapes.
    """
    leaves, structure = jax.tree.flatten(arguments)
    shapes = tuple(map(jax.typeof, leaves))
    return _executable(function, parts, donate_argnums, structure, shapes)


def digest(program: jax.stages.Compiled) -> str:
    """Returns the SHA-256 of a program's optimised HLO, without names, places in files and paths.

    It does not fix the machine code: that also depends on the compiler's version and options.
    """
    text = program.as_text()
    assert text is not None
    lines = (line for line in text.splitlines() if not _TABLE.match(line))
    bare = _METADATA.sub("", "\n".join(lines))
    return hashlib.sha256(bare.encode()).hexdigest()


_TABLE = re.compile(r"(FileNames|FunctionNames|FileLocations|StackFrames|\d+ [\"{])")
"""Lines of the tables of files and functions, to which the metadata of operations refer."""
_METADATA = re.compile(r", metadata=\{[^{}]*\}")


@functools.lru_cache(maxsize=MOST_PROGRAMS)
def _compiled(function, parts, donate_argnums, *shapes):
    del shapes  # one program each, so that what is counted and forgotten is a program
    return _jitted(function, parts, donate_argnums)


@functools.lru_cache(maxsize=MOST_PROGRAMS)
def _executable(function, parts, donate_argnums, structure, shapes):
    like = [jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type) for x in shapes]
    arguments = jax.tree.unflatten(structure, like)
    return _jitted(function, parts, donate_argnums).lower(*arguments).compile()


def _jitted(function, parts, donate_argnums):
    return jax.jit(
        functools.partial(function, *parts),
        donate_argnums=donate_argnums,
        compiler_options=compiler_options(),
    )
