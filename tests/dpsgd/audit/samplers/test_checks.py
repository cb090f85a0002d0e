"""Draws are held against the law that a sampler states; sound ones pass in test_conformance.py."""

import dataclasses
import functools

import numpy as np
import pytest
from scipy import special, stats

from dpsgd import Mechanism, Segment, cost
from dpsgd.audit.report import FALSE_ALARM, LAW, AuditReport, count_pvalue, entropy_pvalue
from dpsgd.audit.samplers.checks import sampler_checks
from dpsgd.audit.samplers.participation import _positive_binomials
from samplers import (
    BallsAndBins,
    Deterministic,
    FullBatch,
    Multistage,
    Poisson,
    Shuffle,
    UnitsThenPoisson,
    UnitTree,
    UserPoisson,
)
from samplers.row_law import RowLaw

SEED = 2**130 + 7
SIZES = (640, 32, 4)
TREE = UnitTree.even((20, 4, 8), ("shop", "shelf"))
UNEVEN = UnitTree.from_columns({"shop": np.repeat(np.arange(12), np.arange(4, 16))})
SAMPLERS = {
    "deterministic": Deterministic(*SIZES),
    "shuffle": Shuffle(*SIZES),
    "shuffle, fixed": Shuffle(*SIZES, order="fixed"),
    "shuffle, uneven": Shuffle(630, 40, 2),
    "poisson": Poisson(*SIZES),
    "poisson, cut": Poisson(*SIZES, max_batch_size=33),
    "poisson, in passes": Poisson(*SIZES, max_batch_size=20, overflow="accumulate"),
    "poisson, all": Poisson(50, 50),
    "bins": BallsAndBins(*SIZES),
    "bins, fixed": BallsAndBins(*SIZES, assignment="fixed"),
    "multistage": Multistage(TREE, (3, 2, 4), steps=200),
    "multistage, clipped": Multistage(TREE, (3, 2, 4), steps=200, clipped_level=1),
    "multistage, uneven": Multistage(UNEVEN, (3, 4), steps=200),
    "multistage, one level": Multistage(UnitTree.even((40,), ()), (5,), steps=100),
    "units then Poisson": UnitsThenPoisson(UNEVEN, (4,), 0.3, steps=200),
    "user poisson": UserPoisson(*SIZES, max_contributions=5),
    "deterministic, shards": Deterministic(*SIZES, num_shards=7),
    "shuffle, shards": Shuffle(*SIZES, num_shards=3),
    "shuffle, fixed, shards": Shuffle(*SIZES, order="fixed", num_shards=2),
    "poisson, shards, cut": Poisson(*SIZES, max_batch_size=10, num_shards=4),
    "bins, one step": BallsAndBins(20, 20, 3),
    "full batch": FullBatch(640, 4),
    "bins, shards": BallsAndBins(*SIZES, num_shards=4, cycle_length=2),
}


@pytest.fixture
def few_draws(monkeypatch):
    """What is sound passes with any number of draws."""
    monkeypatch.setattr("dpsgd.audit.samplers.draws._FEW", 48)


def test_a_p_value_is_never_smaller_than_what_it_bounds():
    # Chernoff's bound against the exact tails, and where nothing can be otherwise.
    n, p = 60, 0.07
    for k in range(n + 1):
        tail = min(1.0, 2 * min(stats.binom.cdf(k, n, p), stats.binom.sf(k - 1, n, p)))
        assert count_pvalue(k, n, p) >= tail * (1 - 1e-9)
    assert count_pvalue(n, n, 1.0) == count_pvalue(0, n, 0.0) == 1
    assert count_pvalue(n - 1, n, 1.0) == count_pvalue(1, n, 0.0) == 0
    assert count_pvalue(30, 60, 0.07) < FALSE_ALARM


def test_a_draw_of_units_that_is_claimed_as_another_is_found_out():
    drawn, claimed = Multistage(TREE, (3, 2, 4), steps=200), Multistage(TREE, (3, 4, 2), steps=200)
    failed = [c.name for c in sampler_checks(drawn, claimed, seed=SEED) if not c.passed]
    assert "neighbours in a unit take part together as often as claimed" in failed
    shorter = dataclasses.replace(drawn, steps=199)
    failed = [c.name for c in sampler_checks(drawn, shorter, seed=SEED) if not c.passed]
    assert failed == ["the run has no more steps than priced"]
    failed = [c.name for c in sampler_checks(drawn, Poisson(*SIZES), seed=SEED) if not c.passed]
    assert "epochs have as many steps as claimed" in failed


@pytest.mark.usefixtures("few_draws")
def test_a_known_order_is_what_shuffling_is_priced_as():
    for drawn, claimed in [("shuffle", "deterministic"), ("deterministic", "shuffle")]:
        checks = sampler_checks(SAMPLERS[drawn], SAMPLERS[claimed], seed=SEED)
        assert all(check.passed for check in checks)


class Apart(Deterministic):
    """A known order that states its separation."""

    separation = 6


class FurtherApart(Apart):
    separation = 7


ORDER, ALWAYS = (Shuffle(48, 6, 3, order=order) for order in ("redrawn", "fixed"))
CYCLE = BallsAndBins(48, 4, 2, cycle_length=3)


