"""`dpsgd epsilon`: what a run costs."""

from __future__ import annotations

from accounting import TrialCount
from accounting.profile import format_delta
from dpsgd import Segment, Trials, cost
from dpsgd.core.guarantee import ADJACENCY
from dpsgd.runs.resolve import resolved
from experiments.cli.console import going_on
from experiments.cli.questions.runs import Epsilon
from experiments.papers import episodic
from samplers import Multistage


def run(asked: Epsilon) -> None:
    """Runs `dpsgd epsilon`."""
    mean = asked.mean_trials
    count = None if mean is None else TrialCount(mean, asked.trials_shape)
    with going_on("accounting"):
        population = asked.population()
        found = resolved(asked.spec().but(l2_clip_norm=1.0), population)  # any norm costs the same
        sampler, delta = found.mechanism.sampler, found.delta
        segment = Segment(found.mechanism, unit=sampler.protected_unit(population))
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
