"""Draws are held against the law that a sampler states; sound ones pass in test_conformance.py."""

import dataclasses
import functools

import numpy as np
import pytest

from dpsgd import Mechanism, Segment, cost
from dpsgd.audit.draws import draw_checks
from dpsgd.audit.laws import law_checks
from dpsgd.audit.report import LAW, AuditReport
from samplers import (
    BallsAndBins,
    Deterministic,
    FullBatch,
    Multistage,
    Poisson,
    Shuffle,
    UnitsThenPoisson,
    UnitTree,
)
from samplers.row_law import RowLaw
from tests.samplers.conftest import EPOCH_SAMPLERS
from tests.samplers.conftest import SAMPLERS as SAMPLERS_BY_NAME

SEED = 2**130 + 7
SIZES = (640, 32, 4)
TREE = UnitTree.even((20, 4, 8), ("shop", "shelf"))
UNEVEN = UnitTree.from_columns({"shop": np.repeat(np.arange(12), np.arange(4, 16))})
SAMPLERS = {
    **{name: make(*SIZES) for name, make in EPOCH_SAMPLERS.items()},
    **{name: SAMPLERS_BY_NAME[name](*SIZES) for name in ("poisson-cut", "poisson-passes")},
    "shuffle, uneven": Shuffle(630, 40, 2),
    "poisson, all": Poisson(50, 50),
    "multistage": Multistage(TREE, (3, 2, 4), steps=200),
    "multistage, clipped": Multistage(TREE, (3, 2, 4), steps=200, clipped_level=1),
    "multistage, uneven": Multistage(UNEVEN, (3, 4), steps=200),
    "multistage, one level": Multistage(UnitTree.even((40,), ()), (5,), steps=100),
    "units then Poisson": UnitsThenPoisson(UNEVEN, (4,), 0.3, steps=200),
    "deterministic, shards": Deterministic(*SIZES, num_shards=7),
    "shuffle, shards": Shuffle(*SIZES, num_shards=3),
    "shuffle, fixed, shards": Shuffle(*SIZES, order="fixed", num_shards=2),
    "poisson, shards, cut": Poisson(*SIZES, max_batch_size=10, num_shards=4),
    "bins, one step": BallsAndBins(20, 20, 3),
    "full batch": FullBatch(640, 4),
    "bins, shards": BallsAndBins(*SIZES, num_shards=4, cycle_length=2),
}


def failures(drawn, claimed, **how):
    return [
        check.detail for check in draw_checks(drawn, claimed, seed=SEED, **how) if not check.passed
    ]


def test_other_draws_of_units_than_claimed_are_caught():
    sampler, claimed = (
        Multistage(TREE, (3, 2, 4), steps=200),
        Multistage(TREE, (3, 4, 2), steps=200),
    )
    assert not all(check.passed for check in law_checks(sampler, claimed))
    (detail,) = failures(sampler, dataclasses.replace(sampler, steps=199))
    assert detail == "the run has 200 steps, but the cost covers 199"
    (detail,) = failures(sampler, Poisson(*SIZES))
    assert "steps" in detail


def test_a_known_order_is_what_shuffling_is_priced_as():
    for name, claimed in [("shuffle", "deterministic"), ("deterministic", "shuffle")]:
        assert not failures(SAMPLERS[name], SAMPLERS[claimed])
        assert not law_checks(SAMPLERS[name], SAMPLERS[claimed])


class Apart(Deterministic):
    """A known order that states its separation."""

    separation = 6


class FurtherApart(Apart):
    separation = 7


ORDER, ALWAYS = (Shuffle(48, 6, 3, order=order) for order in ("redrawn", "fixed"))
CYCLE = BallsAndBins(48, 4, 2, cycle_length=3)


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
def test_less_separation_than_noise_needs_is_caught(sampler, claimed, bands, passed):
    messages = failures(sampler, claimed or sampler, bands=bands)
    assert not messages if passed else "apart" in messages[0]


class Silent(Poisson):
    """A sampler that states no law."""

    def row_law(self):
        raise NotImplementedError


class Mumbling(Poisson):
    """A sampler that states what no audit knows."""

    def row_law(self):
        return "as Poisson"


@pytest.mark.parametrize("kind", [Silent, Mumbling])
def test_a_sampler_of_unknown_law_is_said_not_to_be_audited(kind):
    sampler = kind(*SIZES)
    checks = draw_checks(sampler, sampler, seed=SEED)
    (left_out,) = [check for check in checks if not check.performed]
    assert left_out.name == LAW
    assert left_out.detail == f"not audited: {kind.__name__} states no law of its draws (row_law)"
    report = AuditReport(tuple(checks))
    assert not report.sampler_audited
    assert report.lines()[-1].endswith("1 skipped, SAMPLER NOT AUDITED")
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
def test_examples_in_a_tree_have_the_rates_of_the_law(number):
    # Each is within 6 standard deviations: the false alarm of one of eight is below 1e-7.
    sampler, runs = small()[number], 1500
    counts = np.zeros((runs, 8))
    for step in range(runs):
        counts[step, sampler.members(3, step)] = 1
    expected = sampler.row_law().rate(np.arange(8), 0)
    spread = np.sqrt(expected * (1 - expected) / runs)
    assert (np.abs(counts.mean(axis=0) - expected) <= 6 * spread + 1e-12).all()
