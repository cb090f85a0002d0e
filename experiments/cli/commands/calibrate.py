"""`dpsgd calibrate`: the noise that a wanted guarantee takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, dataclass

from experiments.cli.config import OfSizes
from experiments.cli.console import going_on
from experiments.cli.options import command as command_of
from experiments.cli.options import run_options


@dataclass(frozen=True, kw_only=True)
class Calibrate(OfSizes):
    """Print the smallest noise multiplier that certifies the wanted epsilon."""


def command(words: Sequence[str]) -> type:
    """Returns what can be asked of the sampler that words name."""
    options = run_options("target_delta", target_epsilon=MISSING, calibration="none")
    return command_of(Calibrate, words, options=options)


def run(asked: Calibrate) -> None:
    """Runs `dpsgd calibrate`."""
    from accounting import Bound
    from accounting.profile import format_delta
    from dpsgd import Segment, cost
    from dpsgd.core.guarantee import ADJACENCY

    with going_on("calibrating"):
        found = asked.resolved()
        mechanism = found.mechanism
        unit = mechanism.sampler.protected_unit(asked.population())
        guarantee = cost([Segment(mechanism, unit=unit)], found.delta)
    # Rounded up: the printed number suffices as it stands.
    sigma = Bound(mechanism.noise_multiplier, mechanism.noise_multiplier).format_upper(".6g")
    then = "" if mechanism.full_sums is None else f", then {mechanism.full_sums},"
    assert guarantee.epsilon is not None, "a calibrated run has noise"
    terms = f"delta {format_delta(found.delta)} ({ADJACENCY} adjacency, unit: one {unit})"
    said = f"epsilon <= {guarantee.epsilon.format_upper()} at {terms}; {guarantee.attack()}"
    print(f"noise multiplier {sigma}{then} gives {said}")
