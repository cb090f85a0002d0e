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
from dpsgd.runs import calibration, correlation, tables
from dpsgd.runs.config import RunConfig, config_digest
from dpsgd.runs.job import Job, rows_of
from dpsgd.runs.records import plain
from dpsgd.runs.selection import Selection
from dpsgd.runs.task import Task, check_task, data_digest, task_record
from dpsgd.runs.terms import Terms
from dpsgd.selection import noise
from samplers import BatchSampler

_SHARE = 0.7
"""About the share of the selection's epsilon that a trial has, at ten trials on average."""

_NOISE = ("target_epsilon", "target_advantage", "noise_multiplier")


@dataclass(frozen=True)
class Candidates:
    """What a selection is asked for: see `dpsgd.select`.

    Attributes:
      task: What is trained.
      name: What it is called.
      configs: How a trial may be trained.
      score: By which the best is chosen.
      better: Which of its values are better.
      count: The law of the number of trials.

    Raises:
      ValueError: for a task or candidates that cannot be selected from.
    """

    task: Task
    name: str | None
    configs: tuple[RunConfig, ...]
    score: str
    better: Literal["higher", "lower"]
    count: TrialCount

    def __post_init__(self) -> None:
        check_task(self.task, self.name or "the task")
        if not self.configs:
            raise ValueError("a selection needs at least one candidate")
        for config in self.configs:
            config.check()
            if config.non_private:
                raise ValueError("a candidate without privacy voids the guarantee of a selection")
            if config.insecure_seed is not None:
                raise ValueError("insecure_seed voids the guarantee of a selection")
        for setting in _NOISE:
            if len({getattr(config, setting) is None for config in self.configs}) > 1:
                raise ValueError(f"either all candidates have {setting}, or none")
        for setting in (*_NOISE[:2], "target_delta"):
            if len({getattr(config, setting) for config in self.configs}) > 1:
                raise ValueError(f"{setting} is that of the whole selection: give one for all")
        if callable(check := getattr(self.task, "check", None)):
            check(None)

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
        columns, population = self.rows
        tree = population.tree
        return data_digest(self.task, columns, tree.shape.digest if tree else "")

    def fingerprint(self, root: RootKey | None = None) -> dict[str, Any]:
        """Returns what must be unchanged where a selection goes on, as JSON values.

        Args:
          root: By which the digest of the data is blinded, if it is.
        """
        grid = json.dumps([config.record() for config in self.configs], sort_keys=True)
        return {
            "task": config_digest({"task": self.record}),
            "candidates": hashlib.sha256(grid.encode()).hexdigest(),
            "data": root.blind(self.data) if root else self.data,
        }

    def declared(self, root: RootKey) -> Selection:
        """Returns the selection as it is declared, with each candidate's noise.

        Args:
          root: Of the selection.

        Raises:
          ValueError: if the noise cannot be had, or does not suffice.
        """
        population = self.rows[1]
        delta = self.configs[0].delta(population)
        terms = []
        for config in self._noised(delta):
            mechanism = config.mechanism(population)
            unit = mechanism.sampler.protected_unit(population)
            digest = config_digest({"task": self.record, **config.record()})
            stated = {"config": digest, "settings": plain(config.record())}
            if config.tables == "lazy":
                stated["tables"] = "lazy"
            terms.append(Terms(mechanism, delta, False, stated, unit))
        fingerprint = self.fingerprint(root)
        selection = Selection(self.count, tuple(terms), self.score, self.better, fingerprint)
        epsilon = cost([selection.trials()], delta).epsilon
        if epsilon is None or math.isinf(epsilon.upper):
            raise ValueError("no finite epsilon is certified for this selection: raise its noise")
        return selection

    def rehearse(self, selection: Selection, progress: Callable[[str], None]) -> None:
        """Audits every candidate, and asks for the score once, of parameters that are not trained.

        Raises:
          ValueError: if a candidate is not what its guarantee assumes, or there is no such score.
        """
        names: list[str] = []
        for number, terms in enumerate(selection.candidates, 1):
            progress(f"auditing candidate {number} of {len(selection.candidates)}")
            job = Job.of(self.task, config_of(terms), rows=self.rows)
            if (job.mechanism, job.delta, job.unit) != (terms.mechanism, terms.delta, terms.unit):
                raise ValueError(f"candidate {number} would not be trained as it is declared")
            job.audit(job.start(), lambda line: None)
            names = names or list(self.task.metrics(job.params))
        if self.score not in names:
            raise ValueError(f"there is no metric {self.score!r}; there are {', '.join(names)}")

    def _noised(self, delta: float) -> list[RunConfig]:
        """Returns the candidates with nothing left open, and noise at which the target is met."""
        population = self.rows[1]
        about = self._about_a_trial()
        configs = []
        for config in self.configs:
            chosen = tables.chosen(self.task, dataclasses.replace(config, **about), self.rows)[0]
            chosen = calibration.decided(self.task, chosen, population)
            configs.append(correlation.decided(self.task, chosen, population)[0])
        if self.configs[0].noise_multiplier is not None:
            return configs
        # Candidates that differ in what costs no privacy need the same noise.
        samplers = [config.build_sampler(population) for config in configs]
        kinds = [
            (sampler, _cost_class(config.noise(), sampler), config.calibration)
            for sampler, config in zip(samplers, configs, strict=True)
        ]
        unique = dict(zip(kinds, configs, strict=True))
        # What a run's sums after training are depends on its noise: they are found with those of
        # about as much, and the noise is then that with which the very mechanisms suffice.
        privacies = [
            calibration.privacy_with(
                config.full_sums(sampler, delta) if calibrated == "platt" else None,
                sampler,
                config.noise(),
            )
            for (sampler, _, calibrated), config in unique.items()
        ]

        def at(config: RunConfig, sigma: float) -> RunConfig:
            none: dict[str, Any] = dict.fromkeys(_NOISE)
            return dataclasses.replace(config, **{**none, "noise_multiplier": sigma})

        def profiles(sigmas: list[float]) -> list[PrivacyProfile]:
            pairs = zip(unique.values(), sigmas, strict=True)
            return [at(config, sigma).mechanism(population).privacy() for config, sigma in pairs]

        first = self.configs[0]
        if first.target_epsilon is not None:
            target = first.target_epsilon
            sigmas = noise.for_epsilon(
                privacies, self.count, epsilon=target, delta=delta, profiles=profiles
            )
        else:
            assert first.target_advantage is not None, "check() admits one of the three"
            target = first.target_advantage
            sigmas = noise.for_advantage(privacies, self.count, advantage=target, profiles=profiles)
        found = dict(zip(unique, sigmas, strict=True))
        return [at(config, found[kind]) for config, kind in zip(configs, kinds, strict=True)]

    def _about_a_trial(self) -> dict[str, Any]:
        """Returns about what a trial may cost, by which what is left open is chosen."""
        first = self.configs[0]
        if first.target_epsilon is not None:
            return {"target_epsilon": _SHARE * first.target_epsilon}
        if first.target_advantage is not None:
            return {"target_advantage": self.count.share(first.target_advantage)}
        return {}


def config_of(terms: Terms) -> RunConfig:
    """Returns the configuration of the trials of a declared candidate."""
    return RunConfig.from_record(terms.fingerprint["settings"], "the ledger", execute=True)


def _cost_class(law: Noise, sampler: BatchSampler) -> bool | Noise:
    """Returns what the cost of a noise law depends on: itself, where it reaches over epochs."""
    return law if law.bands > sampler.separation else law.bands > 1
