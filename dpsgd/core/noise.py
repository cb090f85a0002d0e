"""Noise mechanisms: the joint law of a run's noise and its privacy cost, without JAX."""

from __future__ import annotations

import abc
import dataclasses
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from accounting import PrivacyProfile
from accounting.profile import UpperEnd
from samplers import BatchSampler
from samplers.attempts import Attempt, check_attempts
from samplers.registry import code_digest

if TYPE_CHECKING:
    from dpsgd.core.state import Scales

PyTree = Any

INDEPENDENT = "independent noise"
"""Label of noise without correlation."""

_UP = 1.0 + 2.0**-51
"""Factor above 1 by two float64 roundings; rounds a noise multiplier up."""


@dataclass(frozen=True)
class Noise(abc.ABC):
    """Joint law of the noise on a run's sums, a frozen dataclass of its settings.

    In step t the release is S_t + sigma C n_t, with (n_0, n_1, ...) = M^-1 (z_0, z_1, ...) in every
    coordinate and z independent standard normals. M is lower triangular; each column has norm at
    most 1 and at most `bands` entries from the diagonal down. Independent noise has M = 1.

    If any two steps in which one example may participate are public and at least `bands` apart
    (`BatchSampler.separation`), the run costs no more than under independent noise with the same
    sampler: docs/explanation/correlated-noise.md.

    Source: C. A. Choquette-Choo, A. Ganesh, R. McKenna, H. B. McMahan, K. Rush, A. Thakurta, Z. Xu,
    (Amplified) Banded Matrix Factorization (NeurIPS 2023); S. Denisov, H. B. McMahan, K. Rush, A.
    Smith, A. Thakurta, Improved Differential Privacy for SGD via Optimal Private Linear Operators
    on Adaptive Streams (NeurIPS 2022).
    """

    @property
    def bands(self) -> int:
        """Largest number of entries of a column of M from the diagonal to its last nonzero one."""
        return 1

    @property
    def name(self) -> str:
        """Name of the class in records: `NAME` of a built-in one, or "module:qualified name"."""
        law = type(self)
        if law.__module__.partition(".")[0] == __name__.partition(".")[0]:
            return vars(law)["NAME"]
        return f"{law.__module__}:{law.__qualname__}"  # even if it has or inherits a `NAME`

    @property
    def label(self) -> str:
        """Printed name."""
        return str(self) if self.bands > 1 else INDEPENDENT

    def init(self, like: PyTree) -> PyTree:
        """Returns the noise state before the first step.

        By default it is empty.

        The state is part of `TrainState` and of checkpoints, and as secret as the root key: with it
        noise can be subtracted. Every attempt begins with a new state.
        """
        del like
        return ()

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Caches the class's `code_digest`, before its file can be edited.

        Raises:
          TypeError: If the class has its own `name` or `record`, by which a ledger names its law.
        """
        super().__init_subclass__(**arguments)
        code_digest(cls)
        own = {*vars(cls), *inspect.get_annotations(cls)}
        for attribute in sorted(own & {"name", "record"}):
            raise TypeError(
                f"{cls.__qualname__}.{attribute} would rename the noise in ledgers, which state "
                "its module and class: choose another name for it"
            )

    @abc.abstractmethod
    def add(
        self, total: PyTree, state: PyTree, key: Any, step: Any, scales: Scales
    ) -> tuple[PyTree, PyTree]:
        """Returns the noised mean and the next noise state.

        The mean is (total + sigma C n) / b, n being the noise of this step.

        Args:
          total: Sum of clipped gradients, a tree of float32 arrays.
          state: Noise state from `init` or from the previous step.
          key: uint32[4], from `RootKey.noise_key`; traced.
          step: int32 scalar, number of the update.
          scales: Scales C, sigma C and b.
        """

    def privacy(self, sampler: BatchSampler, noise_multiplier: float) -> PrivacyProfile:
        """Returns the privacy cost of a whole run.

        Args:
          sampler: Sampler of the run's batches.
          noise_multiplier: Noise multiplier sigma.

        Raises:
          ValueError: If the sampler's guarantee does not cover noise of `bands` bands.
        """
        self._check_separation(sampler)
        upper = sampler.privacy(noise_multiplier)
        if self.bands == 1 or (self.least_norm() == 1.0 and not sampler.permutes_sums):
            return upper
        raised = self._raised(sampler, noise_multiplier)
        return UpperEnd(upper, sampler.privacy(raised) if raised else None)

    def privacy_of(
        self,
        sampler: BatchSampler,
        noise_multiplier: float,
        attempts: Sequence[Attempt],
        *,
        same_rows: bool = False,
    ) -> PrivacyProfile:
        """Returns the joint privacy cost of a run's attempts.

        Correlated noise begins each attempt with other keys and a new state, so that columns are
        cut off at the end of each range: docs/explanation/partial-epochs.md.

        Args:
          sampler: Sampler of the run's batches.
          noise_multiplier: Noise multiplier sigma.
          attempts: Steps of each attempt, see `BatchSampler.privacy_of`.
          same_rows: True if all attempts draw from the same rows.

        Raises:
          ValueError: If the sampler has no guarantee for these attempts.
        """
        if list(attempts) == [range(sampler.num_steps)]:
            return self.privacy(sampler, noise_multiplier)
        self._check_separation(sampler)
        upper = sampler.privacy_of(noise_multiplier, attempts, same_rows=same_rows)
        if self.bands == 1:
            return upper
        raised, below = self._raised(sampler, noise_multiplier), None
        uncut = [
            [range(r.start, r.stop + 1 - self.bands) for r in ranges if len(r) >= self.bands]
            for ranges in check_attempts(attempts, sampler.num_steps)
        ]
        if raised and any(uncut):
            below = sampler.privacy_of(raised, [r for r in uncut if r], same_rows=same_rows)
        return UpperEnd(upper, below)

    def _raised(self, sampler: BatchSampler, noise_multiplier: float) -> float | None:
        """Returns the noise multiplier of a proved lower end; None if none is proved.

        Columns of a norm below 1, at this noise, are columns of norm 1 at more noise.
        """
        least_norm = self.least_norm()
        if sampler.permutes_sums or not least_norm:
            return None
        return noise_multiplier if least_norm == 1.0 else noise_multiplier / least_norm * _UP

    def _check_separation(self, sampler: BatchSampler) -> None:
        if self.bands > sampler.separation:
            raise ValueError(
                f"{self} is correlated over {self.bands:,} steps, more than the minimum separation "
                f"{sampler.separation} that {type(sampler).__name__} guarantees; take "
                "Independent() noise, BandedToeplitz noise of at most cycle_length bands with "
                "BallsAndBins or Poisson, or a fixed order"
            )

    def least_norm(self) -> float:
        """Returns a lower bound on every uncut column's norm.

        The end of a run cuts off its last columns. 0, the default, means that no bound is known;
        then no lower bound on the privacy cost is proved.
        """
        return float(self.bands == 1)

    def whiten(self, noises: np.ndarray) -> np.ndarray:
        """Returns M n, the standard normals z behind the noise.

        An audit compares releases with M, and M's bands and columns with the privacy cost.

        Args:
          noises: Noise n of the first steps of a run, float64[steps, coordinates].
        """
        return noises

    def record(self) -> dict[str, Any]:
        """Returns the name and settings, as ledgers and guarantees state them.

        `json.dumps` writes them; tuples among them become arrays.
        """
        return {"name": self.name, **dataclasses.asdict(self)}


@dataclass(frozen=True)
class Independent(Noise):
    """Fresh float32 Gaussian noise in every step (`dpsgd.core.gaussian`).

    >>> Independent().record()
    {'name': 'independent'}
    """

    NAME = "independent"

    def add(self, total, state, key, step, scales):
        """Returns the noised mean and the empty state, see `Noise.add`."""
        from dpsgd.core.gaussian import add_gaussian_noise

        divisor = scales.expected_batch_size
        return add_gaussian_noise(total, key, step, scales.noise_stddev, divisor=divisor), state
