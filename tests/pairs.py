"""Covering arrays: few rows in which each pair of values of two options occurs."""

import itertools
import random

TRIES = 8


def pairs_of(row):
    """The pairs of (option, value) in a row."""
    return {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}


def covering(options, refused, seed=0):
    """Rows, a value of each option, in which every pair of values occurs that can.

    Args:
      options: Name -> its values, of which the first goes with nearly all others.
      refused: Whether a part of a row, name -> value, cannot be.
      seed: Of the greedy search: of some rows that begin with a pair which is still missing, each
        filled by the values that add most, the one with most new pairs is taken.
    """
    rng = random.Random(seed)
    missing = [
        pair
        for one, other in itertools.combinations(options, 2)
        for pair in itertools.product(*([(n, value) for value in options[n]] for n in (one, other)))
        if not refused(dict(pair))
    ]
    missing, rows = set(map(frozenset, missing)), []

    def filled(row):
        for name in rng.sample(list(options), len(options)):
            if name in row:
                continue
            possible = [v for v in options[name] if not refused(row | {name: v})]
            if not possible:
                return None
            new = [sum(frozenset([(name, v), x]) in missing for x in row.items()) for v in possible]
            best = [v for v, count in zip(possible, new, strict=True) if count == max(new)]
            row = row | {name: rng.choice(best)}
        return row

    while missing:
        first = sorted(missing, key=sorted)
        found = [filled(dict(rng.choice(first))) for _ in range(TRIES)]
        rows.append(max(filter(None, found), key=lambda row: len(pairs_of(row) & missing)))
        missing -= pairs_of(rows[-1])
    return [{name: row[name] for name in options} for row in rows]
