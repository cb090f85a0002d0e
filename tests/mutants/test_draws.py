"""Planted faults of samplers: each draws in another way than is claimed, and the audit says so."""

import dataclasses
import threading

import numpy as np
import pytest
from faulty_samplers import AllButOne, Either, Equal, Unequal, faulty
from planting import Fault, after, before, plant

from dpsgd.audit.draws import draw_checks
from dpsgd.audit.laws import THOROUGH, law_checks
from samplers import (
    BallsAndBins,
    FullBatch,
    Multistage,
    Poisson,
    Shuffle,
    UnitsThenPoisson,
    UnitTree,
    UserPoisson,
)
from tests.samplers.conftest import EPOCH_SAMPLERS

pytestmark = pytest.mark.mutants

SEED = 2**128 + 1
CHUNK = 150
N, B, EPOCHS = 400, 20, 9
ENTRIES = 2**14  # a sixteenth of what an audit counts


@pytest.fixture(autouse=True)
def small(request, monkeypatch):
    """Three chunks of a small data set, unless pairs are to be seen."""
    if not any(name in request.node.name for name in ("88_000", "Pairs", "OneShelf", "BinsOf16")):
        monkeypatch.setattr("samplers.plans.CHUNK", CHUNK)


def checks_of(sampler, claimed=None, entries=ENTRIES):
    """The exact checks before every run, and the law if they pass, as before own samplers."""
    checks = draw_checks(sampler, claimed or sampler, seed=SEED)
    if all(check.passed for check in checks):
        checks += law_checks(sampler, claimed, entries=entries)
    return checks


def failed(*arguments, **how):
    return [check for check in checks_of(*arguments, **how) if not check.passed]


IN_ORDER, SHUFFLE, _, POISSON, BINS, FIXED, OF_USERS = (
    make(N, B, EPOCHS) for make in EPOCH_SAMPLERS.values()
)
CUT = Poisson(N, B, EPOCHS, max_batch_size=40)
PASSED = Poisson(N, B, EPOCHS, max_batch_size=15, overflow="accumulate")
TREE = UnitTree.even((20, 4, 8), ("shop", "shelf"))
MANY = UnitTree.even((60, 2, 4), ("shop", "shelf"))
LARGE = UnitTree.even((64, 16, 16), ("shop", "shelf"))  # few of its large draws are counted
UNITS = Multistage(TREE, (3, 2, 4), steps=200)
POISSON_IN_UNITS = UnitsThenPoisson(UnitTree.even((20, 400), ("shop",)), (4,), 0.3, steps=200)
SHOPS_OF_MANY_SIZES = UnitTree.from_columns({"shop": np.repeat(np.arange(40), np.arange(20, 60))})
POISSON_IN_UNEVEN = UnitsThenPoisson(SHOPS_OF_MANY_SIZES, (4,), 0.5, steps=200)
SHOPS_FROM_ONE = UnitTree.from_columns({"shop": np.repeat(np.arange(40), np.arange(1, 41))})
POISSON_IN_TINY = UnitsThenPoisson(SHOPS_FROM_ONE, (4,), 0.02, steps=200)
UNEQUAL, ALL_BUT_ONE = Unequal(N, B, EPOCHS), AllButOne(N, N, EPOCHS)
EQUAL, EITHER = Equal(N, B, EPOCHS), Either(N, B, EPOCHS)
FULL = FullBatch(N, 4, max_batch_size=64)
CYCLIC = BallsAndBins(N, B, EPOCHS, cycle_length=4)
CYCLIC_POISSON = Poisson(N, B, EPOCHS, cycle_length=4)
SHARDS = {"num_shards": 4, "max_batch_size": 11}
POISSON_SHARDS, BIN_SHARDS = (dataclasses.replace(one, **SHARDS) for one in (POISSON, BINS))
SHUFFLE_SHARDS = dataclasses.replace(SHUFFLE, num_shards=4)
SHARDS_IN_ORDER = dataclasses.replace(IN_ORDER, num_shards=7)
SOUND = [POISSON, BINS, FIXED, SHUFFLE, IN_ORDER, CUT, PASSED, UNITS, POISSON_IN_UNITS, OF_USERS]
SOUND += [CYCLIC, CYCLIC_POISSON, dataclasses.replace(CYCLIC, assignment="fixed")]
SOUND += [UNEQUAL, ALL_BUT_ONE, EITHER, POISSON_IN_UNEVEN, POISSON_IN_TINY]
SOUND += [FULL, POISSON_SHARDS, BIN_SHARDS, SHUFFLE_SHARDS, SHARDS_IN_ORDER]

