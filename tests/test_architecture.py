"""Imports go one way, and NumPy stays below JAX."""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.benchmarks.cases import CASES
from experiments.benchmarks.size import circles, nodes_of, tree_of

ROOT = Path(__file__).resolve().parents[1]
ORDER = ["accounting", "samplers", "dpsgd", "experiments"]
JAX = {"jax", "jaxlib", "flax", "optax"}


@functools.cache
def imported_packages(file: Path) -> set[str]:
    """Top-level names of all absolute imports in `file`, the lazy ones inside functions too."""
    names: set[str] = set()
    for node in nodes_of(file):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import; name the package"
            names.add((node.module or "").split(".")[0])
    return names


@pytest.mark.parametrize("package", ORDER)
def test_imports_go_one_way(package):
    above = set(ORDER[ORDER.index(package) + 1 :]) | {"tests", "scripts"}
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    for file in files:
        assert not imported_packages(file) & above, f"{file} imports from above {package}/"


@pytest.mark.parametrize("package", ORDER[:-1])
def test_no_lower_floor_names_a_data_set_or_what_is_trained(package):
    for file in sorted((ROOT / package).rglob("*")):
        if file.suffix in (".py", ".md"):
            text = file.read_text().lower()
            assert not re.search("criteo|movielens|scikit", text), file
            assert file.suffix == ".md" or not re.search("(?<![a-z])clicks?(?![a-z])", text), file


def test_no_modules_import_one_another():
    """No circle, whether in a function, for annotations alone, or by a package's names."""
    assert not circles()


@pytest.mark.parametrize("package", ["accounting", "samplers"])
def test_accounting_and_samplers_need_no_jax(package):
    for file in sorted((ROOT / package).rglob("*.py")):
        assert not imported_packages(file) & JAX, f"{file} imports JAX"


@pytest.mark.parametrize("package", ORDER)
def test_every_folder_says_what_lives_in_it(package):
    readme = ROOT / package / "README.md"
    assert readme.exists()
    assert 0 < len(readme.read_text().splitlines()) <= 60


LEVELS = {
    "accounting": {"profile": 0, "algebra": 1, "profiles": 2, "releases": 3},
    "dpsgd": {
        "core": 0,
        "noise": 1,
        "gradients": 1,
        "engine": 2,
        "audit": 3,
        "runs": 4,
        "trainer": 5,
        "selection": 5,
        "models": 5,
    },
}
"""The level of each part of a package: a file imports from its own part, or from below."""


@pytest.mark.parametrize(
    ("package", "part"), [(name, part) for name, parts in LEVELS.items() for part in parts]
)
def test_inside_a_package_imports_go_one_way(package, part):
    files = sorted((ROOT / package).glob(f"{part}.py")) + sorted(
        (ROOT / package / part).rglob("*.py")
    )
    assert files
    for file in files:
        named = {  # in annotations alone
            inner
            for node in nodes_of(file)
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            for inner in ast.walk(node)
        }
        for node in nodes_of(file):
            if not isinstance(node, ast.ImportFrom) or node in named:
                continue
            if not (node.module or "").startswith(f"{package}."):
                continue
            other = (node.module or "").split(".")[1]
            levels = LEVELS[package]
            assert other == part or levels.get(other, -1) < levels[part], (
                f"{file} imports from {other}, which is not below it"
            )


def test_oracles_are_used_only_by_tests():
    for package in ORDER:
        for file in sorted((ROOT / package).rglob("*.py")):
            assert "jax_privacy" not in imported_packages(file), file


HEAVY = {"jax", "flax", "optax", "matplotlib", "pyarrow", "scipy.optimize", "scipy.stats"}


@pytest.mark.parametrize(
    ("imported", "needed"),
    [
        pytest.param("dpsgd.runs.ledger, samplers", set(), id="a ledger is priced"),
        pytest.param(
            "dpsgd.trainer, samplers",
            {"jax", "optax"},
            id="a run is trained",
            marks=pytest.mark.long,  # of its own modules, the test below reads what they import
        ),
    ],
)
def test_nothing_heavy_is_imported_but_what_is_needed_where(imported, needed):
    code = f"import {imported}, sys; print(sorted({HEAVY - needed!r} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def modules_imported_with(name: str) -> dict[str, set[str]]:
    """The project's modules that importing `name` imports, each with all that it imports so."""
    found: dict[str, set[str]] = {}
    waiting = [name]
    while waiting:
        module = waiting.pop()
        folder = ROOT.joinpath(*module.split("."))
        file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
        if module in found or not file.exists():
            continue
        found[module] = set()
        parents = module.split(".")
        waiting += [".".join(parents[:i]) for i in range(1, len(parents))]
        for node in tree_of(file).body:  # not what a function imports when it is called
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                origin = node.module or ""
                names = [origin, *(f"{origin}.{alias.name}" for alias in node.names)]
            else:
                continue
            found[module] |= {*names}
            waiting += [one for one in names if one.split(".")[0] in ORDER]
    return found


GPU = {
    f"experiments.benchmarks.{case.measure.split('.')[0]}" for case in CASES if case.area == "gpu"
}


@pytest.mark.parametrize("start", ["dpsgd.runs.run", *sorted(GPU)])
def test_run_needs_jax_and_scipy_and_gpu_command_pyarrow(start):
    imported = modules_imported_with(start)
    assert len(imported) > 20
    allowed = {*sys.stdlib_module_names, *ORDER, "numpy", "scipy", *JAX}
    allowed |= {"pyarrow"} if start in GPU else set()  # generated rows are columns of Arrow
    for module, names in imported.items():
        assert not {name.split(".")[0] for name in names} - allowed, module


def test_training_imports_nothing_heavy_but_jax_and_optax():
    imported = modules_imported_with("dpsgd.trainer") | modules_imported_with("samplers")
    assert len(imported) > 20
    heavy = tuple(f"{name}." for name in HEAVY - {"jax", "optax"})
    for module, names in imported.items():
        assert not [name for name in names if f"{name}.".startswith(heavy)], module
