"""`dpsgd calibrate`: the noise that a wanted guarantee takes."""

from __future__ import annotations

from dataclasses import dataclass

import tyro

from experiments.cli.config import GuaranteeConfig
from experiments.cli.console import going_on
from experiments.cli.sampler_commands import SamplerCommand


@dataclass(frozen=True)
class CalibrateConfig(GuaranteeConfig):
    """Print the smallest noise multiplier that certifies the wanted epsilon."""

    sampler: SamplerCommand
    epsilon: float = tyro.MISSING
    """The epsilon to guarantee."""

    def check(self) -> None:
        """Raises ValueError, as the command line names them, for values without a guarantee."""
        super().check()
        if not 0 < self.epsilon < float("inf"):
            raise ValueError(f"--epsilon must be finite and > 0, got {self.epsilon}")


def run(config: CalibrateConfig) -> None:
    """Runs `dpsgd calibrate`."""
    from accounting import Bound, calibrate, format_delta
    from dpsgd.training.guarantee import ADJACENCY

    with going_on("calibrating"):
        sampler, delta = config.build()
        unit = sampler.protected_unit(config.population())
        sigma = calibrate(sampler.privacy, epsilon=config.epsilon, delta=delta)
    # Rounded up: the printed number suffices as it stands.
    printed = Bound(sigma, sigma).format_upper(".6g")
    terms = f"delta {format_delta(delta)} ({ADJACENCY} adjacency, unit: one {unit})"
    print(f"noise multiplier {printed} gives epsilon <= {config.epsilon} at {terms}")
