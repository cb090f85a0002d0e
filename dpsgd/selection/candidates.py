"""What a selection is asked for: candidates on some data, and the noise that its target takes."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from accounting import PrivacyProfile, TrialCount
from dpsgd.core.cost import cost
from dpsgd.noise.base import Noise
from dpsgd.noise.keys import RootKey
from dpsgd.runs.job import Job, rows_of
from dpsgd.runs.records import to_json
from dpsgd.runs.resolve import (
    build_sampler,
    choose,
    full_sums,
    noise_of,
    privacy_with,
    request_of,
    resolved,
)
from dpsgd.runs.spec import (
    Lazy,
    NoiseMultiplier,
    NonPrivate,
    RunSpec,
    TargetEpsilon,
    config_digest,
)
from dpsgd.runs.support import check
from dpsgd.runs.task import Task, check_task, data_digest, exceptions_of, settled, task_record
from dpsgd.runs.terms import Selection, Terms
from dpsgd.selection import noise
from samplers import BatchSampler

_SHARE = 0.7
"""About the share of the selection's epsilon that a trial has, at ten trials on average."""


@dataclass(frozen=True)
class Candidates:
    """What a selection is asked for: see `dpsgd.select`.

    Attributes:
      task: What is trained.
      name: What it is called.
      specs: How a trial may be trained.
      score: By which the best is chosen.
      better: Which of its values are better.
      count: The law of the number of trials.

    Raises:
      ValueError: for a task or candidates that cannot be selected from.
    """

    task: Task
    name: str | None
    specs: tuple[RunSpec, ...]
    score: str
    better: Literal["higher", "lower"]
    count: TrialCount

    def __post_init__(self) -> None:
        check_task(self.task, self.name or "the task")
        if not self.specs:
            raise ValueError("a selection needs at least one candidate")
        for spec in self.specs:
            check(spec)
            if isinstance(spec.privacy, NonPrivate):
                raise ValueError("a candidate without privacy voids the guarantee of a selection")
            if spec.insecure_seed is not None:
                raise ValueError("insecure_seed voids the guarantee of a selection")
            if spec.init_from is not None:
                raise ValueError("init_from: a selection trains from fresh parameters alone")
            if getattr(spec.privacy, "optimistic", False):
                raise ValueError("optimistic noise need not keep the target of a selection")
        if len({type(spec.privacy) for spec in self.specs}) > 1:
            raise ValueError(
                "give noise_multiplier or target_epsilon: the same one to all candidates"
            )
        targets = {spec.privacy for spec in self.specs}
        if len(targets) > 1 and not isinstance(self.specs[0].privacy, NoiseMultiplier):
            raise ValueError("a target is that of the whole selection: give one for all")
        if len({spec.delta for spec in self.specs}) > 1:
            raise ValueError("target_delta is that of the whole selection: give one for all")
        if callable(check_data := getattr(self.task, "check", None)):
            check_data(None)
        about = dataclasses.replace(self.specs[0], privacy=self._about_a_trial())
        task, _ = settled(self.task, request_of(about, self.rows[1]))  # one model for all trials
        object.__setattr__(self, "task", task)

    @cached_property
    def rows(self) -> tuple[Any, Any]:
        """The training rows, and what is public of them."""
        return rows_of(self.task)

    @cached_property
    def record(self) -> dict[str, Any]:
        """What is recorded of the task."""
        return task_record(self.task, self.name)

    @cached_property
    def data(self) -> str:
        """What names the training rows: a secret, as they are."""
        return data_digest(self.task, *self.rows)

    def fingerprint(self, root: RootKey | None = None) -> dict[str, Any]:
        """Returns what must be unchanged where a selection resumes, blinded by `root`."""
        grid = json.dumps([spec.record() for spec in self.specs], sort_keys=True)
        return {
            "task": config_digest({"task": self.record}),
            "candidates": hashlib.sha256(grid.encode()).hexdigest(),
            "data": root.blind(self.data) if root else self.data,
        }

    def declared(self, root: RootKey) -> Selection:
        """Returns the selection as it is declared, with each candidate's noise."""
        population = self.rows[1]
        terms = []
        for spec in self._with_noise():
            run = resolved(spec, population)
            unit = run.mechanism.sampler.protected_unit(population)
            digest = config_digest({"task": self.record, **spec.record()})
            stated = {"config": digest, "settings": to_json(spec.record())}
            if isinstance(spec.tables, Lazy):
                stated["tables"] = "lazy"
            excepted = exceptions_of(self.task)
            terms.append(Terms(run.mechanism, run.delta, False, stated, unit, not_covered=excepted))
        fingerprint = self.fingerprint(root)
        selection = Selection(self.count, tuple(terms), self.score, self.better, fingerprint)
        epsilon = cost([selection.trials()], terms[0].delta).epsilon
        if epsilon is None or math.isinf(epsilon.upper):
            raise ValueError("no finite epsilon is certified for this selection: raise its noise")
        return selection

    def check_programs(self) -> None:
        """Compiles every candidate at some noise, and takes the score of untrained parameters.

        Raises:
          ValueError: if a loss, its parameters or the name of the score are refused.
        """
        scores: dict[str, Any] = {}
        for spec in self._chosen:
            sized = dataclasses.replace(spec, privacy=NoiseMultiplier(1.0))
            job = Job.of(self.task, resolved(sized, self.rows[1]), rows=self.rows)
            job.programs()
            scores = scores or dict(self.task.metrics(job.params))
            if self.score not in scores:
                known = ", ".join(scores)
                raise ValueError(f"there is no metric {self.score!r}; there are {known}")

    def rehearse(self, selection: Selection, progress: Callable[[str], None]) -> None:
        """Audits every candidate as it is declared."""
        for number, terms in enumerate(selection.candidates, 1):
            progress(f"auditing candidate {number} of {len(selection.candidates)}")
            run = resolved(spec_of_trial(terms), self.rows[1])
            job = Job.of(self.task, run, rows=self.rows)
            if (job.mechanism, job.delta, job.unit) != (terms.mechanism, terms.delta, terms.unit):
                raise ValueError(f"candidate {number} would not be trained as it is declared")
            job.audit()

    @cached_property
    def _chosen(self) -> list[RunSpec]:
        """The candidates with nothing left open but their noise, chosen for a trial's share."""
        about = self._about_a_trial()
        asked = self.specs
        if not isinstance(about, NoiseMultiplier):
            asked = tuple(dataclasses.replace(spec, privacy=about) for spec in asked)
        return [choose(spec, self.task, self.rows)[0] for spec in asked]

    def _with_noise(self) -> list[RunSpec]:
        """Returns the candidates with nothing left open, and noise at which the target is met."""
        population, goal = self.rows[1], self.specs[0].privacy
        if isinstance(goal, NoiseMultiplier):
            return self._chosen
        specs = self._chosen
        # Candidates that differ in what costs no privacy need the same noise.
        samplers = [build_sampler(spec, population) for spec in specs]
        kinds = [
            (sampler, _cost_class(noise_of(spec), sampler), spec.calibration)
            for sampler, spec in zip(samplers, specs, strict=True)
        ]
        unique = dict(zip(kinds, specs, strict=True))
        # What a run's sums after training are depends on its noise: they are found with those of
        # about as much, and the noise is then that with which the very mechanisms suffice.
        delta = specs[0].delta_of(population)
        privacies = [
            privacy_with(
                full_sums(spec, sampler, delta),
                sampler,
                noise_of(spec),
            )
            for (sampler, *_), spec in unique.items()
        ]

        def at(spec: RunSpec, sigma: float) -> RunSpec:
            return dataclasses.replace(spec, privacy=NoiseMultiplier(sigma))

        def profiles(sigmas: list[float]) -> list[PrivacyProfile]:
            pairs = zip(unique.values(), sigmas, strict=True)
            return [
                resolved(at(spec, sigma), population).mechanism.privacy() for spec, sigma in pairs
            ]

        assert isinstance(goal, TargetEpsilon), "no candidate is without privacy"
        sigmas = noise.for_epsilon(
            privacies, self.count, epsilon=goal.epsilon, delta=delta, profiles=profiles
        )
        found = dict(zip(unique, sigmas, strict=True))
        return [at(spec, found[kind]) for spec, kind in zip(specs, kinds, strict=True)]

    def _about_a_trial(self) -> Any:
        """Returns about what a trial may cost, by which what is left open is chosen."""
        goal = self.specs[0].privacy
        if isinstance(goal, TargetEpsilon):
            return TargetEpsilon(_SHARE * goal.epsilon)
        return goal


def spec_of_trial(terms: Terms) -> RunSpec:
    """Returns how the trials of a declared candidate are trained."""
    return RunSpec.from_record(terms.fingerprint["settings"], "the ledger", execute=True)


def _cost_class(law: Noise, sampler: BatchSampler) -> bool | Noise:
    """Returns what the cost of a noise law depends on: itself, where it reaches over epochs."""
    return law if law.bands > sampler.separation else law.bands > 1
