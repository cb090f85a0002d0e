"""Planted faults: mutants of the libraries, and the tests that must go on to catch them.

A mutant is a file, a text that stands in it once, and the text in its place. Each is planted into a
copy of the tree, where the quick tests nearest to its file run until one fails. Tests that fail in
the copy without any mutant are deselected.
"""

import ast
import contextlib
import importlib
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from gate.record import ROOT, read, write

CPU_SECONDS = 40
"""Processor seconds of one child process, most."""

FILE_SECONDS = 8
"""Processor seconds after which the rest of a test file is skipped."""

FILES = 6
"""Test files that a mutant is shown, most."""

GOES = [
    "samplers/contribution",
    "accounting/algebra/laplace",
    "dpsgd/audit/",
    "dpsgd/noise/recursion",
    "dpsgd/noise/registry",
    "dpsgd/engine/averages",
    "dpsgd/gradients/norms",
    "dpsgd/runs/initial",
    "dpsgd/runs/plan",
    "__init__",
]
"""Files that no mutant is sampled from: they leave, or are replaced."""

PATH = [
    "samplers/",
    "dpsgd/core/",
    "dpsgd/noise/",
    "dpsgd/gradients/clipping",
    "dpsgd/gradients/rules",
    "dpsgd/gradients/ghost/",
    "dpsgd/gradients/losses",
    "dpsgd/engine/step",
    "dpsgd/engine/algorithm",
    "dpsgd/engine/feed",
    "dpsgd/engine/loop",
    "dpsgd/engine/blocks",
    "dpsgd/engine/queries",
    "dpsgd/engine/lazy/",
    "dpsgd/runs/journal",
    "dpsgd/runs/attempts",
    "dpsgd/runs/history",
    "dpsgd/runs/ledger",
    "dpsgd/runs/terms",
    "dpsgd/selection/release",
    "dpsgd/selection/noise",
]
"""Files between the draw of a batch and the released parameters or the printed cost."""

_FLIPS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in", ast.Add: "-",
    ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "/", ast.And: "or", ast.Or: "and",
}  # fmt: skip
_NAMES = {
    "minimum": "maximum", "maximum": "minimum", "min": "max", "max": "min", "ceil": "floor",
    "floor": "ceil", "any": "all", "all": "any", "sorted": "list", "lower": "upper",
    "upper": "lower", "log1p": "log", "expm1": "exp", "fsum": "max",
}  # fmt: skip
_KEYS = re.compile("fold_in|child|sort$|cumsum|stop_gradient|abs$|clip$")


def _mutations(node):
    """Yields (kind, new source) of an expression or a statement of one line or more."""
    text = ast.unparse
    match node:
        case ast.Compare(ops=[op]) if type(op) in _FLIPS:
            new = f"{text(node.left)} {_FLIPS[type(op)]} {text(node.comparators[0])}"
            yield "comparison", f"({new})"
        case ast.BinOp() if type(node.op) in _FLIPS:
            left, right = text(node.left), text(node.right)
            yield "operator", f"(({left}) {_FLIPS[type(node.op)]} ({right}))"
            if isinstance(node.op, ast.Sub | ast.Div):
                swapped = ast.BinOp(node.right, node.op, node.left)
                yield "swapped", f"({text(swapped)})"
        case ast.BoolOp():
            new = f" {_FLIPS[type(node.op)]} ".join(f"({text(value)})" for value in node.values)
            yield "connective", f"({new})"
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield "sign", f"({text(node.operand)})"
        case ast.IfExp():
            yield "condition", f"({text(ast.IfExp(node.test, node.orelse, node.body))})"
        case ast.Constant(value=bool()):
            yield "constant", str(not node.value)
        case ast.Constant(value=int()):
            yield "constant", str(node.value + 1)
        case ast.Constant(value=float()):
            yield "constant", repr(node.value * 2 or 1.0)
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            plain = not node.keywords and not any(isinstance(a, ast.Starred) for a in node.args)
            if _KEYS.search(name) and node.args:
                yield "dropped call", f"({text(node.args[0])})"
            if name in _NAMES and plain:
                base = f"{text(node.func.value)}." if isinstance(node.func, ast.Attribute) else ""
                yield "function", f"{base}{_NAMES[name]}({', '.join(map(text, node.args))})"
            if len(node.args) == 2 and plain and not name[0].isupper() and name != "isinstance":
                yield "swapped", f"{text(node.func)}({text(node.args[1])}, {text(node.args[0])})"
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Raise():
            yield "dropped statement", "pass"


