"""Claims about the cost of a maximum batch size."""

import dataclasses
import functools
import itertools
import math
from collections import Counter

import mpmath
import numpy as np
import pytest
from enumeration import draw_cells, hockey_sticks
from scipy import stats

from accounting import (
    BallsAndBinsProfile,
    GaussianProfile,
    PoissonProfile,
    UnitsThenPoissonProfile,
    UserPoissonProfile,
)
from accounting.profiles.balls_and_bins import AssignmentsProfile
from accounting.profiles.truncation import (
    Cap,
    log_overflow_probability,
    truncated_profile,
    without_full_bins,
)
from accounting.releases import with_gaussian_release
from samplers import BallsAndBins, Poisson

mpmath.mp.dps = 60


def exact_log_tail(n: int, rate: float, maximum: int) -> mpmath.mpf:
    """Log of the first term of the tail times the sum of its terms' ratios."""
    q, k = mpmath.mpf(rate), maximum + 1
    ways = mpmath.loggamma(n + 1) - mpmath.loggamma(k + 1) - mpmath.loggamma(n - k + 1)
    ratios = mpmath.hyp2f1(1, k - n, k + 1, -q / (1 - q))
    return ways + k * mpmath.log(q) + (n - k) * mpmath.log1p(-q) + mpmath.log(ratios)


@pytest.mark.parametrize(
    ("n", "rate", "maximum"),
    [
        (10, 0.5, 9),
        (10, 0.5, 5),
        (100, 0.01, 99),
        (1000, 0.3, 350),
        (100_000, 1e-3, 160),
        (37_000_000, 1024 / 37e6, 1024 + 7 * 32),
        (37_000_000, 65536 / 37e6, 65536 + 3 * 256),
        (37_000_000, 1024 / 37e6, 8000),
        (2_000_000_000, 1e-6, 2600),
    ],
)
def test_the_tail_is_bounded_from_above_to_a_hundred_millionth(n, rate, maximum):
    exact = exact_log_tail(n, rate, maximum)
    bound = log_overflow_probability(n, rate, maximum)
    assert exact <= bound <= max(exact, math.log(1e-300)) + 1e-8


@pytest.mark.parametrize(
    ("n", "rate", "maximum", "log_tail"),
    [(5, 0.2, 5, -math.inf), (5, 0.0, 0, -math.inf), (5, 1.0, 4, 0.0), (100, 0.5, 10, 0.0)],
)
def test_edges_are_exact_or_trivial(n, rate, maximum, log_tail):
    assert log_overflow_probability(n, rate, maximum) == log_tail


# ---------------------------------------------------------------- the law, by enumeration of draws


def poisson(sigma, rows, rate, cap, steps):
    cut = Cap(rows, rate, cap)
    return truncated_profile(PoissonProfile(sigma, rate, steps), cut)


def users(sigma, rows, rate, cap, own, shards=1):
    whole = UserPoissonProfile(sigma, 1, rate, own)
    cut = Cap(rows, rate, cap)
    return truncated_profile(whole, cut, shards)


def attempts(sigma, rows, cap, *assignments):
    """Draws of `rows` to bins, some of which are released, as pairs (times, bins)."""
    rate = 1 / sum(count for _, count in assignments[0])
    profile = AssignmentsProfile(sigma, tuple((one, 1) for one in assignments))
    return truncated_profile(profile, Cap(rows, rate, cap))


# Where an example is often kept in a full batch, and a known release costs far more.
FLAGGED = {
    "poisson": poisson(0.3, 40, 0.05, 3, 1),
    "one bin of 20": attempts(0.3, 40, 3, ((0, 19), (1, 1))),
    "users": users(0.3, 40, 0.05, 3, 1),
}


def shown_draws(epsilon):
    """Delta of `FLAGGED` if the draws of others are shown, and who is kept in a full batch."""
    others = np.arange(40)
    law, full = stats.binom.pmf(others, 39, 0.05), others >= 3
    sampled, known = (
        p.delta(epsilon).lower for p in (PoissonProfile(0.3, 0.05, 1), GaussianProfile(0.3))
    )
    return law[~full].sum() * sampled + 0.05 * law[full] @ (3 / (others[full] + 1)) * known


