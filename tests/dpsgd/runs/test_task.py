"""What is trained is found again by its name and its settings, and known by its code and rows."""

import dataclasses
import re
import sys
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from tiny_task import Line, config_of, line

from dpsgd import run
from dpsgd.runs.task import check_task, data_digest, find, load, rows_of, task_record
from samplers import Population, UnitTree


def test_a_task_comes_back_from_its_record():
    task = Line(rows=7, seed=3)
    record = task_record(task)
    assert record["name"] == "tiny_task:Line"
    assert record["settings"] == {"rows": 7, "width": 3, "seed": 3}
    assert load(record, "where") == task
    assert load({"name": "tiny_task:line", "settings": {}}, "where") is line


@dataclasses.dataclass(frozen=True)
class Stored(Line):
    data: Path = Path("here")
    kind: Literal["a", "b"] = "a"
    hidden: tuple[int, ...] | None = (3, 4)


def test_data_are_looked_for_where_they_lie_now(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "stored", sys.modules[__name__])
    monkeypatch.setattr(Stored, "__module__", "stored")
    monkeypatch.chdir(tmp_path)
    record = task_record(Stored())
    assert record["settings"]["data"] == str(tmp_path / "here")  # from wherever one resumes
    assert load(record, "where") == Stored(data=tmp_path / "here")
    assert load(record, "where", data=Path("/there")) == Stored(data=Path("/there"))
    with pytest.raises(ValueError, match=r"task tiny_task:Line has no setting `data`"):
        load(task_record(line), "where", data=Path("/there"))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nowhere:task", "nowhere cannot be imported: No module named 'nowhere' in the current"),
        ("tiny_task:linn", "module tiny_task has no 'linn': did you mean line"),
        ("tiny_task", "'tiny_task' is not of the form module:object"),
        ("broken_task:task", "broken_task cannot be imported: ZeroDivisionError: division by zero"),
        ("needy_task:task", "needy_task cannot be imported: No module named 'nowhere'"),
    ],
)
def test_what_is_not_found_is_named_in_one_line(name, why, tmp_path, monkeypatch):
    (tmp_path / "broken_task.py").write_text("1 / 0\n")
    (tmp_path / "needy_task.py").write_text("import nowhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=f"^{re.escape(why)}") as refused:
        find(name)
    assert "\n" not in str(refused.value)


NAMELESS = ("", "tiny_task", ":line", "tiny_task:", "a:b:c")


@pytest.mark.parametrize(
    ("record", "why"),
    [
        ({"name": None, "settings": {}}, "object without a name"),
        (
            {"name": "tiny_task:Line", "settings": {"rowz": 3}},
            "rowz is unknown: did you mean",
        ),
        ({"name": "tiny_task:Line", "settings": {"rows": "3"}}, "rows must be an integer, got '3'"),
        ({"name": "tiny_task:Line"}, "settings: must be a table, got None"),
        ({"name": "tiny_task:BLOCK", "settings": {}}, "is not a task: a int lacks columns"),
        ("x", "must be a table, got x"),
        *(({"name": name, "settings": {}}, "^where: task, name: ") for name in NAMELESS),
    ],
)
def test_a_record_that_names_no_task_is_refused(record, why):
    with pytest.raises(ValueError, match=why):
        load(record, "where")


def test_what_is_no_task_says_which_methods_it_lacks():
    class Half:
        def columns(self): ...
        def init(self, seed): ...
        def loss(self, params, example): ...

    with pytest.raises(ValueError, match="mine is not a task: a Half lacks metrics, gener"):
        check_task(Half(), "mine")
    with pytest.raises(ValueError, match="is a class, not a task"):
        check_task(Line, "mine")
    check_task(line, "mine")


def test_any_changed_number_changes_the_digest_of_the_data():
    rows = line.columns()
    found = {data_digest(line, rows), data_digest(line, rows)}
    assert len(found) == 1
    for name in rows:
        other = {**rows, name: rows[name].copy()}
        other[name].flat[-1] += 1
        found.add(data_digest(line, other))
    found.add(data_digest(line, {"z": rows["x"], "y": rows["y"]}))
    found.add(data_digest(line, {**rows, "x": rows["x"].reshape(3, -1)}))
    found.add(data_digest(line, {**rows, "y": rows["y"].view(np.int32)}))
    tree = UnitTree.even((4, 8, 5), ("user", "session"))
    found.add(data_digest(line, rows, Population(160, tree=tree)))
    assert len(found) == 7


class OfTable(Line):
    """Task whose columns are series, or the table itself."""

    def columns(self):
        x = np.arange(float(self.rows))
        table = pytest.importorskip("pandas").DataFrame({"x": x}, index=x[::-1])
        return table if self.seed else {"x": table["x"]}


def test_rows_of_a_task_lie_by_their_places():
    rows, _ = rows_of(OfTable(rows=5, seed=0))
    np.testing.assert_array_equal(rows["x"][np.arange(2)], [0.0, 1.0])
    with pytest.raises(ValueError, match="must return arrays by name, got a DataFrame"):
        rows_of(OfTable(rows=5, seed=1))


def test_a_task_adds_to_what_its_guarantee_does_not_cover(tmp_path):
    class Told(Line):
        def not_covered(self):
            return ["which class a row is of"]

    report = run(Told(), config_of(), tmp_path / "run")
    assert "NOT COVERED: which class a row is of" in report["guarantee"]
    assert report["not_covered"][0] == "which class a row is of"
    assert "- which class a row is of" in (tmp_path / "run" / "report.md").read_text()
