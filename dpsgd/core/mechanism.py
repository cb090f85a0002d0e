"""The one description of a private mechanism: sampler, sigma and C. It computes without JAX."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from accounting import Bound, GaussianProfile, PrivacyProfile, largest_count
from accounting.profile import format_delta
from accounting.releases.gaussian_release import WithGaussianReleaseProfile
from dpsgd.core.queries import FullSums
from dpsgd.noise.base import Independent, Noise, Scales
from samplers import BatchSampler, FullBatch
from samplers.base import MAX_STEPS

SCALES = 2.0**-100, 2.0**96
"""Between these lie C and sigma C, where there is noise: float32 holds all that a step computes.

At least 2^-100: nothing that decides on clipping or noise is subnormal, which XLA takes for 0
(`dpsgd.gradients.norms`, `dpsgd.noise.gaussian`). At most 2^96: a sum of 2^31 clipped gradients,
the most there can be, is at most 2^127 and noise below 2^100, so there is no infinity, which no
noise would hide.
"""

_INDEPENDENT = Independent()
_COARSE = 0.25  # of an epsilon, a width at which nothing takes long


@dataclass(frozen=True)
class Mechanism:
    """The one description of the privacy mechanism that training and accounting both read.

    Attributes:
      sampler: Who takes part in which step, and what that costs.
      noise_multiplier: Standard deviation of the noise on the sum of clipped gradients, in units of
        `l2_clip_norm`. 0 gives a mechanism without any guarantee.
      l2_clip_norm: Bound C on the L2 norm of the gradient of each example, or of each unit that the
        sampler has clipped as one; infinite only without noise. With it, C and sigma C are within
        `SCALES`.
      noise: Its law over the steps: `Independent`, or another `Noise` whose cost is known for this
        sampler.
      full_sums: What is released after the sampler's last step, if anything: noisy sums over all
        rows, which count as further steps of the run.
    """

    sampler: BatchSampler
    noise_multiplier: float
    l2_clip_norm: float
    noise: Noise = _INDEPENDENT
    full_sums: FullSums | None = None

    def __post_init__(self) -> None:
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
            # Else two of one class were equal whatever they hold, to prices, programs and ledgers.
            raise ValueError(
                f"noise must be of a frozen dataclass, and {law.__name__} itself is none: write "
                "@dataclass(frozen=True) above the class"
            )
        for part in (self.sampler, self.noise):
            fields = dataclasses.fields(part) if dataclasses.is_dataclass(part) else ()
            if unseen := [field.name for field in fields if not field.compare]:
                raise ValueError(
                    f"{type(part).__name__} is compared without its {unseen[0]}, so that a cost "
                    "could be taken for that of another: leave out compare=False"
                )
            if fields and (hidden := _hidden(part, {field.name for field in fields})):
                raise ValueError(
                    f"{type(part).__name__} is compared without its {hidden[0]}, so that a cost "
                    "could be taken for that of another: write @dataclass(frozen=True) above the "
                    "class, and make it a field"
                )
        if self.full_sums is not None:
            if sigma == 0:
                raise ValueError("full_sums are private, and a run without noise is not")
            if self.sampler.unit != "example":
                raise ValueError(
                    f"what is protected is a {self.sampler.unit}, and in full_sums each row by "
                    "itself is clipped"
                )
            self.of_sums()  # refuses scales that float32 does not hold

    @property
    def num_steps(self) -> int:
        """Steps of the whole run: the sampler's, and one for each sum over all rows."""
        return self.sampler.num_steps + (self.full_sums.count if self.full_sums else 0)

    @property
    def signal_to_noise(self) -> float:
        """The most that gradients can add up to over the run, over the noise in their direction.

        N steps of b examples add up to N b C at most, where all of them agree, and independent
        noise to a standard deviation of sqrt(N) sigma C in any direction: their ratio is sqrt(N) b
        / sigma. It is infinite without noise, and where noise is correlated and adds up to less.
        """
        if self.noise_multiplier == 0 or self.noise.bands > 1:
            return math.inf
        size = math.sqrt(self.sampler.num_steps) * self.sampler.expected_batch_size
        return size / self.noise_multiplier

    def of_sums(self) -> Mechanism:
        """Returns the mechanism by which the sums over all rows are released.

        Raises:
          ValueError: if there are none.
        """
        sums = self.full_sums
        if sums is None:
            raise ValueError("this mechanism releases no sums over all rows")
        sampler = FullBatch(self.sampler.num_examples, sums.count)
        return Mechanism(sampler, sums.noise_multiplier, sums.l2_clip_norm)

    def privacy(self) -> PrivacyProfile:
        """Returns what a whole run costs, or raises ValueError where there is no noise."""
        if self.noise_multiplier == 0:
            raise ValueError("noise_multiplier is 0: a run without noise has no privacy guarantee")
        return self._with_sums(self.noise.privacy(self.sampler, self.noise_multiplier))

    def privacy_of(self, segments: Sequence[range]) -> PrivacyProfile:
        """Bounds from above what parts of runs cost together, see `BatchSampler.privacy_of`.

        The steps beyond the sampler's are sums over all rows: each counts, as often as it is
        released under other noise.
        """
        last = self.sampler.num_steps
        steps = [range(s.start, min(s.stop, last)) for s in segments if s and s.start < last]
        sums = sum(max(0, s.stop - max(s.start, last)) for s in segments)
        trained = None
        if steps:
            trained = self.noise.privacy_of(self.sampler, self.noise_multiplier, steps)
        return self._with_sums(trained, sums)

    def _with_sums(
        self, trained: PrivacyProfile | None, count: int | None = None
    ) -> PrivacyProfile:
        """Returns what steps cost with `count` sums, by default all."""
        sums = self.full_sums
        if sums is None or count == 0:
            assert trained is not None, "nothing is released"
            return trained
        release = sums.release(count or sums.count)
        if trained is None:
            return release
        return WithGaussianReleaseProfile(trained, release.noise_multiplier)

    def parts(self, delta: float) -> list[Bound]:
        """Bounds what parts of a whole run cost, each priced by itself: its steps, and one sum.

        Steps cost as if no batch were cut. The guarantee of the whole at `delta` is no less, see
        `dpsgd.core.cost`. Lower ends are what counts: they take little time.
        """
        parts = [self.noise.privacy(self.sampler.untruncated(), self.noise_multiplier)]
        if self.full_sums is not None:
            parts.append(GaussianProfile(self.full_sums.noise_multiplier))
        return [part.epsilon(delta, _COARSE) for part in parts]

    def until(self, *, epsilon: float, delta: float) -> Mechanism:
        """Returns this mechanism with as many epochs as `epsilon` at `delta` pays for.

        To train until epsilon is to choose the number of epochs beforehand, by cost alone: the
        largest whose whole run costs no more. That run may then be stopped early by any rule that
        looks at what was released, and still costs no more, see `dpsgd.cost`.

        >>> from samplers import Poisson
        >>> mechanism = Mechanism(Poisson(10_000, batch_size=100), 1.0, l2_clip_norm=1.0)
        >>> mechanism.until(epsilon=2.0, delta=1e-5).sampler.epochs
        12

        Args:
          epsilon: What may be spent, >= 0.
          delta: In (0, 1).

        Raises:
          ValueError: if there is no noise, or not one epoch can be paid for.
        """
        self.privacy()  # refuses where there is no noise

        def privacy(epochs: int) -> PrivacyProfile:
            trained = self.noise.privacy(self.sampler.with_epochs(epochs), self.noise_multiplier)
            return self._with_sums(trained)

        limit = min(1_000_000, MAX_STEPS // self.sampler.steps_per_epoch)
        epochs = largest_count(privacy, epsilon=epsilon, delta=delta, limit=limit)
        if epochs == 0:
            one = privacy(1).epsilon(delta)
            raise ValueError(
                f"one epoch costs epsilon {one} at delta {format_delta(delta)}, more than "
                f"{epsilon}: raise noise_multiplier"
            )
        return dataclasses.replace(self, sampler=self.sampler.with_epochs(epochs))

    def scales(self) -> Scales:
        """Returns the numbers that the compiled step reads; rounding never shortens the noise."""
        clip = np.float32(self.l2_clip_norm)
        batch = np.float32(self.sampler.expected_batch_size)
        if self.noise_multiplier == 0:
            return Scales(clip, None, batch)
        noise = self.noise_multiplier * float(clip)
        stddev = np.float32(noise)
        if float(stddev) < noise:
            stddev = np.nextafter(stddev, np.float32(np.inf))
        return Scales(clip, stddev, batch, self.noise)


def _hidden(part: Any, fields: set[str]) -> list[str]:
    """Returns the attributes of an object that are neither fields nor computed of them, once."""
    return [
        name
        for name in getattr(part, "__dict__", ())
        if name not in fields
        and not isinstance(
            inspect.getattr_static(type(part), name, None), functools.cached_property
        )
    ]
