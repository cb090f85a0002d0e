"""`dpsgd compare`: every sampler's privacy cost over the noise, or the noise of one cost over b."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dpsgd.runs.spec import RunSpec
from experiments.cli import outputs
from experiments.cli.console import Console
from experiments.cli.options import naming
from samplers import Population
from samplers.settings import SETTINGS

_NOISE = (0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.5, 2.0)


@dataclass(frozen=True)
class Compare:
    """Print and draw the certified epsilon of every sampler over the noise multiplier.

    With --target-epsilon, compare correlated noise at that guarantee: what it leaves in the
    iterates of SGD (the root of its mean square) over b, the steps over which it is correlated,
    relative to independent noise and at the same distance moved. It is no metric of a model.
    """

    num_examples: int
    """Training examples (public)."""
    batch_size: int = 1024
    """Expected number of examples in a batch."""
    epochs: int = 1
    """Passes over the examples."""
    target_delta: float | None = None
    """Delta of the guarantee; by default min(1e-5, n^-1.1) for n examples, rounded down to one
    digit."""
    noise_multiplier: tuple[float, ...] = _NOISE
    """Where to evaluate."""
    target_epsilon: float | None = None
    """The epsilon that all have."""
    momentum: float = 0.0
    """With --target-epsilon: of SGD, in [0, 1)."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """With --target-epsilon, step sizes: falling to zero by a cosine, or all alike."""
    bands: tuple[int, ...] = ()
    """With --target-epsilon: which b, besides 1; by default powers of two up to what is
    possible, or 1,024."""
    plot: Path | None = None
    """Picture to draw, .png, .pdf or .svg."""
    overwrite: bool = False
    """Replace what is there under that name."""


def run(config: Compare) -> None:
    """Runs `dpsgd compare`."""
    if config.plot is not None:
        outputs.check(config.plot, outputs.PICTURES, "--plot", overwrite=config.overwrite)
    if not config.noise_multiplier:
        raise ValueError("--noise-multiplier needs at least one number")
    if config.target_epsilon is not None and config.noise_multiplier != _NOISE:
        raise ValueError("--noise-multiplier and --target-epsilon: leave one of them out")
    for name, default in {"momentum": 0.0, "schedule": "cosine", "bands": ()}.items():
        if config.target_epsilon is None and getattr(config, name) != default:
            raise ValueError(f"--{name} is about noise at one guarantee: give --target-epsilon")
    sampler = SETTINGS["shuffle"](batch_size=config.batch_size, epochs=config.epochs)
    asked = {"target_delta": config.target_delta, "optimizer": "sgd", "momentum": config.momentum}
    with naming(config):  # what no run has is refused
        for noise_multiplier in config.noise_multiplier:
            spec = RunSpec.of(sampler, noise_multiplier=noise_multiplier, **asked)
        if config.target_epsilon is not None:
            spec = RunSpec.of(sampler, target_epsilon=config.target_epsilon, **asked)
        delta = spec.delta_of(population := Population(config.num_examples))
        sampler.build(population, delta)
    if config.target_epsilon is None:
        _compare_epsilons(config, delta)
    else:
        _compare_noise(config, config.target_epsilon, delta)


def _compare_epsilons(config: Compare, delta: float) -> None:
    from accounting import format_delta
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


def _compare_noise(config: Compare, epsilon: float, delta: float) -> None:
    from dpsgd.noise.planning import most_bands
    from experiments.figures import noise

    samplers = noise.samplers(config.num_examples, config.batch_size, config.epochs)
    most = min(map(most_bands, samplers.values()), default=1)
    if most == 1:
        raise ValueError("an epoch has one step, and there is no b above 1: lower --batch-size")
    for b in config.bands:
        if not 1 <= b <= most:
            raise ValueError(f"--bands must be in [1, {most}] here, got {b}")
    from accounting import format_delta
    from experiments.figures.comparison import TERMS
    from experiments.figures.drawing import save

    steps = f"SGD with momentum {config.momentum:g}" if config.momentum else "SGD"
    with Console() as console:
        found = noise.curves(
            samplers,
            epsilon=epsilon,
            delta=delta,
            momentum=config.momentum,
            schedule=config.schedule,
            bands=config.bands,
            progress=console.progress,
        )
        console.line(
            f"error of the iterates of {steps}, over that of independent noise, each "
            f"with epsilon <= {epsilon} at delta {format_delta(delta)} ({TERMS})"
        )
        console.table(*noise.table(found))
        console.line("BLT m: noise of m buffers, correlated over all steps, for a fixed order.")
        if config.plot is not None:
            sizes = f"n = {config.num_examples:,}, batches of {config.batch_size:,}"
            title = f"{sizes}, E = {config.epochs}, {steps}, {config.schedule} step sizes"
            title += f"; each ε ≤ {epsilon:g}, δ = {format_delta(delta)}"
            save(noise.draw(found, title), config.plot)
            console.line(f"drawn: {config.plot}")
