"""Every built-in task conforms, hides its rows, and needs no other task.

A new task gets all of this by one line of `CASES`.
"""

import ast
import dataclasses
import json
import tomllib
from pathlib import Path

import jax
import numpy as np
import pytest

from dpsgd.audit.conformance import check_neighbours, check_task
from dpsgd.runs.task import METHODS, find, load, rows_of
from experiments.benchmarks.size import nodes_of
from experiments.tasks import TASKS
from experiments.tasks.clicks.formats import DISPLAY
from experiments.tasks.clicks.synthetic import rows as clicks
from experiments.tasks.ratings import ratings
from experiments.tasks.splits import random_masks

ROOT = Path(__file__).resolve().parents[3]


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
    return DISPLAY.prepare(folder / "raw.txt", folder / "store").path, CASES["clicks"][1]


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


@pytest.mark.short("clicks*")
@pytest.mark.parametrize("name", NEIGHBOURS)
def test_one_changed_row_changes_no_shape_count_or_program(name, tmp_path):
    tasks = []
    for changed in (False, True):
        (folder := tmp_path / str(changed)).mkdir()
        data, settings = NEIGHBOURS[name](folder, changed)
        record = {"name": TASKS[name], "settings": settings | {"data": str(data)}}
        tasks.append(load(record, "here"))
    assert check_neighbours(*tasks).passed
    values = [jax.tree.leaves(rows_of(task)[0]) for task in tasks]
    assert not all(np.array_equal(one, other) for one, other in zip(*values, strict=True))


def test_every_built_in_task_has_a_case_and_all_methods():
    assert CASES.keys() == TASKS.keys()
    assert NEIGHBOURS.keys() >= TASKS.keys()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["dpsgd.tasks"] == TASKS
    for name in TASKS.values():
        kind = find(name)
        assert dataclasses.is_dataclass(kind)
        assert all(hasattr(kind, method) for method in (*METHODS, "check", "read", "evaluate"))


@pytest.mark.parametrize("name", TASKS)
def test_a_task_and_what_tasks_share_import_no_other(name):
    folder = ROOT / "experiments" / "tasks"
    others = tuple(f"experiments.tasks.{other}." for other in TASKS if other != name)
    for file in [*(folder / name).rglob("*.py"), *folder.glob("*.py")]:
        for node in nodes_of(file):
            if isinstance(node, ast.Import | ast.ImportFrom):
                start = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
                for alias in node.names:
                    assert not f"{start}{alias.name}.".startswith(others), file


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_a_built_in_task_conforms(name, tmp_path):
    write, settings = CASES[name]
    data = {"data": str(write(tmp_path))} if write else {}
    assert check_task(load({"name": TASKS[name], "settings": settings | data}, "here")).passed


SETTINGS = [(name, settings) for name, (_, settings) in CASES.items()]
SETTINGS += [("ratings", {"rows": "ratings"}), ("images", {"new_classes": 3, "channels": [2]})]


@pytest.mark.parametrize(("name", "settings"), SETTINGS)
def test_a_description_rebuilds_models_shared_by_equal_tasks(name, settings, tmp_path):
    write, _ = CASES[name]
    data = {"data": str(write(tmp_path))} if write else {}
    record = {"name": TASKS[name], "settings": settings | data}
    task, equal = load(record, "here"), load(record, "here")
    description = json.loads(json.dumps(task.describe()))
    again = type(task).described(description)
    for other in (again, equal):
        assert (other.loss, other.predict) == (task.loss, task.predict)
    params = again.init(0)
    assert jax.tree.all(jax.tree.map(np.array_equal, params, task.init(0)))
    assert description["headline"] in task.metrics(params)
    rows, real = task.generated(5), rows_of(task)[0]
    assert {k: (x.dtype, x.shape[1:]) for k, x in rows.items()} == {
        k: (x.dtype, x.shape[1:]) for k, x in real.items()
    }
    assert {len(x) for x in jax.tree.leaves(rows)} == {5}
    assert json.loads(json.dumps(task.describe())) == description
    field = {"clicks": "model_sizes", "images": "sizes", "ratings": "rank"}[name]
    with pytest.raises(ValueError, match=f"^config.{{1,2}}{field}"):
        type(task).described({**description, field: {"hidden": "x"}}, "config")
