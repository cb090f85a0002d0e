"""What noise is: a law over the steps of a run, and what that law costs. It imports no JAX."""

from __future__ import annotations

import abc
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from accounting import PrivacyProfile
from dpsgd.noise.grid import SecureGrid, secure_grid
from dpsgd.noise.keys import RootKey
from samplers import BatchSampler

if TYPE_CHECKING:
    from dpsgd.training.mechanism import Scales

PyTree = Any


@dataclass(frozen=True)
class Noise(abc.ABC):
    """The law of the noise on a run's sums, a frozen dataclass of its settings.

    In step t the release is S_t + sigma C n_t, and (n_0, n_1, ...) = M^-1 (z_0, z_1, ...) in every
    coordinate, z standard normal and independent. M is lower triangular, each of its columns has
    norm at most 1, and at most `bands` entries from the diagonal down. Independent noise has M = 1.

    **What it costs.** M is public and invertible, so the releases are worth M S + sigma C z. An
    example that takes part in step t moves M S by column t of M times its gradient: at most C in
    norm, in the steps t to t + bands - 1. Where its steps are known, and no two of them are less
    than `bands` apart, these do not overlap, and it moves M S, participation by participation, as
    it would move sums under independent noise. Where a price counts on nobody knowing the steps,
    distance is not enough: the columns of two steps that it may have taken part in are not
    orthogonal, and less is hidden by not knowing which of them it was. A sampler says what is
    proved of its own price: `BatchSampler.separation`.

    Source: C. A. Choquette-Choo, A. Ganesh, R. McKenna, H. B. McMahan, K. Rush, A. Thakurta, Z. Xu,
    (Amplified) Banded Matrix Factorization (NeurIPS 2023); S. Denisov, H. B. McMahan, K. Rush,
    A. Smith, A. Thakurta, Improved Differential Privacy for SGD via Optimal Private Linear
    Operators on Adaptive Streams (NeurIPS 2022), on gradients that depend on earlier releases.
    """

    exact: ClassVar[bool] = False
    """Whether sums are integers and noise is exact, so that floating point leaves nothing open."""

    @property
    def bands(self) -> int:
        """Most entries of a column of M from its diagonal down; 1 for independent noise."""
        return 1

    def grid(
        self, noise_multiplier: float, l2_clip_norm: float, max_batch_size: int
    ) -> SecureGrid | None:
        """Returns the grid of integer sums, or None where sums are floats.

        Raises:
          ValueError: if there is none for such sums.
        """
        del noise_multiplier, l2_clip_norm, max_batch_size
        return None

    def key(self, root: RootKey, generation: int) -> np.ndarray:
        """Returns the key of the run's noise: uint32[4], or what `add` takes."""
        return root.noise_key(generation)

    def init(self, like: PyTree) -> PyTree:
        """Returns what `add` needs to know of earlier steps, before the first; empty by default.

        It is part of `TrainState` and of checkpoints, and as secret as the root: whoever has it can
        subtract noise.

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

        Sum, noise and divisor meet here, since what divides the noised sum in the same pass spares
        CPUs a second one.

        Args:
          total: Sum of clipped gradients: float32 leaves, or int32 ones on `scales.grid`.
          state: From `init`, or from the step before.
          key: From `key`; traced.
          step: int32 scalar, the number of the update.
          scales: C, sigma C, b and the grid.
        """

    def privacy(self, sampler: BatchSampler, noise_multiplier: float) -> PrivacyProfile:
        """Returns what a whole run costs: what it would under independent noise, or a refusal.

        Raises:
          ValueError: if the sampler's guarantee does not hold for noise of so many bands.
        """
        self._check_separation(sampler)
        return sampler.privacy(noise_multiplier)

    def privacy_of(
        self, sampler: BatchSampler, noise_multiplier: float, stretches: Sequence[range]
    ) -> PrivacyProfile:
        """Bounds from above what parts of a run cost together, see `BatchSampler.privacy_of`.

        The first steps of a run cost at most what all of them do. Of correlated noise, no other
        parts are priced: what was begun anew has noise in common with what went before.

        Raises:
          ValueError: if there is no such guarantee.
        """
        self._check_separation(sampler)
        if self.bands == 1:
            return sampler.privacy_of(noise_multiplier, stretches)
        if len(stretches) == 1 and stretches[0].start == 0:
            return sampler.privacy(noise_multiplier)
        raise ValueError(
            f"{self} is correlated over steps: a run that was begun anew has no guarantee"
        )

    def _check_separation(self, sampler: BatchSampler) -> None:
        if self.bands > sampler.separation:
            raise ValueError(
                f"{self} is correlated over {self.bands} steps, and the guarantee of "
                f"{type(sampler).__name__} holds for noise with up to {sampler.separation}: "
                "take Independent() noise, or a sampler that keeps participations apart"
            )

    def whiten(self, noises: np.ndarray) -> np.ndarray:
        """Returns M n: independent and standard normal, if n has the law that is claimed.

        Args:
          noises: n of the first steps of a run: float64[steps, coordinates].
        """
        return noises

    def describe(self) -> dict[str, Any]:
        """Returns what names this noise in a ledger, as JSON values, see `from_description`."""
        kind = type(self)
        name = _BUILT_IN.get(kind, f"{kind.__module__}:{kind.__qualname__}")
        return {"name": name, **dataclasses.asdict(self)}

    @staticmethod
    def from_description(described: Mapping[str, Any]) -> Noise:
        """Returns the noise that `describe` described.

        Raises:
          ValueError: if this version knows no such noise.
        """
        fields = dict(described)
        name = fields.pop("name", None)
        kinds = {built_in: kind for kind, built_in in _BUILT_IN.items()}
        kind = kinds[name] if name in kinds else _found(str(name))
        try:
            return kind(**fields)
        except TypeError as error:
            raise ValueError(f"there is no such {name} noise: {error}") from None


