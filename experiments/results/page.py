"""Page about finished runs and sweeps: Markdown and its figures.

It reads only covered or published results of the runs, and labelled rows given for models of
clicks: never the diagnostics of training.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dpsgd.models.model import read_model
from dpsgd.runs import report
from dpsgd.runs.result import FinishedRun, environment_mismatch
from experiments.cli.command_line import train_command
from experiments.cli.console import counted
from experiments.figures.drawing import content
from experiments.results import clicks, listings
from experiments.results.draw import curves, draw
from experiments.results.points import Better
from experiments.results.render import Page, render
from experiments.results.table import Table, finished_runs
from experiments.results.views import CERTIFIED, View
from experiments.sweeps import engine
from experiments.sweeps.summary import Summary
from experiments.tasks import TASKS
from experiments.tasks.clicks.task import ClickModels

Runs = Mapping[str, FinishedRun]

MEANING = (
    "An interval contains the true epsilon of the mechanism that ran, with the sampler that drew "
    "its batches; its upper end is proved and is the guarantee: replacing one unit of the training "
    "data by a unit whose gradient is zero changes the distribution of the trained parameters by "
    "at most this epsilon, at the stated delta. The attack advantage is the true positive rate "
    "minus the false positive rate of the best membership attack, which knows everything except "
    "whether the unit was used. If that is equally likely either way, the attack is right with "
    "probability (1 + advantage) / 2."
)

TERMS: listings.Columns = {
    "run": listings.cell("run"),
    "attack advantage [lower, upper]": lambda r: report.interval(r, "attack_advantage"),
    "noise": lambda row: row["noise"] if row["noise_multiplier"] else "none",
    "clipping norm": listings.cell("l2_clip_norm", "none"),
    "steps": lambda row: f"{row['num_steps']:,}",
    "training examples": lambda row: f"{row['num_examples']:,}",
    "unit": lambda row: f"one {row['unit']}",
    "adjacency": listings.cell("adjacency"),
}
"""Columns of the guarantees' terms."""


def page(
    paths: Sequence[Path],
    title: str = "",
    headline: str | None = None,
    better: Better | None = None,
    *,
    origin: str = "",
    rows: clicks.Rows | None = None,
    against: Path | None = None,
) -> Page:
    """Returns the page about runs and sweeps.

    Args:
      paths: Run directories, folders of runs, and sweeps.
      title: Title of the page; by default from the names.
      headline: Metric to show; by default the task's.
      better: Direction of better values of `headline`.
      origin: Text under the title.
      rows: Labelled rows for models of clicks.
      against: Run without privacy to compare with.

    Raises:
      FileNotFoundError: If a path is neither a run nor a sweep.
      ValueError: If there is no path, a file is damaged, or the metric is unknown.
    """
    if not paths:
        raise ValueError("name at least one run or sweep")
    sweeps = {path: engine.read(path) for path in dict.fromkeys(paths) if engine.is_sweep(path)}
    if headline is not None or better is not None:
        sweeps = {path: summary.showing(headline, better) for path, summary in sweeps.items()}
    runs, _ = finished_runs(path for path in paths if path not in sweeps)
    title = title or f"Private training: {_subject(runs, sweeps)}"
    table = Table.collect(runs) if runs else None
    rows_of_runs = table.rows if table else []
    figures: dict[str, bytes] = {}
    priced = {name: run for name, run in runs.items()
              if run.mechanism and run.record[CERTIFIED] is not None}  # fmt: skip
    if priced:
        figures["curves.svg"] = content(curves(priced), "svg")
    guaranteed = [row for row in rows_of_runs if row[CERTIFIED] is not None]
    text = render(
        "report.md.jinja",
        title=title,
        origin=origin,
        runs=runs,
        groups=_groups(table, headline, better, figures) if table else [],
        predictions=_predictions(runs, rows, against, figures) if rows is not None else "",
        meaning=MEANING,
        rows_of_runs=rows_of_runs,
        guaranteed=bool(guaranteed),
        terms=listings.listed(table, TERMS) if table else (),
        curves=bool(priced),
        notes=_notes(rows_of_runs),
        sweeps=_sweep_sections(sweeps, figures),
        not_covered=dict.fromkeys(item for row in guaranteed for item in row["not_covered"]),
        commands=[_command(name, run) for name, run in runs.items()],
        changed=_changed(runs),
        places=_places(runs, sweeps),
    )
    return Page(title, text, figures)


