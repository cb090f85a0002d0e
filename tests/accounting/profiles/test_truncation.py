"""Claims about the cost of a maximum batch size."""

import dataclasses
import itertools
import math
from collections import Counter

import mpmath
import numpy as np
import pytest
from scipy import stats

from accounting import (
    BallsAndBinsProfile,
    GaussianProfile,
    PoissonProfile,
    UnitsThenPoissonProfile,
    UserPoissonProfile,
)
from accounting.profiles.partial_epochs import AssignmentsProfile
from accounting.profiles.truncation import (
    Cap,
    log_overflow_probability,
    truncated_assignments,
    truncated_bins,
    truncated_steps,
    truncated_users,
    without_full_bins,
)

mpmath.mp.dps = 60


def exact_log_tail(n: int, rate: float, maximum: int) -> mpmath.mpf:
    q, k = mpmath.mpf(rate), maximum + 1
    term = mpmath.exp(
        mpmath.loggamma(n + 1)
        - mpmath.loggamma(k + 1)
        - mpmath.loggamma(n - k + 1)
        + k * mpmath.log(q)
        + (n - k) * mpmath.log1p(-q)
    )
    total = mpmath.mpf(0)
    while k <= n and term > total * mpmath.mpf(10) ** -40:
        total += term
        term *= mpmath.mpf(n - k) / (k + 1) * q / (1 - q)
        k += 1
    return mpmath.log(total)


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
    assert exact <= bound <= exact + 1e-8


@pytest.mark.parametrize(
    ("n", "rate", "maximum", "log_tail"),
    [(5, 0.2, 5, -math.inf), (5, 0.0, 0, -math.inf), (5, 1.0, 4, 0.0), (100, 0.5, 10, 0.0)],
)
def test_edges_are_exact_or_trivial(n, rate, maximum, log_tail):
    assert log_overflow_probability(n, rate, maximum) == log_tail


# ---------------------------------------------------------------- the law, by enumeration of draws

HALF = ((0, 1), (1, 1))

# Zeroed-out neighbours: example 0 (or the rows of a user) has gradient e_1, or 0; the others have
# the vector `other` in both data sets, and zeros still take places in a batch.
ONE_STEP = ((0.0,), (1.0,), (-1.0,), (0.0, 1.0), (-0.3, 0.95))


def kept_law(drawn: int, own: int, cap: int):
    """Yields (probability, own rows kept, rows kept) of a batch of `own` and `drawn` other rows."""
    total = own + drawn
    size = min(total, cap)
    for kept in range(max(0, size - drawn), min(own, size) + 1):
        ways = math.comb(own, kept) * math.comb(drawn, size - kept)
        yield ways / math.comb(total, size), kept, size


def poisson_step(rows: int, rate: float, cap: int, other, own: int = 1):
    """Returns the cells (probability, means with the unit, means without it) of a step's sum."""
    cells: dict[tuple, float] = {}
    for drawn in range(rows - own + 1):
        for mine in range(own + 1):
            chance = stats.binom.pmf(drawn, rows - own, rate) * stats.binom.pmf(mine, own, rate)
            for share, kept, size in kept_law(drawn, mine, cap):
                base = tuple(one * (size - kept) for one in other)
                at = (base[0] + kept, *base[1:]), base
                cells[at] = cells.get(at, 0.0) + chance * share
    return [(chance, *at) for at, chance in cells.items()]


def unit_step(rows: int, rate: float, cap: int, other):
    """One of two units of `rows` is drawn, and its rows independently: x has siblings."""
    beside = poisson_step(rows, rate, cap, other, own=0)
    return [
        (0.5 * chance, x, y)
        for law in (poisson_step(rows, rate, cap, other), beside)
        for chance, x, y in law
    ]


