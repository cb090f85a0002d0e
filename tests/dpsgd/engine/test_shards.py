"""Processes draw, read and pad their own data shards alone, and train to the same bits."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes


def last_line(*words):
    """What the driver prints last, or what went wrong."""
    ran = subprocess.run(
        [sys.executable, Path(__file__).with_name("shards_driver.py"), *words],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )
    return ran.stdout.splitlines()[-1] if ran.returncode == 0 else ran.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    ("sampler", "shards", "processes"),
    [
        ("bins", "2", "2"),
        pytest.param("shuffle", "4", "4", marks=pytest.mark.long),
        pytest.param("poisson", "4", "2", marks=pytest.mark.long),
    ],
)
def test_processes_of_shards_train_as_one_process_with_as_many_shards(
    sampler, shards, processes, tmp_path
):
    assert last_line(sampler, shards, processes, tmp_path) == "the same bits"


@pytest.mark.long
def test_a_shard_that_two_processes_take_and_one_that_nobody_takes_are_caught_by_their_audit(
    tmp_path,
):
    assert last_line("bins", "audit", tmp_path) == "caught"
