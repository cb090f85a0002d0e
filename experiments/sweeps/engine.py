"""Engine of a sweep, from its file to its summary: it carries out all unfinished runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpsgd.core.mechanism import Mechanism
from dpsgd.files import lock, write_atomically
from dpsgd.runs.directory import Configuration, RunDirectory
from dpsgd.runs.initial import EarlierModel
from dpsgd.runs.mechanism import build_sampler
from dpsgd.runs.plan import check_data
from dpsgd.runs.recommendation import RecommendationRequest
from dpsgd.runs.result import FinishedRun
from dpsgd.runs.spec import RunSpec
from dpsgd.runs.stop import Stopped
from dpsgd.runs.task import (
    Task,
    data_digest,
    made_of,
    rows_of,
    settled,
    task_record,
)
from dpsgd.runs.terms import Selection
from dpsgd.selection.candidates import Candidates, spec_of_trial
from experiments.cli.tasks import find_task, needs_data
from experiments.figures.drawing import content
from experiments.results.draw import draw
from experiments.results.table import RUNS, Table
from experiments.sweeps.config import OfTask, PlannedRun, Sweep, plan
from experiments.sweeps.summary import TABLE, Summary, remarks_on
from experiments.sweeps.workers import carry_out, metric_names, most_useful, time_runs
from samplers import Population

ASKED = "sweep.toml"
"""Copy of the sweep's file."""


