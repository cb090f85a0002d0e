"""Parts of runs, each with a seed of its own, never cost less than what they release."""

import functools

import pytest

from samplers import BallsAndBins, Deterministic, Poisson, Shuffle

SIGMA, DELTA = 1.0, 1e-5
SIZES = {"num_examples": 1000, "batch_size": 50, "epochs": 4}  # 20 steps an epoch
SAMPLERS = [
    Deterministic(**SIZES),
    Shuffle(**SIZES),
    Shuffle(**SIZES, order="fixed"),
    Poisson(**SIZES),
    Poisson(**SIZES, max_batch_size=105),
    BallsAndBins(**SIZES),
    BallsAndBins(**SIZES, max_batch_size=105),
    BallsAndBins(**SIZES, assignment="fixed"),
]
ONCE_AN_EPOCH = [sampler for sampler in SAMPLERS if not isinstance(sampler, Poisson)]


@functools.cache
def upper(profile):
    return profile.epsilon(DELTA).upper


@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
def test_one_segment_of_all_steps_is_the_whole_run(sampler):
    whole = sampler.privacy_of(SIGMA, [range(sampler.num_steps)])
    assert whole == sampler.privacy(SIGMA)


@pytest.mark.short("Deterministic*", "Shuffle*fixed*", "Poisson*None, t*", "BallsAndBins*None, t*")
@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
def test_a_rerun_costs_more_and_a_part_costs_less(sampler):
    whole = upper(sampler.privacy(SIGMA))
    again = upper(sampler.privacy_of(SIGMA, [range(sampler.num_steps), range(60, 80)]))
    part = upper(sampler.privacy_of(SIGMA, [range(21)]))
    assert part < whole < again


@pytest.mark.parametrize("sampler", ONCE_AN_EPOCH, ids=repr)
def test_part_of_an_epoch_counts_as_the_whole(sampler):
    part = sampler.privacy_of(SIGMA, [range(19, 21)])
    assert part == sampler.privacy_of(SIGMA, [range(40)])


def test_poisson_counts_steps_wherever_they_lie():
    sampler = Poisson(**SIZES)
    parts = sampler.privacy_of(SIGMA, [range(7), range(3, 16)])
    assert parts == sampler.privacy_of(SIGMA, [range(20)])


@pytest.mark.parametrize("sampler", ONCE_AN_EPOCH, ids=repr)
def test_segments_never_cost_more_than_in_a_known_order(sampler):
    # Given who took part when, an example enters one known sum an epoch: deterministic's cost.
    parts = [range(0, 25), range(20, 80)]  # two epochs and three; fixed draws count three twice
    known = Deterministic(SIZES["num_examples"], SIZES["batch_size"], epochs=6)
    assert upper(sampler.privacy_of(SIGMA, parts)) <= 1.01 * upper(known.privacy(SIGMA))


@pytest.mark.parametrize("kind", [Poisson, BallsAndBins])
def test_the_cap_of_the_run_stays_when_more_epochs_are_asked_for(kind):
    sampler = kind(**SIZES)
    more = sampler.with_epochs(400)
    assert more.padded_batch_size == sampler.padded_batch_size
    assert kind(**{**SIZES, "epochs": 400}).padded_batch_size > sampler.padded_batch_size
