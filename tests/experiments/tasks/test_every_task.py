"""Every built-in task trains, dies, goes on and is asked by the same commands, and needs no other.

A new task gets all of this by one line of `CASES`.
"""

import ast
import dataclasses
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import numpy as np
import pytest

from dpsgd.audit.conformance import check_neighbours, check_task
from dpsgd.runs.task import METHODS, find, load, rows_of
from experiments import cli
from experiments.tasks import TASKS
from experiments.tasks.clicks.criteo import display
from experiments.tasks.clicks.synthetic import rows as clicks
from experiments.tasks.ratings import ratings
from experiments.tasks.splits import random_masks

ROOT = Path(__file__).resolve().parents[3]
DRIVER = ROOT / "tests" / "dpsgd" / "runs" / "crash_driver.py"


def store(folder):
    clicks.write_store(folder / "store", 200, seed=0)
    return folder / "store"


def u_data(folder):
    table = ratings.synthetic(0, num_users=240, num_items=40)
    rows = zip(table.user, table.item + 1, table.rating.astype(int), table.time, strict=True)
    path = folder / "u.data"
    path.write_text("".join("\t".join(map(str, row)) + "\n" for row in rows))
    return path


CASES = {
    "clicks": (
        store,
        {"model": "wide-and-deep", "embedding_dim": 2, "max_buckets": 8, "hidden": [4], "bins": 2},
    ),
    "images": (None, {"channels": [2]}),
    "ratings": (u_data, {"max_ratings": 5}),
}
"""What writes the data of each built-in task, if anything, and other settings of a small one."""


def changed_clicks(folder, changed):
    clicks.write_raw(folder / "raw.txt", 200, seed=0)
    lines = (folder / "raw.txt").read_text().splitlines()
    if changed:  # a training row
        lines[17] = "\t".join(["0", *["987654321"] * 13, *["feedbeef"] * 26])
    (folder / "raw.txt").write_text("\n".join(lines) + "\n")
    return display.prepare(folder / "raw.txt", folder / "store").path, CASES["clicks"][1]


def changed_images(folder, changed):
    x, y = np.zeros((60, 8, 8), np.uint8), np.arange(60) % 4
    if changed:
        x[17], y[17] = 255, 11
    np.savez(folder / "some.npz", x=x, y=y)
    return folder / "some.npz", {"channels": [2], "num_classes": 12}


def changed_ratings(folder, changed):
    path = u_data(folder)
    lines = path.read_text().splitlines()
    if changed:  # of a user who trains
        rows = [line.split("\t") for line in lines]
        one = next(row[0] for row in rows if random_masks(np.array([int(row[0])]))["train"][0])
        new = ([user, item, str(6 - int(x)), t] for user, item, x, t in rows if user == one)
        lines = [line for line in lines if line.split("\t")[0] != one]
        lines += ["\t".join(row) for row in new]
    path.write_text("\n".join(lines) + "\n")
    return path, CASES["ratings"][1]


NEIGHBOURS = {"clicks": changed_clicks, "images": changed_images, "ratings": changed_ratings}
"""What writes the data of each built-in task, or the same with one changed training row."""


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_one_changed_row_changes_no_shape_no_count_and_no_program(name, tmp_path):
    tasks = []
    for changed in (False, True):
        (folder := tmp_path / str(changed)).mkdir()
        data, settings = NEIGHBOURS[name](folder, changed)
        record = {"name": TASKS[name], "settings": settings | {"data": str(data)}}
        tasks.append(load(record, "here"))
    assert check_neighbours(*tasks).passed
    values = [jax.tree.leaves(rows_of(task)[0]) for task in tasks]
    assert not all(np.array_equal(one, other) for one, other in zip(*values, strict=True))


def test_every_built_in_task_has_a_case_and_all_methods_and_is_found_by_whoever_loads_its_models():
    assert CASES.keys() == TASKS.keys()
    assert NEIGHBOURS.keys() >= TASKS.keys()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["dpsgd.tasks"] == TASKS
    for name in TASKS.values():
        kind = find(name)
        assert dataclasses.is_dataclass(kind)
        assert all(hasattr(kind, method) for method in (*METHODS, "check", "read", "evaluate"))


