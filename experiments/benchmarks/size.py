"""How large the code is and how it hangs together: lines, statements, import circles, long files.

Lines are those of a formatter's width; statements do not depend on it. A circle of imports counts
wherever the imports stand: in a function, for annotations alone, or by a package's names.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from experiments.benchmarks.case import Figure, figure

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("accounting", "samplers", "dpsgd", "experiments")
LONG = 400
"""Lines of a file that is long."""


def files_of(package: str) -> dict[str, Path]:
    """Returns the files of `package`, by the names of their modules."""
    found = {}
    for file in sorted((ROOT / package).rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imports(tree: ast.Module, modules: set[str]) -> set[str]:
    """Returns which of `modules` a file imports, anywhere."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in modules else f"{node.module}" for name in inner}
    return found & modules


def circles() -> dict[str, list[str]]:
    """Returns the modules that import one another, directly or not, each with what it imports."""
    files = {name: file for package in PACKAGES for name, file in files_of(package).items()}
    graph = {
        name: imports(ast.parse(file.read_text()), set(files)) - {name}
        for name, file in files.items()
    }
    while True:
        imported = set().union(*graph.values())
        kept = {name for name in graph if name in imported and graph[name]}
        if len(kept) == len(graph):
            return {name: sorted(names) for name, names in graph.items()}
        graph = {name: graph[name] & kept for name in kept}


def late_imports(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yields the imports inside functions, but for a package's `__getattr__`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name != "__getattr__":
            yield from (n for n in ast.walk(node) if isinstance(n, ast.Import | ast.ImportFrom))


def counts(package: str) -> Iterator[Figure]:
    """Counts lines, statements, imports in functions and long files of a package or of tests."""
    texts = [file.read_text() for file in files_of(package).values()]
    trees = [ast.parse(text) for text in texts]
    lines = [len(text.splitlines()) for text in texts]
    statements = sum(isinstance(node, ast.stmt) for tree in trees for node in ast.walk(tree))
    late = len({node for tree in trees for node in late_imports(tree)})
    yield figure(f"{package}: lines", sum(lines), "lines")
    yield figure(f"{package}: statements", statements)
    yield figure(f"{package}: imports in functions", late)
    yield figure(
        f"{package}: files of more than {LONG} lines", sum(n > LONG for n in lines), "files"
    )


def size() -> Iterator[Figure]:
    parts = {package: list(counts(package)) for package in (*PACKAGES, "tests")}
    for rows in parts.values():
        yield from rows
    core = zip(*(parts[package] for package in PACKAGES[:-1]), strict=True)
    for same, bar in zip(core, ("<= 25500", "", "<= 60", "<= 6"), strict=True):
        name = same[0].name.replace(PACKAGES[0], " + ".join(PACKAGES[:-1]), 1)
        yield figure(name, sum(row.value or 0 for row in same), same[0].unit, bar)
    found = circles()
    for name, names in found.items():
        print(f"{name} imports {', '.join(names)}")
    yield figure("modules that import one another", len(found), "files", "<= 0")
