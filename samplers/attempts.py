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
"""Steps that one attempt releases: one range of the run's steps, or several disjoint ranges."""

Sizes = Mapping[int, np.ndarray]
"""Number of an epoch's steps by how many times they are released: {times: int64[groups]}."""


def check_attempts(attempts: Sequence[Attempt], num_steps: int) -> list[list[range]]:
    """Returns the sorted ranges of each attempt.

    >>> check_attempts([range(0, 20), [range(30, 40), range(15, 20)]], num_steps=40)
    [[range(0, 20)], [range(15, 20), range(30, 40)]]

    Args:
      attempts: Steps of each attempt.
      num_steps: Number of steps of the run.

    Raises:
      ValueError: If there is no attempt, or a range is empty, leaves the run or overlaps another.
    """
    if not attempts:
        raise ValueError("attempts=[] release nothing: pass one range of steps or more")
    return [_checked(f"attempts[{i}]", steps, num_steps) for i, steps in enumerate(attempts)]


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
    for earlier, later in itertools.pairwise(ranges):
        if later.start < earlier.stop:
            raise ValueError(
                f"{name} has overlapping ranges, {earlier} and {later}: list steps that are "
                "released again as another attempt"
            )
    if not ranges:
        raise ValueError(f"{name}=[] releases nothing: leave it out")
    return ranges


def sizes_of(ranges: Iterable[range], steps_per_epoch: int, groups: int = 1) -> Sizes:
    """Counts an epoch's steps by how often they are released.

    >>> sizes = sizes_of([range(0, 25), range(30, 32)], steps_per_epoch=10)
    >>> {times: size.tolist() for times, size in sizes.items()}
    {4: [2], 3: [3], 2: [5]}

    Args:
      ranges: Steps of the run.
      steps_per_epoch: Number T of steps of one epoch.
      groups: Number c of groups: step t is of group t mod c.
    """
    changes = Counter({0: 0})
    for steps in ranges:
        first, begin = divmod(steps.start, steps_per_epoch)
        last, rest_steps = divmod(steps.stop, steps_per_epoch)
        changes[0] += last - first + (rest_steps > 0) - (begin > 0)
        changes[rest_steps] -= rest_steps > 0
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
    """Returns the number of complete epochs, and partial epochs' sizes.

    Arguments as in `sizes_of`, with sorted ranges of one attempt.
    """
    length, complete = steps_per_epoch, 0
    ranges_by_epoch: dict[int, list[range]] = {}
    for steps in ranges:
        first, last = steps.start // length, (steps.stop - 1) // length
        complete += max(0, last - first - 1)
        for epoch in {first, last}:
            low, high = max(steps.start, epoch * length), min(steps.stop, (epoch + 1) * length)
            ranges_by_epoch.setdefault(epoch, []).append(range(low, high))
    partial = [steps for steps in ranges_by_epoch.values() if sum(map(len, steps)) < length]
    complete += len(ranges_by_epoch) - len(partial)
    return complete, [sizes_of(steps, length, groups) for steps in partial]


def entered_epochs(ranges: Sequence[range], steps_per_epoch: int) -> list[range]:
    """Extends an attempt to all steps of the epochs it enters.

    >>> entered_epochs([range(9, 11), range(45, 46)], steps_per_epoch=10)
    [range(0, 20), range(40, 50)]

    Args:
      ranges: Sorted steps of one attempt.
      steps_per_epoch: Number T of steps of one epoch.
    """
    length, merged = steps_per_epoch, list[range]()
    for steps in ranges:
        start, stop = steps.start // length * length, -(-steps.stop // length) * length
        if merged and start <= merged[-1].stop:
            start = merged.pop().start
        merged.append(range(start, stop))
    return merged


def most_released(sizes: Sizes) -> tuple[tuple[int, int], ...]:
    """Returns pairs (times, steps) that bound every group from above.

    For each number of times, no group has more steps released at least so often than the pairs.

    >>> most_released({0: np.array([1, 2]), 1: np.array([3, 2]), 2: np.array([0, 1])})
    ((0, 2), (1, 2), (2, 1))
    """
    return _pairs(sizes, np.max)


def least_released(sizes: Sizes) -> tuple[tuple[int, int], ...]:
    """Returns pairs (times, steps) that bound every group from below.

    For each number of times, every group has the pairs' steps released at least so often, or more.
    """
    return _pairs(sizes, np.min)


def _pairs(sizes: Sizes, choose: Any) -> tuple[tuple[int, int], ...]:
    pairs, previous = [], 0
    cumulative = np.zeros_like(next(iter(sizes.values())))
    for times in sorted(sizes, reverse=True):
        cumulative = cumulative + sizes[times]
        steps = int(choose(cumulative))
        if steps > previous:
            pairs.append((times, steps - previous))
        previous = steps
    return tuple(sorted(pairs))


def of_group(sizes: Sizes, group: int) -> tuple[tuple[int, int], ...]:
    """Returns the pairs (times, steps) of one group.

    Args:
      sizes: Number of steps by times, for every group.
      group: Index of the group.
    """
    return tuple((t, int(sizes[t][group])) for t in sorted(sizes) if sizes[t][group])


def releases(sizes: Sizes) -> np.ndarray:
    """Returns each group's total number of releases: int64[groups].

    >>> releases({0: np.array([1, 2]), 2: np.array([3, 2])})
    array([6, 4])
    """
    return np.sum([times * size for times, size in sizes.items()], axis=0)
