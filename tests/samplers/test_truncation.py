"""The cap on batches of random size: who is cut, what it costs, and the mode that cuts nobody."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
from scipy import stats

from accounting import default_delta
from accounting.profiles.truncation import TruncatedProfile
from samplers import BallsAndBins, BatchSource, Poisson

FALSE_ALARM = 1e-6
VARIABLE = [Poisson, BallsAndBins]


@pytest.fixture(params=VARIABLE)
def variable(request):
    """Each sampler whose batches vary in size."""
    return request.param


@pytest.mark.parametrize(
    ("n", "b", "epochs", "shards"),
    [(36_864_000, 1024, 1, 1), (100_000, 500, 30, 1), (20, 3, 1, 1), (100_000, 500, 3, 8)],
)
def test_default_cap_is_the_smallest_at_a_hundredth_of_delta(variable, n, b, epochs, shards):
    sampler = variable(n, b, epochs, num_shards=shards)
    rows, q = math.ceil(n / shards), sampler.sampling_prob

    def spent(cap):  # that an example's own batch overflows and keeps it; or several bins are full
        pi = sampler.num_steps * cap / rows * stats.binom.sf(cap, rows, q)
        if cap < rows * q:
            pi = sampler.num_steps * q * stats.binom.sf(cap - 1, rows - 1, q)
        tails = [0.0]
        if isinstance(sampler, BallsAndBins):
            bins, full = sampler.steps_per_epoch, stats.binom.sf(cap - 1, rows - 1, q)
            tails = [epochs * math.comb(bins, o + 1) * full ** (o + 1) for o in range(min(6, bins))]
        return pi + pi**2 / 2 + min(tails)

    delta = default_delta(n)
    assert spent(sampler.shard_batch_size) <= 0.01 * delta * (1 + 1e-6)
    assert spent(sampler.shard_batch_size - 1) > 0.01 * delta
    assert sampler.padded_batch_size == shards * sampler.shard_batch_size
    less = variable(n, b, epochs, target_delta=1e-3 * delta, num_shards=shards)
    assert less.padded_batch_size >= sampler.padded_batch_size


PADDING = [(1024, 1, 0.21), (8192, 1, 0.075), (1024, 8, 0.65), (1024, 64, 2.07)]


@pytest.mark.parametrize(("b", "shards", "at_most"), PADDING)
def test_default_padding_is_small(variable, b, shards, at_most):
    sampler = variable(37_000_000, b, num_shards=shards, target_delta=2.7e-8)
    assert sampler.padded_batch_size / b - 1 <= at_most


def test_several_passes_hold_any_batch_but_with_a_rare_chance(variable):
    sampler = variable(100_000, 500, 3, max_batch_size=100, overflow="accumulate")
    largest = sampler.max_passes * 100
    chance = sampler.num_steps * stats.binom.sf(largest, 100_000, sampler.sampling_prob)
    assert chance <= 1e-5 * default_delta(100_000)


def test_default_cap_is_rechosen_and_a_given_cap_stays(variable):
    chosen = variable(10_000, 100, 1)
    again = dataclasses.replace(chosen, batch_size=400)
    assert again == variable(10_000, 400, 1)
    assert again.padded_batch_size > 400 > chosen.padded_batch_size
    given = variable(10_000, 100, 1, max_batch_size=120)
    assert dataclasses.replace(given, epochs=7).padded_batch_size == 120


def test_batch_refuses_a_step_of_several_passes():
    source = BatchSource(BallsAndBins(10, 10, max_batch_size=4, overflow="accumulate"), 0)
    with pytest.raises(ValueError, match="step 0 needs 3 passes of 4 examples"):
        source.batch(0)
    assert [one.weights.sum() for one in source.passes(0)] == [4, 4, 2]
    assert source.sampler.accumulates
    assert not BallsAndBins(10, 10).accumulates


def test_every_set_of_survivors_is_equally_likely_in_every_step(variable):
    # A step of six with a cap of three: 20 sets. The members' numbers must not matter.
    sampler = variable(100, 3, 400, max_batch_size=3)
    for members in ([0, 1, 2, 3, 4, 5], [3, 14, 15, 92, 95, 99]):
        sets = {kept: 0 for kept in itertools.combinations(members, 3)}
        for step, shard in itertools.product(range(500), range(8)):  # each draws by itself
            (kept,) = sampler.passes(np.array(members, np.int32), 11, step, shard)
            sets[tuple(kept.tolist())] += 1
        assert stats.chisquare(list(sets.values())).pvalue > FALSE_ALARM


def test_a_batch_may_be_empty_and_is_then_all_padding():
    source = BatchSource(Poisson(20, 1, 20), 3)
    empty = 0
    for step in range(400):
        one = source.batch(step)
        assert one.indices.shape == one.weights.shape == (source.sampler.padded_batch_size,)
        if one.weights.sum() == 0:
            empty += 1
            assert not one.indices.any()
    assert stats.binomtest(empty, 400, 0.95**20).pvalue > FALSE_ALARM


@pytest.mark.parametrize("eps", [0.0, 0.3])
def test_cost_includes_truncation_and_accumulating_is_free(variable, eps):
    n, b, epochs, cap = 2000, 50, 2, 75
    cut = variable(n, b, epochs, max_batch_size=cap)
    whole = variable(n, b, epochs, max_batch_size=cap, overflow="accumulate")
    untruncated = whole.privacy(1.0).delta(eps)
    own = cut.num_steps * cap / n * stats.binom.sf(cap, n, b / n)
    paid = cut.privacy(1.0).delta(eps).upper - untruncated.upper
    # Of runs that keep the example in an overflowing batch, a part alone tells the data apart.
    most = 1.1 if isinstance(cut, Poisson) else 6.0  # full bins cost as well
    assert 0.1 * own <= paid <= most * own
    assert paid > 1e-5
    assert dataclasses.replace(whole, max_batch_size=1).privacy(1.0).delta(eps) == untruncated


# ------------------------------------------------------------------------------------------ shards


def chances_of_an_example(sampler, group):
    """Exact chances, over a run, that an example of shard 0 is kept in a cut batch, and dropped."""
    size = int(np.sum(np.array(sampler.shard_range(0)) % sampler.cycle_length == group))
    others = np.arange(size)
    law = sampler.sampling_prob * stats.binom.pmf(others, size - 1, sampler.sampling_prob)
    law *= others >= sampler.shard_batch_size
    kept = law * sampler.shard_batch_size / (others + 1)
    steps = sampler.num_steps // sampler.cycle_length
    return steps * kept.sum(), steps * (law - kept).sum()


@pytest.mark.parametrize("shards", [1, 2, 4, 7])
@pytest.mark.parametrize("cycle", [1, 3])
@pytest.mark.parametrize("cap", [3, 4])
def test_only_an_example_s_own_shard_and_group_count(variable, shards, cycle, cap):
    sampler = variable(23, 3, 2, max_batch_size=cap, num_shards=shards, cycle_length=cycle)
    paid = sampler.privacy(1.0)
    for group in range(cycle):
        kept, dropped = chances_of_an_example(sampler, group)
        if not isinstance(paid, TruncatedProfile):
            assert kept == dropped == 0.0
            continue
        flagged = math.exp(paid.cases[0].flagged[0].log_probability)
        assert kept <= flagged * (1 + 1e-8)
        most = math.exp(paid.log_thinned)
        most *= 1.0 if isinstance(sampler, BallsAndBins) else sampler.sampling_prob
        assert dropped <= most * (1 + 1e-8)
        if cap >= sampler.largest_group * sampler.sampling_prob + 1 and kept > 0.0:
            assert flagged <= 6 * kept  # of groups that differ by one example at most


@pytest.mark.short("BallsAndBins")
def test_draws_cut_an_example_s_batch_as_often_as_the_law_says(variable):
    sampler = variable(23, 3, 2, max_batch_size=3, num_shards=4)
    kept, dropped = chances_of_an_example(sampler, 0)
    found = np.zeros(2, int)
    runs = 400
    for seed in range(runs):
        for step in range(sampler.num_steps):
            epoch, within = divmod(step, sampler.steps_per_epoch)
            members = sampler.shard_plan(seed, epoch, 0).members(within)
            if members.size > 3 and 0 in members:
                (rows,) = sampler.passes(members, seed, step, 0)
                found += [0 in rows, 0 not in rows]
    # An example is in few batches of a run: counts are about Poisson.
    for count, mean in zip(found, (runs * kept, runs * dropped), strict=True):
        assert stats.poisson.cdf(count, mean) > FALSE_ALARM
        assert stats.poisson.sf(count - 1, mean) > FALSE_ALARM
