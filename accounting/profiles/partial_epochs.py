r"""Balls-and-bins with unreleased bins: partial epochs, and draws that end early.

Proof: docs/explanation/partial-epochs.md.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from accounting.algebra.refinement import refine
from accounting.checks import check_count, check_settings
from accounting.profile import Bound, Question
from accounting.profiles.balls_and_bins import Assignment, BallsAndBinsProfile, BinsGrids
from accounting.profiles.gaussian import GaussianProfile, WithRelease, known_order
from accounting.profiles.largest_release import LargestRelease
from accounting.profiles.poisson import PoissonProfile

_UP = 1e-14
"""Relative slack for the roundings of a few sums."""


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

    noise_multiplier: float
    assignments: tuple[tuple[Assignment, int], ...]
    release: float = math.inf

    def __post_init__(self) -> None:
        check_settings(self)
        counted: Counter[Assignment] = Counter()
        for assignment, count in self.assignments:
            for times, bins in assignment:
                check_count("releases of a bin", times, at_least=0)
                check_count("bins", bins)
            counted[tuple(sorted(assignment))] += check_count("number of assignments", count)
        if not counted or not all(max(one)[0] for one in counted):
            raise ValueError("assignments must each have a bin that is released")
        object.__setattr__(self, "assignments", tuple(sorted(counted.items())))

    def answer(self, question: Question) -> Bound:
        """Answers by closed forms, and by grids where these are wide."""
        if (steps := self._steps()) is not None:
            return question.of(steps)
        bound = Bound(question.lower_end(self._little_noise), self._ceiling(question))
        grids = BinsGrids(self.noise_multiplier, self.assignments, self.release)
        return refine(grids, question, bound)

    def _steps(self) -> PoissonProfile | None:
        """Returns the profile of draws that release one bin of n each: steps at the rate 1 / n."""
        (one, count), *others = self.assignments
        (times, bins), rest = max(one), dict(one).get(0)
        if others or bins > 1 or rest is None or len(one) > 2:
            return None
        sigma = self.noise_multiplier / math.sqrt(times)
        return PoissonProfile(sigma, 1.0 / (rest + 1), count, self.release)

    def _ceiling(self, question: Question) -> float:
        """Answers for bins that are all released as often as the one that is most often."""
        most = max(max(one)[0] for one, _ in self.assignments)
        fewest = min(sum(bins for _, bins in one) for one, _ in self.assignments)
        sigma, draws = self.noise_multiplier / math.sqrt(most), sum(n for _, n in self.assignments)
        largest = LargestRelease(sigma, fewest, draws, self.release)
        return min(question.of(self._known()).upper, question.of(largest).upper)

    def _known(self) -> GaussianProfile:
        """Returns the profile of an example that is known to be in a most released bin."""
        times = sum(max(one)[0] * count for one, count in self.assignments)
        return known_order(self.noise_multiplier, times, self.release)

    def _little_noise(self, epsilon: float) -> float:
        """Bounds delta from below, by the example's own releases in its most released bins."""
        shift = log_share = 0.0
        for one, count in self.assignments:
            log_bins = math.log(sum(bins for _, bins in one))
            shift += count * log_bins
            log_share += count * (math.log(max(one)[1]) - log_bins)
        at = (epsilon + shift) * (1.0 + _UP)
        return math.exp(log_share * (1.0 + _UP)) * self._known().delta(at).lower * (1.0 - _UP)


def bins_profile(
    noise_multiplier: float, assignments: Mapping[Assignment, int]
) -> BallsAndBinsProfile | AssignmentsProfile:
    """Returns the profile of assignments, or of whole epochs where all bins are alike.

    Args:
      noise_multiplier: s.
      assignments: Each assignment's pairs (releases, bins), and how many of these there are.
    """
    if len(assignments) == 1:
        (one, count), *_ = assignments.items()
        if len(one) == 1 and one[0][0] == 1:
            return BallsAndBinsProfile(noise_multiplier, one[0][1], count)
        if len(one) == 1 and count == 1:
            return BallsAndBinsProfile(noise_multiplier, one[0][1], one[0][0], "fixed")
    return AssignmentsProfile(noise_multiplier, tuple(assignments.items()))
