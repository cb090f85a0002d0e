"""Multistage (episodic) batches: units within units, some drawn of each, without replacement.

Algorithm 1 of episodic training (Tombs, Kotevska, Young, "Privacy Amplification for Episodic
Training Methods", CEUR Vol-3318, 2022): draw n_1 tasks, of each n_2 of its parts, ..., and at last
n_L examples of each unit drawn. A draw costs O(batch), however many leaves the tree has.

The tree is public. Under zeroing-out adjacency an example keeps its place in the tree and loses
only its gradient; which partner or task it belongs to is not protected, nor how many examples that
one has.
"""

from __future__ import annotations

import abc
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal, localcontext
from typing import Any, NamedTuple, cast

import numpy as np

from accounting import PrivacyProfile, TruncatedProfile
from accounting.multistage import UnitsThenPoissonProfile, WorstLeafProfile
from accounting.truncation import log_overflow_probability, smallest_max_batch_size
from samplers.base import BatchSampler, EpochPlan, Participations
from samplers.randomness import Key, Stream, bernoulli_successes, uniform_permutation
from samplers.tree import TreeShape, UnitTree
from samplers.truncation import REFERENCE_EPSILON, RELATIVE_COST


class Episode(NamedTuple):
    """One step's draw, with its structure: fixed shapes, nothing padded."""

    examples: np.ndarray
    """In uniformly random order within each unit: int32[n_1, ..., n_L]."""
    units: tuple[np.ndarray, ...]
    """The drawn units of level j = 1, ..., L-1, as numbered in the tree: int32[n_1, ..., n_j]."""

    def grouped(self, level: int) -> np.ndarray:
        """Returns the examples by drawn unit of `level`: int32[units, examples of each]."""
        shape = self.examples.shape
        return self.examples.reshape(math.prod(shape[:level]), -1)


def _ordered_draws(seed: int, step: int, level: int, sizes: np.ndarray, count: int) -> np.ndarray:
    """Draws `count` of {0, ..., size - 1} without replacement, in uniform order, for each size.

    A row of which more than half is not needed reads independent uniform integers until `count`
    of them differ: the first occurrences are a uniform ordered draw, by symmetry. The others put
    random 64-bit keys in order. A row that runs out of integers, or has two equal keys, starts
    again on words of its own; that event has the same probability whatever the row's values would
    be, so that each row stays exactly uniform. Work is O(rows * count).

    Returns:
      int64[rows, count].
    """
    drawn = np.empty((sizes.size, count), np.int64)
    for kind, draw in enumerate((_sorted_keys, _first_distinct)):
        left = np.flatnonzero((sizes > 2 * count) == bool(kind))
        attempt = 0
        while left.size:
            index = (level << 48) | (kind << 40) | attempt
            key = Key(seed, Stream.PARTICIPATION, step, index)
            rows, good = draw(key, sizes[left], count)
            drawn[left[good]] = rows[good]
            left = left[~good]
            attempt += 1
    return drawn


