"""The table of runs holds what their ledgers prove, and can be printed, kept, drawn and read."""

import dataclasses
import math
import shutil
from pathlib import Path

import polars as pl
import pytest

from dpsgd.runs.directory import DATA
from dpsgd.runs.result import FinishedRun
from experiments.results.table import Table, read


def test_a_row_repeats_run_and_ledger_without_data_digests(runs):
    table, unfinished = read([runs[0].parent])
    assert unfinished == []
    assert {row["run"] for row in table.rows} == {run.name for run in runs}
    for row in table.rows:
        run = FinishedRun.read(runs[0].parent / row["run"])
        for name in ("epsilon_upper", "delta", "guarantee", "params_sha256", "num_steps"):
            assert row[name] == run.record[name]
        assert row["test_error"] == run.record["metrics"]["test_error"]
        for name in ("l2_clip_norm", "bands", "clipping", "calibration"):
            assert (row[name] is None) == (row["noise_multiplier"] == 0)
        assert run.data not in map(str, row.values())
    assert table.values("data") == [0]  # all on the same rows
    assert table.varied() == ["sampler", "noise_multiplier"]


def test_runs_that_are_not_finished_are_named_and_left_out(runs, tmp_path, command):
    for run in runs[:2]:
        shutil.copytree(run, tmp_path / run.name)
    (tmp_path / runs[0].name / "report.json").unlink()
    said = command("results", tmp_path)
    assert f"note: {tmp_path / runs[0].name} is not finished, and left out" in said
    assert runs[1].name in said


def test_a_run_that_is_named_twice_is_one_row(runs, monkeypatch):
    monkeypatch.chdir(runs[0].parent)
    assert read([Path(), runs[0], Path(runs[0].name)])[0].frame.height == len(runs)


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_a_table_that_was_written_holds_every_row_and_column(runs, tmp_path, command, ending):
    file = tmp_path / f"table.{ending}"
    words = ["results", *runs, "--out", file]
    printed = command(*words)
    table, _ = read(runs)
    found = {"csv": pl.read_csv, "parquet": pl.read_parquet}[ending](file)
    assert found.columns == table.frame.columns
    assert found["epsilon_upper"].to_list() == pytest.approx(table.frame["epsilon_upper"].to_list())
    if ending == "parquet":  # which can be shown again, and together with runs
        assert command("results", file).splitlines()[0] == printed.splitlines()[0]
        both, _ = read([file, runs[0]])
        assert (both.frame.height, both.values("data")) == (len(runs) + 1, [])
    assert "give --overwrite" in command.refuses(*words)


def test_any_column_is_shown_and_drawn_over_any_setting(runs, tmp_path, command):
    plot = tmp_path / "a.png"
    words = ["results", *runs, "--x", "sampler", "--y", "training_seconds", "--plot", plot]
    assert command(*words).startswith("\ntraining seconds\nsampler")
    assert plot.stat().st_size > 5_000


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--plot", "a.png"], "give --plot an axis by --x"),
        (["--x", "noise_multipler"], "no column 'noise_multipler': did you mean noise_multiplier"),
        (["--y", "auc"], "unknown metric 'auc'; choose of test_error"),
        (["--columns", "xyzzy"], "no column 'xyzzy': --out FILE.csv has all"),
        (["--out", "a.txt"], "--out must end in .csv or .parquet, got a.txt"),
        (["nowhere"], "nowhere is not the directory of a run and contains none"),
    ],
)
def test_what_the_table_has_not_is_refused_in_one_line(runs, words, problem, command, monkeypatch):
    monkeypatch.chdir(runs[0].parent)
    assert problem in command.refuses("results", "private", *words)


def test_undefined_and_unmeasured_metrics_stay_distinct(tmp_path):
    rows = [{"run": "a", "test_auc": math.nan}, {"run": "b", "test_auc": None}]
    Table.of_rows(rows, ["test_auc"]).write(tmp_path / "t.parquet")
    first, second = Table.load(tmp_path / "t.parquet").rows
    assert math.isnan(first["test_auc"])
    assert second["test_auc"] is None


DAMAGED = {
    "no table": (lambda frame, path: path.write_text("no"), "is not a table of runs in Parquet"),
    "torn": (lambda frame, path: path.write_bytes(path.read_bytes()[:-9]), "is not a table of"),
    "not ours": (lambda frame, path: frame.write_parquet(path), "is not a table of runs"),
    "a column less": (
        lambda frame, path: frame.drop("delta").write_parquet(path, metadata={"metrics": "[]"}),
        "is a table of another version: it has no delta",
    ),
}


@pytest.mark.parametrize(("damage", "reason"), DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_table_is_refused_by_file_and_reason(tmp_path, command, damage, reason):
    file = tmp_path / "t.parquet"
    table = Table.of_rows([{"run": "a", "test_auc": 0.5}], ["test_auc"])
    table.write(file)
    damage(table.frame, file)
    assert f"{file} {reason}" in command.refuses("results", file)


def test_equal_data_have_equal_numbers_and_unknown_ones_none(runs, tmp_path):
    for name, content in (("other", '{"data": "another"}'), ("unknown", "{}")):
        copy = shutil.copytree(runs[2], tmp_path / name)
        (copy / DATA).write_text(content)
    table, _ = read([runs[2], tmp_path / "other", tmp_path / "unknown"])
    assert [row["data"] for row in table.rows] == [0, 1, None]


def test_no_metric_or_setting_of_a_task_replaces_the_guarantee(runs):
    run = FinishedRun.read(runs[0])
    named = {"epsilon_upper": 0.01, "delta": 0.0, "guarantee": 1.0}
    record = {**run.record, "metrics": {**run.record["metrics"], **named}}
    task = {**run.task, "settings": {**run.task["settings"], **named}}
    config = dataclasses.replace(run.config, record={**run.config.record, "task": task})
    claimed = dataclasses.replace(run, record=record, config=config)
    table, proved = Table.collect({"run": claimed}), Table.collect({"run": run})
    assert table.metrics == proved.metrics
    for name in named:
        assert table.rows[0][name] == proved.rows[0][name]
