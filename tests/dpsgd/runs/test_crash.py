"""Killed at any moment, a run goes on, and its ledger counts every step that was drawn."""

from pathlib import Path

import pytest
from drivers import ended

DRIVER = Path(__file__).with_name("crash_driver.py")
SAMPLERS = [
    "deterministic", "shuffle", "poisson", "balls-and-bins",
    "poisson-accumulate", "balls-and-bins-accumulate", "balls-and-bins-bands",
]  # fmt: skip

pytestmark = pytest.mark.crash

LINE = '{"name": "tiny_task:line"}'
CALIBRATED = '{"name": "tiny_task:calibrated"}'
WORDS = '{"name": "tiny_task:words"}'


def drive(folder, sampler, seed, *points, task=LINE):
    return ended(DRIVER, task, folder, sampler, seed, *points).splitlines()


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", ["1", "secret"])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_killed_at_any_file_operation_a_run_goes_on(tmp_path, sampler, seed):
    assert len(drive(tmp_path, sampler, seed)) >= 50


OTHERS = {  # and files of which each must have been one to be killed at
    "calibrated": ("deterministic", CALIBRATED, ("calibration.json", ".000000000013.checkpoint")),
    "lazy tables": ("balls-and-bins-lazy", WORDS, (".000000000006.checkpoint",)),
}


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", ["1", "secret"])
@pytest.mark.parametrize(("sampler", "task", "files"), OTHERS.values(), ids=OTHERS)
def test_killed_at_any_file_operation_other_runs_go_on(tmp_path, sampler, task, files, seed):
    points = drive(tmp_path, sampler, seed, task=task)
    for file in files:  # at a flush, or after 10 steps and 3 sums
        assert any(file in point for point in points)
