"""Runs on clicks of two processes, each with a folder of its own: the shards of its shard.

    python hosts_driver.py STORE FOLDER

Ends in status 1 at the first thing that does not hold.
"""

import os
import shutil
import signal
import sys
from pathlib import Path

import process_driver
from process_driver import Run, check_ended, go_on, outcome, slowly

from dpsgd.core.queries import FullSums
from dpsgd.engine import calibration as calibrations
from dpsgd.runs.fingerprint import code_digest, task_code_digest
from experiments.tasks.clicks.store import Store
from experiments.tasks.clicks.task import Clicks
from samplers.settings import SETTINGS

SAMPLER = SETTINGS["balls-and-bins"](batch_size=16, epochs=3, num_shards=2)


def clicks(folder):
    return Clicks(folder, embedding_dim=2, max_buckets=8, hidden=(4,))


def host(whole, folder, shards):
    """A copy of a store with the files of some of its shards alone."""
    folder.mkdir()
    shutil.copy(whole.path / "manifest.json", folder)
    for shard in (whole.shards[number] for number in shards):
        for file in shard.files.values():
            shutil.copy(whole.path / file["name"], folder)
    return {"task": clicks(folder)}


def main(whole, folder):
    # 160 rows are trained on, 80 a shard, in four shards; those of the fifth validate and test.
    own = {
        0: host(whole, folder / "host-0", (0, 1, 4)),
        1: host(whole, folder / "host-1", (2, 3)),
    }
    task_code_digest(clicks(whole.path))  # as they are now: whoever edits a file changes no run
    how = {"sampler": SAMPLER, "calibration": "none"}
    expected = outcome(go_on(folder / "all", 2, all={**how, "task": clicks(whole.path)}))
    found = outcome(go_on(folder / "own", 2, of=own, all=how))
    assert found == expected  # hosts with the shards of their shards make what hosts with all make

    run = Run(folder / "killed", 2, of=own, all={**how, "before": slowly})
    run.await_steps(8)
    os.kill(run.trainer(1), signal.SIGKILL)
    check_ended(run, but=(1,))
    go_on(run.out, 2, of=own)
    assert outcome(run.out) == expected  # and go on in the same bits when one was killed

    swapped = {0: {"task": clicks(whole.path)}, 1: own[0]}
    run = Run(folder / "swapped", 2, of=swapped, all=how)
    assert run.end(60) == [2, 2]  # a host that lacks a shard of its shard ends both
    lacking = run.outputs()[1]
    assert "00002" in lacking
    assert "trains on rows 80 to 159" in lacking
    assert not run.out.exists()

    calibrations.calibration_sums = lambda kind, num_examples, **about: FullSums(3, 4.0)
    run = Run(folder / "calibrated", 2, of=own, all={"sampler": SAMPLER})
    assert run.end(60) == [2, 2]  # sums over all rows are refused where hosts lack some
    assert "--calibration none" in run.outputs()[0]


if __name__ == "__main__":
    process_driver.job.BLOCK_STEPS = 4
    code_digest()
    main(Store.open(sys.argv[1]), Path(sys.argv[2]))
