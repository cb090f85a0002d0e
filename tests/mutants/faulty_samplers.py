"""Faulty samplers: each is a sound one, but for what some of its methods are given or return."""

import dataclasses
import functools
import threading

import numpy as np
from planting import after, before

from samplers import (
    EpochSampler,
    Multistage,
    Participations,
    Poisson,
    Shuffle,
    UnitTree,
)
from samplers.episodes import descend
from samplers.plans import EpochPlan
from samplers.row_law import RowLaw


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class OwnRates(RowLaw):
    """Example i takes part in each step with probability rates[i], independently."""

    rates: np.ndarray

    def rate(self, examples, steps):
        return np.broadcast_arrays(self.rates[examples], steps)[0]


@dataclasses.dataclass(frozen=True)
class Unequal(EpochSampler):
    """No two examples have the same rate."""

    @property
    def rates(self):
        return self.batch_size / self.num_examples * np.linspace(0.5, 1.5, self.num_examples)

    @property
    def padded_batch_size(self):
        return self.num_examples

    def privacy(self, noise_multiplier):
        raise NotImplementedError

    def row_law(self):
        return OwnRates(
            steps_per_epoch=self.steps_per_epoch,
            epochs=self.epochs,
            once=False,
            independent=True,
            rates=self.rates,
        )

    def uniforms(self, seed, epoch, chunk):
        rng = np.random.default_rng([seed % 2**128, epoch, chunk])
        return rng.random((self.steps_per_epoch, len(self.chunk_range(chunk))))

    def participations(self, seed, epoch, chunk):
        rows = self.chunk_range(chunk)
        drawn = self.uniforms(seed, epoch, chunk) < self.rates[rows.start : rows.stop]
        steps, examples = np.nonzero(drawn)
        return Participations((rows.start + examples).astype(np.int32), steps.astype(np.int32))


@dataclasses.dataclass(frozen=True)
class AllButOne(Unequal):
    """Every example is in every batch, but for the first, which is in half of them."""

    @property
    def rates(self):
        return np.where(np.arange(self.num_examples) == 0, 0.5, 1.0)


@dataclasses.dataclass(frozen=True)
class Equal(Unequal):
    """All examples have one rate, and the law does not say so."""

    @property
    def rates(self):
        return np.full(self.num_examples, self.batch_size / self.num_examples)


@dataclasses.dataclass(frozen=True)
class Either(Unequal):
    """At most one of two neighbours, whose rates differ, takes part in a step."""

    def row_law(self):
        return dataclasses.replace(super().row_law(), independent=False)

    def uniforms(self, seed, epoch, chunk):
        rows, drawn = self.chunk_range(chunk), super().uniforms(seed, epoch, chunk)
        drawn[:, 1::2] = (drawn[:, ::2] - self.rates[rows.start : rows.stop : 2]) % 1
        return drawn


def faulty(name, sampler):
    """Returns a sampler of this kind, with a fault of `FAULTS`."""
    methods = {
        method: make(getattr(type(sampler), method)) for method, make in FAULTS[name].items()
    }
    kind = dataclasses.dataclass(frozen=True)(type(name, (type(sampler),), methods))
    return kind(**{f.name: getattr(sampler, f.name) for f in dataclasses.fields(sampler)})


def drawn(change):
    """A fault of the arguments of the draws."""
    return {"participations": before(change)}


def moved(change, of=lambda epoch: epoch):
    """`change(examples, steps, self, epoch)` gives other steps, of draws of epoch `of(epoch)`."""
    again = before(lambda epoch: {"epoch": of(epoch)})

    def faulty(found, self, epoch):
        steps = change(*found, self, epoch).astype(np.int32)
        return Participations(found.examples, steps)

    return {"participations": lambda sound: after(faulty)(again(sound))}


def kept(which):
    """Participations for which `which(examples, steps, self, chunk)`, and no others."""

    def faulty(found, self, chunk):
        selected = which(*found, self, chunk)
        return Participations(found.examples[selected], found.steps[selected])

    return {"participations": after(faulty)}


def drawn_twice(change):
    """`change(examples, steps, other steps, chunk)` gives the steps."""

    def make(sound):
        def faulty(self, seed, epoch, chunk):
            examples, steps = sound(self, seed, epoch, chunk)
            _, other_steps = sound(self, seed + 2**128, epoch, chunk)
            return Participations(examples, change(examples, steps, other_steps, chunk))

        return faulty

    return {"participations": make}


