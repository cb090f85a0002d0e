"""Mechanism: the one description of sampler, sigma and C, without JAX."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from accounting import Bound, GaussianProfile, PrivacyProfile, largest_count
from accounting.profile import format_delta
from accounting.releases import with_gaussian_release
from dpsgd.core.noise import Independent, Noise
from dpsgd.core.queries import FullSums
from samplers import BatchSampler, FullBatch
from samplers.plans import MAX_STEPS

if TYPE_CHECKING:
    from dpsgd.core.state import Scales

SCALES = 2.0**-100, 2.0**96
"""Range of C and sigma C under noise, in which float32 holds every value of a step.

Above 2^-100 no value that decides on clipping or noise is subnormal, which XLA takes for 0
(`dpsgd.gradients.norms`, `dpsgd.core.gaussian`). Below 2^96 a sum of 2^31 clipped gradients, the
largest batch, is at most 2^127 and noise below 2^100, so that no infinity escapes the noise.
"""

_INDEPENDENT = Independent()
_COARSE = 0.25  # of an epsilon, a width at which nothing takes long


@dataclass(frozen=True)
class Mechanism:
    """Privacy mechanism that training and accounting both read.

    Attributes:
      sampler: Sampler of the batches, which also states their privacy cost.
      noise_multiplier: Standard deviation of the noise on the sum of clipped gradients, in units of
        `l2_clip_norm`. 0 gives a mechanism without any guarantee.
      l2_clip_norm: Bound C on the L2 norm of the gradient of each example, or of each unit that the
        sampler clips as one; infinite only without noise. Under noise, C and sigma C are within
        `SCALES`.
      noise: Law of the noise over the steps: `Independent`, or another `Noise` whose cost is known
        for this sampler.
      full_sums: Noisy sums over all rows, released after the sampler's last step and counted as
        further steps of the run; None without.
    """

    sampler: BatchSampler
    noise_multiplier: float
    l2_clip_norm: float
    noise: Noise = _INDEPENDENT
    full_sums: FullSums | None = None

    def __post_init__(self) -> None:
        for name, kind in (("sampler", BatchSampler), ("noise", Noise), ("full_sums", FullSums)):
            value = getattr(self, name)
            if not (isinstance(value, kind) or (name == "full_sums" and value is None)):
                raise TypeError(f"{name} must be a {kind.__name__}, got {value!r:.60}")
        sigma, clip = self.noise_multiplier, self.l2_clip_norm
        if not (sigma >= 0 and math.isfinite(sigma)):
            raise ValueError(f"noise_multiplier must be finite and >= 0, got {sigma}")
        if not clip > 0:
            raise ValueError(f"l2_clip_norm must be > 0, got {clip}")
        if sigma > 0 and not math.isfinite(clip):
            raise ValueError("noise needs a finite l2_clip_norm: its scale is their product")
        low, high = SCALES
        if sigma > 0 and not (low <= clip <= high and low <= sigma * clip <= high):
            raise ValueError(
                f"l2_clip_norm {clip} and noise_multiplier * l2_clip_norm = {sigma * clip} must be "
                f"in [{low:.1e}, {high:.1e}], where float32 neither loses noise nor overflows; "
                "rescale the loss"
            )
        law = type(self.noise)
        if not getattr(vars(law).get("__dataclass_params__"), "frozen", False):
            # Otherwise any two of one class would be equal to prices, programs and ledgers.
            raise ValueError(
                f"noise is of the class {law.__name__}, not a frozen dataclass; write "
                "@dataclass(frozen=True) above the class"
            )
        for value in (self.sampler, self.noise):
            fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
            if uncompared := [field.name for field in fields if not field.compare]:
                raise ValueError(
                    f"{type(value).__name__} is compared without its {uncompared[0]}, so that its "
                    "cost could be mistaken for another's; leave out compare=False"
                )
            if fields and (hidden := _hidden(value, {field.name for field in fields})):
                raise ValueError(
                    f"{type(value).__name__} is compared without its {hidden[0]}, so that its "
                    "cost could be mistaken for another's; write @dataclass(frozen=True) above the "
                    "class, and make it a field"
                )
        if self.full_sums is not None:
            if sigma == 0:
                raise ValueError("full_sums need noise, got noise_multiplier=0; leave them out")
            if self.sampler.unit != "example":
                raise ValueError(
                    f"full_sums clip each row alone, but the sampler protects a "
                    f"{self.sampler.unit}; leave out full_sums"
                )
            self.sums_mechanism()  # refuses scales that float32 does not hold

    @property
    def num_steps(self) -> int:
        """Number of the run's steps and sums over all rows."""
        return self.sampler.num_steps + (self.full_sums.count if self.full_sums else 0)

    @property
    def signal_to_noise(self) -> float:
        """Largest ratio of the run's summed gradients to noise.

        The noise is that in the direction of the gradients.

        N steps of b agreeing examples add up to N b C, and independent noise to a standard
        deviation of sqrt(N) sigma C in any direction: the ratio is sqrt(N) b / sigma. It is
        infinite without noise, and for correlated noise, which adds up to less.
        """
        if self.noise_multiplier == 0 or self.noise.bands > 1:
            return math.inf
        size = math.sqrt(self.sampler.num_steps) * self.sampler.expected_batch_size
        return size / self.noise_multiplier

    def sums_mechanism(self) -> Mechanism:
        """Returns the mechanism that releases the sums over all rows.

        Raises:
          ValueError: If the mechanism has no full sums.
        """
        sums = self.full_sums
        if sums is None:
            raise ValueError("this mechanism releases no sums over all rows")
        sampler = FullBatch(self.sampler.num_examples, sums.count)
        return Mechanism(sampler, sums.noise_multiplier, sums.l2_clip_norm)

    def privacy(self) -> PrivacyProfile:
        """Returns the privacy cost of a whole run.

        Raises:
          ValueError: If there is no noise.
        """
        if self.noise_multiplier == 0:
            raise ValueError("noise_multiplier is 0: a run without noise has no privacy guarantee")
        return self._with_sums(self.noise.privacy(self.sampler, self.noise_multiplier))

    def privacy_of(self, attempts: Sequence[range], *, same_rows: bool = False) -> PrivacyProfile:
        """Returns the joint privacy cost of a run's attempts.

        See `BatchSampler.privacy_of`. Steps beyond the sampler's are sums over all rows: each
        counts once per release under other noise.

        Args:
          attempts: Range of steps of each attempt.
          same_rows: True if all attempts draw from the same rows.
        """
        last = self.sampler.num_steps
        steps = [range(s.start, min(s.stop, last)) for s in attempts if s and s.start < last]
        sums = sum(max(0, s.stop - max(s.start, last)) for s in attempts)
        trained = None
        if steps:
            trained = self.noise.privacy_of(
                self.sampler, self.noise_multiplier, steps, same_rows=same_rows
            )
        return self._with_sums(trained, sums)

    def _with_sums(
        self, trained: PrivacyProfile | None, count: int | None = None
    ) -> PrivacyProfile:
        """Returns the cost of steps with `count` sums, by default all."""
        sums = self.full_sums
        if sums is None or count == 0:
            assert trained is not None, "nothing is released"
            return trained
        release = sums.release(count or sums.count)
        if trained is None:
            return release
        return with_gaussian_release(trained, release.noise_multiplier)

    def parts(self, delta: float) -> list[Bound]:
        """Bounds the cost of a run's steps and one sum.

        Steps cost as if no batch were truncated. The guarantee of the whole at `delta` is no less,
        see `dpsgd.core.cost`, which needs the lower ends alone: they are cheap.
        """
        profiles = [self.noise.privacy(self.sampler.untruncated(), self.noise_multiplier)]
        if self.full_sums is not None:
            profiles.append(GaussianProfile(self.full_sums.noise_multiplier))
        return [profile.epsilon(delta, _COARSE) for profile in profiles]

    def until(self, *, epsilon: float, delta: float) -> Mechanism:
        """Returns this mechanism with the most epochs within `epsilon`.

        Training until epsilon means choosing the number of epochs beforehand, by cost alone: the
        largest whose whole run costs at most `epsilon`. Any rule that looks at releases may then
        stop the run early, at no further cost, see `dpsgd.cost`.

        >>> from samplers import Deterministic
        >>> mechanism = Mechanism(Deterministic(10_000, batch_size=100), 4.0, l2_clip_norm=1.0)
        >>> mechanism.until(epsilon=2.0, delta=1e-5).sampler.epochs
        4

        Args:
          epsilon: Budget epsilon >= 0.
          delta: Probability delta of the guarantee, in (0, 1).

        Raises:
          ValueError: If there is no noise, or one epoch costs more.
        """
        self.privacy()  # refuses where there is no noise

        def privacy(epochs: int) -> PrivacyProfile:
            """Returns the privacy cost of a run of `epochs` epochs."""
            trained = self.noise.privacy(self.sampler.with_epochs(epochs), self.noise_multiplier)
            return self._with_sums(trained)

        limit = min(1_000_000, MAX_STEPS // self.sampler.steps_per_epoch)
        epochs = largest_count(privacy, epsilon=epsilon, delta=delta, limit=limit)
        if epochs == 0:
            price = privacy(1).epsilon(delta)
            raise ValueError(
                f"one epoch costs epsilon {price} at delta {format_delta(delta)}, more than "
                f"{epsilon}: raise noise_multiplier"
            )
        return dataclasses.replace(self, sampler=self.sampler.with_epochs(epochs))

    def scales(self) -> Scales:
        """Returns the compiled step's scales, with noise rounded up."""
        from dpsgd.core.state import Scales

        clip = np.float32(self.l2_clip_norm)
        batch = np.float32(self.sampler.expected_batch_size)
        if self.noise_multiplier == 0:
            return Scales(clip, None, batch)
        noise = self.noise_multiplier * float(clip)
        stddev = np.float32(noise)
        if float(stddev) < noise:
            stddev = np.nextafter(stddev, np.float32(np.inf))
        return Scales(clip, stddev, batch, self.noise)


def _hidden(component: Any, fields: set[str]) -> list[str]:
    """Returns the names of attributes that are neither fields nor cached properties."""
    return [
        name
        for name in getattr(component, "__dict__", ())
        if name not in fields
        and not isinstance(
            inspect.getattr_static(type(component), name, None), functools.cached_property
        )
    ]
