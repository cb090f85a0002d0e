"""Compares releases of the compiled step with DP-SGD's definition.

A release, the training executable's result for one synthetic batch, must equal the sum of clipped
gradients, plus the noise of key, step and coordinate, over the expected batch size. Gradients are
computed one by one; for large tables, single examples' contributions are measured, at most C each.
Bounds on the effect of rounding: docs/explanation/audit-of-steps.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from dpsgd.audit.probe import Probe
from dpsgd.audit.report import CheckResult
from dpsgd.audit.runtime.expected import ExpectedNoise, spread_places
from dpsgd.audit.runtime.gradients import OWN_ERROR, Clipped, Gradients, why_no_gradients
from dpsgd.audit.runtime.releases import LARGE, UNIT, Release, cast_error, loud, norm, quiet
from dpsgd.core.mechanism import Mechanism

STEP = "a step releases what the definition of DP-SGD does"
ADDS_UP = "sums over different rows add up"
UNCLIPPED = f"{ADDS_UP}, unclipped"
ADJACENT = "sums over adjacent places add up"
SPECIAL = "NaN and huge rows leave other rows as they are"

_ABOVE = 2.0**-7, 2.0**-4, 0.6  # excess of norms over C
_FEW = 3  # examples of a large model
_PLACES = 2**15  # coordinates of a release compared
_TOGETHER = 2.0**-2  # largest error of a batch, in units of C
_PARTS = 32  # parts of a batch compared with C below all norms; 4 for a large model
_ADJACENT = 256  # places whose sums are added up, the first and the last
_RAISED = range(0, 36, 5)  # powers of 2 by which C is multiplied until nothing is clipped


class _Look(NamedTuple):
    """One release to compare.

    Attributes:
      name: Description for a message.
      members, mechanism, at, padding, step, attempt: Arguments of `Probe.release`.
    """

    name: str
    members: np.ndarray
    mechanism: Mechanism
    at: np.ndarray | None = None
    padding: Any = 0
    step: int | None = None
    attempt: int = 0


class _Observed(NamedTuple):
    """Compared coordinates of a release.

    Attributes:
      total: Release times the expected batch size: float64[places].
      noise: Expected noise in standard deviations: float64[places].
      length: Norm of the sum without noise, over all coordinates if the noise is negligible, else
        over the compared ones; NaN for batches of several examples.
    """

    total: np.ndarray
    noise: np.ndarray
    length: float


def step_checks(probe: Probe) -> list[CheckResult]:
    """Compares releases of single steps with the definition of DP-SGD."""
    expected = ExpectedNoise(probe)
    checks = [expected.matrix_check()]
    if expected.singular:
        return checks
    steps = _Steps(_Releases(probe, expected))
    silent, count = quiet(probe.mechanism), min(probe.units, probe.places)
    different = np.array_split(np.arange(count), 2)
    checks += [steps.check(), _additivity_check(probe, silent, ADDS_UP, different)]
    if steps.largest > 0:
        raised = quiet(probe.mechanism, 8 * steps.largest)
        checks.append(_additivity_check(probe, raised, UNCLIPPED, different))
    if steps.large:
        return checks
    half = min(probe.places, _ADJACENT) // 2
    end_places = np.union1d(np.arange(half), np.arange(probe.places - half, probe.places))
    turns = np.arange(end_places.size) % probe.units
    by_turns = [(x[::2], x[1::2]) for x in (turns, end_places)]
    checks.append(_additivity_check(probe, silent, ADJACENT, *by_turns))
    if probe.nan is not None:
        special = np.array([probe.nan, *probe.huge])[: probe.places // 2]
        ordinary = np.arange(min(probe.units, probe.places - special.size))
        checks.append(_additivity_check(probe, silent, SPECIAL, (ordinary, special)))
    return checks


class _Releases:
    """Releases of a program at some coordinates, and their expected noise.

    Attributes:
      probe: Probe of the program.
      expected: Noise that the program must add.
      places: Compared flat indices into each leaf of a release.
      leaf: Index of the leaf of each coordinate: int[places].
      cast: Relative error of the cast of each coordinate: float64[places].
    """

    def __init__(self, probe: Probe, expected: ExpectedNoise):
        self.probe, self.expected, total = probe, expected, max(1, sum(probe.sizes))
        counts = [x if total <= _PLACES else max(256, _PLACES * x // total) for x in probe.sizes]
        pairs = zip(probe.sizes, counts, strict=True)
        self.places = [np.unique(spread_places(*pair)) for pair in pairs]
        self.leaf = np.repeat(np.arange(len(counts)), [len(indices) for indices in self.places])
        self.cast = np.array([cast_error(dtype) for dtype in probe.dtypes])[self.leaf]
        self._known: dict[tuple[int, int], np.ndarray] = {}

    def observe(self, look: _Look) -> _Observed:
        """Returns the compared coordinates of a release."""
        mechanism, options = look.mechanism, look._asdict()
        del options["name"]
        release = self.probe.release(**options)
        b, stddev = mechanism.sampler.expected_batch_size, mechanism.noise_multiplier
        pairs = zip(release, self.places, strict=True)
        total = np.concatenate([x[indices] for x, indices in pairs]).astype(np.float64) * b
        noise, length = self._noise(look, release), math.nan
        if len(look.members) == 1:
            is_loud = stddev * math.sqrt(sum(self.probe.sizes)) > 2.0**-20
            silent = total - stddev * mechanism.l2_clip_norm * noise
            length = float(np.linalg.norm(silent)) if is_loud else norm((1, release)) * b
        return _Observed(total, noise, length)

    def _noise(self, look: _Look, release: Release) -> np.ndarray:
        """Returns the noise of the compared coordinates, in standard deviations."""
        probe = self.probe
        step = probe.first_step if look.step is None else look.step
        if (step, look.attempt) not in self._known:
            steps, chosen = range(step, step + 1), enumerate(self.places)
            noises = [
                self.expected.values(steps, k, indices, look.attempt)[0] for k, indices in chosen
            ]
            self._known[step, look.attempt] = np.concatenate(noises)
        noise = self._known[step, look.attempt]
        for k in probe.tables:  # their rows have noise where they are read
            width = math.prod(probe.shapes[k][1:])
            read = np.any(release[k].reshape(-1, width), axis=1)[self.places[k] // width]
            noise = noise.copy()
            noise[self.leaf == k] *= read
        return noise


class _Steps:
    """Releases of single steps, and their expected values.

    Attributes:
      largest: Largest norm of a gradient; 0 if unknown.
      large: True for a large model, for which fewer releases are compared.
    """

    def __init__(self, releases: _Releases):
        self._releases = releases
        probe = self._probe = releases.probe
        self.large = sum(leaf.size for leaf in jax.tree.leaves(probe.state.params)) > LARGE
        units = range(min(probe.units, _FEW) if self.large else probe.units)
        self._numbers = np.array([*units, *([] if probe.nan is None else [probe.nan])])
        shards = probe.mechanism.sampler.num_shards if probe.algorithm.takes_key else 1
        self._every = np.arange(probe.places // shards)  # places with the keys of one shard
        source: Gradients | _Measured | None = None
        self._why_measured = why_no_gradients(probe, large=self.large)
        if not self._why_measured:
            source = Gradients(probe, self._numbers, releases.places)
            self._why_measured = source.fault
        if source is None or self._why_measured:
            source = _Measured(releases, self._numbers)
        self._source = source
        norms, self._steady = self._source.norms, np.flatnonzero(self._source.steady[: len(units)])
        self._norms = norms[self._steady]
        self.largest = float(self._norms.max(initial=0.0))
        self._poison = None if np.isfinite(norms[-1]) else probe.nan
        steady = self._numbers[self._steady] if self._steady.size else self._numbers[:1]
        self._full = np.resize(steady, self._every.size)

    def check(self) -> CheckResult:
        """Compares releases until one differs from its expected value."""
        count = 0
        for look in self._looks():
            if wrong := self._wrong(look) or self._source.fault:
                return CheckResult(STEP, False, f"{look.name}: {wrong}")
            count += 1
        note = f"; gradients were measured, as {self._why_measured}" if self._why_measured else ""
        numbers = f"{self._releases.cast.size:,} numbers"
        if not (count and self._steady.size):
            why = "no example adds to the sum at these parameters, so only noise was compared"
            return CheckResult.skipped(STEP, why if count else "the noise is not known")
        detail = f"{count} releases of {self._steady.size} examples, {numbers}"
        return CheckResult(STEP, True, detail + note)

    def _looks(self) -> Iterator[_Look]:
        """Yields the releases that are compared."""
        base, none, full, steps = self._probe.mechanism, np.zeros(0, int), self._full, self._steps()
        for number, step in enumerate(steps):
            words = f"step {step:,}, noise alone"
            yield _Look(words, full, loud(base), self._every, 0, step, number)
        if not steps:
            return
        yield _Look("an empty batch", none, base, None, 0, steps[-1], 1)
        yield _Look("a full batch", full, base, self._every)
        if not self._steady.size:
            return
        yield from self._parts_of(quiet(base), "C", 2)
        yield from self._parts_of(quiet(base, 2 * self.largest), "C above all norms", 1)
        low, words = quiet(base, self._norms.min() / 2), "C below all norms"
        yield from self._parts_of(low, words, 4 if self.large else _PARTS)
        nan = self._probe.nan
        padding = np.resize([0 if nan is None else nan, 0, int(full[-1])], self._probe.places)
        first = self._parts(low)[0]
        for name, group in {"half a batch": first[::2], "one example": first[-1:]}.items():
            yield _Look(f"{name}, {words}", full[group], low, group, padding)
        if nan is not None:  # with an ordinary one: noise alone would underflow in float16
            members = np.append(nan, full[:1])[: self._every.size]
            yield _Look("a NaN example", members, quiet(base), self._every[: members.size])
        for number in self._probe.huge[: 1 if self.large else None]:
            yield _Look("a huge example", np.array([number]), quiet(base), self._every[:1])
        if self._poison is not None:  # in the first place it was above
            members = np.append(full[:1], np.full(self._every.size - 1, nan))
            yield _Look("NaN but in the first place", members, quiet(base), self._every)
        longest = self._numbers[self._steady[[int(np.argmax(self._norms))]]]
        for excess in _ABOVE:
            mechanism = quiet(base, self.largest / (1 + excess))
            yield _Look(f"a norm {excess:.2g} above C", longest, mechanism, self._every[:1])

    def _steps(self) -> list[int]:
        """Returns steps of known noise: both ends of the run, and both sides of a power of two."""
        num_steps, first = self._probe.mechanism.sampler.num_steps, self._probe.first_step
        top = 2 ** max(0, (num_steps - 1).bit_length() - 1)
        steps = sorted({first, top - 1, min(top, num_steps - 1), num_steps - 1})
        return [step for step in steps if self._releases.expected.knows(step)]

    def _parts_of(self, mechanism: Mechanism, words: str, most: int) -> Iterator[_Look]:
        """Yields releases that cover the places of a batch."""
        groups = self._parts(mechanism)
        for number in sorted({*np.linspace(0, len(groups) - 1, most).astype(int).tolist()}):
            group = groups[number]
            members, positions = self._full[group], group
            if self._poison is not None and number % 2 == 0:  # NaN examples fill the batch
                other_places = np.setdiff1d(self._every, group)
                members = np.append(members, np.full(other_places.size, self._poison))
                positions = np.append(group, other_places)
            yield _Look(f"{group.size} examples, {words}", members, mechanism, positions)

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

    def _counts(self, members: np.ndarray) -> np.ndarray:
        """Returns the multiplicity of each of `_numbers` in a batch: float64[examples]."""
        return np.equal(np.asarray(members)[:, None], self._numbers).sum(axis=0, dtype=np.float64)

    def _error(self, counts: np.ndarray, mechanism: Mechanism) -> float:
        """Bounds the norm of the rounding error in a sum."""
        clipped, size = self._source.clipped(mechanism), counts.sum()
        return float(counts @ (clipped.errors + size * UNIT * clipped.norms))

    def _wrong(self, look: _Look) -> str:
        """Returns a description of the fault in a release; empty if none."""
        probe, mechanism, cast = self._probe, look.mechanism, self._releases.cast
        clip, allowed = mechanism.l2_clip_norm, self._releases.expected.allowed
        observed = self._releases.observe(look)
        slack = 8 * mechanism.noise_multiplier * (allowed + cast.max(initial=0.0)) * cast.size**0.5
        # One example adds at most C, however coarse its gradient is.
        if observed.length > clip * (1 + 1e-3 + 2 * cast.max(initial=0.0) + slack):
            return f"one example adds a sum of norm {observed.length / clip:.4g} C"
        counts = self._counts(look.members)
        huge = np.count_nonzero(np.isin(look.members, probe.huge))  # clipped, or left out
        error = self._error(counts, mechanism) + huge * clip * (1 + OWN_ERROR)
        total = np.einsum("n,np->p", counts, self._source.clipped(mechanism).values)
        stddev = mechanism.noise_multiplier * clip
        want = total + stddev * observed.noise
        apart = np.abs(observed.total - want)
        room = stddev * allowed + cast * (np.abs(want) + error) + 2.0**-20 * np.abs(total)
        bad = ~(apart <= error + room)
        if bad.any():
            leaf, noise = int(self._releases.leaf[np.argmax(bad)]), observed.noise
            with np.errstate(invalid="ignore"):
                gain = np.vdot(observed.total - total, noise) / max(stddev * noise @ noise, 1e-300)
            return (
                f"{probe.names[leaf]}: {np.count_nonzero(bad):,} of {bad.size:,} numbers differ "
                f"({gain:.4g} times the noise on average)"
            )
        excess = math.sqrt(np.square(np.maximum(0.0, apart - room)).sum())
        if excess > error:
            return f"the sum is off by {excess / clip:.3g} C, {error / clip:.3g} C allowed"
        return ""


class _Measured:
    """Measured contributions of single examples, for gradients that cannot be computed.

    Attributes:
      norms: Norms of the gradients, float64[examples]: NaN for an example that adds nothing, the
        contribution's norm at C for a gradient that every tested clip norm clips.
      steady: bool[examples], True for examples that add something.
      fault: Description of a contribution above C; empty if none.
    """

    def __init__(self, releases: _Releases, numbers: np.ndarray):
        self._releases, self._numbers = releases, numbers
        self._known, self.fault = dict[float, Clipped](), ""
        self._base = releases.probe.mechanism
        contributions = self.clipped(quiet(self._base))
        self.steady = contributions.norms > 0
        self.norms = np.where(self.steady, contributions.norms, np.nan)
        for k in np.flatnonzero(self.steady):
            for power in _RAISED:
                mechanism = quiet(self._base, self._base.l2_clip_norm * 2.0**power)
                size = self._alone(mechanism, int(numbers[k]))[1]
                if size <= mechanism.l2_clip_norm / 2:
                    self.norms[k] = size
                    break

    def clipped(self, mechanism: Mechanism) -> Clipped:
        """Returns each example's contribution alone, at a mechanism's clip norm."""
        clip, count = mechanism.l2_clip_norm, len(self._numbers)
        if clip < 2.0**-20 * self._base.l2_clip_norm:  # vanishes in the noise
            norms = np.full(count, clip)
            return Clipped(np.zeros((count, self._releases.cast.size)), norms, norms)
        if clip not in self._known:
            examples = [self._alone(quiet(mechanism, clip), int(n)) for n in self._numbers]
            values, norms = (np.stack(column) for column in zip(*examples, strict=True))
            cast = 2 * self._releases.cast.max(initial=0.0)
            tolerance = quiet(mechanism, clip).noise_multiplier * self._releases.expected.allowed
            tolerance *= 2 * clip * math.sqrt(values.shape[1])  # of the noise
            faint = norms <= 2.0**-18 * clip + tolerance
            values[faint], norms[faint] = 0.0, 0.0
            if norms.max(initial=0.0) > clip * (1 + 1e-3 + cast) + tolerance:
                self.fault = f"one example adds {norms.max() / clip:.4g} C"
            self._known[clip] = Clipped(values, norms, (OWN_ERROR + cast) * norms + tolerance)
        return self._known[clip]

    def _alone(self, mechanism: Mechanism, number: int) -> tuple[np.ndarray, float]:
        """Returns the sum of one example without noise, and its norm."""
        observed = self._releases.observe(
            _Look("one example", np.array([number]), mechanism, np.zeros(1, int))
        )
        stddev = mechanism.noise_multiplier * mechanism.l2_clip_norm
        return observed.total - stddev * observed.noise, observed.length


def _additivity_check(
    probe: Probe,
    mechanism: Mechanism,
    name: str,
    halves: Sequence[np.ndarray],
    places: Sequence[np.ndarray] | None = None,
) -> CheckResult:
    """Checks that sums over disjoint parts of a batch add up.

    S(A) + S(B) = S(A and B): the contribution of a row depends on no other rows. Each row has the
    same place in all releases.

    Args:
      probe: Probe of the program.
      mechanism: Scales of the releases.
      name: Name of the check.
      halves: Examples of A and of B.
      places: Places of A and of B in the batch; by default random ones.
    """
    count = sum(map(len, halves))
    if min(map(len, halves)) == 0:
        return CheckResult.skipped(name, "a batch has too few rows")
    if places is None:
        shuffled = np.random.default_rng(1).permutation(probe.places)[:count]
        places = np.split(shuffled, [len(halves[0])])
    clip, b = mechanism.l2_clip_norm, mechanism.sampler.expected_batch_size
    noise = mechanism.noise_multiplier * clip * (2 * math.sqrt(sum(probe.sizes)) + 6)  # at most
    pairs = zip(halves, places, strict=True)
    first, second = (probe.release(half, mechanism, at=positions) for half, positions in pairs)
    sizes = [norm((1, x)) * b for x in (first, second)]
    added = [first.pop(0) + second.pop(0) for _ in range(len(first))]
    combined = probe.release(np.concatenate(halves), mechanism, at=np.concatenate(places))
    off = norm((1, combined), (-1, added)) * b
    unit = 4 * UNIT + max(cast_error(dtype) for dtype in probe.dtypes)
    slack = 4 * unit * (count * clip + noise) + 2 * count**2 * UNIT * clip + 2 * noise
    if 2 * noise > clip / 4:  # the noise multiplier cannot be made small
        return CheckResult.skipped(name, f"noise hides differences up to {2 * noise:.3g}")
    allowed = max(map(len, halves)) * clip * (1 + 1e-3) + slack
    if max(sizes) > allowed:
        return CheckResult(name, False, f"rows contribute {max(sizes):.6g}, {allowed:.6g} allowed")
    return CheckResult(name, off <= slack, f"off by {off:.3g}, {slack:.3g} allowed")