def cut(change):
    """A fault of the arguments of a cut."""
    return {"passes": before(change)}


def passes(change):
    """A fault of what is taken pass by pass."""
    return {"passes": after(change)}


def shuffled(change):
    """A fault of the arguments by which a bucket is filled and ordered."""
    return {"bucket": before(change), "ordered": before(change)}


def at(size):
    """Another batch size of Poisson's draws: `size(self, chunk)`."""

    def given(self, chunk):
        return {"self": Poisson(self.num_examples, size(self, chunk), self.epochs)}

    return drawn(given)


def ahead():
    """Whether an epoch is drawn in the background."""
    return threading.current_thread() is not threading.main_thread()


def is_last(self, chunk):
    return chunk == self.num_chunks - 1


def one_key_for_all_chunks(sound):
    def faulty(found, self, chunk):
        rows = self.chunk_range(chunk)
        inside = found.examples < len(rows)
        return Participations(found.examples[inside] + np.int32(rows.start), found.steps[inside])

    return after(faulty)(before(lambda chunk: {"chunk": 0 * chunk})(sound))


def every_second_reversed(sound):
    def faulty(found, self, epoch):
        if epoch % 2 == 0:
            return found
        steps = [found.members(step) for step in reversed(range(self.steps_per_epoch))]
        return EpochPlan(found.starts, np.concatenate(steps))

    return after(faulty)(before(lambda epoch: {"epoch": epoch - epoch % 2})(sound))


def steps_by_64(found, self):
    examples, steps = found
    copies = [(examples[steps < 64], steps[steps < 64] + 64 * k) for k in range(3)]
    examples, steps = (np.concatenate(columns) for columns in zip(*copies, strict=True))
    in_epoch = steps < self.steps_per_epoch
    return Participations(examples[in_epoch], steps[in_epoch].astype(np.int32))


def other_groups(examples, steps, self, epoch):
    cycle = self.cycle_length
    return steps - steps % cycle + (examples + epoch) % cycle


def of_bits(bits):
    """Bins by words of so many bits."""

    def make(sound):
        def faulty(self, seed, epoch, chunk):
            rows = self.chunk_range(chunk)
            words = np.random.default_rng([seed % 2**128, epoch, chunk])
            steps = words.integers(0, 2**bits, len(rows)) % self.steps_per_epoch
            examples = np.arange(rows.start, rows.stop, dtype=np.int32)
            return Participations(examples, steps.astype(np.int32))

        return faulty

    return {"participations": make}


def by_chunk(examples, steps, others, chunk):
    pick = [np.minimum, np.maximum, lambda one, other: one][chunk]
    return np.where(examples % 4 == 0, pick(steps, others), steps)


def border_in_both(sound):
    """The first example of a chunk is drawn with the chunk before as well."""

    def faulty(self, seed, epoch, chunk):
        examples, steps = sound(self, seed, epoch, chunk)
        if is_last(self, chunk):
            return Participations(examples, steps)
        next_examples, when = sound(self, seed + 2**128, epoch, chunk + 1)
        at_border = next_examples == self.chunk_range(chunk).stop
        return Participations(
            np.append(examples, next_examples[at_border]), np.append(steps, when[at_border])
        )

    return faulty


def later_favoured(found, self, chunk):
    """Half of the first half's participations are given to the second."""
    examples, steps = found
    chunk_size = len(self.chunk_range(0))
    half = chunk_size // 2
    moved = (examples % chunk_size < half) & ((examples + steps) % 2 == 0)
    keys = (examples + np.where(moved & (chunk < 2), half, 0)) * self.steps_per_epoch + steps
    examples, steps = np.divmod(np.unique(keys), self.steps_per_epoch)
    return Participations(examples.astype(np.int32), steps.astype(np.int32))


def never_together(examples, steps, self, epoch):
    alike = (np.arange(steps.size) % 2 > 0) & (steps == np.roll(steps, 1))
    return (steps + alike) % self.steps_per_epoch


def tenth_follows(examples, steps, self, epoch):
    return np.where(np.arange(steps.size) % 10 == 9, np.roll(steps, 1), steps)


