"""Episodic training as published, for comparison only, and sound alternatives to it.

`accounting.profiles.multistage` has the sampler's sound profile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from accounting.profile import Bound
from accounting.profiles.multistage import (
    MultistageProfile,
    outcomes,
)
from accounting.profiles.poisson import PoissonProfile
from accounting.profiles.units_then_poisson import UnitsThenPoissonProfile


@dataclass(frozen=True)
class Estimate:
    """A number that guarantees nothing, and says so wherever it is printed.

    >>> print(Estimate(1.83, "not sound for sums"))
    ~1.83 (NO GUARANTEE: not sound for sums)
    """

    value: float
    reason: str

    def __str__(self) -> str:
        return f"~{self.value:.3g} (NO GUARANTEE: {self.reason})"


@dataclass(frozen=True)
class PublishedTheorem3:
    r"""Theorem 3 of episodic training as published: NOT SOUND for sums, for comparisons only.

    If the base mechanism is (e, d)-DP, the theorem says that sampling at rate gamma makes it

    .. math:: \left(\log(1 + \gamma (e^{e} - 1)),\; \gamma\, d\right)\text{-DP.}

    Why it is wrong: docs/explanation/multistage-sampling.md. Poisson sampling at gamma has the same
    curve, so several steps compose by it. This is no `PrivacyProfile`, so no guarantee is printed
    from it.

    Source: Tombs, Kotevska, Young, "Privacy Amplification for Episodic Training Methods", CEUR
    Vol-3318, 2022, Theorem 3.

    Raises:
      ValueError: As for `MultistageProfile`.
    """

    noise_multiplier: float
    steps: int
    draws: tuple[int, ...]
    sizes: tuple[int, ...]

    REASON = "published Theorem 3, which is not sound for sums"

    def __post_init__(self) -> None:
        MultistageProfile(self.noise_multiplier, self.steps, self.draws, self.sizes)

    def estimate_delta(self, epsilon: float) -> Estimate:
        """Returns the theorem's delta at `epsilon` >= 0."""
        return Estimate(self._poisson().delta(epsilon).upper, self.REASON)

    def estimate_epsilon(self, delta: float) -> Estimate:
        """Returns the theorem's epsilon at `delta` in (0, 1)."""
        return Estimate(self._poisson().epsilon(delta).upper, self.REASON)

    def _poisson(self) -> PoissonProfile:
        rate = outcomes(self.draws, self.sizes).succeeds
        return PoissonProfile(self.noise_multiplier, rate, self.steps)


def compare(
    noise_multiplier: float,
    steps: int,
    draws: Sequence[int],
    sizes: Sequence[int],
    delta: float,
) -> dict[str, Bound | Estimate]:
    """Returns a configuration's epsilon beside its alternatives'.

    Args:
      noise_multiplier: Noise standard deviation s, in units of the clipping norm.
      steps: Number T of releases.
      draws: Number n_j of children drawn of each drawn unit, outermost first.
      sizes: Number N_j of children of each unit above the leaf, outermost first.
      delta: Delta in (0, 1).

    Returns:
      Bounds at equal noise by name, first of the configuration; the last entry is the published
      theorem's estimate.
    """
    draws, sizes = tuple(draws), tuple(sizes)
    epsilons: dict[str, Bound | Estimate] = {}
    for level in range(len(draws), -1, -1):
        name = f"units of level {level} clipped" if level else "whole episodes clipped"
        name = "examples clipped" if level == len(draws) else name
        profile = MultistageProfile(noise_multiplier, steps, draws, sizes, level)
        epsilons[name] = profile.epsilon(delta)
    if len(draws) == 1:
        epsilons["examples clipped, by adding or removing one (not zero-out)"] = add_remove_profile(
            noise_multiplier, steps, draws, sizes
        ).epsilon(delta)
    units = outcomes(draws[:-1], sizes[:-1]).succeeds
    rate = draws[-1] / sizes[-1]
    epsilons["Poisson within units"] = UnitsThenPoissonProfile(
        noise_multiplier, steps, units, rate
    ).epsilon(delta)
    published = PublishedTheorem3(noise_multiplier, steps, draws, sizes)
    epsilons["published theorem"] = published.estimate_epsilon(delta)
    return epsilons


def add_remove_profile(
    noise_multiplier: float, steps: int, draws: tuple[int, ...], sizes: tuple[int, ...]
) -> PoissonProfile:
    """Returns one stage's profile under adding or removing an example.

    With n = `draws[0]` of N = `sizes[0]` drawn, that is Poisson sampling at n/N and half the noise.

    >>> f"{add_remove_profile(4.0, 100, draws=(1,), sizes=(10,)).epsilon(1e-5):.1f}"
    '[2.3, 2.4]'

    Source: Balle, Barthe, Gaboardi, "Privacy Amplification by Subsampling", NeurIPS 2018.

    Args:
      noise_multiplier: Noise standard deviation, in units of the clipping norm.
      steps: Number of releases.
      draws: Number n of examples drawn, as the only entry.
      sizes: Number N of examples, as the only entry.

    Raises:
      ValueError: If there are several stages: with one example less a unit may have fewer children
        than are drawn, and the sampler then has no output on the neighbour.
    """
    MultistageProfile(1.0, 1, draws, sizes)
    if len(draws) > 1:
        raise ValueError(
            "several stages have no guarantee under adding or removing an example, as a unit may "
            "be left with fewer examples than are drawn: use zero-out adjacency (MultistageProfile)"
        )
    return PoissonProfile(noise_multiplier / 2.0, draws[0] / sizes[0], steps)
