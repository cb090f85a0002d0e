"""Number of bands or buffers of correlated noise: the cost of each, and its error in iterates.

Bands ask a sampler that draws for a `cycle_length` of b, which amplifies less; buffers ask for a
known order. All of that is public, so choosing costs nothing. The error that is compared:
docs/explanation/correlated-noise.md. It imports no JAX.
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
from dpsgd.noise.buffered import BufferedToeplitz
from dpsgd.noise.strategies import Workload, optimized, optimized_buffers
from samplers import BallsAndBins, BatchSampler, Poisson, UserPoisson

Schedule = Literal["cosine", "constant"]
"""Step sizes of a run: those that fall to zero by a cosine, as `dpsgd train` has them, or alike."""

_COLUMNS = 256
_MOST_TRIED = 1024
_MOST_BUFFERS = 5
_GAIN = 1e-3  # of a further buffer, relative to the error, for it to be named


@dataclass(frozen=True)
class Goal:
    """The guarantee that all ways to noise a run have, and the optimizer that they disturb.

    Attributes:
      epsilon: To guarantee, > 0, at `delta`.
      delta: Of the guarantee, in (0, 0.1).
      advantage: Of a membership attack, in (0, 1): to guarantee in place of both.
      momentum: beta of SGD in [0, 1); None for an optimizer whose steps are no sums of gradients,
        as Adam's, which independent noise alone is for.
      schedule: Of its step sizes.
      release: Noise multiplier of a Gaussian release that the run ends in, if it does: the
        guarantee is for both.
    """

    epsilon: float | None = None
    delta: float | None = None
    advantage: float | None = None
    momentum: float | None = 0.0
    schedule: Schedule = "cosine"
    release: float | None = None

    def calibrated(self, noise: Noise, sampler: BatchSampler) -> float:
        """Returns the sigma of the guarantee.

        Raises:
          ValueError: if the noise has no guarantee under the sampler, or none meets it.
        """

        def privacy(sigma: float) -> PrivacyProfile:
            steps = noise.privacy(sampler, sigma)
            if self.release is None:
                return steps
            return WithGaussianReleaseProfile(steps, self.release)

        if self.advantage is not None:
            return calibrate_advantage(privacy, advantage=self.advantage)
        if self.epsilon is None or self.delta is None:
            raise ValueError("give epsilon and delta, or advantage")
        return calibrate(privacy, epsilon=self.epsilon, delta=self.delta)


@dataclass(frozen=True)
class Candidate:
    """A way to noise a run, with the guarantee that all candidates have.

    Attributes:
      sampler: What it is drawn by, with the cycle that the noise needs.
      noise: Its law.
      noise_multiplier: sigma of the guarantee.
      rmse: Of the iterates, over the distance that gradients of size C move them in one direction.
      alone: That of independent noise, or what else it is compared with.
    """

    sampler: BatchSampler
    noise: Noise
    noise_multiplier: float
    rmse: float
    alone: float

    @property
    def error(self) -> float:
        """Of the iterates, over that of independent noise: 1 where bands is 1."""
        return self.rmse / self.alone

    @property
    def bands(self) -> int:
        """Steps b over which noise is correlated; more than there are where it has buffers."""
        return self.noise.bands

    @property
    def buffered(self) -> bool:
        """Whether noise has buffers in place of bands."""
        return isinstance(self.noise, BufferedToeplitz)

    @property
    def name(self) -> str:
        """The number of bands, or BLT and that of buffers."""
        return f"BLT {self.noise.kept}" if self.buffered else f"{self.bands:,}"


def history_bytes(kept: int, num_params: int) -> int:
    """Returns what kept noise vectors take, in float32: b - 1 of bands, m of buffers.

    >>> history_bytes(15, 1_000_000)
    60000000
    """
    return 4 * kept * num_params


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
    return min(most, 1 + int(memory // history_bytes(1, num_params)))


def _is_cyclic(sampler: BatchSampler) -> TypeGuard[BallsAndBins | Poisson]:
    return isinstance(sampler, (BallsAndBins, Poisson)) and not isinstance(sampler, UserPoisson)


def tried_bands(most: int) -> list[int]:
    """Returns powers of two up to the largest number of bands, and that one, none above 1,024.

    >>> tried_bands(10), tried_bands(1)
    ([1, 2, 4, 8, 10], [1])
    """
    most = min(most, _MOST_TRIED)
    return sorted({2**k for k in range(most.bit_length())} | {most})


def tried_buffers(
    sampler: BatchSampler, *, memory: float | None = None, num_params: int | None = None
) -> list[int]:
    """Returns numbers of buffers up to 5 that fit; none unless the order is known.

    >>> from samplers import Deterministic
    >>> tried_buffers(Deterministic(1000, 100), memory=1e9, num_params=100_000_000)
    [1, 2]

    Args:
      sampler: Of the run.
      memory: As for `most_bands`.
      num_params: Likewise.
    """
    if sampler.period is None:
        return []
    most = _MOST_BUFFERS
    if memory is not None and num_params is not None:
        most = min(most, int(memory // history_bytes(1, num_params)))
    return list(range(1, most + 1))


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
    sampler: BatchSampler,
    bands: int = 1,
    *,
    buffers: int = 0,
    momentum: float = 0.0,
    schedule: Schedule = "cosine",
) -> Noise:
    """Returns noise over so many steps that disturbs the iterates of a run of SGD least.

    Args:
      sampler: Of the run.
      bands: b >= 1; independent noise if 1.
      buffers: m, for noise over all steps in place of bands; 0 for bands.
      momentum: beta in [0, 1).
      schedule: Of its step sizes.

    Raises:
      ValueError: As `workload` does, or if there are buffers and the order is not known.
    """
    run = workload(sampler, momentum=momentum, schedule=schedule)
    if not buffers:
        return optimized(run, bands) if bands > 1 else Independent()
    if sampler.period is None:
        raise ValueError(
            f"buffers correlate noise over all steps, which asks for an order that is known, and "
            f"{type(sampler).__name__} draws: take Deterministic or Shuffle with a fixed order, or "
            "bands"
        )
    return optimized_buffers(run, buffers, sampler.period)


def plan(
    sampler: BatchSampler,
    goal: Goal,
    bands: Sequence[int],
    *,
    buffers: Sequence[int] = (),
    progress: Callable[[str], None] = lambda line: None,
) -> list[Candidate]:
    """Returns a run with each number of bands and buffers at one guarantee: its error in iterates.

    >>> from samplers import Deterministic
    >>> sampler, goal = Deterministic(1000, 10), Goal(epsilon=2.0, delta=1e-3, momentum=0.9)
    >>> found = plan(sampler, goal, [1, 16], buffers=[2])
    >>> [(c.name, round(c.noise_multiplier, 3), round(c.error, 2)) for c in found]
    [('1', 1.445, 1.0), ('16', 1.445, 0.3), ('BLT 2', 1.445, 0.24)]

    Args:
      sampler: Of the run; its `cycle_length` becomes the number of bands.
      goal: The guarantee.
      bands: Numbers of bands to try, besides 1, which always is, and alone without a momentum.
      buffers: Likewise, in ascending order, where the order is known. Those that gain less than a
        thousandth of the error over fewer are left out.
      progress: Called with one line of text before each number of bands.

    Raises:
      ValueError: If a number of bands has no guarantee under the sampler, or no noise meets it.
    """
    most = most_bands(sampler)
    for b in bands:
        if not 1 <= b <= most:
            raise ValueError(f"bands must be in [1, {most}] under this sampler, got {b}")
    found, buffered = list[Candidate](), list[Candidate]()
    for b in sorted({1, *bands}) if goal.momentum is not None else [1]:
        progress(f"b = {b}")
        found.append(candidate(sampler, goal, b))
    for m in buffers if goal.momentum is not None else ():
        progress(f"{m} buffers")
        buffered.append(candidate(sampler, goal, buffers=m))
    return [replace(c, alone=found[0].rmse) for c in found + gaining(buffered)]


def candidate(sampler: BatchSampler, goal: Goal, bands: int = 1, *, buffers: int = 0) -> Candidate:
    """Returns a run with the best noise of so many bands, or buffers: compared with itself.

    Args:
      sampler: Of the run; its `cycle_length` becomes the number of bands.
      goal: The guarantee.
      bands: b >= 1.
      buffers: m, in place of bands; 0 for bands.

    Raises:
      ValueError: As `plan` does.
    """
    drawn = replace(sampler, cycle_length=bands) if _is_cyclic(sampler) else sampler
    noise: Noise = Independent()
    error = 1.0
    if goal.momentum is not None:
        momentum, schedule = goal.momentum, goal.schedule
        run = workload(drawn, momentum=momentum, schedule=schedule)
        noise = best_noise(drawn, bands, buffers=buffers, momentum=momentum, schedule=schedule)
        distance = drawn.expected_batch_size * sum(run.step_sizes or [float(run.num_steps)])
        error = math.sqrt(run.mean_square(noise, _COLUMNS)) / distance
    sigma = goal.calibrated(noise, drawn)
    return Candidate(drawn, noise, sigma, sigma * error, sigma * error)


def gaining(found: Sequence[Candidate]) -> list[Candidate]:
    """Returns those that leave less error than all before them, by a thousandth or more."""
    least, kept = math.inf, []
    for one in found:
        if one.rmse <= (1.0 - _GAIN) * least:
            kept.append(one)
            least = one.rmse
    return kept
