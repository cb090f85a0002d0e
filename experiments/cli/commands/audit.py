"""`dpsgd audit`: tests of a guarantee by the program, the draws or outputs of whole runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from accounting import epsilon
from accounting.profile import format_delta
from dpsgd.audit.audit import audit_program, audit_queries
from dpsgd.audit.black_box import BlackBoxReport, black_box_audit
from dpsgd.audit.report import AuditReport
from dpsgd.engine.queries import refinement_of
from dpsgd.noise.keys import RootKey
from dpsgd.runs.audit import ROWS, conformance, probe_rows
from dpsgd.runs.mechanism import ResolvedRun
from dpsgd.runs.optimizer import algorithm_of, hyperparameters, with_hyperparameters
from dpsgd.runs.recommendation import RecommendationRequest, Settings
from dpsgd.runs.resolve import resolve
from dpsgd.runs.task import Trainable, calibration_of, settled
from experiments.cli.console import Console
from experiments.cli.questions.audit import Audit
from experiments.cli.tasks import DEFAULT, load_kind
from samplers import BatchSampler
from samplers.settings import settings_of

Progress = Callable[[str], None]


def audit(question: Audit) -> int:
    """Audits a run; returns 1 if a violation was found."""
    population = question.population(drawn=True)
    with Console() as console:
        console.progress("starting")
        task = _probed_task(question)
        spec = question.spec.but(learning_rate=Settings().learning_rate)
        run = resolve(spec, task, (task.generated(1), population))
        claimed = _claimed(question, run)
        if not question.black_box:
            report = coupled(task, run, claimed, console.progress)
            for line in report.lines():
                console.line(line)
            return 0 if report.passed else 1
        bound = black_box(run, claimed, trials=question.trials, progress=console.progress)
        from experiments.figures import black_box as figure  # the other audit needs no matplotlib
        from experiments.figures.drawing import save

        assert question.plot is not None, "it has a default"
        save(figure.draw(bound), question.plot)
        for line in (*bound.lines(), f"plot: {question.plot}"):
            console.line(line)
        return 1 if bound.violation else 0


def _probed_task(question: Audit) -> Trainable:
    """Returns the task to audit; without a store, clicks have the columns of Criteo Display Ads."""
    if not question.lacks_data:
        return question.subject
    if question.task != DEFAULT:
        raise ValueError(f"--data is missing: the task {question.task} needs it")
    request = RecommendationRequest(question.num_examples, 1e-5, noise_multiplier=1.0)
    return settled(question.subject, request)[0]


def _claimed(question: Audit, run: ResolvedRun) -> BatchSampler | None:
    """Returns the sampler whose guarantee is claimed; None for the run's own."""
    if question.claim is None:
        return None
    kind = settings_of(load_kind("sampler", question.claim, "claim"))
    trained = run.spec.sampler
    shared = {f.name for f in fields(kind)} & {f.name for f in fields(trained)}
    shared -= {"max_batch_size", "overflow"}  # chosen anew
    sampler = kind(**{name: getattr(trained, name) for name in shared})
    question = replace(question, spec=replace(question.spec, sampler=sampler))
    return sampler.build(question.population(drawn=True), run.delta)


def coupled(
    task: Trainable,
    run: ResolvedRun,
    claimed: BatchSampler | None = None,
    progress: Progress = lambda line: None,
) -> AuditReport:
    """Audits the compiled training step and the sampler's draws.

    Args:
      task: Task whose step is audited, on generated rows.
      run: Resolved run of the task.
      claimed: Sampler whose guarantee is claimed. Default: the run's own.
      progress: Called with a line on the current check.
    """
    mechanism, spec = run.mechanism, run.spec
    refinement = refinement_of(calibration_of(task), mechanism, spec.calibration)
    progress("compiling and running the program that trains")
    num_steps = mechanism.sampler.num_steps
    algorithm = algorithm_of(task.loss, spec, num_steps)
    rows = task.generated(math.prod(mechanism.sampler.clipped_shape))
    state = algorithm.init(task.init(0), mechanism, rows)
    state = with_hyperparameters(state, hyperparameters(spec, num_steps))
    run_parts = algorithm, mechanism, state.params, task.generated(probe_rows(mechanism))
    claim: Any = {"claimed": claimed or mechanism.sampler, "laws": True, "delta": run.delta}
    checks = audit_program(*run_parts, state=state, root=RootKey.shared(), **claim).checks
    checks += conformance(spec, state.params, progress).checks
    if refinement is not None:
        checks += audit_queries(refinement, mechanism, state.params, task.generated(ROWS)).checks
    return AuditReport(checks)


def black_box(
    run: ResolvedRun,
    claimed: BatchSampler | None = None,
    *,
    trials: int,
    progress: Progress = lambda line: None,
) -> BlackBoxReport:
    """Returns a lower bound on epsilon from many training runs.

    Args:
      run: Resolved run of a dense model.
      claimed: Sampler whose guarantee is claimed. Default: the run's own.
      trials: Number of runs in each of the two worlds.
      progress: Called with a line on the current work.

    Raises:
      ValueError: If the claimed epsilon is infinite, or the trials are too few.
    """
    mechanism, delta = run.mechanism, run.delta
    progress("accounting for the claim")
    privacy = mechanism.noise.privacy(claimed or mechanism.sampler, mechanism.noise_multiplier)
    claim = epsilon(privacy, delta)
    if math.isinf(claim.upper):
        raise ValueError(
            f"no finite epsilon is claimed at delta {format_delta(delta)}; raise "
            "--noise-multiplier or --target-delta"
        )
    return black_box_audit(mechanism, claim, delta=delta, trials=trials, progress=progress)
