"""`dpsgd epsilon`: what a run costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tyro

from experiments.cli.config import GuaranteeConfig
from experiments.cli.console import going_on
from experiments.cli.errors import naming_options
from experiments.cli.sampler_commands import SamplerCommand, with_own_sampler


@dataclass(frozen=True)
class EpsilonConfig(GuaranteeConfig):
    """Print the certified epsilon of a run, as [lower, upper]."""

    sampler: SamplerCommand
    noise_multiplier: float = tyro.MISSING
    """Noise standard deviation over the clipping norm."""
    mean_trials: float | None = None
    """Also account for private random search: the best of a random number of such runs, with this
    mean, of which nothing else is released."""
    trials_shape: float = 0.0
    """Shape of the law of that number: 0 is logarithmic (cheapest), 1 geometric."""

    def check(self) -> None:
        """Raises ValueError, as the command line names them, for values without a guarantee."""
        super().check()
        from dpsgd.runs.spec import NoiseMultiplier

        with naming_options(type(self)):
            NoiseMultiplier(self.noise_multiplier)  # refuses one without a guarantee
        if self.mean_trials is None and self.trials_shape:
            raise ValueError("--trials-shape is of the search of --mean-trials: give both")


def command(words: Sequence[str]) -> tuple[type[EpsilonConfig], list[str]]:
    """Returns what can be asked, of a sampler of one's own too, and the words."""
    return with_own_sampler(EpsilonConfig, words), list(words)


def run(config: EpsilonConfig) -> None:
    """Runs `dpsgd epsilon`."""
    from accounting import Bound, TrialCount, format_delta
    from accounting.estimates import episodic
    from dpsgd import Mechanism, NoiseMultiplier, Segment, Trials, cost
    from dpsgd.core.guarantee import ADJACENCY
    from samplers import Multistage

    with going_on("accounting"):
        sampler, delta = config.build()
        unit = sampler.protected_unit(config.population())
        trials = config.mean_trials
        count = None if trials is None else TrialCount(trials, config.trials_shape)
        sums = config.full_sums(sampler, delta, NoiseMultiplier(config.noise_multiplier))
        mechanism = Mechanism(sampler, config.noise_multiplier, 1.0, full_sums=sums)
        segment = Segment(mechanism, unit=unit)
        guarantee = cost([segment], delta)
    print(guarantee.sentence())
    for note in guarantee.notes:
        print(f"note: {note}")
    if isinstance(sampler, Multistage):
        with going_on("accounting for what could be done in its place"):
            found = episodic.compare(
                config.noise_multiplier, sampler.steps, sampler.draws, config.sizes, delta
            )
        print("at equal noise, protecting one example:")
        for name, bound in found.items():
            print(f"  {name}: {bound:.4g}" if isinstance(bound, Bound) else f"  {name}: {bound}")
    if count is not None:
        with going_on("accounting for the search"):
            best = cost([Trials(count, (segment,), "any score")], delta)
        assert best.epsilon is not None, "check() admits no run without noise"
        upper = best.epsilon.format_upper()
        print(
            f"the best of {count.mean:g} such runs on average (negative binomial, shape "
            f"{count.shape:g}; nothing else released): epsilon <= {upper} at delta "
            f"{format_delta(delta)} ({ADJACENCY} adjacency, unit: one {guarantee.unit}); "
            f"{best.attack()}"
        )
