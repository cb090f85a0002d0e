"""The coupled audit: seconds, before every run, to see that the program is what was priced.

A price is a theorem about a program: *each example moves a step's sum by at most C, the sum gets
independent noise N(0, (sigma C)^2) in every coordinate, and the sampler draws who takes part by
the law that was priced*. The audit runs the program itself, compiled like the run's, with an
optimizer in place of the run's that writes down what it is given, and so sees every release.
Under the same key and step the noise of two releases is the same and cancels in their difference,
which leaves the sums. Writing S(A) for the sum over the examples A,

* ||S({i}) - S({})|| <= C for single examples i, and
* S(A u B) - S({}) = (S(A) - S({})) + (S(B) - S({})) for disjoint A and B

together bound what an example changes in *any* batch, also one whose gradients do not happen to be
extreme: by additivity, S(A u {i}) - S(A) = S({i}) - S({}). Both are checked where clipping acts
(C is lowered below the norms that are seen; the program takes it as an argument).

The checks of randomness are exact tests, each with a false-alarm probability of at most 1e-8.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from scipy import stats

from dpsgd.algorithm import Algorithm, Scales
from dpsgd.audit_sampler import FALSE_ALARM, Check, sampler_checks
from dpsgd.keys import RootKey
from dpsgd.loop import BlockPlan, compiled_block
from samplers import BatchSampler

PyTree = Any

_ROWS = 16  # examples of the batches that are added up
_SINGLES = 4  # examples whose contribution is measured alone
_NOISE_DRAWS = 2**15  # wanted of the law tests: resolves 3 % of sigma
_NOISE_STEPS = 64  # at most, however few coordinates there are
_MOST_DRAWS = 2**20  # read of one leaf and step: enough, and quick for a large model


@dataclass(frozen=True)
class AuditReport:
    """What the coupled audit saw.

    Attributes:
      checks: In the order in which they were made.
    """

    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Whether every check did."""
        return all(check.passed for check in self.checks)

    @property
    def left_out(self) -> tuple[Check, ...]:
        """The checks that were not made; their details say why."""
        return tuple(check for check in self.checks if not check.made)

    def lines(self) -> list[str]:
        """Returns one line a check, and the verdict."""
        width = max(len(check.name) for check in self.checks)
        lines = [
            f"{_verdict(check)}  {check.name:<{width}}  {check.detail}" for check in self.checks
        ]
        failed = sum(not check.passed for check in self.checks)
        verdict = f"VIOLATION: {failed} of {len(lines)} checks failed" if failed else "consistent"
        return [*lines, f"coupled audit: {verdict}"]

    def require_passed(self) -> None:
        """Raises ValueError, naming the checks that failed, unless the audit passed."""
        failed = [f"{check.name} ({check.detail})" for check in self.checks if not check.passed]
        if failed:
            raise ValueError(
                "the audit found that this run is not what its guarantee assumes: "
                f"{'; '.join(failed)}. A sound run fails by chance once in a million: "
                "do not train it"
            )


def _verdict(check: Check) -> str:
    return "FAIL" if not check.passed else "pass" if check.made else "skip"


class Recording(NamedTuple):
    """State of the optimizer that `recorder` returns."""

    count: Any  # int32 scalar: updates seen
    releases: PyTree  # like the parameters, float32, with a leading axis of slots


@functools.cache
def recorder(slots: int = 1) -> optax.GradientTransformation:
    """Returns an optimizer that keeps the parameters and writes down the private mean gradients.

    Args:
      slots: How many of the last gradients are kept; gradient k goes to slot k mod `slots`.

    The same object for the same slots, by which compiled programs can be shared.
    """

    def init(params: PyTree) -> Recording:
        zeros = jax.tree.map(lambda p: jnp.zeros((slots, *jnp.shape(p)), jnp.float32), params)
        return Recording(jnp.zeros((), jnp.int32), zeros)

    def update(gradient, state, params=None):
        releases = jax.tree.map(
            lambda kept, g: kept.at[state.count % slots].set(g.astype(jnp.float32)),
            state.releases,
            gradient,
        )
        return jax.tree.map(jnp.zeros_like, gradient), Recording(state.count + 1, releases)

    return optax.GradientTransformation(init, update)


