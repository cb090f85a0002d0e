"""Balls-and-bins: every example falls into one of T batches, independently.

Proof for bins that are not all released: docs/explanation/partial-epochs.md.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from accounting.algebra.laplace import average_delta
from accounting.algebra.moments import NotInvertibleError
from accounting.algebra.refinement import refine
from accounting.checks import Noise, Release
from accounting.profile import Bound, Question
from accounting.profiles.bins_grids import Assignment, BinsGrids
from accounting.profiles.gaussian import GaussianProfile, WithRelease, as_redrawn, known_order
from accounting.profiles.poisson import PoissonProfile
from accounting.records import Count

_INVERTED = 1e-10
"""Smallest delta that an inverted transform resolves."""
_UP = 1e-14
"""Relative slack for the roundings of a few sums."""


@dataclass(frozen=True)
class BallsAndBinsProfile(WithRelease):
    r"""The certified profile of balls-and-bins sampling, from below and above.

    One epoch of T = `bins` batches at s = `noise_multiplier` is dominated, tightly, by

    .. math:: P = \frac{1}{T} \sum_t N(e_t, s^2 I), \qquad Q = N(0, s^2 I)

    with e_t the t-th unit vector of R^T, under zeroing-out adjacency: an average of log-normals,
    whose E-fold product, E = `epochs`, is evaluated in the algebra of `likelihood_ratio`.

    >>> f"{BallsAndBinsProfile(1.0, bins=565).epsilon(2.7e-8):.2f}"
    '[0.40, 0.41]'

    Attributes:
      noise_multiplier: s.
      bins: T >= 1.
      epochs: E >= 1.
      assignment: 'redrawn': every epoch draws new bins, and the epochs compose; 'fixed': one
        assignment is kept: one epoch at s / sqrt(E). The two cost very differently.
      release: Noise multiplier of a further Gaussian release of every example; infinite for none.

    Source: Chua et al., "Balls-and-Bins Sampling for DP-SGD", AISTATS 2025 (arXiv 2412.16802),
    Theorem 3.1 (the pair), Proposition 3.3 (never above the deterministic order's profile).

    Raises:
      ValueError: If a number is out of range, or `assignment` is neither of both.
    """

    noise_multiplier: Noise
    bins: Count
    epochs: Count = 1
    assignment: Literal["redrawn", "fixed"] = "redrawn"
    release: Release = math.inf

    @property
    def assignments(self) -> tuple[tuple[Assignment, int], ...]:
        """The draws, see `AssignmentsProfile`."""
        if self.assignment == "fixed":
            return ((((self.epochs, self.bins),), 1),)
        return ((((1, self.bins),), self.epochs),)

    def answer(self, question: Question) -> Bound:
        """Answers by the assignments that the epochs draw.

        Fixed assignments have the releases' sum for a sufficient statistic: one epoch at s /
        sqrt(E).
        """
        sigma, epochs = as_redrawn(self.noise_multiplier, self.epochs, self.assignment)
        draws = AssignmentsProfile(sigma, ((((1, self.bins),), epochs),), self.release)
        return draws.answer(question)


@dataclass(frozen=True)
class AssignmentsProfile(WithRelease):
    r"""The certified profile of an example's independent assignments to bins, from below and above.

    In each assignment the example falls into one of n bins at random, and bin t is released m_t
    times, or never. At s = `noise_multiplier` the pair, tight, is

    .. math:: P = \frac{1}{n} \sum_t N(\sqrt{m_t}\, e_t, s^2 I), \qquad Q = N(0, s^2 I)

    with e_t the t-th unit vector of R^n; assignments compose.

    >>> half = ((0, 256), (1, 256))  # half of the bins are released once
    >>> f"{AssignmentsProfile(0.5, ((half, 2),)).epsilon(1e-4):.1f}"
    '[2.7, 2.8]'

    Attributes:
      noise_multiplier: s.
      assignments: Pairs (m, number of bins that are released m times), and how many of the
        assignments have these.
      release: Noise multiplier of a further Gaussian release of every example; infinite for none.

    Raises:
      ValueError: If a number is out of range, or an assignment has no released bin.
    """

    noise_multiplier: Noise
    assignments: tuple[tuple[Assignment, Count], ...]
    release: Release = math.inf

    def __post_init__(self) -> None:
        super().__post_init__()
        counted: Counter[Assignment] = Counter()
        for assignment, count in self.assignments:
            counted[tuple(sorted(assignment))] += count
        if not counted or not all(max(pairs)[0] for pairs in counted):
            raise ValueError(
                f"each of the assignments needs a released bin, got {self.assignments}"
            )
        object.__setattr__(self, "assignments", tuple(sorted(counted.items())))

    def answer(self, question: Question) -> Bound:
        """Answers by closed forms, then by an inverted transform, then by grids.

        Each method runs only if the bounds of those before it are wide.
        """
        if (steps := self._steps()) is not None:
            return question.ask(steps)
        if all(assignment[0][1] == len(assignment) == 1 for assignment, _ in self.assignments):
            return question.ask(self._known_order())
        bound = Bound(
            question.lower_end(self.little_noise), question.ask(self._known_order()).upper
        )
        if question.wanted == "delta" and bound.width > question.width(bound):
            bound = bound.intersection(self._inverted(question.at, bound))
        grids = BinsGrids(self.noise_multiplier, self.assignments, self.release)
        return refine(grids, question, bound)

    def _inverted(self, epsilon: float, bound: Bound) -> Bound:
        """Bounds delta by inversion for one draw of equally released bins, else returns `bound`."""
        (assignment, draws), *different = self.assignments
        (times, bins), *unlike = assignment
        alone = draws == 1 and not (different or unlike) and self.release == math.inf
        if alone and bound.upper > _INVERTED:
            with contextlib.suppress(NotInvertibleError):
                sigma = self.noise_multiplier / math.sqrt(times)
                return Bound(*average_delta(sigma, bins, epsilon))
        return bound

    def _steps(self) -> PoissonProfile | None:
        """Returns the profile of draws that release one bin of n each: steps at the rate 1 / n."""
        (assignment, count), *different = self.assignments
        (times, bins), unreleased = max(assignment), dict(assignment).get(0)
        if different or bins > 1 or unreleased is None or len(assignment) > 2:
            return None
        sigma = self.noise_multiplier / math.sqrt(times)
        return PoissonProfile(sigma, 1.0 / (unreleased + 1), count, self.release)

    def _known_order(self) -> GaussianProfile:
        """Returns the profile of an example that is known to be in a most released bin."""
        times = sum(max(assignment)[0] * count for assignment, count in self.assignments)
        return known_order(self.noise_multiplier, times, self.release)

    def little_noise(self, epsilon: float) -> float:
        """Bounds delta from below, sharply at little noise.

        It counts the example's own releases in its most released bins. Proof:
        docs/explanation/balls-and-bins-at-little-noise.md.
        """
        shift = log_share = 0.0
        for assignment, count in self.assignments:
            log_bins = math.log(sum(bins for _, bins in assignment))
            shift += count * log_bins
            log_share += count * (math.log(max(assignment)[1]) - log_bins)
        loss = (epsilon + shift) * (1.0 + _UP)
        return (
            math.exp(log_share * (1.0 + _UP)) * self._known_order().delta(loss).lower * (1.0 - _UP)
        )


def bins_profile(
    noise_multiplier: float, assignments: Mapping[Assignment, int]
) -> BallsAndBinsProfile | AssignmentsProfile:
    """Returns the profile of assignments, or of whole epochs.

    In a whole epoch all bins are equal.

    Args:
      noise_multiplier: s.
      assignments: Each assignment's pairs (releases, bins), and how many of these there are.
    """
    if len(assignments) == 1:
        (assignment, count), *_ = assignments.items()
        if len(assignment) == 1 and assignment[0][0] == 1:
            return BallsAndBinsProfile(noise_multiplier, assignment[0][1], count)
        if len(assignment) == 1 and count == 1:
            return BallsAndBinsProfile(
                noise_multiplier, assignment[0][1], assignment[0][0], "fixed"
            )
    return AssignmentsProfile(noise_multiplier, tuple(assignments.items()))
