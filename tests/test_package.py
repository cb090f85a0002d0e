"""What ships: its public names, its types, and what each floor may ask to be installed."""

import ast
import functools
import importlib
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

import dpsgd
from dpsgd.models.model import installed_tasks
from dpsgd.runs.task import find
from experiments.benchmarks.size import tree_of
from experiments.cli.errors import EXTRAS
from experiments.tasks import TASKS

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FLOORS = ["accounting", "samplers", "dpsgd", "experiments"]

PUBLIC = {
    "accounting": """
        BallsAndBinsProfile Bound GaussianProfile MultistageProfile PoissonProfile PrivacyProfile
        SelectionProfile ShuffleProfile TrialCount UnitsThenPoissonProfile UserPoissonProfile
        attack_accuracy attack_advantage calibrate calibrate_advantage default_delta epsilon
        largest_count
    """,
    "samplers": """
        BallsAndBins BatchSampler BatchSource Deterministic EpochSampler FullBatch Multistage
        Participations Poisson Population Shuffle UnitData UnitTree UnitsThenPoisson UserPoisson
        batch cap_contributions
    """,
    "dpsgd": """
        Adam AdamW Auto AutomaticClipping Banded BandedToeplitz Diagnostics Independent Lazy
        LazyTables Mechanism MetricWriter MovingAverage Noise NoiseMultiplier NonPrivate
        Optimizer PerLayerClipping Placement Platt Refinement RowSource Run RunSpec SGD Segment
        Settings TailAverage TargetEpsilon Task Trials averaged calibration_sums clipped_grad cost
        dpsgd explain load_exported module_with_rows public resume row_source run select
        split_module train train_blocks with_rows
    """,
}
"""What users may rely on. One that leaves breaks their programs: that belongs in CHANGELOG.md."""


def distribution(requirement: str) -> str:
    """Name of what a requirement asks for: 'scikit-learn>=1.5' -> 'scikit-learn'."""
    return re.match(r"[\w-]+", requirement)[0]


DECLARED = {distribution(line) for line in PROJECT["project"]["dependencies"]}
EXTRA = {
    extra: {distribution(line) for line in lines}
    for extra, lines in PROJECT["project"]["optional-dependencies"].items()
}


def imports(floor: str, *, lazy: bool) -> set[str]:
    """Top-level names of others' modules that a floor imports: with it, or inside functions."""
    names = {name for inside, name in _imports(floor) if inside is lazy}
    return names - {*sys.stdlib_module_names, *FLOORS}


