"""Planted bugs of samplers: each draws in another way than is claimed, and the audit must say how.

Each names the check that has to catch it, and each check of the audit has a bug that it is there
for: a check that is taken out, or blunted, turns a test red.
"""

import dataclasses
import functools
import threading

import faulty_samplers as faults
import numpy as np
import pytest
from faulty_samplers import faulty
from planting import Fault, after, before, plant

from dpsgd.audit.samplers.checks import sampler_checks
from samplers import (
    BallsAndBins,
    BatchSource,
    Deterministic,
    EpochPlan,
    FullBatch,
    Multistage,
    Poisson,
    Shuffle,
    UnitsThenPoisson,
    UnitTree,
    UserPoisson,
)

pytestmark = pytest.mark.mutants

SEED = 2**128 + 1
CHUNK = 150
N, B, EPOCHS = 400, 20, 9


@pytest.fixture(autouse=True)
def small(request, monkeypatch):
    """Three chunks of a small data set, and a tenth of the draws."""
    if "88_000" in request.node.name:
        return
    monkeypatch.setattr("samplers.base.CHUNK", CHUNK)
    monkeypatch.setattr("dpsgd.audit.samplers.draws._FEW", 48)
    monkeypatch.setattr("dpsgd.audit.samplers.draws.ENTRIES", 500_000)


def failed(sampler, claimed=None):
    checks = sampler_checks(sampler, claimed or sampler, seed=SEED)
    return {check.name: check.detail for check in checks if not check.passed}


@functools.cache
def checks_of(sampler):
    return sampler_checks(sampler, sampler, seed=SEED)


READ = "the batches are the rows that were claimed"
OFTEN = "how often an example takes part is binomial"
ONCE = "every example takes part once an epoch"
STEPS = "all steps take their share of the examples"
CHUNKS = "every chunk takes its share of every step"
EXAMPLES = "all examples take part at the rate that was claimed"
RETURNS = "no example returns to a step more often than claimed"
SIZES = "batch sizes vary as they should"
SEEDS = "draws of different seeds are independent"
EPOCHS_APART = "epochs are independent, as claimed"
EPOCHS_ALIKE = "epochs are alike, as claimed"
INDEPENDENT = "examples are independent of one another"
PASSES = "a batch over the cap is cut to it, or taken in passes that are disjoint and complete"
SURVIVORS = "survivors of a cut are uniform"
CUTS = "every step and every seed cuts by itself"
RANKS = "examples of a unit take part alike"
HOLD = "batches hold as many rows and units as claimed"
SHARDS_APART = "shards are drawn each by itself"
GROUPS = "every example keeps to the steps of its group"


@functools.cache
def failed_with(bug, sampler):
    return failed(faulty(bug, sampler))


POISSON, BINS = Poisson(N, B, EPOCHS), BallsAndBins(N, B, EPOCHS)
SHUFFLE, IN_ORDER = Shuffle(N, B, EPOCHS), Deterministic(N, B, EPOCHS)
FIXED = dataclasses.replace(BINS, assignment="fixed")
CUT = Poisson(N, B, EPOCHS, max_batch_size=40)
PASSED = Poisson(N, B, EPOCHS, max_batch_size=15, overflow="accumulate")
PASSED_TWICE = dataclasses.replace(PASSED, max_batch_size=40)
TREE = UnitTree.even((20, 4, 8), ("shop", "shelf"))
MANY = UnitTree.even((60, 2, 4), ("shop", "shelf"))
UNITS = Multistage(TREE, (3, 2, 4), steps=200)
POISSON_IN_UNITS = UnitsThenPoisson(UnitTree.even((20, 400), ("shop",)), (4,), 0.3, steps=200)
OF_USERS = UserPoisson(N, B, EPOCHS, max_contributions=3)
FULL = FullBatch(N, 4, max_batch_size=64)
CYCLIC = BallsAndBins(N, B, EPOCHS, cycle_length=4)
CYCLIC_POISSON = Poisson(N, B, EPOCHS, cycle_length=4)
SHARDS = {"num_shards": 4, "max_batch_size": 11}
POISSON_SHARDS, BIN_SHARDS = (dataclasses.replace(one, **SHARDS) for one in (POISSON, BINS))
SHUFFLE_SHARDS = dataclasses.replace(SHUFFLE, num_shards=4)
SHARDS_IN_ORDER = dataclasses.replace(IN_ORDER, num_shards=7)
SOUND = [POISSON, BINS, FIXED, SHUFFLE, IN_ORDER, CUT, PASSED, UNITS, POISSON_IN_UNITS, OF_USERS]
SOUND += [CYCLIC, CYCLIC_POISSON, dataclasses.replace(CYCLIC, assignment="fixed")]
SOUND += [FULL, POISSON_SHARDS, BIN_SHARDS, SHUFFLE_SHARDS, SHARDS_IN_ORDER]

