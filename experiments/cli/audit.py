"""What `dpsgd audit` looks at: the program that trains, the draws, or the outputs of whole runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from accounting import epsilon
from accounting.profile import format_delta
from dpsgd.audit.audit import audit_definition, audit_queries
from dpsgd.audit.black_box import BlackBoxReport, black_box_audit
from dpsgd.audit.report import AuditReport
from dpsgd.runs.audit import ROWS, audit_synthetic, probe_rows
from dpsgd.runs.optimizer import algorithm_of, hyperparameters, with_hyperparameters
from dpsgd.runs.recommendation import Settings
from dpsgd.runs.resolve import ResolvedRun
from dpsgd.runs.spec import Lazy
from dpsgd.runs.task import Trainable, refinement_of
from samplers import BatchSampler

Progress = Callable[[str], None]


def coupled(
    task: Trainable,
    run: ResolvedRun,
    claimed: BatchSampler | None = None,
    progress: Progress = lambda line: None,
) -> AuditReport:
    """Audits the program that trains a task by Adam, as a run compiles it, and the draws."""
    mechanism, spec = run.mechanism, run.spec
    refinement = refinement_of(task, mechanism, spec.calibration)
    progress("compiling and running the program that trains")
    num_steps = mechanism.sampler.num_steps
    if isinstance(asked := spec.tables, Lazy):  # any step sizes: the program is the same
        tables = replace(asked, learning_rate=1.0, momentum=asked.momentum or 0.0)
        spec = replace(spec, tables=tables)
    algorithm = algorithm_of(task.loss, spec, num_steps)
    rows = task.generated(math.prod(mechanism.sampler.clipped_shape))
    state = algorithm.init(task.init(0), mechanism, rows)
    sizes = hyperparameters(Settings().learning_rate, num_steps)
    state = state._replace(opt_state=with_hyperparameters(state.opt_state, sizes))
    claimed = claimed or mechanism.sampler
    found = audit_synthetic(algorithm, mechanism, state, None, task.generated, claimed=claimed)
    progress("comparing releases with the definition of DP-SGD")
    defined = audit_definition(algorithm, mechanism, state, task.generated(probe_rows(mechanism)))
    found = AuditReport(found.checks + defined.checks)
    if refinement is None:
        return found
    sums = audit_queries(refinement, mechanism, state.params, task.generated(ROWS))
    return AuditReport(found.checks + sums.checks)


def black_box(
    run: ResolvedRun,
    claimed: BatchSampler | None = None,
    *,
    trials: int,
    progress: Progress = lambda line: None,
) -> BlackBoxReport:
    """Bounds epsilon from below by many runs of the sampler and the compiled step.

    Raises:
      ValueError: if there is too little noise for any finite claim, or too few trials.
    """
    mechanism, delta = run.mechanism, run.delta
    progress("accounting for the claim")
    claim = epsilon((claimed or mechanism.sampler).privacy(mechanism.noise_multiplier), delta)
    if math.isinf(claim.upper):
        raise ValueError(
            f"no finite epsilon is claimed at delta {format_delta(delta)}, so there is nothing to "
            "refute: raise --noise-multiplier or --target-delta"
        )
    return black_box_audit(mechanism, claim, delta=delta, trials=trials, progress=progress)
