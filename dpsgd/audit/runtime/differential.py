"""The compiled step against the definition of DP-SGD, coordinate by coordinate.

Releases of the executable that trains are compared with gradients that are formed one by one,
clipped, summed, noised and divided in float64 (`dpsgd.audit.reference_step`).

How far they may differ follows from rounding. A gradient that is computed in unit roundoff u is
that of parameters a few u away: an example may be off by what eight random moves of 2^8 u of the
parameters change, and by 2^-10 of its length. A sum of m of them errs by m 2^-24 of their lengths,
a cast by the unit of its type, and noise by `expected.ALLOWED`. An example that such moves change
by more than a sixteenth, as where a rectifier is next to its kink, is left out.
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
from dpsgd.audit.reference_step import clip_factors
from dpsgd.audit.report import CheckResult
from dpsgd.audit.runtime.expected import ExpectedNoise, cast_of
from dpsgd.audit.runtime.scales import loud, quiet
from dpsgd.audit.runtime.sums import LARGE
from dpsgd.core.mechanism import Mechanism
from dpsgd.gradients.losses import example_keys

PyTree = Any

STEP = "a step releases what the definition of DP-SGD does"

_UNIT = 2.0**-24
_OWN = 2.0**-10  # of an example's length: what its own arithmetic may add
_MOVES = 8  # of the parameters, by relative rounding
_UNSTEADY = 2.0**-4  # of an example's length
_ABOVE = 2.0**-7, 2.0**-4, 0.5  # by how much a norm exceeds C
_FEW = 3  # examples of a large model
_PLACES = 2**18  # coordinates of a release that are compared
_TOGETHER = 2.0**-2  # of C: what a batch may be off by
_PARTS = 6


class _Examples(NamedTuple):
    """Gradients of synthetic examples.

    Attributes:
      numbers: Of the examples.
      norms: Of each leaf: float64[examples, leaves].
      at: Coordinates that are compared: of each leaf float64[examples, places].
      off: How far rounding may move each gradient: float64[examples].
    """

    numbers: np.ndarray
    norms: np.ndarray
    at: list[np.ndarray]
    off: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        """Norms of the gradients."""
        return np.sqrt(np.square(self.norms).sum(axis=1))

    @property
    def steady(self) -> np.ndarray:
        """Which gradients are finite, no zeros and hardly moved by rounding."""
        with np.errstate(invalid="ignore"):
            known = np.isfinite(self.lengths) & (self.lengths > 0)
            return known & (self.off <= _UNSTEADY * self.lengths)


class _Look(NamedTuple):
    """One release.

    Attributes:
      name: What it is, in words.
      members, at, padding: As for `Probe.release`.
      mechanism: With its sigma and C.
      step, attempt: Which name the noise.
    """

    name: str
    members: np.ndarray
    mechanism: Mechanism
    at: np.ndarray | None = None
    padding: int = 0
    step: int | None = None
    attempt: int = 0


def step_check(probe: Probe) -> CheckResult:
    """Compares releases of single steps with the definition of DP-SGD."""
    algorithm = probe.algorithm
    if algorithm.loss_fn is None:
        return CheckResult.skipped(STEP, "an own algorithm states no loss")
    if algorithm.takes_key and probe.mechanism.sampler.num_shards > 1:
        return CheckResult.skipped(STEP, "keys of a loss depend on the shard of a row")
    if probe.tables and sum(leaf.size for leaf in jax.tree.leaves(probe.state.params)) > LARGE:
        return CheckResult.skipped(STEP, "a gradient of a large table is not formed")
    expected = ExpectedNoise(probe)
    first = range(probe.first_step, probe.first_step + 1)
    if expected.singular or not expected.knows(first):
        return CheckResult.skipped(STEP, "the noise states no Toeplitz matrix")
    try:
        return _Steps(probe, expected).check()
    except TypeError as error:
        return CheckResult.skipped(STEP, str(error))


class _Steps:
    """The releases, and the first that is another."""

    def __init__(self, probe: Probe, expected: ExpectedNoise):
        self._probe, self._expected = probe, expected
        total = max(1, sum(probe.sizes))
        self._places = [
            expected.places(k, size if total <= _PLACES else max(256, _PLACES * size // total))
            for k, size in enumerate(probe.sizes)
        ]
        self._known: dict[tuple[int, int, int], np.ndarray] = {}
        self._clipping = probe.algorithm.clipping
        trained = [k for k in range(len(probe.sizes)) if k not in probe.frozen]
        leaves, structure = jax.tree.flatten(probe.state.params)
        masked = [leaf if k in trained else None for k, leaf in enumerate(leaves)]
        groups = self._clipping.groups(jax.tree.unflatten(structure, masked))
        self._groups = [[trained[k] for k in group] for group in groups]
        self._examples = self._gradients()
        self._factors(probe.mechanism.l2_clip_norm)  # or there is none: TypeError

    def check(self) -> CheckResult:
        """Compares all releases, until one is another."""
        count = 0
        for look in self._looks():
            if wrong := self._wrong(look):
                return CheckResult(STEP, False, f"{look.name}: {wrong}")
            count += 1
        steady = int(self._examples.steady[: self._units].sum())
        detail = f"{count} releases of {steady} examples, {sum(map(len, self._places)):,} numbers"
        return CheckResult(STEP, True, detail)

    @property
    def _units(self) -> int:
        return min(self._probe.units, len(self._examples.numbers))

    def _looks(self) -> Iterator[_Look]:
        """Yields the releases that are compared, at C, below and above the norms."""
        probe, own, none = self._probe, self._probe.mechanism, np.zeros(0, int)
        places, end = np.arange(probe.places), own.sampler.num_steps
        top = 2 ** max(0, (end - 1).bit_length() - 1)  # with those before it all bits of a step
        steps = {probe.first_step, top - 1, min(top, end - 1), end - 1}
        for number, step in enumerate(sorted(steps)):
            if not self._expected.knows(range(step, step + 1)):
                continue
            yield _Look(f"step {step:,}, an empty batch", none, own, None, 0, step, number)
            if self._full is not None:
                loudest = loud(own)
                yield _Look(f"step {step:,}, noise alone", self._full, loudest, places, 0, step)
        steady = self._examples.numbers[: self._units][self._examples.steady[: self._units]]
        if not steady.size:
            return
        yield _Look("a full batch", self._full, own, places)
        lengths = self._examples.lengths[self._rank(steady)]
        for clip in (own.l2_clip_norm, lengths.min() / 2, 2 * lengths.max()):
            mechanism = quiet(own, _narrow(clip))
            words = f"C = {mechanism.l2_clip_norm:.3g}"
            for end in (0, places.size - 1):
                one = steady[[-1 if end else 0]]
                yield _Look(f"one example in place {end}, {words}", one, mechanism, places[[end]])
            for part in self._parts(mechanism):
                yield _Look(f"{part.size} examples, {words}", self._full[part], mechanism, part)
            part = self._parts(mechanism)[0][::2]
            beside = {"NaN": probe.nan, "first": 0, "last": int(steady[-1])}
            for what, padding in beside.items():  # the first lies in row 0, as all padding may
                if padding is not None:
                    words_of = f"half a batch, {what} row as padding, {words}"
                    yield _Look(words_of, self._full[part], mechanism, part, padding)
        special = [x for x in (probe.nan, *probe.huge) if x is not None]
        quieter = quiet(own)
        for number in special:
            members = np.append(number, steady[:1])[: places.size]
            where = places[: members.size]
            yield _Look(f"example {number}, not finite or huge", members, quieter, where)
        for excess in _ABOVE:
            mechanism = quiet(own, _narrow(lengths.max() / (1 + excess)))
            longest = steady[[int(np.argmax(lengths))]]
            yield _Look(f"a norm {excess:.2g} above C", longest, mechanism, places[:1])

    @functools.cached_property
    def _full(self) -> Any:
        """Steady examples in turn, in all places; None without any."""
        steady = self._examples.numbers[: self._units][self._examples.steady[: self._units]]
        return np.resize(steady, self._probe.places) if steady.size else None

    def _parts(self, mechanism: Mechanism) -> list[np.ndarray]:
        """Divides the places, both ends in the first part: the rounding of each is below C / 4."""
        every, clip = np.arange(self._probe.places), mechanism.l2_clip_norm
        together = every.size
        while together > 1 and self._off(self._full[:together], clip) > _TOGETHER * clip:
            together = -(-together // 2)
        if together == every.size:
            return [every]
        ordered = np.concatenate([every[:1], every[-1:], every[1:-1]])
        parts = [np.sort(ordered[k : k + together]) for k in range(0, every.size, together)]
        some = sorted(set(np.linspace(0, len(parts) - 1, _PARTS).astype(int).tolist()))
        return [parts[k] for k in some]

    def _rank(self, members: Any) -> np.ndarray:
        numbers = self._examples.numbers.tolist()
        return np.array([numbers.index(int(x)) for x in np.asarray(members)], int)

    def _factors(self, clip: float) -> np.ndarray:
        """Returns by how much each example is shortened in each leaf: float64[examples, leaves]."""
        norms = [self._examples.norms[:, k : k + 1] for k in range(len(self._places))]
        found = np.zeros(self._examples.norms.shape)
        of_groups = clip_factors(self._clipping, norms, self._groups, clip)
        for group, factor in zip(self._groups, of_groups, strict=True):
            found[:, group] = factor[:, None]
        return found

    def _off(self, members: np.ndarray, clip: float) -> float:
        """Bounds how far rounding moves the clipped sum of a batch."""
        rank, examples = self._rank(members), self._examples
        factor = np.max(self._factors(clip)[rank], axis=1, initial=0.0)
        counted = factor > 0
        lengths = np.where(counted, examples.lengths[rank], 0.0)
        each = np.where(counted, examples.off[rank], 0.0) + (_OWN + rank.size * _UNIT) * lengths
        # What shortens an example moves along: of one above C its own length cancels.
        return float(np.sum(factor * each)) if rank.size else 0.0

    def _noise(self, step: int, leaf: int, attempt: int) -> np.ndarray:
        """Returns the noise of a leaf, in standard deviations: float64[places]."""
        if (step, leaf, attempt) not in self._known:
            of = leaf, self._places[leaf], attempt
            (self._known[step, leaf, attempt],) = self._expected.of(range(step, step + 1), *of)
        return self._known[step, leaf, attempt]

    def _wrong(self, look: _Look) -> str:
        """Returns what is wrong with a release; empty if nothing is."""
        probe, mechanism = self._probe, look.mechanism
        step = probe.first_step if look.step is None else look.step
        how: dict[str, Any] = {"at": look.at, "padding": look.padding, "step": step}
        release = probe.release(look.members, mechanism, attempt=look.attempt, **how)
        b, clip = mechanism.sampler.expected_batch_size, mechanism.l2_clip_norm
        stddev = mechanism.noise_multiplier * clip
        members = np.asarray(look.members, int)
        huge = np.isin(members, probe.huge)  # which may count as clipped, or not at all
        off = self._off(members[~huge], clip) + np.count_nonzero(huge) * clip * (1 + _OWN)
        rank = self._rank(members[~huge])
        count = np.bincount(rank, minlength=len(self._examples.numbers))
        square, factors = 0.0, self._factors(clip) * count[:, None]
        for k, places in enumerate(self._places):
            if not places.size:
                continue
            found = release[k].astype(np.float64)[places] * b
            gradients = np.where(factors[:, k : k + 1] > 0, self._examples.at[k], 0.0)
            total = factors[:, k] @ gradients
            noise = self._noise(step, k, look.attempt)
            if k in probe.tables:
                width = math.prod(probe.shapes[k][1:])
                read = np.any(release[k].reshape(-1, width), axis=1)
                noise = np.where(read[places // width], noise, 0.0)
            want = total + stddev * noise
            cast = cast_of(probe.dtypes[k]) * (np.abs(want) + off)
            room = stddev * self._expected.allowed + cast + 2.0**-20 * np.abs(total)
            apart = np.abs(found - want)
            if not np.all(apart <= off + room):
                worst = float(np.nanmax(np.where(np.isfinite(apart), apart, np.inf)))
                others = int(np.sum(~(apart <= off + room)))
                return (
                    f"{probe.names[k]} has {others:,} of {places.size:,} numbers that are others, "
                    f"by {worst / max(clip, stddev):.3g} of the larger of C and sigma C"
                )
            square += float(np.sum(np.square(np.maximum(0.0, apart - room))))
        if math.sqrt(square) > off:
            return f"it is {math.sqrt(square) / clip:.3g} C away, {off / clip:.3g} C allowed"
        return ""

    def _gradients(self) -> _Examples:
        """Returns the gradients of the examples that are looked at, formed one by one."""
        probe = self._probe
        large = sum(leaf.size for leaf in jax.tree.leaves(probe.state.params)) > LARGE
        units = list(range(min(probe.units, _FEW) if large else probe.units))
        others = [] if probe.nan is None else [probe.nan]
        numbers = np.array(units + others)
        places = []
        for k, at in enumerate(self._places):
            if k in probe.tables and probe.snapshot is not None:
                width = math.prod(probe.shapes[k][1:])
                rows = probe.snapshot.rows[k][at // width].astype(np.int64)
                at = rows * width + at % width
            places.append(at.astype(np.int32))
        shape = probe.mechanism.sampler.clipped_shape
        starts = probe.starts[numbers]
        rows = starts[:, None] + np.arange(probe.block)
        batch = jax.tree.map(
            lambda x: np.asarray(x[rows]).reshape(len(numbers), *shape, *np.shape(x)[1:]),
            probe.columns,
        )
        keys: tuple[Any, ...] = ()
        if probe.algorithm.takes_key:
            key = jnp.asarray(probe.root.loss_key(0))
            keys = (example_keys(key, probe.first_step, jnp.asarray(starts, jnp.int32), None),)
        loss: Any = probe.algorithm.loss_fn
        params = probe.state.params
        one = jax.tree.map(lambda x: x[0], (batch, *keys))
        unit = _coarsest(jax.make_jaxpr(lambda p, of: loss(p, *of))(params, one))
        size = np.float32(min(2.0**8 * unit, 2.0**-5))
        given = loss, params, (batch, *keys), places
        found = jax.jit(_of_examples, static_argnums=0)(*given, size, 0)
        norms, at, apart = jax.tree.map(lambda x: np.asarray(x, np.float64), found)
        return _Examples(numbers, norms, list(at), np.nan_to_num(apart))


def _of_examples(loss, params, batch, places, size, seed):
    """Returns norms of leaves, coordinates, and how far moves of the parameters change each."""
    leaves, structure = jax.tree.flatten(params)
    draws = [
        jax.random.rademacher(jax.random.key(seed + k), (_MOVES, *x.shape), jnp.float32)
        if x.size <= LARGE // _MOVES
        else jax.random.rademacher(jax.random.key(seed + k), (_MOVES, *[1] * x.ndim), jnp.float32)
        for k, x in enumerate(leaves)
    ]

    def gradient(of, move=None):
        moved = leaves
        if move is not None:
            moved = [
                (x * (1 + size * d[move])).astype(x.dtype)
                for x, d in zip(leaves, draws, strict=True)
            ]
        found = jax.grad(loss)(jax.tree.unflatten(structure, moved), *of)
        return [x.astype(jnp.float32).ravel() for x in jax.tree.leaves(found)]

    def norm(x):
        top = jnp.max(jnp.abs(x), initial=0.0)
        scale = jnp.where((top > 0) & jnp.isfinite(top), top, 1.0)
        return jnp.where(jnp.isfinite(top), scale * jnp.sqrt(jnp.sum(jnp.square(x / scale))), top)

    def one(of):
        own = gradient(of)

        def apart(move):
            other = gradient(of, move)
            return jnp.linalg.norm(
                jnp.stack([norm(x - y) for x, y in zip(own, other, strict=True)])
            )

        moves = jnp.max(jax.lax.map(apart, jnp.arange(_MOVES)))
        return (
            jnp.stack([norm(x) for x in own]),
            [x[at] for x, at in zip(own, places, strict=True)],
            moves,
        )

    return jax.lax.map(one, batch)


def _coarsest(of: Any) -> float:
    """Returns the unit roundoff of the coarsest arithmetic in a trace, and on this device."""
    unit = {"cpu": _UNIT, "gpu": 2.0**-12}.get(jax.default_backend(), 2.0**-9)
    jaxpr = of.jaxpr if isinstance(of, core.ClosedJaxpr) else of
    for equation in jaxpr.eqns:
        for variable in equation.outvars:
            if jnp.issubdtype(variable.aval.dtype, jnp.floating):
                unit = max(unit, float(jnp.finfo(variable.aval.dtype).eps) / 2)
    for inner in core.subjaxprs(jaxpr):
        unit = max(unit, _coarsest(inner))
    return unit


def _narrow(clip: float) -> float:
    """Returns a number that float32 holds."""
    return float(np.float32(clip))
