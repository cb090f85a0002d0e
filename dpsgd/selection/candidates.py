"""Candidates of a private selection, and the noise for its target."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

from accounting import PrivacyProfile, TrialCount
from dpsgd.core.cost import cost
from dpsgd.core.noise import Noise
from dpsgd.noise.registry import NOISES
from dpsgd.runs.job import Job, rows_of
from dpsgd.runs.mechanism import ResolvedRun, privacy_with, resolved
from dpsgd.runs.records import to_json
from dpsgd.runs.resolve import choose, request_of
from dpsgd.runs.spec import (
    REGISTRIES,
    NoiseMultiplier,
    NonPrivate,
    RunSpec,
    TargetEpsilon,
    config_digest,
)
from dpsgd.runs.support import check
from dpsgd.runs.task import Task, check_task, data_digest, settled, task_record
from dpsgd.runs.terms import Selection, Terms
from dpsgd.selection import noise
from dpsgd.selection.vault import VaultSecret
from samplers import BatchSampler
from samplers.registry import import_named

_SHARE = 0.7
"""Approximate share of the selection's epsilon in one trial, at ten trials on average."""


@dataclass(frozen=True)
class Candidates:
    """Task, candidate runs and score of a private selection, see `dpsgd.select`.

    Attributes:
      task: Task to train.
      name: Name of the task.
      specs: Candidate runs of a trial.
      score: Name of the metric that chooses the best trial.
      better: Direction of the better score.
      count: Law of the number of trials.

    Raises:
      ValueError: For a task or candidates that a selection cannot use.
    """

    task: Task
    name: str | None
    specs: tuple[RunSpec, ...]
    score: str
    better: Literal["higher", "lower"]
    count: TrialCount

    def __post_init__(self) -> None:
        check_task(self.task, self.name or "the task")
        if self.score.startswith("train"):
            raise ValueError(
                f"score {self.score!r} is measured on protected rows, and the guarantee of a "
                "selection does not cover a choice by it; choose a metric on validation rows"
            )
        if not self.specs:
            raise ValueError("a selection needs at least one candidate")
        for spec in self.specs:
            check(spec)
            if isinstance(spec.privacy, NonPrivate):
                raise ValueError(
                    "candidates must be private: give each noise_multiplier or target_epsilon"
                )
            if spec.insecure_seed is not None:
                raise ValueError("insecure_seed voids the guarantee of a selection; leave it out")
            if spec.init_from is not None:
                raise ValueError("init_from is not supported in a selection; leave it out")
            if getattr(spec.privacy, "optimistic", False):
                raise ValueError("optimistic noise may miss a selection's target; leave it out")
        if len({type(spec.privacy) for spec in self.specs}) > 1:
            raise ValueError("give all candidates noise_multiplier, or all target_epsilon")
        targets = {spec.privacy for spec in self.specs}
        if len(targets) > 1 and not isinstance(self.specs[0].privacy, NoiseMultiplier):
            raise ValueError(
                "target_epsilon holds for the whole selection: give all candidates the same"
            )
        if len({spec.delta for spec in self.specs}) > 1:
            raise ValueError(
                "target_delta holds for the whole selection: give all candidates the same"
            )
        request = request_of(self._trials[0], self.rows[1])
        task, _ = settled(self.task, request)  # one model for all trials
        object.__setattr__(self, "task", task)

    @cached_property
    def rows(self) -> tuple[Any, Any]:
        """Training rows, and their public population."""
        return rows_of(self.task)

    @cached_property
    def record(self) -> dict[str, Any]:
        """Record of the task."""
        return task_record(self.task, self.name)

    @cached_property
    def data(self) -> str:
        """Digest of the training rows, as secret as the rows."""
        return data_digest(self.task, *self.rows)

    def request(self, secret: VaultSecret | None = None) -> dict[str, Any]:
        """Returns digests of task, candidates and data.

        Args:
          secret: Secret that blinds the digest of the data; None for no blinding.
        """
        grid = json.dumps([spec.record() for spec in self.specs], sort_keys=True)
        return {
            "task": config_digest({"task": self.record}),
            "candidates": hashlib.sha256(grid.encode()).hexdigest(),
            "data": secret.blind(self.data) if secret else self.data,
        }

    def planned(self, request: Mapping[str, Any]) -> Selection:
        """Returns the selection with the noise of each candidate.

        It reads no values of rows.

        Args:
          request: Digests of the selection, see `request`; empty to price it alone.

        Raises:
          ValueError: If no finite epsilon is certified.
        """
        terms, settings = [], []
        for spec in self._with_noise():
            job, record = self._job(spec), spec.record()
            digest = config_digest({"task": self.record, **record})
            terms.append(Terms(job.plan, job.delta, digest))
            settings.append(to_json(record))
        score = self.score, self.better
        selection = Selection(self.count, tuple(terms), tuple(settings), *score, request)
        epsilon = cost([selection.trials()], terms[0].delta).epsilon
        if epsilon is None or math.isinf(epsilon.upper):
            raise ValueError("no finite epsilon is certified for this selection: raise its noise")
        return selection

    def check_programs(self) -> None:
        """Compiles every candidate, and scores untrained parameters.

        Raises:
          ValueError: If a loss, its parameters or the name of the score is refused.
        """
        scores: dict[str, Any] = {}
        for spec, _, _ in self._chosen:
            job = self._job(dataclasses.replace(spec, privacy=NoiseMultiplier(1.0)))
            job.programs()
            scores = scores or dict(self.task.metrics(job.params))
            if self.score not in scores:
                listed = ", ".join(scores)
                raise ValueError(
                    f"score {self.score!r} is not a metric of the task; choose one of {listed}"
                )

    def rehearse(self, selection: Selection, progress: Callable[[str], None]) -> None:
        """Audits every candidate as declared.

        Args:
          selection: Declared selection.
          progress: Function of one line of text, called for each candidate.
        """
        for number, terms in enumerate(selection.candidates, 1):
            progress(f"auditing candidate {number} of {len(selection.candidates)}")
            spec = spec_of_trial(selection, number - 1)
            job = self._job(spec)
            if (job.plan, job.delta) != (terms.plan, terms.delta):
                raise ValueError(f"candidate {number} would train differently than declared")
            job.audit()

    def _job(self, spec: RunSpec) -> Job:
        """Returns a trial's job."""
        return Job.of_task(self.task, resolved(spec, self.rows[1]), rows=self.rows)

    @cached_property
    def _chosen(self) -> list[ResolvedRun]:
        """Candidates with all choices made except the size of their noise."""
        return [choose(spec, self.task, self.rows) for spec in self._trials]

    def _with_noise(self) -> list[RunSpec]:
        """Returns the candidates with all choices made, and noise that meets the target."""
        population, goal = self.rows[1], self.specs[0].privacy
        specs, mechanisms, _ = zip(*self._chosen, strict=True)
        if isinstance(goal, NoiseMultiplier):
            return list(specs)
        # Candidates that differ only in settings without privacy cost need the same noise.
        kinds = [
            (run.sampler, _cost_class(run.noise, run.sampler), spec.calibration)
            for run, spec in zip(mechanisms, specs, strict=True)
        ]
        unique = dict(zip(kinds, specs, strict=True))
        # A run's sums after training depend on its noise: search with sums for a similar noise,
        # then raise the noise until the final mechanisms suffice.
        unique_mechanisms = dict(zip(kinds, mechanisms, strict=True)).values()
        privacies = [partial(privacy_with, mechanism) for mechanism in unique_mechanisms]

        def noised(spec: RunSpec, sigma: float) -> RunSpec:
            return dataclasses.replace(spec, privacy=NoiseMultiplier(sigma))

        def profiles(sigmas: list[float]) -> list[PrivacyProfile]:
            pairs = zip(unique.values(), sigmas, strict=True)
            return [
                resolved(noised(spec, sigma), population).mechanism.privacy()
                for spec, sigma in pairs
            ]

        assert isinstance(goal, TargetEpsilon), "no candidate is without privacy"
        sigmas = noise.for_epsilon(
            privacies, self.count, epsilon=goal.epsilon, delta=specs[0].delta, profiles=profiles
        )
        sigma_of = dict(zip(unique, sigmas, strict=True))
        return [noised(spec, sigma_of[kind]) for spec, kind in zip(specs, kinds, strict=True)]

    @cached_property
    def _trials(self) -> tuple[RunSpec, ...]:
        """Candidates with a trial's approximate share of epsilon, for choices before the noise."""
        goal, population = self.specs[0].privacy, self.rows[1]
        share = TargetEpsilon(_SHARE * goal.epsilon) if isinstance(goal, TargetEpsilon) else None
        return tuple(
            dataclasses.replace(
                spec, privacy=share or spec.privacy, delta=spec.delta_of(population)
            )
            for spec in self.specs
        )


def spec_of_trial(selection: Selection, number: int) -> RunSpec:
    """Returns the settings of a declared candidate's trials.

    Args:
      selection: Declared selection.
      number: Index of the candidate, from 0.
    """
    record = dict(selection.settings[number])
    import_named(record, REGISTRIES, "the ledger")
    return RunSpec.from_record(record, "the ledger")


def _cost_class(law: Noise, sampler: BatchSampler) -> bool | Noise:
    """Returns the part of a noise law that its cost depends on; an own noise may price itself."""
    return law if NOISES.is_own(law) or law.bands > sampler.separation else law.bands > 1
