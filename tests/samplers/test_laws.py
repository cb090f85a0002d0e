"""The laws of whole epochs at the real chunk size: no number here is anybody's to regenerate."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest
from scipy import stats

from samplers import CHUNK, BatchSource

FALSE_ALARM = 1e-6
N, B, EPOCHS = 2 * CHUNK + 9000, 5100, 9  # 28 steps, so that an order reversed meets itself nowhere
CHUNKS = 3
CLUMP = 3  # at most so many examples of a unit, in the list of conftest.py, come together


@dataclass(frozen=True)
class Run:
    """All entries of nine epochs, as training reads them.

    Attributes:
      keys: Of each epoch, i T + t for its entries (i, t), ascending.
    """

    sampler: object
    keys: tuple[np.ndarray, ...]

    @property
    def fixed(self):
        return not self.sampler.row_law().redrawn

    def table(self):
        """Entries by chunk and step, over independent epochs."""
        steps, found = self.sampler.steps_per_epoch, 0
        for keys in self.keys[: 1 if self.fixed else None]:
            cell = keys // (steps * CHUNK) * steps + keys % steps
            found = found + np.bincount(cell, minlength=CHUNKS * steps).reshape(CHUNKS, steps)
        return found


@functools.cache
def drawn(make):
    sampler = make(N, B, EPOCHS)
    source, steps = BatchSource(sampler, 2**129 + 5), sampler.steps_per_epoch
    found = []
    for epoch in range(EPOCHS):
        block = source.fill(epoch * steps, (epoch + 1) * steps)
        real = block.weights > 0
        step = np.repeat(np.arange(steps), np.diff(block.starts))
        keys = block.indices.astype(np.int64) * steps + step[:, None]
        found.append(np.sort(keys[real]))
    return Run(sampler, tuple(found))


@pytest.fixture
def run(make):
    return drawn(make)


@pytest.mark.short(
    "poisson", "balls-and-bins*", "shuffle-fixed", "full-batch", "deterministic", "multistage"
)
def test_epochs_are_independent_or_equal_as_the_mode_says(run):
    # All pairs of epochs 0 to 8, by chunk: given the one, an entry is in the other by chance. The
    # variance is that of independent hits at most, or of hits that come by threes; 10 standard
    # deviations, for 36 pairs of 3 chunks, and Bernstein's term for few hits.
    law, steps = run.sampler.row_law(), run.sampler.steps_per_epoch
    for one, other in itertools.combinations(run.keys, 2):
        if run.fixed:
            np.testing.assert_array_equal(one, other)
            continue
        common = np.intersect1d(one, other, assume_unique=True)
        hits = np.bincount(common // (steps * CHUNK), minlength=CHUNKS)
        rates = np.broadcast_to(law.rate(one // steps, one % steps), one.shape)
        expected = np.bincount(one // (steps * CHUNK), rates, minlength=CHUNKS)
        assert (np.abs(hits - expected) <= 10 * np.sqrt(CLUMP * expected) + 20).all()


def test_chunks_by_steps_have_the_law_of_the_sampler(run):
    # Pearson's statistic; given the margins where a batch is drawn without replacement.
    law, table = run.sampler.row_law(), run.table()
    rows = np.array([CHUNK, CHUNK, N - 2 * CHUNK])
    if law.certain:
        np.testing.assert_array_equal(table.sum(axis=1), rows)
        return
    epochs, steps = 1 if run.fixed else EPOCHS, run.sampler.steps_per_epoch
    if law.independent:
        rate = law.probability
        expected = np.outer(rows * epochs, np.full(steps, rate))
        spread, freedom = (1, CHUNKS * (steps - 1)) if law.once else (1 - rate, CHUNKS * steps)
    else:
        expected = np.outer(rows, table.sum(axis=0)) / N
        spread, freedom = (1, (CHUNKS - 1) * (steps - 1)) if law.once else (CLUMP, CHUNKS)
    statistic = float(np.sum((table - expected) ** 2 / expected)) / spread
    assert stats.chi2.sf(statistic, freedom) > FALSE_ALARM
    if law.once:
        assert stats.chi2.cdf(statistic, freedom) > FALSE_ALARM


@pytest.mark.short(
    "poisson",
    "balls-and-bins*",
    "shuffle-fixed",
    "full-batch",
    "deterministic",
    "multistage",
    "units-then-poisson",
)
def test_no_example_comes_back_to_a_step_more_often_than_by_chance(run):
    # Of nine epochs, by far the most entries are in one, and none in all; Bonferroni over entries.
    if run.fixed:
        return
    law, steps = run.sampler.row_law(), run.sampler.steps_per_epoch
    entries, counts = np.unique(np.concatenate(run.keys), return_counts=True)
    rates = np.broadcast_to(law.rate(entries // steps, entries % steps), entries.shape)
    kinds, place = np.unique(np.stack([counts, rates]), axis=1, return_index=True)
    tails = stats.binom.sf(kinds[0] - 1, EPOCHS, kinds[1])
    assert tails.min() * N * steps > FALSE_ALARM, entries[place[np.argmin(tails)]]


def test_steps_and_examples_up_to_any_one_take_their_share(run):
    # The largest of all prefixes, which sees what leans to one end; Massart (1990) bounds it at any
    # number of cells, and draws without replacement stay below.
    law, table = run.sampler.row_law(), run.table()
    if law.certain:
        return
    limit = math.sqrt(math.log(2 / FALSE_ALARM) / 2 / table.sum() * CLUMP)
    steps = run.sampler.steps_per_epoch
    share = np.cumsum(np.broadcast_to(law.rate(np.zeros(1, int), np.arange(steps)), steps))
    seen = np.cumsum(table.sum(axis=0)) / table.sum()
    assert np.abs(seen - share / share[-1]).max() <= limit
    examples = np.sort(np.concatenate(run.keys[: 1 if run.fixed else None]) // steps)
    if not law.once:
        assert np.abs(
            np.arange(1, examples.size + 1) / examples.size - (examples + 1) / N
        ).max() <= (limit + 1 / 1000)


@pytest.mark.short(
    "poisson", "balls-and-bins*", "shuffle*", "full-batch", "deterministic", "units-then-poisson"
)
def test_first_last_and_border_examples_take_part_as_any_other(make, run):
    # Each by itself, in nine epochs; of batches that hold four of five, to be seen in so few.
    if run.sampler.row_law().once:
        steps = run.sampler.steps_per_epoch
        assert all((np.bincount(keys // steps, minlength=N) == 1).all() for keys in run.keys)
        return
    sampler = make(N, N * 4 // 5, EPOCHS)
    borders = np.array([0, CHUNK - 1, CHUNK, 2 * CHUNK - 1, 2 * CHUNK, N - 1])
    plans = [sampler.plan(7, epoch) for epoch in range(sampler.epochs)]
    count = sum(np.bincount(plan.examples, minlength=N)[borders] for plan in plans)
    rates = np.broadcast_to(sampler.row_law().rate(borders, 0), borders.shape)
    for seen, rate in zip(count.tolist(), rates.tolist(), strict=True):
        assert stats.binomtest(seen, sampler.num_steps, rate).pvalue > FALSE_ALARM / borders.size


def test_the_steps_of_a_long_epoch_take_their_share(make_epochs):
    # Ten thousand steps: a bin from 16 bits, of which 6 or 7 values give each step, leans by 4 %.
    sampler = make_epochs(150_000, 15)
    if sampler.row_law().certain:
        return
    plan = sampler.plan(3, 0)
    share = np.arange(1, sampler.steps_per_epoch + 1) / sampler.steps_per_epoch
    limit = math.sqrt(math.log(2 / FALSE_ALARM) / 2 / plan.examples.size)
    assert np.abs(plan.starts[1:] / plan.examples.size - share).max() <= limit
