"""Processes that hold lanes draw, read and pad their own ones alone, and train to the same bits."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.processes
@pytest.mark.parametrize(
    ("sampler", "lanes", "processes"),
    [
        ("bins", 2, 2),
        pytest.param("shuffle", 4, 4, marks=pytest.mark.long),
        pytest.param("poisson", 4, 2, marks=pytest.mark.long),
    ],
)
def test_processes_of_lanes_train_as_one_process_with_as_many_lanes(
    sampler, lanes, processes, tmp_path
):
    driver = Path(__file__).with_name("lanes_driver.py")
    ran = subprocess.run(
        [sys.executable, driver, sampler, str(lanes), str(processes), tmp_path],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )
    assert ran.stdout.endswith("the same bits\n"), ran.stderr
