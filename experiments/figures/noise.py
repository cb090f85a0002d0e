"""What does noise leave in a run's iterates? Each sampler's error over bands, at one guarantee.

Under samplers that draw, b bands ask for a cycle of b steps, and the noise of b times fewer steps;
in a fixed order they ask for memory alone, and buffers (BLT) for less of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from dpsgd.noise.planning import (
    Candidate,
    Goal,
    Schedule,
    candidate,
    gaining,
    most_bands,
    tried_bands,
    tried_buffers,
)
from experiments.figures.comparison import all_samplers
from experiments.figures.drawing import (
    BUFFERED,
    COLORS,
    PALETTE,
    blank,
    label_ones_twos_fives,
    legend,
    panels,
)
from experiments.figures.records import computed
from samplers import BatchSampler

_WORDS = {"poisson": "cyclic Poisson", "balls-and-bins": "cyclic balls-and-bins"}


@dataclass(frozen=True)
class NoiseCurve:
    """Runs of one sampler, at one guarantee.

    Attributes:
      name: Of the sampler.
      banded: With 1, 2, ... bands.
      buffered: With 1, 2, ... buffers, as long as more gain; none where the sampler draws.
    """

    name: str
    banded: tuple[Candidate, ...]
    buffered: tuple[Candidate, ...]


def samplers(num_examples: int, batch_size: int, epochs: int) -> dict[str, BatchSampler]:
    """Returns the samplers under which noise may be correlated, by their names."""
    found = all_samplers(num_examples, batch_size, epochs)
    return {name: sampler for name, sampler in found.items() if most_bands(sampler) > 1}


def curves(
    of: dict[str, BatchSampler],
    *,
    epsilon: float,
    delta: float,
    momentum: float,
    schedule: Schedule,
    bands: Sequence[int] = (),
    progress: Callable[[str], None] = lambda line: None,
) -> list[NoiseCurve]:
    """Returns the runs of each sampler, compared with independent noise where that does best.

    They are computed on all processors.

    Raises:
      ValueError: If a number of bands is not possible under one of the samplers.
    """
    most = min(map(most_bands, of.values()))
    if wrong := [b for b in bands if not 1 <= b <= most]:
        raise ValueError(f"bands must be in [1, {most}], got {wrong[0]}")
    tried = sorted({1, *(bands or tried_bands(most))})
    jobs = [(name, b, 0) for name in of for b in tried]
    jobs += [(name, 1, m) for name, sampler in of.items() for m in tried_buffers(sampler)]
    goal = Goal(epsilon, delta, momentum=momentum, schedule=schedule)
    found = computed(partial(_candidate, of, goal), jobs, progress)
    alone = min(run.rmse for run in found.values() if run.bands == 1)
    runs = {job: replace(run, alone=alone) for job, run in found.items()}
    return [
        NoiseCurve(
            name,
            tuple(runs[name, b, 0] for b in tried),
            tuple(gaining([runs[name, 1, m] for m in tried_buffers(of[name])])),
        )
        for name in of
    ]


def _candidate(of: dict[str, BatchSampler], goal: Goal, job: tuple[str, int, int]) -> Candidate:
    name, bands, buffers = job
    return candidate(of[name], goal, bands, buffers=buffers)


def table(found: Sequence[NoiseCurve]) -> tuple[list[str], list[list[str]]]:
    """Returns (header, rows): a row for each number of bands and buffers, errors and sigmas."""
    header = ["b"]
    for curve in found:
        header += [_WORDS.get(curve.name, curve.name), "sigma"]
    rows = []
    for kind in ("banded", "buffered"):
        for name in dict.fromkeys(c.name for curve in found for c in getattr(curve, kind)):
            row = [name]
            for curve in found:
                of = next((c for c in getattr(curve, kind) if c.name == name), None)
                row += [f"{of.error:.4f}", f"{of.noise_multiplier:.4g}"] if of else ["", ""]
            rows.append(row)
    return header, rows


def draw(found: Sequence[NoiseCurve], title: str, best: Candidate | None = None) -> Figure:
    """Returns the figure of errors over the bands, and of the noise multipliers beside them.

    Buffers are drawn where bands have their memory: m of them at b = m + 1.
    """
    figure = blank(10, 4.4, title if best is None else f"{title}; best marked")
    left, right = panels(figure, 1, 2)
    _draw_runs(left, found, lambda c: c.error, best)
    _draw_runs(right, found, lambda c: c.noise_multiplier, best)
    left.axhline(1.0, color="#888888", lw=1.2, ls="--", zorder=1, label="independent noise")
    left.set_ylabel("error of the iterates, over independent noise's")
    right.set_ylabel("noise multiplier σ")
    legend(left)
    left.set_yscale("log")
    label_ones_twos_fives(left.yaxis)
    right.set_ylim(bottom=0)
    if best is not None:
        name = best.name if best.buffered else f"b = {best.name}"
        place = best.noise.kept + 1, best.error
        side = "right" if best.noise.kept > 4 else "left"
        left.annotate(
            f"{name}: {best.error:.3g}", place, (6, 12), textcoords="offset points", ha=side
        )
    return figure


def _draw_runs(
    axes: Axes,
    found: Sequence[NoiseCurve],
    of: Callable[[Candidate], float],
    best: Candidate | None,
) -> None:
    # Poisson and balls-and-bins lie next to each other: open circles let the lower one be seen.
    styles = {"deterministic": ("-", "o", "full"), "poisson": ("-", "s", "none")}
    for curve in found:
        line, marker, fill = styles.get(curve.name, ("--", "o", "full"))
        name, count = _WORDS.get(curve.name, f"{curve.name} order"), len(curve.buffered)
        buffers = "1 buffer" if count == 1 else f"1 to {count} buffers"
        banded: dict[str, Any] = {"color": COLORS.get(curve.name, PALETTE[0]), "marker": marker}
        banded |= {"ls": line, "fillstyle": fill, "label": f"{name}, bands"}
        buffered = {"color": BUFFERED, "marker": "D", "label": f"{curve.name} order, {buffers}"}
        for runs, look in ((curve.banded, banded), (curve.buffered, buffered)):
            places, values = [c.noise.kept + 1 for c in runs], [of(c) for c in runs]
            if runs:
                axes.plot(places, values, ms=7 if fill == "none" else 4, lw=1.5, **look)
            if best in runs:
                at = runs.index(best)
                axes.plot(places[at], values[at], "o", color=look["color"], ms=11, mfc="none")
    axes.set(xscale="log", xlabel="steps b over which noise is correlated: b - 1 vectors are kept")
    axes.xaxis.set_major_locator(LogLocator(base=2))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
