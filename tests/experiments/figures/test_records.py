"""Long computations resume; and what is recorded of them is what is computed."""

import json
import re
from pathlib import Path
from unittest import mock

import pytest

from experiments.figures import FIGURES, crossing, figure_of, never_worse, records
from experiments.figures.__main__ import main
from experiments.figures.drawing import Picture, blank
from experiments.figures.records import (
    RECORDS,
    ROOT,
    code_digest,
    computed,
    draw_recorded,
    record_of,
)

LINES: list[str] = []


def squared(job):
    number, word = job
    return {"square": number**2, "word": word}


def cubed(job):
    number, word = job
    return {"square": number**3, "word": word}


def spoil_code(path, monkeypatch):
    monkeypatch.setattr(records, "code_digest", lambda: "other sources")


def edit_point(path, monkeypatch):
    path.write_text(path.read_text().replace("81", "9801"))


def edit_function(path, monkeypatch):
    path.write_text(path.read_text().replace(".squared", ".cubed"))


def tear(path, monkeypatch):
    path.write_bytes(path.read_bytes()[:-9])


def drop_seal(path, monkeypatch):
    path.write_text(json.dumps({**json.loads(path.read_text()), "seal": None}))


FAULTS = [spoil_code, edit_point, edit_function, tear, drop_seal]


@pytest.fixture
def in_process(monkeypatch):
    monkeypatch.setattr(records, "each", lambda compute, jobs: map(compute, jobs))


def test_recorded_points_of_the_same_code_are_used(tmp_path, in_process):
    picture, jobs, lines = tmp_path / "a.svg", [(1.5, "a"), (2, "b"), (3, "c")], []
    computed(squared, jobs[:1], lines.append, picture)
    assert computed(squared, jobs, lines.append, picture) == {job: squared(job) for job in jobs}
    assert computed(squared, jobs, lines.append, picture) == {job: squared(job) for job in jobs}
    assert lines == ["0 of 1", "1 of 1", "0 of 2", "1 of 2", "2 of 2"]
    assert computed(squared, jobs[:1], lines.append) == {jobs[0]: squared(jobs[0])}


@pytest.mark.parametrize("fault", FAULTS)
def test_points_of_other_code_or_edited_are_computed_again(
    fault, tmp_path, in_process, monkeypatch
):
    picture, job, lines = tmp_path / "a.svg", (9, "a"), []
    computed(squared, [job], LINES.append, picture)
    fault(tmp_path / "a.svg.points.json", monkeypatch)
    assert computed(squared, [job], lines.append, picture) == {job: squared(job)}
    assert lines == ["0 of 1", "1 of 1"]
    computed(cubed, [job], LINES.append, picture)
    assert computed(squared, [job], LINES.append, picture) == {job: squared(job)}


@pytest.mark.parametrize("fault", [spoil_code, tear, drop_seal])
def test_a_kept_picture_is_of_the_same_code_and_its_record_whole(fault, tmp_path, monkeypatch):
    def draw(config, console):
        console.line("81")
        return blank(1, 1)

    picture = tmp_path / "a.svg"
    draw_recorded(draw, Picture(picture), "scripts/figures squares")
    assert record_of(picture)["shown"] == ["81"]
    fault(tmp_path / "a.svg.json", monkeypatch)
    assert record_of(picture) == {}


def test_every_source_of_the_packages_decides_the_digest_of_code():
    tried = [*(ROOT / "accounting").rglob("*.py"), *(ROOT / "experiments/figures").glob("*.py")]
    assert code_digest() == code_digest.__wrapped__()
    for path in tried[::10]:
        content = path.read_bytes()
        with mock.patch.object(Path, "read_bytes", edited(path, content + b"#")):
            assert code_digest.__wrapped__() != code_digest()


def edited(path, content):
    read = Path.read_bytes
    return lambda self: content if self == path else read(self)


@pytest.mark.parametrize("name", FIGURES)
def test_no_figure_writes_into_the_package(name, tmp_path):
    kind, _ = figure_of(name)
    fields = vars(kind(tmp_path / "a.svg"))
    assert [key for key, value in fields.items() if isinstance(value, Path)] == ["out"]


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