def _sites(tree):
    """Yields the nodes to mutate: no docstring, annotation, decorator, message or default."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.JoinedStr | ast.Assert):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        if isinstance(node, ast.Raise | ast.Subscript):
            continue  # messages, and annotations of types
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            if node.name not in ("__repr__", "__str__"):
                waiting += node.body
        elif isinstance(node, ast.AnnAssign):
            waiting += [node.value] if node.value else []
        else:
            waiting += ast.iter_child_nodes(node)


def mutants_of(file):
    """Returns all mutants of a file: (kind, old text, new text), the old one unique in it."""
    source = file.read_text()
    lines = source.splitlines(keepends=True)
    found = []
    for node in _sites(ast.parse(source)):
        for kind, new in _mutations(node):
            first, last = node.lineno - 1, node.end_lineno
            text = "".join(lines[first:last])
            start = len(lines[first].encode()[: node.col_offset].decode())
            cut = len(lines[last - 1]) - len(
                lines[last - 1].encode()[: node.end_col_offset].decode()
            )
            changed = text[:start] + new + text[len(text) - cut :]
            while source.count(text) > 1 and first:
                first -= 1
                text, changed = lines[first] + text, lines[first] + changed
            with contextlib.suppress(SyntaxError):
                ast.parse(source.replace(text, changed))
                if source.count(text) == 1:
                    found.append((kind, text, changed))
    return found


def sample(count=150, seed=42):
    """Returns mutants of the checkout, half of them on the privacy path, spread over its files."""
    draw = random.Random(seed)
    files = [
        str(path.relative_to(ROOT))
        for floor in ("accounting", "samplers", "dpsgd")
        for path in sorted((ROOT / floor).rglob("*.py"))
        if not any(part in str(path.relative_to(ROOT)) for part in GOES)
    ]
    inner = [file for file in files if file.startswith(tuple(PATH))]
    chosen = []
    for group in (inner, [file for file in files if file not in inner]):
        pools = {file: mutants_of(ROOT / file) for file in group}
        taken = []
        while len(taken) < count // 2:
            for file in draw.sample(group, len(group)):
                kinds = sorted({kind for kind, *_ in pools[file]})
                if kinds and len(taken) < count // 2:
                    kind = draw.choice(kinds)
                    mutant = draw.choice([each for each in pools[file] if each[0] == kind])
                    pools[file].remove(mutant)
                    taken.append((file, *mutant))
        chosen += taken
    return [{"file": file, "kind": kind, "old": old, "new": new} for file, kind, old, new in chosen]


def nearest_tests(file, tests):
    """Returns the quick test files likeliest to see a fault of `file`, nearest first."""
    module, stem = file[:-3].replace("/", "."), Path(file).stem
    folder = next(each for each in Path("tests", file).parents if (ROOT / each).exists())
    nodes = ast.walk(ast.parse((ROOT / file).read_text()))
    public = {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    names = re.compile(rf"\b({'|'.join(sorted(n for n in public if n[0] != '_')) or stem})\b")
    users = [
        str(path.relative_to(ROOT))[:-3].replace("/", ".").removesuffix(".__init__")
        for path in ROOT.joinpath(Path(file).parts[0]).rglob("*.py")
        if module in path.read_text()
    ]

    def score(item):
        path, text = item
        near = 100 * (path.endswith(f"test_{stem}.py") and str(Path(file).parent) in path)
        near += 60 * (module in text) + 25 * (Path(path).parent == folder)
        near += 55 * ("/test_every_" in path and Path(path).parent in (folder, *folder.parents))
        near += 15 * min(sum(f"{user} import" in text for user in users), 3)
        return near + min(len(names.findall(text)), 40)

    scored = sorted((-score(item), len(item[1]), item[0]) for item in tests.items())
    return [path for points, _, path in scored if points < -5][:FILES]


@contextlib.contextmanager
def planted_tree():
    """Copies the tracked and new files of the checkout, and returns the folder."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    with tempfile.TemporaryDirectory(prefix="gate-") as folder:
        for name in filter(None, names.split("\0")):
            if (ROOT / name).is_file():
                (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, Path(folder) / name)
        os.environ |= {
            "JAX_PLATFORMS": "cpu",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
            "JAX_COMPILATION_CACHE_DIR": os.environ.get("JAX_COMPILATION_CACHE_DIR")
            or f"{folder}/programs",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            "PYTHONPATH": folder,
        }
        yield Path(folder)


