"""One model by every library on the same rows, and the guarantee that each program earns.

The model is logistic regression on the encoded columns of a table: numbers scaled by their public
bounds, a flag for each value of a category, values being taken as public. All take the settings of
`SETTINGS`, none of which was chosen by these rows; DP-EBM and diffprivlib have their own. Programs
are in `peers/`; each runs in an environment that is made for it in the folder `--environments`.
What its sampler drew is priced by `accounting`, beside the epsilon that it prints.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from accounting import BallsAndBinsProfile, PoissonProfile, ShuffleProfile
from experiments.benchmarks.case import Estimate, LeftOut, Row, at, cases
from experiments.benchmarks.evidence_data import DATA, Table
from experiments.benchmarks.models import kept
from experiments.tasks.clicks.metrics import auc
from experiments.tasks.splits import random_masks

PROGRAMS = Path(__file__).parent / "peers"
SETTINGS = {"batch_size": 512, "epochs": 20, "learning_rate": 0.02, "l2_clip_norm": 1.0}


class Library(NamedTuple):
    """A program in `peers/`, and what pip installs for it: nothing for ours."""

    program: str
    requirements: tuple[str, ...] = ()
    note: str = ""


PEERS: Mapping[str, Library] = {
    "ours": Library("with_dpsgd"),
    "Opacus": Library("with_opacus", ("opacus==1.6.0", "torch==2.13.0")),
    "jax_privacy": Library("with_jax_privacy", ("jax-privacy==2.0.0",)),
    "TensorFlow Privacy": Library(
        "with_tensorflow_privacy", ("tensorflow-privacy==0.9.0", "tensorflow==2.15.1")
    ),
    "DP-EBM": Library("with_interpret", ("interpret-core==0.7.8",)),
    "diffprivlib": Library(
        "with_diffprivlib", ("diffprivlib==0.6.6", "scikit-learn==1.5.2"), ", delta 0"
    ),
}


def interpreter(library: Library, folder: Path) -> str:
    """Returns the Python of a library's environment, which is made if it is not there.

    Raises:
      LeftOut: if its packages cannot be installed.
    """
    if not library.requirements:
        return sys.executable
    home = folder / library.requirements[0]
    python, whole = home / "bin" / "python", home / "installed"
    wanted = "\n".join(library.requirements)
    if not whole.exists() or whole.read_text() != wanted:
        install = [str(python), "-m", "pip", "install", "--quiet", *library.requirements]
        for command in ([sys.executable, "-m", "venv", "--clear", str(home)], install):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                last = (done.stderr.strip() or "no message").splitlines()[-1]
                raise LeftOut(f"{' '.join(library.requirements)} is not installed: {last}")
        whole.write_text(wanted)
    return str(python)


def encoded(path: Path, table: Table) -> dict[str, np.ndarray]:
    """Returns the training rows and then the test rows of a table, raw and encoded.

    They are the rows that train and test our models: x, y of the training rows, test_x, test_y, and
    of both, in this order, numbers, categories; bounds of the numbers.
    """
    found = table.rows(path)
    masks = random_masks(np.arange(len(found), dtype=np.uint64))
    rows = [found[i] for split in ("train", "test") for i in np.flatnonzero(masks[split])]
    train = int(masks["train"].sum())
    numbers = np.array([[float(row[name]) for name in table.bounds] for row in rows])
    categories = np.array([[row[name] for name in table.categories] for row in rows])
    labels = np.array([row[table.label] == table.positive for row in rows], np.float32)
    bounds = np.array(list(table.bounds.values()), float)
    low, high = bounds.T
    scaled = np.clip((numbers - low) / (high - low), 0, 1)
    flags = [column[:, None] == np.unique(column) for column in categories.T]
    x = np.concatenate([scaled, *flags], axis=1).astype(np.float32)
    return {
        "x": x[:train], "y": labels[:train], "test_x": x[train:], "test_y": labels[train:],
        "numbers": numbers, "categories": categories, "bounds": bounds,
    }  # fmt: skip


def profile(told: Mapping[str, Any]) -> Any:
    """Returns the privacy profile of what a program's sampler drew; None if it drew no batches."""
    if (kind := told.get("sampler")) is None:
        return None
    sigma = told["noise_multiplier"]
    if kind == "poisson":
        return PoissonProfile(sigma, told["sampling_prob"], told["steps"])
    profiles = {"balls-and-bins": BallsAndBinsProfile, "shuffle": ShuffleProfile}
    return profiles[kind](sigma, told["steps_per_epoch"], told["epochs"])


