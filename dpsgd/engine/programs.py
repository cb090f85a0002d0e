"""Compiled programs: one for equal functions of equal shapes, and few of them kept."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import jax
from jaxlib.xla_client import hlo

from dpsgd.gradients.losses import identity

PyTree = Any

MOST_PROGRAMS = 32
"""Most programs that a process keeps compiled; a training step's takes 5 to 90 MB.

JAX itself keeps every compiled program: a process of many different runs would grow forever.
"""


def compiler_options() -> dict[str, Any] | None:
    """Returns the XLA options that are fastest for training steps."""
    # LLVM takes half the width of AVX-512 by itself. The noise is all arithmetic: at the full width
    # it takes a fifth less.
    return {"xla_cpu_prefer_vector_width": 512} if jax.default_backend() == "cpu" else None


def compilation() -> dict[str, Any]:
    """Returns settings that affect a program's numbers, JSON values."""
    options: dict[str, Any] = {"compiler_options": compiler_options(), "xla_flags": _xla_flags()}
    for name, value in sorted(os.environ.items()):
        if _is_one(name, _VARIABLES) and not _is_one(name, _WITHOUT_EFFECT):
            options[name] = value
    for name, value in sorted(jax.config.values.items()):
        if not _is_one(name, _WITHOUT_EFFECT):
            plain = value is None or isinstance(value, bool | int | float | str)
            options[name] = value if plain else str(value)
    return options


_VARIABLES = (
    "XLA_*", "LIBTPU_INIT_ARGS", "NPROC", "DNNL_*", "ONEDNN_*", "CUBLAS_*", "CUDNN_*",
    "NVIDIA_TF32_OVERRIDE", "TF_CUDNN_*",
)  # fmt: skip
"""Environment variables that XLA and its libraries read; JAX's own are among its options."""

_WITHOUT_EFFECT = (
    "XLA_FLAGS",  # which are named by themselves
    # Where things lie, and how much room they have.
    "XLA_PYTHON_CLIENT_*", "XLA_CLIENT_*", "jax_compilation_cache_*",
    "jax_persistent_cache_*", "jax_enable_compilation_cache", "jax_raise_persistent_cache_errors",
    "jax_remove_custom_partitioning_ptr_from_cache_key", "jax_*_visible_devices",
    "jax_array_garbage_collection_guard", "jax_cross_host_*",
    "jax_share_binary_between_hosts*", "jax_check_proxy_envs", "jax_enable_preemption_service",
    # Which backend there is, is named by itself, and so are its devices.
    "jax_platforms", "jax_platform_name", "jax_xla_backend",
    # Dumps of programs and texts of errors.
    "jax_captured_constants_*", "jax_compiler_detailed_logging_min_ops", "jax_debug_log_modules",
    "jax_distributed_debug", "jax_dump_ir_*", "jax_explain_cache_misses", "jax_include_*",
    "jax_hlo_source_file_canonicalization_regex", "jax_log_*", "jax_logging_level",
    "jax_pallas_verbose_errors", "jax_pprint_use_color",
    "jax_source_url_schema", "jax_send_traceback_to_runtime", "jax_thread_guard", "jax_trace*",
    "jax_transfer_guard*",
)  # fmt: skip