def shards_step(rows: int, rate: float, cap: int, other, owns):
    """Adds the sums of shards of `rows`, each cut by itself, with `owns` rows of one user."""
    laws = [poisson_step(rows, rate, cap, other, own) for own in owns]
    return [
        (
            math.prod(part[0] for part in parts),
            *(tuple(map(sum, zip(*(part[k] for part in parts), strict=True))) for k in (1, 2)),
        )
        for parts in itertools.product(*laws)
    ]


def banded_steps(rows: int, rate: float, cap: int, other):
    """Two groups take two steps in turn; noise of two bands: columns (.8, .6) and (0, .8)."""
    first = poisson_step(rows, rate, cap, other)
    second = poisson_step(rows, rate, cap, other, own=0)
    return [
        (one * two, (0.8 * x[0], 0.6 * x[0] + 0.8 * z[0]), (0.8 * y[0], 0.6 * y[0] + 0.8 * z[0]))
        for one, x, y in first
        for two, z, _ in second
    ]


def product_of(*laws):
    return [
        (
            math.prod(part[0] for part in parts),
            *(sum((part[k] for part in parts), ()) for k in (1, 2)),
        )
        for parts in itertools.product(*laws)
    ]


def bins_epochs(rows: int, bins: int, cap: int, epochs: int, other: float):
    """Fixed bins over `epochs` epochs, each cut anew; one epoch is redrawn bins as well."""
    cells: dict[tuple, float] = {}
    for own_bin in range(bins):
        for others in itertools.product(range(bins), repeat=rows - 1):
            counts = [others.count(t) for t in range(bins)]
            per_epoch = []
            for t in range(bins):
                drawn = [
                    (share, kept, other[0] * (size - kept))
                    for share, kept, size in kept_law(counts[t], int(t == own_bin), cap)
                ]
                per_epoch.append([(share, (base + kept,), (base,)) for share, kept, base in drawn])
            for chance, x, y in product_of(*(per_epoch * epochs)):
                cells[x, y] = cells.get((x, y), 0.0) + chance / bins**rows
    return [(chance, *at) for at, chance in cells.items()]


def some_steps(cells, steps):
    """Returns the law of what some of the steps release."""
    merged: dict[tuple, float] = {}
    for chance, *means in cells:
        at = tuple(tuple(mean[t] for t in steps) for mean in means)
        merged[at] = merged.get(at, 0.0) + chance
    return [(chance, *at) for at, chance in merged.items()]


def hockey_sticks(cells, sigma: float, epsilon: float) -> tuple[float, float]:
    """Integrates (P - e^eps Q)_+ and (Q - e^eps P)_+ on a grid, to about 1e-4."""
    dims = len(cells[0][1])
    points = {1: 2001, 2: 201, 3: 71, 4: 35}[dims]
    every = [x for _, with_it, without in cells for x in (*with_it, *without)]
    z = np.linspace(min(every) - 6 * sigma, max(every) + 6 * sigma, points)

    def density(which):
        total = np.zeros((points,) * dims)
        merged: dict[tuple, float] = {}
        for cell in cells:
            merged[cell[which]] = merged.get(cell[which], 0.0) + cell[0]
        for means, chance in merged.items():
            part = np.full((1,) * dims, chance)
            for axis, mean in enumerate(means):
                shape = [1] * dims
                shape[axis] = points
                part = part * stats.norm.pdf(z, mean, sigma).reshape(shape)
            total += part
        return total

    p, q = density(1), density(2)
    cell = (z[1] - z[0]) ** dims
    factor = math.exp(epsilon)
    return (
        float(np.maximum(p - factor * q, 0.0).sum() * cell),
        float(np.maximum(q - factor * p, 0.0).sum() * cell),
    )


def poisson(sigma, rows, rate, cap, steps):
    cut = Cap(rows, rate, cap)
    return truncated_steps(PoissonProfile(sigma, rate, steps), cut, steps, sigma, exact=True)