CLAIMS = {
    "shuffle claimed as Poisson": (SHUFFLE, POISSON, OFTEN),
    "the order of the file claimed as Poisson": (IN_ORDER, POISSON, SEEDS),
    "balls-and-bins claimed as Poisson": (BINS, POISSON, OFTEN),
    "Poisson claimed as balls-and-bins": (POISSON, BINS, ONCE),
    "shuffle claimed as balls-and-bins": (SHUFFLE, BINS, SIZES),
    "fixed bins claimed as redrawn": (FIXED, BINS, EPOCHS_APART),
    "redrawn bins claimed as fixed": (BINS, FIXED, EPOCHS_ALIKE),
    "bins of all steps claimed as cyclic": (BINS, CYCLIC, GROUPS),
    "Poisson in all steps claimed as cyclic": (POISSON, CYCLIC_POISSON, GROUPS),
    "nine epochs priced as one": (
        POISSON, POISSON.with_epochs(1), "the run has no more steps than priced"),
    "nine orders priced as one": (
        SHUFFLE, SHUFFLE.with_epochs(1), "no example takes part more often than priced"),
}  # fmt: skip
BUGS = {
    faults.EpochIgnored: [(POISSON, EPOCHS_APART), (BINS, EPOCHS_APART), (CYCLIC, EPOCHS_APART)],
    faults.SeedIgnored: [(POISSON, SEEDS), (BINS, SEEDS), (CYCLIC_POISSON, SEEDS)],
    faults.GroupsOfEachEpoch: [(CYCLIC, GROUPS)],
    faults.EvenEpochsShare: [(POISSON, EPOCHS_APART), (OF_USERS, EPOCHS_APART)],
    faults.EpochsByFoursShare: [(BINS, EPOCHS_APART)],
    faults.LastChunkOfTheEpochBefore: [(POISSON, EPOCHS_APART), (BINS, EPOCHS_APART)],
    faults.LastEpochOfTheRunRepeated: [(POISSON.with_epochs(40), EPOCHS_APART)],
    faults.ChunksShare: [(POISSON, INDEPENDENT), (BINS, INDEPENDENT)],
    faults.FirstEpochRepeated: [(POISSON, READ)],
    faults.ReadAheadDrawsTwice: [(POISSON, READ), (BINS, EPOCHS_APART), (SHUFFLE, READ)],
    faults.ShortSeed: [(SHUFFLE, SEEDS)],
    faults.ReversedEverySecondEpoch: [(SHUFFLE, EPOCHS_APART)],
    faults.StepsBy64Share: [(Poisson(300, 3, 2), OFTEN)],
    faults.MovedByOneStep: [(BINS, EPOCHS_APART)],
    faults.TooOften: [(Poisson(20_000, 10_000, 2), STEPS)],
    faults.BinsOf16Bits: [(BallsAndBins(50_000, 25, 2), STEPS)],
    faults.EarlyStepsFavoured: [(BINS, STEPS), (CYCLIC, STEPS)],
    faults.StepsOfOneChunkFavoured: [(BINS, CHUNKS)],
    faults.OneExampleInBin0: [(BINS, RETURNS)],
    faults.FirstExampleInEarlyBins: [(BINS, RETURNS)],
    faults.FirstExampleNever: [(POISSON, EXAMPLES), (BINS, ONCE)],
    faults.BorderLeftOut: [(POISSON, EXAMPLES)],
    faults.BorderInBothChunks: [(POISSON, READ)],
    faults.LaterExamplesFavoured: [(POISSON, CHUNKS)],
    faults.NeighboursTogether: [(BINS, INDEPENDENT)],
    faults.FirstOfUnit: [(UNITS, RANKS)],
    faults.TooOftenInUnits: [(POISSON_IN_UNITS, STEPS)],
    faults.FirstUnitFavoured: [(UNITS, STEPS)],
    faults.StepsBy16Share: [(UNITS, EPOCHS_APART)],
    faults.UnitsStay: [(Multistage(MANY, (6, 1, 2), steps=200), EPOCHS_APART)],
    faults.FirstRowsKept: [(POISSON, SURVIVORS), (CUT, SURVIVORS), (POISSON_IN_UNITS, SURVIVORS)],
    faults.LateRowsFavoured: [(POISSON, SURVIVORS)],
    faults.OneCutForAllSteps: [(POISSON, CUTS)],
    faults.OneCutForTwoSteps: [(POISSON, CUTS)],
    faults.OneCutForAllSeeds: [(POISSON, CUTS)],
    faults.LastPassDropped: [
        (PASSED, PASSES),
        (dataclasses.replace(PASSED, max_batch_size=40), PASSES),
    ],
    faults.PassesOverlap: [(PASSED, PASSES)],
    faults.LastBatchShort: [(SHUFFLE, ONCE), (SHUFFLE, HOLD)],
    faults.FirstShardTwice: [(POISSON_SHARDS, READ), (BIN_SHARDS, READ), (SHARDS_IN_ORDER, READ)],
    faults.LastShardNever: [(POISSON_SHARDS, READ), (BIN_SHARDS, ONCE), (SHUFFLE_SHARDS, HOLD)],
    faults.ShardsReadOneFurther: [(POISSON_SHARDS, READ), (BIN_SHARDS, READ)],
    faults.ShardsBeginLate: [(POISSON_SHARDS, READ), (BIN_SHARDS, ONCE), (SHUFFLE_SHARDS, ONCE)],
    faults.ShardsOverlap: [(POISSON_SHARDS, READ), (BIN_SHARDS, READ)],
    faults.ShardsCutAlike: [(POISSON_SHARDS, CUTS)],
    faults.ShardsShuffledAlike: [(SHUFFLE_SHARDS, SHARDS_APART)],
    faults.OneRowLeftOut: [(FULL, ONCE), (FULL, HOLD)],
    faults.OneRowCountedTwice: [(FULL, READ)],
    faults.OneRowForAnother: [(FULL, READ)],
    faults.FirstChunkAlone: [(FULL, READ), (FULL, ONCE), (FULL, HOLD)],
    faults.LaterSumsOfTheFirstHalf: [(FULL, READ), (FULL, ONCE)],
    faults.SumsPassesAgain: [(FULL, READ)],
    faults.SumsOfOnePass: [(FULL, READ), (FULL, ONCE)],
}


