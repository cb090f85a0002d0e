"""What finished runs and sweeps show together: one page of Markdown, and its figures.

Only what the guarantees cover, or what the runs published beside them, is read: never the
diagnostics of training.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from accounting import epsilon, format_delta
from dpsgd.algorithm import Mechanism
from dpsgd.records import checked
from experiments import report
from experiments.command_line import train_command
from experiments.compare import COLORS, label_ones_twos_fives
from experiments.config import TrainConfig
from experiments.run_directory import RunDirectory
from experiments.sweep.engine import ASKED
from experiments.train import config_from

SUMMARY = "summary.json"
"""What makes a folder that of a sweep."""

DELTAS = tuple(10.0**-k for k in range(3, 11))
"""Where the price of a run is shown besides its own delta."""

MEANING = (
    "An interval contains the true epsilon of the mechanism that ran, with the sampler that drew "
    "its batches; its upper end is proved and is the guarantee. To replace one unit of the "
    "training data by one whose gradient is zero changes the law of the trained parameters by no "
    "more than that, at the stated delta."
)


@dataclass(frozen=True)
class FinishedRun:
    """What a finished run left for anybody to read."""

    name: str
    config: TrainConfig
    record: dict[str, Any]
    environment: dict[str, Any]
    mechanism: Mechanism | None
    """What its price can be asked of at another delta; None after a change of course."""

    @classmethod
    def read(cls, path: Path) -> FinishedRun:
        """Reads the run in a directory.

        Raises:
          FileNotFoundError: if there is no finished run.
          ValueError: if its files are damaged.
        """
        run = RunDirectory.open(path)
        history = run.history()
        return cls(
            path.name or str(path),
            config_from(run.read_json("config.json"), out=path, data=None),
            _fields(run.report(history), _REPORT, path / "report.json"),
            _fields(run.read_json("environment.json"), _ENVIRONMENT, path / "environment.json"),
            history.generations[0].terms.mechanism if len(history.generations) == 1 else None,
        )


_REPORT = {
    "sampler": str,
    "guarantee": str,
    "epsilon_lower": float | None,
    "epsilon_upper": float | None,
    "delta": float,
    "adjacency": str,
    "unit": str,
    "noise_multiplier": float,
    "l2_clip_norm": float | None,
    "audit": str,
    "notes": list[str],
    "not_covered": list[str],
    "test_auc": float,
    "test_log_loss": float,
    "test_calibration": float,
    "num_steps": int,
    "num_examples": int,
    "training_seconds": float,
    "examples_per_second": float,
}
_ENVIRONMENT = {
    "packages": dict[str, str],
    "python": str,
    "platform": str,
    "cpu_count": int | None,
    "backend": str,
    "devices": list[str],
}
"""What is read of a run's files, by type."""


