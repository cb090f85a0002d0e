"""`dpsgd compare`: every sampler's privacy cost over the noise."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dpsgd.runs.spec import RunSpec
from experiments.cli import outputs
from experiments.cli.console import Console
from experiments.cli.options import naming
from samplers import Population
from samplers.settings import SETTINGS

_NOISE = (0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.5, 2.0)


@dataclass(frozen=True)
class Compare:
    """Print and draw the certified epsilon of every sampler over the noise multiplier."""

    num_examples: int
    """Number of training examples (public)."""
    batch_size: int = 1024
    """Expected batch size."""
    epochs: int = 1
    """Number of passes over the examples."""
    target_delta: float | None = None
    """Delta of the guarantee. Default: min(1e-5, n^-1.1) for n examples, rounded down to one
    digit."""
    noise_multiplier: tuple[float, ...] = _NOISE
    """Noise multipliers to evaluate."""
    plot: Path | None = None
    """Figure to draw: .png, .pdf or .svg."""
    overwrite: bool = False
    """Replace an existing figure."""


def run(config: Compare) -> None:
    """Runs `dpsgd compare`."""
    if config.plot is not None:
        outputs.check(config.plot, outputs.PICTURES, "--plot", overwrite=config.overwrite)
    if not config.noise_multiplier:
        raise ValueError("--noise-multiplier needs at least one number")
    sampler = SETTINGS["shuffle"](batch_size=config.batch_size, epochs=config.epochs)
    with naming(config):  # what no run has is refused
        for noise_multiplier in config.noise_multiplier:
            spec = RunSpec.of(
                sampler, noise_multiplier=noise_multiplier, target_delta=config.target_delta
            )
        delta = spec.delta_of(population := Population(config.num_examples))
        sampler.build(population, delta)
    from accounting.profile import format_delta
    from experiments.figures import comparison
    from experiments.figures.drawing import blank, panels, save

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
