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
from experiments.results.metrics import Better, Headline
from experiments.results.render import Page, render
from experiments.results.table import Table, finished_runs
from experiments.results.views import CERTIFIED, Cells, View
from experiments.sweeps import engine
from experiments.sweeps.summary import Summary
from experiments.tasks import TASKS
from experiments.tasks.clicks.task import ClickModels

Runs = Mapping[str, FinishedRun]

MEANING = (
    "An interval contains the true epsilon of the mechanism that ran, with the sampler that drew "
    "its batches; its upper end is proved and is the guarantee. To replace one unit of the "
    "training data by one whose gradient is zero changes the law of the trained parameters by no "
    "more than that, at the stated delta. The attack advantage is the true positive rate minus the "
    "false positive rate of the best membership attack, which knows everything but whether the "
    "unit was there; with a fair prior it is right with probability (1 + advantage) / 2."
)


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
    if headline is not None:
        sweeps = {path: one.showing(headline, better) for path, one in sweeps.items()}
    runs, _ = finished_runs(path for path in paths if path not in sweeps)
    figures: dict[str, bytes] = {}
    names = [*runs, *(folder.name for folder in sweeps)]
    counts = ((len(runs), "run"), (len(sweeps), "sweep"))
    counted_nouns = " and ".join(counted(count, noun) for count, noun in counts if count)
    title = title or f"Private training: {names[0] if len(names) == 1 else counted_nouns}"
    table = Table.collect(runs) if runs else None
    rows_of_runs = table.rows if table else []
    priced = {
        name: run
        for name, run in runs.items()
        if run.mechanism and run.record[CERTIFIED] is not None
    }
    if priced:
        figures["curves.svg"] = content(curves(priced), "svg")
    text = render(
        "report.md.jinja",
        title=title,
        origin=origin,
        runs=runs,
        groups=_groups(table, headline, better, figures) if table else [],
        predictions=_predictions(runs, rows, against, figures) if rows is not None else "",
        meaning=MEANING,
        rows_of_runs=rows_of_runs,
        guaranteed=any(row[CERTIFIED] is not None for row in rows_of_runs),
        terms=_terms(table) if table else (),
        curves=bool(priced),
        notes=_notes(rows_of_runs),
        sweeps=[
            {
                "summary": summary,
                "figure": _sweep_figure(summary, f"sweep{number}.svg", figures),
                "command": _sweep_command(folder, summary),
            }
            for number, (folder, summary) in enumerate(sweeps.items(), 1)
        ],
        not_covered=dict.fromkeys(
            item
            for row in rows_of_runs
            if row[CERTIFIED] is not None
            for item in row["not_covered"]
        ),
        commands=[_command(name, run) for name, run in runs.items()],
        changed=_changed(runs),
        places=_places(runs, sweeps),
    )
    return Page(title, text, figures)


def _groups(
    table: Table, headline: str | None, better: Better | None, figures: dict[str, bytes]
) -> list[dict[str, Any]]:
    """Returns the content for the runs of each task, as only its metrics compare."""
    groups = []
    tables = listings.by_task(table)
    for number, task_table in enumerate(tables, 1):
        chosen = Headline.choose(task_table, headline, better)
        view = View(task_table, CERTIFIED, chosen, by=("run",))
        dots = {f"{p.x:.3g}" for p in view.points if p.x and p[chosen.name].mean is not None}
        name = f"quality{number}.svg" if len(tables) > 1 else "quality.svg"
        if has_figure := len(dots) > 1:
            figures[name] = content(draw([view]), "svg")
        counts = [n for n in task_table.metrics if task_table.frame[n].dtype.is_integer()]
        names = chosen.beside(n for n in task_table.metrics if n not in counts)
        has_interval = [
            row
            for row in task_table.rows
            if (row[CERTIFIED] or 0) > 1.05 * (row["epsilon_lower"] or 0)
        ]
        groups.append(
            {
                "task": task_table.rows[0]["task"] or "without a name",
                "table": task_table,
                "headline": chosen,
                "others": names[1:],
                "diverged": [
                    r["run"]
                    for r in task_table.rows
                    if any(r[n] != r[n] for n in task_table.metrics)
                ],
                "figure": name if has_figure else "",
                "bars": bool(has_interval),
                "without": None in view.xs,
            }
        )
    return groups


def _terms(table: Table) -> Cells:
    """Returns the table of the guarantees' terms."""
    return listings.listed(
        table,
        {
            "run": lambda row: row["run"],
            "attack advantage [lower, upper]": report.advantage,
            "noise": lambda row: row["noise"] if row["noise_multiplier"] else "none",
            "clipping norm": lambda row: listings.measured(row, "l2_clip_norm", "none"),
            "steps": lambda row: f"{row['num_steps']:,}",
            "training examples": lambda row: f"{row['num_examples']:,}",
            "unit": lambda row: f"one {row['unit']}",
            "adjacency": lambda row: row["adjacency"],
        },
    )


