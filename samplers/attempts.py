"""Attempts at a run's steps, drawn from different seeds, and their numbers of releases.

Proof of their prices: docs/explanation/partial-epochs.md.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

Attempt = range | Sequence[range]
"""The steps that one attempt releases: a range of the run's steps, or several that do not meet."""

Sizes = Mapping[int, np.ndarray]
"""Steps of an epoch by how often they are released: times to their number, int64[groups]."""


def check_attempts(attempts: Sequence[Attempt], num_steps: int) -> list[list[range]]:
    """Returns the sorted ranges of each attempt.

    >>> check_attempts([range(0, 20), [range(30, 40), range(15, 20)]], num_steps=40)
    [[range(0, 20)], [range(15, 20), range(30, 40)]]

    Args:
      attempts: Steps of each attempt.
      num_steps: Number of steps of the run.

    Raises:
      ValueError: If there is no attempt, or a range is empty, leaves the run, or overlaps another
        one of its attempt.
    """
    if not attempts:
        raise ValueError("attempts=[] release nothing: pass one range of steps or more")
    return [_checked(f"attempts[{i}]", one, num_steps) for i, one in enumerate(attempts)]


def _checked(name: str, attempt: Any, num_steps: int) -> list[range]:
    ranges = [attempt] if isinstance(attempt, range) else list(attempt)
    for steps in ranges:
        if not isinstance(steps, range) or steps.step != 1:
            raise ValueError(f"{name} must consist of ranges of consecutive steps, got {steps!r}")
        if not 0 <= steps.start < steps.stop <= num_steps:
            raise ValueError(
                f"{name}={steps} must be a range of one step or more within the run's "
                f"[0, {num_steps})"
            )
    ranges.sort(key=lambda steps: steps.start)
    for one, other in itertools.pairwise(ranges):
        if other.start < one.stop:
            raise ValueError(
                f"{name} has overlapping ranges, {one} and {other}: steps that are released again "
                "belong to another attempt"
            )
    if not ranges:
        raise ValueError(f"{name}=[] releases nothing: leave it out")
    return ranges


def sizes_of(ranges: Iterable[range], steps_per_epoch: int, groups: int = 1) -> Sizes:
    """Returns how many steps of an epoch are released how often, in each group.

    >>> sizes = sizes_of([range(0, 25), range(30, 32)], steps_per_epoch=10)
    >>> {times: size.tolist() for times, size in sizes.items()}
    {4: [2], 3: [3], 2: [5]}

    Args:
      ranges: Steps of the run.
      steps_per_epoch: T.
      groups: Number c of groups: step t is of group t mod c.
    """
    changes = Counter({0: 0})
    for steps in ranges:
        first, begin = divmod(steps.start, steps_per_epoch)
        last, end = divmod(steps.stop, steps_per_epoch)
        changes[0] += last - first + (end > 0) - (begin > 0)
        changes[end] -= end > 0
        changes[begin] += begin > 0
    group = np.arange(groups)
    sizes: dict[int, np.ndarray] = {}
    edges, times = [*sorted(changes), steps_per_epoch], 0
    for low, high in itertools.pairwise(edges):
        times += changes[low]
        size = -((group - high) // groups) + (group - low) // groups
        sizes[times] = sizes.get(times, 0) + size
    return sizes


def sizes_by_epoch(
    ranges: Sequence[range], steps_per_epoch: int, groups: int = 1
) -> tuple[int, list[Sizes]]:
    """Returns the number of epochs that are released whole, and the sizes of each other epoch.

    Args:
      ranges: Sorted steps of one attempt.
      steps_per_epoch: T.
      groups: See `sizes_of`.
    """
    length, whole = steps_per_epoch, 0
    parts: dict[int, list[range]] = {}
    for steps in ranges:
        first, last = steps.start // length, (steps.stop - 1) // length
        whole += max(0, last - first - 1)
        for epoch in {first, last}:
            low, high = max(steps.start, epoch * length), min(steps.stop, (epoch + 1) * length)
            parts.setdefault(epoch, []).append(range(low, high))
    partial = [part for part in parts.values() if sum(map(len, part)) < length]
    whole += len(parts) - len(partial)
    return whole, [sizes_of(part, length, groups) for part in partial]


def entered_epochs(ranges: Sequence[range], steps_per_epoch: int) -> list[range]:
    """Returns the steps of all epochs in which an attempt releases a step.

    >>> entered_epochs([range(9, 11), range(45, 46)], steps_per_epoch=10)
    [range(0, 20), range(40, 50)]

    Args:
      ranges: Sorted steps of one attempt.
      steps_per_epoch: T.
    """
    length, merged = steps_per_epoch, list[range]()
    for steps in ranges:
        start, stop = steps.start // length * length, -(-steps.stop // length) * length
        if merged and start <= merged[-1].stop:
            start = merged.pop().start
        merged.append(range(start, stop))
    return merged


def most_released(sizes: Sizes) -> tuple[tuple[int, int], ...]:
    """Returns pairs (times, number of steps) that no group exceeds, from most times on."""
    return _pairs(sizes, np.max)


def least_released(sizes: Sizes) -> tuple[tuple[int, int], ...]:
    """Returns pairs (times, number of steps) that every group attains, from most times on."""
    return _pairs(sizes, np.min)


def _pairs(sizes: Sizes, choose: Any) -> tuple[tuple[int, int], ...]:
    pairs, before = [], 0
    so_far = np.zeros_like(next(iter(sizes.values())))
    for times in sorted(sizes, reverse=True):
        so_far = so_far + sizes[times]
        steps = int(choose(so_far))
        if steps > before:
            pairs.append((times, steps - before))
        before = steps
    return tuple(sorted(pairs))


def of_group(sizes: Sizes, group: int) -> tuple[tuple[int, int], ...]:
    """Returns pairs (times, steps) of one group."""
    return tuple((t, int(sizes[t][group])) for t in sorted(sizes) if sizes[t][group])


def releases(sizes: Sizes) -> np.ndarray:
    """Returns the number of releases of each group's steps together: int64[groups]."""
    return np.sum([times * size for times, size in sizes.items()], axis=0)
