"""Noise: a law over the steps of a run, and the privacy cost of that law. It imports no JAX."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from accounting import PrivacyProfile
from accounting.profile import UpperEnd
from samplers import BatchSampler

PyTree = Any

_UP = 1.0 + 2.0**-51
"""Two roundings, upwards."""


@dataclass(frozen=True)
class Scales:
    """A mechanism's numbers as float32 scalars; traced, so that one program serves every value.

    The law of the noise is static: each is a program of its own, and so is none.
    """

    l2_clip_norm: Any
    noise_stddev: Any
    """None without noise."""
    expected_batch_size: Any
    noise: Noise | None = None
    """None without noise, which is then left out of the program."""


@dataclass(frozen=True)
class Noise(abc.ABC):
    """The law of the noise on a run's sums, a frozen dataclass of its settings.

    In step t the release is S_t + sigma C n_t, and (n_0, n_1, ...) = M^-1 (z_0, z_1, ...) in every
    coordinate, z standard normal and independent. M is lower triangular, each of its columns has
    norm at most 1, and at most `bands` entries from the diagonal down. Independent noise has M = 1.

    Let any two steps that one example may take part in be `bands` apart or more, and these steps be
    public (`BatchSampler.separation`). Then it costs as much as the same sampler does under
    independent noise: docs/explanation/correlated-noise.md.

    Source: C. A. Choquette-Choo, A. Ganesh, R. McKenna, H. B. McMahan, K. Rush, A. Thakurta, Z. Xu,
    (Amplified) Banded Matrix Factorization (NeurIPS 2023); S. Denisov, H. B. McMahan, K. Rush, A.
    Smith, A. Thakurta, Improved Differential Privacy for SGD via Optimal Private Linear Operators
    on Adaptive Streams (NeurIPS 2022).
    """

    @property
    def bands(self) -> int:
        """Most entries of a column of M from its diagonal down; 1 for independent noise."""
        return 1

    def init(self, like: PyTree) -> PyTree:
        """Returns the state that `add` needs of earlier steps, before the first; empty by default.

        It is part of `TrainState` and of checkpoints, and as secret as the root: with it noise can
        be subtracted. An attempt that is begun anew begins with it.

        Args:
          like: Arrays, or their shapes, of the sums.
        """
        del like
        return ()

    @abc.abstractmethod
    def add(
        self, total: PyTree, state: PyTree, key: Any, step: Any, scales: Scales
    ) -> tuple[PyTree, PyTree]:
        """Returns ((total + sigma C n) / b, state after it), n being the noise of this step.

        Args:
          total: Sum of clipped gradients, a tree of float32 arrays.
          state: From `init`, or from the step before.
          key: uint32[4], from `RootKey.noise_key`; traced.
          step: int32 scalar, the number of the update.
          scales: C, sigma C and b.
        """

    def privacy(self, sampler: BatchSampler, noise_multiplier: float) -> PrivacyProfile:
        """Returns the cost of a whole run: that under independent noise.

        Raises:
          ValueError: if the sampler's guarantee does not hold for noise of so many bands.
        """
        self._check_separation(sampler)
        if self.bands == 1:
            return sampler.privacy(noise_multiplier)
        norm, whole = self.least_norm(), sampler.correlated_privacy(noise_multiplier)
        if norm == 1.0:
            return whole
        # Columns of this norm, at this noise, are columns of norm 1 at more noise.
        below = sampler.correlated_privacy(noise_multiplier / norm * _UP) if norm else None
        return UpperEnd(whole, below)

    def privacy_of(
        self, sampler: BatchSampler, noise_multiplier: float, segments: Sequence[range]
    ) -> PrivacyProfile:
        """Bounds from above the cost of parts of a run together, see `BatchSampler.privacy_of`.

        Of correlated noise, each part begins with other keys and without the state of `init`.

        Raises:
          ValueError: if there is no such guarantee.
        """
        if list(segments) == [range(sampler.num_steps)]:
            return self.privacy(sampler, noise_multiplier)
        self._check_separation(sampler)
        found = sampler.privacy_of(noise_multiplier, segments)
        return found if self.bands == 1 else UpperEnd(found)

    def _check_separation(self, sampler: BatchSampler) -> None:
        if self.bands > sampler.separation:
            raise ValueError(
                f"{self} is correlated over {self.bands:,} steps, and the guarantee of "
                f"{type(sampler).__name__} holds for noise with up to {sampler.separation}, the "
                "minimum separation of an example's steps: take Independent() noise, "
                "BandedToeplitz noise of no more bands than a cycle_length of BallsAndBins or "
                "Poisson, or a fixed order"
            )

    def least_norm(self) -> float:
        """Returns a lower bound on the norm of every column that the end of a run does not cut off.

        0, by default, where it is not known: then no lower end is proved.
        """
        return float(self.bands == 1)

    def whiten(self, noises: np.ndarray) -> np.ndarray:
        """Returns M n: z, the independent standard normals of which n is made.

        It states M to an audit, which compares releases with it, and its bands and columns with the
        cost.

        Args:
          noises: n of the first steps of a run: float64[steps, coordinates].
        """
        return noises

    def describe(self) -> dict[str, Any]:
        """Returns the settings as JSON values, from which the class makes this noise again."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Independent(Noise):
    """Fresh Gaussian noise in every step, in float32, by a fast generator (`dpsgd.noise.gaussian`).

    >>> Independent().describe()
    {}
    """

    def add(self, total, state, key, step, scales):
        """Returns the noised mean, and the empty state."""
        from dpsgd.noise.gaussian import add_gaussian_noise

        divisor = scales.expected_batch_size
        return add_gaussian_noise(total, key, step, scales.noise_stddev, divisor=divisor), state