@pytest.mark.short(
    "shuffle claimed as *",
    "Poisson claimed as *",
    "balls-and-bins claimed as *",
    "fixed bins*",
    "nine epochs*",
)
@pytest.mark.parametrize(("sampler", "claimed", "check"), CLAIMS.values(), ids=CLAIMS)
def test_a_wrong_claim_of_a_sampler_is_caught(sampler, claimed, check):
    assert check in failed(sampler, claimed)


@pytest.mark.short(
    "SeedIgnored*",
    "EpochIgnored*",
    "FirstEpochRepeated*",
    "ShortSeed*",
    "MovedByOneStep*",
    "FirstExampleNever*",
    "NeighboursTogether*",
    "BorderLeftOut*",
    "UnitsStay*",
    "FirstRowsKept*",
    "OneCutForAllSteps*",
    "LastPassDropped*",
    "LastBatchShort*",
    "ShardsOverlap*",
    "ShardsShuffledAlike*",
    "*-FullBatch*",
)
@pytest.mark.parametrize(
    ("bug", "sampler", "check"),
    [
        pytest.param(
            bug,
            *case,
            id=f"{bug.__name__}-{type(case[0]).__name__}",
            # a second sampler with the same bug, for the same check, is long
            marks=pytest.mark.long if case[1] in [check for _, check in cases[:number]] else (),
        )
        for bug, cases in BUGS.items()
        for number, case in enumerate(cases)
    ],
)
def test_a_planted_bug_of_the_sampler_is_caught(bug, sampler, check):
    assert check in failed_with(bug, sampler)


@pytest.mark.short(
    "Poisson*num_shards=1*",
    "Multistage*",
    "Shuffle*num_shards=1*",
    "BallsAndBins*num_shards=4*",
    "FullBatch*",
)
@pytest.mark.parametrize("sampler", SOUND, ids=repr)
def test_without_a_bug_the_same_checks_of_the_sampler_pass(sampler):
    assert all(check.passed and check.made for check in checks_of(sampler)), checks_of(sampler)