@dataclass(frozen=True)
class Independent(Noise):
    """Fresh Gaussian noise in every step, in float32, by a fast generator (`dpsgd.noise.gaussian`).

    >>> Independent().describe()
    {'name': 'independent'}
    """

    def add(self, total, state, key, step, scales):
        """Returns the noised mean, and the empty state."""
        from dpsgd.noise.gaussian import add_gaussian_noise

        divisor = scales.expected_batch_size
        return add_gaussian_noise(total, key, step, scales.noise_stddev, divisor=divisor), state


@dataclass(frozen=True)
class Secure(Noise):
    """Fresh Gaussian noise in every step that is exact and cryptographic, on exact integer sums.

    The guarantee then holds to the last bit (`dpsgd.noise.secure`), but for the draws of samplers
    of Poisson's kind: each gap between successes has its law within 2^-50
    (`samplers.randomness.bernoulli_successes`). Slower: the gradient of every example is formed,
    and noise is drawn by the CPU, in a minute for 85 million parameters.
    """

    exact: ClassVar[bool] = True

    def grid(self, noise_multiplier: float, l2_clip_norm: float, max_batch_size: int) -> SecureGrid:
        """Returns the finest grid on which the sums of a batch fit in int32."""
        return secure_grid(noise_multiplier, l2_clip_norm, max_batch_size)

    def key(self, root: RootKey, generation: int) -> np.ndarray:
        """Returns the key of the cryptographic generator: uint32[8]."""
        return root.secure_noise_key(generation)

    def add(self, total, state, key, step, scales):
        """Returns the noised mean, and the empty state."""
        import jax

        from dpsgd.noise.secure import add_secure_noise

        noised = add_secure_noise(total, key, step, scales.grid)
        return jax.tree.map(lambda leaf: leaf / scales.expected_batch_size, noised), state


_BUILT_IN: dict[type[Noise], str] = {Independent: "independent", Secure: "secure"}


def _found(name: str) -> type[Noise]:
    """Returns the class that "module:qualified name" names; what is read imports no module."""
    module, _, qualified = name.partition(":")
    kind: Any = sys.modules.get(module)
    for part in qualified.split("."):
        kind = getattr(kind, part, None)
    if not (isinstance(kind, type) and issubclass(kind, Noise)):
        raise ValueError(
            f"there is no noise {name!a:.60} here, and what it costs is not known: one from "
            "elsewhere must be imported first"
        )
    return kind
