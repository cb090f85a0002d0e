"""`dpsgd compare`: every sampler's privacy cost over the noise."""

from __future__ import annotations

from accounting.profile import format_delta
from experiments.cli.console import Console
from experiments.cli.questions.runs import Compare
from experiments.figures import comparison
from experiments.figures.drawing import blank, panels, save


def run(config: Compare) -> None:
    """Runs `dpsgd compare`."""
    delta = config.delta
    samplers = comparison.all_samplers(config.num_examples, config.batch_size, config.epochs)
    with Console() as console:
        profiles = {name: sampler.privacy for name, sampler in samplers.items()}
        found = comparison.curves(profiles, config.noise_multiplier, delta, console.progress)
        console.line(f"epsilon [lower, upper] at delta {format_delta(delta)} ({comparison.TERMS})")
        console.table(*comparison.table(found))
        if config.plot is not None:
            figure = blank(7, 5)
            [axes] = panels(figure)
            title = f"n = {config.num_examples:,}, b = {config.batch_size:,}, E = {config.epochs}"
            comparison.draw(axes, found, f"{title}, δ = {format_delta(delta)}")
            save(figure, config.plot)
            console.line(f"drawn: {config.plot}")
