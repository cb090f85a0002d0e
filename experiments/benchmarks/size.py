"""Size of the code, and circles of imports.

Lines depend on the formatter's width, statements do not. A circle of imports counts wherever the
imports stand: in a function, for annotations only, or by a package's names.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path

from experiments.benchmarks.case import Figure, figure

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("accounting", "samplers", "dpsgd", "experiments")
LONG = 400
"""Number of lines above which a file is long."""
TWO_LONG = {f"files of more than {LONG} lines": 2}


def files_of(package: str) -> dict[str, Path]:
    """Returns a package's files by module name."""
    files = {}
    for file in sorted((ROOT / package).rglob("*.py")):
        names = file.relative_to(ROOT).with_suffix("").parts
        files[".".join(names[:-1] if names[-1] == "__init__" else names)] = file
    return files


@functools.cache
def tree_of(file: Path) -> ast.Module:
    """Returns the syntax tree of a file, which is parsed once."""
    return ast.parse(file.read_text())


@functools.cache
def nodes_of(file: Path) -> tuple[ast.AST, ...]:
    """Returns all nodes of a file's syntax tree, which is walked once."""
    return tuple(ast.walk(tree_of(file)))


def imports(nodes: Iterable[ast.AST], modules: set[str]) -> set[str]:
    """Returns the modules that a file's nodes import anywhere.

    >>> imports(ast.walk(ast.parse("import math, os")), {"os", "sys"})
    {'os'}
    """
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name in modules else f"{node.module}" for name in inner}
    return names & modules


def circles() -> dict[str, list[str]]:
    """Returns the imports of each module in a circle."""
    files = {name: file for package in PACKAGES for name, file in files_of(package).items()}
    graph = {name: imports(nodes_of(file), set(files)) - {name} for name, file in files.items()}
    while True:
        imported = set().union(*graph.values())
        remaining = {name for name in graph if name in imported and graph[name]}
        if len(remaining) == len(graph):
            return {name: sorted(names) for name, names in graph.items()}
        graph = {name: graph[name] & remaining for name in remaining}


def counts(files: Iterable[Path]) -> dict[str, int]:
    """Counts lines, statements, imports in functions, and long files."""
    texts = [file.read_text() for file in files]
    nodes = [node for text in texts for node in ast.walk(ast.parse(text))]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    late = {
        node
        for function in functions
        if function.name != "__getattr__"  # of a package
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    return {
        "lines": sum(len(text.splitlines()) for text in texts),
        "statements": sum(isinstance(node, ast.stmt) for node in nodes),
        "imports in functions": len(late),
        f"files of more than {LONG} lines": sum(len(text.splitlines()) > LONG for text in texts),
    }


def size() -> Iterator[Figure]:
    """Measures the project's code, and prints circles of imports."""
    bars = {
        ("accounting", "samplers"): {"lines": 9_500},
        ("dpsgd",): {"lines": 15_500},
        ("experiments",): {"lines": 12_500, "imports in functions": 60, **TWO_LONG},
        PACKAGES: {"lines": 37_500, "statements": 22_000},
        ("tests",): {"lines": 26_500},
    }
    for packages, limits in bars.items():
        sizes = counts(file for package in packages for file in files_of(package).values())
        for name, count in sizes.items():
            bar = f"<= {limits[name]}" if name in limits else ""
            yield figure(f"{' + '.join(packages)}: {name}", count, bar=bar)
    circular = circles()
    for module, imported in circular.items():
        print(f"{module} imports {', '.join(imported)}")
    yield figure("modules that import one another", len(circular), bar="<= 0")