@pytest.mark.parametrize("name", FLAGGED)
def test_flags_are_as_likely_as_revealed_draws_need(name):
    profile, epsilon = FLAGGED[name], 8.0
    exact = shown_draws(epsilon)
    assert exact <= profile.delta(epsilon).upper

    def rarer(part):
        return part._replace(log_probability=part.log_probability - 3.0)

    cases = tuple(case._replace(flagged=tuple(map(rarer, case.flagged))) for case in profile.cases)
    assert dataclasses.replace(profile, cases=cases).delta(epsilon).upper < exact


@pytest.mark.parametrize("epsilon", [2.0, 8.0, 14.0])
def test_epsilon_is_at_least_that_of_shown_draws(epsilon):
    # Delta is spent once: what flags take of it, the run without a cut does not get.
    profile, exact = FLAGGED["one bin of 20"], shown_draws(epsilon)
    assert profile.profile.epsilon(exact).upper < epsilon <= profile.epsilon(exact).upper


def kept_in_full_batches(cut, bins, times=1):
    """Law of the norm of an example's releases from full batches that keep it.

    A draw has as many released bins as `bins` says, and releases each of them `times` times.
    """
    rate, cap = cut.sampling_prob, cut.max_batch_size
    others, draws = np.arange(cap, cap + 200), []
    law = rate * stats.binom.pmf(others, cut.num_examples - 1, rate)
    for count in bins:
        kept = [count * law @ stats.binom.pmf(k, times, cap / (others + 1))
                for k in range(1, times + 1)]  # fmt: skip
        draws.append([1.0 - sum(kept), *kept])
    return {math.sqrt(k): chance for k, chance in enumerate(functools.reduce(np.convolve, draws))}


def beside(norms, norm):
    """Law of the norms together with a further release, which is always known."""
    return {math.hypot(own, norm): chance for own, chance in norms.items()}


def kept_rows(cut, own):
    """Law of the number of a user's rows that are kept in a full batch."""
    rows, cap = cut.num_examples, cut.max_batch_size
    full = stats.binom.sf(cap, rows, cut.sampling_prob)
    return {k: full * stats.hypergeom.pmf(k, rows, own, cap) for k in range(own + 1)}


SPARSE, FULL, MILLION = Cap(400, 1 / 200, 9), Cap(400, 0.05, 20), Cap(10**6, 1e-6, 1)
WIDE = Cap(400, 0.2, 118)
KNOWN = {  # profile, cut, an epsilon at which known releases cost the most, their norms
    "one flag in either of two epochs": (
        BallsAndBinsProfile(0.5, 200, 2), SPARSE, 8.0, kept_in_full_batches(SPARSE, (200, 200)),
    ),
    "draws of one bin and of two": (
        AssignmentsProfile(0.5, ((((0, 199), (1, 1)), 1), (((0, 198), (1, 2)), 1))), SPARSE, 6.0,
        kept_in_full_batches(SPARSE, (1, 2)),
    ),
    "a draw of four releases and one of one": (
        AssignmentsProfile(1.0, ((((4, 200),), 1), (((0, 199), (1, 1)), 1))), SPARSE, 6.0,
        kept_in_full_batches(SPARSE, (200,), 4),
    ),
    "one bin in four epochs": (
        BallsAndBinsProfile(1.0, 200, 4, "fixed"), SPARSE, 6.0,
        kept_in_full_batches(SPARSE, (200,), 4),
    ),
    "flags in two draws at once": (
        AssignmentsProfile(0.6, ((((0, 19), (1, 1)), 2),)), FULL, 7.0,
        kept_in_full_batches(FULL, (1, 1)),
    ),
    "either of two releases of a bin": (
        AssignmentsProfile(0.5, ((((0, 10**6 - 1), (2, 1)), 1),)), MILLION, 1.0,
        kept_in_full_batches(MILLION, (1,), 2),
    ),
    "a flag beside a release of all rows": (
        BallsAndBinsProfile(0.5, 200, release=1.0), SPARSE, 8.0,
        beside(kept_in_full_batches(SPARSE, (200,)), 0.5),
    ),
    "flags in two draws beside a release of all rows": (
        AssignmentsProfile(0.5, ((((0, 199), (1, 1)), 2),), release=1.0), SPARSE, 8.0,
        beside(kept_in_full_batches(SPARSE, (1, 1)), 0.5),
    ),
    "rows of a user": (UserPoissonProfile(2.0, 1, 0.2, 4), WIDE, 8.0, kept_rows(WIDE, 4)),
}  # fmt: skip


