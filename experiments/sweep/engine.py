"""A sweep from its file to its summary: whatever is not finished yet is carried out."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Callable, Hashable
from pathlib import Path

from dpsgd.files import write_atomically
from experiments.criteo.store import Store
from experiments.run_directory import RunDirectory
from experiments.stop import Stopped
from experiments.sweep import tables
from experiments.sweep.config import Sweep
from experiments.sweep.figure import draw
from experiments.sweep.plan import PlannedRun, plan
from experiments.sweep.summary import Summary, summarize
from experiments.sweep.workers import Task, carry_out, most_useful
from experiments.train import config_from, describe, resume

RUNS = "runs"
"""Folder of the run directories."""

ASKED = "sweep.toml"
"""The sweep as it was asked for."""


def run_sweep(
    sweep: Sweep,
    data: Path,
    out: Path,
    *,
    where: str = "sweep",
    workers: int | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> Summary:
    """Carries out every run of a sweep that is not finished, and returns what all of them show.

    A run is known by its folder, `out/runs/NAME`, and its configuration in there. Finished ones
    stay as they are, so a sweep that was stopped, killed or made larger goes on where it was.

    Args:
      sweep: What is asked for.
      data: Store of the examples.
      out: Folder of the sweep; made if need be.
      where: What the sweep is called in errors.
      workers: Runs at once; by default as many as are fastest.
      progress: Called with one line of text whenever there is something to tell.

    Raises:
      ValueError: before any run, for a sweep that cannot be run, or where a folder holds another
        run than the one of its name; afterwards, if runs failed.
      Stopped: if SIGTERM or SIGINT asked for it.
    """
    if workers is not None and workers < 1:
        raise ValueError(f"--workers must be at least 1, got {workers}")
    store = Store.open(data)
    runs = plan(sweep, data, out / RUNS, where)
    tasks = [
        Task(run.config, _program(run, store, where)) for run in runs if not _finished(run, store)
    ]
    (out / RUNS).mkdir(parents=True, exist_ok=True)
    progress(f"{len(runs) - len(tasks)} of {len(runs)} runs are finished")
    failed = []
    if tasks:
        try:
            for task, message in carry_out(tasks, workers or most_useful(), progress):
                if message.kind == "failed":
                    failed.append(f"{task.config.out.name}: {message.text}")
        except Stopped as stopped:
            raise Stopped(f"{stopped}: the same command goes on") from None
    if failed:
        raise ValueError(
            f"{len(failed)} of {len(runs)} runs failed; the same command tries them again. The "
            f"first: {failed[0]}"
        )
    progress("reading the reports")
    # `resume` of a finished run returns its report, once that fits the ledger.
    finished = [(run, resume(run.config.out)) for run in runs]
    environments = [RunDirectory.open(run.config.out).read_json("environment.json") for run in runs]
    return summarize(sweep, data, finished, environments)


def write(summary: Summary, out: Path, asked: bytes) -> list[Path]:
    """Writes a summary into the folder of its sweep, for programs and people; returns the files.

    Args:
      summary: What the runs show.
      out: Folder of the sweep.
      asked: The sweep's own file, kept beside what came of it.
    """
    figure = io.BytesIO()
    draw(summary).savefig(figure, format="png", dpi=150)
    contents = {
        ASKED: asked,
        "summary.json": json.dumps(summary.record(), indent=2, allow_nan=False).encode() + b"\n",
        "summary.md": tables.markdown(summary).encode(),
        "figure.png": figure.getvalue(),
    }
    for name, content in contents.items():
        write_atomically(out / name, lambda file, content=content: file.write(content))  # type: ignore[misc]
    return [out / name for name in contents]


def _program(run: PlannedRun, store: Store, where: str) -> Hashable:
    """Returns what decides the shapes of a run's compiled program.

    Raises:
      ValueError: if the sampler does not fit the data.
    """
    try:
        sampler = run.config.sampler.build(_num_examples(store), run.config.target_delta)
    except ValueError as error:
        raise ValueError(f"{where}, {run.cell.name}: {error}") from None
    return sampler.max_batch_size, sampler.accumulates, run.config.non_private


def _finished(run: PlannedRun, store: Store) -> bool:
    """Returns whether a run came to its end.

    Raises:
      ValueError: if its folder holds something else.
    """
    path = run.config.out
    if not path.exists():
        return False
    directory = RunDirectory.open(path, finished=False)
    record = directory.read_json("config.json")
    asked = describe(run.config, store)
    found = config_from(record, out=path, data=None)
    wanted = dataclasses.replace(run.config, data=Path(asked["data"]))
    names = [field.name for field in dataclasses.fields(wanted)]
    differing = [name for name in names if getattr(found, name) != getattr(wanted, name)]
    differing += [name for name in ("schema", "hash_seed") if record.get(name) != asked[name]]
    if directory.finished:
        num_examples = directory.read_json("report.json").get("num_examples")
        if num_examples != _num_examples(store):
            differing.append("number of examples")
    if differing:
        raise ValueError(
            f"{path} holds another run than this sweep's, with another {', '.join(differing)}: "
            "name another --out, or remove it"
        )
    return directory.finished


def _num_examples(store: Store) -> int:
    begin, end = store.splits["train"]
    return end - begin
