"""Prices of samplers against enumerated draws of small cases, in both directions, cut or not."""

import functools

import enumeration
import pytest

from samplers import BallsAndBins, Poisson, Shuffle, UnitsThenPoisson, UnitTree, UserPoisson

# Gradients of the other examples, by the number of steps that are released.
ONE_STEP = ((0.0,), (1.0,), (-1.0,), (0.0, 1.0), (-0.3, 0.95))
OTHERS = {1: ONE_STEP, 2: ONE_STEP[:3]}
UNCUT, FIXED = {"overflow": "accumulate"}, {"assignment": "fixed"}
FIRST, HALVES = [range(1)], [range(1), range(1, 2)]


def units(rows, rate, cap):
    """Draws one of two units of `rows`, and its examples independently."""
    tree = UnitTree.even((2, rows), ("unit",))
    return UnitsThenPoisson(tree, (1,), rate, max_batch_size=cap)


# A sampler, sigma, attempts.
CASES = [
    *((Poisson(n, b, max_batch_size=cap), 0.8, FIRST)
      for n, b, cap in ((4, 1, 1), (4, 1, 2), (9, 4, 5))),
    *((Poisson(5, 1, max_batch_size=cap), 1.0, [range(2)]) for cap in (1, 3)),
    *((UserPoisson(7, 1, max_contributions=own, max_batch_size=cap), 1.2, FIRST)
      for own, cap in ((2, 1), (2, 3), (3, 2), (3, 5))),
    *((UserPoisson(8, 2, max_contributions=own, max_batch_size=cap, num_shards=2), 1.2, FIRST)
      for own, cap in ((2, 1), (3, 2))),
    *((units(*at), 0.9, FIRST) for at in ((4, 0.25, 1), (5, 0.3, 2), (6, 0.5, 4))),
    *((units(rows, 0.5, rows), 1.0, FIRST) for rows in (1, 2, 16)),
    *((BallsAndBins(n, b, max_batch_size=cap), 1.0, [range(2)])
      for n, b, cap in ((4, 2, 2), (5, 3, 3), (6, 3, 5))),
    *((BallsAndBins(5, 3, 2, max_batch_size=cap, **FIXED), 1.5, [range(4)]) for cap in (3, 4)),
    (BallsAndBins(5, 3, 2, max_batch_size=3), 1.2, [range(4)]),
    *((BallsAndBins(n, b, max_batch_size=cap), 0.9, [range(k)])
      for n, b, k, cap in ((4, 2, 1, 2), (6, 3, 1, 5), (6, 2, 2, 3))),
    (BallsAndBins(5, 3, max_batch_size=3), 1.0, HALVES),
    *((BallsAndBins(5, 3, 2, max_batch_size=cap, **FIXED), 1.2, [range(3)]) for cap in (3, 4)),
    *((kind(10, 2, max_batch_size=cap, cycle_length=2), 0.9, [range(2)])
      for kind in (Poisson, BallsAndBins) for cap in (2, 3)),
    # Without a cut both ends are exact, but where groups or batches differ.
    *((sampler, 0.8, attempts) for sampler, attempts in (
        (BallsAndBins(600, 300, 2, **UNCUT), [range(1, 4)]),
        (BallsAndBins(600, 200, **UNCUT), [[range(1), range(2, 3)]]),
        (BallsAndBins(600, 300, 2, **FIXED, **UNCUT), [range(1), range(1, 3)]),
        (Poisson(600, 200, **UNCUT), [range(2), range(2, 3)]),
        (UserPoisson(600, 120, max_contributions=4, **UNCUT), FIRST),
        (BallsAndBins(600, 150, cycle_length=2, **UNCUT), [range(1), range(1, 3)]),
        (BallsAndBins(800, 100, 2, cycle_length=4, **FIXED, **UNCUT),
         [[range(2), range(5, 6), range(8, 9)]]),
        (Shuffle(5, 2), [range(1, 3)]),
        (Shuffle(5, 2), [range(2)]),
        (Shuffle(10, 7), [range(2)]),
        (Shuffle(600, 300, 2, order="fixed"), [range(3)]),
        (Shuffle(8, 1, num_shards=2), [range(4)]),
    )),
]  # fmt: skip
# Further ones, of the long tier.
MORE = [
    *((Poisson(n, 1, max_batch_size=cap), 0.8, FIRST) for n, cap in ((5, 1), (6, 3))),
    (Poisson(5, 1, max_batch_size=2), 1.0, [range(2)]),
    *((UserPoisson(7, 1, max_contributions=own, max_batch_size=cap), 1.2, FIRST)
      for own, cap in ((2, 2), (2, 5), (3, 1), (3, 3))),
    *((UserPoisson(8, 2, max_contributions=own, max_batch_size=cap, num_shards=2), 1.2, FIRST)
      for own, cap in ((2, 2), (2, 3), (3, 1), (3, 3))),
    (units(6, 0.15, 2), 0.9, FIRST),
    (BallsAndBins(6, 3, max_batch_size=4), 1.0, [range(2)]),
    (BallsAndBins(5, 3, 2, max_batch_size=4), 1.2, [range(4)]),
    (BallsAndBins(5, 3, max_batch_size=4), 1.0, HALVES),
    *((BallsAndBins(n, b, max_batch_size=cap), 0.9, [range(1)])
      for n, b, cap in ((6, 3, 3), (5, 2, 2))),
]  # fmt: skip
NUMBERS = [*range(len(CASES))]
NUMBERS += [pytest.param(len(CASES) + k, marks=pytest.mark.long) for k in range(len(MORE))]
CASES += MORE
EXACT = BallsAndBins, Poisson
EPSILONS = 0.0, 2.0