@pytest.mark.parametrize(("profile", "cut", "epsilon", "norms"), KNOWN.values(), ids=KNOWN)
def test_known_releases_in_full_batches_are_paid_for(profile, cut, epsilon, norms):
    """A run costs at least what the releases do that are known, given the draws of others."""
    known = sum(
        chance * GaussianProfile(profile.noise_multiplier / norm).delta(epsilon).lower
        for norm, chance in norms.items()
        if norm
    )
    assert known <= truncated_profile(profile, cut).delta(epsilon).upper


@pytest.mark.parametrize(
    "assignment", [((0, 6), (1, 2)), ((0, 2), (1, 5)), ((0, 3), (1, 3), (2, 1))]
)
@pytest.mark.parametrize("epsilon", [0.0, 1.0])
def test_bins_left_beside_full_ones_are_dominated(assignment, epsilon):
    bins, unreleased = sum(count for _, count in assignment), dict(assignment)[0]
    released = [times for times, count in assignment for _ in range(count) if times]
    for full in range(1, len(released)):
        left = AssignmentsProfile(1.0, ((without_full_bins(assignment, full), 1),))
        upper = left.delta(epsilon).upper
        for gone in range(full + 1):  # each left bin is then at most as likely as one of the others
            law = Counter({0: unreleased}) + Counter(released[gone:])
            assert sum(law.values()) == bins - gone
            rest = AssignmentsProfile(1.0, ((tuple(law.items()), 1),))
            assert rest.delta(epsilon).lower <= upper


def test_rows_of_a_user_kept_together_cost_over_one_release():
    profile = users(0.6, 1202, 0.01, 4, 2)
    own, others = ({(k,): stats.binom.pmf(k, n, 0.01) for k in range(min(n, 60) + 1)}
                   for n in (2, 1200))  # fmt: skip
    (exact,) = hockey_sticks(draw_cells(own, others, 4, (0.0, 1.0)), 0.6, 10.0)
    kept = stats.binom.sf(4, 1202, 0.01) * 2 * 4 / 1202
    assert (
        20.0 * kept * GaussianProfile(0.6).delta(10.0).upper
        < exact
        == pytest.approx(4.65e-9, rel=0.02)
    )
    assert exact <= profile.delta(10.0).upper


@pytest.mark.parametrize(("rows", "rate"), [(8, 0.3), (30, 0.05), (12, 0.9), (40, 0.25)])
def test_overflow_chances_bound_the_exact_ones_of_fewer_examples(rows, rate):
    for cap in range(1, rows):
        cut = Cap(rows, rate, cap)
        for fewer in range(1, rows + 1):
            others = np.arange(fewer)
            law = rate * stats.binom.pmf(others, fewer - 1, rate) * (others >= cap)
            kept = float((law * cap / (others + 1)).sum())
            assert kept <= math.exp(cut.log_kept()) * (1 + 1e-8)
        dropped = float((law * (1 - cap / (others + 1))).sum())
        assert dropped <= rate * math.exp(cut.log_dropped_if_drawn()) * (1 + 1e-8)
        if cap >= rows * rate + 1:
            assert math.exp(cut.log_kept()) <= kept * (1 + 1e-7)
            assert math.exp(cut.log_full()) == pytest.approx(law.sum() / rate, rel=1e-7)


@pytest.mark.parametrize("count", [3, 5])
def test_full_bins_are_rarer_than_independent_ones(count):
    # Negative association of occupancies: what T - o bins rest on.
    rows, cap = 6, 2
    for some in range(1, count + 1):
        exact = sum(
            all(others.count(t) >= cap for t in range(some))
            for others in itertools.product(range(count), repeat=rows - 1)
        ) / count ** (rows - 1)
        assert exact <= math.exp(Cap(rows, 1 / count, cap).log_full()) ** some * (1 + 1e-9)