@functools.cache
def _imports(floor: str) -> set[tuple[bool, str]]:
    """Whether inside a function, and the top-level name, of all imports."""
    found: set[tuple[bool, str]] = set()
    for file in (ROOT / floor).rglob("*.py"):
        waiting: list[tuple[bool, ast.AST]] = [(False, tree_of(file))]
        while waiting:
            inside, node = waiting.pop()
            if isinstance(node, ast.Import):
                found |= {(inside, alias.name.split(".")[0]) for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add((inside, (node.module or "").split(".")[0]))
            inside = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            waiting += [(inside, child) for child in ast.iter_child_nodes(node)]
    return found


INSTALLED = packages_distributions()


def distributions(modules: set[str]) -> set[str]:
    """What brings these modules, by the names under which it is asked for."""
    found = {module: INSTALLED.get(module, [module])[0] for module in modules}
    return {name.lower().replace("_", "-") for name in found.values()}


def test_library_imports_exactly_its_declared_dependencies():
    early, late = (
        {name for floor in FLOORS[:3] for name in imports(floor, lazy=lazy)}
        for lazy in (False, True)
    )
    needed = distributions(early - {"jaxlib"})  # which comes with jax, of one version
    assert needed <= DECLARED <= needed | distributions(late)


@pytest.mark.parametrize("floor", FLOORS)
def test_optional_packages_are_extras_and_imported_late(floor):
    late, early = imports(floor, lazy=True), imports(floor, lazy=False)
    others = late if floor != "experiments" else late | early
    optional = {name for name in others if not distributions({name}) <= DECLARED}
    assert optional <= set(EXTRAS)
    if floor != "experiments":
        assert {EXTRAS[name] for name in optional} <= {"peers"}


def test_each_extra_installs_its_documented_modules():
    for module, extra in EXTRAS.items():
        assert distributions({module}) <= EXTRA[extra], module
    everything = re.search(r"\[(.*)\]", PROJECT["project"]["optional-dependencies"]["all"][0])[1]
    assert set(EXTRAS.values()) == set(EXTRA) - {"all", "cuda"}
    assert set(everything.split(",")) == set(EXTRAS.values()) - {
        "beam"
    }  # which has a lock of its own


def test_beam_lowers_nobodys_versions_but_its_own():
    lock = tomllib.loads((ROOT / "uv.lock").read_text())
    (project,) = (package for package in lock["package"] if package["name"] == "dpsgd")
    arrows = {p["version"] for p in lock["package"] if p["name"] == "pyarrow"}
    of = {
        extra: {need["version"] for need in needs if need["name"] == "pyarrow"}
        for extra, needs in project["optional-dependencies"].items()
    }
    newest = max(arrows, key=lambda version: [int(part) for part in version.split(".")])
    assert of["data"] == of["tfds"] == {newest}
    assert of["beam"] == arrows - {newest}


LACKING = """
import sys
for module, *words in {questions!r}:
    for name in [name for name in sys.modules if name.startswith((module, "experiments"))]:
        del sys.modules[name]
    sys.modules[module] = None  # as if it were not installed
    from experiments.cli import main
    assert main(words) == 2
    del sys.modules[module]
"""


@pytest.mark.long
def test_command_first_names_its_missing_extra_in_one_line(tmp_path):
    questions = [
        "markdown_it report run --out page.html",
        "matplotlib compare --num-examples 9999 --plot compare.png",
        "pyarrow contributions rows.csv --user u",
        "pyarrow prepare csv rows.csv store --label y",
        "apache_beam prepare criteo-display rows.txt store --beam",
        "tensorflow_datasets prepare tfds mnist store --label label",
    ]
    code = LACKING.format(questions=[question.split() for question in questions])
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    missing = [question.split()[0] for question in questions]
    said = [line for line in done.stderr.splitlines() if not line.endswith(" s in all)")]
    assert said == [
        f"dpsgd: {name} is not installed: pip install 'dpsgd[{EXTRAS[name]}]'" for name in missing
    ]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("floor", PUBLIC)
def test_public_names_are_those_that_are_meant_to_be(floor):
    package = importlib.import_module(floor)
    assert sorted(package.__all__) == sorted(PUBLIC[floor].split())
    for name in package.__all__:
        assert getattr(package, name) is not None
        assert name in dir(package)


@pytest.mark.parametrize("name", ["trane", *sorted({name[:-1] for name in dpsgd.__all__})])
def test_a_name_that_is_not_public_is_refused_by_the_package(name):
    if name in dir(dpsgd):
        return
    with pytest.raises(AttributeError, match=f"^module 'dpsgd' has no attribute '{name}'"):
        getattr(dpsgd, name)


WHEEL = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]


def test_wheels_hold_neither_benchmarks_nor_tests():
    assert WHEEL["exclude"] == ["/experiments/benchmarks"]
    shipped = {file for floor in FLOORS for file in (ROOT / floor).rglob("*.py")}
    shipped -= {*(ROOT / "experiments/benchmarks").rglob("*.py")}
    for file in shipped:
        assert not file.name.startswith(("test_", "conftest")), file
        assert "experiments.benchmarks" not in file.read_text(), file


def test_every_package_that_ships_is_typed():
    assert WHEEL["packages"] == FLOORS
    for floor in FLOORS:
        assert (ROOT / floor / "py.typed").exists(), floor


def test_the_version_stands_in_one_place():
    assert PROJECT["tool"]["hatch"]["version"]["path"] == "dpsgd/__init__.py"
    assert re.fullmatch(r"\d+\.\d+\.\d+", dpsgd.__version__)


def test_command_knows_the_tasks_of_exported_models():
    assert installed_tasks() == TASKS
    for name in TASKS.values():
        assert callable(find(name).described)