CLAIMS = {
    "shuffle claimed as Poisson": (SHUFFLE, POISSON),
    "the order of the file claimed as Poisson": (IN_ORDER, POISSON),
    "balls-and-bins claimed as Poisson": (BINS, POISSON),
    "Poisson claimed as balls-and-bins": (POISSON, BINS),
    "shuffle claimed as balls-and-bins": (SHUFFLE, BINS),
    "fixed bins claimed as redrawn": (FIXED, BINS),
    "redrawn bins claimed as fixed": (BINS, FIXED),
    "bins of all steps claimed as cyclic": (BINS, CYCLIC),
    "Poisson in all steps claimed as cyclic": (POISSON, CYCLIC_POISSON),
    "nine epochs priced as one": (POISSON, POISSON.with_epochs(1)),
    "nine orders priced as one": (SHUFFLE, SHUFFLE.with_epochs(1)),
}  # fmt: skip
BUGS = [
    (
        POISSON,
        "EpochIgnored SeedIgnored EvenEpochsShare LastChunkOfTheEpochBefore ChunksShare "
        "FirstEpochRepeated ReadAheadDrawsTwice FirstExampleNever BorderLeftOut BorderInBothChunks "
        "LaterExamplesFavoured FirstRowsKept LateRowsFavoured OneCutForAllSteps OneCutForTwoSteps "
        "OneCutForAllSeeds",
    ),
    (
        BINS,
        "EpochIgnored SeedIgnored EpochsByFoursShare LastChunkOfTheEpochBefore ChunksShare "
        "ReadAheadDrawsTwice MovedByOneStep EarlyStepsFavoured StepsOfOneChunkFavoured "
        "OneExampleInBin0 FirstExampleInEarlyBins FirstExampleNever NeighboursTogether",
    ),
    (CYCLIC, "EpochIgnored GroupsOfEachEpoch EarlyStepsFavoured"),
    (CYCLIC_POISSON, "SeedIgnored"),
    (OF_USERS, "EvenEpochsShare"),
    (POISSON.with_epochs(40), "LastEpochOfTheRunRepeated"),
    (
        SHUFFLE,
        "ReadAheadDrawsTwice ShortSeed ReversedEverySecondEpoch NeighboursShuffled LastBatchShort",
    ),
    (Poisson(300, 3, 2), "StepsBy64Share"),
    (Poisson(20_000, 10_000, 2), "TooOften"),
    (BallsAndBins(50_000, 25, 2), "BinsOf16Bits"),
    (UNITS, "FirstOfUnit FirstUnitFavoured StepsBy16Share OneUnitTooMany OneShelfForTwo"),
    (POISSON_IN_UNITS, "TooOftenInUnits OneUnitTooMany FirstRowsKept"),
    (POISSON_IN_UNEVEN, "ShopsBy2Steps ShopsInPairs"),
    (UNEQUAL, "RowsInPairs NineTenthsAgain"),
    (Multistage(TREE, (10, 2, 4), steps=200), "PairsOfAShelf"),
    (Multistage(TREE, (4, 2, 4), steps=200), "PairsOfShops"),
    (IN_ORDER, "AnotherOrder"),
    (CUT, "CapNotKept CutTooShort FirstRowsKept"),
    (dataclasses.replace(CUT, max_batch_size=22), "CapNotKept"),
    (Multistage(MANY, (6, 1, 2), steps=200), "UnitsStay"),
    (Multistage(LARGE, (16, 16, 16), steps=200), "SeedIgnoredInUnits StepsBy2Share"),
    (Multistage(LARGE, (16, 8, 8), steps=2_003), "LateShelvesFavourTheFirst LateStepsShare"),
    (PASSED, "LastPassDropped PassesOverlap"),
    (dataclasses.replace(PASSED, max_batch_size=40), "LastPassDropped"),
    (
        POISSON_SHARDS,
        "FirstShardTwice LastShardNever ShardsReadOneFurther ShardsBeginLate ShardsOverlap "
        "ShardsCutAlike",
    ),
    (
        BIN_SHARDS,
        "FirstShardTwice LastShardNever ShardsReadOneFurther ShardsBeginLate ShardsOverlap",
    ),
    (SHARDS_IN_ORDER, "FirstShardTwice"),
    (SHUFFLE_SHARDS, "LastShardNever ShardsBeginLate ShardsShuffledAlike"),
    (
        FULL,
        "OneRowLeftOut OneRowCountedTwice OneRowForAnother FirstChunkAlone LaterSumsOfTheFirstHalf "
        "SumsPassesAgain SumsOfOnePass",
    ),
]
"""Samplers, and faults planted into each."""


