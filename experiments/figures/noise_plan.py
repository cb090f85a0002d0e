"""What correlated noise leaves in a run's iterates, and what it costs: error and sigma over b."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from dpsgd.noise.planning import Candidate
from experiments.figures.drawing import BUFFERED, COLORS, PALETTE
from samplers.settings import name_of


def draw(figure: Figure, found: Sequence[Candidate], best: Candidate, title: str) -> None:
    """Draws the error over the noise vectors that are kept, and the noise multiplier beside it.

    Args:
      figure: Empty; two panels are drawn into it.
      found: From `dpsgd.noise.planning.plan`.
      best: Which of them is marked.
      title: Of the whole.
    """
    buffered = [c for c in found if c.buffered]
    banded = [c for c in found if not c.buffered]
    color = COLORS.get(name_of(type(best.sampler)), PALETTE[0])
    bands, kept = (FuncFormatter(lambda x, _, k=k: f"{x - k:,.0f}") for k in (0, 1))
    left, right = figure.subplots(1, 2)
    for axes, of, label in (
        (left, lambda c: c.error, "error of the iterates, over that of b = 1"),
        (right, lambda c: c.noise_multiplier, "noise multiplier σ"),
    ):
        for some, kind, style in ((banded, "bands", "o-"), (buffered, "buffers (BLT)", "D-")):
            places, values = [c.noise.kept + 1 for c in some], [of(c) for c in some]
            drawn_in = color if some is banded else BUFFERED
            axes.plot(places, values, style, color=drawn_in, ms=4, lw=1.5, label=kind)
            if best in some:
                place = best.noise.kept + 1, of(best)
                axes.plot(*place, "o", color=drawn_in, ms=11, mfc="none", mew=1.5)
        axes.set(xscale="log", xlabel="steps b over which noise is correlated")
        if buffered:
            axes.set_xlabel("noise vectors kept: b - 1 of b bands, m of m buffers")
        axes.set_ylabel(label)
        axes.set_ylim(0, 1.12 * max(of(candidate) for candidate in found))
        ticks = [c.noise.kept + 1 for c in banded[:: -(-len(banded) // 8)]]
        axes.xaxis.set_major_locator(FixedLocator(ticks))
        axes.xaxis.set_major_formatter(kept if buffered else bands)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.grid(alpha=0.25, lw=0.5)
        axes.spines[["top", "right"]].set_visible(False)
    named = best.name if best.buffered else f"b = {best.name}"
    left.annotate(
        f"{named}: {best.error:.3g}",
        (best.noise.kept + 1, best.error),
        xytext=(6, 12),
        textcoords="offset points",
        ha="right" if best.noise.kept > 4 else "left",
    )
    if buffered:
        left.legend(frameon=False)
    figure.suptitle(f"{title}; best marked", fontsize="medium")
