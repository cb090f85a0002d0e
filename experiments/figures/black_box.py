"""Lower bound on epsilon from the outputs of whole runs, beside the claim."""

from __future__ import annotations

import math

import numpy as np
from matplotlib.figure import Figure

from accounting.profile import format_delta
from dpsgd.audit.black_box import BlackBoxReport
from experiments.figures.drawing import blank, panels


def draw(report: BlackBoxReport) -> Figure:
    """Draws scores of both worlds, the event and bounds."""
    figure = blank(10, 4.2)
    histogram, right = panels(figure, 1, 2, width_ratios=(5, 2))
    proved, claimed = report.epsilon_lower, report.claim.upper
    verdict = "VIOLATION" if report.violation else "consistent"
    figure.suptitle(
        f"{verdict}: the outputs prove ε ≥ {report.formatted_bound}, the claim is ε ≤ "
        f"{report.claim.format_upper()} at δ = {format_delta(report.delta)}"
    )

    event, hits = report.event, (report.true_positives, report.false_positives)
    bins = _bins(report)
    worlds = [("present", report.present, "tab:blue"), ("absent", report.absent, "tab:orange")]
    for (world, scores, colour), count in zip(
        worlds, hits if event.present else hits[::-1], strict=True
    ):
        label = f"canary {world}: {count:,} of {scores.size:,} runs"
        histogram.hist(scores, bins, histtype="stepfilled", color=colour, alpha=0.3)
        histogram.hist(scores, bins, histtype="step", color=colour, label=label)
    edges = (event.threshold, bins[-1]) if event.present else (bins[0], event.threshold)
    histogram.axvspan(*edges, color="black", alpha=0.08, zorder=0)
    histogram.axvline(event.threshold, color="black", linestyle="--", linewidth=1)
    histogram.set(
        yscale="log",
        xlim=(bins[0], bins[-1]),
        xlabel=f"score: {event.score}",
        ylabel="runs",
        title=f"the event that was counted (shaded); canary +1, {report.game}",
    )
    histogram.legend(title="in the event", loc="upper right")

    bars = {"proved": proved, "claimed": claimed, "detection\nlimit": report.detection_limit}
    heights = [max(0.0, value) for value in bars.values()]
    colours = ["tab:red" if report.violation else "tab:green", "tab:blue", "lightgrey"]
    labels = [report.formatted_bound, report.claim.format_upper(), f"{report.detection_limit:.3f}"]
    right.bar_label(right.bar(list(bars), heights, color=colours), labels, padding=2)
    right.axhline(claimed, color="tab:blue", linestyle="--", linewidth=1)
    right.set(ylabel=f"ε at confidence {report.confidence:.0%}", ylim=(0, 1.12 * max(heights)))
    for axes in (histogram, right):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _bins(report: BlackBoxReport) -> list[float]:
    """Returns edges of equal bins, one of them the event's threshold."""
    scores = np.concatenate([report.present, report.absent])
    low, high, threshold = float(scores.min()), float(scores.max()), report.event.threshold
    width = (high - low) / 80 or 1.0
    below, above = math.ceil((threshold - low) / width), math.ceil((high - threshold) / width)
    return [threshold + k * width for k in range(-max(1, below), max(1, above) + 1)]