# ------------------------------------------------------------------------------------- the profile

N, B, SIGMA, DELTA = 37_000_000, 8192, 0.6, 2.7e-8
STEPS = -(-N // B)
KINDS = {
    "poisson": lambda cap: poisson(SIGMA, N, B / N, cap, STEPS),
    "bins": lambda cap: truncated_profile(
        BallsAndBinsProfile(SIGMA, STEPS), Cap(N, 1 / STEPS, cap)
    ),
}


@pytest.mark.short("7.0-*-poisson")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("deviations", "within", "at_most"), [(7.0, 1e-3, 1.7891), (6.0, 1e-2, 1.792), (5.0, 1.0, 3.15)]
)
def test_a_cap_near_the_mean_costs_next_to_nothing(kind, deviations, within, at_most):
    cut = KINDS[kind](math.ceil(B + deviations * math.sqrt(B)))
    whole, bound = cut.profile.epsilon(DELTA), cut.epsilon(DELTA)
    assert whole.lower <= bound.upper * (1 + 1e-12)
    assert bound.upper <= min(at_most, whole.upper * (1 + within))
    assert bound.lower >= whole.lower * (1 - 3e-4)
    # One curve: epsilon at a delta and delta at that epsilon agree.
    assert cut.delta(bound.upper).lower <= DELTA
    assert cut.delta(bound.upper).upper == pytest.approx(DELTA, rel=0.02)


@pytest.mark.short("86-*", "*-BallsAndBins")
@pytest.mark.parametrize("kind", [Poisson, BallsAndBins])
@pytest.mark.parametrize(("count", "sigma", "delta"), [(36_133, 0.3757, 4e-9), (86, 0.9, 1e-6)])
def test_default_cap_leaves_intervals_as_narrow_as_asked(kind, count, sigma, delta):
    bound = kind(count * 1024, 1024, target_delta=delta).privacy(sigma).epsilon(delta)
    assert bound.width <= 1e-3
    assert not bound.note


def test_cap_that_always_cuts_gives_infinity_and_says_why():
    bound = KINDS["bins"](B).epsilon(DELTA)
    assert bound.upper == math.inf
    assert "exceeds max_batch_size uses up delta: raise it" in bound.note


@pytest.mark.short("poisson")
@pytest.mark.parametrize("kind", KINDS)
def test_a_full_release_composes_with_every_part(kind):
    cut = KINDS[kind](math.ceil(B + 6.0 * math.sqrt(B)))
    both = with_gaussian_release(cut, 2.0)
    assert both.log_spent == cut.log_spent
    assert both.profile == cut.profile.with_gaussian_release(2.0)
    assert both.delta(1.5).upper > cut.delta(1.5).upper
    (one, *_), (other, *_) = both.cases, cut.cases
    assert one.flagged[0].profile == other.flagged[0].profile.with_gaussian_release(2.0)


# ------------------------------------------------------------ each statement, from its own parts


def flag_probability(m, rate, cap):
    """Returns P[an example is drawn, its batch overflows, it is kept], cap >= m rate."""
    return cap / m * stats.binom.sf(cap, m, rate)


def sum_of(terms, side, epsilon):
    """Adds factors times deltas of profiles; a term without a profile is a probability."""
    return sum(
        factor * (getattr(profile.delta(epsilon), side) if profile else 1.0)
        for factor, profile in terms
    )


def stated_steps():
    profile, pi = PoissonProfile(0.8, 0.01, 50), 50 * flag_probability(2000, 0.01, 32)
    found = truncated_profile(profile, Cap(2000, 0.01, 32))
    return found, [[(1.0, profile), (pi, profile.with_gaussian_release(0.8)), (pi**2 / 2, None)]]


def stated_users():
    profile = UserPoissonProfile(2.0, 10, 0.01, 3)
    pi = 10 * 3 * flag_probability(2000, 0.01, 36)
    found = truncated_profile(profile, Cap(2000, 0.01, 36), 2)
    beside = profile.with_gaussian_release(2.0 / 3.0)
    return found, [[(1.0, profile), (pi, beside), (pi**2 / 2, None)]]