def _fields(record: dict[str, Any], kinds: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Returns what a file of a run holds.

    Raises:
      ValueError: if a field is missing, or of another type.
    """
    _check_fields(record, kinds, f"{path} is damaged, or of another version")
    return record


def _check_fields(record: Mapping[str, Any], kinds: Mapping[str, Any], where: str) -> None:
    for field_name, kind in kinds.items():
        if field_name not in record:
            raise ValueError(f"{where}: {field_name} is missing")
        checked(record[field_name], kind, f"{where}: {field_name}")


@dataclass(frozen=True)
class FinishedSweep:
    """What a sweep left for anybody to read."""

    name: str
    summary: str
    """Markdown: a title, tables, what is not covered."""
    figure: bytes
    """PNG."""
    command: str
    """What does it again, as a shell takes it; empty where its own file is not kept."""
    environments: list[dict[str, Any]]
    """Versions and hardware of its runs."""

    @classmethod
    def read(cls, path: Path) -> FinishedSweep:
        """Reads the sweep in a folder that holds `SUMMARY`."""
        try:
            record = json.loads((path / SUMMARY).read_text())
            command = ["dpsgd", "sweep", str(path / ASKED), str(record["data"])]
            command += ["--out", path.resolve().name]
            for place in record["environments"]:
                _check_fields(place, _ENVIRONMENT, SUMMARY)
            return cls(
                path.name,
                (path / "summary.md").read_text(),
                (path / "figure.png").read_bytes(),
                shlex.join(command) if (path / ASKED).is_file() else "",
                record["environments"],
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is not the folder of a whole sweep: {error}") from None


@dataclass(frozen=True)
class Page:
    """Markdown whose images are among `figures`, by file name."""

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
    sweeps = [FinishedSweep.read(path) for path in paths if (path / SUMMARY).is_file()]
    runs = [FinishedRun.read(path) for path in paths if not (path / SUMMARY).is_file()]
    runs = _told_apart(runs)
    figures: dict[str, bytes] = {}
    parts = []
    if runs:
        parts.append(_glance(runs, figures))
        parts.append(_guarantees(runs, figures))
    for number, sweep in enumerate(sweeps, 1):
        parts.append(_sweep(sweep, f"sweep{number}.png", figures))
    if runs:
        parts.append(_not_covered(runs))
        parts.append(_reproduce(runs))
    parts.append(_where(runs, sweeps))
    title = title or _title(runs, sweeps)
    return Page(title, "\n\n".join([f"# {report.plain(title)}", *parts]) + "\n", figures)


def _told_apart(runs: list[FinishedRun]) -> list[FinishedRun]:
    names = [run.name for run in runs]
    if len(set(names)) == len(names):
        return runs
    return [
        FinishedRun(str(r.config.out), r.config, r.record, r.environment, r.mechanism) for r in runs
    ]


def _title(runs: Sequence[FinishedRun], sweeps: Sequence[FinishedSweep]) -> str:
    names = [run.name for run in runs] + [sweep.name for sweep in sweeps]
    if len(names) == 1:
        return f"Private training: {names[0]}"
    counts = ((len(runs), "run"), (len(sweeps), "sweep"))
    said = [f"{count} {noun}{'s' if count > 1 else ''}" for count, noun in counts if count]
    return f"Private training: {' and '.join(said)}"


def _glance(runs: Sequence[FinishedRun], figures: dict[str, bytes]) -> str:
    header = ["run", "sampler", "σ", "ε [lower, upper]", "δ", "test AUC", "log loss"]
    header += ["calibration", "training", "examples/s"]
    rows = [
        [
            run.name,
            run.record["sampler"],
            f"{run.record['noise_multiplier']:.4g}",
            report.interval(run.record),
            format_delta(run.record["delta"]),
            f"{run.record['test_auc']:.4f}",
            f"{run.record['test_log_loss']:.4f}",
            f"{run.record['test_calibration']:.3f}",
            f"{run.record['training_seconds']:.1f} s",
            f"{run.record['examples_per_second']:,.0f}",
        ]
        for run in runs
    ]
    parts = ["## At a glance", report.table(header, rows)]
    if any(run.record["epsilon_upper"] is not None for run in runs):
        figures["quality.svg"] = _svg(_quality(runs))
        parts.append(
            "![Test AUC over epsilon. A bar spans the certified interval; its right end, the dot, "
            "is the guarantee. Dashed: without privacy.](quality.svg)"
        )
    return "\n\n".join(parts)


def _guarantees(runs: Sequence[FinishedRun], figures: dict[str, bytes]) -> str:
    parts = ["## What is guaranteed", MEANING]
    for run in runs:
        record = run.record
        parts += [
            f"### {report.plain(run.name)}",
            f"> **{record['sampler']}**: {record['guarantee']}",
        ]
        if record["epsilon_upper"] is None:
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
    if any(_is_priced(run) for run in runs):
        figures["curves.svg"] = _svg(_curves([run for run in runs if _is_priced(run)]))
        parts.append(
            "![The certified epsilon of the same runs at other deltas; the dot is the delta of the "
            "guarantee.](curves.svg)"
        )
    return "\n\n".join(parts)


def _is_priced(run: FinishedRun) -> bool:
    return run.mechanism is not None and run.record["epsilon_upper"] is not None


def _sweep(sweep: FinishedSweep, figure: str, figures: dict[str, bytes]) -> str:
    figures[figure] = sweep.figure
    lines = sweep.summary.strip().splitlines()
    heading = lines[0].lstrip("# ") if lines and lines[0].startswith("# ") else sweep.name
    rest = "\n".join(re.sub(r"^(#+ )", r"#\1", line) for line in lines[1:]).strip()
    caption = "Test AUC: mean of independent runs; the band is one standard deviation of a run."
    page = f"## Sweep: {heading}\n\n![{caption}]({figure})\n\n{rest}"
    if sweep.command:
        page += f"\n\nTo do it again:\n\n```sh\n{sweep.command}\n```"
    return page


def _not_covered(runs: Sequence[FinishedRun]) -> str:
    items = list(dict.fromkeys(item for run in runs for item in run.record["not_covered"]))
    return "## What is not covered\n\n" + report.bullets(items)


def _reproduce(runs: Sequence[FinishedRun]) -> str:
    again = [dataclasses.replace(run.config, out=Path(Path(run.name).name)) for run in runs]
    commands = "\n".join(train_command(config) for config in again)
    return (
        "## Do it again\n\nBatches and noise are drawn anew from the operating system's entropy, "
        "so the figures agree up to the noise; with `--insecure-seed` they are the same ones.\n\n"
        f"```sh\n{commands}\n```"
    )


def _where(runs: Sequence[FinishedRun], sweeps: Sequence[FinishedSweep]) -> str:
    """Returns versions and hardware, once for all runs and sweeps that share them."""
    found = [(run.environment, run.name) for run in runs]
    found += [(place, sweep.name) for sweep in sweeps for place in sweep.environments]
    places: dict[str, list[str]] = {}
    for place, name in found:
        places.setdefault(json.dumps(place, sort_keys=True), []).append(name)
    parts = ["## Where it ran"]
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


def _quality(runs: Sequence[FinishedRun]) -> Figure:
    figure = Figure(figsize=(7.2, 3.8), layout="constrained")
    axes = figure.subplots()
    for run in runs:
        record = run.record
        color = COLORS.get(record["sampler"], "#666666")
        if record["epsilon_upper"] is None:
            if not record["noise_multiplier"]:
                label = f"{record['sampler']}, without privacy"
                axes.axhline(record["test_auc"], color=color, ls="--", lw=1, label=label)
            continue
        ends = [record["epsilon_lower"], record["epsilon_upper"]]
        axes.plot(ends, [record["test_auc"]] * 2, color=color, lw=3, alpha=0.4)
        axes.plot(ends[1], record["test_auc"], "o", color=color, ms=6)
    guaranteed = [run for run in runs if run.record["epsilon_upper"] is not None]
    _one_label_each(axes, guaranteed)
    axes.set(xscale="log", xlabel=f"ε, certified ({_terms(guaranteed)})", ylabel="test AUC")
    label_ones_twos_fives(axes.xaxis)
    axes.grid(which="both", alpha=0.25, lw=0.5)
    return figure


def _one_label_each(axes: Axes, runs: Sequence[FinishedRun]) -> None:
    for name in dict.fromkeys(run.record["sampler"] for run in runs):
        axes.plot([], [], "o", color=COLORS.get(name, "#666666"), label=name)
    handles, labels = axes.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    axes.legend(once.values(), once.keys(), frameon=False, fontsize="small")


def _terms(runs: Sequence[FinishedRun]) -> str:
    """Returns the adjacency and unit of guarantees; where they differ, all."""
    terms = (f"{r.record['adjacency']} adjacency, unit: one {r.record['unit']}" for r in runs)
    return "; ".join(dict.fromkeys(terms))


def _curves(runs: Sequence[FinishedRun]) -> Figure:
    figure = Figure(figsize=(7.2, 3.8), layout="constrained")
    axes = figure.subplots()
    priced: dict[Mechanism, tuple[list[float], list[float]]] = {}
    for run in runs:
        assert run.mechanism is not None, "only priced runs have a curve"
        if run.mechanism not in priced:
            profile = run.mechanism.privacy()
            bounds = [(delta, epsilon(profile, delta).upper) for delta in DELTAS]
            finite = [(d, e) for d, e in bounds if math.isfinite(e)]
            priced[run.mechanism] = ([d for d, _ in finite], [e for _, e in finite])
        color = COLORS.get(run.record["sampler"], "#666666")
        axes.plot(*priced[run.mechanism], color=color, lw=1.4)
        axes.plot(run.record["delta"], run.record["epsilon_upper"], "o", color=color, ms=5)
    _one_label_each(axes, runs)
    axes.set(xscale="log", yscale="log", xlabel="δ", ylabel="ε, certified upper end")
    axes.set_title(_terms(runs), fontsize="medium")
    label_ones_twos_fives(axes.yaxis)
    axes.grid(which="both", alpha=0.25, lw=0.5)
    return figure


def _svg(figure: Figure) -> bytes:
    """Returns a figure as SVG; equal figures give equal bytes."""
    buffer = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "dpsgd"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()