def _subject(runs: Runs, sweeps: Mapping[Path, Summary]) -> str:
    """Returns the name of a single run or sweep, else their numbers."""
    names = [*runs, *(folder.name for folder in sweeps)]
    counts = ((len(runs), "run"), (len(sweeps), "sweep"))
    counted_nouns = " and ".join(counted(count, noun) for count, noun in counts if count)
    return names[0] if len(names) == 1 else counted_nouns


def _groups(
    table: Table, headline: str | None, better: Better | None, figures: dict[str, bytes]
) -> list[dict[str, Any]]:
    """Returns the content for the runs of each task, as only its metrics compare."""
    groups: list[dict[str, Any]] = []
    tables = listings.by_task(table)
    for number, task_table in enumerate(tables, 1):
        chosen = task_table.headline(headline, better)
        view = View(task_table, CERTIFIED, chosen, by=("run",))
        dots = {f"{p['x']:.3g}" for p in view.points if p["x"] and p["value"] is not None}
        name = f"quality{number if len(tables) > 1 else ''}.svg" if len(dots) > 1 else ""
        if name:
            figures[name] = content(draw([view]), "svg")
        measured = [n for n in task_table.metrics if not task_table.frame[n].dtype.is_integer()]
        widths = [
            (row[CERTIFIED] or 0) > 1.05 * (row["epsilon_lower"] or 0) for row in task_table.rows
        ]
        groups.append(
            {
                "task": task_table.rows[0]["task"] or "without a name",
                "table": task_table,
                "headline": chosen,
                "metrics": chosen.beside(measured),
                "diverged": task_table.diverged,
                "figure": name,
                "bars": any(widths),
                "without": None in view.xs,
            }
        )
    return groups


def _notes(rows: Sequence[dict[str, Any]]) -> dict[str, list[str]]:
    """Returns the notes on runs, each once, with the names of its runs."""
    runs_by_note: dict[str, list[str]] = {}
    for row in rows:
        audit = f"audit before training: {row['audit']}" if row[CERTIFIED] is not None else None
        weak = report.weak_signal(row["signal_to_noise"], row["num_examples"])
        for note in filter(None, (*row["notes"], audit, weak)):
            runs_by_note.setdefault(note, []).append(row["run"])
    return runs_by_note


def _predictions(
    runs: Runs, rows: clicks.Rows, against: Path | None, figures: dict[str, bytes]
) -> str:
    """Returns the section on predictions of models of clicks for labelled rows."""
    models = {name: read_model(run.path, kinds=TASKS, execute=False) for name, run in runs.items()}
    chosen = {name: model for name, model in models.items() if isinstance(model.task, ClickModels)}
    if not chosen:
        raise ValueError("--data is for models of clicks, and no run has one; leave it out")
    twin, remarks = None, []
    if against is not None:
        plain = read_model(against, kinds=TASKS, execute=False)
        clicks.check_twin(plain)
        twin = clicks.Fit.read(against.name or str(against), plain, rows)
        remarks = [
            f"{name} and {twin.name} differ not only in noise and clipping, but in "
            f"{'; '.join(differing)}."
            for name in chosen
            if (differing := clicks.differences(runs[name], FinishedRun.read(against)))
        ]
    fits = [
        clicks.Fit.read(name, model, rows)
        for name, model in chosen.items()
        if against is None or model.path.resolve() != against.resolve()
    ]
    return predictions(fits, twin, rows, figures, remarks)