def _notes(rows: Sequence[dict[str, Any]]) -> dict[str, list[str]]:
    """Returns the notes on runs, each once, with the names of its runs."""
    runs_by_note: dict[str, list[str]] = {}
    for row in rows:
        notes = list(row["notes"])
        if row[CERTIFIED] is not None:
            notes.append(f"audit before training: {row['audit']}")
        if weak := report.weak_signal(row["signal_to_noise"], row["num_examples"]):
            notes.append(weak)
        for note in notes:
            runs_by_note.setdefault(note, []).append(row["run"])
    return runs_by_note


def _predictions(
    runs: Runs, rows: clicks.Rows, against: Path | None, figures: dict[str, bytes]
) -> str:
    """Returns the section on predictions of models of clicks for labelled rows."""
    models = {name: read_model(run.path, kinds=TASKS) for name, run in runs.items()}
    chosen = {name: model for name, model in models.items() if isinstance(model.task, ClickModels)}
    if not chosen:
        raise ValueError("--data is for models of clicks, and no run has one; leave it out")
    twin, remarks = None, []
    if against is not None:
        plain = read_model(against, kinds=TASKS)
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
    name = "reliability.svg"
    if not any(fit.diverged for fit in [*fits, *([twin] if twin else [])]):
        figures[name] = content(clicks.draw(fits, twin), "svg")
    return predictions(fits, twin, rows, name, remarks)


def predictions(
    fits: list[clicks.Fit],
    twin: clicks.Fit | None,
    rows: clicks.Rows,
    figure: str,
    remarks: Sequence[str] = (),
) -> str:
    """Returns the Markdown about models' predictions for the same rows.

    Args:
      fits: Predictions of the models.
      twin: Predictions of the model without privacy, if any.
      rows: Labelled rows.
      figure: File name of the reliability diagram.
      remarks: Sentences on differences from the twin.
    """
    context = {"fits": fits, "twin": twin, "rows": rows, "figure": figure, "remarks": remarks}
    return render("predictions.md.jinja", clicks=clicks, **context)


def _sweep_figure(summary: Summary, name: str, figures: dict[str, bytes]) -> str:
    if all(len(view.points) < 2 for view in summary.views):
        return ""
    figures[name] = content(draw(summary.views, columns=1), "svg")
    return name


def _sweep_command(folder: Path, summary: Summary) -> str:
    words = ["dpsgd", "sweep", str(folder / engine.ASKED)]
    if data := summary.task["settings"].get("data"):
        words.append(data)
    return shlex.join([*words, "--out", folder.resolve().name])


def _command(name: str, run: FinishedRun) -> str:
    """Returns the command that repeats a run, or a model's selection."""
    if run.history.selection is None:
        return train_command(run.task, run.spec, Path(name))
    if not (file := run.path / engine.ASKED).is_file():
        return f"# of {name}: by a program alone, see dpsgd.select"
    data = run.task["settings"].get("data")
    words = ["dpsgd", "sweep", str(file), *([data] if data else []), "--private", "--out", name]
    return shlex.join(words)


def _changed(runs: Runs) -> list[str]:
    """Returns the changes between or during the runs of a task."""
    tasks = dict.fromkeys(run.task["name"] for run in runs.values())
    lines = []
    for task in tasks:
        changed = environment_mismatch(r for r in runs.values() if r.task["name"] == task)
        noun = f"runs of {task}" if len(tasks) > 1 else "runs"
        if changed:
            listed = ", ".join(changed)
            lines.append(f"Not alike in all {noun} above, from beginning to end: {listed}.")
    return lines


def _places(runs: Runs, sweeps: Mapping[Path, Summary]) -> list[tuple[list[list[str]], list[str]]]:
    """Returns versions and hardware, once for all runs and sweeps that share them."""
    pairs = [(place, name) for name, run in runs.items() for place in run.environments]
    pairs += [(place, path.name) for path, s in sweeps.items() for place in s.environments]
    places: list[tuple[dict[str, Any], list[str]]] = []
    for machine, name in pairs:
        names = next((names for place, names in places if place == machine), None)
        if names is None:
            places.append((machine, [name]))
        else:
            names.append(name)
    return [
        (
            [
                [
                    "packages",
                    ", ".join(f"{n} {version}" for n, version in machine["packages"].items()),
                ],
                ["Python", machine["python"]],
                ["platform", machine["platform"]],
                ["devices", f"{', '.join(machine['devices'])} ({machine['backend']})"],
                ["cores", str(machine["cpu_count"])],
            ],
            names,
        )
        for machine, names in places
    ]