@functools.cache
def attained(case):
    """The largest deltas of each choice of the others' gradients, by enumeration."""
    sampler, sigma, attempts = CASES[case]
    steps = len(enumeration.steps_of(attempts[0])) if len(attempts) == 1 else 2
    others = OTHERS.get(steps, ONE_STEP[:1])
    if sampler.accumulates or sampler.num_examples > 100:
        others = ONE_STEP[:1]
    return [enumeration.worst_deltas(sampler, sigma, attempts, one, EPSILONS) for one in others]


@pytest.mark.short("*-2.0")
@pytest.mark.parametrize("epsilon", EPSILONS)
@pytest.mark.parametrize("case", NUMBERS, ids=lambda k: "-".join(map(str, CASES[k])))
def test_price_meets_enumerated_draws(case, epsilon):
    sampler, sigma, attempts = CASES[case]
    deltas = [worst[EPSILONS.index(epsilon)] for worst in attained(case)]
    price = sampler.privacy_of(sigma, attempts, same_rows=True).delta(epsilon)
    slack = 4e-3 if sampler.num_examples > 30 else 1e-3
    assert max(deltas) <= price.upper * (1.0 + slack) + 1e-6
    # Where others' zeros do not prove the lower end, all of them do.
    proves = max(deltas) if isinstance(sampler, Shuffle | UnitsThenPoisson) else deltas[0]
    assert price.lower <= proves * (1.0 + slack) + 1e-6
    assert price.lower > 0.0 or not sampler.accumulates
    if isinstance(sampler, EXACT) and sampler.accumulates and sampler.cycle_length == 1:
        assert price.lower >= proves * (1.0 - slack) - 1e-6
        assert price.upper <= proves * (1.0 + slack) + 1e-6
    if isinstance(sampler, UnitsThenPoisson) and sampler.num_examples == 32:
        assert price.lower > 0.97 * price.upper  # many siblings show whether their unit was drawn


@pytest.mark.short("other1-*-2.0", "other[02]-2-2.0")
@pytest.mark.parametrize("epsilon", EPSILONS)
@pytest.mark.parametrize("cap", [1, 2, 3])
@pytest.mark.parametrize("other", ONE_STEP[:3])
def test_price_of_groups_holds_for_noise_of_two_bands(cap, epsilon, other):
    # Two groups take two steps in turn; the columns of the bands are (.8, .6) and (0, .8).
    sampler = Poisson(10, 1, max_batch_size=cap, cycle_length=2)
    own = enumeration.released_cells(sampler, FIRST, other)
    beside = enumeration.released_cells(sampler, FIRST, other, owns=(0,))
    cells = {}
    for ((x, y), p), ((z, _), q) in enumeration.product([own.items(), beside.items()]):
        at = tuple((0.8 * mean[0], 0.6 * mean[0] + 0.8 * z[0]) for mean in (x, y))
        cells[at] = cells.get(at, 0.0) + p * q
    (worst,) = enumeration.hockey_sticks(cells, 0.9, epsilon)
    price = sampler.privacy_of(0.9, [range(2)], same_rows=True).delta(epsilon)
    assert worst <= price.upper * (1.0 + 1e-3) + 1e-6
