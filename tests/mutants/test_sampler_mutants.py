"""Planted bugs of samplers: each draws in another way than is claimed, and the audit must say how.

Each names the check that has to catch it, and each check of the audit has a bug that it is there
for: a check that is taken out, or blunted, turns a test red.
"""

import dataclasses
import functools
import threading

import numpy as np
import pytest
from faulty_samplers import faulty
from planting import Fault, after, before, plant

from dpsgd.audit.samplers.checks import sampler_checks
from dpsgd.audit.samplers.draws import THOROUGH
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

pytestmark = pytest.mark.mutants

SEED = 2**128 + 1
CHUNK = 150
N, B, EPOCHS = 400, 20, 9


@pytest.fixture(autouse=True)
def small(request, monkeypatch):
    """Three chunks of a small data set, and a fifth of the draws, unless pairs are to be seen."""
    if any(name in request.node.name for name in ("88_000", "Pairs", "OneShelf")):
        return
    monkeypatch.setattr("samplers.plans.CHUNK", CHUNK)
    monkeypatch.setattr("dpsgd.audit.samplers.draws._FEW", 48)


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
ORDER = "every example is where the order says"
PAIRS = "pairs of examples take part together as often as claimed"
NEIGHBOURS = "neighbours in a unit take part together as often as claimed"
ACROSS = "examples of different units take part together as often as claimed"


@functools.cache
def failed_with(bug, sampler):
    return failed(faulty(bug, sampler))