def run_sweep(
    sweep: Sweep,
    data: Path | None,
    out: Path,
    *,
    where: str = "sweep",
    workers: int | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> Summary:
    """Carries out a sweep's unfinished runs; returns its summary.

    A run is identified by its folder, `out/runs/NAME`, its configuration, and the digest of its
    data. Finished runs stay, so that a stopped, killed or enlarged sweep resumes; changes meanwhile
    (code, versions, machine) are reported.

    Args:
      sweep: Sweep to run.
      data: Path of the task's data; None for a task without.
      out: Folder of the sweep.
      where: Path of the file, for error messages.
      workers: Number of runs at once; by default `most_useful`.
      progress: Function of one line of text.

    Raises:
      ValueError: Before any run, for a sweep that cannot run, or a folder with another run;
        afterwards, if runs failed.
      Stopped: If SIGTERM or SIGINT asked for it.
    """
    progress("checking which runs are finished")
    planned = _Asked.check(sweep, data, out, where, workers)
    todo = [(run, program) for run, program in planned.programs if not _finished(run, planned)]
    if todo:
        _check_metrics(sweep, planned.task, where)
    (out / RUNS).mkdir(parents=True, exist_ok=True)
    count, failed = len(planned.programs), []
    progress(f"{count - len(todo)} of {count} runs are finished")
    if todo:
        try:
            with _alone(out):
                workers = workers or most_useful()
                for run, message in carry_out(planned.task, todo, workers, progress):
                    if message.kind == "failed":
                        failed.append(f"{run.out.name}: {message.text}")
        except Stopped as stopped:
            raise Stopped(f"{stopped}: the same command resumes") from None
    if failed:
        raise ValueError(
            f"{len(failed)} of {count} runs failed; the same command tries them again. The first: "
            f"{failed[0]}"
        )
    progress("reading the reports")
    runs = [run for run, _ in planned.programs]
    summary = _summary(sweep, runs, planned.task)
    for run in runs:  # in case one died just before it did
        RunDirectory(run.out).forget()
    return summary


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Locks a sweep's folder; raises ValueError if another process trains its runs."""
    folder = os.open(out / RUNS, os.O_RDONLY)
    try:
        lock(folder, out)
        yield
    except BlockingIOError:
        raise ValueError(f"another process is training the runs of {out}; wait for it") from None
    finally:
        os.close(folder)


@dataclass(frozen=True)
class Forecast:
    """Predicted time of a sweep, or of a panel of it.

    Attributes:
      title: Title of the panel.
      runs: Number of runs.
      steps: Number of steps of all runs together.
      seconds: Seconds of these steps on this device, one run after another.
      longest: Seconds of the longest run.
    """

    title: str
    runs: int
    steps: int
    seconds: float
    longest: float

    def hours(self, devices: int) -> float:
        """Returns hours on several devices, one run each.

        >>> Forecast("panel", runs=4, steps=100, seconds=7200.0, longest=1800.0).hours(2)
        1.0
        """
        return max(self.seconds / devices, self.longest) / 3600


def forecast(
    sweep: Sweep,
    data: Path | None,
    *,
    where: str = "sweep",
    workers: int | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> tuple[list[Forecast], str]:
    """Returns predicted times of a sweep, and the device.

    A few steps of each program are timed on generated rows, on the share of a worker. Compiling,
    audits and evaluations take further time.

    Args:
      sweep: Sweep to time.
      data: Path of the task's data; None for a task without.
      where: Path of the file, for error messages.
      workers: Number of runs at once; by default `most_useful`.
      progress: Function of one line of text.

    Raises:
      ValueError: For a sweep that cannot run.
    """
    planned = _Asked.check(sweep, data, Path(), where, workers)
    _check_metrics(sweep, planned.task, where)
    specs = {program: run.spec for run, program in planned.programs}
    progress(f"timing steps of {len(specs)} programs on generated rows")
    step_seconds, device = _step_seconds(planned.task, specs, workers or most_useful())
    panels = [
        (grids[0].title or f"panel {number}", {cell for grid in grids for cell in grid.cells()})
        for number, grids in enumerate(sweep.panels, 1)
    ]
    panels.append(("all panels together", {run.cell for run, _ in planned.programs}))
    forecasts = []
    for title, cells in panels:
        runs = [(run, program) for run, program in planned.programs if run.cell in cells]
        steps = [build_sampler(run.spec, planned.population).num_steps for run, _ in runs]
        seconds = [n * step_seconds[program] for n, (_, program) in zip(steps, runs, strict=True)]
        forecasts.append(Forecast(title, len(runs), sum(steps), sum(seconds), max(seconds)))
    return forecasts, device


def _step_seconds(
    task: Mapping[str, Any], specs: Mapping[Hashable, RunSpec], workers: int
) -> tuple[dict[Hashable, float], str]:
    """Returns the measured seconds of a step by program, and the device."""
    device, *timed = time_runs(task, list(specs.values()), workers)
    return dict(zip(specs, timed, strict=True)), device


def forecast_selection(candidates: Candidates, selection: Selection) -> tuple[list[Forecast], str]:
    """Returns the predicted time of each candidate's trial.

    Args:
      candidates: Candidates of a private selection.
      selection: Selection that they plan.

    Returns:
      A forecast of one trial per candidate, and the device that was timed.
    """
    trials = [terms.mechanism.sampler.num_steps for terms in selection.candidates]
    specs = [spec_of_trial(selection, number) for number in range(len(trials))]
    programs = [_program(spec, candidates.rows[1], "candidates") for spec in specs]
    examples = dict(zip(programs, specs, strict=True))
    seconds, device = _step_seconds(candidates.record, examples, 1)
    times = [n * seconds[program] for n, program in zip(trials, programs, strict=True)]
    return [Forecast("a trial", 1, n, t, t) for n, t in zip(trials, times, strict=True)], device


def task_of(sweep: OfTask, data: Path | None, where: str) -> Task:
    """Returns the task that a sweep trains.

    Args:
      sweep: File that names the task.
      data: Path of its data; None for a task without.
      where: Path of the file, for error messages.

    Raises:
      ValueError: If the task is unknown, or its data are missing or unexpected.
    """
    name, task = sweep.task_name, find_task(sweep.task_name)
    settings = {**sweep.settings, **({} if data is None else {"data": str(data.resolve())})}
    if isinstance(task, type):
        if data is None and needs_data(task):
            raise ValueError(f"{where}: the task {name} needs data; give their path after the file")
        return made_of(task, settings, name, f"{where}, task")
    if settings:
        raise ValueError(f"{where}: {name} is a task object; leave out {' and '.join(settings)}")
    return task


def is_sweep(folder: Path) -> bool:
    """Returns True if `folder` holds a sweep."""
    return (folder / RUNS).is_dir()


def read(folder: Path) -> Summary:
    """Reads the summary of a finished sweep.

    Raises:
      FileNotFoundError: If the sweep, or a run of it, is not finished.
      ValueError: If a file is damaged, or a folder holds another run.
    """
    file = folder / ASKED
    if not file.exists():
        raise FileNotFoundError(f"{folder} is an unfinished sweep; repeat its command to resume it")
    sweep = Sweep.parse(file.read_bytes(), str(file))
    return _summary(sweep, plan(sweep, folder / RUNS, str(file)))


@dataclass(frozen=True)
class _Asked:
    """Sweep whose runs can all begin."""

    programs: list[tuple[PlannedRun, Hashable]]
    """Runs, each with the key of its compiled program."""
    task: dict[str, Any]
    """Record of the task."""
    population: Population
    digest: str
    """Digest of the data."""

    @classmethod
    def check(
        cls, sweep: Sweep, data: Path | None, out: Path, where: str, workers: int | None
    ) -> _Asked:
        """Checks every run of a sweep against the data."""
        if workers is not None and workers < 1:
            raise ValueError(f"--workers must be at least 1, got {workers}")
        runs = plan(sweep, out / RUNS, where)
        task = task_of(sweep, data, where)
        columns, population = rows_of(task)
        about = RecommendationRequest(population.num_examples, 1e-5, noise_multiplier=1.0)
        earlier = EarlierModel.read(runs[0].spec.init_from)
        recorded = earlier.task if earlier else {}
        task, _ = settled(task, about, sweep.task_name, recorded)  # one model for all points
        programs = [(run, _program(run.spec, population, f"{where}, {run.cell}")) for run in runs]
        check_data(task)
        digest = data_digest(task, columns, population)
        return cls(programs, task_record(task, sweep.task_name), population, digest)


def _check_metrics(sweep: Sweep, task: Mapping[str, Any], where: str) -> None:
    """Raises ValueError if the task lacks a metric that the sweep shows or tunes by."""
    tuned = [name for grid in sweep.grid for name in grid.tune]
    description = task["description"]
    if description.get("headline") and not (tuned or sweep.headline):
        return
    metrics = metric_names(task)
    stated = {name: description.get(name) for name in ("headline", "better")}
    try:
        first = Table.of_rows([stated], metrics).headline(sweep.headline, sweep.better)
    except ValueError as error:
        raise ValueError(f"{where}, headline: {error}") from None
    if tuned and first.better is None:
        raise ValueError(f'{where}: better is missing: "higher" or "lower" values of {first.name}?')
    if tuned and first.on_split("validation", metrics) is None:
        raise ValueError(
            f"{where}, tune: {tuned[0]} is chosen on validation rows, but the task "
            f"{sweep.task_name} has no validation_{first.name.partition('_')[2] or first.name}; it "
            f"measures {', '.join(metrics)}: leave tune out, or give the data validation rows"
        )


def _summary(
    sweep: Sweep, runs: Sequence[PlannedRun], task: Mapping[str, Any] | None = None
) -> Summary:
    """Returns the summary of a sweep's finished runs, checked against its plan."""
    finished = {run.out.name: FinishedRun.read(run.out) for run in runs}
    folder, data = runs[0].out.parent, set()
    task = task or finished[runs[0].out.name].task
    if task["name"] != sweep.task_name:
        raise ValueError(f"{folder} holds runs of the task {task['name']}")
    for run in runs:
        result = finished[run.out.name]
        _refuse_another(run, task, result.config)
        data.add(result.data)
    if len(data) > 1 or None in data:
        raise ValueError(
            f"{folder} holds runs on different or unknown data; remove runs on other data"
        )
    places: list[dict[str, Any]] = []
    for result in finished.values():
        places += [place for place in result.environments if place not in places]
    cells = {run.out.name: run.cell for run in runs}
    remarks = tuple(remarks_on([*finished.values()]))
    return Summary(sweep, task, Table.collect(finished), cells, tuple(places), remarks)


def write(summary: Summary, out: Path, asked: bytes) -> list[Path]:
    """Writes a summary into its sweep's folder; returns the files.

    Args:
      summary: Summary of the sweep.
      out: Folder of the sweep.
      asked: Content of the sweep's file.
    """
    contents = {
        ASKED: asked,
        "summary.md": summary.markdown().encode(),
        "figure.png": content(draw(summary.views, summary.title, columns=3), "png"),
    }
    for name, text in contents.items():
        write_atomically(out / name, lambda file, text=text: file.write(text))  # type: ignore[misc]
    summary.table.write(out / TABLE)
    return [out / name for name in (*contents, TABLE)]


def _program(spec: RunSpec, population: Population, where: str) -> Hashable:
    """Returns a key of a run's compiled program: the settings that decide its shapes."""
    try:
        sampler = build_sampler(spec, population)
        sampler.protected_unit(population)
        if spec.private and spec.l2_clip_norm is not None:
            Mechanism(sampler, 1.0, spec.l2_clip_norm)  # refuses scales beyond float32
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    size, several = sampler.padded_batch_size, sampler.accumulates
    kinds = type(spec.tables), spec.options()["optimizer"], type(spec.average)
    options = spec.noise, spec.clipping, spec.train, spec.compute
    return size, several, spec.private, kinds, options


def _finished(run: PlannedRun, asked: _Asked) -> bool:
    """Returns True if a run is finished; raises ValueError if its folder holds another run."""
    if not run.out.exists():
        return False
    directory = RunDirectory.open(run.out, finished=False)
    config = directory.configuration()
    names = [] if directory.data() == asked.digest else ["data"]
    if attempts := directory.history().attempts:
        earlier = EarlierModel.read(run.spec.init_from)
        same_start = attempts[-1].terms.plan.initial == (earlier.initial if earlier else None)
        names += [] if same_start else ["init_from"]
    _refuse_another(run, asked.task, config, names)
    return directory.finished


def _refuse_another(
    run: PlannedRun,
    task: Mapping[str, Any],
    config: Configuration,
    others: Sequence[str] = (),
) -> None:
    """Raises ValueError if a folder holds another run than the planned one."""
    recorded, names = config.task, config.differing(run.spec)
    if not names:
        for section in ("settings", "description"):
            ours, theirs = dict(task[section]), recorded[section]
            keys = {**ours, **theirs}.keys() - {"data"}  # their path may differ
            names += sorted(key for key in keys if ours.get(key) != theirs.get(key))
    names += ["task"] if task["name"] != recorded["name"] else []
    if names := [*names, *others]:
        raise ValueError(
            f"{run.out} holds another run than this sweep's, with another "
            f"{', '.join(names)}: name another --out, or remove it"
        )
