"""Computed rows are used while their code, job, input files and content are unchanged."""

from unittest import mock

import polars as pl
import pytest

from experiments.results import points as module
from experiments.results.points import CODE, ROOT, SPECIFICATION, code_digest, computed

JOBS = [{"n": 1.5, "word": "a"}, {"n": 2.0, "word": "b"}, {"n": 3.0, "word": "c"}]


def squared(job):
    size = len(job["input"].read_text()) if "input" in job else 0
    return [{"word": job["word"], "x": sign, "value": sign * job["n"] ** 2, "size": size}
            for sign in (1.0, -1.0)]  # fmt: skip


def cubed(job):
    return [{"word": job["word"], "x": 1.0, "value": job["n"] ** 3}]


@pytest.fixture(autouse=True)
def in_process(monkeypatch):
    monkeypatch.setattr(module, "each", map)


def values(table):
    return table["value"].to_list()


def test_missing_rows_are_computed_and_follow_the_order_of_jobs(tmp_path):
    file, lines = tmp_path / "a.parquet", []
    computed(squared, JOBS[1:2], file, lines.append)
    table = computed(squared, JOBS, file, lines.append)
    assert values(table) == [2.25, -2.25, 4.0, -4.0, 9.0, -9.0]
    assert lines == ["1 of 1", "1 of 2", "2 of 2"]
    assert computed(squared, JOBS, file, lines.append).equals(table)
    assert len(lines) == 3
    assert values(computed(squared, JOBS[2:], file)) == [9.0, -9.0]
    assert table[CODE].unique().to_list() == [code_digest()]
    assert table[SPECIFICATION].n_unique() == 3


def test_an_interrupted_computation_continues(tmp_path, monkeypatch):
    file, lines = tmp_path / "a.parquet", []

    def interrupt(line):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        computed(squared, JOBS, file, interrupt)
    computed(squared, JOBS, file, lines.append)
    assert lines == ["1 of 2", "2 of 2"]


def other_code(file, monkeypatch):
    monkeypatch.setattr(module, "code_digest", lambda: "other sources")


def without_code(file, monkeypatch):
    pl.read_parquet(file).write_parquet(file)


def torn(file, monkeypatch):
    file.write_bytes(file.read_bytes()[:-9])


def another_file(file, monkeypatch):
    file.write_text("not a table")


@pytest.mark.parametrize("fault", [other_code, without_code, torn, another_file])
def test_rows_of_other_code_or_damaged_are_computed_again(tmp_path, monkeypatch, fault):
    file, lines = tmp_path / "a.parquet", []
    computed(squared, JOBS, file)
    fault(file, monkeypatch)
    assert values(computed(squared, JOBS, file, lines.append))[:2] == [2.25, -2.25]
    assert len(lines) == 3


def test_another_function_or_input_file_is_another_job(tmp_path):
    file, given = tmp_path / "a.parquet", tmp_path / "input"
    given.write_text("four")
    job = {**JOBS[0], "input": given}
    assert computed(squared, [job], file)["size"][0] == 4
    given.write_text("fives")
    assert computed(squared, [job], file)["size"][0] == 5
    assert values(computed(cubed, [job], file)) == [3.375]
    given.unlink()
    with pytest.raises(FileNotFoundError):
        computed(squared, [job], file)


def test_every_source_of_the_packages_decides_the_digest_of_code():
    tried = [*(ROOT / "accounting").rglob("*.py"), *(ROOT / "experiments/figures").glob("*.py")]
    read = type(ROOT).read_bytes
    for path in tried[::10]:
        changed = lambda self, path=path: read(self) + b"#" * (self == path)  # noqa: E731
        with mock.patch.object(type(ROOT), "read_bytes", changed):
            assert code_digest.__wrapped__() != code_digest()