@pytest.mark.short(
    "shuffle claimed as Poisson", "Poisson *", "balls*", "fixed bins*", "nine epochs*"
)
@pytest.mark.parametrize(("sampler", "claimed"), CLAIMS.values(), ids=CLAIMS)
def test_a_wrong_claim_of_a_sampler_is_caught(sampler, claimed):
    assert failed(sampler, claimed)


def planted_bugs():
    """Each fault in each sampler; a second sampler with the same fault is long."""
    caught = set()
    for sampler, faults in BUGS:
        for fault in faults.split():
            marks = pytest.mark.long if fault in caught or fault == "BinsOf16Bits" else ()
            caught.add(fault)
            yield pytest.param(fault, sampler, id=f"{fault}-{type(sampler).__name__}", marks=marks)


@pytest.mark.short(
    "*Ignored*",
    "FirstEpochRepeated*",
    "ShortSeed*",
    "MovedByOneStep*",
    "FirstExampleNever*",
    "NeighboursTogether*",
    "BorderLeftOut*",
    "OneUnitTooMany*",
    "Late*-Multistage",
    "ShopsBy2Steps*",
    "ShopsInPairs*",
    "RowsInPairs*",
    "AnotherOrder*",
    "C*",
    "FirstRowsKept*",
    "LastPassDropped*",
    "LastBatchShort*",
    "ShardsOverlap*",
    "ShardsShuffledAlike*",
    "*-FullBatch",
)
@pytest.mark.parametrize(("fault", "sampler"), list(planted_bugs()))
def test_a_planted_fault_of_a_sampler_is_caught(fault, sampler):
    assert failed(faulty(fault, sampler), entries=THOROUGH if "16" in fault else ENTRIES)


@pytest.mark.short(
    "BallsAndBins*num_shards=4*", "FullBatch*", "Unequal*", "Either*", "AllButOne*", "Uni*"
)
@pytest.mark.parametrize("sampler", SOUND, ids=repr)
def test_sound_samplers_of_small_data_pass(sampler):
    assert not failed(sampler)


ALONE = [
    (UNEQUAL, "RowsApart FewAgain MostlyAgainOnce"),
    (EQUAL, "FewAgain MostlyAgainOnce"),
    (EITHER, "RowsInPairs"),
    (POISSON_IN_UNEVEN, "SmallShopsInPairs"),
    (POISSON_IN_TINY, "ShopsInPairs"),
]


@pytest.mark.parametrize(
    ("sampler", "fault"), [(sampler, fault) for sampler, all_ in ALONE for fault in all_.split()]
)
def test_a_fault_that_one_comparison_shows_is_caught(sampler, fault):
    assert failed(faulty(fault, sampler))


