"""What finished runs and sweeps show together: one page of Markdown, and its figures.

Only what the guarantees cover, or what the runs published beside them, is read, and labelled rows
that are given to look at models of clicks with: never the diagnostics of training.
"""

from __future__ import annotations

import dataclasses
import io
import json
import re
import shlex
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from accounting import format_delta
from dpsgd.core.guarantee import words_on
from dpsgd.models.model import read_model
from dpsgd.runs import report
from dpsgd.runs.result import FinishedRun, environment_mismatch
from experiments.cli.command_line import train_command
from experiments.cli.console import counted
from experiments.reports import clicks
from experiments.reports import figures as run_figures
from experiments.reports.figures import Runs
from experiments.reports.metrics import Better, Headline
from experiments.sweeps import engine, tables
from experiments.sweeps.figure import draw
from experiments.sweeps.summary import Summary
from experiments.tasks import TASKS
from experiments.tasks.clicks.task import ClickModels

Sweeps = Mapping[Path, Summary]
"""What sweeps show, by their folders."""

MEANING = (
    "An interval contains the true epsilon of the mechanism that ran, with the sampler that drew "
    "its batches; its upper end is proved and is the guarantee. To replace one unit of the "
    "training data by one whose gradient is zero changes the law of the trained parameters by no "
    "more than that, at the stated delta. The attack advantage is the true positive rate minus the "
    "false positive rate of the best membership attack, which knows everything but whether the "
    "unit was there; with a fair prior it is right with probability (1 + advantage) / 2."
)


@dataclass(frozen=True)
class Page:
    """Markdown whose images are among `figures`, each an SVG, by file name."""

    title: str
    markdown: str
    figures: dict[str, bytes] = field(default_factory=dict)


def overview(
    paths: Sequence[Path],
    title: str = "",
    headline: str | None = None,
    better: Better | None = None,
    *,
    rows: clicks.Rows | None = None,
    against: Path | None = None,
) -> Page:
    """Returns the page about the runs and sweeps in `paths`.

    Args:
      paths: Their folders.
      title: Of the page; by default it says what is in it.
      headline: The metric that is shown, in place of each task's own.
      better: Which of its values are better.
      rows: Labelled rows on which models of clicks are looked at, if any.
      against: The run of a model without privacy that they are then compared with.

    Raises:
      FileNotFoundError: if one of them is neither.
      ValueError: if there is none, or one is damaged, or has no such metric.
    """
    if not paths:
        raise ValueError("name at least one run or sweep")
    sweeps = {path: engine.read(path) for path in dict.fromkeys(paths) if engine.is_sweep(path)}
    if headline is not None:
        sweeps = {
            path: dataclasses.replace(
                summary,
                sweep=dataclasses.replace(summary.sweep, headline=headline, better=better),
            )
            for path, summary in sweeps.items()
        }
    runs = _named([FinishedRun.read(path) for path in dict.fromkeys(paths) if path not in sweeps])
    figures: dict[str, bytes] = {}
    parts = []
    if runs:
        parts.append("## At a glance")
        for number, (task, group) in enumerate((groups := _by_task(runs)).items(), 1):
            first = next(iter(group.values()))
            names = _metrics(group)
            chosen = Headline.of(first.task["description"], names, headline, better)
            parts += [f"### Task: {report.escape(task)}"] if len(groups) > 1 else []
            name = f"quality{number}.svg" if len(groups) > 1 else "quality.svg"
            parts.append(_glance(group, chosen, names, name, figures))
        if rows is not None:
            parts.append(_predictions(runs, rows, against, figures))
        parts.append(_guarantees(runs, figures))
    for number, (folder, summary) in enumerate(sweeps.items(), 1):
        parts.append(_sweep(folder, summary, f"sweep{number}.svg", figures))
    if runs:
        parts.append(_not_covered(runs))
        parts.append(_reproduce(runs))
    parts.append(_where(runs, sweeps))
    title = title or _title([*runs, *(folder.name for folder in sweeps)], len(runs), len(sweeps))
    return Page(title, "\n\n".join([f"# {report.escape(title)}", *parts]) + "\n", figures)


def _by_task(runs: Runs) -> dict[str, dict[str, FinishedRun]]:
    """Returns the runs of each task, whose metrics alone compare, by its name."""
    groups: dict[str, dict[str, FinishedRun]] = {}
    for name, run in runs.items():
        groups.setdefault(run.task["name"] or "without a name", {})[name] = run
    return groups


def _named(runs: Sequence[FinishedRun]) -> Runs:
    """Returns runs by the names of their folders; by their paths, where names are not enough."""
    by_name = {run.path.name or str(run.path): run for run in runs}
    return by_name if len(by_name) == len(runs) else {str(run.path): run for run in runs}


def _title(names: Sequence[str], num_runs: int, num_sweeps: int) -> str:
    if len(names) == 1:
        return f"Private training: {names[0]}"
    counts = ((num_runs, "run"), (num_sweeps, "sweep"))
    parts = [counted(count, noun) for count, noun in counts if count]
    return f"Private training: {' and '.join(parts)}"


