"""Laws of small samplers by enumeration of their definitions: slow oracles of draws and prices.

Neighbours are zeroed out: a unit's rows have the gradient e_1, or 0; all other rows have the vector
`other` in both data sets, and zeros take places in a batch as well. A *cell* is the key of a
`Counter` of probabilities: the means of the released sums with the unit, and without it.
"""

import itertools
import math
from collections import Counter

import numpy as np

from samplers import BallsAndBins, Deterministic, Poisson, Shuffle, UnitsThenPoisson, UserPoisson


def row_law(sampler, example, released=None):
    """Law of the steps of one epoch that an example is in: {(0 or 1 of each step): probability}.

    Of a Poisson sampler, steps that are not `released` are 0.
    """
    length, cycle = sampler.steps_per_epoch, getattr(sampler, "cycle_length", 1)
    own = [t % cycle == example % cycle for t in range(length)]
    if isinstance(sampler, Poisson):
        q = cycle * sampler.batch_size / sampler.num_examples
        own = [some and (released is None or t in released) for t, some in enumerate(own)]
        coins = [((0, 1.0 - q), (1, q)) if some else ((0, 1.0),) for some in own]
        return {tuple(v for v, _ in row): math.prod(p for _, p in row) for row in product(coins)}
    if isinstance(sampler, Deterministic):
        chances = [t == example // sampler.batch_size for t in range(length)]
    elif isinstance(sampler, BallsAndBins):
        chances = [some / sum(own) for some in own]
    elif isinstance(sampler, Shuffle):  # shards of equal sizes, in turn
        count = sampler.num_examples // sampler.num_shards
        steps = [r * sampler.num_shards // sampler.batch_size for r in range(count)]
        chances = [steps.count(t) / count for t in range(length)]
    rows = map(tuple, np.eye(length, dtype=int).tolist())
    return {row: p for row, p in zip(rows, chances, strict=True) if p}


def product(parts):
    return itertools.product(*parts)


def matrix_law(sampler):
    """Law of one epoch's participation matrix, uint8[examples, steps]: {bytes: probability}."""
    n, found = sampler.num_examples, Counter()
    if isinstance(sampler, UnitsThenPoisson):  # units of three examples, the last of what is left
        units, q = [range(i, min(i + 3, n)) for i in range(0, n, 3)], sampler.sampling_prob
        choices = list(itertools.combinations(units, sampler.draws[0]))
        for leaves in (list(itertools.chain(*some)) for some in choices):
            for row in product([(0, 1)] * len(leaves)):
                cell = np.zeros((n, 1), np.uint8)
                cell[leaves, 0] = row
                chance = q ** sum(row) * (1.0 - q) ** (len(row) - sum(row))
                found[cell.tobytes()] += chance / len(choices)
        return found
    if isinstance(sampler, Shuffle):
        orders = list(itertools.permutations(range(n)))
        rows = np.eye(sampler.steps_per_epoch, dtype=np.uint8)
        for order in orders:
            found[rows[np.array(order) // sampler.batch_size].tobytes()] += 1 / len(orders)
        return found
    for matrix in product([row_law(sampler, i).items() for i in range(n)]):
        cell = np.array([row for row, _ in matrix], np.uint8)
        found[cell.tobytes()] += math.prod(p for _, p in matrix)
    return found


def summed(law, count):
    """Law of the sum of `count` independent draws of a law of vectors."""
    total = {(0,) * len(next(iter(law))): 1.0}
    for _ in range(count):
        more = Counter()
        for (v, p), (w, q) in product([total.items(), law.items()]):
            more[tuple(a + b for a, b in zip(v, w, strict=True))] += p * q
        total = more
    return total


def cut(others, own, cap):
    """Yields (probability, own rows kept, rows kept) of a batch of `own` and `others` rows."""
    total = own + others
    size = min(total, cap)
    for kept in range(max(0, size - others), min(own, size) + 1):
        ways = math.comb(own, kept) * math.comb(others, size - kept)
        yield ways / math.comb(total, size), kept, size


def draw_cells(mine, others, cap, other):
    """Cells of one draw: `mine` and `others` are laws of rows by step, the latter given the former.

    Where `others` is a function, it takes the steps of the unit's own rows.
    """
    cells = Counter()
    for own, p in mine.items():
        for drawn, q in (others(own) if callable(others) else others).items():
            for kept in product(cut(*pair, cap) for pair in zip(drawn, own, strict=True)):
                without = tuple(x * (size - k) for _, k, size in kept for x in other)
                with_it = list(without)
                for t, (_, k, _) in enumerate(kept):
                    with_it[t * len(other)] += k
                cells[tuple(with_it), without] += p * q * math.prod(part[0] for part in kept)
    return cells


def joined(parts):
    """Cells of independent releases, one after another."""
    cells = Counter()
    for some in product([part.items() for part in parts]):
        at = (sum((cell[which] for cell, _ in some), ()) for which in (0, 1))
        cells[tuple(at)] += math.prod(p for _, p in some)
    return cells


def added(parts):
    """Cells of the sum of independent releases."""
    cells = Counter()
    for some in product([part.items() for part in parts]):
        at = (np.sum([cell[which] for cell, _ in some], axis=0) for which in (0, 1))
        cells[tuple(map(tuple, at))] += math.prod(p for _, p in some)
    return cells


def steps_of(attempt):
    return [t for one in ([attempt] if isinstance(attempt, range) else attempt) for t in one]


def released_cells(sampler, attempts, other, example=0, owns=(1,)):
    """Cells of attempts' releases in the group of an example, with `owns` own rows by shard."""
    length, cycle = sampler.steps_per_epoch, getattr(sampler, "cycle_length", 1)
    draws = []
    for attempt in attempts:
        of_draw = {}
        for t in steps_of(attempt):
            if t % cycle == example % cycle:
                of_draw.setdefault(sampler.drawn_epoch(t // length), []).append(t % length)
        for steps in of_draw.values():
            row = Counter()
            for places, p in row_law(sampler, example, steps).items():
                row[tuple(places[t] for t in steps)] += p
            draws.append(added([_draw(sampler, row, own, other, steps) for own in owns]))
    return joined(draws)


def _draw(sampler, row, own, other, steps):
    if isinstance(sampler, Shuffle):  # the sizes of batches are known
        sizes = [min(sampler.batch_size, sampler.num_examples - t * sampler.batch_size)
                 for t in steps]  # fmt: skip
        return draw_cells(row, lambda one: {tuple(np.subtract(sizes, one)): 1.0}, math.inf, other)
    mine = summed(row, own)
    if sampler.accumulates:  # what others do changes nothing
        return draw_cells(mine, {(0,) * len(steps): 1.0}, math.inf, other)
    group = len(range(0, len(sampler.shard_range(0)), sampler.cycle_length))
    return draw_cells(mine, summed(row, group - own), sampler.shard_batch_size, other)


def unit_cells(sampler, other):
    """Cells of a step that draws one of two units of equal sizes; rows of the second are -other."""
    rows, cap, cells = sampler.num_examples // 2, sampler.shard_batch_size, Counter()
    coin = {(0,): 1.0 - sampler.sampling_prob, (1,): sampler.sampling_prob}
    for own, sign in ((1, 1.0), (0, -1.0)):
        theirs = [sign * x for x in other]
        drawn = draw_cells(summed(coin, own), summed(coin, rows - own), cap, theirs)
        for at, p in drawn.items():
            cells[at] += 0.5 * p
    return cells


def hockey_sticks(cells, sigma, *epsilons):
    """Integrates (P - e^eps Q)_+ and (Q - e^eps P)_+ to about 1e-4: the larger, by epsilon."""
    means = np.array(list(cells))  # [cells, with or without, coordinates]
    used = np.flatnonzero(np.any(means != means[:1, :1], axis=(0, 1)))
    points = {0: 1, 1: 2001, 2: 401, 3: 71, 4: 35}[used.size]
    every = means[:, :, used]
    z, step = np.linspace(
        every.min(initial=0.0) - 6 * sigma, every.max(initial=0.0) + 6 * sigma, points, retstep=True
    )
    densities = []
    for which in (0, 1):
        merged = Counter()
        for mean, p in zip(every[:, which].tolist(), cells.values(), strict=True):
            merged[tuple(mean)] += p
        weight = np.array([[*merged.values()]])  # [points so far, cells]
        normals = np.exp(-0.5 * ((z - np.array([*merged])[:, :, None]) / sigma) ** 2)
        normals *= step / (sigma * math.sqrt(2.0 * math.pi))  # [cells, coordinates, points]
        for k in range(used.size - 1):
            weight = (weight[:, None] * normals[:, k].T).reshape(-1, len(merged))
        densities.append(weight @ normals[:, -1] if used.size else weight.sum(axis=1))
    p, q = densities
    pairs = [(x, math.exp(epsilon) * y) for epsilon in epsilons for x, y in ((p, q), (q, p))]
    return np.reshape([np.maximum(x - y, 0).sum() for x, y in pairs], (-1, 2)).max(axis=1)


def worst_deltas(sampler, sigma, attempts, other, epsilons):
    """Larger direction's deltas of an example, or of a user with as many rows as there may be."""
    if isinstance(sampler, UnitsThenPoisson):
        return hockey_sticks(unit_cells(sampler, other), sigma, *epsilons)
    units = [(1,)]
    if isinstance(sampler, UserPoisson):
        tau, shards = sampler.max_contributions, sampler.num_shards
        units = [(k, tau - k)[:shards] for k in range(tau * (shards == 1), tau + 1)]
    groups = product([range(getattr(sampler, "cycle_length", 1)), units])
    laws = (released_cells(sampler, attempts, other, *group) for group in groups)
    return np.max([hockey_sticks(law, sigma, *epsilons) for law in laws], axis=0)
