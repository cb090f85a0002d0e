"""Where a run computes: all devices that there are, by the command; what cannot be is a line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.cli.devices import placement_of
from experiments.cli.questions.directories import Devices
from experiments.tasks.clicks.synthetic import rows as synthetic

TOGETHER = Devices(process="3/4@host0:1234")


def test_a_process_is_told_where_the_others_meet():
    assert TOGETHER.meeting == ("host0:1234", 4, 3)
    assert Devices().meeting == (None, None, None)


def test_devices_that_are_not_there_are_refused():
    with pytest.raises(ValueError, match="--num-devices 10000 exceeds"):
        placement_of(Devices(num_devices=10_000))


def test_one_device_needs_no_placement():
    assert placement_of(Devices(num_devices=1)) is None


SHARDED = """
import functools, sys
from dpsgd.engine.placement import Placement
from experiments import cli
from experiments.cli import devices
devices.Placement = functools.partial(Placement, shard_rows_from=100_000)
devices.Placement.default = Placement.default
sys.exit(cli.main())
"""
"""The command, where leaves of 100 kB are large."""


@pytest.mark.long
def test_a_run_with_sharded_tables_is_audited_and_used(tmp_path):
    synthetic.write_store(store := tmp_path / "store", 3_000, seed=1)
    sizes = ["--max-buckets", "4096", "--embedding-dim", "2", "--hidden", "4"]
    batches = ["sampler:poisson", "--batch-size", "200", "--epochs", "1", "--noise-multiplier", "1"]
    run, model, scores = (str(tmp_path / name) for name in ("run", "model", "scores.csv"))
    environment = dict(
        os.environ, PYTHONPATH=str(Path(__file__).parents[3]), JAX_NUM_CPU_DEVICES="8"
    )
    printed = []
    for words in (
        ["train", str(store), *batches, *sizes, "--out", run],
        ["evaluate", run, str(store), "--split", "test"],
        ["export", run, model],
        ["score", model, str(store), "--out", scores],
    ):
        main = SHARDED
        done = subprocess.run(
            [sys.executable, "-c", main, *words], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout)
    report = json.loads(Path(run, "report.json").read_text())
    assert report["audit"].startswith("passed: the compiled program and the draws keep")
    assert f"auc: {report['metrics']['test_auc']:.5f}"[:11] in printed[1]
    assert len(Path(scores).read_text().splitlines()) == 3_001