def _metrics(runs: Runs) -> list[str]:
    """Returns the names of what runs measure; what they count alone, such as rows, is left out."""
    found = [item for run in runs.values() for item in run.record["metrics"].items()]
    return list(dict.fromkeys(name for name, value in found if not isinstance(value, int)))


def _glance(
    runs: Runs, headline: Headline, metrics: Iterable[str], figure: str, figures: dict[str, bytes]
) -> str:
    """Returns the table of runs of one task, and adds the figure of their quality to `figures`."""
    first, *others = headline.beside(metrics)
    # An epsilon for one user and one for one example are not to be compared.
    units = len({run.record["unit"] for run in runs.values()}) > 1
    header = ["run", report.label(first), "ε ≤", *(["unit"] if units else []), "sampler"]
    rows = [
        [
            name,
            _metric(run, first),
            report.guaranteed(run.record),
            *([f"one {run.record['unit']}"] if units else []),
            run.record["sampler"],
        ]
        for name, run in runs.items()
    ]
    parts = [report.table(header, rows)]
    if len({digest for run in runs.values() for digest in run.data}) > 1:
        parts.append(
            "Not all of them were trained on the same data, so their quality does not compare."
        )
    if diverged := [name for name, run in runs.items() if report.divergence(run.record)]:
        parts.append(
            f"The training of {report.escape(', '.join(diverged))} diverged: what is not finite is "
            "undefined, and not drawn."
        )
    for name, run in runs.items():
        record = run.record
        if weak := report.weak_signal(record["signal_to_noise"], record["num_examples"]):
            parts.append(f"Of {report.escape(name)}: {weak}.")
    drawn = [run for run in runs.values() if run.record["metrics"].get(headline.name) is not None]
    private = [run for run in drawn if _is_guaranteed(run)]
    plain = [run for run in drawn if not run.record["noise_multiplier"]]
    if private and len(private) + len(plain) > 1:
        figures[figure] = _svg(run_figures.quality(runs, headline))
        name = headline.label[0].upper() + headline.label[1:]
        parts.append(
            f"![{name} over epsilon. A bar spans the certified interval; its right end, the dot, "
            f"is the guarantee.{' A line across: without privacy.' if plain else ''}]({figure})"
        )
    parts.append(_details(runs, others))
    return "\n\n".join(parts)


def _details(runs: Runs, metrics: Sequence[str]) -> str:
    """Returns the table of all else that is measured of the runs of one task."""
    header = ["run", "σ", "ε [lower, upper]", "δ", *map(report.label, metrics)]
    rows = [
        [
            name,
            f"{run.record['noise_multiplier']:.4g}",
            report.interval(run.record),
            format_delta(run.record["delta"]),
            *(_metric(run, metric) for metric in metrics),
            f"{seconds} s" if (seconds := report.seconds(run.record)) else "secret",
            f"{run.record['examples_per_second']:,.0f}" if seconds else "secret",
        ]
        for name, run in runs.items()
    ]
    return report.table([*header, "time", "examples/s"], rows)


def _metric(run: FinishedRun, name: str) -> str:
    found = run.record["metrics"]
    return report.metric(found[name]) if name in found else ""


def _predictions(
    runs: Runs, rows: clicks.Rows, against: Path | None, figures: dict[str, bytes]
) -> str:
    """Returns the section on how well models of clicks fit labelled rows."""
    models = {name: read_model(run.path, kinds=TASKS) for name, run in runs.items()}
    asked = {name: model for name, model in models.items() if isinstance(model.task, ClickModels)}
    if not asked:
        raise ValueError("none of the runs is of a model of clicks, of which alone --data is asked")
    twin, remarks = None, []
    if against is not None:
        plain = read_model(against, kinds=TASKS)
        clicks.check_twin(plain)
        twin = clicks.Fit.of(against.name or str(against), plain, rows)
        remarks = [
            f"{report.escape(name)} and {report.escape(twin.name)} differ not only in noise and "
            f"clipping, but in {report.escape('; '.join(found))}."
            for name in asked
            if (found := clicks.differences(runs[name], FinishedRun.read(against)))
        ]
    fits = [
        clicks.Fit.of(name, model, rows)
        for name, model in asked.items()
        if against is None or model.path.resolve() != against.resolve()
    ]
    name = "reliability.svg"
    if not any(fit.diverged for fit in [*fits, *([twin] if twin else [])]):
        figures[name] = _svg(clicks.draw(fits, twin))
    return "\n\n".join([clicks.section(fits, twin, rows, name), *remarks])