class FirstFailure:
    """Plugin of pytest: writes the names of failures, and ends files that take long.

    Args:
      writing: File descriptor to which names are written, one a line.
    """

    def __init__(self, writing):
        self.writing, self.begun = writing, {}

    def failed(self, report):
        if report.failed:
            os.write(self.writing, f"{report.nodeid}\n".encode())

    pytest_runtest_logreport = pytest_collectreport = failed

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item):
        now = time.process_time()
        if now - self.begun.setdefault(item.path, now) > FILE_SECONDS:
            pytest.skip("its file has had its time")


def first_failure(folder, tests, without=()):
    """Runs tests in a child process, and returns the name of the first one that fails, or None.

    The child is a fork of this process, which has imported all libraries but the project's own.

    Args:
      folder: Path of the copy of the tree.
      tests: Names of test files or tests.
      without: Names of tests that are deselected.
    """
    for library in ("hypothesis", "jax", "optax", "scipy.stats", "flax.nnx"):
        importlib.import_module(library)
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        os.chdir(folder)
        sys.path[:] = [str(folder), *(p for p in sys.path if Path(p or ".").resolve() != ROOT)]
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1), os.dup2(silent, 2)
        options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not long", "--timeout=600"]
        options += [f"--deselect={name}" for name in without]
        with contextlib.suppress(BaseException):
            pytest.main([*options, *tests], plugins=[FirstFailure(writing)])
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as told:
        names = told.read().split("\n")
    os.waitpid(child, 0)
    return names[0] or None


def catcher(mutant, folder, tests, sound):
    """Plants a mutant, and returns a test that fails with it and passes without it, or None.

    Args:
      mutant: Dictionary of the record.
      folder: Path of the copy of the tree.
      tests: Text of each test file, by path.
      sound: Whether a test passes without any mutant, by name; it grows.
    """
    known = mutant.get("caught")
    known = [known] if known and (folder / known.partition("::")[0]).exists() else []
    for names in filter(None, (known, nearest_tests(mutant["file"], tests))):
        while True:
            failing = [name for name, passes in sound.items() if not passes]
            names = [name for name in names if name not in failing]
            with planted(mutant, folder):
                test = names and first_failure(folder, names, failing)
            if not test:
                break
            if test not in sound:
                sound[test] = first_failure(folder, [test]) is None
            if sound[test]:
                return test
    return None


@contextlib.contextmanager
def planted(mutant, folder):
    """Plants a mutant into the copy of the tree, and restores its file in the end."""
    place = folder / mutant["file"]
    text = place.read_text()
    place.write_text(text.replace(mutant["old"], mutant["new"]))
    try:
        yield
    finally:
        place.write_text(text)


def quick_tests():
    """Returns the text of each test file of the three libraries, by path."""
    return {
        str(path.relative_to(ROOT)): path.read_text()
        for floor in ("accounting", "samplers", "dpsgd")
        for path in sorted((ROOT / "tests" / floor).rglob("test_*.py"))
    }


def measure(seconds):
    """Samples mutants of the checkout, and records what catches each, until the time is over."""
    tests, end = quick_tests(), time.monotonic() + seconds
    mutants = sample()
    random.Random(1).shuffle(mutants)
    sound = {}
    with planted_tree() as folder:
        for done, mutant in enumerate(mutants):
            if time.monotonic() > end:
                break
            mutant["caught"] = catcher(mutant, folder, tests, sound)
            write("faults", mutants[: done + 1])
            print(done, mutant["file"], mutant["kind"], mutant["caught"], flush=True)


def check():
    """Plants the recorded mutants again; returns those that are gone, or no longer caught."""
    tests, lost, sound = quick_tests(), [], {}
    with planted_tree() as folder:
        for mutant in read("faults"):
            place = folder / mutant["file"]
            if not place.exists() or place.read_text().count(mutant["old"]) != 1:
                lost.append(
                    f"{mutant['file']}: {mutant['old'].strip()!r} is gone: renew its record"
                )
            elif mutant["caught"] and not catcher(mutant, folder, tests, sound):
                lost.append(f"{mutant['file']}: {mutant['new'].strip()!r}, by {mutant['caught']}")
    return lost
