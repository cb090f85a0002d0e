"""Claims about refinement: it stops where both ends agree or says why, and loses no proved end."""

import math
from dataclasses import dataclass, field

import pytest

from accounting import Bound
from accounting.algebra.refinement import GridError, refine
from accounting.profile import ContradictoryBounds, Question

NOTHING = Bound(0.0, math.inf)
TRUE_EPSILON = -math.log(1e-3)  # of the curve e^-epsilon at delta = 1e-3


@dataclass
class Exponential:
    """The curve e^-epsilon, within a factor of 1 +- (gap + resolution^2) on each grid."""

    gap: float = 0.0
    smallest: float = 0.0
    too_large: float = math.inf
    first: float = 0.4
    coarsest: float = 100.0
    gap_note: str = ""
    wrong: float = 1.0
    tried: list[float] = field(default_factory=list)

    def finest(self, point):
        return self.smallest

    def lower(self, resolution, point):
        off = max(self.gap, 0.1 * resolution**2)
        return lambda e: self.wrong * math.exp(-e) / (1.0 + off)

    def upper(self, resolution, point):
        self.tried.append(resolution)
        if resolution < max(self.smallest, 1e-6):
            raise GridError("no finer grid is computed")
        if self.too_large <= 1.0 / resolution:
            raise GridError("no finer grid is computed: it would be too large")
        off = max(self.gap, 0.1 * resolution**2)
        return lambda e: math.exp(-e) * (1.0 + off)


@pytest.mark.parametrize("tolerance", [1e-1, 1e-3, 1e-6])
def test_meeting_ends_are_refined_just_to_the_tolerance(tolerance):
    grids = Exponential()
    bound = refine(grids, Question("epsilon", 1e-3, tolerance), NOTHING)
    assert bound.lower <= TRUE_EPSILON <= bound.upper
    assert bound.width <= tolerance
    assert not bound.note
    # Each resolution is finer than the one before, and the last one was needed.
    assert grids.tried == sorted(grids.tried, reverse=True)
    assert all(0.2 * resolution**2 > tolerance for resolution in grids.tried[:-1])


def test_an_upper_end_alone_is_refined_as_far():
    for question in (Question("epsilon", 1e-3, 1e-4, True), Question("delta", 2.0, 1e-4, True)):
        grids = Exponential()
        bound = refine(
            grids, question, NOTHING if question.wanted == "epsilon" else Bound(0.0, 1.0)
        )
        truth = TRUE_EPSILON if question.wanted == "epsilon" else math.exp(-2.0)
        assert truth <= bound.upper <= truth + 1e-4 * min(1.0, truth)
        assert len(grids.tried) <= 8


@pytest.mark.parametrize("relative", [1e-3, 0.1])
def test_delta_is_as_sharp_as_asked(relative):
    bound = refine(Exponential(), Question("delta", 2.0, relative), Bound(0.0, 1.0))
    assert bound.lower <= math.exp(-2.0) <= bound.upper <= bound.lower * (1.0 + relative)
    assert not bound.note


def test_refinement_ends_at_the_finest_grid_and_says_so():
    grids = Exponential(smallest=0.1)
    bound = refine(grids, Question("epsilon", 1e-3, 1e-6), NOTHING)
    assert min(grids.tried[:-1]) >= 0.1 > grids.tried[-1]
    assert bound.note == "no finer grid is computed"


EPSILON, DELTA = Question("epsilon", 1e-3, 1e-3), Question("delta", 2.0, 1e-3)
LOOSE = "the proof is not tight"
# Grids, a question, what is known, the ends that are left, a part of the note, most grids.
WIDE = {
    "first grid too large": (Exponential(too_large=1.0), EPSILON, NOTHING, 0.256, "too large", 4),
    "no grid computed": (Exponential(too_large=0.0), EPSILON, Bound(1, 50), None, "too large", 6),
    "gap of the proof": (Exponential(0.5, gap_note=LOOSE), EPSILON, NOTHING, 0.5, LOOSE, 3),
    "gap of delta": (Exponential(0.5, gap_note=LOOSE), DELTA, Bound(0.0, 1.0), 0.5, LOOSE, 3),
    "unknown gap": (Exponential(0.3), EPSILON, NOTHING, 0.3, "rounding errors", 6),
    "sharper ends known": (Exponential(0.1), EPSILON, Bound(6.9, 6.95), None, "", 6),
}


@pytest.mark.parametrize("case", WIDE)
def test_bounds_that_stay_wide_are_proved_and_say_why(case):
    grids, question, known, gap, note, most = WIDE[case]
    bound = refine(grids, question, known)
    assert note in bound.note
    assert len(grids.tried) <= most
    if gap is None:
        assert (bound.lower, bound.upper) == (known.lower, known.upper)
    elif question == DELTA:
        assert bound.lower == pytest.approx(math.exp(-2.0) / (1.0 + gap), rel=1e-3)
        assert bound.upper == pytest.approx(math.exp(-2.0) * (1.0 + gap), rel=1e-3)
    else:
        assert bound.lower == pytest.approx(TRUE_EPSILON - math.log(1.0 + gap), abs=2e-3)
        assert bound.upper == pytest.approx(TRUE_EPSILON + math.log(1.0 + gap), abs=2e-3)


def test_contradictory_grids_are_an_error():
    with pytest.raises(ContradictoryBounds):
        refine(Exponential(wrong=2.0), Question("epsilon", 1e-3, 1e-3), NOTHING)
    with pytest.raises(ContradictoryBounds):
        refine(Exponential(), Question("epsilon", 1e-3, 1e-3), Bound(8.0, 9.0))