POISSON, BINS = Poisson(N, B, EPOCHS), BallsAndBins(N, B, EPOCHS)
SHUFFLE, IN_ORDER = Shuffle(N, B, EPOCHS), Deterministic(N, B, EPOCHS)
FIXED = dataclasses.replace(BINS, assignment="fixed")
CUT = Poisson(N, B, EPOCHS, max_batch_size=40)
PASSED = Poisson(N, B, EPOCHS, max_batch_size=15, overflow="accumulate")
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
    "EpochIgnored": [(POISSON, EPOCHS_APART), (BINS, EPOCHS_APART), (CYCLIC, EPOCHS_APART)],
    "SeedIgnored": [(POISSON, SEEDS), (BINS, SEEDS), (CYCLIC_POISSON, SEEDS)],
    "GroupsOfEachEpoch": [(CYCLIC, GROUPS)],
    "EvenEpochsShare": [(POISSON, EPOCHS_APART), (OF_USERS, EPOCHS_APART)],
    "EpochsByFoursShare": [(BINS, EPOCHS_APART)],
    "LastChunkOfTheEpochBefore": [(POISSON, EPOCHS_APART), (BINS, EPOCHS_APART)],
    "LastEpochOfTheRunRepeated": [(POISSON.with_epochs(40), EPOCHS_APART)],
    "ChunksShare": [(POISSON, INDEPENDENT), (BINS, INDEPENDENT)],
    "FirstEpochRepeated": [(POISSON, READ)],
    "ReadAheadDrawsTwice": [(POISSON, READ), (BINS, EPOCHS_APART), (SHUFFLE, READ)],
    "ShortSeed": [(SHUFFLE, SEEDS)],
    "ReversedEverySecondEpoch": [(SHUFFLE, EPOCHS_APART)],
    "StepsBy64Share": [(Poisson(300, 3, 2), OFTEN)],
    "MovedByOneStep": [(BINS, EPOCHS_APART)],
    "TooOften": [(Poisson(20_000, 10_000, 2), STEPS)],
    "BinsOf16Bits": [(BallsAndBins(50_000, 25, 2), STEPS)],
    "EarlyStepsFavoured": [(BINS, STEPS), (CYCLIC, STEPS)],
    "StepsOfOneChunkFavoured": [(BINS, CHUNKS)],
    "OneExampleInBin0": [(BINS, RETURNS)],
    "FirstExampleInEarlyBins": [(BINS, RETURNS)],
    "FirstExampleNever": [(POISSON, EXAMPLES), (BINS, ONCE)],
    "BorderLeftOut": [(POISSON, EXAMPLES)],
    "BorderInBothChunks": [(POISSON, READ)],
    "LaterExamplesFavoured": [(POISSON, CHUNKS)],
    "NeighboursTogether": [(BINS, INDEPENDENT)],
    "FirstOfUnit": [(UNITS, RANKS)],
    "TooOftenInUnits": [(POISSON_IN_UNITS, STEPS)],
    "FirstUnitFavoured": [(UNITS, STEPS)],
    "StepsBy16Share": [(UNITS, EPOCHS_APART)],
    "OneUnitTooMany": [(UNITS, READ), (POISSON_IN_UNITS, HOLD)],
    "PairsOfAShelf": [(Multistage(TREE, (10, 2, 4), steps=200), NEIGHBOURS)],
    "OneShelfForTwo": [(UNITS, NEIGHBOURS)],
    "PairsOfShops": [(Multistage(TREE, (4, 2, 4), steps=200), ACROSS)],
    "AnotherOrder": [(IN_ORDER, ORDER)],
    "NeighboursShuffled": [(SHUFFLE, PAIRS)],
    "CapNotKept": [(CUT, PASSES), (dataclasses.replace(CUT, max_batch_size=22), READ)],
    "CutTooShort": [(CUT, READ)],
    "UnitsStay": [(Multistage(MANY, (6, 1, 2), steps=200), EPOCHS_APART)],
    "FirstRowsKept": [(POISSON, SURVIVORS), (CUT, SURVIVORS), (POISSON_IN_UNITS, SURVIVORS)],
    "LateRowsFavoured": [(POISSON, SURVIVORS)],
    "OneCutForAllSteps": [(POISSON, CUTS)],
    "OneCutForTwoSteps": [(POISSON, CUTS)],
    "OneCutForAllSeeds": [(POISSON, CUTS)],
    "LastPassDropped": [
        (PASSED, PASSES),
        (dataclasses.replace(PASSED, max_batch_size=40), PASSES),
    ],
    "PassesOverlap": [(PASSED, PASSES)],
    "LastBatchShort": [(SHUFFLE, ONCE), (SHUFFLE, HOLD)],
    "FirstShardTwice": [(POISSON_SHARDS, READ), (BIN_SHARDS, READ), (SHARDS_IN_ORDER, READ)],
    "LastShardNever": [(POISSON_SHARDS, READ), (BIN_SHARDS, ONCE), (SHUFFLE_SHARDS, HOLD)],
    "ShardsReadOneFurther": [(POISSON_SHARDS, READ), (BIN_SHARDS, READ)],
    "ShardsBeginLate": [(POISSON_SHARDS, READ), (BIN_SHARDS, ONCE), (SHUFFLE_SHARDS, ONCE)],
    "ShardsOverlap": [(POISSON_SHARDS, READ), (BIN_SHARDS, READ)],
    "ShardsCutAlike": [(POISSON_SHARDS, CUTS)],
    "ShardsShuffledAlike": [(SHUFFLE_SHARDS, SHARDS_APART)],
    "OneRowLeftOut": [(FULL, ONCE), (FULL, HOLD)],
    "OneRowCountedTwice": [(FULL, READ)],
    "OneRowForAnother": [(FULL, READ)],
    "FirstChunkAlone": [(FULL, READ), (FULL, ONCE), (FULL, HOLD)],
    "LaterSumsOfTheFirstHalf": [(FULL, READ), (FULL, ONCE)],
    "SumsPassesAgain": [(FULL, READ)],
    "SumsOfOnePass": [(FULL, READ), (FULL, ONCE)],
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
    "OneUnitTooMany-Multistage",
    "PairsOfAShelf*",
    "AnotherOrder*",
    "C*",
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
            id=f"{bug}-{type(case[0]).__name__}",
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


def seam(name, make):
    return Fault(name, make, "")


def weighed(where, factor=0.0, plus=0.0):
    """Places of a block have other weights."""

    def faulty(found):
        found.weights[where] = factor * found.weights[where] + plus
        return found

    return seam("filled", after(faulty))