def predictions(
    fits: list[clicks.Fit],
    twin: clicks.Fit | None,
    rows: clicks.Rows,
    figures: dict[str, bytes],
    remarks: Sequence[str] = (),
) -> str:
    """Returns the Markdown about models' predictions for the same rows.

    Args:
      fits: Predictions of the models.
      twin: Predictions of the model without privacy, if any.
      rows: Labelled rows.
      figures: Pictures of the page, to which the reliability diagram is added.
      remarks: Sentences on differences from the twin.
    """
    name = "reliability.svg"
    if not any(fit.diverged for fit in [*fits, *([twin] if twin else [])]):
        figures[name] = content(clicks.draw(fits, twin), "svg")
    context = {"fits": fits, "twin": twin, "rows": rows, "figure": name, "remarks": remarks}
    return render("predictions.md.jinja", clicks=clicks, **context)


def _sweep_sections(
    sweeps: Mapping[Path, Summary], figures: dict[str, bytes]
) -> list[dict[str, Any]]:
    """Returns the content of each sweep; adds their pictures to `figures`."""
    sections = []
    for number, (folder, summary) in enumerate(sweeps.items(), 1):
        name = f"sweep{number}.svg" if any(len(v.points) > 1 for v in summary.views) else ""
        if name:
            figures[name] = content(draw(summary.views, columns=1), "svg")
        command = _sweep_command(folder / engine.ASKED, summary.task, folder)
        sections.append({"summary": summary, "figure": name, "command": command})
    return sections


def _sweep_command(file: Path, task: Mapping[str, Any], folder: Path, *options: str) -> str:
    """Returns the command that repeats a sweep or a selection."""
    data = task["settings"].get("data")
    words = ["dpsgd", "sweep", str(file), *([data] if data else []), *options]
    return shlex.join([*words, "--out", folder.resolve().name])


def _command(name: str, run: FinishedRun) -> str:
    """Returns the command that repeats a run, or a model's selection."""
    if run.history.selection is None:
        return train_command(run.task, run.spec, Path(name))
    if not (file := run.path / engine.ASKED).is_file():
        return f"# {name}: no command repeats this run; see dpsgd.select"
    return _sweep_command(file, run.task, Path(name), "--private")


def _changed(runs: Runs) -> list[str]:
    """Returns the changes between or during the runs of a task."""
    tasks = dict.fromkeys(run.task["name"] for run in runs.values())
    lines = []
    for task in tasks:
        changed = environment_mismatch(r for r in runs.values() if r.task["name"] == task)
        noun = f"runs of {task}" if len(tasks) > 1 else "runs"
        if changed:
            listed = ", ".join(changed)
            lines.append(f"These differ among the {noun} above, or changed during one: {listed}.")
    return lines


def _places(runs: Runs, sweeps: Mapping[Path, Summary]) -> list[tuple[list[list[str]], list[str]]]:
    """Returns versions and hardware, once for all runs and sweeps that share them."""
    pairs = [(place, name) for name, run in runs.items() for place in run.environments]
    pairs += [(place, path.name) for path, s in sweeps.items() for place in s.environments]
    names_by_place: dict[str, list[str]] = {}
    places = {str(place): place for place, _ in pairs}
    for place, name in pairs:
        names_by_place.setdefault(str(place), []).append(name)
    return [(_machine(places[key]), names) for key, names in names_by_place.items()]


def _machine(place: Mapping[str, Any]) -> list[list[str]]:
    """Returns versions and hardware as rows of a table."""
    packages = ", ".join(f"{name} {version}" for name, version in place["packages"].items())
    return [
        ["packages", packages],
        ["Python", place["python"]],
        ["platform", place["platform"]],
        ["devices", f"{', '.join(place['devices'])} ({place['backend']})"],
        ["cores", str(place["cpu_count"])],
    ]