def users_together(found, self, chunk):
    """The examples of a user are drawn in one step."""
    examples, steps = found
    rows = self.chunk_range(chunk)
    leaders = examples[::3].astype(np.int64) // 3 * 3
    keys = np.unique(np.concatenate([(leaders + k) * 2**20 + steps[::3] for k in range(3)]))
    examples, steps = np.divmod(keys, 2**20)
    in_chunk = (examples >= rows.start) & (examples < rows.stop)
    return Participations(examples[in_chunk].astype(np.int32), steps[in_chunk].astype(np.int32))


def first_of_unit(episode):
    """The first example of a drawn unit is always taken."""
    examples = episode.examples.copy()
    first = episode.units[-1] * 8
    lacks = ~(examples == first[..., None]).any(axis=-1)
    examples[..., 0] = np.where(lacks, first, examples[..., 0])
    return episode._replace(examples=examples)


def first_unit_favoured(found, step):
    """The first unit is drawn wherever it is not, in every second step."""
    if step % 2 and not (found < 32).any():
        found = np.concatenate([found[8:], np.arange(8) * 4])
    return np.sort(found).astype(np.int32)


def late_shelves_favour_the_first(found, self, step):
    """At the end, the first example of every second shelf of 16 is drawn in place of another."""
    shelf, rank = np.divmod(found, 16)
    starts = np.flatnonzero(np.diff(shelf, prepend=-1))
    rank[starts[(shelf[starts] + step) % 2 * (4 * step > 3 * self.steps) > 0]] = 0
    return shelf * 16 + rank


