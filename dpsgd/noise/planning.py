r"""Over how many steps noise should be correlated: what each choice costs, and leaves in iterates.

Noise of b bands adds up to less, the larger b is. Under a sampler that draws it asks for more of
it: the sampler takes `cycle_length` b, and amplifies as one with b times fewer steps. Without draws
it asks for b - 1 kept noise vectors alone. All of that is public, so choosing costs nothing.

Runs of different b may have different numbers of steps N and public divisors B, as cycles round the
steps of an epoch up. They are compared at the same sum of step sizes eta_t, so at the same
distance: what is compared is

.. math:: \sigma \, |A S^{-1}|_F \, N^{-1/2} / (B \sum_t \eta_t).

It imports no JAX.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeGuard

import numpy as np

from accounting import (
    PrivacyProfile,
    WithGaussianReleaseProfile,
    calibrate,
    calibrate_advantage,
)
from dpsgd.noise.base import Independent, Noise
from dpsgd.noise.strategies import Workload, optimized
from samplers import BallsAndBins, BatchSampler, Poisson, UserPoisson

Schedule = Literal["cosine", "constant"]
"""Step sizes of a run: those that fall to zero by a cosine, as `dpsgd train` has them, or alike."""

_COLUMNS = 256
_MOST_TRIED = 1024


@dataclass(frozen=True)
class Candidate:
    """A way to noise a run, with the guarantee that all candidates have.

    Attributes:
      sampler: What it is drawn by, with the cycle that the noise needs.
      noise: Its law.
      noise_multiplier: sigma of the guarantee.
      error: Of the iterates, over that of independent noise: 1 where bands is 1.
    """

    sampler: BatchSampler
    noise: Noise
    noise_multiplier: float
    error: float

    @property
    def bands(self) -> int:
        """Steps b over which noise is correlated."""
        return self.noise.bands


def history_bytes(bands: int, num_params: int) -> int:
    """Returns what b - 1 kept noise vectors take, in float32.

    >>> history_bytes(16, 1_000_000)
    60000000
    """
    return 4 * (bands - 1) * num_params


def most_bands(
    sampler: BatchSampler, *, memory: float | None = None, num_params: int | None = None
) -> int:
    """Returns the largest b whose guarantee is known under a sampler, and whose history fits.

    >>> most_bands(BallsAndBins(num_examples=1000, batch_size=100))
    10

    Args:
      sampler: Of the run; what it has for `cycle_length` does not matter.
      memory: Bytes for the history; None for any number. It needs `num_params`.
      num_params: Parameters of the model.
    """
    most = sampler.separation
    if _is_cyclic(sampler):
        most = sampler.num_examples // sampler.batch_size  # each group needs a batch
    if memory is None or num_params is None:
        return most
    return min(most, 1 + int(memory // history_bytes(2, num_params)))


def _is_cyclic(sampler: BatchSampler) -> TypeGuard[BallsAndBins | Poisson]:
    return isinstance(sampler, (BallsAndBins, Poisson)) and not isinstance(sampler, UserPoisson)


def tried_bands(most: int) -> list[int]:
    """Returns powers of two up to the largest number of bands, and that one, none above 1,024.

    >>> tried_bands(10), tried_bands(1)
    ([1, 2, 4, 8, 10], [1])
    """
    most = min(most, _MOST_TRIED)
    return sorted({2**k for k in range(most.bit_length())} | {most})


def workload(
    sampler: BatchSampler, *, momentum: float = 0.0, schedule: Schedule = "cosine"
) -> Workload:
    """Returns what the iterates of a run of SGD are made of.

    Args:
      sampler: Of the run.
      momentum: beta in [0, 1).
      schedule: Of its step sizes.

    Raises:
      ValueError: If the momentum is out of range, or there is no such schedule.
    """
    if schedule not in ("cosine", "constant"):
        raise ValueError(f'schedule must be "cosine" or "constant", got {schedule!r}')
    steps = sampler.num_steps
    if schedule == "constant":
        return Workload(steps, momentum)
    sizes = 0.5 * (1.0 + np.cos(np.pi * np.arange(steps) / steps))
    return Workload(steps, momentum, sizes.tolist())


def best_noise(
    sampler: BatchSampler, bands: int, *, momentum: float = 0.0, schedule: Schedule = "cosine"
) -> Noise:
    """Returns noise over so many steps that disturbs the iterates of a run of SGD least.

    Args:
      sampler: Of the run.
      bands: b >= 1; independent noise if 1.
      momentum: beta in [0, 1).
      schedule: Of its step sizes.

    Raises:
      ValueError: As `workload` does.
    """
    run = workload(sampler, momentum=momentum, schedule=schedule)
    return optimized(run, bands) if bands > 1 else Independent()


def plan(
    sampler: BatchSampler,
    bands: Sequence[int],
    *,
    epsilon: float | None = None,
    delta: float | None = None,
    advantage: float | None = None,
    momentum: float | None = 0.0,
    schedule: Schedule = "cosine",
    release: float | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> list[Candidate]:
    """Returns a run with each number of bands, at one guarantee: what noise leaves in iterates.

    >>> from samplers import Deterministic
    >>> found = plan(Deterministic(1000, 10), [1, 16], epsilon=2.0, delta=1e-3, momentum=0.9)
    >>> [(c.bands, round(c.noise_multiplier, 3), round(c.error, 2)) for c in found]
    [(1, 1.445, 1.0), (16, 1.445, 0.3)]

    Args:
      sampler: Of the run; its `cycle_length` becomes the number of bands.
      bands: What is tried, besides 1, which always is.
      epsilon: To guarantee, > 0, at `delta` in (0, 1).
      delta: As said.
      advantage: Of a membership attack, in (0, 1): to guarantee in place of both.
      momentum: beta of SGD in [0, 1); None for an optimizer whose steps are no sums of gradients,
        as Adam's: it divides by the size of what it sees in single steps, in which correlated noise
        is larger, so that 1 alone is tried.
      schedule: Of its step sizes.
      release: Noise multiplier of a Gaussian release that the run ends in, if it does: the
        guarantee is for both.
      progress: Called with one line of text before each number of bands.

    Raises:
      ValueError: If a number of bands has no guarantee under the sampler, or no noise meets it.
    """
    most = most_bands(sampler)
    for b in bands:
        if not 1 <= b <= most:
            raise ValueError(f"bands must be in [1, {most}] under this sampler, got {b}")
    tried = sorted({1, *bands}) if momentum is not None else [1]
    found: list[Candidate] = []
    for b in tried:
        progress(f"b = {b}")
        drawn = replace(sampler, cycle_length=b) if _is_cyclic(sampler) else sampler
        noise: Noise = Independent()
        error = 1.0
        if momentum is not None:
            run = workload(drawn, momentum=momentum, schedule=schedule)
            noise = optimized(run, b) if b > 1 else noise
            distance = drawn.expected_batch_size * sum(run.step_sizes or [float(run.num_steps)])
            error = math.sqrt(run.mean_square(noise, _COLUMNS)) / distance
        sigma = _calibrated(noise, drawn, release, epsilon, delta, advantage)
        found.append(Candidate(drawn, noise, sigma, sigma * error))
    return [replace(c, error=c.error / found[0].error) for c in found]


def _calibrated(
    noise: Noise,
    sampler: BatchSampler,
    release: float | None,
    epsilon: float | None,
    delta: float | None,
    advantage: float | None,
) -> float:
    """Returns the smallest sigma with which a run, and what it ends in, has the guarantee."""

    def privacy(sigma: float) -> PrivacyProfile:
        steps = noise.privacy(sampler, sigma)
        return steps if release is None else WithGaussianReleaseProfile(steps, release)

    if advantage is not None:
        return calibrate_advantage(privacy, advantage=advantage)
    if epsilon is None or delta is None:
        raise ValueError("give epsilon and delta, or advantage")
    return calibrate(privacy, epsilon=epsilon, delta=delta)