def test_a_repeated_draw_is_seen_before_any_law_is_tested():
    sampler = faulty("EvenEpochsShare", POISSON)
    (check,) = draw_checks(sampler, sampler, seed=SEED)
    assert "are the same draw" in check.detail


# What hands out the batches: no sampler knows of these.


def seam(name, make):
    return Fault(name, make)


def weighed(where, factor=0.0, plus=0.0):
    """Places of a block have other weights."""

    def faulty(found):
        found.weights[where] = factor * found.weights[where] + plus
        return found

    return seam("filled", after(faulty))


def held_by_all(sound):
    def drawn(self, epoch):
        if len(self.shards) == 1 < self.sampler.num_shards:
            return [self.sampler.shard_plan(self._seed(epoch), epoch, 0)]
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
                source_step = start // length * length + step % length
                again = sound(self, source_step, source_step + 1)
                found.indices[row], found.weights[row] = again.indices[0], again.weights[0]
        return found

    return fill


def by_the_first_secret(sound):
    """A source takes the secret of epoch 0 for all, once an epoch is drawn."""

    def cut(self, step):
        self._plan_of(step // self.sampler.steps_per_epoch)
        cut_seed = self._seed
        self._seed = lambda epoch: cut_seed(0)
        try:
            return sound(self, step)
        finally:
            self._seed = cut_seed

    return cut


def planned_by_the_first_secret(sound):
    return lambda self, epoch: [self.sampler.plan(self._seed(0), epoch)]


SOURCE = {
    "epochs are cut by the secret of the first": seam("cut", by_the_first_secret),
    "epochs are drawn by the secret of the first": seam("drawn", planned_by_the_first_secret),
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
    assert failed(sampler)


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
    "poisson cut": "FirstRowsKept NeighboursCut OneCutForAllSteps",
    "bins cut": "LastRowsKept",
    "poisson": (
        "PoissonTooOften PoissonTooRarely TrialsNeverInARow UniformsOf8Bits "
        "TooOftenInTheLastChunk FirstEpochUnlessAhead FewerInTheFirstStep "
        "LastChunkPlannedWithTheEpochBefore EpochBehindAhead PaddingCounts LastPaddingCounts "
        "LastMemberTwice EvenEpochsShare EpochsByThreesShare FirstTrialSucceeds ChunksShare "
        "SeedNeverRead"
    ),
    "bins": (
        "LastChunkPlannedWithTheEpochBefore ThirdEpochBehindAhead AheadOfAnotherSeed "
        "FirstStepsAgain EpochsByFoursShare EpochsBySevensShare BinsReversedEverySecondEpoch "
        "MovedByOneStep OneExampleInBin0 LastExampleInBin0 BinsOf10Bits LastBinNever "
        "NeighboursNeverTogether EveryTenthFollows ChunksShareKeys SeedsOf32Bits"
    ),
    "many bins": "BinsOf16Bits",
    "poisson in passes": "PassesOverlap LastPassDropped SecondPassAgain",
    "shuffle": "EpochsInPairs BucketsKept FirstBucketInOrder FirstExampleFirst",
    "users": "UsersTogether",
    "multistage": "UnitsReplaced FirstChildAlways EqualChildren StepsBy2Share",
    "units then poisson": "UnitsTooOften",
    "full batch": "SumsOfOnePass OneRowForAnother FirstChunkAlone",
    "fixed bins": "RedrawnAllTheSame",
}
"""Names of samplers, and faults planted at real sizes."""
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


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "kind"), [(fault, kind) for kind, faults in LARGE.items() for fault in faults.split()]
)
def test_a_fault_of_the_draws_is_caught_at_88_000_examples(fault, kind, monkeypatch):
    sampler = DRAWN[kind]
    if fault in SEAMS:
        plant(SEAMS[fault], monkeypatch)
    else:
        sampler = faulty(fault, sampler)
    assert failed(sampler, entries=THOROUGH)


@pytest.mark.long
@pytest.mark.parametrize("kind", DRAWN)
def test_draws_of_88_000_examples_pass(kind):
    assert not failed(DRAWN[kind], entries=THOROUGH)