def users(sigma, rows, rate, cap, own, shards=1):
    whole = UserPoissonProfile(sigma, 1, rate, own)
    cut = Cap(rows, rate, cap)
    return truncated_users(whole, cut, 1, sigma, max_contributions=own, shards=shards)


def units(sigma, rows, rate, cap):
    whole = UnitsThenPoissonProfile(sigma, 1, 0.5, rate, siblings=rows - 1)
    return truncated_steps(whole, Cap(rows, rate, cap), 1, sigma, exact=False)


def bins(sigma, rows, count, cap, epochs=1, assignment="redrawn"):
    return truncated_bins(
        BallsAndBinsProfile(sigma, count, epochs, assignment), Cap(rows, 1 / count, cap)
    )


def attempts(sigma, rows, cap, *assignments):
    """Draws of `rows` to bins, some of which are released, as pairs (times, bins)."""
    rate = 1 / sum(count for _, count in assignments[0])
    profile = AssignmentsProfile(sigma, tuple((one, 1) for one in assignments))
    return truncated_assignments(profile, Cap(rows, rate, cap))


CASES = {
    **{
        f"poisson, {rows} rows, cap {cap}": (
            poisson(0.8, rows, rate, cap, 1), 0.8, ONE_STEP,
            lambda other, rows=rows, rate=rate, cap=cap: poisson_step(rows, rate, cap, other))
        for rows, rate, cap in ((4, 0.3, 1), (4, 0.3, 2), (5, 0.1, 1), (6, 0.2, 3), (9, 0.6, 4))
    },
    **{
        f"two steps, cap {cap}": (
            poisson(1.0, 5, 0.15, cap, 2), 1.0, ONE_STEP[:3],
            lambda other, cap=cap: product_of(*[poisson_step(5, 0.15, cap, other)] * 2))
        for cap in (1, 2, 3)
    },
    **{
        f"users of {own}, cap {cap}": (
            users(1.2, 7, 0.15, cap, own), 1.2, ONE_STEP,
            lambda other, cap=cap, own=own: poisson_step(7, 0.15, cap, other, own))
        for own in (2, 3) for cap in (1, 2, 3, 5)
    },
    **{
        f"users of {owns} over shards, cap {cap}": (
            users(1.2, 4, 0.2, cap, sum(owns), shards=2), 1.2, ONE_STEP,
            lambda other, cap=cap, owns=owns: shards_step(4, 0.2, cap, other, owns))
        for owns in ((1, 1), (2, 0), (2, 1)) for cap in (1, 2, 3)
    },
    **{
        f"one of two units of {rows}, cap {cap}": (
            units(0.9, rows, rate, cap), 0.9, ONE_STEP,
            lambda other, rows=rows, rate=rate, cap=cap: unit_step(rows, rate, cap, other))
        for rows, rate, cap in ((4, 0.3, 1), (5, 0.3, 2), (6, 0.15, 2), (6, 0.5, 4))
    },
    **{
        f"banded noise, cap {cap}": (
            poisson(0.9, 5, 0.25, cap, 1), 0.9, ONE_STEP[:3],
            lambda other, cap=cap: banded_steps(5, 0.25, cap, other))
        for cap in (1, 2, 3)
    },
    **{
        f"{count} bins of {rows} rows, cap {cap}": (
            bins(1.0, rows, count, cap), 1.0, ONE_STEP[:3],
            lambda other, rows=rows, cap=cap: bins_epochs(rows, 2, cap, 1, other))
        for rows, count, cap in ((4, 2, 1), (5, 2, 2), (5, 2, 3), (6, 2, 4), (6, 2, 5))
    },
    **{
        f"fixed bins, cap {cap}": (
            bins(1.5, 5, 2, cap, 2, "fixed"), 1.5, ONE_STEP[:1],  # four dimensions are slow
            lambda other, cap=cap: bins_epochs(5, 2, cap, 2, other))
        for cap in (2, 3, 4)
    },
    **{
        f"two redrawn epochs, cap {cap}": (
            bins(1.2, 5, 2, cap, 2), 1.2, ONE_STEP[:1],
            lambda other, cap=cap: product_of(*[bins_epochs(5, 2, cap, 1, other)] * 2))
        for cap in (2, 3, 4)
    },
    **{
        f"{k} of {count} bins of {rows} rows, cap {cap}": (
            attempts(0.9, rows, cap, ((0, count - k), (1, k))), 0.9, ONE_STEP[:3],
            lambda other, k=k, count=count, rows=rows, cap=cap: some_steps(
                bins_epochs(rows, count, cap, 1, other), range(k)))
        for rows, count, k, cap in (
            (4, 2, 1, 1), (5, 2, 1, 2), (6, 2, 1, 3), (6, 2, 1, 5), (5, 3, 1, 1), (5, 3, 2, 2),
            (6, 3, 2, 3))
    },
    **{
        f"half of the bins, and the rest, cap {cap}": (
            attempts(1.0, 5, cap, HALF, HALF), 1.0, ONE_STEP[:2],
            lambda other, cap=cap: product_of(
                *[some_steps(bins_epochs(5, 2, cap, 1, other), [t]) for t in (0, 1)]))
        for cap in (1, 2, 3)
    },
    **{
        f"fixed bins, one epoch and a half, cap {cap}": (
            attempts(1.2, 5, cap, ((1, 1), (2, 1))), 1.2, ONE_STEP[:1],
            lambda other, cap=cap: some_steps(bins_epochs(5, 2, cap, 2, other), range(3)))
        for cap in (2, 3, 4)
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("epsilon", [0.0, 0.7, 2.0])
def test_upper_ends_hold_for_every_enumerated_law_in_both_directions(name, epsilon):
    profile, sigma, others, law = CASES[name]
    bound = profile.delta(epsilon)
    for other in others:
        worst = max(hockey_sticks(law(other), sigma, epsilon))
        assert worst <= bound.upper * (1.0 + 1e-3) + 1e-6
        if other == (0.0,) and "units" not in name:  # what the lower end is proved by
            assert bound.lower <= worst * (1.0 + 1e-3) + 1e-6


# Where an example is often kept in a full batch, and a known release costs far more.
FLAGGED = {
    "poisson": poisson(0.3, 40, 0.05, 3, 1),
    "one bin of 20": attempts(0.3, 40, 3, ((0, 19), (1, 1))),
    "users": users(0.3, 40, 0.05, 3, 1),
}


@pytest.mark.parametrize("name", FLAGGED)
def test_flags_are_as_likely_as_revealed_draws_need(name):
    """The price holds if the draws of others are shown, and who is kept in a full batch."""
    profile, epsilon, others = FLAGGED[name], 8.0, np.arange(40)
    law, full = stats.binom.pmf(others, 39, 0.05), others >= 3
    sampled, known = (
        p.delta(epsilon).lower for p in (PoissonProfile(0.3, 0.05, 1), GaussianProfile(0.3))
    )
    exact = law[~full].sum() * sampled + 0.05 * law[full] @ (3 / (others[full] + 1)) * known
    assert exact <= profile.delta(epsilon).upper

    def rarer(part):
        return part._replace(log_probability=part.log_probability - 3.0)

    cases = tuple(case._replace(flagged=tuple(map(rarer, case.flagged))) for case in profile.cases)
    assert dataclasses.replace(profile, cases=cases).delta(epsilon).upper < exact


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


def test_a_users_rows_that_are_kept_together_cost_more_than_one_release():
    profile = users(0.6, 1202, 0.01, 4, 2)
    exact = max(hockey_sticks(poisson_step(1202, 0.01, 4, (0.0, 1.0), own=2), 0.6, 10.0))
    kept = stats.binom.sf(4, 1202, 0.01) * 2 * 4 / 1202
    assert (
        20.0 * kept * GaussianProfile(0.6).delta(10.0).upper
        < exact
        == pytest.approx(4.65e-9, rel=0.02)
    )
    assert exact <= profile.delta(10.0).upper


@pytest.mark.parametrize(("rows", "rate"), [(8, 0.3), (30, 0.05), (12, 0.9), (40, 0.25)])
def test_chances_of_an_example_bound_its_exact_ones_for_every_smaller_number(rows, rate):
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
    "bins": lambda cap: truncated_bins(BallsAndBinsProfile(SIGMA, STEPS), Cap(N, 1 / STEPS, cap)),
}


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


@pytest.mark.parametrize(("count", "sigma", "epsilon"), [(36_133, 0.3757, 8.0), (86, 0.9, 3.0)])
def test_a_default_cap_leaves_intervals_as_narrow_as_they_are_asked_for(count, sigma, epsilon):
    delta = 4e-9 if count > 1000 else 1e-6
    rows = count * 1024
    for profile, cut in (
        (
            PoissonProfile(sigma, 1 / count, count),
            lambda *a: truncated_steps(*a, count, sigma, exact=True),
        ),
        (BallsAndBinsProfile(sigma, count), truncated_bins),
    ):
        deviations = next(
            k
            for k in itertools.count(4)
            if cut(profile, Cap(rows, 1 / count, 1024 + 32 * k)).log_spent <= math.log(0.01 * delta)
        )
        bound = cut(profile, Cap(rows, 1 / count, 1024 + 32 * deviations)).epsilon(delta)
        assert bound.width <= 1e-3
        assert not bound.note


def test_a_cap_that_cuts_all_the_time_gives_infinity_and_says_why():
    bound = KINDS["bins"](B).epsilon(DELTA)
    assert bound.upper == math.inf
    assert "raise the maximum batch size" in bound.note


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_release_composes_with_every_part(kind):
    cut = KINDS[kind](math.ceil(B + 6.0 * math.sqrt(B)))
    both = cut.with_gaussian_release(2.0)
    assert both.log_spent == cut.log_spent
    assert both.profile == cut.profile.with_gaussian_release(2.0)
    assert both.epsilon(DELTA).upper > cut.epsilon(DELTA).upper
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
    found = truncated_steps(profile, Cap(2000, 0.01, 32), 50, 0.8, exact=True)
    return found, [[(1.0, profile), (pi, profile.with_gaussian_release(0.8)), (pi**2 / 2, None)]]


def stated_users():
    profile = UserPoissonProfile(2.0, 50, 0.01, 3)
    pi = 50 * 3 * flag_probability(2000, 0.01, 36)
    found = truncated_users(profile, Cap(2000, 0.01, 36), 50, 2.0, max_contributions=3, shards=2)
    beside = profile.with_gaussian_release(2.0 / 3.0)
    return found, [[(1.0, profile), (pi, beside), (pi**2 / 2, None)]]


def stated_bins():
    bins, epochs, m, cap = 200, 2, 4000, 36
    profile = BallsAndBinsProfile(0.7, bins, epochs)
    tau = stats.binom.sf(cap - 1, m - 1, 1 / bins)
    pi = epochs * bins * flag_probability(m, 1 / bins, cap)
    found = truncated_bins(profile, Cap(m, 1 / bins, cap))
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


@pytest.mark.parametrize(
    ("stated", "epsilon", "sharp"),
    [(stated_steps, 4.0, 1.05), (stated_users, 4.0, 1.05), (stated_bins, 0.3, 1.3)],
)
def test_the_upper_end_is_the_sum_that_its_statement_says(stated, epsilon, sharp):
    found, statements = stated()
    upper = found.delta(epsilon).upper
    assert upper >= min(sum_of(terms, "lower", epsilon) for terms in statements)
    assert upper <= sharp * min(sum_of(terms, "upper", epsilon) for terms in statements)
