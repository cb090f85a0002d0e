"""`dpsgd audit`: see for oneself whether the program keeps what its guarantee promises."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from accounting import epsilon, format_delta
from dpsgd.audit.audit import audit_queries
from dpsgd.audit.black_box import BlackBoxReport, black_box_audit
from dpsgd.audit.report import AuditReport
from dpsgd.engine.algorithm import dpsgd
from dpsgd.engine.lazy.group import LazyTables
from dpsgd.runs.audit import ROWS, audit_synthetic
from dpsgd.runs.job import refinement_of
from dpsgd.runs.optimizer import ADAM, Cosine, hyperparameters, with_hyperparameters
from dpsgd.runs.recommendation import Settings
from dpsgd.runs.resolve import ResolvedRun
from dpsgd.runs.spec import Lazy
from dpsgd.runs.task import Trainable
from samplers import BatchSampler

Progress = Callable[[str], None]


def coupled(
    task: Trainable,
    run: ResolvedRun,
    claimed: BatchSampler | None = None,
    progress: Progress = lambda line: None,
) -> AuditReport:
    """Audits the program that trains a task, as a run compiles it, and the sampler's draws.

    Args:
      task: Whose model and generated rows are taken; its own rows are not read.
      run: Whose steps and noise are audited, and calibration, if it has one.
      claimed: Whose guarantee is claimed; by default that of the run's own sampler.
      progress: Called with one line of text whenever there is something to tell.
    """
    mechanism, tables = run.mechanism, None
    refinement = refinement_of(task, mechanism)
    progress("compiling and running the program that trains")
    num_steps = mechanism.sampler.num_steps
    rows: tuple[Any, ...] = ()
    if isinstance(asked := run.spec.tables, Lazy):
        tables = LazyTables(Cosine(1.0, num_steps), asked.momentum or 0.0, asked.weight_decay)
        rows = (task.generated(math.prod(mechanism.sampler.clipped_shape)),)
    algorithm = dpsgd(task.loss, ADAM, tables=tables)
    state = algorithm.init(task.init(0), mechanism, *rows)
    sizes = hyperparameters(Settings().learning_rate, num_steps)
    state = state._replace(opt_state=with_hyperparameters(state.opt_state, sizes))
    claimed = claimed or mechanism.sampler
    found = audit_synthetic(algorithm, mechanism, state, None, task.generated, claimed=claimed)
    if refinement is None:
        return found
    sums = audit_queries(refinement, mechanism, state.params, task.generated(ROWS))
    return AuditReport(found.checks + sums.checks)


def black_box(
    run: ResolvedRun,
    claimed: BatchSampler | None = None,
    *,
    trials: int,
    progress: Progress = lambda line: None,
) -> BlackBoxReport:
    """Bounds epsilon from below by many runs of the sampler and the compiled step.

    Args:
      run: Whose sampler and noise are audited.
      claimed: Whose guarantee is claimed; by default that of the run's own sampler.
      trials: Runs in each of the two worlds.
      progress: Called with one line of text whenever there is something to tell.

    Raises:
      ValueError: if there is too little noise for any finite claim, or too few trials.
    """
    mechanism, delta = run.mechanism, run.delta
    progress("accounting for the claim")
    claim = epsilon((claimed or mechanism.sampler).privacy(mechanism.noise_multiplier), delta)
    if math.isinf(claim.upper):
        raise ValueError(
            f"no finite epsilon is claimed at delta {format_delta(delta)}, so there is nothing to "
            "refute: raise --noise-multiplier or --target-delta"
        )
    return black_box_audit(mechanism, claim, delta=delta, trials=trials, progress=progress)


def plot(report: BlackBoxReport, path: Path) -> None:
    """Draws the score in both worlds, the event that was counted, and the bound with the claim.

    Args:
      report: From `black_box`.
      path: File to write; its suffix chooses the format.
    """
    from experiments.figures.drawing import blank, panels, save

    figure = blank(10, 4.2)
    left, right = panels(figure, 1, 2, width_ratios=(5, 2))
    found, claimed = report.epsilon_lower, report.claim.upper
    verdict = "VIOLATION" if report.violation else "consistent"
    figure.suptitle(
        f"{verdict}: the outputs prove ε ≥ {found:.3f}, the claim is ε ≤ "
        f"{report.claim.format_upper('.3f')} at δ = {format_delta(report.delta)}"
    )

    event, hits = report.event, (report.true_positives, report.false_positives)
    bins = _bins(report)
    worlds = [("present", report.present, "tab:blue"), ("absent", report.absent, "tab:orange")]
    for (world, scores, colour), count in zip(
        worlds, hits if event.present else hits[::-1], strict=True
    ):
        label = f"canary {world}: {count:,} of {scores.size:,} runs"
        left.hist(scores, bins, histtype="stepfilled", color=colour, alpha=0.3)
        left.hist(scores, bins, histtype="step", color=colour, label=label)
    edges = (event.threshold, bins[-1]) if event.present else (bins[0], event.threshold)
    left.axvspan(*edges, color="black", alpha=0.08, zorder=0)
    left.axvline(event.threshold, color="black", linestyle="--", linewidth=1)
    left.set(
        yscale="log",
        xlim=(bins[0], bins[-1]),
        xlabel=f"score: {event.score}",
        ylabel="runs",
        title=f"the event that was counted (shaded); canary +1, {report.game}",
    )
    left.legend(title="in the event", loc="upper right")

    bars = {"proved": found, "claimed": claimed, "detection\nlimit": report.detection_limit}
    heights = [max(0.0, value) for value in bars.values()]
    colours = ["tab:red" if report.violation else "tab:green", "tab:blue", "lightgrey"]
    right.bar_label(right.bar(list(bars), heights, color=colours), fmt="%.2f", padding=2)
    right.axhline(claimed, color="tab:blue", linestyle="--", linewidth=1)
    right.set(ylabel=f"ε at confidence {report.confidence:.0%}", ylim=(0, 1.12 * max(heights)))
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    save(figure, path)


def _bins(report: BlackBoxReport) -> list[float]:
    """Returns the edges of bins of equal width, one of which is the event's threshold."""
    both = np.concatenate([report.present, report.absent])
    low, high, threshold = float(both.min()), float(both.max()), report.event.threshold
    width = (high - low) / 80 or 1.0
    below, above = math.ceil((threshold - low) / width), math.ceil((high - threshold) / width)
    return [threshold + k * width for k in range(-max(1, below), max(1, above) + 1)]
