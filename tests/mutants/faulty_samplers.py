"""Faulty samplers: each is a sound one, but for one method; see `faulty`."""

import dataclasses
import threading

import numpy as np

from samplers import (
    BallsAndBins,
    EpochPlan,
    FullBatch,
    Multistage,
    Participations,
    Poisson,
    Shuffle,
    UnitsThenPoisson,
)


def faulty(fault, sampler):
    """Returns a sampler of this kind, with the fault."""
    kind = dataclasses.dataclass(frozen=True)(type(fault.__name__, (fault, type(sampler)), {}))
    return kind(**{f.name: getattr(sampler, f.name) for f in dataclasses.fields(sampler)})


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


# ------------------------------------------------------------------------------------- rates


class TooOften(Poisson):
    """Draws 1 % more than is claimed."""

    def participations(self, seed, epoch, chunk):
        more = Poisson(self.num_examples, self.batch_size * 101 // 100, self.epochs)
        return more.participations(seed, epoch, chunk)


class BinsOf16Bits(BallsAndBins):
    BITS = 16

    def participations(self, seed, epoch, chunk):
        rows, words = self.chunk_range(chunk), 2**self.BITS
        words = np.random.default_rng([seed % 2**128, epoch, chunk]).integers(0, words, len(rows))
        steps = (words % self.steps_per_epoch).astype(np.int32)
        return Participations(np.arange(rows.start, rows.stop, dtype=np.int32), steps)


class EarlyStepsFavoured(BallsAndBins):
    """Draws early steps, of an epoch or a cycle, for every eighth example more often."""

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
        chunk_size = len(self.chunk_range(0))
        half = chunk_size // 2
        moved = (examples % chunk_size < half) & ((examples + steps) % 2 == 0)
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
        examples = np.arange(len(self.chunk_range(0)), dtype=np.int32)
        return EpochPlan(np.array([0, examples.size]), examples)


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


# -------------------------------------------------------------------------- seen at 88,000 examples


class EpochsByThreesShare:
    def participations(self, seed, epoch, chunk):
        return super().participations(seed, epoch % 3, chunk)


class EpochsBySevensShare:
    def participations(self, seed, epoch, chunk):
        return super().participations(seed, epoch % 7, chunk)


class TooOftenInTheLastChunk(Poisson):
    """Draws 1 % more there than is claimed."""

    def participations(self, seed, epoch, chunk):
        more = self.batch_size * 101 // 100 if chunk == self.num_chunks - 1 else self.batch_size
        drawn = Poisson(self.num_examples, more, self.epochs)
        return drawn.participations(seed, epoch, chunk)


class FewerInTheFirstStep:
    def participations(self, seed, epoch, chunk):
        examples, steps = super().participations(seed, epoch, chunk)
        some = (steps > 0) | (examples % 10 > 0)
        return Participations(examples[some], steps[some])


class LastChunkPlannedWithTheEpochBefore:
    def plan(self, seed, epoch):
        plans = super().plan(seed, epoch), super().plan(seed, max(0, epoch - 1))
        border = self.chunk_range(self.num_chunks - 1).start
        parts = []
        for step in range(self.steps_per_epoch):
            one, other = (plan.members(step) for plan in plans)
            parts.append(np.concatenate([one[one < border], other[other >= border]]))
        return EpochPlan(np.cumsum([0, *map(len, parts)]), np.concatenate(parts))


class LastExampleInBin0(BallsAndBins):
    def participations(self, seed, epoch, chunk):
        examples, steps = super().participations(seed, epoch, chunk)
        last = examples == self.num_examples - 1
        return Participations(examples, np.where(last, np.int32(0), steps))


class BinsOf10Bits(BinsOf16Bits):
    BITS = 10


class LastBinNever(BallsAndBins):
    def participations(self, seed, epoch, chunk):
        examples, steps = super().participations(seed, epoch, chunk)
        last = self.steps_per_epoch - 1
        return Participations(examples, np.where(steps == last, examples % last, steps))


class BinsReversedEverySecondEpoch(BallsAndBins):
    def participations(self, seed, epoch, chunk):
        examples, steps = super().participations(seed, epoch // 2 * 2, chunk)
        steps = self.steps_per_epoch - 1 - steps if epoch % 2 else steps
        return Participations(examples, steps.astype(np.int32))


class NeighboursNeverTogether(BallsAndBins):
    def participations(self, seed, epoch, chunk):
        examples, steps = super().participations(seed, epoch, chunk)
        alike = (np.arange(steps.size) % 2 > 0) & (steps == np.roll(steps, 1))
        return Participations(examples, (steps + alike.astype(np.int32)) % self.steps_per_epoch)


class EveryTenthFollows(BallsAndBins):
    def participations(self, seed, epoch, chunk):
        examples, steps = super().participations(seed, epoch, chunk)
        follows = np.arange(steps.size) % 10 == 9
        return Participations(examples, np.where(follows, np.roll(steps, 1), steps))


class UsersTogether(Poisson):
    """Draws the examples of a user in one step."""

    def participations(self, seed, epoch, chunk):
        examples, steps = super().participations(seed, epoch, chunk)
        rows = self.chunk_range(chunk)
        some = examples[::3].astype(np.int64) // 3 * 3
        keys = np.unique(np.concatenate([(some + k) * 2**20 + steps[::3] for k in range(3)]))
        examples, steps = np.divmod(keys, 2**20)
        kept = (examples >= rows.start) & (examples < rows.stop)
        return Participations(examples[kept].astype(np.int32), steps[kept].astype(np.int32))


class LastRowsKept:
    def passes(self, members, seed, step, shard=0):
        return [members[-self.padded_batch_size :]]


class NeighboursCut(Poisson):
    """Cuts rows that lie side by side."""

    def passes(self, members, seed, step, shard=0):
        begin = int(np.random.default_rng([seed % 2**128, step]).integers(members.size))
        return [np.sort(np.roll(members, begin)[: self.padded_batch_size])]


class SecondPassAgain(Poisson):
    def passes(self, members, seed, step, shard=0):
        first, *others = super().passes(members, seed, step, shard)
        return [first, *(first[: other.size] for other in others)]


class EpochsInPairs(Shuffle):
    def drawn_epoch(self, epoch):
        return epoch // 2 * 2


class FirstBucketInOrder(Shuffle):
    def ordered(self, seed, epoch, bucket, members, shard=0):
        return super().ordered(seed, epoch, bucket, members, shard) if bucket else members


class FirstExampleFirst(Shuffle):
    def plan(self, seed, epoch):
        starts, examples = super().plan(seed, epoch)
        return EpochPlan(starts, np.concatenate([[0], examples[examples > 0]]).astype(np.int32))


class BucketsKept(Shuffle):
    def bucket(self, seed, epoch, chunk, shard=0):
        return super().bucket(seed, 0, chunk, shard)


class StepsBy2Share(Multistage):
    def members(self, seed, step):
        return super().members(seed, step // 2)


class RedrawnAllTheSame(BallsAndBins):
    def drawn_epoch(self, epoch):
        return epoch
