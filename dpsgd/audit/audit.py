"""The audit, in seconds, before every run: the program is what is accounted for.

A guarantee is a theorem about a program: *each example moves a step's sum by at most C, the sum
gets noise N(0, (sigma C)^2) that key, step and place name, what follows is made of the noised sum
alone, and the sampler draws by the law that is claimed*. The audit calls the very executable that
trains, and `train_blocks` itself, on synthetic rows and under keys of its own. Its tests of
randomness are exact, each with a false-alarm probability of at most 1e-8. Defects that it looks
for, and what it cannot see: docs/explanation/sharp-edges.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dpsgd.audit.probe import Probe
from dpsgd.audit.report import AuditReport, CheckResult
from dpsgd.audit.runtime.blocks import block_checks
from dpsgd.audit.runtime.deferred import deferred_checks
from dpsgd.audit.runtime.flow import flow_checks
from dpsgd.audit.runtime.noise import noise_checks
from dpsgd.audit.runtime.sums import sum_checks
from dpsgd.audit.samplers.checks import sampler_checks
from dpsgd.core.algorithm import Algorithm
from dpsgd.core.mechanism import Mechanism
from dpsgd.core.noise import Independent
from dpsgd.core.state import TrainState
from dpsgd.engine.feed import Layout
from dpsgd.engine.placement import Placement
from dpsgd.engine.queries import Refinement, sums_run
from dpsgd.noise.keys import RootKey
from samplers import BatchSampler, FullBatch

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
    draws: Callable[..., Sequence[CheckResult]] = sampler_checks,
) -> AuditReport:
    """Audits the program of `algorithm`, as it runs under `mechanism`, and its sampler.

    Args:
      algorithm: Of the run.
      mechanism: Of the run: sampler, sigma and C.
      params: Where the run begins.
      rows: Synthetic examples, [rows, ...] each leaf; a few of the first are used.
      state: With which the run resumes, if it does not begin: parameters, optimizer state and step.
      layout: Of the run's blocks; by default what `train_blocks` chooses.
      claimed: Sampler whose guarantee is claimed for the run; by default the mechanism's own.
      root: Source of the audit's randomness, by default fresh entropy. Never the run's own: two
        releases under one noise, as this audit makes them, have a noise-free difference.
      draws: As `sampler_checks`, which audits the sampler.

    Raises:
      ValueError: if the mechanism has no noise, or there are no rows.
    """
    root = root or RootKey.from_entropy()
    state = state or algorithm.init(params, mechanism, rows)
    probe = Probe(algorithm, mechanism, state, rows, layout=layout, root=root)
    checks = sum_checks(probe) + noise_checks(probe) + block_checks(probe) + deferred_checks(probe)
    checks += flow_checks(algorithm, mechanism, state, probe.columns, probe.layout)
    sampler = mechanism.sampler
    seed, bands = root.sampling_seed(0), mechanism.noise.bands
    checks += draws(sampler, claimed or sampler, seed=seed, bands=bands)
    return AuditReport(tuple(checks))


def audit_definition(
    algorithm: Algorithm, mechanism: Mechanism, state: TrainState, rows: PyTree
) -> AuditReport:
    """Compares releases of the compiled step with the definition of DP-SGD, in float64.

    It takes seconds more than `audit_program`, and is made on request (`dpsgd audit`).

    Args:
      algorithm: Of the run.
      mechanism: Of the run: sampler, sigma and C.
      state: State in which the run begins.
      rows: Synthetic examples, as for `audit_program`.

    Raises:
      ValueError: if the mechanism has no noise, or there are no rows.
    """
    from dpsgd.audit.runtime.differential import step_check  # with scipy.signal

    probe = Probe(algorithm, mechanism, state, rows, root=RootKey.from_entropy())
    return AuditReport((step_check(probe),))


def audit_queries(
    refinement: Refinement,
    mechanism: Mechanism,
    params: PyTree,
    rows: PyTree,
    *,
    placement: Placement | None = None,
    root: RootKey | None = None,
) -> AuditReport:
    """Audits the program that releases sums over all rows after a run, as `refine` calls it.

    Args:
      refinement: What is summed.
      mechanism: Of the run, with `full_sums`.
      params: Parameters of the run, such as its first: the program does not depend on them.
      rows: Synthetic examples, as for the audit of the run.
      placement: Of the run: which devices compute; by default one.
      root: As for `audit_program`.

    Raises:
      ValueError: if there are no sums, or a row could see others.
    """
    sums = mechanism.full_sums
    run = sums_run(refinement, mechanism.sums_mechanism(), params, rows, placement)
    algorithm, released, state, read, _ = run
    assert sums is not None, "or sums_mechanism had refused"
    # Of what is priced, whatever the run of the sums says of itself.
    sampler = FullBatch(mechanism.sampler.num_examples, sums.count)
    noise = released.noise if released.noise.bands == 1 else Independent()
    priced = Mechanism(sampler, sums.noise_multiplier, sums.l2_clip_norm, noise)
    found = audit_program(
        algorithm, priced, state.params, read, state=state, layout=run.layout, root=root
    )
    same = CheckResult("they are released as they are priced", released == priced, str(sums))
    checks = (
        check._replace(name=f"sums over all rows: {check.name}") for check in (same, *found.checks)
    )
    return AuditReport(tuple(checks))
