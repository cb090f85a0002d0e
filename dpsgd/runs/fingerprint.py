"""Where a run happens, and what its numbers depend on: if that changes, no noise is used again."""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib.util
import os
import platform
import secrets
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path
from types import ModuleType
from typing import Any

import jax

import accounting
import samplers
from dpsgd.engine.programs import compilation
from dpsgd.noise.keys import RootKey
from dpsgd.processor import processor_digest
from dpsgd.runs.spec import config_digest
from samplers import BatchSampler
from samplers.settings import name_of

PACKAGES = ["dpsgd", "jax", "jaxlib", "flax", "optax", "numpy", "scipy", "dp-accounting"]


def environment() -> dict[str, Any]:
    """Returns package versions, platform and devices of this process.

    What is not installed, as this project itself in a bare checkout, is left out.
    """
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    return {
        "packages": versions,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "backend": jax.default_backend(),
        "devices": [device.device_kind for device in jax.devices()],
    }


def origin(what: str = "Finished") -> str:
    """Returns today's date and the command of this process, in a sentence that begins by `what`."""
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    return f"{what} on {datetime.now(UTC):%Y-%m-%d at %H:%M} UTC by:\n\n    {command}"


def fingerprint(
    config: Mapping[str, Any], data: str, root: RootKey, task_code: str, program: str
) -> dict[str, Any]:
    """Returns what must be unchanged for a step to be repeated bit for bit, as JSON values.

    It tells nothing about the data to whoever has not the root secret: the digests of `data` and of
    `program`, which sees what code and options do not, such as what a loss has read, are blinded.
    """
    return {
        "config": config_digest(config),
        "data": root.blind(data),
        "code": code_digest(),
        "task_code": task_code,
        **environment(),
        "processor": processor_digest(),
        "cpus_allowed": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "program": root.blind(program),
        **compilation(),
    }


@functools.cache
def code_digest() -> str:
    """Returns a digest of the library's source files, as they are when first asked."""
    own = Path(__file__).resolve().parents[1]
    return _digest_of(_named([*accounting.__path__, *samplers.__path__, own]))


def task_code_digest(
    task: Any,
    name: str | None = None,
    sampler: BatchSampler | None = None,
    *,
    identity: str = "",
) -> str:
    """Returns a digest of the source files that a task, and a sampler of the user's, are made of.

    They are those of the modules of its class, of its loss and of its name: the module, or all
    files of the package that it lies in, and whatever these import, directly or not: the files of
    modules and packages that are not installed, and the versions of those that are. Where there is
    no source, as in a notebook, it is never the same twice: nothing can be compared. `identity`
    tells the task from others of the same code, see `dpsgd.runs.task.identity`.
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
    """Returns the digest of a module's code, as it is when first asked; empty if it has none."""
    spec = getattr(module, "__spec__", None)  # of what is run by its name, too
    name = spec.name if spec else module.__name__
    package = sys.modules.get(name.partition(".")[0])
    file = getattr(module, "__file__", None)
    if package is not None and hasattr(package, "__path__"):
        waiting = _named(package.__path__)
    elif file and Path(file).is_file():
        waiting = {Path(file): Path(file).name}
    else:
        return ""
    found: dict[Path, str] = {}
    known, versions = set(sys.stdlib_module_names) | _LIBRARY, set()
    while waiting:
        path, name = waiting.popitem()
        found[path] = name
        for imported in _imported(path) - known:
            known |= {imported}
            if files := _source_of(imported, path.parent):
                waiting |= {one: name for one, name in files.items() if one not in found}
            else:
                versions.add(f"{imported} {_version(imported)}")
    return _digest_of(found, sorted(versions))


_LIBRARY = {"accounting", "samplers", "dpsgd"}
"""Whose code a fingerprint names by itself."""


def _imported(file: Path) -> set[str]:
    """Returns the modules and packages, by the first part of their names, that a file imports."""
    try:
        nodes = list(ast.walk(ast.parse(file.read_bytes())))
    except (SyntaxError, ValueError):  # nor can it be imported
        return set()
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [n.module for n in nodes if isinstance(n, ast.ImportFrom) and n.module and not n.level]
    return {name.partition(".")[0] for name in names}


def _source_of(name: str, folder: Path) -> dict[Path, str]:
    """Returns the source files of a module that a file in `folder` imports, if not installed."""
    if not (folder / "__init__.py").is_file():  # inside a package nothing lies beside
        if (folder / name).is_dir():
            return _named([folder / name])
        if (beside := folder / f"{name}.py").is_file():
            return {beside: beside.name}
    with contextlib.suppress(ImportError, ValueError):  # a module that was made by hand has none
        if spec := importlib.util.find_spec(name):  # which executes nothing
            places = [Path(place) for place in spec.submodule_search_locations or ()]
            file = Path(spec.origin or "")
            if any({"site-packages", "dist-packages"} & set(p.parts) for p in (*places, file)):
                return {}
            if places:
                return _named(places)
            if file.suffix == ".py" and file.is_file():
                return {file: file.name}
    return {}


def _version(name: str) -> str:
    """Returns the versions of the distributions that a module comes from; empty if it has none."""
    with contextlib.suppress(PackageNotFoundError):
        return version(name)
    return " ".join(sorted(f"{one} {version(one)}" for one in _distributions().get(name, ())))


_distributions = functools.cache(packages_distributions)


def _named(folders: Iterable[str | Path]) -> dict[Path, str]:
    """Returns the source files below folders, with names that do not say where these lie."""
    return {
        file: f"{Path(folder).name}/{file.relative_to(folder).as_posix()}"
        for folder in folders
        for file in Path(folder).rglob("*.py")
    }


def _digest_of(files: Mapping[Path, str], more: Sequence[str] = ()) -> str:
    """Returns a digest of files by their content and their names, and of more lines."""
    lines = sorted(f"{name} {_digest(file.read_bytes())}" for file, name in files.items())
    return _digest("\n".join([*lines, *more]).encode())


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