@dataclasses.dataclass
class Case:
    name: str
    data: Path | None
    settings: dict
    runs: Path
    """Folder of runs of the crash test: "reference" is one that was left undisturbed."""

    @property
    def words(self):
        """The settings, as the command line has them."""
        return [*([str(self.data)] if self.data else []), *self._options]

    @property
    def audit_words(self):
        """The settings, as `dpsgd audit` has them."""
        return [*(["--data", str(self.data)] if self.data else []), *self._options]

    @property
    def _options(self):
        words = []
        for name, value in self.settings.items():
            values = value if isinstance(value, list) else [value]
            words += [f"--{name.replace('_', '-')}", *map(str, values)]
        return words


@pytest.mark.parametrize("name", TASKS)
def test_a_task_and_what_tasks_share_import_no_other(name):
    folder = ROOT / "experiments" / "tasks"
    others = tuple(f"experiments.tasks.{other}." for other in TASKS if other != name)
    for file in [*(folder / name).rglob("*.py"), *folder.glob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                start = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
                for alias in node.names:
                    assert not f"{start}{alias.name}.".startswith(others), file


def each_case(*, long=()):
    """Every task, some or all of them in the long tests alone."""
    marked = [pytest.param(one, marks=[pytest.mark.long] * (one in long)) for one in CASES]
    return pytest.mark.parametrize("case", marked, indirect=True)


@pytest.fixture(scope="module")
def case(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    write, settings = CASES[request.param]
    return Case(request.param, write and write(folder), settings, folder / "runs")


ALONE = """
import runpy, sys
import sklearn.datasets  # once, and not in each process that reads its digits
driver, others, *sys.argv[1:] = sys.argv[1:]
for module in others.split():
    sys.modules[module] = None  # to import it raises ModuleNotFoundError
runpy.run_path(driver, run_name="__main__")
"""


@pytest.fixture(scope="module")
def crashed(case):
    """What the crash driver prints of runs of a task, in processes without the other tasks."""
    settings = case.settings | ({"data": str(case.data)} if case.data else {})
    task = json.dumps({"name": TASKS[case.name], "settings": settings})
    others = [module.rpartition(".")[0] for module in TASKS.values()]
    others.remove(TASKS[case.name].rpartition(".")[0])
    words = [DRIVER, " ".join(others), task, case.runs, "balls-and-bins"]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ALONE, *map(str, words), "write ledger.jsonl 3"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@each_case(long=("clicks", "ratings"))
def test_a_built_in_task_conforms(case):
    settings = case.settings | ({"data": str(case.data)} if case.data else {})
    record = {"name": TASKS[case.name], "settings": settings}
    assert check_task(load(record, "here")).passed


@pytest.mark.crash
@each_case(long=CASES)
def test_killed_in_a_declaration_a_run_without_the_other_tasks_goes_on_to_the_same_bits(crashed):
    assert crashed == "write ledger.jsonl 3: the same bits\n"


def command(capsys, *words):
    capsys.readouterr()
    assert cli.main([str(word) for word in words]) == 0
    return capsys.readouterr().out


@pytest.mark.long
@each_case()
def test_a_run_asked_for_on_the_command_line_is_audited_and_names_its_unit(case, tmp_path, capsys):
    out = tmp_path / "run"
    sampler = ["sampler:poisson", "--batch-size", 60, "--epochs", 1]
    words = ["train", "--task", case.name, *case.words, *sampler, "--noise-multiplier", 1]
    said = command(capsys, *words, "--out", out)
    unit = "user" if case.name == "ratings" else "example"
    assert f"unit: one {unit})" in said
    assert "audit: passed" in said
    assert json.loads((out / "report.json").read_text())["unit"] == unit
    assert "consistent" in command(
        capsys, "audit", "--task", case.name, *case.audit_words, *sampler,
        *("--num-examples", 1000, "--noise-multiplier", 1),
    )  # fmt: skip
    command(capsys, "report", out, "--out", tmp_path / "page.html", "--markdown", tmp_path / "page")
    assert unit in (tmp_path / "page" / "report.md").read_text()
