"""What every profile holds: both ends in order, each proved, and never cheaper for less noise."""

from __future__ import annotations

import dataclasses
import functools

import pytest
from checked_types import assert_refused

import accounting
from accounting import (
    BallsAndBinsProfile,
    GaussianProfile,
    MultistageProfile,
    PoissonProfile,
    PrivacyProfile,
    SelectionProfile,
    ShuffleProfile,
    TrialCount,
    UnitsThenPoissonProfile,
    UserPoissonProfile,
    attack_advantage,
    epsilon,
)
from accounting.attack import implied_advantage
from accounting.profile import Question
from accounting.profiles.truncation import Cap, truncated_profile
from accounting.records import Record
from accounting.releases import ComposedProfile, EnvelopeProfile, with_gaussian_release
from accounting.worst_leaf import worst_leaf

DELTA = 1e-5
LOOSE = "whose two ends need not meet"
# Each profile as a function of the noise multiplier, in an order of falling epsilon; and whether
# its two ends meet. One line here gives a new one every test below.
PROFILES = {
    "gaussian": (GaussianProfile, ""),
    "poisson": (lambda s: PoissonProfile(s, 0.1, 10), ""),
    "balls-and-bins": (lambda s: BallsAndBinsProfile(s, 10), ""),
    "two epochs": (lambda s: BallsAndBinsProfile(s, 5, 2), ""),
    "fixed bins": (lambda s: BallsAndBinsProfile(s, 5, 2, "fixed"), ""),
    "shuffle": (lambda s: ShuffleProfile(s, 10), LOOSE),
    "users": (lambda s: UserPoissonProfile(s, 3, 0.1, 3), ""),
    "one stage": (lambda s: MultistageProfile(s, 10, (1,), (10,)), LOOSE),
    "two stages": (lambda s: MultistageProfile(s, 5, (1, 2), (10, 10)), LOOSE),
    "worst leaf": (lambda s: worst_leaf(s, 5, (1,), ((10,), (12,))), LOOSE),
    "units": (lambda s: UnitsThenPoissonProfile(s, 3, 0.3, 0.2), LOOSE),
    "truncated": (lambda s: truncated_profile(BallsAndBinsProfile(s, 10), Cap(1000, 0.1, 200)), ""),
    "gaussian release": (lambda s: with_gaussian_release(BallsAndBinsProfile(s, 5, 2), 2.0), ""),
    "release beside stages": (
        lambda s: with_gaussian_release(worst_leaf(s, 5, (1,), ((10,), (12,))), 2.0),
        LOOSE,
    ),
    "envelope": (lambda s: EnvelopeProfile((GaussianProfile(s), PoissonProfile(s, 0.1, 10))), ""),
    "composition": (
        lambda s: ComposedProfile((GaussianProfile(s), PoissonProfile(s, 0.1, 10))),
        LOOSE,
    ),
    "selection": (lambda s: SelectionProfile(GaussianProfile(s), TrialCount(5.0)), LOOSE),
}
EVERY = pytest.mark.parametrize("name", PROFILES)
QUICK = (
    *("gaussian", "poisson", "balls-and-bins", "shuffle"),
    *("envelope", "truncated", "gaussian release", "users"),
)


@functools.cache
def bound_of(name, sigma):
    return epsilon(PROFILES[name][0](sigma), DELTA)


def test_every_public_profile_is_here():
    public = {getattr(accounting, name) for name in accounting.__all__ if name.endswith("Profile")}
    assert public - {PrivacyProfile} <= {type(make(1.0)) for make, _ in PROFILES.values()}


QUESTIONS = [Question("epsilon", DELTA)]
QUESTIONS += [Question("delta", at) for at in (0.0, 1e-6, 0.02, 0.3, 1.0)]


@pytest.mark.short(
    "epsilon-*", "delta-0.0-*", *(f"delta-0.3-{name}" for name in QUICK), "delta-1e-06-balls*"
)
@EVERY
@pytest.mark.parametrize("question", QUESTIONS, ids=lambda one: f"{one.wanted}-{one.at}")
def test_interval_is_as_narrow_as_promised_or_says_why(name, question):
    make, loose = PROFILES[name]
    assert isinstance(make(1.0), PrivacyProfile)
    asked = question.wanted == "epsilon"
    bound = bound_of(name, 1.0) if asked else question.ask(make(1.0))
    assert 0.0 < bound.lower <= bound.upper < 20.0
    assert {type(bound.lower), type(bound.upper), type(bound.confidence)} == {float}
    assert bound.confidence == 1.0
    assert bound.note or bound.width <= question.width(bound)
    if not loose:
        assert bound.width <= 1e-3 * min(1.0, bound.upper)
        assert not bound.note