@pytest.mark.usefixtures("few_draws")
@pytest.mark.parametrize(
    ("sampler", "claimed", "bands", "passed"),
    [
        (Apart(48, 8, 2), None, 6, True),
        (FurtherApart(48, 8, 2), None, 7, False),
        (Apart(48, 8, 2), None, 7, False),
        (CYCLE, None, 3, True),
        (CYCLE, None, 4, False),
        # Of one epoch: steps that an example may take part in, and not those alone that it does.
        (BallsAndBins(48, 8, cycle_length=2), None, 2, True),
        (BallsAndBins(48, 8), BallsAndBins(48, 8, cycle_length=2), 2, False),
        (ALWAYS, None, 8, True),
        (ORDER, ALWAYS, 8, False),
    ],
)
def test_less_separation_than_noise_needs_is_seen(sampler, claimed, bands, passed):
    checks = sampler_checks(sampler, claimed or sampler, seed=3, bands=bands)
    (apart,) = [c for c in checks if "as far apart as correlated noise needs" in c.name]
    assert apart.passed == passed
    assert all(check.passed for check in checks) == passed


class Silent(Poisson):
    """A sampler that states no law."""

    def row_law(self):
        raise NotImplementedError


class Mumbling(Poisson):
    """A sampler that states what no audit knows."""

    def row_law(self):
        return "as Poisson"


@pytest.mark.usefixtures("few_draws")
@pytest.mark.parametrize("kind", [Silent, Mumbling])
def test_a_sampler_of_unknown_law_is_not_audited_in_the_audits_and_the_guarantees_words(kind):
    sampler = kind(*SIZES)
    checks = sampler_checks(sampler, sampler, seed=SEED)
    (left_out,) = [check for check in checks if not check.made]
    assert left_out.name == LAW
    assert left_out.detail == f"not audited: {kind.__name__} states no law of its rows (row_law)"
    report = AuditReport(tuple(checks))
    assert not report.sampler_audited
    assert report.lines()[-1] == "audit: consistent, SAMPLER NOT AUDITED"
    notes = cost([Segment(Mechanism(sampler, 2.0, 1.0))], 1e-3).notes
    assert any("not audited" in note for note in notes)
    sound = cost([Segment(Mechanism(Poisson(*SIZES), 2.0, 1.0))], 1e-3).notes
    assert not any("not audited" in note for note in sound)


def test_laws_are_of_all_rows_and_steps():
    for sampler in SAMPLERS.values():
        law = sampler.row_law()
        assert isinstance(law, RowLaw)
        steps = np.arange(sampler.steps_per_epoch)
        rates = law.rate(np.arange(sampler.num_examples)[:, None], steps[None, :])
        rates = np.broadcast_to(rates, (sampler.num_examples, steps.size))
        rows = sampler.num_examples * np.mean(rates.sum(axis=0)) / sampler.num_examples
        expected = sampler.expected_batch_size * np.prod(sampler.clipped_shape, initial=1.0)
        if law.batch_sizes is not None:
            np.testing.assert_allclose(rates.sum(axis=0), law.batch_sizes)
        elif not isinstance(sampler, UnitsThenPoisson):
            assert rows == pytest.approx(expected)
        if law.once:
            np.testing.assert_allclose(rates.sum(axis=1), 1)


@functools.cache
def small():
    tree = UnitTree.from_columns({"a": [0, 0, 0, 1, 1, 2, 2, 2], "b": [0, 0, 1, 0, 1, 0, 1, 1]})
    return Multistage(tree, (2, 2, 1)), UnitsThenPoisson(tree, (2, 1), 0.5)


@pytest.mark.parametrize("number", [0, 1])
def test_pairs_in_a_tree_have_the_law_that_the_draws_have(number):
    # Every pair of eight examples over many episodes; each is within 6 standard deviations (the
    # false alarm of one of 56 is below 1e-6), and a sum over pairs is the second moment of sizes.
    sampler, runs = small()[number], 1500
    seen = np.zeros((runs, 8))
    for step in range(runs):
        seen[step, sampler.members(3, step)] = 1
    first, second = np.triu_indices(8, 1)
    law = sampler.row_law()
    for found, expected in [
        (seen.mean(axis=0), law.rate(np.arange(8), 0)),
        ((seen[:, first] * seen[:, second]).mean(axis=0), law.joint(first, second, 0)),
    ]:
        spread = np.sqrt(expected * (1 - expected) / runs)
        assert (np.abs(found - expected) <= 6 * spread + 1e-12).all()


@pytest.mark.parametrize(("n", "law"), [(4, (0.5, 0.5)), (9, (0.1, 0.9)), (12, (0.2, 0.3, 0.5))])
def test_the_p_value_of_relative_entropy_bounds_its_exact_tail(n, law):
    # Every table of n trials, with its probability.
    tables = [t for t in np.ndindex(*[n + 1] * len(law)) if sum(t) == n]
    chances = np.exp([stats.multinomial(n, law).logpmf(t) for t in tables])
    gained = special.rel_entr(tables, n * np.array(law)).sum(axis=1)
    for g in gained:
        assert entropy_pvalue(g, len(law) - 1) >= chances[gained >= g - 1e-12].sum() - 1e-12


def test_the_p_value_of_binomials_that_are_not_0_bounds_their_exact_tail():
    one, two = (stats.binom(m, 0.3).pmf(np.arange(m + 1)) for m in (3, 5))
    one[0] = two[0] = 0
    law = np.convolve(one / one.sum(), two / two.sum())
    for total in range(2, 9):
        tail = 2 * min(law[: total + 1].sum(), law[total:].sum())
        assert _positive_binomials(total, np.array([3, 5]), 0.3) >= min(1, tail) * (1 - 1e-6)
