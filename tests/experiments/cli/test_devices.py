"""Where a run computes: all devices that there are, by the command; what cannot be is a line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.cli.devices import Devices, Processes
from experiments.tasks.clicks.synthetic import rows as synthetic

TOGETHER = {"coordinator": "host0:1234", "num_processes": 4, "process_id": 3}


@pytest.mark.parametrize("settings", [{}, TOGETHER])
def test_processes_that_can_be_are_taken(settings):
    Processes(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_processes": 2}, "--coordinator, --num-processes and --process-id are given togeth"),
        ({**TOGETHER, "process_id": None}, "are given together"),
        ({**TOGETHER, "coordinator": "host0"}, "--coordinator must be HOST:PORT, got host0"),
        ({**TOGETHER, "coordinator": ":80"}, "--coordinator must be HOST:PORT"),
        ({**TOGETHER, "coordinator": "a:65536"}, "--coordinator must be HOST:PORT"),
        ({**TOGETHER, "num_processes": 0}, "--num-processes must be at least 1"),
        ({**TOGETHER, "process_id": 4}, r"--process-id must lie in \[0, 4\), got 4"),
        ({"watchdog_seconds": 0.0}, "--watchdog-seconds must be finite and > 0"),
    ],
)
def test_processes_that_cannot_be_are_named_by_their_option(settings, message):
    with pytest.raises(ValueError, match=message):
        Processes(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_devices": 0}, "--num-devices must be at least 1, got 0"),
        ({"num_devices": 10_000}, "--num-devices is 10000, and"),
        ({"shard_rows_from": "some"}, "--shard-rows-from must be a size such as 8GB or 512MiB"),
        ({"shard_rows_from": "0.1B"}, "--shard-rows-from must be at least 1 byte, got 0.1B"),
    ],
)
def test_devices_that_are_not_there_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Devices(**settings).placement()


def test_one_device_needs_no_placement():
    assert Devices(num_devices=1).placement() is None


@pytest.mark.long
def test_a_run_whose_tables_are_sharded_is_audited_and_used_as_any_other(tmp_path):
    synthetic.write_store(store := tmp_path / "store", 3_000, seed=1)
    sizes = ["--max-buckets", "4096", "--embedding-dim", "2", "--hidden", "4"]
    batches = ["sampler:poisson", "--batch-size", "200", "--epochs", "1", "--noise-multiplier", "1"]
    dealt = ["--shard-rows-from", "100KB"]
    run, model, scores = (str(tmp_path / name) for name in ("run", "model", "scores.csv"))
    environment = dict(
        os.environ, PYTHONPATH=str(Path(__file__).parents[3]), JAX_NUM_CPU_DEVICES="8"
    )
    printed = []
    for words in (
        ["train", str(store), *batches, *sizes, *dealt, "--out", run],
        ["evaluate", run, str(store), "--split", "test"],
        ["export", run, model],
        ["score", model, str(store), "--out", scores],
    ):
        main = "import sys; from experiments import cli; sys.exit(cli.main())"
        done = subprocess.run(
            [sys.executable, "-c", main, *words], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout)
    report = json.loads(Path(run, "report.json").read_text())
    assert report["audit"].startswith("passed: the compiled program and the draws keep")
    assert f"auc: {report['metrics']['test_auc']:.5f}"[:11] in printed[1]
    assert len(Path(scores).read_text().splitlines()) == 3_001
