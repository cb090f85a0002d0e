"""`dpsgd compare`: every sampler's privacy cost over the noise."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from experiments.cli import outputs
from experiments.cli.config import check_default_batch_size
from experiments.cli.console import Console


@dataclass(frozen=True)
class CompareConfig:
    """Print and draw the certified epsilon of every sampler over the noise multiplier."""

    num_examples: int
    """Training examples (public)."""
    batch_size: int = 1024
    """Expected number of examples in a batch."""
    epochs: int = 1
    """Passes over the examples."""
    delta: float | None = None
    """Delta of the guarantee; by default 1 / num_examples."""
    noise_multipliers: tuple[float, ...] = (0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.5, 2.0)
    """Where to evaluate."""
    out: Path | None = None
    """Picture to draw, .png, .pdf or .svg."""
    overwrite: bool = False
    """Replace what is there under that name."""


def run(config: CompareConfig) -> None:
    """Runs `dpsgd compare`."""
    if config.out is not None:
        outputs.check(config.out, outputs.PICTURES, "--out", overwrite=config.overwrite)
    if not config.noise_multipliers:
        raise ValueError("--noise-multipliers needs at least one number")
    for i, noise_multiplier in enumerate(config.noise_multipliers):
        if not 0 < noise_multiplier < float("inf"):
            raise ValueError(
                f"--noise-multipliers must be finite and > 0, number {i + 1} is {noise_multiplier}"
            )
    if config.delta is not None and not 0 < config.delta < 1:
        raise ValueError(f"--delta must lie in (0, 1), got {config.delta}")
    check_default_batch_size(config.batch_size, config.num_examples)
    from matplotlib.figure import Figure

    from accounting import format_delta
    from experiments.figures import comparison
    from experiments.figures.drawing import save

    samplers = comparison.all_samplers(config.num_examples, config.batch_size, config.epochs)
    delta = 1 / config.num_examples if config.delta is None else config.delta
    with Console() as console:
        found = comparison.curves(
            comparison.prices(samplers), config.noise_multipliers, delta, console.progress
        )
        console.line(f"epsilon [lower, upper] at delta {format_delta(delta)} ({comparison.TERMS})")
        console.table(*comparison.table(found))
        if config.out is not None:
            figure = Figure(figsize=(7, 5), layout="constrained")
            title = f"n = {config.num_examples:,}, b = {config.batch_size:,}, E = {config.epochs}"
            comparison.draw(figure.subplots(), found, f"{title}, δ = {format_delta(delta)}")
            save(figure, config.out)
            console.line(f"drawn: {config.out}")
