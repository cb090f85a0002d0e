"""`dpsgd audit`: evidence against a claim: the program, the draws, or outputs of whole runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from accounting import epsilon
from accounting.profile import format_delta
from dpsgd.audit.audit import audit_queries
from dpsgd.audit.black_box import BlackBoxReport, black_box_audit
from dpsgd.audit.report import AuditReport
from dpsgd.runs.audit import ROWS, audit_synthetic
from dpsgd.runs.optimizer import algorithm_of, hyperparameters, with_hyperparameters
from dpsgd.runs.recommendation import Settings
from dpsgd.runs.resolve import ResolvedRun, resolved, with_noise
from dpsgd.runs.spec import Lazy
from dpsgd.runs.task import Trainable, refinement_of
from experiments.cli.console import Console
from experiments.cli.questions.audit import Audit
from experiments.tasks.clicks.schema import DISPLAY_ADS
from experiments.tasks.clicks.sizes import preset_for
from experiments.tasks.clicks.task import ClickModels, Clicks
from samplers import BatchSampler
from samplers.settings import SETTINGS

Progress = Callable[[str], None]


def audit(asked: Audit) -> int:
    """Audits a run; the status is 1 if a violation was found."""
    population = asked.population(drawn=True)
    with Console() as console:
        console.progress("starting")
        task = _probed_task(asked)
        found = resolved(with_noise(asked.spec, task, population)[0], population)
        claimed = _claimed(asked, found)
        if not asked.black_box:
            report = coupled(task, found, claimed, console.progress)
            for line in report.lines():
                console.line(line)
            return 0 if report.passed else 1
        bound = black_box(found, claimed, trials=asked.trials, progress=console.progress)
        from experiments.figures import black_box as figure  # the other audit needs no matplotlib
        from experiments.figures.drawing import save

        assert asked.plot is not None, "it has a default"
        save(figure.draw(bound), asked.plot)
        for line in (*bound.lines(), f"plot: {asked.plot}"):
            console.line(line)
        return 1 if bound.violation else 0


def _probed_task(asked: Audit) -> Trainable:
    """Returns the task to audit; without a store, clicks have the columns of Criteo Display Ads."""
    if not asked.lacks_data:
        return asked.subject
    if asked.task != "clicks":
        raise ValueError(f"--data is missing: the task {asked.task} needs it")
    settings = {**asked.settings, "data": Path()}
    network = settings["embedding_dim"] is not None or settings["hidden"] is not None
    settings["model"] = settings["model"] or preset_for(asked.num_examples, network=network)
    return ClickModels(Clicks(**settings).sizes, DISPLAY_ADS, 0)


def _claimed(asked: Audit, run: ResolvedRun) -> BatchSampler | None:
    """Returns the sampler whose guarantee is claimed; None for the run's own."""
    if asked.claim is None:
        return None
    kind, drawn = SETTINGS[asked.claim], run.spec.sampler
    both = {f.name for f in fields(kind)} & {f.name for f in fields(drawn)}
    both -= {"max_batch_size", "overflow"}  # chosen anew
    sampler = kind(**{name: getattr(drawn, name) for name in both})
    asked = replace(asked, spec=replace(asked.spec, sampler=sampler))
    return sampler.build(asked.population(drawn=True), run.delta)


def coupled(
    task: Trainable,
    run: ResolvedRun,
    claimed: BatchSampler | None = None,
    progress: Progress = lambda line: None,
) -> AuditReport:
    """Audits the compiled program that trains a task by Adam, and its draws.

    Args:
      task: Task whose step is audited, on generated rows.
      run: Resolved run of the task.
      claimed: Sampler whose guarantee is claimed. Default: the run's own.
      progress: Called with a line on the current check.
    """
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
    how: Any = {"claimed": claimed, "laws": True}
    found = audit_synthetic(algorithm, mechanism, state, None, task.generated, **how)
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

    Args:
      run: Resolved run of a dense model.
      claimed: Sampler whose guarantee is claimed. Default: the run's own.
      trials: Number of runs in each of the two worlds.
      progress: Called with a line on the current work.

    Raises:
      ValueError: If there is too little noise for any finite claim, or too few trials.
    """
    mechanism, delta = run.mechanism, run.delta
    progress("accounting for the claim")
    claim = epsilon((claimed or mechanism.sampler).privacy(mechanism.noise_multiplier), delta)
    if math.isinf(claim.upper):
        raise ValueError(
            f"no finite epsilon is claimed at delta {format_delta(delta)}; raise "
            "--noise-multiplier or --target-delta"
        )
    return black_box_audit(mechanism, claim, delta=delta, trials=trials, progress=progress)