def held_by_all(sound):
    def drawn(self, epoch):
        if len(self.shards) == 1 < self.sampler.num_shards:
            return [self.sampler.shard_plan(self._seed, epoch, 0)]
        return sound(self, epoch)

    return drawn


def placed_as_the_first(found, self):
    cap = self.sampler.shard_batch_size
    found.places[:, cap : 2 * cap] = found.indices[:, cap : 2 * cap]
    return found


def epochs_shifted(self, epoch):
    return {"epoch": min(epoch + 1, self.sampler.epochs - 1)}


def in_the_first_epoch(sound):
    """The steps of a block have the batches of its first epoch."""

    def fill(self, start, stop, **more):
        found, length = sound(self, start, stop, **more), self.sampler.steps_per_epoch
        for row, step in enumerate(range(start, start + int(found.num_steps))):
            if step // length > start // length:
                other = start // length * length + step % length
                again = sound(self, other, other + 1)
                found.indices[row], found.weights[row] = again.indices[0], again.weights[0]
        return found

    return fill


SOURCE = {
    "a block stays in its first epoch": seam("filled", in_the_first_epoch),
    "padding counts": weighed(np.s_[:, -1], plus=1.0),
    "the first row is not weighed": weighed(np.s_[0, 0], factor=0.5),
    "epochs are shifted": seam("drawn", before(epochs_shifted)),
    "a batch is given twice": seam("members", before(lambda step: {"step": step - (step == 7)})),
}
OF_SHARDS = {
    "the first shard is held by all": seam("drawn", held_by_all),
    "the second shard is placed as the first": seam("filled", after(placed_as_the_first)),
}
SOURCES = [
    *((sampler, name) for sampler in (POISSON, BINS) for name in SOURCE),
    *((POISSON_SHARDS, name) for name in OF_SHARDS),
]


@pytest.mark.parametrize(("sampler", "name"), SOURCES, ids=lambda x: str(x).partition("(")[0])
def test_a_planted_bug_of_the_source_of_batches_is_caught(sampler, name, monkeypatch):
    plant((SOURCE | OF_SHARDS)[name], monkeypatch)
    assert READ in failed(sampler)


@pytest.mark.long
def test_every_check_of_a_sampler_has_a_bug_to_catch():
    wanted = {check for _, _, check in CLAIMS.values()}
    wanted |= {check for cases in BUGS.values() for _, check in cases}
    wanted.add("examples of a unit take part together as often as claimed")  # see test_checks.py
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


