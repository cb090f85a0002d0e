"""`dpsgd epsilon`: what a run costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, dataclass

from experiments.cli.config import OfSizes
from experiments.cli.console import going_on
from experiments.cli.options import command as command_of
from experiments.cli.options import run_options


@dataclass(frozen=True, kw_only=True)
class Epsilon(OfSizes):
    """Print the certified epsilon of a run, as [lower, upper]."""

    mean_trials: float | None = None
    """Also price private random search: the best of a random number of such runs is released, and
    this is the mean of that number."""
    trials_shape: float = 0.0
    """Shape of the distribution of the number of trials: 0 is logarithmic (cheapest), 1
    geometric."""


def command(words: Sequence[str]) -> type:
    """Returns what can be asked of the sampler that words name."""
    options = run_options("target_delta", noise_multiplier=MISSING, calibration="none")
    return command_of(Epsilon, words, options=options)


def run(asked: Epsilon) -> None:
    """Runs `dpsgd epsilon`."""
    from accounting import TrialCount
    from accounting.profile import format_delta
    from dpsgd import Segment, Trials, cost
    from dpsgd.core.guarantee import ADJACENCY
    from experiments.papers import episodic
    from samplers import Multistage

    if asked.mean_trials is None and asked.trials_shape:
        raise ValueError("--trials-shape is of the search of --mean-trials: give both")
    mean = asked.mean_trials
    count = None if mean is None else TrialCount(mean, asked.trials_shape)
    with going_on("accounting"):
        found = asked.resolved()
        sampler, delta = found.mechanism.sampler, found.delta
        segment = Segment(found.mechanism, unit=sampler.protected_unit(asked.population()))
        guarantee = cost([segment], delta)
    print(guarantee.sentence())
    for note in guarantee.notes:
        print(f"note: {note}")
    if isinstance(sampler, Multistage):
        with going_on("accounting for what could be done in its place"):
            sigma = found.mechanism.noise_multiplier
            others = episodic.compare(sigma, sampler.steps, sampler.draws, asked.sizes, delta)
        print("at equal noise, protecting one example:")
        for name, bound in others.items():
            print(f"  {name}: {bound}")
    if count is not None:
        with going_on("accounting for the search"):
            best = cost([Trials(count, (segment,), "any score")], delta)
        assert best.epsilon is not None, "no run without noise is asked about"
        print(
            f"the best of {count.mean:g} such runs on average (negative binomial, shape "
            f"{count.shape:g}; nothing else released): epsilon <= {best.epsilon.format_upper()} at "
            f"delta {format_delta(delta)} ({ADJACENCY} adjacency, unit: one {guarantee.unit}); "
            f"{best.attack()}"
        )
