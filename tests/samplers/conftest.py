"""The list of samplers: one line here gives a sampler every test of `test_every_sampler.py`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy import stats

from samplers import (
    BallsAndBins,
    BatchSampler,
    Deterministic,
    FullBatch,
    Multistage,
    Poisson,
    Shuffle,
    UnitsThenPoisson,
    UnitTree,
    UserPoisson,
)


def multistage(n: int, b: int, epochs: int = 1, **options: Any) -> BatchSampler:
    """B of the units that n examples lie in, and one example of each, in each step."""
    tree = UnitTree.from_columns({"unit": np.arange(n) // 3})
    return Multistage(tree, (min(b, -(-n // 3)), 1), steps=-(-n // b) * epochs, **options)


def units_then_poisson(n: int, b: int, epochs: int = 1, **options: Any) -> BatchSampler:
    """B of the units that n examples lie in, and half of their examples, in each step."""
    tree = UnitTree.from_columns({"unit": np.arange(n) // 3})
    drawn = (min(b, -(-n // 3)),)
    return UnitsThenPoisson(tree, drawn, 0.5, steps=-(-n // b) * epochs, **options)


def full_batch(n: int, b: int, epochs: int = 1, **options: Any) -> BatchSampler:
    """All n examples in each step."""
    return FullBatch(n, -(-n // b) * epochs, **options)


def user_poisson(n: int, *sizes: int, **options: Any) -> BatchSampler:
    """Users of up to three examples."""
    return UserPoisson(n, *sizes, max_contributions=min(3, n), **options)


def cut(kind: Callable[..., BatchSampler]) -> Callable[..., BatchSampler]:
    """Batches that are often cut, or summed in passes."""
    return lambda n, b, *args, **options: kind(n, b, *args, max_batch_size=b + 1, **options)


def cyclic(kind: Callable[..., BatchSampler]) -> Callable[..., BatchSampler]:
    """Two groups, where there are as many steps."""
    return lambda n, b, *args, **options: kind(n, b, *args, cycle_length=min(2, n // b), **options)


EPOCH_SAMPLERS: dict[str, Callable[..., BatchSampler]] = {
    "deterministic": Deterministic,
    "shuffle": Shuffle,
    "shuffle-fixed": functools.partial(Shuffle, order="fixed"),
    "poisson": Poisson,
    "balls-and-bins": BallsAndBins,
    "balls-and-bins-fixed": functools.partial(BallsAndBins, assignment="fixed"),
    "user-poisson": user_poisson,
}
SAMPLERS = EPOCH_SAMPLERS | {
    "multistage": multistage,
    "units-then-poisson": units_then_poisson,
    "full-batch": full_batch,
    "full-batch-passes": functools.partial(full_batch, max_batch_size=3),
    "poisson-cut": cut(Poisson),
    "balls-and-bins-cut": cut(BallsAndBins),
    "poisson-passes": functools.partial(cut(Poisson), overflow="accumulate"),
    "poisson-cyclic": cyclic(Poisson),
    "balls-and-bins-cyclic": cyclic(BallsAndBins),
}


def matrix(sampler: BatchSampler, seed: int, epoch: int = 0) -> np.ndarray:
    """Returns an epoch's participation matrix, uint8[examples, steps]."""
    plan = sampler.plan(seed, epoch)
    found = np.zeros((sampler.num_examples, sampler.steps_per_epoch), np.uint8)
    for step in range(sampler.steps_per_epoch):
        np.add.at(found, (plan.members(step), step), 1)
    return found


FALSE_ALARM = 1e-6  # of each statistical test; seeds are fixed, so a test that passes stays so


@pytest.fixture(params=SAMPLERS.values(), ids=SAMPLERS.keys())
def make(request: pytest.FixtureRequest) -> Callable[..., BatchSampler]:
    """Each sampler in turn, as a function of (num_examples, batch_size, epochs)."""
    return request.param


@pytest.fixture(params=EPOCH_SAMPLERS.values(), ids=EPOCH_SAMPLERS.keys())
def make_epochs(request: pytest.FixtureRequest) -> Callable[..., BatchSampler]:
    """Each sampler of epochs in turn, likewise."""
    return request.param


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Lets a small data set have many chunks."""
    return lambda size: monkeypatch.setattr("samplers.plans.CHUNK", size)


@pytest.fixture
def assert_law() -> Callable[[np.ndarray, np.ndarray], None]:
    """Chi-square test of counts against the exact probabilities of their cells."""

    def check(counts: np.ndarray, probabilities: np.ndarray) -> None:
        assert np.isclose(probabilities.sum(), 1.0)
        assert not np.any(counts[probabilities == 0]), "an impossible outcome happened"
        counts, probabilities = counts[probabilities > 0], probabilities[probabilities > 0]
        assert (probabilities * counts.sum()).min() >= 5, "too few draws for a chi-square test"
        if counts.size > 1:
            assert stats.chisquare(counts, probabilities * counts.sum()).pvalue > FALSE_ALARM

    return check
