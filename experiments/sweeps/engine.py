"""A sweep from its file to its summary: whatever is not finished yet is carried out."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path

from dpsgd.runs.directory import RunDirectory
from dpsgd.runs.files import write_atomically
from dpsgd.runs.stop import Stopped
from experiments.cli.config import TrainConfig
from experiments.finished import FinishedRun, unlike
from experiments.recorded import config_from
from experiments.sweeps import tables
from experiments.sweeps.config import Sweep
from experiments.sweeps.figure import draw
from experiments.sweeps.plan import PlannedRun, plan
from experiments.sweeps.summary import Summary, summarize
from experiments.sweeps.workers import Task, carry_out, most_useful
from experiments.tasks.clicks.store import Store
from experiments.train import mechanism_for
from samplers import Population

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

    A run is known by its folder, `out/runs/NAME`, its configuration in there, and the digest of
    its store. Finished ones stay as they are, so a sweep that was stopped, killed or made larger
    goes on where it was; what was changed meanwhile but the data (code, versions, machine) is said.

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
    progress("looking at what is finished")
    store = Store.open(data)
    runs = plan(sweep, data, out / RUNS, where)
    programs = [_program(run, store, where) for run in runs]
    tasks = [
        Task(run.config, program)
        for run, program in zip(runs, programs, strict=True)
        if not _finished(run, store)
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
    summary = _summary(sweep, runs)
    for run in runs:  # in case one died just before it did
        RunDirectory(run.config.out).forget()
    return summary


def is_sweep(folder: Path) -> bool:
    """Returns whether a sweep was begun in `folder`."""
    return (folder / RUNS).is_dir()


def read(folder: Path) -> Summary:
    """Returns what the sweep in `folder` shows: by its file and its runs, as they are now.

    Raises:
      FileNotFoundError: if the sweep, or a run of it, is not finished.
      ValueError: if a file is damaged, or a run is not the one of its name.
    """
    file = folder / ASKED
    if not file.exists():
        raise FileNotFoundError(
            f"{folder} is a sweep that is not finished: the command that began it goes on with it"
        )
    sweep = Sweep.parse(file.read_bytes(), str(file))
    return _summary(sweep, plan(sweep, Path(), folder / RUNS, str(file)))


def _summary(sweep: Sweep, runs: Sequence[PlannedRun]) -> Summary:
    """Returns what the finished runs of a sweep show, once they are what they should be."""
    finished = [(run, FinishedRun.read(run.config.out)) for run in runs]
    stores = set()
    for run, found in finished:
        _refuse_another(run, found.config)
        stores.update(found.stores)
    if len(stores) > 1 or None in stores:
        raise ValueError(
            f"{runs[0].config.out.parent} holds runs on different stores, or runs that do not say "
            "on which: they show nothing together"
        )
    return summarize(
        sweep,
        finished[0][1].config.data,
        [(run, found.record) for run, found in finished],
        [place for _, found in finished for place in found.environments],
        _remarks([found for _, found in finished]),
    )


def _remarks(finished: Sequence[FinishedRun]) -> list[str]:
    """Returns in what runs differ that should differ in the axes of their grids alone."""
    changed = unlike(finished)
    remarks = [f"the runs are not alike in: {', '.join(changed)}"] if changed else []
    for found in finished:
        if len(found.history.generations) > 1:
            notes = "; ".join(found.record["notes"])
            remarks.append(f"{found.path.name} went on after a change: {notes}")
    return remarks


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
      ValueError: if the sampler does not fit the data, or the noise cannot be had.
    """
    config, num_examples = run.config, store.rows("train")
    try:
        if config.target_epsilon is None:
            sampler = mechanism_for(config, num_examples).sampler
        else:  # whose noise the run itself calibrates: that takes seconds
            sampler = config.sampler.build(Population(num_examples), config.target_delta)
    except ValueError as error:
        raise ValueError(f"{where}, {run.cell.name}: {error}") from None
    return sampler.padded_batch_size, sampler.accumulates, config.non_private


def _finished(run: PlannedRun, store: Store) -> bool:
    """Returns whether a run came to its end.

    Raises:
      ValueError: if its folder holds something else, or it was trained on another store.
    """
    path = run.config.out
    if not path.exists():
        return False
    directory = RunDirectory.open(path, finished=False)
    found = config_from(directory.read_json("config.json"), out=path, data=None)
    _refuse_another(run, found, same_store=set(directory.data()) == {store.digest})
    return directory.finished


def _refuse_another(run: PlannedRun, found: TrainConfig, *, same_store: bool = True) -> None:
    """Raises ValueError if another run than the planned one was `found` in its folder."""
    wanted = dataclasses.replace(run.config, data=found.data)  # wherever the store lies now
    names = [field.name for field in dataclasses.fields(wanted)]
    differing = [name for name in names if getattr(found, name) != getattr(wanted, name)]
    differing += [] if same_store else ["store"]
    if differing:
        raise ValueError(
            f"{run.config.out} holds another run than this sweep's, with another "
            f"{', '.join(differing)}: name another --out, or remove it"
        )
