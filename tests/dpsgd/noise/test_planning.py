"""Over how many steps noise is to be correlated: errors at equal guarantees, and what limits b."""

import math
from dataclasses import replace

import pytest

from accounting import epsilon
from dpsgd import Mechanism
from dpsgd.noise import planning
from dpsgd.noise.planning import (
    Goal,
    best_noise,
    candidate,
    most_bands,
    plan,
    tried_bands,
    tried_buffers,
    workload,
)
from experiments.benchmarks.correlated import error_at
from samplers import BallsAndBins, Deterministic, Poisson, Shuffle, UserPoisson


@pytest.fixture
def uncalibrated(monkeypatch):
    """Every sigma is 1, once its guarantee was asked for."""
    monkeypatch.setattr(planning, "calibrate", lambda privacy, **of: 1.0 if privacy(1.0) else 0.0)


def test_every_candidate_is_a_mechanism_of_the_guarantee():
    sampler = BallsAndBins(4000, 100, 2)
    for found in plan(sampler, Goal(3.0, 1e-4, momentum=0.9), [4]):
        mechanism = Mechanism(found.sampler, found.noise_multiplier, 1.0, found.noise)
        assert found.sampler.cycle_length == found.bands == mechanism.noise.bands
        assert 2.98 < epsilon(mechanism.privacy(), 1e-4).upper <= 3.0
        assert found.noise == best_noise(found.sampler, found.bands, momentum=0.9)


def test_errors_are_those_of_strategies_where_runs_have_equal_steps():
    sampler = Deterministic(500, 5, 2)
    alone, banded = plan(sampler, Goal(2.0, 1e-3, momentum=0.5), [7])
    run = workload(sampler, momentum=0.5)
    one, other = (
        error_at(c.noise, run, sampler, epsilon=2.0, delta=1e-3)[1] for c in (alone, banded)
    )
    assert banded.error == pytest.approx(other / one, rel=1e-5)


@pytest.mark.parametrize("kind", [BallsAndBins, Poisson])
def test_more_steps_than_wanted_are_compared_at_the_distance_that_they_move(kind, uncalibrated):
    """Of 10 steps, b = 7 makes 14: the noise of a unit moved is that of sums over both."""
    one, found = plan(kind(100, 10), Goal(5.0, 1e-2, schedule="constant"), [7])
    assert found.sampler.num_steps == 14
    alone, spread = (
        math.sqrt(workload(c.sampler, schedule="constant").mean_square(c.noise))
        for c in (one, found)
    )
    size = {BallsAndBins: 100 / 14, Poisson: 10}[kind]
    assert found.error == pytest.approx(spread / (14 * size) / (alone / (10 * 10)))


@pytest.mark.parametrize(
    ("sampler", "most"),
    [
        (BallsAndBins(1000, 100, 3), 10),
        (BallsAndBins(1000, 100, 3, cycle_length=5), 10),
        (Poisson(1050, 100, 3), 10),  # a group of 1 in 11 has no 100 examples
        (Deterministic(1050, 100, 3), 11),
        (Shuffle(1050, 100, 3, order="fixed"), 11),
        (Shuffle(1050, 100, 3), 1),
        (UserPoisson(1000, 100, 3, max_contributions=2), 1),
    ],
)
def test_the_most_bands_are_those_that_a_sampler_has_a_guarantee_for(sampler, most, uncalibrated):
    assert most_bands(sampler) == most
    assert plan(sampler, Goal(9.0, 0.05), [most])[-1].bands == most
    with pytest.raises(ValueError, match=rf"bands must be in \[1, {most}\]") as error:
        plan(sampler, Goal(9.0, 0.05), [most + 1])
    assert "\n" not in str(error.value)


def test_the_history_fits_into_the_memory():
    sampler = BallsAndBins(1000, 10)
    assert most_bands(sampler, memory=4e6 * 7, num_params=1_000_000) == 8
    assert most_bands(sampler, memory=4e6 * 7 - 1, num_params=1_000_000) == 7
    assert most_bands(sampler, memory=1.0, num_params=1_000_000) == 1
    assert most_bands(sampler, memory=1e12, num_params=1_000_000) == 100


def test_a_known_order_is_offered_buffers_whose_guarantee_is_the_same():
    sampler = Deterministic(2000, 10, 2)
    goal = Goal(2.0, 1e-4, momentum=0.9)
    one, banded, *buffered = plan(sampler, goal, [8], buffers=[1, 2, 3, 4])
    assert (one.error, banded.bands) == (1.0, 8)
    assert 1 <= len(buffered) < 4  # what hardly gains is left out
    assert [c.name for c in buffered] == [f"BLT {k}" for k in range(1, len(buffered) + 1)]
    for found in buffered:
        assert found.error < 0.5 * banded.error
        mechanism = Mechanism(found.sampler, found.noise_multiplier, 1.0, found.noise)
        assert 1.99 < epsilon(mechanism.privacy(), 1e-4).upper <= 2.0
        assert found.noise == best_noise(sampler, buffers=found.noise.kept, momentum=0.9)
        assert found.noise_multiplier > one.noise_multiplier  # as columns overlap
    shuffled = candidate(Shuffle(2000, 10, 2, order="fixed"), goal, buffers=1)
    assert shuffled == replace(buffered[0], sampler=shuffled.sampler, alone=shuffled.rmse)


def test_buffers_are_for_known_orders_and_as_many_as_fit():
    sampler = Deterministic(1000, 100)
    assert tried_buffers(sampler) == [1, 2, 3, 4, 5]
    assert tried_buffers(sampler, memory=4e6 * 2, num_params=1_000_000) == [1, 2]
    assert tried_buffers(BallsAndBins(1000, 100)) == tried_buffers(Shuffle(1000, 100)) == []
    with pytest.raises(ValueError, match=r"order that is known, and BallsAndBins draws") as error:
        plan(BallsAndBins(1000, 100), Goal(9.0, 0.05), [], buffers=[2])
    assert "\n" not in str(error.value)


def test_powers_of_two_are_tried_up_to_what_is_possible():
    assert tried_bands(88) == [1, 2, 4, 8, 16, 32, 64, 88]
    assert tried_bands(36_000)[-2:] == [512, 1024]


def test_a_schedule_that_is_not_known_is_refused():
    with pytest.raises((TypeError, ValueError), match="schedule"):  # the first by checked types
        workload(Deterministic(100, 10), schedule="linear")
