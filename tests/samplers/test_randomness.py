"""The draws that everything else stands on: their laws, their keys, their arithmetic."""

from __future__ import annotations

import itertools
import math

import mpmath
import numpy as np
import pytest
from scipy import stats

from samplers.randomness import (
    Key,
    Stream,
    _minus_log,
    bernoulli_successes,
    check_seed,
    uniform_integers,
    uniform_permutation,
)

FALSE_ALARM = 1e-6


def key(index=0, seed=2024):
    return Key(seed, Stream.PARTICIPATION, 0, index)


def test_a_longer_read_extends_a_shorter_one():
    assert np.array_equal(key().words64(1000)[:10], key().words64(10))
    assert np.array_equal(uniform_integers(key(), 7, 1000)[:10], uniform_integers(key(), 7, 10))


def test_bits_are_fair_and_different_keys_are_uncorrelated():
    base = (5, Stream.PARTICIPATION, 3, 9)
    others = [
        (6, Stream.PARTICIPATION, 3, 9),
        (5 + 2**200, Stream.PARTICIPATION, 3, 9),
        (5, Stream.ORDER, 3, 9),
        (5, Stream.TRUNCATION, 3, 9),
        (5, Stream.PARTICIPATION, 4, 9),
        (5, Stream.PARTICIPATION, 3, 10),
        (5, Stream.PARTICIPATION, 9, 3),
    ]
    words = [Key(*fields).words32(100_000) for fields in [base, *others]]
    for one in words:
        assert stats.binomtest(int(np.bitwise_count(one).sum()), 3_200_000).pvalue > FALSE_ALARM
    for one, two in itertools.combinations(words, 2):
        agreeing = int(np.bitwise_count(~(one ^ two)).sum())
        assert stats.binomtest(agreeing, 3_200_000).pvalue > FALSE_ALARM


def test_every_field_has_room_of_its_own():
    # Seeds whose bytes could be read as another key's fields must not be.
    fields = [(seed, epoch, index) for seed in (0, 1, 256, 2**64, 2**72) for epoch in (0, 1, 256)
              for index in (0, 1, 256)]  # fmt: skip
    words = {Key(s, Stream.ORDER, e, i).words64(2).tobytes() for s, e, i in fields}
    assert len(words) == len(fields)


@pytest.mark.parametrize("seed", [-1, -(2**200)])
def test_a_negative_seed_is_refused_without_showing_it(seed):
    with pytest.raises(ValueError, match="the sampling seed must be an integer >= 0") as refusal:
        Key(seed, Stream.ORDER, 0, 0)
    assert str(seed) not in str(refusal.value)
    with pytest.raises(ValueError, match=r"must be an integer$"):
        getattr(check_seed, "__wrapped__", check_seed)(0.5)


