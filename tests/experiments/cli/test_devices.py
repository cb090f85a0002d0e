"""Where a run computes: all devices that there are, by the command; what cannot be is a line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dpsgd.runs import ledger
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


KILLED = """
import os
from dpsgd.runs import checkpoint, job
from experiments import cli
job.BLOCK_STEPS, save = 8, checkpoint.Checkpoints.save
def saved(folder, found, *others, **more):
    if int(found.state.step) == int(os.environ.get("KILLED_AT", -1)):
        os._exit(9)
    save(folder, found, *others, **more)
checkpoint.Checkpoints.save = saved
raise SystemExit(cli.main())
"""


@pytest.mark.long
@pytest.mark.crash
@pytest.mark.parametrize("options", [[], ["--shard-rows-from", "100KB"]], ids=["whole", "sharded"])
def test_a_run_that_dies_on_eight_devices_resumes_there_or_on_four(options, tmp_path):
    synthetic.write_store(store := tmp_path / "store", 3_000, seed=1)

    def command(*words, killed_at=-1):
        environment = {"JAX_NUM_CPU_DEVICES": "8", "KILLED_AT": str(killed_at)}
        done = subprocess.run(
            [sys.executable, "-c", KILLED, *map(str, words), *options],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), **environment},
            capture_output=True,
            text=True,
        )
        assert done.returncode == (0 if killed_at < 0 else 9), done.stderr

    whole, there, moved = (tmp_path / name for name in ("whole", "there", "moved"))
    sizes = [
        "--max-buckets",
        "4096",
        "--embedding-dim",
        "2",
        "--hidden",
        "4",
        "--batch-size",
        "200",
    ]
    how = ["--epochs", "2", "--noise-multiplier", "1", "--checkpoint-seconds", "0", "--no-audit"]
    for out, killed_at in ((whole, -1), (there, 16), (moved, 16)):
        train = ["train", store, "sampler:poisson", *sizes, *how, "--insecure-seed", "1"]
        command(*train, "--calibration", "none", "--out", out, killed_at=killed_at)
    command("resume", there)
    command("resume", moved, "--num-devices", "4")
    with np.load(whole / "params.npz") as one, np.load(there / "params.npz") as other:
        assert all(np.array_equal(one[name], other[name]) for name in one.files)
    attempts = ledger.read(moved / "ledger.jsonl").attempts
    assert [len(each.terms.fingerprint["devices"]) for each in attempts] == [8, 4]
    steps = [(each.steps.start, each.steps.stop) for each in attempts]
    assert steps == [(0, 16), (8, 24)], "what was declared already counts once more"
