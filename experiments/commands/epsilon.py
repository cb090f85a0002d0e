"""`dpsgd epsilon`: what a run costs."""

from __future__ import annotations

from dataclasses import dataclass

import tyro

from experiments.config import GuaranteeConfig


@dataclass(frozen=True)
class EpsilonConfig(GuaranteeConfig):
    """Print the certified epsilon of a run, as [lower, upper]."""

    noise_multiplier: float = tyro.MISSING
    """Noise standard deviation over the clipping norm."""


def run(config: EpsilonConfig) -> None:
    """Runs `dpsgd epsilon`."""
    from dpsgd.algorithm import Mechanism
    from dpsgd.guarantee import Guarantee

    sampler, delta = config.build()
    guarantee = Guarantee.of(Mechanism(sampler, config.noise_multiplier, 1.0), delta)
    print(guarantee.sentence())
    for note in guarantee.notes:
        print(f"note: {note}")
