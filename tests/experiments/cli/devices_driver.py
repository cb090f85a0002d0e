"""Trains, kills and resumes runs by the command, on fake devices; prints what it finds as JSON.

    python devices_driver.py STORE FOLDER undisturbed|killed|moved ... [OPTION ...]

Every command is carried out in a forked process, with eight devices that are one processor; the
imports are done once, before JAX starts any thread.
"""

import contextlib
import json
import os
import signal
import sys
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"

import flax
import jax
import numpy as np
import optax

from dpsgd.runs import checkpoint, job, ledger
from dpsgd.runs.terms import differing
from experiments import cli
from experiments.tasks.clicks import evaluate, model

IMPORTED = flax, optax, evaluate, model

TRAIN = [
    "sampler:poisson", "--batch-size", "200", "--epochs", "2", "--noise-multiplier", "1",
    "--embedding-dim", "2", "--hidden", "4", "--checkpoint-seconds", "0",
    "--insecure-seed", "1", "--no-audit", "--calibration", "none",
]  # fmt: skip


def command(out, *words, killed_at=None):
    """Carries out a command, which dies just before its checkpoint of a step."""
    child = os.fork()
    if not child:
        with open(out.parent / "output", "w") as file, contextlib.redirect_stdout(file):
            jax.config.update("jax_num_cpu_devices", 8)
            job.BLOCK_STEPS = 8
            save = checkpoint.Checkpoints.save

            def saved(folder, found, *others, **more):
                if int(found.state.step) == killed_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                save(folder, found, *others, **more)

            checkpoint.Checkpoints.save = saved
            status = cli.main([str(word) for word in words])
        os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == (0 if killed_at is None else -signal.SIGKILL), (words, status)


def equal(one, other):
    with np.load(one / "params.npz") as a, np.load(other / "params.npz") as b:
        return all(np.array_equal(a[name], b[name]) for name in a.files)


def main(store, folder, *words):
    names = [word for word in words if not word.startswith("-")]
    options = words[len(names) :]
    devices = [option for option in options if option.startswith("--shard")]
    found = {}
    for name in names:
        out = folder / name
        killed_at = None if name == "undisturbed" else 16
        command(out, "train", store, *TRAIN, *options, "--out", out, killed_at=killed_at)
        if name == "killed":
            command(out, "resume", out, *devices)
        if name == "moved":
            command(out, "resume", out, *devices, "--num-devices", "4")
        attempts = ledger.read(out / "ledger.jsonl").attempts
        found[name] = {
            "equal": equal(folder / names[0], out),
            "steps": [[g.steps.start, g.steps.stop] for g in attempts],
            "devices": [len(g.terms.fingerprint["devices"]) for g in attempts],
            "changed": differing([g.terms.fingerprint for g in attempts]),
            "auc": json.loads((out / "report.json").read_text())["metrics"]["test_auc"],
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]), *sys.argv[3:])