def coupled_audit(
    build: Callable[[optax.GradientTransformation], Algorithm],
    params: PyTree,
    data: PyTree,
    *,
    claimed: BatchSampler | None = None,
    root: RootKey | None = None,
    max_batch_size: int | None = None,
) -> AuditReport:
    """Audits the algorithm that `build` makes of an optimizer, and the sampler of its mechanism.

    Args:
      build: Makes the run's algorithm for any optimizer, for example
        ``lambda optimizer: dpsgd(loss_fn, optimizer, mechanism)``.
      params: Where gradients are taken; copied.
      data: Examples of the run, [rows, ...]; a few of the first are used.
      claimed: Sampler whose price is claimed for the run; by default the mechanism's own.
      root: Source of the audit's randomness, by default fresh entropy. Never the run's own: two
        releases under one noise, as this audit makes them, have a noise-free difference.
      max_batch_size: Rows of the padded batches, at least a few; by default as many as the run's.

    Raises:
      ValueError: if the mechanism has no noise, or the data no rows.
    """
    root = root or RootKey.from_entropy()
    step = _CompiledStep(build(recorder()), params, data, root, max_batch_size)
    sampler = step.mechanism.sampler
    checks = _sum_checks(step) + _noise_checks(step)
    checks += sampler_checks(sampler, claimed or sampler, seed=step.sampling_seed)
    return AuditReport(tuple(checks))