def lines_of(program: str) -> int:
    """Returns the lines of a program that its user writes, imports too, without its docstring."""
    lines = (PROGRAMS / f"{program}.py").read_text().splitlines()
    return sum(bool(line.strip()) and not line.startswith(('"""', "#")) for line in lines)


def ran(python: str, program: str, rows: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a program gave on the rows of a file.

    Raises:
      RuntimeError: if it ends without an answer.
    """
    command = [python, "-W", "ignore", "run.py", program, str(rows), json.dumps(settings)]
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if python == sys.executable:
        alone["PYTHONPATH"] = str(PROGRAMS.parents[2])
    done = subprocess.run(command, cwd=PROGRAMS, env=alone, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip() or "no message").splitlines()[-1]
        raise RuntimeError(f"{program} ended with status {done.returncode}: {last}")
    return json.loads(done.stdout.splitlines()[-1])


def peers(
    data: str,
    peer: str,
    *,
    files: str | None = None,
    environments: str | None = None,
    peer_epsilons: tuple[float, ...] = (3.0, 1.0),
    seeds: int = 3,
    written: str | None = None,
) -> Iterator[Row]:
    """Measures what a library learns of a table, what it takes, and what its program earns."""
    assert files is not None
    assert environments is not None
    table, path, library = DATA[data].prepare, DATA[data].path(Path(files)), PEERS[peer]
    assert isinstance(table, Table), data
    of = library.requirements[0].replace("==", " ") if library.requirements else "this project"
    try:
        python = interpreter(library, Path(environments).absolute())
    except LeftOut as why:
        yield Row(f"AUC, test rows, {data}, {peer}: {why}", None)
        return
    work = encoded(path, table)
    delta = 1 / len(work["y"])
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.npz"
        np.savez(rows, **work)  # type: ignore[arg-type]  # arrays by name

        def measured(epsilon: float, seed: int) -> dict[str, Any]:
            given = SETTINGS | {"epsilon": epsilon, "delta": delta, "seed": seed}
            found = ran(python, library.program, rows, given)
            scores = np.asarray(found.pop("scores"))
            return found | {"auc": float(auc(scores, work["test_y"].astype(int)))}

        for epsilon in peer_epsilons:
            place = f"{data}, epsilon {epsilon:g}, same work: {peer}{library.note} ({of})"
            row, found = at(place), []
            for seed in range(seeds):
                label = f"{place}, seed {seed}.json"
                file = None if written is None else Path(written) / "peers" / label
                found.append(kept(file, partial(measured, epsilon, seed)))
            yield row("AUC, test rows", Estimate.mean([run["auc"] for run in found]))
            yield row("CPU time of a run", Estimate.mean([x["cpu_seconds"] for x in found]), "s")
            yield row("peak memory", max(run["peak_bytes"] for run in found) / 1e9, "GB")
            yield from earned(row, found[0], delta)
    yield at(f"{data}, {peer}")("lines of its program", lines_of(library.program))


def earned(row: Any, told: Mapping[str, Any], delta: float) -> Iterator[Row]:
    """Yields the epsilon that a program prints, and the certified one of what it drew."""
    yield row("epsilon, printed", told["printed"], "epsilon")
    if "printed_once_an_epoch" in told:
        yield row("epsilon, printed without sampling", told["printed_once_an_epoch"], "epsilon")
    if (priced := profile(told)) is None:
        return
    bound = priced.epsilon(delta)
    yield row(f"epsilon of its {told['sampler']} batches, at least", bound.lower, "epsilon")
    yield row(f"epsilon of its {told['sampler']} batches, at most", bound.upper, "epsilon")


CASES = cases(
    peers,
    over={"data": ["adult", "bank"], "peer": list(PEERS)},
    quick={"seeds": 1, "peer_epsilons": (3.0,)},
    all_quick=True,
    needs=("--files", "--environments"),
    seconds=120,
)
