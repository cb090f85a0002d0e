"""`dpsgd calibrate`: the noise that a wanted guarantee takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from experiments.cli.config import GuaranteeConfig, check_target
from experiments.cli.console import going_on
from experiments.cli.sampler_commands import SamplerCommand, with_own_sampler


@dataclass(frozen=True)
class CalibrateConfig(GuaranteeConfig):
    """Print the smallest noise multiplier that certifies the wanted epsilon or attack advantage."""

    sampler: SamplerCommand
    target_epsilon: float | None = None
    """The epsilon to guarantee; give this or target_advantage."""
    target_advantage: float | None = None
    """The largest advantage of a membership attack (its true positive rate minus its false positive
    rate) to allow: with a fair prior it is then right with probability (1 + this) / 2 at most."""

    def check(self) -> None:
        """Raises ValueError, as the command line names them, for values without a guarantee."""
        super().check()
        check_target(self.target_epsilon, self.target_advantage)


def command(words: Sequence[str]) -> tuple[type[CalibrateConfig], list[str]]:
    """Returns what can be asked, of a sampler of one's own too, and the words."""
    return with_own_sampler(CalibrateConfig, words), list(words)


def run(config: CalibrateConfig) -> None:
    """Runs `dpsgd calibrate`."""
    from accounting import Bound, format_delta
    from dpsgd import Independent, Mechanism, Segment, cost
    from dpsgd.core.guarantee import ADJACENCY
    from dpsgd.runs.search import smallest_noise
    from dpsgd.runs.spec import TargetAdvantage, TargetEpsilon

    with going_on("calibrating"):
        sampler, delta = config.build()
        unit = sampler.protected_unit(config.population())
        goal: TargetAdvantage | TargetEpsilon
        if config.target_advantage is not None:
            goal = TargetAdvantage(config.target_advantage)
        else:
            assert config.target_epsilon is not None, "check() admits exactly one of the two"
            goal = TargetEpsilon(config.target_epsilon)
        sums = config.full_sums(sampler, delta, goal)
        sigma = smallest_noise(goal, delta, sampler, Independent(), sums)
        mechanism = Mechanism(sampler, sigma, 1.0, full_sums=sums)
        guarantee = cost([Segment(mechanism, unit=unit)], delta)
    # Rounded up: the printed number suffices as it stands.
    printed = Bound(sigma, sigma).format_upper(".6g")
    if sums is not None:
        printed += f", then {sums},"
    if config.target_advantage is not None:
        print(
            f"noise multiplier {printed} gives attack advantage <= {config.target_advantage}: "
            f"{guarantee.sentence()}"
        )
        return
    terms = f"delta {format_delta(delta)} ({ADJACENCY} adjacency, unit: one {unit})"
    print(
        f"noise multiplier {printed} gives epsilon <= {config.target_epsilon} at {terms}; "
        f"{guarantee.attack()}"
    )