@pytest.mark.short(*QUICK, "units")
@EVERY
def test_delta_is_what_epsilon_inverts(name):
    profile, bound = PROFILES[name][0](1.0), bound_of(name, 1.0)
    assert profile.delta(bound.upper).lower <= DELTA
    assert DELTA * (1.0 - 1e-9) <= profile.delta(bound.lower).upper <= 1.0


@EVERY
def test_less_noise_costs_more(name):
    more, less = bound_of(name, 1.0), bound_of(name, 2.0)
    assert less.lower <= more.upper
    assert less.upper < more.upper


@pytest.mark.short(*QUICK)
@EVERY
def test_attack_advantage_is_sharp_and_falls_in_the_noise(name):
    make, loose = PROFILES[name]
    more, less = attack_advantage(make(1.0)), attack_advantage(make(2.0))
    assert 0.0 < less.lower <= more.upper < 1.0
    assert less.upper < more.upper
    if not loose:
        assert more.width <= 1e-3 * more.upper
    # What one point of the same curve implies is not less.
    assert more.lower <= implied_advantage(bound_of(name, 1.0).upper, DELTA)


@EVERY
@pytest.mark.parametrize("sigma", [0.0, -1.0, 1e-101, 1e11, 1e308, float("nan"), float("inf")])
def test_noise_that_gives_no_guarantee_is_refused(name, sigma):
    with pytest.raises(ValueError, match="noise_multiplier"):
        PROFILES[name][0](sigma)


@pytest.mark.short("poisson", "gaussian", "units", "*release", "one stage")
@EVERY
def test_the_most_noise_that_is_taken_has_a_bound(name):
    profile = PROFILES[name][0](1e10)
    for bound in (profile.epsilon(DELTA), profile.delta(0.0), profile.delta(0.5)):
        assert 0.0 <= bound.lower <= bound.upper < 2.0


@EVERY
def test_a_point_that_is_no_epsilon_or_no_delta_is_refused(name):
    profile = PROFILES[name][0](1.0)
    for delta in (0.0, 1.0, float("nan")):
        with pytest.raises(ValueError, match="delta must be"):
            profile.epsilon(delta)
    for at in (-0.1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="epsilon must be"):
            profile.delta(at)


RECORDS = [name for name, (make, _) in PROFILES.items() if isinstance(make(1.0), Record)]


@pytest.mark.parametrize("name", RECORDS)
def test_values_outside_their_annotations_are_refused_by_name(name):
    zero = [] if name == "units" else [0]  # a leaf may have no siblings
    assert_refused(PROFILES[name][0](1.0), *zero, -1, 2**64)


@pytest.mark.parametrize(
    ("name", "field"),
    [("users", "sampling_prob"), ("units", "unit_prob"), ("units", "sampling_prob")],
)
def test_draws_rarer_than_rounding_are_refused_by_name(name, field):
    def drawn(probability):
        return dataclasses.replace(PROFILES[name][0](1.0), **{field: probability})

    assert drawn(1e-12).deviation() > 0.0  # the grid step is relative to it
    with pytest.raises(ValueError, match=f"{field} must be .* >= 1e-12 .* got 9e-13"):
        drawn(9e-13)


@EVERY
@pytest.mark.filterwarnings("error")
def test_hardly_any_noise_is_answered_by_bounds_at_once(name):
    for sigma in (1e-3, 1e-4, 1e-9):
        bound = bound_of(name, sigma)
        assert 0 <= bound.lower <= bound.upper
        assert bound.upper >= 1e5 or bound.note


REPEATED = [
    *(UserPoissonProfile(2.0, 1, rate, tau) for rate, tau in ((0.1, 4), (0.999, 2), (0.02, 30))),
    UnitsThenPoissonProfile(2.0, 1, 0.3, 0.2),
    MultistageProfile(2.0, 1, (1,), (10,)),
    MultistageProfile(2.0, 1, (1, 50), (100, 100)),
    MultistageProfile(2.0, 1, (1, 5, 5), (10, 25, 25)),
]


@pytest.mark.parametrize("tail", [1e-14, 1e-3])
@pytest.mark.parametrize("profile", REPEATED, ids=str)
def test_release_keeps_all_mass_of_both_laws_at_any_tail(profile, tail):
    upper = profile.upper_ratio(0.01, tail)
    assert upper.q.sum() + upper.zero == pytest.approx(1.0, abs=1e-12)
    assert upper.p.sum() + upper.infinity == pytest.approx(1.0, abs=1e-12)
    assert min(upper.q.min(), upper.p.min()) >= 0
    for lower in profile.lower_ratios(0.01, tail):
        for at in (0.01, 0.5, 2.0):
            assert lower.remove(at) <= upper.remove(at)
            assert lower.add(at) <= upper.add(at)