def _guarantees(runs: Runs, figures: dict[str, bytes]) -> str:
    parts = ["## What is guaranteed"]
    parts += [MEANING] if any(map(_is_guaranteed, runs.values())) else []
    for name, run in runs.items():
        record = run.record
        parts += [
            f"### {report.escape(name)}",
            f"> **{record['sampler']}**: {record['guarantee']}",
        ]
        if not _is_guaranteed(run):
            continue
        facts = [
            f"attack advantage [lower, upper]: {report.advantage(record)}",
            f"{words_on(record['noise'])}, noise multiplier {record['noise_multiplier']:.6g}, "
            f"clipping norm {record['l2_clip_norm']:g}",
            f"{record['num_steps']:,} steps on {record['num_examples']:,} training examples; "
            f"unit of privacy: one {record['unit']}; adjacency: {record['adjacency']}",
            f"audit before training: {record['audit']}",
            *record["notes"],
        ]
        parts.append(report.bullets(facts))
    priced = {n: run for n, run in runs.items() if _is_guaranteed(run) and run.mechanism}
    if priced:
        figures["curves.svg"] = _svg(run_figures.curves(priced))
        parts.append(
            "![The certified epsilon of the same runs at other deltas; the dot is the delta of the "
            "guarantee.](curves.svg)"
        )
    return "\n\n".join(parts)


def _is_guaranteed(run: FinishedRun) -> bool:
    return run.record["epsilon_upper"] is not None


def _sweep(folder: Path, summary: Summary, name: str, figures: dict[str, bytes]) -> str:
    heading, *lines = tables.markdown(summary).strip().splitlines()
    rest = "\n".join(re.sub(r"^(#+ )", r"#\1", line) for line in lines).strip()
    figure = ""
    if any(len(panel.results) > 1 for panel in summary.panels):
        figures[name] = _svg(draw(summary))
        metric = summary.headline.label
        figure = (
            f"![{metric[0].upper()}{metric[1:]}: mean of independent runs; the band is one "
            f"standard deviation of a run.]({name})\n\n"
        )
    words = ["dpsgd", "sweep", str(folder / engine.ASKED)]
    if data := summary.task["settings"].get("data"):
        words.append(data)
    command = shlex.join([*words, "--out", folder.resolve().name])
    return (
        f"## Sweep: {heading.lstrip('# ')}\n\n{figure}{rest}\n\n"
        f"{_speed(summary)} To do it again:\n\n```sh\n{command}\n```"
    )


def _speed(summary: Summary) -> str:
    seconds = sum(record["training_seconds"] for record in summary.reports)
    rate = statistics.median(record["examples_per_second"] for record in summary.reports)
    return (
        f"Training took {seconds:,.1f} s for all runs together, at a median of {rate:,.0f} "
        "examples a second."
    )


def _not_covered(runs: Runs) -> str:
    items = dict.fromkeys(item for run in runs.values() for item in run.record["not_covered"])
    return "## What is not covered\n\n" + report.bullets(list(items))


def _reproduce(runs: Runs) -> str:
    commands = "\n".join(_command(name, run) for name, run in runs.items())
    return (
        "## Do it again\n\nBatches and noise are drawn anew from the operating system's entropy, "
        "so the figures agree up to the noise; with `--insecure-seed` they are the same ones.\n\n"
        f"```sh\n{commands}\n```"
    )


def _command(name: str, run: FinishedRun) -> str:
    """Returns the command that does a run, or the selection of a model, again."""
    if run.history.selection is None:
        return train_command(run.task, run.spec, Path(name))
    if not (file := run.path / engine.ASKED).is_file():
        return f"# of {name}: by a program alone, see dpsgd.select"
    data = run.task["settings"].get("data")
    words = ["dpsgd", "sweep", str(file), *([data] if data else []), "--private", "--out", name]
    return shlex.join(words)


def _where(runs: Runs, sweeps: Sweeps) -> str:
    """Returns versions and hardware, once for all runs and sweeps that share them."""
    found = [(place, name) for name, run in runs.items() for place in run.environments]
    found += [(place, at.name) for at, summary in sweeps.items() for place in summary.environments]
    places: dict[str, list[str]] = {}
    for place, name in found:
        places.setdefault(json.dumps(place, sort_keys=True), []).append(name)
    parts = ["## Where it ran"]
    for task, group in (groups := _by_task(runs)).items():
        if changed := environment_mismatch(group.values()):
            which = f"runs of {report.escape(task)}" if len(groups) > 1 else "runs"
            listed = ", ".join(changed)
            parts.append(f"Not alike in all {which} above, from beginning to end: {listed}.")
    for text, names in places.items():
        here = json.loads(text)
        packages = ", ".join(f"{name} {version}" for name, version in here["packages"].items())
        rows = [
            ["packages", packages],
            ["Python", here["python"]],
            ["platform", here["platform"]],
            ["devices", f"{', '.join(here['devices'])} ({here['backend']})"],
            ["cores", str(here["cpu_count"])],
        ]
        if len(places) > 1:
            parts.append(f"{report.escape(', '.join(names))}:")
        parts.append(report.table(["", ""], rows))
    return "\n\n".join(parts)


def _svg(figure: Figure) -> bytes:
    """Returns a figure as SVG; equal figures give equal bytes."""
    buffer = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "dpsgd"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()
