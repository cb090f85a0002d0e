"""The summary of a sweep as tables: in a terminal and in Markdown."""

from __future__ import annotations

from collections.abc import Callable

from dpsgd.runs import report
from experiments.sweeps.config import AXES
from experiments.sweeps.summary import LEVEL, VOID, Panel, Result, Summary

Table = tuple[list[str], list[list[str]]]
"""Header and rows."""


def tables(panel: Panel, *, intervals: bool = False) -> dict[str, Table]:
    """Returns the tables of a panel by title: a row for each x, a column for each line.

    Args:
      panel: What to show.
      intervals: Whether epsilon is an interval, or, for a narrow page, its upper end alone.
    """
    found = {panel.headline.label: _pivot(panel, lambda r: str(panel.estimate(r)))}
    if panel.grid.tune:
        tune = panel.grid.tune
        found[f"{AXES[tune].symbol}, best on {panel.judge.rows}"] = _pivot(
            panel, lambda r: "none" if (best := r.cell.value(tune)) is None else f"{best:g}"
        )
    if panel.grid.target_epsilon or panel.grid.target_advantage:
        found["noise multiplier σ"] = _pivot(
            panel, lambda r: f"{r.noise_multiplier:.4g}" if r.noise_multiplier else "none"
        )
    if any(result.epsilon for result in panel.results):
        title = "epsilon [lower, upper]" if intervals else "proved upper bound on epsilon"
        found[f"{title} of a single run ({panel.terms})"] = _pivot(
            panel, lambda r: _epsilon(r, intervals)
        )
    return found


def verdicts(panel: Panel) -> list[str]:
    """Returns, for each epsilon, which line is best, and which cannot be told from it."""
    found: list[str] = []
    headline = panel.headline
    if panel.grid.x != "target_epsilon" or len(panel.lines) < 2 or headline.better is None:
        return found
    for x in panel.xs:
        results = {label: r for label in panel.lines if (r := panel.at(label, x)) is not None}
        here = {label: panel.estimate(result) for label, result in results.items()}
        best = max(here, key=lambda label: here[label].merit(headline))
        others = {name: found for name, found in here.items() if name != best and found.count}
        single = [name for name, found in others.items() if None in (found.sd, here[best].sd)]
        near = [
            name
            for name, found in others.items()
            if name not in single and not here[best].differs(found)
        ]
        if x is None:
            where = "without privacy"
        elif panel.insecure:
            where = f"at the noise of epsilon {x:g} ({VOID})"
        elif any(result.exceeds for result in results.values()):
            where = f"at the noise of epsilon {x:g} (which a run exceeds: see the table)"
        else:
            where = f"at epsilon {x:g}"
        verdict = f"{where}: {best} ({here[best]})"
        if near:
            verdict += f"; not told from it (Welch's t-test, {LEVEL:.0%}): {', '.join(near)}"
        if single:
            verdict += f"; not tested, as one run shows no spread: {', '.join(single)}"
        found.append(verdict)
    return found


def markdown(summary: Summary) -> str:
    """Returns the summary as a Markdown page."""
    parts = [f"# {report.escape(summary.sweep.title)}"]
    if summary.sweep.insecure_seeds:
        parts.append(f"**{VOID}**")
    parts.append(summary.setting)
    for panel in summary.panels:
        if panel.grid.title:
            parts.append(f"## {report.escape(panel.grid.title)}")
        for title, table in tables(panel, intervals=True).items():
            parts.append(f"{title[0].upper()}{title[1:]}:\n\n{report.table(*table)}")
        if found := verdicts(panel):
            parts.append(f"The best by {panel.headline.label}:\n\n{report.bullets(found)}")
    parts.append("Not covered, and otherwise to be known:\n\n" + report.bullets(summary.statements))
    return "\n\n".join(parts) + "\n"


def _epsilon(result: Result, interval: bool) -> str:
    if result.epsilon is None:
        return "none"
    return f"{result.epsilon:.3g}" if interval else result.epsilon.format_upper(".3g")


def _pivot(panel: Panel, show: Callable[[Result], str]) -> Table:
    header = [AXES[panel.grid.x].symbol, *panel.lines]
    rows = []
    for x in panel.xs:
        results = [panel.at(label, x) for label in panel.lines]
        name = "no privacy" if x is None else f"{x:g}"
        rows.append([name, *("" if result is None else show(result) for result in results)])
    return header, rows
