"""The coupled audit: seconds, before every run, to see that the program is what is accounted for.

A guarantee is a theorem about a program: *each example moves a step's sum by at most C, the sum
gets independent noise N(0, (sigma C)^2) in every coordinate, and the sampler draws who takes part
by the law that is claimed*. The audit runs the program itself, compiled like the run's, with an
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

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpsgd.audit.checks import AuditReport, Check
from dpsgd.audit.noise import noise_checks
from dpsgd.audit.program import AuditedProgram
from dpsgd.audit.sampler import sampler_checks
from dpsgd.audit.step import CompiledStep, recorder
from dpsgd.noise.keys import RootKey
from dpsgd.training.algorithm import Algorithm
from dpsgd.training.loop import repeats_exactly
from dpsgd.training.mechanism import Mechanism, Scales
from samplers import BatchSampler

PyTree = Any

_SINGLES = 4  # examples whose contribution is measured alone


def coupled_audit(
    build: Callable[[optax.GradientTransformation], Algorithm],
    mechanism: Mechanism,
    params: PyTree,
    data: PyTree,
    *,
    claimed: BatchSampler | None = None,
    root: RootKey | None = None,
    max_batch_size: int | None = None,
) -> AuditReport:
    """Audits what `build` makes of an optimizer, as it runs under `mechanism`, and its sampler.

    Args:
      build: Makes the run's algorithm for any optimizer, for example
        ``lambda optimizer: dpsgd(loss_fn, optimizer)``.
      mechanism: Sampler, sigma and C of the run.
      params: Where gradients are taken; copied.
      data: Examples of the run, [rows, ...]; a few of the first are used.
      claimed: Sampler whose guarantee is claimed for the run; by default the mechanism's own.
      root: Source of the audit's randomness, by default fresh entropy. Never the run's own: two
        releases under one noise, as this audit makes them, have a noise-free difference.
      max_batch_size: Rows of the padded batches, at least a few; by default as many as the run's.

    Raises:
      ValueError: if the mechanism has no noise, or the data no rows.
    """
    root = root or RootKey.from_entropy()
    step = CompiledStep(build(recorder()), mechanism, params, data, root, max_batch_size)
    algorithm, sampler = build(optax.sgd(1.0)), mechanism.sampler
    state = algorithm.init(params, mechanism)
    program = AuditedProgram(algorithm, mechanism, state, data, root=root)
    checks = _sum_checks(step) + noise_checks(program)
    checks += sampler_checks(sampler, claimed or sampler, seed=step.sampling_seed)
    return AuditReport(tuple(checks))


def _sum_checks(step: CompiledStep) -> list[Check]:
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
    scaled = dataclasses.replace(real, l2_clip_norm=np.float32(low))
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
    checks.append(_padding_check(first, others, slack, low))

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


def _padding_check(
    release: list[np.ndarray], others: list[list[np.ndarray]], slack: float, clip: float
) -> Check:
    """Checks that releases are one whatever lies under weight 0: to the bit, where bits repeat.

    Where atomic additions come in any order, equal steps differ by rounding, and so may these: up
    to `slack`. A row that counts moves the sum by `clip`, and a NaN that gets through without
    bound: both are told from rounding where `slack` is well below `clip`, and nowhere else.
    """
    name = "padding is inert"
    if repeats_exactly():
        same = all(
            a.tobytes() == b.tobytes()
            for other in others
            for a, b in zip(release, other, strict=True)
        )
        return Check(name, same, f"other rows under weight 0 {_changed(not same)}")
    moved = max(_distance(release, other) for other in others)
    detail = f"other rows under weight 0 move the release by {moved:.3g} of {slack:.3g} allowed"
    if moved <= slack and slack > clip / 2:  # as where parameters are in 16 bits
        return Check(name, True, f"{detail}, as a row that counts might", made=False)
    return Check(name, moved <= slack, detail)  # False for NaN, whose distance is infinite


def _rounding(step: CompiledStep, scales: Scales, rows: int) -> float:
    """Bounds how far rounding moves a combination of four releases of up to `rows` examples.

    Per coordinate: the sum goes to the noise's grid (a cell at most, 2^-18 noise deviations), the
    release is rounded a few times relative to itself, in the parameters' type; and adding `rows`
    float32 terms, of norm C at most each, errs by rows^2 / 2 units of 2^-24 C in norm.
    """
    leaves = jax.tree.leaves(step.params)
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
    return dataclasses.replace(scales, noise_stddev=noise, grid=grid)


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