SEAMS = {
    "PoissonTooOften": seam("rate", after(lambda found: 1.01 * found)),
    "PoissonTooRarely": seam("rate", after(lambda found: 0.99 * found)),
    "ChunksShareKeys": seam("key", before(lambda index: {"index": 0 * index})),
    "SeedsOf32Bits": seam("key", before(lambda seed: {"seed": seed % 2**32})),
    "SeedNeverRead": seam("key", before(lambda seed: {"seed": 0 * seed})),
    "TrialsNeverInARow": seam("trials", after(lambda found: found[np.diff(found, prepend=-2) > 1])),
    "FirstTrialSucceeds": seam("trials", after(lambda found: found - found[:1])),
    "UniformsOf8Bits": seam("trials", before(coarse)),
    "EpochBehindAhead": seam("drawn", before(lambda epoch: {"epoch": background(epoch)})),
    "ThirdEpochBehindAhead": seam(
        "drawn", before(lambda epoch: {"epoch": epoch if epoch % 3 else background(epoch)})
    ),
    "AheadOfAnotherSeed": seam("drawn", of_another_seed),
    "FirstEpochUnlessAhead": seam(
        "drawn", before(lambda epoch: {"epoch": first_unless_ahead(epoch)})
    ),
    "FirstStepsAgain": seam(
        "members", before(lambda self, step: {"step": step % (len(self.starts) - 3)})
    ),
    "PaddingCounts": weighed(np.s_[:], plus=1.0),
    "LastPaddingCounts": weighed(np.s_[63:64], plus=1.0),
    "LastMemberTwice": seam("filled", after(one_read_twice)),
    "UnitsReplaced": seam("order", after(with_replacement)),
    "FirstChildAlways": seam("order", after(first_child_always)),
    "EqualChildren": seam("order", after(equal_children)),
    "UnitsTooOften": seam("rate of units", after(lambda found: 1.02 * found)),
}
"""Faults of what samplers are made of, or of what hands out their batches."""
LARGE = {
    ("poisson cut", SURVIVORS): "FirstRowsKept NeighboursCut OneCutForAllSteps",
    ("bins cut", SURVIVORS): "LastRowsKept",
    ("poisson", OFTEN): "PoissonTooOften PoissonTooRarely TrialsNeverInARow UniformsOf8Bits",
    ("poisson", CHUNKS): "TooOftenInTheLastChunk FirstEpochUnlessAhead",
    ("poisson", STEPS): "FewerInTheFirstStep",
    ("poisson", READ): (
        "LastChunkPlannedWithTheEpochBefore EpochBehindAhead PaddingCounts LastPaddingCounts "
        "LastMemberTwice"
    ),
    ("bins", READ): (
        "LastChunkPlannedWithTheEpochBefore ThirdEpochBehindAhead AheadOfAnotherSeed "
        "FirstStepsAgain"
    ),
    ("poisson", RETURNS): "EvenEpochsShare EpochsByThreesShare FirstTrialSucceeds",
    ("bins", EPOCHS_APART): (
        "EpochsByFoursShare EpochsBySevensShare BinsReversedEverySecondEpoch MovedByOneStep"
    ),
    ("bins", RETURNS): "OneExampleInBin0 LastExampleInBin0",
    ("bins", STEPS): "BinsOf10Bits LastBinNever",
    ("many bins", STEPS): "BinsOf16Bits",
    ("bins", INDEPENDENT): "NeighboursNeverTogether EveryTenthFollows",
    ("bins", SURVIVORS): "ChunksShareKeys",
    ("poisson", INDEPENDENT): "ChunksShare",
    ("bins", CUTS): "SeedsOf32Bits",
    ("poisson", CUTS): "SeedNeverRead",
    ("poisson in passes", READ): "PassesOverlap LastPassDropped SecondPassAgain",
    ("shuffle", EPOCHS_APART): "EpochsInPairs BucketsKept",
    ("shuffle", CHUNKS): "FirstBucketInOrder",
    ("shuffle", RETURNS): "FirstExampleFirst",
    ("users", INDEPENDENT): "UsersTogether",
    ("multistage", READ): "UnitsReplaced FirstChildAlways EqualChildren",
    ("multistage", EPOCHS_APART): "StepsBy2Share",
    ("units then poisson", STEPS): "UnitsTooOften",
    ("full batch", READ): "SumsOfOnePass OneRowForAnother",
    ("full batch", ONCE): "FirstChunkAlone",
    ("fixed bins", EPOCHS_ALIKE): "RedrawnAllTheSame",
}
"""Of what is drawn, and the check that catches them: the faults at real sizes."""
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
    """Looks as closely as `check_sampler` does: before a run three of these pass."""
    checks = sampler_checks(sampler, sampler, seed=2**128 + 7, entries=THOROUGH)
    return {check.name for check in checks if not check.passed}


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "kind", "check"),
    [(fault, *caught) for caught, faults in LARGE.items() for fault in faults.split()],
)
def test_a_fault_of_the_draws_is_caught_at_88_000_examples(fault, kind, check, monkeypatch):
    sampler = DRAWN[kind]
    if fault in SEAMS:
        plant(SEAMS[fault], monkeypatch)
    else:
        sampler = faulty(fault, sampler)
    assert check in failed_at_size(sampler)


@pytest.mark.long
@pytest.mark.parametrize("kind", DRAWN)
def test_without_a_fault_draws_of_88_000_examples_pass(kind):
    assert not failed_at_size(DRAWN[kind])
