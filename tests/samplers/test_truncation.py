"""The cap on batches of random size: who is cut, what it costs, and the mode that cuts nobody."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
from scipy import stats

from accounting import default_delta, epsilon
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
def test_the_default_cap_is_the_smallest_that_costs_1e_5_of_delta_at_epsilon_10(
    variable, n, b, epochs, shards
):
    sampler = variable(n, b, epochs, num_shards=shards)

    def cost(cap):  # of all shards
        psi = stats.binom.sf(cap, math.ceil(n / shards), sampler.sampling_prob)
        return (1 + math.exp(10)) * shards * sampler.num_steps * psi

    delta = default_delta(n)
    assert cost(sampler.shard_batch_size) <= 1e-5 * delta * (1 + 1e-6)
    assert cost(sampler.shard_batch_size - 1) > 1e-5 * delta
    assert sampler.padded_batch_size == shards * sampler.shard_batch_size
    less = variable(n, b, epochs, target_delta=1e-3 * delta, num_shards=shards)
    assert less.padded_batch_size >= sampler.padded_batch_size


def test_a_cap_chosen_by_rule_is_chosen_anew_and_a_given_one_is_kept(variable):
    chosen = variable(10_000, 100, 1)
    again = dataclasses.replace(chosen, batch_size=400)
    assert again == variable(10_000, 400, 1)
    assert again.padded_batch_size > 400 > chosen.padded_batch_size
    given = variable(10_000, 100, 1, max_batch_size=120)
    assert dataclasses.replace(given, epochs=7).padded_batch_size == 120


@pytest.mark.parametrize("overflow", ["truncate", "accumulate"])
def test_a_small_cap_cuts_or_splits_and_nothing_else(variable, overflow):
    sampler = variable(300, 10, 2, max_batch_size=6, overflow=overflow)
    source = BatchSource(sampler, 77)
    block = source.fill(0, sampler.num_steps)
    sizes = []
    for step in range(sampler.num_steps):
        epoch, within = divmod(step, sampler.steps_per_epoch)
        members = sampler.plan(77, epoch).members(within)
        rows = slice(*block.starts[step : step + 2])
        seen = block.indices[rows][block.weights[rows] == 1]
        assert set(np.unique(block.weights)) <= {0.0, 1.0}
        sizes.append(members.size)
        if overflow == "accumulate":
            assert rows.stop - rows.start == max(1, math.ceil(members.size / 6))
            np.testing.assert_array_equal(seen, members)
        else:
            assert rows.stop - rows.start == 1
            assert seen.size == min(6, members.size)
            assert np.all(np.diff(seen) > 0)
            assert set(seen) <= set(members)
    assert max(sizes) > 12  # three passes happened
    assert min(sizes) < 6


def test_a_step_of_several_passes_is_never_handed_out_as_one_batch():
    source = BatchSource(BallsAndBins(10, 10, max_batch_size=4, overflow="accumulate"), 0)
    with pytest.raises(ValueError, match="step 0 needs 3 passes of 4 examples"):
        source.batch(0)
    assert [one.weights.sum() for one in source.passes(0)] == [4, 4, 2]
    assert source.sampler.accumulates
    assert not BallsAndBins(10, 10).accumulates


def test_every_set_of_survivors_is_equally_likely_in_every_step(variable):
    # A step of six with a cap of three: 20 sets. The members' numbers must not matter.
    sampler = variable(100, 10, 400, max_batch_size=3)
    for members in ([0, 1, 2, 3, 4, 5], [3, 14, 15, 92, 95, 99]):
        sets = {kept: 0 for kept in itertools.combinations(members, 3)}
        for step in range(4000):
            (kept,) = sampler.passes(np.array(members, np.int32), 11, step)
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
def test_the_cost_includes_truncation_and_accumulating_costs_nothing(variable, eps):
    n, b, epochs, cap = 2000, 50, 2, 85
    cut = variable(n, b, epochs, max_batch_size=cap)
    whole = variable(n, b, epochs, max_batch_size=cap, overflow="accumulate")
    untruncated = whole.privacy(1.0).delta(eps)
    q = b / n
    addition = (1 + math.exp(eps)) * cut.num_steps * stats.binom.sf(cap, n, q)
    assert addition > 1e-6  # visible against the width of the bounds
    paid = cut.privacy(1.0).delta(eps).upper - untruncated.upper
    assert paid == pytest.approx(addition, rel=1e-3)
    assert dataclasses.replace(whole, max_batch_size=1).privacy(1.0).delta(eps) == untruncated


def test_a_cap_so_low_that_batches_are_cut_all_the_time_earns_no_guarantee(variable):
    assert epsilon(variable(2000, 50, max_batch_size=50).privacy(1.0), 1e-5).upper == math.inf


# ------------------------------------------------------------------------------------------ shards


def chance_that_nothing_is_cut(sampler):
    """The exact probability, by the multinomial or the product of the law."""
    cap, steps = sampler.shard_batch_size, sampler.steps_per_epoch
    chance = 1.0
    for shard in range(sampler.num_shards):
        rows = np.array(sampler.shard_range(shard))
        for group in range(sampler.cycle_length):
            size = int(np.sum(rows % sampler.cycle_length == group))
            of_group = steps // sampler.cycle_length
            if isinstance(sampler, Poisson):
                chance *= stats.binom.cdf(cap, size, sampler.sampling_prob) ** of_group
            else:  # size! / T^size times the coefficient of x^size in (sum_k x^k / k!)^T
                bin_of = np.polynomial.Polynomial([1 / math.factorial(k) for k in range(cap + 1)])
                counts = (bin_of**of_group).coef
                of_size = counts[size] if size < len(counts) else 0.0
                chance *= math.factorial(size) / of_group**size * of_size
    return chance**sampler.epochs


@pytest.mark.parametrize("shards", [1, 2, 4, 7])
@pytest.mark.parametrize("cycle", [1, 3])
@pytest.mark.parametrize("cap", [1, 2, 3])
def test_tau_of_shards_is_above_the_exact_probability_that_any_is_cut(variable, shards, cycle, cap):
    # For zeroed-out neighbours the draws are alike, so that tau is the law's own.
    sampler = variable(23, 3, 2, max_batch_size=cap, num_shards=shards, cycle_length=cycle)
    exact = 1 - chance_that_nothing_is_cut(sampler)
    paid = sampler.privacy(1.0)
    if not isinstance(paid, TruncatedProfile):
        assert exact == pytest.approx(0.0, abs=1e-12)
        return
    tau = paid.steps * math.exp(paid.log_overflow_probability)
    assert paid.steps == shards * sampler.num_steps
    assert tau >= exact * (1 - 1e-12)
    if tau < 0.1:  # a union bound, over shards that differ by one example at most
        assert tau <= 4 * exact


@pytest.mark.short("BallsAndBins")
def test_the_exact_probability_is_what_draws_have(variable):
    sampler = variable(23, 3, 2, max_batch_size=3, num_shards=4)
    cuts, runs = 0, 400
    for seed in range(runs):
        plans = [sampler.shard_plan(seed, k // 4, k % 4) for k in range(8)]
        cuts += max(int(np.diff(plan.starts).max()) for plan in plans) > 3
    exact = 1 - chance_that_nothing_is_cut(sampler)
    assert 0.1 < exact < 0.9
    assert stats.binomtest(cuts, runs, exact).pvalue > FALSE_ALARM


def test_each_shard_is_cut_by_itself(variable):
    sampler = variable(200, 40, 50, max_batch_size=8, num_shards=4)
    block = BatchSource(sampler, 3).fill(0, sampler.num_steps)
    taken = (block.weights > 0).reshape(sampler.num_steps, 4, 8).sum(axis=2)
    for shard in range(4):
        sizes = np.concatenate(
            [np.diff(sampler.shard_plan(3, epoch, shard).starts) for epoch in range(50)]
        )
        np.testing.assert_array_equal(taken[:, shard], np.minimum(sizes, 8))
    members = np.arange(16, dtype=np.int32)
    kept = [sampler.passes(members, 11, step, shard)[0] for step in range(8) for shard in range(4)]
    assert len({one.tobytes() for one in kept}) > 28  # of 12,870 choices each