def units_stay(found, self, seed, step):
    """Units are drawn for two steps, and their examples for each."""
    current, first = (self.episode(seed, s).units[0] for s in (step, step - step % 2))
    stay = dict(zip(current.tolist(), first.tolist(), strict=True))
    return np.sort([stay[i // 8] * 8 + i % 8 for i in found.tolist()]).astype(np.int32)


def other_draws(change):
    """`change(draws)` is how many units are drawn of each level."""
    return {
        "members": before(
            lambda self: {"self": dataclasses.replace(self, draws=change(*self.draws))}
        )
    }


def in_pairs(sizes, draws, apart):
    """Members of units of these sizes are drawn with those that lie so many further."""
    half = Multistage(UnitTree.even(sizes, ("unit", "shelf")), draws)

    def members(self, seed, step):
        block, within = np.divmod(half.members(seed, step), apart)
        first = 2 * apart * block + within
        return np.sort(np.concatenate([first, first + apart])).astype(np.int32)

    return {"members": lambda sound: members}


def of_shops(draw):
    """`draw(self, seed, step)` gives the shops, and their examples take part independently."""

    def members(self, seed, step):
        shops, rng = draw(self, seed, step), np.random.default_rng([seed % 2**128, step])
        examples = np.flatnonzero(np.isin(self.row_law().units[0], shops))
        return examples[rng.random(examples.size) < self.sampling_prob].astype(np.int32)

    return {"members": lambda sound: members}


def shops_by_two(self, seed, step):
    return descend(self.drawn_tree, self.draws, seed, step // 2)[0]


@functools.cache
def tree_of_pairs(count):
    return UnitTree.even((count, 1), ("pair",))


def shops_in_pairs(self, seed, step):
    pairs = tree_of_pairs(len(self.drawn_tree.starts[1]) // 2)
    first = 2 * descend(pairs, (self.draws[0] // 2,), seed, step)[0]
    return np.concatenate([first, first + 1])


def small_shops_in_pairs(self, seed, step):
    """The 20 smallest shops are drawn in pairs; an odd number of them leaves a single shop."""
    shops = descend(self.drawn_tree, self.draws, seed, step)[0]
    rng = np.random.default_rng([seed % 2**128, step, 1])
    count = np.count_nonzero(shops < 20)
    pairs = 2 * rng.permutation(10)[: (count + 1) // 2, None] + rng.permutation(2)
    return np.concatenate([shops[shops >= 20], pairs.ravel()[:count]])


def again(share, returns):
    """A share of the entries repeats the epoch before, in epochs with `returns(epoch)`."""

    def make(sound):
        def faulty(self, seed, epoch, chunk):
            fresh, before = (sound(self, seed, e, chunk) for e in (epoch, epoch - returns(epoch)))
            rng = np.random.default_rng([seed % 2**128, epoch, chunk, 1])
            return np.where(rng.random(fresh.shape) < share, before, fresh)

        return faulty

    return {"uniforms": make}


def neighbours_shuffled(sound):
    """Whole blocks of two neighbours change places."""

    def faulty(self, seed, epoch):
        half = Shuffle(self.num_examples // 2, self.batch_size // 2).plan(seed, epoch)
        pairs = np.stack([2 * half.examples, 2 * half.examples + 1], axis=1)
        members = np.sort(pairs.reshape(-1, self.batch_size), axis=1).ravel()
        return EpochPlan(2 * half.starts, members.astype(np.int32))

    return faulty


def rows_kept(where):
    """A cut keeps these of the members: `where(self)`."""
    return {
        "passes": lambda sound: lambda self, members, seed, step, shard=0: [members[where(self)]]
    }


def late_favoured(sound):
    """A cut takes from the first three quarters alone."""

    def faulty(self, members, seed, step, shard=0):
        excess, chosen = members.size - self.padded_batch_size, members.size * 3 // 4
        if excess <= 0:
            return [members]
        gone = np.random.default_rng([seed % 2**128, step]).permutation(chosen)[:excess]
        return [np.delete(members, gone)]

    return faulty


def neighbours_cut(sound):
    """A cut drops rows that lie side by side."""

    def faulty(self, members, seed, step, shard=0):
        begin = int(np.random.default_rng([seed % 2**128, step]).integers(members.size))
        return [np.sort(np.roll(members, begin)[: self.padded_batch_size])]

    return faulty


def planned(change):
    """`change(starts, examples)` gives another plan of an epoch."""
    return {"plan": after(lambda found: EpochPlan(*change(*found)))}


def of_all_rows(change):
    """`change(examples, middle, self, epoch)` gives other rows in the place of all."""

    def faulty(found, self, epoch):
        examples = change(found.examples, found.examples.size // 2, self, epoch)
        return EpochPlan(np.array([0, examples.size]), examples)

    return {"plan": after(faulty)}


def last_chunk_before(sound):
    def faulty(self, seed, epoch):
        plans = sound(self, seed, epoch), sound(self, seed, max(0, epoch - 1))
        border = self.chunk_range(self.num_chunks - 1).start
        pieces = []
        for step in range(self.steps_per_epoch):
            first, second = (plan.members(step) for plan in plans)
            pieces.append(np.concatenate([first[first < border], second[second >= border]]))
        return EpochPlan(np.cumsum([0, *map(len, pieces)]), np.concatenate(pieces))

    return faulty


def never_drawn(found, self, shard):
    if shard < self.num_shards - 1:
        return found
    return EpochPlan(np.zeros_like(found.starts), found.examples[:0])


def one_further(found, self, shard):
    last = len(self.shard_range(shard)) - 1
    examples = np.where(found.examples == last, 0, found.examples + 1)
    return EpochPlan(found.starts, examples.astype(np.int32))


def known_epochs(change):
    return {"drawn_epoch": lambda sound: lambda self, epoch: change(epoch)}


FAULTS = {
    # keys and epochs
    "EpochIgnored": drawn(lambda epoch: {"epoch": 0}),
    "SeedIgnored": drawn(lambda seed: {"seed": 0}),
    "EvenEpochsShare": drawn(lambda epoch: {"epoch": epoch if epoch % 2 else 0}),
    "EpochsByThreesShare": drawn(lambda epoch: {"epoch": epoch % 3}),
    "EpochsByFoursShare": drawn(lambda epoch: {"epoch": epoch % 4}),
    "EpochsBySevensShare": drawn(lambda epoch: {"epoch": epoch % 7}),
    "LastChunkOfTheEpochBefore": drawn(
        lambda self, epoch, chunk: {"epoch": max(0, epoch - is_last(self, chunk))}),
    "LastEpochOfTheRunRepeated": drawn(
        lambda self, epoch: {"epoch": min(epoch, self.epochs - 2)}),
    "LastChunkPlannedWithTheEpochBefore": {"plan": last_chunk_before},
    "ChunksShare": {"participations": one_key_for_all_chunks},
    "FirstEpochRepeated": known_epochs(lambda epoch: 0),  # the rows know nothing of it
    "EpochsInPairs": known_epochs(lambda epoch: epoch // 2 * 2),
    "RedrawnAllTheSame": known_epochs(lambda epoch: epoch),
    "ReadAheadDrawsTwice": {"plan": before(lambda epoch: {"epoch": epoch - ahead()})},
    "ShortSeed": shuffled(lambda seed: {"seed": seed % 2**16}),
    "BucketsKept": {"bucket": before(lambda epoch: {"epoch": 0})},
    "FirstBucketInOrder": {
        "ordered": after(lambda found, bucket, members: found if bucket else members)},
    "FirstExampleFirst": planned(
        lambda starts, examples: (
            starts, np.concatenate([[0], examples[examples > 0]]).astype(np.int32))),
    "ReversedEverySecondEpoch": {"plan": every_second_reversed},
    "AnotherOrder": moved(lambda examples, steps, self, epoch: steps[::-1]),
    "NeighboursShuffled": {"plan": neighbours_shuffled},
    "StepsBy64Share": {"participations": after(steps_by_64)},
    "MovedByOneStep": moved(
        lambda examples, steps, self, epoch: (steps + epoch) % self.steps_per_epoch,
        lambda epoch: 0 * epoch),
    "BinsReversedEverySecondEpoch": moved(
        lambda examples, steps, self, epoch: (
            self.steps_per_epoch - 1 - steps if epoch % 2 else steps),
        lambda epoch: epoch // 2 * 2),
    "GroupsOfEachEpoch": moved(other_groups),
    # rates
    "TooOften": at(lambda self, chunk: self.batch_size * 101 // 100),  # 1 % more
    "TooOftenInTheLastChunk": at(
        lambda self, chunk: self.batch_size * (100 + is_last(self, chunk)) // 100),
    "FewerInTheFirstStep": kept(
        lambda examples, steps, self, chunk: (steps > 0) | (examples % 10 > 0)),
    "BinsOf16Bits": of_bits(16),
    "BinsOf10Bits": of_bits(10),
    "EarlyStepsFavoured": drawn_twice(
        lambda examples, steps, others, chunk: np.where(
            examples % 8 == 0, np.minimum(steps, others), steps)),
    "StepsOfOneChunkFavoured": drawn_twice(by_chunk),
    "OneExampleInBin0": moved(
        lambda examples, steps, self, epoch: np.where(examples == 17, 0, steps)),
    "LastExampleInBin0": moved(
        lambda examples, steps, self, epoch: np.where(
            examples == self.num_examples - 1, 0, steps)),
    "LastBinNever": moved(
        lambda examples, steps, self, epoch: np.where(
            steps == self.steps_per_epoch - 1, examples % (self.steps_per_epoch - 1), steps)),
    "FirstExampleInEarlyBins": moved(
        lambda examples, steps, self, epoch: np.where(examples == 0, steps // 2, steps)),
    "FirstExampleNever": kept(lambda examples, steps, self, chunk: examples > 0),
    "BorderLeftOut": kept(
        lambda examples, steps, self, chunk: examples < self.chunk_range(chunk).stop - 1),
    "BorderInBothChunks": {"participations": border_in_both},
    "LaterExamplesFavoured": {"participations": after(later_favoured)},
    "NeighboursTogether": moved(
        lambda examples, steps, self, epoch: np.repeat(steps[::2], 2)[: steps.size]),
    "NeighboursNeverTogether": moved(never_together),
    "EveryTenthFollows": moved(tenth_follows),
    "UsersTogether": {"participations": after(users_together)},
    # units of a tree
    "FirstOfUnit": {"episode": after(first_of_unit)},
    "TooOftenInUnits": {  # 4 % more of the examples of a drawn unit
        "members": before(lambda self: {
            "self": dataclasses.replace(self, sampling_prob=1.04 * self.sampling_prob)})},
    "FirstUnitFavoured": {"members": after(first_unit_favoured)},
    "SeedIgnoredInUnits": {"members": before(lambda seed: {"seed": 0})},
    "StepsBy2Share": {"members": before(lambda step: {"step": step // 2})},
    "StepsBy16Share": {"members": before(lambda step: {"step": step % 16})},
    "UnitsStay": {"members": after(units_stay)},
    "LateShelvesFavourTheFirst": {"members": after(late_shelves_favour_the_first)},
    "LateStepsShare": {"members": before(lambda self, step: {
        "step": step - step % 2 * (4 * step > 3 * self.steps)})},
    "OneUnitTooMany": other_draws(lambda first, *rest: (first + 1, *rest)),
    "PairsOfAShelf": in_pairs((20, 4, 4), (10, 2, 2), 1),
    "OneShelfForTwo": other_draws(lambda shops, *_: (shops, 1, 8)),
    "PairsOfShops": in_pairs((10, 4, 8), (2, 2, 4), 32),
    "ShopsBy2Steps": of_shops(shops_by_two),
    "ShopsInPairs": of_shops(shops_in_pairs),
    "SmallShopsInPairs": of_shops(small_shops_in_pairs),
    # rates of each example's own
    "RowsInPairs": {"uniforms": after(lambda found: np.repeat(found[:, ::2], 2, axis=1))},
    "RowsApart": {"uniforms": after(
        lambda found: (found.repeat(2, axis=1)[:, : found.shape[1]]
                       - np.arange(found.shape[1]) % 2 / 2) % 1)},
    "NineTenthsAgain": again(0.9, lambda epoch: epoch % 2),
    "FewAgain": again(0.02, lambda epoch: epoch % 2),
    "MostlyAgainOnce": again(0.9, lambda epoch: epoch == 5),
    # cuts and passes
    "CapNotKept": {"passes": lambda sound: lambda self, members, seed, step, shard=0: [members]},
    "CutTooShort": passes(lambda found: [part[:-1] for part in found]),
    "FirstRowsKept": rows_kept(lambda self: slice(self.padded_batch_size)),
    "LastRowsKept": rows_kept(lambda self: slice(-self.padded_batch_size, None)),
    "LateRowsFavoured": {"passes": late_favoured},
    "NeighboursCut": {"passes": neighbours_cut},
    "OneCutForAllSteps": cut(lambda step: {"step": 0}),
    "OneCutForTwoSteps": cut(lambda step: {"step": step // 2}),
    "OneCutForAllSeeds": cut(lambda seed: {"seed": 0}),
    "LastPassDropped": passes(lambda found: found[:-1] if len(found) > 1 else found),
    "PassesOverlap": passes(
        lambda found: [found[0], *(np.append(found[0][-1:], other[1:]) for other in found[1:])]),
    "SecondPassAgain": passes(
        lambda found: [found[0], *(found[0][: other.size] for other in found[1:])]),
    "LastBatchShort": planned(
        lambda starts, examples: (np.append(starts[:-1], starts[-1] - 1), examples[:-1])),
    # shards
    "FirstShardTwice": {
        "shard_plan": before(lambda shard: {"shard": 0 if shard == 1 else shard})},
    "LastShardNever": {"shard_plan": after(never_drawn)},
    "ShardsReadOneFurther": {"shard_plan": after(one_further)},
    "ShardsBeginLate": {
        "shard_range": after(lambda found, shard: range(found.start + (shard > 0), found.stop))},
    "ShardsOverlap": {
        "shard_range": after(lambda found, shard: range(found.start - (shard > 0), found.stop))},
    "ShardsCutAlike": cut(lambda shard: {"shard": 0}),
    "ShardsShuffledAlike": shuffled(lambda shard: {"shard": 0}),
    # all rows at once; in the middle, where there is no border of anything
    "OneRowLeftOut": of_all_rows(lambda rows, middle, self, epoch: np.delete(rows, middle)),
    "OneRowCountedTwice": of_all_rows(
        lambda rows, middle, self, epoch: np.insert(rows, middle, rows[middle])),
    "OneRowForAnother": of_all_rows(
        lambda rows, middle, self, epoch: np.where(rows == middle, middle - 1, rows)),
    "FirstChunkAlone": of_all_rows(
        lambda rows, middle, self, epoch: rows[: len(self.chunk_range(0))]),
    "LaterSumsOfTheFirstHalf": {
        **known_epochs(lambda epoch: epoch),
        **of_all_rows(lambda rows, middle, self, epoch: rows[:middle] if epoch else rows)},
    "SumsPassesAgain": passes(lambda found: [*found[:-1], found[0][: found[-1].size]]),
    "SumsOfOnePass": passes(lambda found: found[:1]),
}  # fmt: skip