def stated_bins():
    bins, epochs, m, cap = 200, 2, 4000, 36
    profile = BallsAndBinsProfile(0.7, bins, epochs)
    tau = stats.binom.sf(cap - 1, m - 1, 1 / bins)
    pi = epochs * bins * flag_probability(m, 1 / bins, cap)
    found = truncated_profile(profile, Cap(m, 1 / bins, cap))
    statements = []
    for full in range(3, 6):
        fewer = BallsAndBinsProfile(0.7, bins - full, epochs)
        beside = BallsAndBinsProfile(0.7, bins - full, epochs - 1).with_gaussian_release(0.7)
        rest = pi**2 / 2 + epochs * math.comb(bins, full + 1) * tau ** (full + 1)
        flagged = [(pi, beside), (rest, None)]
        statements += [
            [(1.0, fewer), *flagged],
            [(1.0, profile), (epochs * bins * tau, fewer), *flagged],
        ]
    return found, statements


@pytest.mark.short("stated_steps-*", "stated_users-*")
@pytest.mark.parametrize(
    ("stated", "epsilon", "sharp"),
    [(stated_steps, 4.0, 1.05), (stated_users, 4.0, 1.05), (stated_bins, 0.3, 1.3)],
)
def test_the_upper_end_is_the_sum_that_its_statement_says(stated, epsilon, sharp):
    found, statements = stated()
    upper = found.delta(epsilon).upper
    assert upper >= min(sum_of(terms, "lower", epsilon) for terms in statements)
    assert upper <= sharp * min(sum_of(terms, "upper", epsilon) for terms in statements)


HIDING = 1e3
UNCOVERED = {  # probabilities of two flags, and of six full bins of eight, in three steps or epochs
    "poisson": (PoissonProfile(HIDING, 0.125, 3), 1, 3, 0),
    "units": (UnitsThenPoissonProfile(HIDING, 3, 0.5, 0.125, 9), 1, 3, 0),
    "users": (UserPoissonProfile(HIDING, 3, 0.125, 2), 1, 6, 0),
    "users in shards": (UserPoissonProfile(HIDING, 3, 0.125, 2), 2, 6, 0),
    "redrawn": (BallsAndBinsProfile(HIDING, 8, 3), 1, 24, 3),
    "one epoch": (BallsAndBinsProfile(HIDING, 8), 1, 0, 1),
    "fixed": (BallsAndBinsProfile(HIDING, 8, 3, "fixed"), 1, 0, 1),
}


@pytest.mark.parametrize(("profile", "shards", "flags", "draws"), UNCOVERED.values(), ids=UNCOVERED)
def test_hidden_releases_cost_what_no_bound_covers(profile, shards, flags, draws):
    m, cap = 80, 11
    tau = stats.binom.sf(cap - 1, m - 1, 1 / 8)
    stated = (flags * flag_probability(m, 1 / 8, cap)) ** 2 / 2 + draws * 28 * tau**6
    found = truncated_profile(profile, Cap(m, 1 / 8, cap), shards).delta(1.0)
    assert stated <= found.upper <= stated * (1 + 1e-6)


@pytest.mark.parametrize("epsilon", [0.0, 1.0])
def test_lower_end_of_units_falls_by_the_overflow_of_both_laws(epsilon):
    """Siblings show whether their unit was drawn, and a cut of any of them may hide it."""
    profile, steps, m, cap = UnitsThenPoissonProfile(0.8, 50, 0.5, 0.01, 999), 50, 1000, 32
    cut, whole = (
        p.delta(epsilon) for p in (truncated_profile(profile, Cap(m, 0.01, cap)), profile)
    )
    moved = 2 * steps * math.exp(epsilon) * stats.binom.sf(cap, m, 0.01)
    assert 0.0 < moved < 0.5 * whole.lower
    assert whole.lower - cut.lower == pytest.approx(moved, rel=1e-3)


def test_lower_epsilon_of_units_is_where_their_lower_delta_is():
    cut = truncated_profile(UnitsThenPoissonProfile(0.8, 1, 0.5, 0.05, 9), Cap(20, 0.05, 7))
    assert cut.epsilon(cut.delta(1.0).lower).lower == pytest.approx(1.0, rel=1e-3)
