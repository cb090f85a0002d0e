"""Audits the program of a run before the run starts, in seconds.

A guarantee is a theorem about a program: *each example moves a step's sum by at most C; the sum
gets noise N(0, (sigma C)^2), which key, step and coordinate determine; all outputs are computed
from noised sums alone; and the sampler draws by its claimed law*. The audit proves the flow of data
from the trace (`runtime.flow`), calls the executable that trains, and `train_blocks`, on synthetic
rows with the audit's keys, and compares their releases with the definition of DP-SGD. Faults that
it detects, and its limits: docs/explanation/sharp-edges.md.
"""

from __future__ import annotations

from typing import Any

from dpsgd.audit.draws import draw_checks
from dpsgd.audit.prices import DELTA, own_price_checks
from dpsgd.audit.probe import Probe
from dpsgd.audit.report import AuditReport, CheckResult
from dpsgd.audit.runtime.blocks import block_checks
from dpsgd.audit.runtime.deferred import deferred_checks
from dpsgd.audit.runtime.differential import step_checks
from dpsgd.audit.runtime.flow import flow_checks
from dpsgd.core.mechanism import Mechanism
from dpsgd.core.noise import Independent
from dpsgd.core.state import TrainState
from dpsgd.engine.algorithm import Algorithm
from dpsgd.engine.feed import Layout
from dpsgd.engine.placement import Placement
from dpsgd.engine.queries import Refinement, sums_run
from dpsgd.noise.keys import RootKey
from samplers import BatchSampler, FullBatch
from samplers.settings import SAMPLERS

PyTree = Any


def audit_program(
    algorithm: Algorithm,
    mechanism: Mechanism,
    params: PyTree,
    rows: PyTree,
    *,
    state: TrainState | None = None,
    layout: Layout | None = None,
    claimed: BatchSampler | None = None,
    root: RootKey | None = None,
    laws: bool = False,
    delta: float = DELTA,
) -> AuditReport:
    """Audits the program of a run, and its sampler.

    Args:
      algorithm: Algorithm of the run.
      mechanism: Sampler, sigma and C of the run.
      params: Parameters with which the run begins.
      rows: Synthetic examples, each leaf [rows, ...]; at most the first 16 are compared one by one.
      state: State with which the run resumes: parameters, optimizer state and step.
      layout: Layout of the run's blocks; by default the one that `train_blocks` chooses.
      claimed: Sampler whose guarantee is claimed; by default the mechanism's own.
      root: Source of the audit's randomness, by default fresh entropy. Never the run's root: the
        audit makes two releases with equal noise, and their difference has no noise.
      laws: True to test every sampler's draws statistically; by default only samplers from outside
        `samplers`, and samplers that differ from `claimed`. Draws must pass the exact checks first.
        Samplers from outside get more draws.
      delta: Delta of the guarantee, at which the stated costs of parts from outside are checked.

    Raises:
      ValueError: If the mechanism has no noise, or there are no rows.
    """
    root, sampler = root or RootKey.from_entropy(), mechanism.sampler
    state = state or algorithm.init(params, mechanism, rows)
    probe = Probe(algorithm, mechanism, state, rows, layout=layout, root=root)
    checks = flow_checks(algorithm, mechanism, state, probe.columns, probe.layout)
    checks += step_checks(probe)
    deferred = deferred_checks(probe)  # looks at tables after the releases above
    checks += block_checks(probe) + deferred
    checks += own_price_checks(mechanism.noise, [(sampler, mechanism.noise_multiplier)], delta)
    claimed = sampler if claimed is None else claimed
    draws = draw_checks(sampler, claimed, seed=root.sampling_seed(0), bands=mechanism.noise.bands)
    is_own = SAMPLERS.is_own(sampler)
    if all(check.passed for check in draws) and (is_own or laws or claimed is not sampler):
        from dpsgd.audit.laws import ENTRIES, THOROUGH, law_checks  # imports scipy.stats

        draws += law_checks(sampler, claimed, entries=THOROUGH if is_own and laws else ENTRIES)
    return AuditReport((*checks, *draws))


def audit_queries(
    refinement: Refinement,
    mechanism: Mechanism,
    params: PyTree,
    rows: PyTree,
    *,
    placement: Placement | None = None,
    root: RootKey | None = None,
) -> AuditReport:
    """Audits the program that releases sums over all rows.

    `refine` calls this program after a run.

    Args:
      refinement: Refinement that uses the sums.
      mechanism: Mechanism of the run, with `full_sums`.
      params: Parameters of the run, such as its first; the program does not depend on their values.
      rows: Synthetic examples, as for the audit of the run.
      placement: Devices that compute; by default one.
      root: Source of randomness, see `audit_program`.

    Raises:
      ValueError: If there are no sums, or a row could read other rows.
    """
    sums = mechanism.full_sums
    run = sums_run(refinement, mechanism.sums_mechanism(), params, rows, placement)
    algorithm, released, state, read, _ = run
    assert sums is not None, "or sums_mechanism had refused"
    # The priced mechanism, independent of the one that `sums_run` returns.
    sampler = FullBatch(mechanism.sampler.num_examples, sums.count)
    noise = released.noise if released.noise.bands == 1 else Independent()
    priced = Mechanism(sampler, sums.noise_multiplier, sums.l2_clip_norm, noise)
    report = audit_program(
        algorithm, priced, state.params, read, state=state, layout=run.layout, root=root
    )
    same = CheckResult(
        "they are released at their priced noise and clip norm", released == priced, str(sums)
    )
    checks = (
        check._replace(name=f"sums over all rows: {check.name}") for check in (same, *report.checks)
    )
    return AuditReport(tuple(checks))
