"""Long computations resume; and what is recorded of them is what is computed."""

import json
import re

import pytest

from experiments.figures import crossing, never_worse
from experiments.figures.__main__ import main
from experiments.figures.records import RECORDS, computed

LINES: list[str] = []


def squared(job):
    number, word = job
    return {"square": number**2, "word": word}


def never(job):
    raise AssertionError(f"{job} is in the record")


@pytest.mark.long
def test_only_what_is_not_in_the_record_is_computed(tmp_path):
    path, jobs = tmp_path / "record.json", [(1.5, "a"), (2, "b"), (3, "c")]
    computed(squared, jobs[:1], LINES.append, path)
    known = path.read_text()
    found = computed(squared, jobs, LINES.append, path)
    assert found == {job: squared(job) for job in jobs}
    assert found == computed(never, jobs, LINES.append, path)
    assert path.read_text().startswith(known.rstrip("}\n"))
    assert LINES == ["0 of 1", "1 of 1", "0 of 2", "1 of 2", "2 of 2"]
    assert computed(squared, jobs[:1], LINES.append) == {jobs[0]: squared(jobs[0])}


def test_the_recorded_crossings_are_certified_and_their_signs_change_once():
    rows = json.loads((RECORDS / "crossing.json").read_text())
    assert len(rows) == 187
    for row in rows.values():
        lower, upper = row["epsilon"]
        assert 0 < lower < upper < 1.012 * lower
        assert row["zero"] > 0
        assert re.fullmatch(">{4}<{2,}|>{4}<", row["signs"])
    assert rows["10.0 5"] == crossing.point((10.0, 5))


def test_the_recorded_cells_are_decided_and_none_is_worse_at_a_small_delta():
    rows = json.loads((RECORDS / "never_worse.json").read_text())
    for row in rows.values():
        assert re.fullmatch(r">*<*[.]*", row["signs"])
        assert len(row["signs"]) == len(never_worse.EPSILONS)
        for low, high, poisson_low, poisson_high in row.get("bounds", {}).values():
            assert 0.034 < poisson_low <= poisson_high < low <= high
    assert rows["195 0.35 5"] == never_worse.cells((195, 0.35, 5))


@pytest.mark.long
@pytest.mark.parametrize("name", ["crossing", "never_worse"])
def test_a_small_version_computes_what_it_draws(name, tmp_path, capsys):
    assert main([name, "--small", str(tmp_path / "a.svg")]) == 0
    assert (tmp_path / "a.svg").stat().st_size > 10_000
    assert "zero-out" in capsys.readouterr().out
