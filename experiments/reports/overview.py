"""What finished runs and sweeps show together: one page of Markdown, and its figures.

Only what the guarantees cover, or what the runs published beside them, is read: never the
diagnostics of training.
"""

from __future__ import annotations

import dataclasses
import io
import json
import re
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from accounting import format_delta
from experiments.cli.command_line import train_command
from experiments.cli.console import counted
from experiments.finished import FinishedRun, unlike
from experiments.reports import figures as run_figures
from experiments.reports import run as report
from experiments.reports.figures import Runs
from experiments.sweeps import engine, tables
from experiments.sweeps.figure import draw
from experiments.sweeps.summary import Summary

Sweeps = Mapping[Path, Summary]
"""What sweeps show, by their folders."""

MEANING = (
    "An interval contains the true epsilon of the mechanism that ran, with the sampler that drew "
    "its batches; its upper end is proved and is the guarantee. To replace one unit of the "
    "training data by one whose gradient is zero changes the law of the trained parameters by no "
    "more than that, at the stated delta."
)


@dataclass(frozen=True)
class Page:
    """Markdown whose images are among `figures`, each an SVG, by file name."""

    title: str
    markdown: str
    figures: dict[str, bytes] = field(default_factory=dict)


def overview(paths: Sequence[Path], title: str = "") -> Page:
    """Returns the page about the runs and sweeps in `paths`.

    Raises:
      FileNotFoundError: if one of them is neither.
      ValueError: if there is none, or one is damaged.
    """
    if not paths:
        raise ValueError("name at least one run or sweep")
    sweeps = {path: engine.read(path) for path in dict.fromkeys(paths) if engine.is_sweep(path)}
    runs = _named([FinishedRun.read(path) for path in dict.fromkeys(paths) if path not in sweeps])
    figures: dict[str, bytes] = {}
    parts = []
    if runs:
        parts.append(_glance(runs, figures))
        parts.append(_guarantees(runs, figures))
    for number, (folder, summary) in enumerate(sweeps.items(), 1):
        parts.append(_sweep(folder, summary, f"sweep{number}.svg", figures))
    if runs:
        parts.append(_not_covered(runs))
        parts.append(_reproduce(runs))
    parts.append(_where(runs, sweeps))
    title = title or _title([*runs, *(folder.name for folder in sweeps)], len(runs), len(sweeps))
    return Page(title, "\n\n".join([f"# {report.plain(title)}", *parts]) + "\n", figures)


def _named(runs: Sequence[FinishedRun]) -> Runs:
    """Returns runs by the names of their folders; by their paths, where names are not enough."""
    by_name = {run.path.name or str(run.path): run for run in runs}
    return by_name if len(by_name) == len(runs) else {str(run.path): run for run in runs}


def _title(names: Sequence[str], num_runs: int, num_sweeps: int) -> str:
    if len(names) == 1:
        return f"Private training: {names[0]}"
    counts = ((num_runs, "run"), (num_sweeps, "sweep"))
    said = [counted(count, noun) for count, noun in counts if count]
    return f"Private training: {' and '.join(said)}"


def _glance(runs: Runs, figures: dict[str, bytes]) -> str:
    header = ["run", "sampler", "σ", "ε [lower, upper]", "δ", "test AUC", "log loss"]
    header += ["calibration", "training", "examples/s"]
    rows = [
        [
            name,
            run.record["sampler"],
            f"{run.record['noise_multiplier']:.4g}",
            report.interval(run.record),
            format_delta(run.record["delta"]),
            report.metric(run.record["test_auc"], ".4f"),
            report.metric(run.record["test_log_loss"], ".4f"),
            report.metric(run.record["test_calibration"], ".3f"),
            f"{run.record['training_seconds']:.1f} s",
            f"{run.record['examples_per_second']:,.0f}",
        ]
        for name, run in runs.items()
    ]
    parts = ["## At a glance", report.table(header, rows)]
    if len({digest for run in runs.values() for digest in run.stores}) > 1:
        parts.append(
            "Not all of them were trained on the same store, so their quality does not compare."
        )
    if diverged := [name for name, run in runs.items() if report.divergence(run.record)]:
        parts.append(
            f"The training of {report.plain(', '.join(diverged))} diverged: metrics of rows that "
            "have no finite score are undefined, and not drawn."
        )
    if any(_is_guaranteed(run) and not _is_undefined(run) for run in runs.values()):
        figures["quality.svg"] = _svg(run_figures.quality(runs))
        parts.append(
            "![Test AUC over epsilon. A bar spans the certified interval; its right end, the dot, "
            "is the guarantee. Dashed: without privacy.](quality.svg)"
        )
    return "\n\n".join(parts)


