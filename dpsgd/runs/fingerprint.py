"""What the numbers of a training step depend on: if any of it changes, noise is not used again."""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib.util
import os
import secrets
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path
from types import ModuleType
from typing import Any

import accounting
import samplers
from dpsgd.engine.programs import compilation
from dpsgd.noise.keys import RootKey
from dpsgd.processor import processor_digest
from dpsgd.runs.environment import environment
from dpsgd.runs.spec import config_digest
from samplers import BatchSampler
from samplers.settings import name_of

BLINDED = ("data", "program")
"""What only equal secrets make comparable."""


def fingerprint(
    config: Mapping[str, Any], data: str, root: RootKey, task_code: str, program: str
) -> dict[str, Any]:
    """Returns what must be unchanged for a step to be repeated bit for bit, as JSON values.

    It tells nothing about the data to whoever has not the root secret: digests of them are blinded.

    Args:
      config: The run's configuration, as JSON values.
      data: What names the data.
      root: The run's secret.
      task_code: From `task_code_digest`.
      program: The digest of the program that trains. It sees what code and options do not, such as
        what a loss has read from a file; and is blinded: it could be of the data.
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


def differing(fingerprints: Sequence[Mapping[str, Any]], but: Collection[str] = ()) -> list[str]:
    """Returns the names of what is not alike in all of these fingerprints, but for some.

    Between runs, each of which has its own secret, digests that are blinded say nothing: `BLINDED`.
    """
    names = dict.fromkeys(name for one in fingerprints for name in one if name not in but)
    return [n for n in names if any(one.get(n) != fingerprints[0].get(n) for one in fingerprints)]


@functools.cache
def code_digest() -> str:
    """Returns a digest of the library's source files, as they are when first asked."""
    own = [str(Path(__file__).resolve().parents[1])]
    return _digest_of(_below([*accounting.__path__, *samplers.__path__, *own]))


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
    no source, as in a notebook, it is never the same twice: nothing can be compared.

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
    """Returns the digest of a module's code, as it is when first asked; empty if it has no source.

    It is of its source, or its package's, and of what that imports, directly or not: the source of
    what is not installed, and the versions of what is.
    """
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
    lines = [f"{name} {_digest(path.read_bytes())}" for path, name in found.items()]
    return _digest("\n".join(sorted(lines) + sorted(versions)).encode())


_LIBRARY = {"accounting", "samplers", "dpsgd"}
"""Whose code a fingerprint names by itself."""


def _imported(file: Path) -> set[str]:
    """Returns the modules and packages, by the first part of their names, that a file imports."""
    try:
        waiting: list[Any] = [ast.parse(file.read_bytes())]
    except (SyntaxError, ValueError):  # nor can it be imported
        return set()
    nodes = []
    while waiting:  # statements alone, which are few: no expression holds an import
        nodes.append(node := waiting.pop())
        for inside in ("body", "orelse", "handlers", "finalbody", "cases"):
            waiting += getattr(node, inside, ())
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [n.module for n in nodes if isinstance(n, ast.ImportFrom) and n.module and not n.level]
    return {name.partition(".")[0] for name in names}


def _source_of(name: str, folder: Path) -> dict[Path, str]:
    """Returns the source files of what `name` imports; none of what is installed, or not there.

    Args:
      name: Of a module or package.
      folder: Of a file that imports it: what lies beside a script comes first.
    """
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
        for file in _below([folder])
    }


def _below(folders: Iterable[str | Path]) -> set[Path]:
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
