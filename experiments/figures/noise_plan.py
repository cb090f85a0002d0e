"""What correlated noise leaves in a run's iterates, and what it costs: error and sigma over b."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from dpsgd.noise.planning import Candidate
from experiments.figures.drawing import COLORS, PALETTE
from samplers.settings import name_of


def draw(figure: Figure, found: Sequence[Candidate], best: Candidate, title: str) -> None:
    """Draws the error over the number of bands, and the noise multiplier beside it.

    Args:
      figure: Empty; two panels are drawn into it.
      found: From `dpsgd.noise.planning.plan`.
      best: Which of them is marked.
      title: Of the whole.
    """
    bands = [candidate.bands for candidate in found]
    color = COLORS.get(name_of(type(best.sampler)), PALETTE[0])
    left, right = figure.subplots(1, 2)
    for axes, of, label in (
        (left, lambda c: c.error, "error of the iterates, over that of b = 1"),
        (right, lambda c: c.noise_multiplier, "noise multiplier σ"),
    ):
        axes.plot(bands, [of(candidate) for candidate in found], "o-", color=color, ms=4, lw=1.5)
        axes.plot(best.bands, of(best), "o", color=color, ms=11, mfc="none", mew=1.5)
        axes.set(xscale="log", xlabel="steps b over which noise is correlated")
        axes.set_ylabel(label)
        axes.set_ylim(0, 1.12 * max(of(candidate) for candidate in found))
        ticks = bands[:: -(-len(bands) // 8)]
        axes.xaxis.set_major_locator(FixedLocator(ticks))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.0f}"))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.grid(alpha=0.25, lw=0.5)
        axes.spines[["top", "right"]].set_visible(False)
    left.annotate(
        f"b = {best.bands:,}: {best.error:.3g}",
        (best.bands, best.error),
        xytext=(6, 12),
        textcoords="offset points",
        ha="left" if best.bands == 1 else "right",
    )
    figure.suptitle(f"{title}; best marked", fontsize="medium")