def _sorted_keys(key: Key, sizes: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Orders random keys: for sizes <= 2 `count`. Returns rows and which of them are valid."""
    width = int(sizes.max())
    keys = key.words64(sizes.size * width).reshape(sizes.size, width).copy()
    outside = np.arange(width) >= sizes[:, None]
    keys[outside] = np.iinfo(np.uint64).max
    order = np.argsort(keys, axis=1)
    ordered = np.take_along_axis(keys, order, axis=1)
    # Equal keys matter among a row's own alone; the largest one is the sign of those outside.
    inside = np.arange(width) < sizes[:, None]
    equal = (ordered[:, 1:] == ordered[:, :-1]) & inside[:, 1:]
    largest = (ordered == np.iinfo(np.uint64).max) & inside
    return order[:, :count], ~(equal.any(axis=1) | largest.any(axis=1))


def _first_distinct(key: Key, sizes: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Reads integers until `count` differ: for sizes > 2 `count`. Returns rows and validity."""
    # On average at most 2 ln 2 count integers are read, of words that are fit as said below.
    mean = 1.4 * count / (1.0 - int(sizes.max()) / 2**32)
    width = math.ceil(mean + 8.0 * math.sqrt(mean)) + 8
    words = key.words32(sizes.size * width).reshape(sizes.size, width).astype(np.uint64)
    products = words * sizes[:, None].astype(np.uint64)
    # Lemire (2019), Algorithm 5: words under the remainder are passed over.
    unfit = (np.uint64(1 << 32) % sizes.astype(np.uint64))[:, None]
    fit = (products & np.uint64(0xFFFFFFFF)) >= unfit
    values = products >> np.uint64(32)
    # Sort (value, place) pairs: the first of each run of equal values is a first occurrence.
    place = np.arange(width, dtype=np.uint64)
    values = np.where(fit, values, np.uint64((1 << 32) - 1))  # no size reaches this value
    pairs = np.sort((values << np.uint64(32)) | place, axis=1)
    value = pairs >> np.uint64(32)
    fresh = np.ones(pairs.shape, bool)
    fresh[:, 1:] = value[:, 1:] != value[:, :-1]
    fresh &= value != np.uint64((1 << 32) - 1)
    good = fresh.sum(axis=1) >= count
    # Back in order of place, what is no first occurrence last.
    later = np.where(fresh, pairs & np.uint64(0xFFFFFFFF), np.uint64(width))
    order = np.argsort(later, axis=1, kind="stable")[:, :count]
    return np.take_along_axis(value, order, axis=1).astype(np.int64), good


def _check_draws(tree: UnitTree | TreeShape, draws: Sequence[int], levels: int) -> tuple[int, ...]:
    """Returns the draws as integers, each possible for every unit, or raises a ValueError."""
    if len(draws) != levels:
        raise ValueError(
            f"draws needs {levels} entries, one per level of {tree!r} that is drawn without "
            f"replacement, got {len(draws)}"
        )
    checked = []
    for level, count in enumerate(draws):
        try:
            count = operator.index(count)
        except TypeError:
            raise ValueError(f"draws[{level}] must be an integer, got {count!r}") from None
        if count < 1:
            raise ValueError(f"draws[{level}] must be at least 1, got {count}")
        size, label = tree.smallest(level)
        if size < count:
            raise ValueError(
                f"{label} has {size} children, fewer than "
                f"draws[{level}] = {count}: draw fewer, or leave out or merge small units"
            )
        checked.append(count)
    return tuple(checked)


@dataclass(frozen=True)
class EpisodeSampler(BatchSampler, abc.ABC):
    """A sampler of which every step is an episode by itself, drawn from (seed, step) alone.

    An 'epoch' has one step: a run of `epochs` episodes has as many steps. So a batch of any step is
    drawn at once, without the others of a pass over the data.
    """

    num_examples: int = field(init=False)
    batch_size: int = field(init=False)
    epochs: int = field(default=1, kw_only=True)
    """Episodes, of one step each."""
    tree: UnitTree | TreeShape
    """Units and, as leaves, the examples; of a sampler that is only to be priced, their shape."""
    draws: tuple[int, ...]
    """n_1, n_2, ...: how many are drawn of the children of each drawn unit."""

    @property
    def steps_per_epoch(self) -> int:
        """1: an episode is one step."""
        return 1

    @property
    def drawn_tree(self) -> UnitTree:
        """The tree, or ValueError where only its shape is known."""
        if isinstance(self.tree, TreeShape):
            raise ValueError("only the shape of this sampler's tree is known: it can not be drawn")
        return self.tree

    def terms(self) -> dict[str, Any]:
        """Returns what the price depends on; of the tree, its shape and digest."""
        return {**super().terms(), "tree": self.tree.shape.terms()}

    @classmethod
    def from_terms(cls, terms: Mapping[str, Any]) -> EpisodeSampler:
        """Returns a sampler that has the price of the one whose `terms` these are."""
        tree, draws = TreeShape.from_terms(terms["tree"]), tuple(terms["draws"])
        return cls(**{**terms, "tree": tree, "draws": draws})

    @abc.abstractmethod
    def members(self, seed: int, step: int) -> np.ndarray:
        """Draws who takes part in a step: int32[size], in the order of `EpochPlan`."""

    def plan(self, seed: int, epoch: int) -> EpochPlan:
        """Draws one episode."""
        members = self.members(seed, epoch)
        return EpochPlan(np.array([0, members.size], np.int64), members)

    def participations(self, seed: int, epoch: int, chunk: int) -> Participations:
        """Returns the rows of one chunk; it draws the episode, whose rows depend on each other."""
        rows = self.chunk_range(chunk)
        members = self.members(seed, epoch)
        inside = members[(members >= rows.start) & (members < rows.stop)]
        return Participations(np.sort(inside), np.zeros(inside.size, np.int32))


@dataclass(frozen=True)
class Multistage(EpisodeSampler):
    """Draws n_1 units, n_2 units of each, ..., and n_L examples of each of the last.

    All batches have n_1 ... n_L examples. What is clipped, and what is protected, matter to the
    price. By default each example's gradient is clipped, and examples are protected. An episodic
    loss couples the examples of a drawn unit of some level c: with `clipped_level` = c the training
    clips one gradient for each such unit, of a loss that sees the unit's drawn examples together,
    with leading axes [n_{c+1}, ..., n_L]. It may then protect whole units of level c
    (`protected_level` = c) in place of examples.

    Guarantees:
      * The n_j children drawn of a unit are a uniform subset, in uniform order, independently for
        each drawn unit and each step.
      * The tree is public, and no guarantee covers it.

    >>> tree = UnitTree.from_columns({"task": [0, 0, 0, 1, 1, 1, 2, 2, 2, 2]})
    >>> sampler = Multistage(tree, (2, 2), epochs=100)
    >>> episode = sampler.episode(seed=7, step=0)
    >>> episode.examples.shape, episode.units[0].shape
    ((2, 2), (2,))

    Raises:
      ValueError: If a unit has fewer children than are drawn of it (the unit is named), or a number
        is out of range.
    """

    clipped_level: int | None = field(default=None, kw_only=True)
    """Level c of the units whose gradient the training clips as one; by default L, the examples."""
    protected_level: int | None = field(default=None, kw_only=True)
    """Level of what is protected: L, the examples, by default, or c."""
    unit: str = field(init=False)

    def __post_init__(self) -> None:
        levels = self.tree.num_levels
        object.__setattr__(self, "draws", _check_draws(self.tree, self.draws, levels))
        for name in ("clipped_level", "protected_level"):
            level = getattr(self, name)
            if level is not None and not 1 <= level <= levels:
                raise ValueError(f"{name} must be in [1, {levels}], got {level}")
        if self._protected not in (levels, self._clipped):
            raise ValueError(
                f"protected_level must be clipped_level = {self._clipped} or that of the examples, "
                f"{levels}, got {self.protected_level}"
            )
        named = (*self.tree.shape.names, "example")[self._protected - 1]
        object.__setattr__(self, "unit", named)
        object.__setattr__(self, "num_examples", self.tree.num_leaves)
        object.__setattr__(self, "batch_size", math.prod(self.draws))
        super().__post_init__()

    @property
    def clipped_shape(self) -> tuple[int, ...]:
        """(n_{c+1}, ..., n_L): what is drawn of one clipped unit, level by level."""
        return self.draws[self._clipped :]

    @property
    def expected_batch_size(self) -> float:
        """Number of clipped gradients n_1 ... n_c, by which their noisy sum is divided."""
        return float(math.prod(self.draws[: self._clipped]))

    @property
    def _clipped(self) -> int:
        return self.clipped_level or self.tree.num_levels

    @property
    def _protected(self) -> int:
        return self.protected_level or self.tree.num_levels

    def privacy(self, noise_multiplier: float) -> PrivacyProfile:
        """Returns the profile of the worst leaf: the sound bound, glued from two worst cases.

        Not the published Theorem 3, which is not sound for sums. The first stages amplify little
        unless sigma is large against the number of examples drawn of a unit: the sum shows which
        units were drawn. If that matters, clip units together, or see `UnitsThenPoisson`. To
        protect a whole unit of the clipped level is to have it as the leaf: the later levels only
        decide what its one gradient is.

        Source: the proof is in `accounting.multistage`.
        """
        level = self._protected
        paths = tuple(dict.fromkeys(path[:level] for path in self.tree.shape.worst_paths))
        clipped = min(self._clipped, level)
        return WorstLeafProfile(noise_multiplier, self.epochs, self.draws[:level], paths, clipped)

    def caveats(self, noise_multiplier: float, delta: float) -> tuple[str, ...]:
        """Returns a warning where the sum shows which units were drawn."""
        count = math.prod(self.draws[1 : min(self._clipped, self._protected)])
        if count == 1 or 2 * count <= noise_multiplier:
            return ()
        return (
            f"another {self.tree.shape.names[0]} in the place of a drawn one moves the sum by up "
            f"to {2 * count} C, against noise of {noise_multiplier:.4g} C: the sum shows who was "
            "drawn, and drawing them earns little privacy; it earns more if each unit's gradient "
            "is clipped as one (clipped_level), or with Poisson sampling within units "
            "(UnitsThenPoisson)",
        )

    def episode(self, seed: int, step: int) -> Episode:
        """Draws one step with its structure, a pure function of its arguments in O(batch).

        Args:
          seed: The sampling secret, an integer >= 0 of any size.
          step: Step, counted over the whole run.
        """
        tree = self.drawn_tree
        positions, units = _descend(tree, self.draws, seed, step)
        return Episode(tree.leaves[positions], units)

    def members(self, seed: int, step: int) -> np.ndarray:
        """Draws who takes part in a step: int32[batch_size], in the order of `EpochPlan`."""
        examples = self.episode(seed, step).examples.ravel()
        return examples if self.clipped_shape else np.sort(examples)


def _descend(
    tree: UnitTree, draws: Sequence[int], seed: int, step: int
) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """Draws down the tree. Returns the nodes of level len(draws), and those of the levels above.

    The former are int64 and the latter int32, of the shape of the draws so far.
    """
    node = np.zeros((), np.int64)
    above: list[np.ndarray] = []
    for level, count in enumerate(draws):
        starts, parents = tree.starts[level], node.ravel()
        sizes = starts[parents + 1] - starts[parents]
        children = starts[parents][:, None] + _ordered_draws(seed, step, level, sizes, count)
        if level:
            above.append(node.astype(np.int32))
        node = children.reshape(*node.shape, count)
    return node, tuple(above)


@dataclass(frozen=True)
class UnitsThenPoisson(EpisodeSampler):
    """Draws units at random, then each of their examples by itself: keeps amplification.

    n_1 units are drawn, n_2 of each, ..., n_{L-1}, without replacement; every example of a drawn
    unit of level L - 1 takes part with probability `sampling_prob`. The price treats the drawn
    units as known, and so does not depend on what other units contribute.

    A batch of more than `max_batch_size` examples is cut to so many, uniformly at random; the price
    includes it (see `VariableBatchSampler`). The default costs at most 1e-5 of delta.

    Guarantees (before truncation):
      * Given the drawn units, examples take part independently, each with `sampling_prob`.
      * The tree is public, and no guarantee covers it.

    Raises:
      ValueError: If a unit has fewer children than are drawn of it (the unit is named), or a number
        is out of range.
    """

    sampling_prob: float
    """Probability q with which an example of a drawn unit takes part."""
    max_batch_size: int | None = field(default=None, kw_only=True)  # type: ignore[assignment]
    """Rows of a padded batch; by default so many that truncation costs at most 1e-5 of delta."""
    target_delta: float | None = field(default=None, kw_only=True)
    """The delta for which the default maximum is chosen; 1 / num_examples by default."""

    def __post_init__(self) -> None:
        draws = _check_draws(self.tree, self.draws, self.tree.num_levels - 1)
        object.__setattr__(self, "draws", draws)
        if not 0.0 < self.sampling_prob <= 1.0:
            raise ValueError(f"sampling_prob must be in (0, 1], got {self.sampling_prob}")
        if self.target_delta is not None and not 0.0 < self.target_delta < 1.0:
            raise ValueError(f"target_delta must be in (0, 1), got {self.target_delta}")
        object.__setattr__(self, "num_examples", self.tree.num_leaves)
        object.__setattr__(self, "batch_size", max(1, round(self.expected_batch_size)))
        super().__post_init__()
        if self.max_batch_size is None:
            delta = 1.0 / self.num_examples if self.target_delta is None else self.target_delta
            log_tau = math.log(RELATIVE_COST * delta) - math.log1p(math.exp(REFERENCE_EPSILON))
            cap = smallest_max_batch_size(
                self.most_examples, self.sampling_prob, self.num_steps, log_tau
            )
            object.__setattr__(self, "max_batch_size", max(1, cap))
        elif self.max_batch_size < 1:
            raise ValueError(f"max_batch_size must be at least 1, got {self.max_batch_size}")

    @property
    def expected_batch_size(self) -> float:
        """Mean size of a batch, by which the noisy sum is divided."""
        return self.sampling_prob * math.prod(self.draws) * self.tree.shape.mean_leaves

    @property
    def most_examples(self) -> int:
        """Upper bound on the number of examples in the drawn units together."""
        return min(self.num_examples, math.prod(self.draws) * self.tree.shape.most_leaves)

    def privacy(self, noise_multiplier: float) -> PrivacyProfile:
        """Returns the leaf level's price, with the drawn units treated as known, and truncation's.

        The leaf whose unit is drawn most often costs most. At most `most_examples` decide about a
        batch, so that its size is at most Binomial(most_examples, sampling_prob), in law.
        """
        likeliest = self.tree.shape.likeliest(self.draws)
        profile = UnitsThenPoissonProfile(
            noise_multiplier, self.epochs, likeliest, self.sampling_prob
        )
        cap = cast(int, self.max_batch_size)
        if cap >= self.most_examples:
            return profile
        log_psi = log_overflow_probability(self.most_examples, self.sampling_prob, cap)
        return TruncatedProfile(profile, self.epochs, log_psi)

    def members(self, seed: int, step: int) -> np.ndarray:
        """Draws who takes part in a step, ascending: int32[size]."""
        tree = self.drawn_tree
        nodes, _ = _descend(tree, self.draws, seed, step)
        starts, units = tree.starts[-1], np.sort(nodes, axis=None)
        ends = np.cumsum(starts[units + 1] - starts[units])
        with localcontext() as context:  # the same float on every machine, right for small q
            context.prec = 50
            kept = 1 - Decimal(self.sampling_prob)
            rate = math.inf if kept == 0 else float(-kept.ln())
        key = Key(seed, Stream.PARTICIPATION, step, tree.num_levels << 48)
        trials = bernoulli_successes(key, rate, int(ends[-1]))
        which = np.searchsorted(ends, trials, side="right")
        positions = trials - ends[which] + starts[units[which] + 1]
        return np.sort(tree.leaves[positions])

    def passes(self, members: np.ndarray, seed: int, step: int) -> list[np.ndarray]:
        """Cuts a step's examples to `max_batch_size` uniformly at random."""
        cap = cast(int, self.max_batch_size)
        if members.size <= cap:
            return [members]
        order = uniform_permutation(Key(seed, Stream.TRUNCATION, 0, step), members.size)
        return [members[np.sort(order[:cap])]]
