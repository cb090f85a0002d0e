"""What the numbers of a training step depend on: if any of it changes, noise is not used again."""

from __future__ import annotations

import ast
import functools
import hashlib
import os
import secrets
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import jax

import accounting
import dpsgd
import samplers
from dpsgd import RootKey
from dpsgd.runs.config import config_digest
from dpsgd.runs.environment import environment
from samplers import BatchSampler
from samplers.settings import name_of

_JAX_OPTIONS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_disable_jit",
    # What a loss draws from its key, or from one that it makes.
    "jax_threefry_partitionable",
    "jax_default_prng_impl",
    "jax_random_seed_offset",
    # How programs are compiled, beside XLA_FLAGS.
    "jax_disable_most_optimizations",
    "jax_optimization_level",
    "jax_exec_time_optimization_effort",
)


def fingerprint(
    config: Mapping[str, Any], data: str, root: RootKey, task_code: str
) -> dict[str, Any]:
    """Returns what must be unchanged for a step to be repeated bit for bit, as JSON values.

    It tells nothing about the data to whoever has not the root secret: their digest is blinded.

    Args:
      config: The run's configuration, as JSON values.
      data: What names the data.
      root: The run's secret.
      task_code: From `task_code_digest`.
    """
    return {
        "config": config_digest(config),
        "data": root.blind(data),
        "code": code_digest(),
        "task_code": task_code,
        **environment(),
        "processor": _processor(),
        "cpus_allowed": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        **jax_options(),
    }


def jax_options() -> dict[str, Any]:
    """Returns the options of JAX on which numbers depend, as they are now."""
    return {name: jax.config.values.get(name) for name in _JAX_OPTIONS}


def differing(fingerprints: Sequence[Mapping[str, Any]], but: Collection[str] = ()) -> list[str]:
    """Returns the names of what is not alike in all of these fingerprints, but for some.

    Between runs, whose digests of the data are blinded each by its own secret, "data" says nothing.
    """
    names = dict.fromkeys(name for one in fingerprints for name in one if name not in but)
    return [n for n in names if any(one.get(n) != fingerprints[0].get(n) for one in fingerprints)]


@functools.cache
def code_digest() -> str:
    """Returns a digest of the library's source files, as they are when first asked."""
    return _digest_of({f for one in (accounting, samplers, dpsgd) for f in _below(one.__path__)})


def task_code_digest(
    task: Any,
    name: str | None = None,
    sampler: BatchSampler | None = None,
    *,
    identity: str = "",
) -> str:
    """Returns a digest of the source files that a task, and a sampler of the user's, are made of.

    They are those of the modules of its class, of its loss and of its name: all files of the
    package that such a module lies in; of one in no package, the module and what it imports,
    directly or not, of the modules and packages that lie beside it. Where there is no source, as in
    a notebook, it is never the same twice: nothing can be compared.

    Args:
      task: What is trained.
      name: "module:object", if it was found by its name.
      sampler: Who draws the batches.
      identity: What tells the task from others of the same code, see `dpsgd.runs.task.identity`.
    """
    modules = {
        type(task).__module__,
        getattr(task.loss, "__module__", ""),
        (name or "").partition(":")[0],
    }
    if sampler is not None and ":" in name_of(type(sampler)):
        modules.add(type(sampler).__module__)
    own = sorted((modules & set(sys.modules)) - set(sys.stdlib_module_names))
    digests = [_module_digest(sys.modules[module]) for module in own]
    parts = [identity, *(digest or secrets.token_hex(16) for digest in digests or [""])]
    return _digest("\n".join(parts).encode())


@functools.cache
def _module_digest(module: ModuleType) -> str:
    """Returns the digest of a module's source, as it is when first asked; empty if it has none."""
    package = sys.modules.get(module.__name__.partition(".")[0])
    if package is not None and hasattr(package, "__path__"):
        return _digest_of(_below(package.__path__))
    file = getattr(module, "__file__", None)
    return _digest_of(_imported_beside(Path(file))) if file and Path(file).is_file() else ""


def _imported_beside(file: Path) -> set[Path]:
    """Returns a source file, and those that it imports from the folder that it lies in."""
    found: set[Path] = set()
    waiting = {file}
    while waiting:
        one = waiting.pop()
        found.add(one)
        try:
            nodes = list(ast.walk(ast.parse(one.read_bytes())))
        except (SyntaxError, ValueError):  # nor can it be imported
            continue
        for node in nodes:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names.append(node.module)
            for name in {name.partition(".")[0] for name in names}:
                beside = file.parent / name
                if beside.is_dir():
                    waiting |= _below([str(beside)]) - found
                elif beside.with_suffix(".py").is_file():
                    waiting |= {beside.with_suffix(".py")} - found
    return found


def _below(folders: Iterable[str]) -> set[Path]:
    return {file for folder in folders for file in Path(folder).rglob("*.py")}


def _digest_of(files: set[Path]) -> str:
    """Returns a digest of files by their content and their names from the folder they share."""
    folder = os.path.commonpath([file.parent for file in files])
    lines = [
        f"{file.relative_to(folder).as_posix()} {_digest(file.read_bytes())}" for file in files
    ]
    return _digest("\n".join(sorted(lines)).encode())


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _processor() -> str:
    """Returns a digest of the processor's name and features, for which programs are compiled."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    kinds = ("model name", "flags", "Features", "CPU part")
    return _digest("\n".join(sorted({x for x in lines if x.startswith(kinds)})).encode())