def _guarantees(runs: Runs, figures: dict[str, bytes]) -> str:
    parts = ["## What is guaranteed"]
    parts += [MEANING] if any(map(_is_guaranteed, runs.values())) else []
    for name, run in runs.items():
        record = run.record
        parts += [
            f"### {report.plain(name)}",
            f"> **{record['sampler']}**: {record['guarantee']}",
        ]
        if not _is_guaranteed(run):
            continue
        facts = [
            f"noise multiplier {record['noise_multiplier']:.6g}, clipping norm "
            f"{record['l2_clip_norm']:g}",
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


def _is_undefined(run: FinishedRun) -> bool:
    return run.record["test_auc"] is None


def _sweep(folder: Path, summary: Summary, name: str, figures: dict[str, bytes]) -> str:
    figures[name] = _svg(draw(summary))
    heading, *lines = tables.markdown(summary).strip().splitlines()
    rest = "\n".join(re.sub(r"^(#+ )", r"#\1", line) for line in lines).strip()
    caption = "Test AUC: mean of independent runs; the band is one standard deviation of a run."
    words = ["dpsgd", "sweep", str(folder / engine.ASKED), str(summary.data)]
    command = shlex.join([*words, "--out", folder.resolve().name])
    return (
        f"## Sweep: {heading.lstrip('# ')}\n\n![{caption}]({name})\n\n{rest}\n\n"
        f"{_speed(summary)} To do it again:\n\n```sh\n{command}\n```"
    )


def _speed(summary: Summary) -> str:
    records = [record for result in summary.results for record in result.reports]
    seconds = sum(record["training_seconds"] for record in records)
    rate = statistics.median(record["examples_per_second"] for record in records)
    return (
        f"Training took {seconds:,.1f} s for all runs together, at a median of {rate:,.0f} "
        "examples a second."
    )


def _not_covered(runs: Runs) -> str:
    items = dict.fromkeys(item for run in runs.values() for item in run.record["not_covered"])
    return "## What is not covered\n\n" + report.bullets(list(items))


def _reproduce(runs: Runs) -> str:
    again = [dataclasses.replace(run.config, out=Path(name)) for name, run in runs.items()]
    commands = "\n".join(train_command(config) for config in again)
    return (
        "## Do it again\n\nBatches and noise are drawn anew from the operating system's entropy, "
        "so the figures agree up to the noise; with `--insecure-seed` they are the same ones.\n\n"
        f"```sh\n{commands}\n```"
    )


def _where(runs: Runs, sweeps: Sweeps) -> str:
    """Returns versions and hardware, once for all runs and sweeps that share them."""
    found = [(place, name) for name, run in runs.items() for place in run.environments]
    found += [(place, at.name) for at, summary in sweeps.items() for place in summary.environments]
    places: dict[str, list[str]] = {}
    for place, name in found:
        places.setdefault(json.dumps(place, sort_keys=True), []).append(name)
    parts = ["## Where it ran"]
    if changed := unlike(runs.values()):
        parts.append(f"Not alike in all runs above, from beginning to end: {', '.join(changed)}.")
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
            parts.append(f"{report.plain(', '.join(names))}:")
        parts.append(report.table(["", ""], rows))
    return "\n\n".join(parts)


def _svg(figure: Figure) -> bytes:
    """Returns a figure as SVG; equal figures give equal bytes."""
    buffer = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "dpsgd"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()
