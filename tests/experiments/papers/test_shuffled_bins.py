"""Balls-and-bins is a shuffled order that is cut into batches of multinomial sizes."""

from collections import Counter

import numpy as np
from scipy import stats

from samplers import Shuffle
from samplers.randomness import Key, Stream, uniform_integers

FALSE_ALARM = 1e-6


def test_multinomial_bins_of_a_shuffle_match_balls_and_bins():
    n, bins, found = 5, 3, Counter()
    for seed in range(2_500):
        order = Shuffle(n, 2).shuffled(seed, 1)
        key = Key(seed, Stream.PARTICIPATION, 1, 1)  # words that the order does not use
        sizes = np.bincount(uniform_integers(key, bins, n), minlength=bins)
        found[sum(np.repeat(np.arange(bins), sizes) * bins**order)] += 1
    # Each assignment of five examples to three bins is as likely.
    counts = [found[assignment] for assignment in range(bins**n)]
    assert stats.chisquare(counts).pvalue > FALSE_ALARM