# What hands out the batches: no sampler knows of these.


def padding_counts(monkeypatch):
    fill = BatchSource.fill

    def counted(self, *args, **kwargs):
        block = fill(self, *args, **kwargs)
        block.weights[:, -1] = 1.0
        return block

    monkeypatch.setattr(BatchSource, "fill", counted)


def epochs_shifted(monkeypatch):
    plan_of = BatchSource._plan_of
    monkeypatch.setattr(
        BatchSource,
        "_plan_of",
        lambda self, epoch: plan_of(self, min(epoch + 1, self.sampler.epochs - 1)),
    )


def a_batch_given_twice(monkeypatch):
    members = EpochPlan.members
    monkeypatch.setattr(EpochPlan, "members", lambda self, step: members(self, step - (step == 7)))


def first_row_not_weighed(monkeypatch):
    fill = BatchSource.fill

    def weighed(self, *args, **kwargs):
        block = fill(self, *args, **kwargs)
        block.weights[0, 0] *= 0.5
        return block

    monkeypatch.setattr(BatchSource, "fill", weighed)


def first_shard_held_by_all(monkeypatch):
    draw = BatchSource._draw

    def drawn(self, epoch):
        if len(self.shards) == 1 < self.sampler.num_shards:
            return [self.sampler.shard_plan(self._seed, epoch, 0)]
        return draw(self, epoch)

    monkeypatch.setattr(BatchSource, "_draw", drawn)


def second_shard_placed_as_the_first(monkeypatch):
    fill = BatchSource.fill

    def moved(self, *args, **kwargs):
        block = fill(self, *args, **kwargs)
        cap = self.sampler.shard_batch_size
        block.places[:, cap : 2 * cap] = block.indices[:, cap : 2 * cap]
        return block

    monkeypatch.setattr(BatchSource, "fill", moved)


@pytest.mark.parametrize("plant", [first_shard_held_by_all, second_shard_placed_as_the_first])
def test_a_planted_bug_of_a_source_that_holds_shards_is_caught(plant, monkeypatch):
    plant(monkeypatch)
    assert READ in failed(POISSON_SHARDS)


@pytest.mark.parametrize(
    "plant", [padding_counts, epochs_shifted, a_batch_given_twice, first_row_not_weighed]
)
@pytest.mark.parametrize("sampler", [POISSON, BINS], ids=["poisson", "bins"])
def test_a_planted_bug_of_the_source_of_batches_is_caught(plant, sampler, monkeypatch):
    plant(monkeypatch)
    assert READ in failed(sampler)


@pytest.mark.long
def test_every_check_of_a_sampler_has_a_bug_to_catch():
    wanted = {check for _, _, check in CLAIMS.values()}
    wanted |= {check for cases in BUGS.values() for _, check in cases}
    wanted |= {  # whose bugs are in dpsgd/audit/samplers/test_checks.py
        "every example is where the order says",
        "pairs of examples take part together as often as claimed",
        "neighbours in a unit take part together as often as claimed",
        "examples of a unit take part together as often as claimed",
        "examples of different units take part together as often as claimed",
    }
    made = {check.name for sampler in SOUND for check in checks_of(sampler)}
    assert made == wanted


# Faults of draws at real sizes: 88,000 examples, two chunks of which the last is smaller.


def background(epoch):
    """An epoch that is drawn ahead, and not when it is wanted."""
    return epoch if threading.current_thread() is threading.main_thread() else max(0, epoch - 1)


def first_unless_ahead(epoch):
    """An epoch that is drawn when it is wanted is the first."""
    return 0 if threading.current_thread() is threading.main_thread() else epoch


class Coarse:
    """A key whose words of 64 bits have 8."""

    def __init__(self, key):
        self.key = key

    def words64(self, count):
        return self.key.words64(count) >> np.uint64(56) << np.uint64(56)


def coarse(key):
    return {"key": Coarse(key)}


def of_another_seed(sound):
    def drawn(self, epoch):
        ahead = threading.current_thread() is not threading.main_thread()
        return [self.sampler.plan(0, epoch)] if ahead else sound(self, epoch)

    return drawn


def last_row_full(found):
    if len(found.weights) > 63:
        found.weights[63] = 1.0
    return found


def all_places_count(found):
    found.weights[:] = 1.0
    return found


def one_read_twice(found):
    if len(found.indices) > 63:
        found.indices[63, :2] = found.indices[63, 0]
    return found


