"""Terms of a run, on which the cost of its steps depends; and a private selection of runs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from accounting import TrialCount
from accounting.checks import check_guarantee_delta
from dpsgd.core.guarantee import ADJACENCY
from dpsgd.core.mechanism import Mechanism
from dpsgd.core.queries import FullSums
from dpsgd.core.segments import Initial, Part, Segment, Trials
from dpsgd.noise.registry import noise_from_record
from dpsgd.removed import removal_notice
from dpsgd.runs.records import build, checked, to_json
from samplers.settings import kind_of, name_of


@dataclass(frozen=True)
class Terms:
    """Everything but the steps that the price of a run depends on, and what names it.

    Attributes:
      mechanism: Sampler, sigma and C.
      delta: The delta at which the guarantee is given.
      reproducible_noise: Whether the noise came from a seed that can be guessed.
      config: Digest of the configuration, see `config_digest`.
      unit: What is protected, see `BatchSampler.protected_unit`; by default as where every row of
        the data is an example.
      lazy_tables: Whether noise of tables is deferred.
      trained: Names of the parameters that are trained, where others are frozen.
      initial: Trained model that the run started from; None for fresh parameters.
      not_covered: Sentences of the task about what its guarantee does not cover.
    """

    mechanism: Mechanism
    delta: float
    reproducible_noise: bool
    config: str = ""
    unit: str = ""
    lazy_tables: bool = False
    trained: tuple[str, ...] = ()
    initial: Initial | None = None
    not_covered: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "unit", self.unit or self.mechanism.sampler.unit)

    def segment(self, steps: range | None = None, rows: str = "") -> Segment:
        """Returns these steps, by default all, as they are accounted for."""
        how: dict[str, Any] = {} if steps is None else {"steps": steps}
        return Segment(
            self.mechanism,
            unit=self.unit,
            reproducible_noise=self.reproducible_noise,
            lazy_tables=self.lazy_tables,
            initial=self.initial,
            not_covered=self.not_covered,
            rows=rows,
            **how,
        )

    def record(self) -> dict[str, Any]:
        """Returns the terms as JSON values."""
        return to_json(
            {
                **mechanism_record(self.mechanism),
                "unit": self.unit,
                "delta": self.delta,
                "reproducible_noise": self.reproducible_noise,
                "config": self.config,
                **({"lazy_tables": True} if self.lazy_tables else {}),
                **({"trained": self.trained} if self.trained else {}),
                **({"initial": initial_record(self.initial)} if self.initial else {}),
                **({"not_covered": self.not_covered} if self.not_covered else {}),
            }
        )

    @classmethod
    def from_record(cls, body: Mapping[str, Any]) -> Terms:
        """Returns the terms in a line of the ledger, as `record` gave them."""

        def found(name: str, kind: Any) -> Any:
            return checked(body[name], kind, name)

        for name in body:
            if body[name] and (notice := removal_notice(name)):
                raise ValueError(f"{name}: {notice}")
        absent: dict[str, Any] = {"lazy_tables": False, "trained": [], "initial": None}
        body = {**absent, "not_covered": [], **body}
        initial = found("initial", dict[str, Any] | None)
        return cls(
            mechanism_from_record(body),
            check_guarantee_delta(found("delta", float)),
            found("reproducible_noise", bool),
            found("config", str),
            found("unit", str),
            found("lazy_tables", bool),
            tuple(found("trained", list[str])),
            None if initial is None else initial_from_record(initial),
            tuple(found("not_covered", list[str])),
        )


def mechanism_record(mechanism: Mechanism) -> dict[str, Any]:
    """Returns the terms of a mechanism that its price depends on, as JSON values."""
    sampler, clip = mechanism.sampler, mechanism.l2_clip_norm
    return {
        "sampler": {"name": name_of(type(sampler)), **sampler.terms()},
        "noise_multiplier": mechanism.noise_multiplier,
        "l2_clip_norm": clip if math.isfinite(clip) else None,
        "noise": mechanism.noise.record(),
        "full_sums": mechanism.full_sums,
        "adjacency": ADJACENCY,
    }


def mechanism_from_record(body: Mapping[str, Any]) -> Mechanism:
    """Returns the mechanism in a record, as `mechanism_record` gave it.

    The sampler has the price of the recorded one; it knows a tree by its shape alone.
    """

    def found(name: str, kind: Any) -> Any:
        return checked(body[name], kind, name)

    fields = dict(found("sampler", dict[str, Any]))
    # Whoever reads a ledger executes nothing that it names.
    sampler = kind_of(checked(fields.pop("name"), str, "name")).from_terms(fields)
    if "noise" not in body:
        raise ValueError("it is of an earlier version, which said otherwise what noise is")
    if body["adjacency"] != ADJACENCY:
        raise ValueError("this version would account for it with another adjacency")
    clip, sums = found("l2_clip_norm", float | None), found("full_sums", dict[str, Any] | None)
    return Mechanism(
        sampler,
        found("noise_multiplier", float),
        math.inf if clip is None else clip,
        noise_from_record(found("noise", dict[str, Any])),
        None if sums is None else build(FullSums, sums, "full_sums"),
    )


def segment_records(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """Returns the segments of a run as JSON values, by which another run can price both.

    The list is empty if no cost of both runs together could be computed from it: for selections,
    runs that started from a trained model, and samplers or noises from outside this package.
    """
    records = [
        {
            **mechanism_record(part.mechanism),
            "unit": part.unit,
            "reproducible_noise": part.reproducible_noise,
            "steps": [part.steps.start, part.steps.stop],
            **({"not_covered": part.not_covered} if part.not_covered else {}),
        }
        for part in parts
        if isinstance(part, Segment) and part.initial is None
    ]
    foreign = any(":" in one["sampler"]["name"] or ":" in one["noise"]["name"] for one in records)
    return [] if foreign or len(records) < len(parts) else to_json(records)


def segments_from_records(records: Sequence[Any]) -> tuple[Segment, ...]:
    """Returns the segments in records, as `segment_records` gave them.

    Raises:
      ValueError: if a record is damaged.
    """
    segments = []
    for record in records:
        body = checked(record, dict[str, Any], "segment")
        first, stop = checked(body["steps"], list[int], "steps")
        segment = Segment(
            mechanism_from_record(body),
            range(first, stop),
            checked(body["unit"], str, "unit"),
            checked(body["reproducible_noise"], bool, "reproducible_noise"),
            not_covered=tuple(checked(body.get("not_covered", []), list[str], "not_covered")),
        )
        segments.append(segment)
    return tuple(segments)


def initial_record(initial: Initial) -> dict[str, Any]:
    """Returns the trained model that a run starts from as JSON values."""
    segments = segment_records(initial.segments)
    return {"sha256": initial.sha256, "name": initial.name, "segments": segments}


def initial_from_record(record: Mapping[str, Any]) -> Initial:
    """Returns the trained model in a record, as `initial_record` gave it."""
    segments = segments_from_records(checked(record["segments"], list[Any], "segments"))
    sha256, name = (checked(record[key], str, key) for key in ("sha256", "name"))
    return Initial(sha256, segments, name)


@dataclass(frozen=True)
class Selection:
    """The best of a random number of trials, each of them one of the candidates.

    The first line of its ledger declares it before anything is drawn. One trial's cost is never a
    guarantee.

    Attributes:
      count: The law of the number of trials, which stays secret.
      candidates: What a trial may be, each equally likely.
      settings: Configuration of each candidate's trials, as JSON values.
      score: The metric by which the best is chosen.
      better: Which of its values are better.
      request: What else it was begun with, as JSON values; it tells nothing of private data.
    """

    count: TrialCount
    candidates: tuple[Terms, ...]
    settings: tuple[Mapping[str, Any], ...]
    score: str
    better: Literal["higher", "lower"]
    request: Mapping[str, Any]

    def __post_init__(self) -> None:
        if not self.candidates:
            raise ValueError("a selection needs at least one candidate")
        if len(self.settings) != len(self.candidates):
            raise ValueError("each candidate has settings of its own")
        if len({(terms.delta, terms.unit) for terms in self.candidates}) > 1:
            raise ValueError("candidates must have one delta, and protect one unit")

    def record(self) -> dict[str, Any]:
        """Returns the selection as JSON values."""
        candidates = [terms.record() for terms in self.candidates]
        return {
            **self.summary(),
            "request": dict(self.request),
            "candidates": candidates,
            "settings": to_json(self.settings),
        }

    def summary(self) -> dict[str, Any]:
        """Returns what a reader should know of it, as JSON values."""
        return {
            "mean_trials": self.count.mean,
            "trials_shape": self.count.shape,
            "score": self.score,
            "better": self.better,
            "candidates": len(self.candidates),
        }

    @classmethod
    def from_record(cls, record: Any) -> Selection:
        """Returns the selection that `record` recorded."""
        fields = checked(record, dict[str, Any], "selection")

        def found(name: str, kind: Any) -> Any:
            return checked(fields[name], kind, name)

        return cls(
            TrialCount(found("mean_trials", float), found("trials_shape", float)),
            tuple(map(Terms.from_record, found("candidates", list[Any]))),
            tuple(found("settings", list[dict[str, Any]])),
            found("score", str),
            found("better", Literal["higher", "lower"]),
            found("request", dict[str, Any]),
        )

    def check_released(self, terms: Terms) -> None:
        """Raises ValueError unless a model of these terms is one of the candidates."""
        if not any(is_trial_of(candidate, terms) for candidate in self.candidates):
            raise ValueError("what was released is none of the candidates that were declared")

    @property
    def delta(self) -> float:
        """The delta at which the guarantee is given."""
        return self.candidates[0].delta

    def trials(self, released: Terms | None = None) -> Trials:
        """Returns what was declared, and the model that was released, as they are accounted for."""
        candidates = tuple(terms.segment() for terms in self.candidates)
        shown = released.segment() if released else None
        return Trials(self.count, candidates, self.score, shown)


def is_trial_of(candidate: Terms, terms: Terms) -> bool:
    """Returns whether a run of these terms was trained as a candidate declares."""
    return dataclasses.replace(terms, trained=()) == candidate
