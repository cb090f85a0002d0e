"""Parameters of short runs under insecure seeds: equal bits on one machine, equal norms on all."""

import contextlib
import hashlib
import io
import tempfile
from pathlib import Path

import numpy as np

from experiments import cli
from gate.record import read, write

TOLERANCE = 1e-6
"""Relative difference of a leaf's norm that other processors may cause."""

RUNS = {
    "dense": "sampler:poisson --batch-size 256 --max-batch-size 400 --model small",
    "lazy": "sampler:balls-and-bins --batch-size 256 --max-batch-size 400 --model small "
    "--tables lazy --tables-learning-rate 0.5 --tables-momentum 0.9",
    "banded": "sampler:balls-and-bins --batch-size 256 --overflow accumulate --model linear "
    "--optimizer sgd --learning-rate 0.5 --bands 4",
    "per-layer": "sampler:shuffle --batch-size 256 --model small --clipping per-layer "
    "--average-tail 0.5",
    "frozen": "sampler:deterministic --batch-size 256 --model wide-and-deep --train hidden "
    "--clipping automatic --compute bfloat16",
}
COMMON = (
    "--epochs 2 --noise-multiplier 1 --l2-clip-norm 2 --insecure-seed 5 --no-audit "
    "--calibration none"
)


def parameters(name):
    """Returns leaf name -> [digest of the bits, norm] of a run."""
    with tempfile.TemporaryDirectory() as folder:
        rows, out = Path(folder) / "rows.csv", Path(folder) / "out"
        rows.write_text(table())
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            for words in (
                f"prepare csv {rows} {folder}/store --label y --categories city --numbers age "
                "--bounds age=0:99 --split 0.8 0.1 0.1",
                f"train {folder}/store {RUNS[name]} {COMMON} --out {out}",
            ):
                assert cli.main(words.split()) == 0, (name, words)
        with np.load(out / "params.npz") as arrays:
            return {
                leaf: [
                    hashlib.sha256(array.tobytes()).hexdigest()[:16],
                    float(np.linalg.norm(array.astype(np.float64))),
                ]
                for leaf, array in sorted(arrays.items())
            }


def table():
    """Returns 2,000 rows of a table as text, by arithmetic alone."""
    lines = ["city,age,y"]
    for i in range(2000):
        age = i * 37 % 99
        lines.append(f"c{i * i % 71},{age},{int(i * 7919 % 100 < age)}")
    return "\n".join(lines) + "\n"


def measure():
    """Records the parameters of all runs."""
    write("runs", {name: parameters(name) for name in RUNS})


def check(names=tuple(RUNS)):
    """Returns a line for each leaf whose norm differs, and for missing or further leaves."""
    lost = []
    for name in names:
        frozen, now = read("runs")[name], parameters(name)
        for leaf in sorted({**frozen, **now}):
            before, after = frozen.get(leaf), now.get(leaf)
            if before is None or after is None:
                lost.append(f"runs: {name}: {leaf} is {'gone' if after is None else 'new'}")
            elif abs(after[1] - before[1]) > TOLERANCE * before[1]:
                lost.append(f"runs: {name}: {leaf} has norm {after[1]!r}, frozen {before[1]!r}")
            elif after != before:
                print(f"other bits, equal to {TOLERANCE}: {name}: {leaf}")
    return lost