def with_replacement(found):
    found[::10, 1] = found[::10, 0]
    return found


def first_child_always(found, level):
    if level:
        found[:, 0] = 0
    return found


def equal_children(found, level, sizes):
    if level:
        found[:] = found[0] % sizes.min()
    return found


def seam(name, make):
    return Fault(name, make, "")


FROM_THE_END = {"step": before(lambda self, step: {"step": step % (len(self.starts) - 3)})}
LARGE = {
    "a cut keeps the first rows": (faults.FirstRowsKept, "poisson cut", SURVIVORS),
    "a cut spares the last rows": (faults.LastRowsKept, "bins cut", SURVIVORS),
    "a cut drops the neighbours of one": (faults.NeighboursCut, "poisson cut", SURVIVORS),
    "all steps are cut alike": (faults.OneCutForAllSteps, "poisson cut", SURVIVORS),
    "Poisson 1 % too often": (seam("rate", after(lambda found: 1.01 * found)), "poisson", OFTEN),
    "Poisson 1 % too rarely": (seam("rate", after(lambda found: 0.99 * found)), "poisson", OFTEN),
    "Poisson 1 % too often in the last chunk": (faults.TooOftenInTheLastChunk, "poisson", CHUNKS),
    "Poisson takes fewer in an epoch's first step": (faults.FewerInTheFirstStep, "poisson", STEPS),
    "the last chunk is planned with the epoch before": (
        faults.LastChunkPlannedWithTheEpochBefore, "poisson", READ),
    "the last chunk of bins is planned with the epoch before": (
        faults.LastChunkPlannedWithTheEpochBefore, "bins", READ),
    "Poisson epochs 0, 2, 4, ... share draws": (faults.EvenEpochsShare, "poisson", RETURNS),
    "Poisson epochs e and e + 3 share draws": (faults.EpochsByThreesShare, "poisson", RETURNS),
    "bins of epochs e and e + 4 share draws": (faults.EpochsByFoursShare, "bins", EPOCHS_APART),
    "bins of epochs e and e + 7 share draws": (faults.EpochsBySevensShare, "bins", EPOCHS_APART),
    "one example is always in bin 0": (faults.OneExampleInBin0, "bins", RETURNS),
    "the last example is always in bin 0": (faults.LastExampleInBin0, "bins", RETURNS),
    "bins mod T from 10 bits": (faults.BinsOf10Bits, "bins", STEPS),
    # seen from T = 550; of 86 bins, 4 are 0.13 % too likely
    "bins mod T from 16 bits": (faults.BinsOf16Bits, "many bins", STEPS),
    "the last bin is never drawn": (faults.LastBinNever, "bins", STEPS),
    "the next epoch's bins are those of the last one, in reverse": (
        faults.BinsReversedEverySecondEpoch, "bins", EPOCHS_APART),
    "the next epoch's bins are those of the last one, moved by one": (
        faults.MovedByOneStep, "bins", EPOCHS_APART),
    "neighbours are never in one bin": (faults.NeighboursNeverTogether, "bins", INDEPENDENT),
    "every tenth example follows its neighbour": (faults.EveryTenthFollows, "bins", INDEPENDENT),
    "chunks share draws": (
        seam("key", before(lambda index: {"index": 0 * index})), "bins", SURVIVORS),
    "Poisson chunks share draws": (faults.ChunksShare, "poisson", INDEPENDENT),
    "32 bits of the seed count": (
        seam("key", before(lambda seed: {"seed": seed % 2**32})), "bins", CUTS),
    "the seed does not count": (
        seam("key", before(lambda seed: {"seed": 0 * seed})), "poisson", CUTS),
    "trials next to each other never both succeed": (
        seam("trials", after(lambda found: found[np.diff(found, prepend=-2) > 1])),
        "poisson", OFTEN),
    "the first trial of an epoch always succeeds": (
        seam("trials", after(lambda found: found - found[:1])), "poisson", RETURNS),
    "uniforms of 8 bits": (
        seam("trials", before(coarse)), "poisson", OFTEN),
    "read-ahead draws an epoch twice": (
        seam("drawn", before(lambda epoch: {"epoch": background(epoch)})), "poisson", READ),
    "read-ahead draws every third epoch twice": (
        seam("drawn", before(lambda epoch: {"epoch": epoch if epoch % 3 else background(epoch)})),
        "bins", READ),
    "read-ahead draws from another seed": (seam("drawn", of_another_seed), "bins", READ),
    "a source that begins later begins with the first epoch": (
        seam("drawn", before(lambda epoch: {"epoch": first_unless_ahead(epoch)})),
        "poisson", CHUNKS),
    "the first steps' batches are read again at an epoch's end": (
        seam("members", FROM_THE_END["step"]), "bins", READ),
    "padding counts": (seam("filled", after(all_places_count)), "poisson", READ),
    "padding counts in a block's last row": (
        seam("filled", after(last_row_full)), "poisson", READ),
    "the last of a block's members is read twice": (
        seam("filled", after(one_read_twice)), "poisson", READ),
    "passes of a batch overlap": (faults.PassesOverlap, "poisson in passes", READ),
    "the last pass of a batch is left out": (faults.LastPassDropped, "poisson in passes", READ),
    "the second pass takes the first rows again": (
        faults.SecondPassAgain, "poisson in passes", READ),
    "shuffle: one order for two epochs": (faults.EpochsInPairs, "shuffle", EPOCHS_APART),
    "shuffle: the first bucket keeps the file's order": (
        faults.FirstBucketInOrder, "shuffle", CHUNKS),
    "shuffle: the first example comes first": (faults.FirstExampleFirst, "shuffle", RETURNS),
    "shuffle: buckets in the same order in all epochs": (
        faults.BucketsKept, "shuffle", EPOCHS_APART),
    "user Poisson draws a user's examples together": (faults.UsersTogether, "users", INDEPENDENT),
    "units are drawn with replacement": (
        seam("order", after(with_replacement)), "multistage", READ),
    "each unit is drawn in two steps": (faults.StepsBy2Share, "multistage", EPOCHS_APART),
    "the first child of a unit is drawn always": (
        seam("order", after(first_child_always)), "multistage", READ),
    "drawn units give the same children": (
        seam("order", after(equal_children)), "multistage", READ),
    "examples of units 2 % too often": (
        seam("rate of units", after(lambda found: 1.02 * found)), "units then poisson", STEPS),
    "queries leave out the last pass": (faults.SumsOfOnePass, "full batch", READ),
    "queries take a row again": (faults.OneRowForAnother, "full batch", READ),
    "queries are of the first 65,536": (faults.FirstChunkAlone, "full batch", ONCE),
    "fixed bins are drawn anew": (faults.RedrawnAllTheSame, "fixed bins", EPOCHS_ALIKE),
}  # fmt: skip
SIZE = {"num_examples": 88_000, "batch_size": 1_024, "epochs": 8}
SHOPS = UnitTree.from_columns({"shop": np.arange(88_000) // 8 % 37, "user": np.arange(88_000) // 8})
DRAWN = {
    "poisson": Poisson(**SIZE),
    "bins": BallsAndBins(**SIZE),
    "many bins": BallsAndBins(**SIZE | {"batch_size": 128}),
    "fixed bins": BallsAndBins(**SIZE, assignment="fixed"),
    "shuffle": Shuffle(**SIZE),
    "poisson cut": Poisson(**SIZE, max_batch_size=1_040),
    "bins cut": BallsAndBins(**SIZE, max_batch_size=1_040),
    "poisson in passes": Poisson(**SIZE, overflow="accumulate", max_batch_size=300),
    "full batch": FullBatch(88_000, 4),
    "users": UserPoisson(**SIZE, max_contributions=3),
    "multistage": Multistage(SHOPS, (16, 8, 4), steps=600),
    "units then poisson": UnitsThenPoisson(SHOPS, (16, 40), 0.5, steps=600),
}


def failed_at_size(sampler):
    checks = sampler_checks(sampler, sampler, seed=2**128 + 7)
    return {check.name for check in checks if not check.passed}


@pytest.mark.long
@pytest.mark.parametrize(("fault", "kind", "check"), LARGE.values(), ids=LARGE)
def test_a_fault_of_the_draws_is_caught_at_88_000_examples(fault, kind, check, monkeypatch):
    sampler = DRAWN[kind]
    if isinstance(fault, Fault):
        plant(fault, monkeypatch)
    else:
        sampler = faulty(fault, sampler)
    assert check in failed_at_size(sampler)


@pytest.mark.long
@pytest.mark.parametrize("kind", DRAWN)
def test_without_a_fault_draws_of_88_000_examples_pass(kind):
    assert not failed_at_size(DRAWN[kind])
