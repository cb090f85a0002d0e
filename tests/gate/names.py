"""Public names: which are gone, and which turned private."""

import ast

from experiments.benchmarks.size import tree_of
from gate.record import FOLDER, ROOT, read, write

FLOORS = ("accounting", "samplers", "dpsgd", "experiments")


def names(floor):
    """Returns the modules, classes, functions and methods of a package, by content and not place.

    A name that moves to another module of its package is the same name.
    """
    found = set()
    for path in sorted((ROOT / floor).rglob("*.py")):
        found.add(f"module {path.stem}")
        for node in tree_of(path).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            if isinstance(node, ast.ClassDef):
                methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
                found |= {f"{node.name}.{each.name}" for each in methods}
    return found


def is_public(name):
    """Whether no part of a name begins with an underscore."""
    return not any(part.startswith("_") for part in name.split(" ")[-1].split("."))


def private(name):
    """Returns what a name is called once it is private."""
    owner, dot, last = name.rpartition(".")
    return f"{owner}{dot}_{last}"


def measure():
    """Records the public names of the checkout, and the private ones beside them."""
    write("names", {floor: sorted(names(floor)) for floor in FLOORS})


def gone():
    """Returns the frozen public names that are gone and not in `removed.txt`, and new ones."""
    allowed = set((FOLDER / "removed.txt").read_text().splitlines())
    lost, new = [], []
    for floor, frozen in read("names").items():
        now = names(floor)
        lost += [f"{floor} {n}" for n in sorted({*frozen} - now) if is_public(n)]
        new += [f"{floor} {n}" for n in sorted(now - {*frozen}) if is_public(n)]
    return [name for name in lost if name not in allowed], new


def turned_private():
    """Returns the frozen public names that live on with an underscore, but for `removed.txt`."""
    allowed = set((FOLDER / "removed.txt").read_text().splitlines())
    return [
        f"{floor} {name}"
        for floor, frozen in read("names").items()
        for now in [names(floor)]
        for name in sorted({*frozen} - now)
        if is_public(name) and private(name) in now - {*frozen} and f"{floor} {name}" not in allowed
    ]


def check():
    """Prints new names, and returns those that are gone without a line, or turned private."""
    lost, new = gone()
    print("\n".join(f"new: {name}" for name in new))
    return [f"gone: {name}" for name in lost] + [f"now private: {n}" for n in turned_private()]
