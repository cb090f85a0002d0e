"""The log of a run tells steps, cost and throughput, and nothing of its rows."""

import csv
import itertools
import time

import pytest
from tiny_task import Line

import dpsgd
from dpsgd import RunSpec
from dpsgd.runs.directory import RunDirectory
from dpsgd.runs.log import COLUMNS, LOG, WORDS, CsvWriter, TrainingLog
from samplers.settings import SETTINGS


class Kept:
    def __init__(self):
        self.rows = []

    def write_scalars(self, step, scalars):
        self.rows.append((step, dict(scalars)))


@pytest.mark.parametrize("noise", [{"noise_multiplier": 1.0}, {"non_private": True}])
def test_a_run_ends_in_the_row_of_its_report_in_every_writer(tmp_path, noise):
    spec = RunSpec.of(SETTINGS["deterministic"](batch_size=40, epochs=2), audit=False, **noise)
    kept = Kept()
    record = dpsgd.run(Line(), spec, tmp_path / "run", name="tiny_task:Line", log=kept)
    [(step, scalars)] = kept.rows
    assert step == record["num_steps"]
    assert scalars.get("epsilon") == record["epsilon_upper"]
    assert scalars["examples_per_second"] == pytest.approx(record["examples_per_second"], rel=0.01)
    with (tmp_path / "run" / LOG).open() as file:
        (row,) = csv.DictReader(file)
    assert tuple(row) == COLUMNS
    assert row == {"step": str(step), "epsilon": "", **{k: str(v) for k, v in scalars.items()}}


def test_the_last_row_is_written_before_the_report(tmp_path):
    """A run that is killed after its report is not resumed."""
    out, finished = tmp_path / "run", []

    class Asking:
        def write_scalars(self, step, scalars):
            finished.append(RunDirectory(out).finished)

    spec = RunSpec.of(SETTINGS["deterministic"](batch_size=40), audit=False, noise_multiplier=1.0)
    dpsgd.run(Line(), spec, out, name="tiny_task:Line", log=Asking())
    assert finished == [False]


@pytest.mark.parametrize("damage", [b"", b"\n5\xff,0.5,1.0\n7,\xc3", b"\n\x00\n\n"])
def test_a_resumed_log_holds_each_step_once(tmp_path, damage):
    for first, steps in ((0, (10, 20, 30)), (20, (25, 40)), (40, (40,))):
        writer = CsvWriter(tmp_path / LOG, first)
        with (tmp_path / LOG).open("ab") as file:
            file.write(damage)
        for step in steps:
            writer.write_scalars(step, {"epsilon": 0.5, "examples_per_second": 1.0 * step})
    with (tmp_path / LOG).open() as file:
        assert [row["step"] for row in csv.DictReader(file)] == ["10", "20", "25", "40"]


def test_slow_epsilons_are_computed_less_often():
    now, kept, asked = [0.0], Kept(), []

    def epsilon():
        asked.append(now[0])
        now[0] += 5.0
        return float("inf")

    log = TrainingLog([kept], clock=lambda: now[0])
    while now[0] < 2000:
        log.offer(int(now[0]), epsilon, 1234.56)
        now[0] += 1.0
    assert asked[0] == 30
    assert all(later - before >= 500 for before, later in itertools.pairwise(asked))
    assert kept.rows[0] == (30, {"examples_per_second": 1230.0})  # an infinite epsilon is none


@pytest.mark.long
def test_the_stages_of_a_run_take_all_of_its_time(tmp_path):
    before, out = time.monotonic(), tmp_path / "run"
    spec = RunSpec.of(SETTINGS["shuffle"](batch_size=16, epochs=3), noise_multiplier=1.0)
    record = dpsgd.run(Line(), spec, out, started=before - 3.0)
    stages, taken = record["stage_seconds"], time.monotonic() - before + 3.0
    assert list(stages) == [name for name in WORDS if name != "calibrate"]
    assert min(stages.values()) >= 0
    assert stages["read"] >= 3.0
    assert 0.9 * taken - 0.5 <= sum(stages.values()) <= taken