class _CompiledStep:
    """The loop's compiled program, one step at a time, as a function of who takes part."""

    def __init__(
        self,
        algorithm: Algorithm,
        params: PyTree,
        data: PyTree,
        root: RootKey,
        max_batch_size: int | None,
    ):
        self.mechanism = algorithm.mechanism
        if self.mechanism.noise_multiplier == 0:
            raise ValueError("there is nothing to audit: noise_multiplier is 0")
        rows = {len(leaf) for leaf in jax.tree.leaves(data)}
        if len(rows) != 1 or 0 in rows:
            raise ValueError(f"the audit needs data with equally many rows, got {sorted(rows)}")
        # Where blocks of rows are clipped as one, a block stands for an example from here on.
        self.block = math.prod(self.mechanism.sampler.clipped_shape)
        # With room for at least one row of padding.
        width = max_batch_size or self.mechanism.sampler.max_batch_size
        self.width = -(-max(width, (_ROWS + 2) * self.block) // self.block) * self.block
        self.passes = 2 if self.mechanism.sampler.accumulates else 1
        self.rows = min(_ROWS, min(rows) // self.block)
        self.poison = self.rows
        self.poisoned, self._data = _with_poison(data, self.rows * self.block, self.block)
        self.scales = self.mechanism.scales()
        self._run = compiled_block(algorithm)
        self._key = jnp.asarray(self.mechanism.noise_key(root, 0))
        self.sampling_seed = root.sampling_seed(0)
        # As in the loop: one program for the first state and for those that follow.
        state = algorithm.init(jax.tree.map(jnp.array, params))
        self._state = jax.tree.map(lambda leaf: jnp.asarray(leaf, leaf.dtype), state)

    def __call__(
        self, members: Sequence[int], scales: Scales, *, step: int = 3, padding: int = 0
    ) -> list[np.ndarray]:
        """Returns the noised sum, the release times b: one float32 array a leaf.

        Args:
          members: Rows of the data that take part.
          scales: C, sigma C and b.
          step: Number of the update, which names the noise.
          padding: Row of the data to which the indices of the padding point.
        """
        shape = self.passes, self.width // self.block, self.block
        # Strewn among the padding, so that they meet in some microbatches and not in others.
        taking = np.array(members, np.int32)
        places = np.random.default_rng(0).permutation(math.prod(shape[:2]))[: taking.size]
        where = np.unravel_index(places, shape[:2])
        blocks, weights = np.full(shape, padding, np.int32), np.zeros(shape, np.float32)
        blocks[where], weights[where] = taking[:, None], 1.0
        indices = blocks * self.block + np.arange(self.block, dtype=np.int32)
        plan = BlockPlan(
            indices.reshape(self.passes, self.width),
            weights.reshape(self.passes, self.width),
            np.array([0, self.passes], np.int32),
            np.int32(1),
        )
        state = self._state._replace(step=jnp.int32(step))
        self._state, _ = self._run(state, self._data, plan, self._key, scales)
        releases = jax.tree.leaves(self._state.opt_state.releases)
        # A copy: the recording is donated to the next call.
        return [np.array(leaf[0]).ravel() * scales.expected_batch_size for leaf in releases]


def _with_poison(data: PyTree, rows: int, block: int) -> tuple[bool, PyTree]:
    """Returns the first rows and `block` whose floats are NaN, and whether there are floats."""
    poisoned = False

    def column(leaf):
        nonlocal poisoned
        leaf = np.asarray(leaf[:rows])
        last = leaf[-block:]
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            poisoned, last = True, np.full_like(last, np.nan)
        return np.concatenate([leaf, last])

    columns = jax.tree.map(column, data)
    return poisoned, columns


def _sum_checks(step: _CompiledStep) -> list[Check]:
    """Checks what an example, padding and a poisoned example can do to a step's sum."""
    real = step.scales
    clip = float(real.l2_clip_norm)
    # Little noise keeps the rounding of the releases, in which the sums are seen, far below C.
    quiet = _quiet(real, clip)
    singles = range(min(_SINGLES, step.rows))
    nobody = step([], quiet)
    norms = [_distance(step([i], quiet), nobody) for i in singles]
    allowed = clip * (1 + 1e-3) + _rounding(step, quiet, 1)
    checks = [
        Check(
            "an example moves the sum by at most C",
            max(norms) <= allowed,
            f"{max(norms):.6g} of {clip:.6g} allowed",
        )
    ]

    # From here on, C below the norms that were seen: clipping is at work.
    positive = [norm for norm in norms if norm > 0 and math.isfinite(norm)]
    low = min([clip, *positive]) / 2
    scaled = real._replace(l2_clip_norm=np.float32(low))
    quiet = _quiet(scaled, low)
    slack = _rounding(step, quiet, step.rows)
    nobody = step([], quiet)
    norm = max(_distance(step([i], quiet), nobody) for i in singles)
    checks.append(
        Check(
            "a lower C clips to it",
            norm <= low * (1 + 1e-3) + _rounding(step, quiet, 1),
            f"{norm:.6g} of {low:.6g} allowed" if positive else "the gradients seen are all zero",
        )
    )

    everybody = list(range(step.rows))
    even, odd = everybody[::2], everybody[1::2]  # neighbours in a microbatch are separated
    total, first, second = (step(who, quiet) for who in (everybody, even, odd))
    difference = [t - (a - e) - b for t, a, b, e in zip(total, first, second, nobody, strict=True)]
    checks.append(
        Check(
            "examples are clipped one by one: sums add up",
            _norm(difference) <= slack,
            f"off by {_norm(difference):.3g} of {slack:.3g} allowed",
        )
    )

    others = [step(even, quiet, padding=row) for row in (1 % step.rows, step.poison)]
    same = all(
        a.tobytes() == b.tobytes() for other in others for a, b in zip(first, other, strict=True)
    )
    checks.append(
        Check("padding is inert", same, "other rows under weight 0 " + _changed(not same))
    )

    if step.poisoned:
        poisoned = step([*even, step.poison], quiet)
        finite = all(bool(np.isfinite(leaf).all()) for leaf in poisoned)
        moved = _distance(poisoned, first) if finite else math.inf
        checks.append(
            Check(
                "a NaN example moves the sum by at most C",
                moved <= low * (1 + 1e-3) + slack,
                f"{moved:.3g} of {low:.3g} allowed",
            )
        )

    # At the run's own noise: what is added must not depend on the batch, nor its divisor on its
    # size. The sums, which are known by now, are compared where the batches differ most.
    seen = _distance(step(everybody, scaled), step([], scaled))
    wanted = _distance(total, nobody)
    slack += _rounding(step, scaled, step.rows)
    checks.append(
        Check(
            "noise and divisor do not depend on the batch",
            abs(seen - wanted) <= slack,
            f"a full batch moves the release by {seen:.4g}, its sum has norm {wanted:.4g}",
        )
    )
    return checks


def _noise_checks(step: _CompiledStep) -> list[Check]:
    """Checks the law of the noise, which is all that the release of an empty batch consists of."""
    stddev = float(step.scales.noise_stddev)
    size = sum(leaf.size for leaf in step([], step.scales))
    count = min(max(2, math.ceil(_NOISE_DRAWS / size)), _NOISE_STEPS)
    steps = [[leaf[:_MOST_DRAWS] for leaf in step([], step.scales, step=t)] for t in range(count)]
    leaves = [np.stack(leaf).astype(np.float64) / stddev for leaf in zip(*steps, strict=True)]
    alls = np.concatenate([leaf.ravel() for leaf in leaves])

    # Sum of squares: chi-square with as many degrees of freedom as draws, for all and each leaf.
    samples = [alls, *leaves]
    pvalue = min(_variance_pvalue(sample) for sample in samples) * len(samples)
    ratio = math.sqrt(float(np.mean(alls**2)))
    resolution = 5.7 / math.sqrt(2 * alls.size)
    checks = [
        Check(
            "noise has standard deviation sigma C, in every leaf",
            pvalue > FALSE_ALARM,
            f"{ratio:.4g} sigma C over {alls.size:,} draws (resolves {100 * resolution:.2g} %)",
        ),
    ]
    pvalue = float(stats.kstest(alls[:_MOST_DRAWS], "norm").pvalue)
    checks.append(
        Check("noise is normal", pvalue > FALSE_ALARM, f"Kolmogorov-Smirnov p = {pvalue:.2g}")
    )

    pairs = {
        "steps": [(leaf[:-1], leaf[1:]) for leaf in leaves]
        + [(leaf[:1], leaf[-1:]) for leaf in leaves],
        "leaves": [_common(a, b) for i, a in enumerate(leaves) for b in leaves[i + 1 : i + 3]],
        "coordinates": [(leaf[:, 0::2], leaf[:, 1::2]) for leaf in leaves if leaf.shape[1] > 1],
    }
    for name, together in pairs.items():
        values = [_correlation_pvalue(*pair) for pair in together] or [1.0]
        pvalue = min(1.0, min(values) * len(values))
        checks.append(
            Check(
                f"noise of different {name} is independent",
                pvalue > FALSE_ALARM,
                f"correlation p = {pvalue:.2g}",
            )
        )
    return checks


def _common(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    size = min(a.shape[1], b.shape[1])
    return a[:, :size], b[:, :size]


def _variance_pvalue(draws: np.ndarray) -> float:
    square = float(np.sum(draws**2))
    below = float(stats.chi2.cdf(square, draws.size))
    above = float(stats.chi2.sf(square, draws.size))
    return 2 * min(below, above) if math.isfinite(square) else 0.0


def _correlation_pvalue(a: np.ndarray, b: np.ndarray) -> float:
    """Returns the exact p-value of the uncentred correlation of normal draws of mean 0.

    For independent a and b, r = <a, b> / (|a| |b|) is the cosine between a fixed and a uniform
    direction of R^N: r sqrt((N - 1) / (1 - r^2)) has Student's law with N - 1 degrees of freedom.
    """
    size = min(a.size, b.size)
    a, b = a.ravel()[:size], b.ravel()[:size]
    norm = math.sqrt(float(np.sum(a * a)) * float(np.sum(b * b)))
    if size < 2:
        return 1.0
    if not 0 < norm < math.inf:
        return 0.0
    r = min(1.0, abs(float(np.sum(a * b))) / norm)
    if r == 1.0:
        return 0.0
    return 2 * float(stats.t.sf(r * math.sqrt((size - 1) / (1 - r * r)), size - 1))


def _rounding(step: _CompiledStep, scales: Scales, rows: int) -> float:
    """Bounds how far rounding moves a combination of four releases of up to `rows` examples.

    Per coordinate: the sum goes to the noise's grid (a cell at most, 2^-18 noise deviations), the
    release is rounded a few times relative to itself, in the parameters' type; and adding `rows`
    float32 terms, of norm C at most each, errs by rows^2 / 2 units of 2^-24 C in norm.
    """
    leaves = jax.tree.leaves(step._state.params)
    size = sum(leaf.size for leaf in leaves)
    unit = max(float(jnp.finfo(leaf.dtype).eps) for leaf in leaves)
    clip, noise = float(scales.l2_clip_norm), _noise(scales)
    magnitude = rows * clip + 2 * noise * math.sqrt(size)
    adding = rows**2 * 2.0**-24 * clip
    return 4 * (noise * 2.0**-18 * math.sqrt(size) + 4 * unit * magnitude + adding)


def _quiet(scales: Scales, clip: float) -> Scales:
    """Returns scales with noise of `clip` / 1024, or of a cell where the secure grid is coarser."""
    noise, grid = np.float32(clip * 2.0**-10), scales.grid
    if grid is not None:
        grid = grid._replace(cells=np.int32(np.clip(noise // grid.spacing, 1, grid.cells)))
    return scales._replace(noise_stddev=noise, grid=grid)


def _noise(scales: Scales) -> float:
    """Returns the standard deviation of the noise that the step adds."""
    if scales.grid is None:
        return float(scales.noise_stddev)
    return float(scales.grid.cells) * float(scales.grid.spacing)


def _distance(a: list[np.ndarray], b: list[np.ndarray]) -> float:
    return _norm([x - y for x, y in zip(a, b, strict=True)])


def _norm(leaves: list[np.ndarray]) -> float:
    square = sum(float(np.sum(np.square(leaf, dtype=np.float64))) for leaf in leaves)
    return math.sqrt(square) if math.isfinite(square) else math.inf


def _changed(changed: bool) -> str:
    return "changed the release" if changed else "left the release bit-equal"
