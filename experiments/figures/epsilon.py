"""Epsilon over sigma for every sampler, on the sizes of two click data sets, one epoch.

Sizes of Criteo Display Ads and Criteo Sponsored Search, batches of 1,024 and 8,192, delta = 1 /
number of training examples. Balls-and-bins has a certified interval here; Monte Carlo bounds stand
beside it. The paper's own figure 2 is `delta`.
"""

from __future__ import annotations

from dataclasses import dataclass

from matplotlib.figure import Figure

from accounting.profile import format_delta
from experiments.cli.console import Console
from experiments.figures import comparison
from experiments.figures.drawing import Picture, blank, panels

STEPS = {
    "Criteo Display Ads": {1024: 35_938, 8192: 4_492},
    "Criteo Sponsored Search": {1024: 12_500, 8192: 1_563},
}
"""Steps of one epoch, by data set and batch size."""

NOISE_MULTIPLIERS = tuple(round(0.1 + 0.05 * i, 2) for i in range(9))


@dataclass(frozen=True)
class Config(Picture):
    """Epsilon over sigma for every sampler."""

    num_samples: int = 20_000
    """Samples of the Monte Carlo bounds; their upper ends hold with probability 0.999 each."""


def draw(config: Config, console: Console) -> Figure:
    """Returns the figure; prints a table for each panel."""
    figure = blank(11, 9)
    axes = iter(panels(figure, 2, 2, sharey=True))
    for data_set, steps_by_batch in STEPS.items():
        for batch_size, steps in steps_by_batch.items():
            num_examples = steps * batch_size
            delta = 1 / num_examples
            title = f"{data_set}: batch {batch_size:,}, T = {steps:,}, δ = {format_delta(delta)}"
            console.line(f"{title} ({comparison.TERMS})")
            samplers = comparison.all_samplers(num_examples, batch_size, epochs=1)
            profiles = {
                **{name: sampler.privacy for name, sampler in samplers.items()},
                comparison.MONTE_CARLO: comparison.monte_carlo(steps, config.num_samples),
            }
            bounds = comparison.curves(profiles, NOISE_MULTIPLIERS, delta, console.progress)
            console.table(*comparison.table(bounds))
            comparison.draw(next(axes), bounds, title)
    return figure
