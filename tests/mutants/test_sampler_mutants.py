"""Planted bugs of samplers: each draws in another way than is claimed, and the audit must say how.

Each names the check that has to catch it, and each check of the audit has a bug that it is there
for: a check that is taken out, or blunted, turns a test red.
"""

import dataclasses
import functools
import threading

import numpy as np
import pytest

from dpsgd.audit.samplers.checks import sampler_checks
from samplers import (
    BallsAndBins,
    BatchSource,
    Deterministic,
    EpochPlan,
    FullBatch,
    Multistage,
    Participations,
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
def small(monkeypatch):
    """Three chunks of a small data set, and a tenth of the draws."""
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
ONCE = "everybody takes part once an epoch"
STEPS = "all steps take their share of the examples"
CHUNKS = "every chunk takes its share of every step"
EXAMPLES = "all examples take part at the rate that was claimed"
RETURNS = "nobody comes back to a step more often than claimed"
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
GROUPS = "everybody keeps to the steps of their group"


# --------------------------------------------------------------------------- keys and epochs


class EpochIgnored:
    """Draws every epoch by the key of the first."""

    def participations(self, seed, epoch, chunk):
        return super().participations(seed, 0, chunk)


class SeedIgnored:
    """Draws the same batches in every run: whoever has the program knows them."""

    def participations(self, seed, epoch, chunk):
        return super().participations(0, epoch, chunk)


class EvenEpochsShare:
    """Draws epochs 0, 2, 4, ... alike."""

    def participations(self, seed, epoch, chunk):
        return super().participations(seed, epoch if epoch % 2 else 0, chunk)


class EpochsByFoursShare:
    """Draws epochs e and e + 4 alike."""

    def participations(self, seed, epoch, chunk):
        return super().participations(seed, epoch % 4, chunk)


class LastChunkOfTheEpochBefore:
    def participations(self, seed, epoch, chunk):
        last = chunk == self.num_chunks - 1
        return super().participations(seed, max(0, epoch - last), chunk)


class LastEpochOfTheRunRepeated:
    """Draws the last epoch as the one before."""

    def participations(self, seed, epoch, chunk):
        return super().participations(seed, min(epoch, self.epochs - 2), chunk)


class ChunksShare:
    """Draws every chunk by the key of the first."""

    def participations(self, seed, epoch, chunk):
        rows = self.chunk_range(chunk)
        examples, steps = super().participations(seed, epoch, 0)
        some = examples < len(rows)
        return Participations(examples[some] + np.int32(rows.start), steps[some])


class FirstEpochRepeated(Poisson):
    """Trains on the first epoch's batches again and again; the rows know nothing of it."""

    def drawn_epoch(self, epoch):
        return 0


class ReadAheadDrawsTwice:
    """What is drawn ahead is the epoch that is read."""

    def plan(self, seed, epoch):
        ahead = threading.current_thread() is not threading.main_thread()
        return super().plan(seed, epoch - 1 if ahead else epoch)


class ShortSeed(Shuffle):
    """Permutes by a seed of 16 bits."""

    def bucket(self, seed, epoch, chunk, shard=0):
        return super().bucket(seed % 2**16, epoch, chunk, shard)

    def ordered(self, seed, epoch, bucket, members, shard=0):
        return super().ordered(seed % 2**16, epoch, bucket, members, shard)


class ReversedEverySecondEpoch(Shuffle):
    def plan(self, seed, epoch):
        plan = super().plan(seed, epoch - epoch % 2)
        if epoch % 2 == 0:
            return plan
        steps = [plan.members(step) for step in reversed(range(self.steps_per_epoch))]
        return EpochPlan(plan.starts, np.concatenate(steps))


class StepsBy64Share(Poisson):
    """Draws steps t and t + 64 alike."""

    def participations(self, seed, epoch, chunk):
        examples, steps = super().participations(seed, epoch, chunk)
        copies = [(examples[steps < 64], steps[steps < 64] + 64 * k) for k in range(3)]
        examples, steps = (np.concatenate(part) for part in zip(*copies, strict=True))
        some = steps < self.steps_per_epoch
        return Participations(examples[some], steps[some].astype(np.int32))


class MovedByOneStep(BallsAndBins):
    """Puts every example one bin further in each epoch."""

    def participations(self, seed, epoch, chunk):
        examples, steps = super().participations(seed, 0, chunk)
        return Participations(examples, (steps + np.int32(epoch)) % self.steps_per_epoch)


class GroupsOfEachEpoch(BallsAndBins):
    """Puts every example into another group in each epoch."""

    def participations(self, seed, epoch, chunk):
        examples, steps = super().participations(seed, epoch, chunk)
        cycle = np.int32(self.cycle_length)
        return Participations(
            examples, steps - steps % cycle + (examples + np.int32(epoch)) % cycle
        )


class FirstCycleFavoured(BallsAndBins):
    """Draws the first of a group's steps for every eighth example more often."""

    def participations(self, seed, epoch, chunk):
        examples, steps = super().participations(seed, epoch, chunk)
        _, others = super().participations(seed + 2**128, epoch, chunk)
        favoured = examples % 8 == 0
        return Participations(examples, np.where(favoured, np.minimum(steps, others), steps))


# ------------------------------------------------------------------------------------- rates


class TooOften(Poisson):
    """Draws 1 % more than is claimed."""

    def participations(self, seed, epoch, chunk):
        more = Poisson(self.num_examples, self.batch_size * 101 // 100, self.epochs)
        return more.participations(seed, epoch, chunk)


class BinsOf16Bits(BallsAndBins):
    def participations(self, seed, epoch, chunk):
        rows = self.chunk_range(chunk)
        words = np.random.default_rng([seed % 2**128, epoch, chunk]).integers(0, 2**16, len(rows))
        steps = (words % self.steps_per_epoch).astype(np.int32)
        return Participations(np.arange(rows.start, rows.stop, dtype=np.int32), steps)


class EarlyStepsFavoured(BallsAndBins):
    """Draws a step by a generator that is not uniform."""

    def participations(self, seed, epoch, chunk):
        examples, steps = super().participations(seed, epoch, chunk)
        _, others = super().participations(seed + 2**128, epoch, chunk)
        favoured = examples % 8 == 0
        return Participations(examples, np.where(favoured, np.minimum(steps, others), steps))


class StepsOfOneChunkFavoured(BallsAndBins):
    """Draws earlier steps for the examples of one chunk, and later ones for those of the next."""

    def participations(self, seed, epoch, chunk):
        examples, steps = super().participations(seed, epoch, chunk)
        _, others = super().participations(seed + 2**128, epoch, chunk)
        pick = [np.minimum, np.maximum, lambda one, other: one][chunk]
        return Participations(examples, np.where(examples % 4 == 0, pick(steps, others), steps))


class OneExampleInBin0(BallsAndBins):
    def participations(self, seed, epoch, chunk):
        examples, steps = super().participations(seed, epoch, chunk)
        return Participations(examples, np.where(examples == 17, np.int32(0), steps))


class FirstExampleInEarlyBins(BallsAndBins):
    def participations(self, seed, epoch, chunk):
        examples, steps = super().participations(seed, epoch, chunk)
        early = (steps // 2).astype(np.int32)
        return Participations(examples, np.where(examples == 0, early, steps))


class FirstExampleNever:
    def participations(self, seed, epoch, chunk):
        examples, steps = super().participations(seed, epoch, chunk)
        return Participations(examples[examples > 0], steps[examples > 0])


class BorderLeftOut(Poisson):
    """Draws a chunk without its last example."""

    def participations(self, seed, epoch, chunk):
        examples, steps = super().participations(seed, epoch, chunk)
        some = examples < self.chunk_range(chunk).stop - 1
        return Participations(examples[some], steps[some])


class BorderInBothChunks(Poisson):
    """Draws the first example of a chunk with the chunk before as well."""

    def participations(self, seed, epoch, chunk):
        examples, steps = super().participations(seed, epoch, chunk)
        if chunk + 1 == self.num_chunks:
            return Participations(examples, steps)
        more, at = super().participations(seed + 2**128, epoch, chunk + 1)
        some = more == self.chunk_range(chunk).stop
        return Participations(np.append(examples, more[some]), np.append(steps, at[some]))


class LaterExamplesFavoured(Poisson):
    """Gives half of the first half's participations to the second."""

    def participations(self, seed, epoch, chunk):
        examples, steps = super().participations(seed, epoch, chunk)
        half = CHUNK // 2
        moved = (examples % CHUNK < half) & ((examples + steps) % 2 == 0)
        keys = (examples + np.where(moved & (chunk < 2), half, 0)) * self.steps_per_epoch + steps
        examples, steps = np.divmod(np.unique(keys), self.steps_per_epoch)
        return Participations(examples.astype(np.int32), steps.astype(np.int32))


class NeighboursTogether(BallsAndBins):
    """Lets an example follow its neighbour."""

    def participations(self, seed, epoch, chunk):
        examples, steps = super().participations(seed, epoch, chunk)
        return Participations(examples, np.repeat(steps[::2], 2)[: steps.size])


# ----------------------------------------------------------------------------- units of a tree


class FirstOfUnit(Multistage):
    """Always takes the first example of a drawn unit."""

    def episode(self, seed, step):
        episode = super().episode(seed, step)
        examples = episode.examples.copy()
        first = episode.units[-1] * 8
        lacks = ~(examples == first[..., None]).any(axis=-1)
        examples[..., 0] = np.where(lacks, first, examples[..., 0])
        return episode._replace(examples=examples)


class TooOftenInUnits(UnitsThenPoisson):
    """Takes 4 % more of the examples of a drawn unit."""

    def members(self, seed, step):
        more = dataclasses.replace(self, sampling_prob=1.04 * self.sampling_prob)
        return super(TooOftenInUnits, more).members(seed, step)


class FirstUnitFavoured(Multistage):
    """Draws the first unit wherever it is not drawn, in every second step."""

    def members(self, seed, step):
        drawn = super().members(seed, step)
        if step % 2 and not (drawn < 32).any():
            drawn = np.concatenate([drawn[8:], np.arange(8) * 4])
        return np.sort(drawn).astype(np.int32)


class StepsBy16Share(Multistage):
    def members(self, seed, step):
        return super().members(seed, step % 16)


class UnitsStay(Multistage):
    """Draws units for two steps, and their examples for each."""

    def members(self, seed, step):
        one, other = (self.episode(seed, s).units[0] for s in (step, step - step % 2))
        drawn = super().members(seed, step)
        kept = dict(zip(one.tolist(), other.tolist(), strict=True))
        return np.sort([kept[i // 8] * 8 + i % 8 for i in drawn.tolist()]).astype(np.int32)


# ------------------------------------------------------------------------------- cuts, passes


class FirstRowsKept:
    def passes(self, members, seed, step, shard=0):
        return [members[: self.padded_batch_size]]


class LateRowsFavoured(Poisson):
    """Cuts from the first three quarters alone."""

    def passes(self, members, seed, step, shard=0):
        excess, chosen = members.size - self.padded_batch_size, members.size * 3 // 4
        if excess <= 0:
            return [members]
        gone = np.random.default_rng([seed % 2**128, step]).permutation(chosen)[:excess]
        return [np.delete(members, gone)]


class OneCutForAllSteps(Poisson):
    def passes(self, members, seed, step, shard=0):
        return super().passes(members, seed, 0, shard)


class OneCutForTwoSteps(Poisson):
    def passes(self, members, seed, step, shard=0):
        return super().passes(members, seed, step // 2, shard)


class OneCutForAllSeeds(Poisson):
    def passes(self, members, seed, step, shard=0):
        return super().passes(members, 0, step, shard)


class LastPassDropped(Poisson):
    def passes(self, members, seed, step, shard=0):
        passes = super().passes(members, seed, step, shard)
        return passes[:-1] if len(passes) > 1 else passes


class PassesOverlap(Poisson):
    def passes(self, members, seed, step, shard=0):
        first, *others = super().passes(members, seed, step, shard)
        return [first, *(np.append(first[-1:], other[1:]) for other in others)]


class LastBatchShort(Shuffle):
    def plan(self, seed, epoch):
        starts, examples = super().plan(seed, epoch)
        return EpochPlan(np.append(starts[:-1], starts[-1] - 1), examples[:-1])


# ------------------------------------------------------------------------------------------ shards


class FirstShardTwice:
    """Draws shard 1 as shard 0."""

    def shard_plan(self, seed, epoch, shard):
        return super().shard_plan(seed, epoch, 0 if shard == 1 else shard)


class LastShardNever:
    def shard_plan(self, seed, epoch, shard):
        plan = super().shard_plan(seed, epoch, shard)
        if shard < self.num_shards - 1:
            return plan
        return EpochPlan(np.zeros_like(plan.starts), plan.examples[:0])


class ShardsReadOneFurther:
    """Takes rows for those after them."""

    def shard_plan(self, seed, epoch, shard):
        plan = super().shard_plan(seed, epoch, shard)
        last = len(self.shard_range(shard)) - 1
        examples = np.where(plan.examples == last, 0, plan.examples + 1).astype(np.int32)
        return EpochPlan(plan.starts, examples)


class ShardsBeginLate:
    """Leaves out the first row of each shard but the first."""

    def shard_range(self, shard):
        rows = super().shard_range(shard)
        return range(rows.start + (shard > 0), rows.stop)


class ShardsOverlap:
    def shard_range(self, shard):
        rows = super().shard_range(shard)
        return range(rows.start - (shard > 0), rows.stop)


class ShardsCutAlike:
    def passes(self, members, seed, step, shard=0):
        return super().passes(members, seed, step, 0)


class ShardsShuffledAlike:
    def bucket(self, seed, epoch, chunk, shard=0):
        return super().bucket(seed, epoch, chunk, 0)

    def ordered(self, seed, epoch, bucket, members, shard=0):
        return super().ordered(seed, epoch, bucket, members, 0)


# ------------------------------------------------------------------------------- all rows at once


class OneRowLeftOut(FullBatch):
    """In the middle, where it is no border of anything."""

    def plan(self, seed, epoch):
        (_, n), examples = super().plan(seed, epoch)
        return EpochPlan(np.array([0, n - 1]), np.delete(examples, n // 2))


class OneRowCountedTwice(FullBatch):
    def plan(self, seed, epoch):
        (_, n), examples = super().plan(seed, epoch)
        return EpochPlan(np.array([0, n + 1]), np.insert(examples, n // 2, examples[n // 2]))


class OneRowForAnother(FullBatch):
    def plan(self, seed, epoch):
        starts, examples = super().plan(seed, epoch)
        examples[examples.size // 2] = examples[examples.size // 2 - 1]
        return EpochPlan(starts, examples)


class FirstChunkAlone(FullBatch):
    def plan(self, seed, epoch):
        examples = np.arange(CHUNK, dtype=np.int32)
        return EpochPlan(np.array([0, CHUNK]), examples)


class LaterSumsOfTheFirstHalf(FullBatch):
    def drawn_epoch(self, epoch):
        return epoch

    def plan(self, seed, epoch):
        (_, n), examples = super().plan(seed, epoch)
        return EpochPlan(np.array([0, n // 2 if epoch else n]), examples[: n // 2 if epoch else n])


class SumsPassesAgain(FullBatch):
    """Takes the first pass in the place of the last."""

    def passes(self, members, seed, step, shard=0):
        passes = super().passes(members, seed, step, shard)
        return [*passes[:-1], passes[0][: passes[-1].size]]


class SumsOfOnePass(FullBatch):
    def passes(self, members, seed, step, shard=0):
        return super().passes(members, seed, step, shard)[:1]


def planted(bug, sampler):
    """Returns a sampler of this kind, with the bug."""
    kind = dataclasses.dataclass(frozen=True)(type(bug.__name__, (bug, type(sampler)), {}))
    return kind(**{f.name: getattr(sampler, f.name) for f in dataclasses.fields(sampler)})


@functools.cache
def failed_with(bug, sampler):
    return failed(planted(bug, sampler))


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
        SHUFFLE, SHUFFLE.with_epochs(1), "nobody takes part more often than priced"),
}  # fmt: skip
BUGS = {
    EpochIgnored: [(POISSON, EPOCHS_APART), (BINS, EPOCHS_APART), (CYCLIC, EPOCHS_APART)],
    SeedIgnored: [(POISSON, SEEDS), (BINS, SEEDS), (CYCLIC_POISSON, SEEDS)],
    GroupsOfEachEpoch: [(CYCLIC, GROUPS)],
    FirstCycleFavoured: [(CYCLIC, STEPS)],
    EvenEpochsShare: [(POISSON, EPOCHS_APART), (OF_USERS, EPOCHS_APART)],
    EpochsByFoursShare: [(BINS, EPOCHS_APART)],
    LastChunkOfTheEpochBefore: [(POISSON, EPOCHS_APART), (BINS, EPOCHS_APART)],
    LastEpochOfTheRunRepeated: [(POISSON.with_epochs(40), EPOCHS_APART)],
    ChunksShare: [(POISSON, INDEPENDENT), (BINS, INDEPENDENT)],
    FirstEpochRepeated: [(POISSON, READ)],
    ReadAheadDrawsTwice: [(POISSON, READ), (BINS, EPOCHS_APART), (SHUFFLE, READ)],
    ShortSeed: [(SHUFFLE, SEEDS)],
    ReversedEverySecondEpoch: [(SHUFFLE, EPOCHS_APART)],
    StepsBy64Share: [(Poisson(300, 3, 2), OFTEN)],
    MovedByOneStep: [(BINS, EPOCHS_APART)],
    TooOften: [(Poisson(20_000, 10_000, 2), STEPS)],
    BinsOf16Bits: [(BallsAndBins(50_000, 25, 2), STEPS)],
    EarlyStepsFavoured: [(BINS, STEPS)],
    StepsOfOneChunkFavoured: [(BINS, CHUNKS)],
    OneExampleInBin0: [(BINS, RETURNS)],
    FirstExampleInEarlyBins: [(BINS, RETURNS)],
    FirstExampleNever: [(POISSON, EXAMPLES), (BINS, ONCE)],
    BorderLeftOut: [(POISSON, EXAMPLES)],
    BorderInBothChunks: [(POISSON, READ)],
    LaterExamplesFavoured: [(POISSON, CHUNKS)],
    NeighboursTogether: [(BINS, INDEPENDENT)],
    FirstOfUnit: [(UNITS, RANKS)],
    TooOftenInUnits: [(POISSON_IN_UNITS, STEPS)],
    FirstUnitFavoured: [(UNITS, STEPS)],
    StepsBy16Share: [(UNITS, EPOCHS_APART)],
    UnitsStay: [(Multistage(MANY, (6, 1, 2), steps=200), EPOCHS_APART)],
    FirstRowsKept: [(POISSON, SURVIVORS), (CUT, SURVIVORS), (POISSON_IN_UNITS, SURVIVORS)],
    LateRowsFavoured: [(POISSON, SURVIVORS)],
    OneCutForAllSteps: [(POISSON, CUTS)],
    OneCutForTwoSteps: [(POISSON, CUTS)],
    OneCutForAllSeeds: [(POISSON, CUTS)],
    LastPassDropped: [(PASSED, PASSES), (dataclasses.replace(PASSED, max_batch_size=40), PASSES)],
    PassesOverlap: [(PASSED, PASSES)],
    LastBatchShort: [(SHUFFLE, ONCE), (SHUFFLE, HOLD)],
    FirstShardTwice: [(POISSON_SHARDS, READ), (BIN_SHARDS, READ), (SHARDS_IN_ORDER, READ)],
    LastShardNever: [(POISSON_SHARDS, READ), (BIN_SHARDS, ONCE), (SHUFFLE_SHARDS, HOLD)],
    ShardsReadOneFurther: [(POISSON_SHARDS, READ), (BIN_SHARDS, READ)],
    ShardsBeginLate: [(POISSON_SHARDS, READ), (BIN_SHARDS, ONCE), (SHUFFLE_SHARDS, ONCE)],
    ShardsOverlap: [(POISSON_SHARDS, READ), (BIN_SHARDS, READ)],
    ShardsCutAlike: [(POISSON_SHARDS, CUTS)],
    ShardsShuffledAlike: [(SHUFFLE_SHARDS, SHARDS_APART)],
    OneRowLeftOut: [(FULL, ONCE), (FULL, HOLD)],
    OneRowCountedTwice: [(FULL, READ)],
    OneRowForAnother: [(FULL, READ)],
    FirstChunkAlone: [(FULL, READ), (FULL, ONCE), (FULL, HOLD)],
    LaterSumsOfTheFirstHalf: [(FULL, READ), (FULL, ONCE)],
    SumsPassesAgain: [(FULL, READ)],
    SumsOfOnePass: [(FULL, READ), (FULL, ONCE)],
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
        "everybody is where the order says",
        "pairs of examples take part together as often as claimed",
        "neighbours in a unit take part together as often as claimed",
        "examples of a unit take part together as often as claimed",
        "examples of different units take part together as often as claimed",
    }
    made = {check.name for sampler in SOUND for check in checks_of(sampler)}
    assert made == wanted
