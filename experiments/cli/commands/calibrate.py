"""`dpsgd calibrate`: the noise that a wanted guarantee takes."""

from __future__ import annotations

from accounting import Bound
from accounting.profile import format_delta
from dpsgd import Segment, cost
from dpsgd.core.guarantee import ADJACENCY
from dpsgd.runs.resolve import resolved
from experiments.cli.console import going_on
from experiments.cli.questions.runs import Calibrate


def run(asked: Calibrate) -> None:
    """Runs `dpsgd calibrate`."""
    with going_on("calibrating"):
        population = asked.population()
        found = resolved(asked.spec().but(l2_clip_norm=1.0), population)  # any norm costs the same
        mechanism = found.mechanism
        unit = mechanism.sampler.protected_unit(population)
        guarantee = cost([Segment(mechanism, unit=unit)], found.delta)
    # Rounded up: the printed number suffices as it stands.
    sigma = Bound(mechanism.noise_multiplier, mechanism.noise_multiplier).format_upper(".6g")
    then = "" if mechanism.full_sums is None else f", then {mechanism.full_sums},"
    assert guarantee.epsilon is not None, "a calibrated run has noise"
    terms = f"delta {format_delta(found.delta)} ({ADJACENCY} adjacency, unit: one {unit})"
    said = f"epsilon <= {guarantee.epsilon.format_upper()} at {terms}; {guarantee.attack()}"
    print(f"noise multiplier {sigma}{then} gives {said}")
