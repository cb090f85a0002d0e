"""Compares releases of the compiled step with DP-SGD's definition.

A release is the training executable's result for one synthetic batch. It must equal the sum of
clipped gradients, plus the noise of key, step and coordinate, over the expected batch size. The
gradients are computed one by one (`dpsgd.audit.reference_step`). If the audit cannot compute them,
as for an own algorithm, it measures the contribution of each example alone, which must not exceed
C. Bounds on the effect of rounding: docs/explanation/audit-of-steps.md.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from dpsgd.audit.probe import Probe
from dpsgd.audit.reference_step import clip_factors, require_reference
from dpsgd.audit.report import CheckResult
from dpsgd.audit.runtime.expected import ExpectedNoise, spread_places
from dpsgd.audit.runtime.releases import LARGE, UNIT, Release, cast_error, loud, norm, quiet
from dpsgd.core.mechanism import Mechanism
from dpsgd.engine.programs import in_32_bits
from dpsgd.gradients.losses import example_keys

PyTree = Any

STEP = "a step releases what the definition of DP-SGD does"
ADDS_UP = "sums over different rows add up"
UNCLIPPED = f"{ADDS_UP}, unclipped"
ADJACENT = "sums over adjacent places add up"

_OWN = 2.0**-10  # of an example's norm: error of its own arithmetic, at least
_MOVES = 4, 16  # random moves of the parameters: of 2^8 unit roundoffs, and of fewer
_FARTHEST = 2.0**-5  # relative size of a move, at most
_UNSTEADY = 2.0**-4  # of an example's norm: error above which it is left out
_ABOVE = 2.0**-7, 2.0**-4, 0.6  # excess of norms over C
_FEW = 3  # examples of a large model
_PLACES = 2**15  # coordinates of a release compared; 8 times as many of one of noise alone
_TOGETHER = 2.0**-2  # of C: error of a batch, at most
_PARTS = 32  # parts of the batch compared under each clip norm; 4 of a large model
_ADJACENT = 256  # places whose sums are added up, the first and the last
_RAISED = range(0, 36, 5)  # powers of 2 by which C is raised until it clips nothing


class Clipped(NamedTuple):
    """Contributions of synthetic examples under one clip norm.

    Attributes:
      values: Compared coordinates of each contribution, by leaf: float64[examples, places].
      norms: Norm of each contribution: float64[examples].
      errors: Bound on the rounding error in each contribution, as a norm: float64[examples].
    """

    values: np.ndarray
    norms: np.ndarray
    errors: np.ndarray


class _Look(NamedTuple):
    """One release to compare.

    Attributes:
      name: Description for a message.
      members, at, padding: Batch, see `Probe.release`.
      mechanism: Scales of the release.
      step, attempt: Step and attempt, which determine the noise; None is the first step.
      every: True to compare more coordinates.
      paired: True for one of two releases of equal sums.
    """

    name: str
    members: np.ndarray
    mechanism: Mechanism
    at: np.ndarray | None = None
    padding: Any = 0
    step: int | None = None
    attempt: int = 0
    every: bool = False
    paired: bool = False


def step_checks(probe: Probe) -> list[CheckResult]:
    """Compares releases of single steps with the definition of DP-SGD."""
    expected = ExpectedNoise(probe)
    checks = [expected.matrix_check()]
    if expected.singular:
        return checks
    steps = _Steps(probe, expected, sampled_places(probe, _PLACES))
    checks += [steps.check(), _additivity_check(probe, quiet(probe.mechanism), ADDS_UP)]
    if steps.largest > 0:
        raised = quiet(probe.mechanism, 8 * steps.largest)
        checks.append(_additivity_check(probe, raised, UNCLIPPED))
    if not steps.large:
        half = min(probe.places, _ADJACENT) // 2
        end_places = np.union1d(np.arange(half), np.arange(probe.places - half, probe.places))
        checks.append(_additivity_check(probe, quiet(probe.mechanism), ADJACENT, end_places))
    return checks


def sampled_places(probe: Probe, total_count: int) -> list[np.ndarray]:
    """Samples about `total_count` flat indices into a release's leaves."""
    total = max(1, sum(probe.sizes))
    return [
        spread_places(size, size if total <= total_count else max(256, total_count * size // total))
        for size in probe.sizes
    ]


class _Steps:
    """Releases of single steps, and their expected values.

    Attributes:
      largest: Largest norm of a gradient; 0 if unknown.
      large: True for a large model, for which fewer releases are compared.
    """

    def __init__(self, probe: Probe, expected: ExpectedNoise, places: list[np.ndarray]):
        self._probe, self._expected, self._places = probe, expected, places
        large = sum(leaf.size for leaf in jax.tree.leaves(probe.state.params)) > LARGE
        self.large = large
        units = range(min(probe.units, _FEW) if large else probe.units)
        self._numbers = np.array([*units, *([] if probe.nan is None else [probe.nan])])
        shards = probe.mechanism.sampler.num_shards if probe.algorithm.takes_key else 1
        self._every = np.arange(probe.places // shards)  # places with the keys of one shard
        self._leaf = np.repeat(np.arange(len(places)), [len(indices) for indices in places])
        self._cast = np.array([cast_error(dtype) for dtype in probe.dtypes])[self._leaf]
        self._known: dict[tuple[int, int], np.ndarray] = {}
        self.why_measured, formed = _why_no_gradients(probe, large=large), None
        if not self.why_measured:
            formed = Gradients(probe, self._numbers, self._table_places())
            self.why_measured = formed.fault
        self._source = _Measured(self) if formed is None or formed.fault else formed
        norms = self._source.norms
        steady = self._source.steady & np.isin(self._numbers, units)
        self._steady = np.flatnonzero(steady)
        self.largest = float(norms[self._steady].max(initial=0.0))
        finite = np.isfinite(norms[-1]) or probe.nan is None
        self._poison = None if finite else probe.nan

    def check(self) -> CheckResult:
        """Compares releases until one differs from its expected value."""
        count = 0
        for look in self._looks():
            if wrong := self._wrong(look) or self._source.fault:
                return CheckResult(STEP, False, f"{look.name}: {wrong}")
            count += 1
        note = f"; gradients were measured, as {self.why_measured}" if self.why_measured else ""
        detail = f"{count} releases of {self._steady.size} examples, {self._leaf.size:,} numbers"
        return CheckResult(STEP, True, detail + note)

    # Which releases.

    def _looks(self) -> Iterator[_Look]:
        """Yields the releases that are compared."""
        base, none = self._probe.mechanism, np.zeros(0, int)
        all_places, full = self._every, self._full
        steps = self._steps()
        for number, step in enumerate(steps):
            words = f"step {step:,}, noise alone"
            yield _Look(words, full, loud(base), all_places, 0, step, number, every=not number)
        if not steps:
            return
        yield _Look("an empty batch", none, base, None, 0, steps[-1], 1)
        for attempt in (0, 1):  # their difference is noise alone
            yield _Look("a full batch", full, base, all_places, attempt=attempt, paired=True)
        if not self._steady.size:
            return
        yield from self._parts_of(base.l2_clip_norm, "C", 2)
        low = self._source_norms.min() / 2
        most = 4 if self.large else _PARTS
        yield from self._parts_of(low, "C below all norms", most, beside_padding=True)
        yield from self._parts_of(2 * self.largest, "C above all norms", 1)
        steady_example = self._numbers[self._steady[:1]]
        special = {"NaN": [x for x in (self._probe.nan,) if x is not None]}
        special["huge"] = list(self._probe.huge)
        for name, numbers in special.items():
            if numbers:
                members = np.append(numbers, steady_example)[: all_places.size]
                yield _Look(f"{name} examples", members, quiet(base), all_places[: members.size])
        longest = self._numbers[self._steady[[int(np.argmax(self._source_norms))]]]
        for excess in _ABOVE:
            mechanism = quiet(base, self.largest / (1 + excess))
            yield _Look(f"a norm {excess:.2g} above C", longest, mechanism, all_places[:1])

    @property
    def clip(self) -> float:
        """Clip norm C of the run."""
        return self._probe.mechanism.l2_clip_norm

    @property
    def _source_norms(self) -> np.ndarray:
        return self._source.norms[self._steady]

    def _steps(self) -> list[int]:
        """Returns the compared steps whose noise is known.

        The first, the last, and both sides of a power of two: some of them set each bit of a
          number.
        """
        num_steps, first = self._probe.mechanism.sampler.num_steps, self._probe.first_step
        top = 2 ** max(0, (num_steps - 1).bit_length() - 1)
        steps = sorted({first, top - 1, min(top, num_steps - 1), num_steps - 1})
        return [step for step in steps if self._expected.knows(step)]

    @functools.cached_property
    def _full(self) -> np.ndarray:
        """Indices of the steady examples, repeated over all places."""
        steady = self._numbers[self._steady] if self._steady.size else self._numbers[:1]
        return np.resize(steady, self._every.size)

    def _parts_of(
        self, clip: float, words: str, most: int, *, beside_padding: bool = False
    ) -> Iterator[_Look]:
        """Yields releases under one clip norm that cover the places of a batch."""
        probe, mechanism = self._probe, quiet(self._probe.mechanism, clip)
        groups = self._parts(mechanism)
        chosen = sorted({*np.linspace(0, len(groups) - 1, most).astype(int).tolist()})
        for number in chosen:
            group = groups[number]
            members, positions = self._full[group], group
            if self._poison is not None and number % 2 == 0:  # NaN examples fill the batch
                other_places = np.setdiff1d(self._every, group)
                members = np.append(members, np.full(other_places.size, self._poison))
                positions = np.append(group, other_places)
            yield _Look(f"{group.size} examples, {words}", members, mechanism, positions)
        if not beside_padding:
            return
        hidden = [0 if probe.nan is None else probe.nan, 0, int(self._full[-1])]
        padding = np.resize(hidden, probe.places)
        half, last_place = groups[0][::2], groups[0][-1:]
        yield _Look(f"half a batch, {words}", self._full[half], mechanism, half, padding)
        yield _Look(f"one example, {words}", self._full[last_place], mechanism, last_place, padding)

    def _parts(self, mechanism: Mechanism) -> list[np.ndarray]:
        """Divides the places of a batch into parts with errors below C / 4.

        The first part has both ends.
        """
        all_places, size = self._every, self._every.size
        limit = _TOGETHER * mechanism.l2_clip_norm
        while size > 1 and self._error(self._counts(self._full[:size]), mechanism) > limit:
            size = -(-size // 2)
        if size == all_places.size:
            return [all_places]
        ordered = np.concatenate([all_places[:1], all_places[-1:], all_places[1:-1]])
        return [np.sort(ordered[k : k + size]) for k in range(0, all_places.size, size)]

    # What they must be.

    def _counts(self, members: np.ndarray) -> np.ndarray:
        """Returns the multiplicity of each of `_numbers` in a batch: float64[examples]."""
        return np.equal(np.asarray(members)[:, None], self._numbers).sum(axis=0, dtype=np.float64)

    def _error(self, counts: np.ndarray, mechanism: Mechanism) -> float:
        """Bounds the norm of the rounding error in a sum."""
        clipped, size = self._source.clipped(mechanism), counts.sum()
        return float(counts @ (clipped.errors + size * UNIT * clipped.norms))

    def _wrong(self, look: _Look) -> str:
        """Returns a description of the fault in a release; empty if none."""
        probe, mechanism, members = self._probe, look.mechanism, np.asarray(look.members, int)
        clip, b = mechanism.l2_clip_norm, mechanism.sampler.expected_batch_size
        stddev = mechanism.noise_multiplier * clip
        release = self.release(look)
        if members.size == 1 and (wrong := self._above_clip(look, release)):
            return wrong
        huge = np.count_nonzero(np.isin(members, probe.huge))  # clipped, or left out
        counts = self._counts(members)
        error = self._error(counts, mechanism) + huge * clip * (1 + _OWN)
        total = np.einsum("n,np->p", counts, self._source.clipped(mechanism).values)
        noise = self._noise(look, release)
        want = total + stddev * noise
        apart = np.abs(self._sampled(release) * b - want)
        room = stddev * self._expected.allowed + self._cast * (np.abs(want) + error)
        room += 2.0**-20 * np.abs(total)
        bad = ~(apart <= error + room)
        if bad.any():
            leaf = int(self._leaf[np.argmax(bad)])
            actual = self._sampled(release) * b - total
            with np.errstate(invalid="ignore"):
                gain = float(np.vdot(actual, noise) / max(stddev * np.vdot(noise, noise), 1e-300))
            return (
                f"{probe.names[leaf]}: {np.count_nonzero(bad):,} of {bad.size:,} numbers differ "
                f"({gain:.4g} times the noise on average)"
            )
        excess = math.sqrt(np.square(np.maximum(0.0, apart - room)).sum())
        if excess > error:
            return f"the sum is off by {excess / clip:.3g} C, {error / clip:.3g} C allowed"
        if look.every:
            return self._wrong_noise(look, release)
        if look.paired:
            return self._wrong_difference(look, release, noise)
        return ""

    def _above_clip(self, look: _Look, release: Release) -> str:
        """Checks that one example adds at most C, however coarse its gradient is."""
        mechanism, length = look.mechanism, self._denoised(look, release)[1]
        cast, deviations = self._cast.max(initial=0.0), 8 * mechanism.noise_multiplier
        slack = 1e-3 + 2 * cast
        slack += deviations * (self._expected.allowed + cast) * self._leaf.size**0.5
        clip = mechanism.l2_clip_norm
        return f"one example adds {length / clip:.4g} C" if length > clip * (1 + slack) else ""

    def _wrong_noise(self, look: _Look, release: Release) -> str:
        """Compares more coordinates of a release whose sum vanishes in the noise."""
        probe, mechanism = self._probe, look.mechanism
        stddev = mechanism.noise_multiplier * mechanism.l2_clip_norm
        if probe.places * mechanism.l2_clip_norm > 2.0**-20 * stddev:
            return ""
        for k, indices in enumerate(sampled_places(probe, 8 * _PLACES)):
            if indices.size in (0, self._places[k].size) or k in probe.tables:
                continue
            step = probe.first_step if look.step is None else look.step
            (noise,) = self._expected.values(range(step, step + 1), k, indices, look.attempt)
            total = release[k][indices].astype(np.float64) * mechanism.sampler.expected_batch_size
            allowed = self._expected.allowed + cast_error(probe.dtypes[k]) * np.abs(noise)
            bad = ~(np.abs(total - stddev * noise) <= stddev * (allowed + 2.0**-20))
            if bad.any():
                return f"{probe.names[k]}: {np.count_nonzero(bad):,} of {bad.size:,} noises differ"
        return ""

    def _wrong_difference(self, look: _Look, release: Release, noise: np.ndarray) -> str:
        """Compares the noise of equal sums under two keys.

        The difference of both releases is a difference of noise.
        """
        sampled = self._sampled(release)
        if look.attempt == 0:
            self._first_full = sampled, noise
            return ""
        mechanism, (first_sampled, first_noise) = look.mechanism, self._first_full
        scale = mechanism.sampler.expected_batch_size / (
            mechanism.noise_multiplier * mechanism.l2_clip_norm
        )
        largest = scale * np.maximum(np.abs(sampled), np.abs(first_sampled))
        unit = UNIT * (1 if jax.default_backend() == "cpu" else self._probe.places)
        tops = np.array([largest[self._leaf == k].max(initial=0) for k in range(len(self._places))])
        moved = 4 * tops[self._leaf] * np.maximum(unit, self._cast)
        hidden = ~(moved <= 2.0**-6)  # the sum leaves the noise no digits
        off = np.abs((sampled - first_sampled) * scale - (noise - first_noise))
        bad = ~(off <= 2 * self._expected.allowed + moved) & ~hidden
        return f"{np.count_nonzero(bad):,} of {bad.size:,} noises differ" if bad.any() else ""

    def release(self, look: _Look) -> Release:
        """Returns the release that a look describes."""
        options: dict[str, Any] = {"at": look.at, "padding": look.padding, "step": look.step}
        return self._probe.release(look.members, look.mechanism, attempt=look.attempt, **options)

    def without_noise(self, look: _Look) -> tuple[np.ndarray, float]:
        """Returns a sum without noise, and its norm.

        The sum has the compared coordinates. The norm is over all coordinates if the noise is
        negligible, else over the compared ones.
        """
        return self._denoised(look, self.release(look))

    def _denoised(self, look: _Look, release: Release) -> tuple[np.ndarray, float]:
        mechanism = look.mechanism
        b, stddev = mechanism.sampler.expected_batch_size, mechanism.noise_multiplier
        total = self._sampled(release) * b
        total -= stddev * mechanism.l2_clip_norm * self._noise(look, release)
        loud_noise = stddev * math.sqrt(sum(self._probe.sizes)) > 2.0**-20
        return total, float(np.linalg.norm(total)) if loud_noise else norm((1, release)) * b

    def _sampled(self, release: Release) -> np.ndarray:
        leaves = [x[indices] for x, indices in zip(release, self._places, strict=True)]
        return np.concatenate(leaves).astype(np.float64)

    def _noise(self, look: _Look, release: Release) -> np.ndarray:
        """Returns the noise of the compared coordinates, in standard deviations."""
        probe = self._probe
        step = probe.first_step if look.step is None else look.step
        if (step, look.attempt) not in self._known:
            steps, chosen = range(step, step + 1), enumerate(self._places)
            noises = [
                self._expected.values(steps, k, indices, look.attempt)[0] for k, indices in chosen
            ]
            self._known[step, look.attempt] = np.concatenate(noises)
        noise = self._known[step, look.attempt]
        for k in probe.tables:  # their rows have noise where they are read
            width = math.prod(probe.shapes[k][1:])
            read = np.any(release[k].reshape(-1, width), axis=1)[self._places[k] // width]
            noise = noise.copy()
            noise[self._leaf == k] *= read
        return noise

    def _table_places(self) -> list[np.ndarray]:
        """Returns the compared flat indices into each leaf, with complete tables."""
        probe = self._probe
        return [
            (probe.table_places(k, indices) if k in probe.tables else indices).astype(np.int32)
            for k, indices in enumerate(self._places)
        ]


class _Measured:
    """Measured contributions of single examples, for gradients that cannot be computed.

    Attributes:
      norms: Norms of the gradients, float64[examples]; NaN for an example that adds nothing, and
        the norm of the contribution at C where every tested clip norm clips the gradient.
      steady: bool[examples], True for examples that add something.
      fault: Description of a contribution above C; empty if none.
    """

    def __init__(self, steps: _Steps):
        self._steps, self._known, self.fault = steps, dict[float, Clipped](), ""
        probe = steps._probe
        contributions = self.clipped(quiet(probe.mechanism))
        self.norms = np.where(contributions.norms > 0, contributions.norms, np.nan)
        for k in np.flatnonzero(contributions.norms > 0):
            for power in _RAISED:
                mechanism = quiet(probe.mechanism, probe.mechanism.l2_clip_norm * 2.0**power)
                size = self._alone(mechanism, int(steps._numbers[k]))[1]
                if size <= mechanism.l2_clip_norm / 2:
                    self.norms[k] = size
                    break
        self.steady = np.isfinite(self.norms)

    def clipped(self, mechanism: Mechanism) -> Clipped:
        """Returns each example's contribution alone, at a mechanism's clip norm."""
        clip = mechanism.l2_clip_norm
        if clip < 2.0**-20 * self._steps.clip:  # vanishes in the noise
            ones = np.full(len(self._steps._numbers), clip)
            return Clipped(np.zeros((ones.size, self._steps._leaf.size)), ones, ones)
        if clip not in self._known:
            examples = [self._alone(quiet(mechanism, clip), int(n)) for n in self._steps._numbers]
            values, norms = (
                np.stack([x for x, _ in examples]),
                np.array([size for _, size in examples]),
            )
            tolerance = quiet(mechanism, clip).noise_multiplier * self._steps._expected.allowed
            tolerance *= 2 * clip * math.sqrt(values.shape[1])  # of the noise
            faint = norms <= 2.0**-18 * clip + tolerance
            values[faint], norms[faint] = 0.0, 0.0
            if norms.max(initial=0.0) > clip * (1 + 1e-3 + 2 * self._cast) + tolerance:
                self.fault = f"one example adds {norms.max() / clip:.4g} C"
            self._known[clip] = Clipped(values, norms, (_OWN + 2 * self._cast) * norms + tolerance)
        return self._known[clip]

    @property
    def _cast(self) -> float:
        return float(self._steps._cast.max(initial=0.0))

    def _alone(self, mechanism: Mechanism, number: int) -> tuple[np.ndarray, float]:
        look = _Look("one example", np.array([number]), mechanism, np.zeros(1, int))
        return self._steps.without_noise(look)


class Gradients:
    """Gradients of synthetic examples, computed one by one.

    Attributes:
      norms: Norms of the gradients: float64[examples].
      steady: bool[examples], True for nonzero finite gradients with a small rounding error.
      fault: Reason why no gradient can be compared; empty if some can.
    """

    def __init__(self, probe: Probe, numbers: np.ndarray, places: list[np.ndarray]):
        """Computes the gradients of examples.

        Args:
          probe: Probe of the program.
          numbers: Indices of the examples.
          places: Compared flat indices of each leaf.
        """
        self._clipping, self._known = probe.algorithm.clipping, dict[float, Clipped]()
        self._leaf = np.repeat(np.arange(len(places)), [len(indices) for indices in places])
        leaves, structure = jax.tree.flatten(probe.state.params)
        trained = [k for k in range(len(leaves)) if k not in probe.frozen]
        masked = [leaf if k in trained else None for k, leaf in enumerate(leaves)]
        groups = self._clipping.groups(jax.tree.unflatten(structure, masked))
        self._groups = [[trained[k] for k in group] for group in groups]
        with in_32_bits():  # as the program that trains
            gradients, unit = _gradients(probe, numbers, places)
        self._norms, values, moved = jax.tree.map(lambda x: np.asarray(x, np.float64), gradients)
        self._values = np.nan_to_num(np.concatenate(values, axis=1), posinf=0, neginf=0)
        self._moved, self._own = np.nan_to_num(moved), _own_error(unit)
        self.norms = np.sqrt(np.square(self._norms).sum(axis=1))
        with np.errstate(invalid="ignore"):
            is_nonzero = np.isfinite(self.norms) & (self.norms > 0)
            self.steady = is_nonzero & (moved <= _UNSTEADY * self.norms)
        self.fault = (
            "" if self.steady.any() else "all gradients of generated rows are sensitive to rounding"
        )

    def clipped(self, mechanism: Mechanism) -> Clipped:
        """Returns the clipped gradients at a mechanism's clip norm."""
        clip = mechanism.l2_clip_norm
        if clip not in self._known:
            norms, factors = self._norms, np.zeros(self._norms.shape)
            of_leaves = [norms[:, k : k + 1] for k in range(norms.shape[1])]
            of_groups = clip_factors(self._clipping, of_leaves, self._groups, clip)
            for group, factor in zip(self._groups, of_groups, strict=True):
                factors[:, group] = factor[:, None]
            largest = factors.max(axis=1, initial=0.0)
            lengths = np.where(largest > 0, self.norms, 0.0)
            errors = largest * (np.where(largest > 0, self._moved, 0.0) + self._own * lengths)
            values = self._values * factors[:, self._leaf]
            self._known[clip] = Clipped(values, largest * lengths, errors)
        return self._known[clip]


def _why_no_gradients(probe: Probe, *, large: bool) -> str:
    """Returns the obstacle to computing gradients of the run; empty if none."""
    algorithm = probe.algorithm
    if algorithm.loss_fn is None:
        return "an own algorithm states no loss"
    if algorithm.takes_key and probe.mechanism.sampler.num_shards > 1:
        return "keys of a loss depend on the shard of a row"
    if probe.tables and large:
        return "gradients of large tables take too much memory"
    try:
        require_reference(algorithm.clipping)
    except TypeError as error:
        return str(error)
    return ""


def _additivity_check(
    probe: Probe, mechanism: Mechanism, name: str, adjacent: np.ndarray | None = None
) -> CheckResult:
    """Checks that sums over disjoint parts of a batch add up.

    S(A) + S(B) = S(A and B): the contribution of a row depends on no other rows. By default all
    rows differ, and so do the table rows that they look up. Each row has the same place in all
    releases.

    Args:
      probe: Probe of the program.
      mechanism: Scales of the releases.
      name: Name of the check.
      adjacent: Places to use, alternately for A and B; by default random ones, one for each row.
    """
    count = min(probe.units, probe.places) if adjacent is None else adjacent.size
    if count < 2:
        return CheckResult.skipped(name, "a batch has a single row")
    clip, b = mechanism.l2_clip_norm, mechanism.sampler.expected_batch_size
    positions, numbers = adjacent, np.arange(count)
    halves = [numbers[::2], numbers[1::2]]
    if positions is None:
        positions = np.random.default_rng(1).permutation(probe.places)[:count]
        halves = np.array_split(numbers, 2)
    noise = mechanism.noise_multiplier * clip * (2 * math.sqrt(sum(probe.sizes)) + 6)  # at most
    first, second = (
        probe.release(half % probe.units, mechanism, at=positions[half]) for half in halves
    )
    sizes = [norm((1, x)) * b for x in (first, second)]
    added = [first.pop(0) + second.pop(0) for _ in range(len(first))]
    combined = probe.release(numbers % probe.units, mechanism, at=positions)
    off = norm((1, combined), (-1, added)) * b
    unit = 4 * UNIT + max(cast_error(dtype) for dtype in probe.dtypes)
    slack = 4 * unit * (count * clip + noise) + 2 * count**2 * UNIT * clip + 2 * noise
    if 2 * noise > clip / 4:  # the noise multiplier cannot be made small
        return CheckResult.skipped(name, f"noise hides differences up to {2 * noise:.3g}")
    allowed = max(map(len, halves)) * clip * (1 + 1e-3) + slack
    if max(sizes) > allowed:
        return CheckResult(name, False, f"rows contribute {max(sizes):.6g}, {allowed:.6g} allowed")
    return CheckResult(name, off <= slack, f"off by {off:.3g}, {slack:.3g} allowed")


def _own_error(unit: float) -> float:
    """Returns the relative error of a gradient whose parameters are exact.

    Its last two factors, a derivative and an input, are rounded without any parameter.
    """
    return max(_OWN, 2 * unit)


def _gradients(
    probe: Probe, numbers: np.ndarray, places: list[np.ndarray]
) -> tuple[tuple[Any, ...], float]:
    """Returns leaf norms, coordinates and sensitivities of gradients, and the unit roundoff.

    A sensitivity is the largest change of a gradient under small moves of the parameters.
    """
    starts = probe.starts[numbers]
    rows = starts[:, None] + np.arange(probe.block)
    shape = len(numbers), *probe.mechanism.sampler.clipped_shape
    batch = jax.tree.map(
        lambda x: np.asarray(x[rows]).reshape(*shape, *np.shape(x)[1:]), probe.columns
    )
    keys: tuple[Any, ...] = ()
    if probe.algorithm.takes_key:
        key = jnp.asarray(probe.root.loss_key(0))
        keys = (example_keys(key, probe.first_step, jnp.asarray(starts, jnp.int32), None),)
    loss: Any = probe.algorithm.loss_fn
    params = probe.state.params
    example = jax.tree.map(lambda x: x[0], (batch, *keys))
    unit = _coarsest(jax.make_jaxpr(lambda p, inputs: loss(p, *inputs))(params, example))
    size, moves = _moves(unit)
    options = None
    if jax.default_backend() == "cpu":  # it runs once: compiling is what it costs
        options = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    run = jax.jit(_of_examples, static_argnums=(0, 5), compiler_options=options)
    return run(loss, params, (batch, *keys), places, np.float32(size), moves), unit


def _moves(unit: float) -> tuple[float, int]:
    """Returns the relative size and the number of the moves of parameters.

    Where a move has few unit roundoffs, the effects of a few moves may all cancel to less than one.
    """
    size = 2.0**8 * unit
    return min(size, _FARTHEST), _MOVES[size > _FARTHEST]


def _of_examples(loss, params, batch, places, size, count):
    leaves, structure = jax.tree.flatten(params)
    signs = [
        jax.random.rademacher(
            jax.random.key(k), (count, *(x.shape if x.size <= LARGE else [1] * x.ndim)), jnp.int8
        )
        for k, x in enumerate(leaves)
    ]

    def gradient(of, move):
        """Returns the gradient at moved parameters; move 0 is none."""
        step = jnp.where(move > 0, size, 0.0)
        moved = [
            (x * (1 + step * d[move - 1])).astype(x.dtype)
            for x, d in zip(leaves, signs, strict=True)
        ]
        gradients = jax.grad(loss)(jax.tree.unflatten(structure, moved), *of)
        return [x.astype(jnp.float32).ravel() for x in jax.tree.leaves(gradients)]

    def norm(x):
        """Returns the norm of an array without overflow."""
        top = jnp.max(jnp.abs(x), initial=0.0)
        scale = jnp.where((top > 0) & jnp.isfinite(top), top, 1.0)
        return jnp.where(jnp.isfinite(top), scale * jnp.sqrt(jnp.sum(jnp.square(x / scale))), top)

    def one(of):
        """Returns leaf norms, compared coordinates and sensitivity of a gradient."""
        reference = gradient(of, 0)

        def apart(move):
            """Returns the change of the gradient under a move."""
            moved_gradient = gradient(of, move)
            return jnp.linalg.norm(
                jnp.stack([norm(x - y) for x, y in zip(reference, moved_gradient, strict=True)])
            )

        moves = jnp.max(jax.lax.map(apart, jnp.arange(1, count + 1)))
        norms = jnp.stack([norm(x) for x in reference])
        return norms, [x[indices] for x, indices in zip(reference, places, strict=True)], moves

    return jax.lax.map(one, batch)


def _coarsest(of: Any) -> float:
    """Returns the largest unit roundoff in a trace, and of this device."""
    unit = {"cpu": UNIT, "gpu": 2.0**-12}.get(jax.default_backend(), 2.0**-9)
    jaxpr = of.jaxpr if isinstance(of, core.ClosedJaxpr) else of
    for equation in jaxpr.eqns:
        for variable in equation.outvars:
            if jnp.issubdtype(variable.aval.dtype, jnp.floating):
                unit = max(unit, float(jnp.finfo(variable.aval.dtype).eps) / 2)
    for inner in core.subjaxprs(jaxpr):
        unit = max(unit, _coarsest(inner))
    return unit