@functools.cache
def _is_one(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _xla_flags() -> str:
    """Returns XLA's flags, from its environment variable or the file that it names."""
    flags = os.environ.get("XLA_FLAGS", "")
    if flags.strip() and not flags.strip().startswith("-"):
        try:
            return Path(flags.strip()).read_text()
        except (OSError, ValueError):
            return flags
    return flags


def compiled(
    function: Callable[..., Any],
    parts: tuple[Any, ...],
    arguments: tuple[Any, ...],
    *,
    donate_argnums: tuple[int, ...] = (),
):
    """Returns `function` with its first arguments `parts` bound, jitted.

    Equal shapes share one program. The `MOST_PROGRAMS` that were used last are kept; the executable
    of any other is freed.

    Args:
      function: Pure function.
      parts: Static values, shared by `identity`.
      arguments: Arguments of a call, or others of their shapes and types.
      donate_argnums: Indices of the arguments whose buffers are donated.

    >>> int(compiled(pow, (2,), (3,))(5))
    32
    """
    leaves, structure = jax.tree.flatten(arguments)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        # Part of another program, which is compiled by its own options: there, others are refused.
        return functools.partial(function, *parts)
    shapes = tuple(map(jax.typeof, leaves))
    return _compiled(function, Parts(*parts), donate_argnums, structure, shapes)


class Program:
    """Trace, compiled on first use."""

    def __init__(self, traced: jax.stages.Traced):
        self.traced = traced

    @functools.cached_property
    def compiled(self) -> jax.stages.Compiled:
        """Executable of the trace, see `digest`."""
        with in_32_bits():
            return self.traced.lower().compile()


def program(
    function: Callable[..., Any],
    parts: tuple[Any, ...],
    arguments: tuple[Any, ...],
    *,
    donate_argnums: tuple[int, ...] = (),
    shardings: tuple[PyTree, PyTree] | None = None,
) -> Program:
    """Returns the program of `compiled`, for arguments or their shapes.

    Args:
      function: Pure function.
      parts: Static values, the first arguments of the function.
      arguments: Arguments of a call, or their shapes.
      donate_argnums: Indices of the arguments whose buffers are donated.
      shardings: Shardings of the arguments and of the results, prefixes of their trees; by default
        one device has everything.
    """
    leaves, structure = jax.tree.flatten(arguments)
    with in_32_bits():  # and wherever they lie, as `shardings` says where they shall
        shapes = tuple(_shape(jax.typeof(leaf)) for leaf in leaves)
    settings = json.dumps(compilation())  # another program under others
    places, tree = jax.tree.flatten(shardings)
    specs = tuple(places), tree
    static = Parts(*parts)
    return _executable(function, static, donate_argnums, specs, settings, structure, shapes)


def digest(program: jax.stages.Compiled) -> str:
    """Returns the SHA-256 of a program's optimised HLO.

    Names and paths are left out. The HLO has every constant with all of its numbers, layouts,
    fusions, the order of operations and the arguments of custom calls. The machine code also
    depends on the compiler, and on `compilation`.
    """
    options = hlo.HloPrintOptions()
    options.print_metadata = False  # places in files, names of functions
    options.print_program_shape = False  # which stands in the operations as well
    options.print_large_constants = True  # two tables of one shape are two programs
    executable = program.runtime_executable()
    assert executable is not None
    texts = [module.to_string(options) for module in executable.hlo_modules()]
    names: dict[str, str] = {}
    nameless = [
        _NAME.sub(lambda match: names.setdefault(match[0], f"%{len(names)}"), text)
        for text in (text.partition(",")[2] for text in texts)  # the name comes first
    ]
    return hashlib.sha256("\n".join(nameless).encode()).hexdigest()


class Parts:
    """Static values of a program, hashed and compared by `identity`.

    Args:
      *values: Values, which live as long as this object.

    >>> Parts(1.0, print) == Parts(1.0, print)
    True
    """

    def __init__(self, *values: Any) -> None:
        self.values = values
        self._identity = identity(values)

    def __hash__(self) -> int:
        return hash(self._identity)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Parts) and self._identity == other._identity


_NAME = re.compile(r"%[\w.-]+")


def in_32_bits() -> contextlib.AbstractContextManager:
    """Returns a context in which JAX computes in 32 bits.

    Clipping and noise are proved for float32 and int32.
    """
    return jax.enable_x64(False)


def put_on_device(tree: PyTree) -> PyTree:
    """Puts NumPy arrays on JAX's default device, in 32 bits."""
    with in_32_bits():
        return jax.device_put(tree)


def shapes_of_rows(rows: PyTree, *lead: int) -> PyTree:
    """Returns the shapes of rows [*lead, ...], with 32-bit dtypes.

    >>> shapes_of_rows(jax.numpy.zeros((100, 3)), 8)
    ShapeDtypeStruct(shape=(8, 3), dtype=float32)

    Args:
      rows: Tree of arrays [examples, ...], or their shapes.
      *lead: Sizes in place of the leading axis; none for the shapes of one row.
    """
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            (*lead, *x.shape[1:]), jax.dtypes.canonicalize_dtype(x.dtype)
        ),
        rows,
    )


@functools.lru_cache(maxsize=MOST_PROGRAMS)
def _compiled(function, parts, donate_argnums, *shapes):
    del shapes  # one program each, so the cache counts and evicts programs
    jitted = _jitted(function, parts, donate_argnums)

    def program(*arguments):
        """Calls the jitted function in 32 bits."""
        with in_32_bits():
            return jitted(*arguments)

    return program


@functools.lru_cache(maxsize=MOST_PROGRAMS)
def _executable(function, parts, donate_argnums, specs, settings, structure, shapes):
    del settings
    shardings = jax.tree.unflatten(specs[1], specs[0])
    placed = {}
    if shardings is not None:
        placed = {"in_shardings": shardings[0], "out_shardings": shardings[1]}
    arguments = jax.tree.unflatten(structure, shapes)
    with in_32_bits():
        return Program(_jitted(function, parts, donate_argnums, **placed).trace(*arguments))


def _shape(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type)


def _jitted(function, parts, donate_argnums, **shardings):
    return jax.jit(
        functools.partial(function, *parts.values),
        donate_argnums=donate_argnums,
        compiler_options=compiler_options(),
        **shardings,
    )