@pytest.mark.parametrize("high", [1, 2, 3, 7, 1000, 3 * 2**29, 2**31 - 1, 2**31])
def test_uniform_integers_are_unbiased_at_large_ranges(high):
    # Without the rejection, floor(w * 3 * 2^29 / 2^32) takes 1/3 of its values ... and misses or
    # doubles others: the residue modulo 3 shows it.
    drawn = uniform_integers(key(high), high, 1_000_000)
    assert drawn.dtype == np.int32
    assert drawn.min() >= 0
    assert drawn.max() < high
    modulus = high if high <= 1000 else 3
    law = high // modulus + (np.arange(modulus) < high % modulus)  # sizes of residue classes
    for counts, exact in (
        (np.bincount(drawn % modulus, minlength=modulus), law),
        (np.bincount(drawn.astype(np.int64) * 8 // high, minlength=8),
         np.bincount(np.arange(high) * 8 // high, minlength=8) if high <= 1000 else np.ones(8)),
    ):  # fmt: skip
        counts, exact = counts[exact > 0], exact[exact > 0]
        assert counts.sum() == drawn.size
        if counts.size > 1:
            expected = exact / exact.sum() * drawn.size
            assert stats.chisquare(counts, expected).pvalue > FALSE_ALARM


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4])
def test_every_permutation_is_equally_likely(count):
    outcomes = {order: 0 for order in itertools.permutations(range(count))}
    for index in range(6000):
        outcomes[tuple(uniform_permutation(key(index, seed=count), count).tolist())] += 1
    assert count <= 1 or stats.chisquare(list(outcomes.values())).pvalue > FALSE_ALARM


def test_positions_in_a_long_permutation_are_uniform():
    count = 65_536
    order = uniform_permutation(key(), count)
    assert np.array_equal(np.sort(order), np.arange(count))
    table = np.zeros((8, 8))
    np.add.at(table, (np.arange(count) * 8 // count, order * 8 // count), 1)
    # Row and column sums are given: 49 degrees of freedom.
    statistic = ((table - count / 64) ** 2 / (count / 64)).sum()
    assert stats.chi2.sf(statistic, 49) > FALSE_ALARM
    assert stats.chi2.cdf(statistic, 49) > FALSE_ALARM


def test_equal_sort_keys_are_drawn_again(monkeypatch):
    # Ties would be broken by position: a bias towards the order in which examples are stored.
    words = np.array([5, 5, 1, 9, 7, 8], dtype=np.uint64)
    monkeypatch.setattr(Key, "words64", lambda self, count: words[:count])
    assert uniform_permutation(key(), 3).tolist() == [1, 2, 0]


@pytest.mark.parametrize(
    ("probability", "length"),
    [(1e-8, 10**14), (2e-5, 5 * 10**10), (1e-3, 10**9), (0.25, 4_000_000), (0.99, 10**6)],
)
def test_trials_succeed_at_their_rate_down_to_tiny_ones(probability, length):
    # About a million successes: an error of 0.5 % in the probability is 5 standard deviations. A
    # float32 uniform is wrong by 19 % at 1e-7.
    drawn = bernoulli_successes(key(), -math.log1p(-probability), length)
    assert np.all(np.diff(drawn) > 0)
    assert drawn[0] >= 0
    assert drawn[-1] < length
    assert stats.binomtest(drawn.size, length, probability).pvalue > FALSE_ALARM
    # Given their number, successes are a uniform set: sixteenths of the trials, and low digits.
    sixteenths = np.bincount(drawn // -(-length // 16), minlength=16)
    assert stats.chisquare(sixteenths).pvalue > FALSE_ALARM
    if probability < 0.01:
        digits = np.bincount(drawn % 10, minlength=10)
        assert stats.chisquare(digits).pvalue > FALSE_ALARM


@pytest.mark.parametrize("probability", [1e-8, 0.01, 0.3, 0.9])
def test_gaps_are_geometric(probability):
    drawn = bernoulli_successes(key(1), -math.log1p(-probability), int(300_000 / probability))
    gaps = np.diff(np.concatenate([[-1], drawn]))
    edges = np.unique(stats.geom.ppf(np.arange(1, 20) / 20, probability)).astype(np.int64)
    cells = np.concatenate([[0.0], stats.geom.cdf(edges, probability), [1.0]])
    counts = np.bincount(np.searchsorted(edges, gaps), minlength=cells.size - 1)
    law = np.diff(cells)
    counts, law = counts[law > 1e-4], law[law > 1e-4]
    assert stats.chisquare(counts, law / law.sum() * counts.sum()).pvalue > FALSE_ALARM


def test_gaps_are_as_fine_as_53_bits():
    # Of a million gaps at q = 1e-8, any two are equal with probability q / (2 - q). From 24-bit
    # uniforms there would be 13 times as many equal pairs.
    probability = 1e-8
    gaps = np.diff(bernoulli_successes(key(2), -math.log1p(-probability), 10**14))
    _, counts = np.unique(gaps, return_counts=True)
    equal_pairs = int((counts * (counts - 1) // 2).sum())
    pairs = gaps.size * (gaps.size - 1) // 2
    assert stats.binomtest(equal_pairs, pairs, probability / (2 - probability)).pvalue > FALSE_ALARM


def test_certain_trials_all_succeed_and_no_trials_none():
    assert np.array_equal(bernoulli_successes(key(), math.inf, 100), np.arange(100))
    assert bernoulli_successes(key(), 0.5, 0).size == 0


def test_the_logarithm_is_right_to_four_units_in_the_last_place():
    rng = np.random.default_rng(0)
    hard = np.array([2.0**-53, 1.0, 1 - 2.0**-53, 0.5, math.sqrt(0.5), np.nextafter(0.5, 0)])
    x = np.concatenate([hard, rng.random(300), rng.random(100) * 1e-9, 1 - rng.random(100) * 1e-9])
    with mpmath.workprec(200):
        for ours, value in zip(_minus_log(x), x, strict=True):
            exact = -mpmath.log(mpmath.mpf(float(value)))
            assert abs(mpmath.mpf(float(ours)) - exact) <= 4 * np.spacing(float(exact))
