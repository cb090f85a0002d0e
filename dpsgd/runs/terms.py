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
from dpsgd.core.segments import Initial, Part, Segment, Trials
from dpsgd.noise.registry import noise_from_record
from dpsgd.removed import removal_notice
from dpsgd.runs.records import checked, fields_of, stated, to_json
from samplers.settings import kind_of, name_of


@dataclass(frozen=True)
class Terms:
    """Everything but the steps that the price of a run depends on, and what names it.

    Attributes:
      plan: All steps of the run, as they are accounted for.
      delta: The delta at which the guarantee is given.
      config: Digest of the configuration, see `config_digest`.
      trained: Names of the parameters that are trained, where others are frozen.
    """

    plan: Segment
    delta: float
    config: str = ""
    trained: tuple[str, ...] = ()

    @property
    def mechanism(self) -> Mechanism:
        """Sampler, sigma and C."""
        return self.plan.mechanism

    def record(self) -> dict[str, Any]:
        """Returns the terms as JSON values."""
        initial = {"initial": initial_record(found)} if (found := self.plan.initial) else {}
        return {**segment_record(self.plan), **stated(self, _OF_TERMS), **initial}

    @classmethod
    def from_record(cls, body: Mapping[str, Any]) -> Terms:
        """Returns the terms in a line of the ledger, as `record` gave them."""
        for name in body:
            if body[name] and (notice := removal_notice(name)):
                raise ValueError(f"{name}: {notice}")
        own, initial = fields_of(cls, body, _OF_TERMS), body.get("initial")
        check_guarantee_delta(own["delta"])
        started = {} if initial is None else {"initial": initial_from_record(initial)}
        return cls(segment_from_record(body, **started), **own)


_OF_TERMS = ("delta", "config", "trained")
_OF_SEGMENT = ("unit", "reproducible_noise", "lazy_tables", "not_covered", "rows")


def segment_record(segment: Segment) -> dict[str, Any]:
    """Returns a segment as JSON values, but for its steps and the model that the run started from.

    Fields that have their default are left out.
    """
    return {**mechanism_record(segment.mechanism), **stated(segment, _OF_SEGMENT)}


def segment_from_record(body: Mapping[str, Any], **more: Any) -> Segment:
    """Returns the segment in a record, as `segment_record` gave it, with `more` of its fields."""
    return Segment(mechanism_from_record(body), **fields_of(Segment, body, _OF_SEGMENT), **more)


def mechanism_record(mechanism: Mechanism) -> dict[str, Any]:
    """Returns the terms of a mechanism that its price depends on, as JSON values."""
    sampler, clip = mechanism.sampler, mechanism.l2_clip_norm
    return to_json(
        {
            "sampler": {"name": name_of(type(sampler)), **sampler.terms()},
            "noise_multiplier": mechanism.noise_multiplier,
            "l2_clip_norm": clip if math.isfinite(clip) else None,
            "noise": mechanism.noise.record(),
            "full_sums": mechanism.full_sums,
            "adjacency": ADJACENCY,
        }
    )


def mechanism_from_record(body: Mapping[str, Any]) -> Mechanism:
    """Returns the mechanism in a record, as `mechanism_record` gave it.

    The sampler has the price of the recorded one; it knows a tree by its shape alone.
    """
    fields = dict(checked(body["sampler"], dict[str, Any], "sampler"))
    # Whoever reads a ledger executes nothing that it names.
    sampler = kind_of(checked(fields.pop("name"), str, "name")).from_terms(fields)
    if "noise" not in body:
        raise ValueError("it is of an earlier version, which said otherwise what noise is")
    if body["adjacency"] != ADJACENCY:
        raise ValueError("this version would account for it with another adjacency")
    clip = checked(body["l2_clip_norm"], float | None, "l2_clip_norm")
    return Mechanism(
        sampler,
        l2_clip_norm=math.inf if clip is None else clip,
        noise=noise_from_record(checked(body["noise"], dict[str, Any], "noise")),
        **fields_of(Mechanism, body, ("noise_multiplier", "full_sums")),
    )


def segment_records(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """Returns the segments of a run as JSON values, by which another run can price both.

    The list is empty if no cost of both runs together could be computed from it: for selections,
    runs that started from a trained model, and samplers or noises from outside this package.
    """
    records = [
        {**segment_record(part), "steps": [part.steps.start, part.steps.stop]}
        for part in parts
        if isinstance(part, Segment) and part.initial is None
    ]
    foreign = any(":" in one["sampler"]["name"] or ":" in one["noise"]["name"] for one in records)
    return [] if foreign or len(records) < len(parts) else records


def segments_from_records(records: Any) -> tuple[Segment, ...]:
    """Returns the segments in records, as `segment_records` gave them.

    Raises:
      ValueError: if a record is damaged.
    """
    return tuple(
        segment_from_record(body, steps=range(*checked(body["steps"], tuple[int, int], "steps")))
        for body in checked(records, list[dict[str, Any]], "segments")
    )


def initial_record(initial: Initial) -> dict[str, Any]:
    """Returns the trained model that a run starts from as JSON values."""
    segments = segment_records(initial.segments)
    return {"sha256": initial.sha256, "name": initial.name, "segments": segments}


def initial_from_record(record: Any) -> Initial:
    """Returns the trained model in a record, as `initial_record` gave it."""
    body = checked(record, dict[str, Any], "initial")
    own = fields_of(Initial, body, ("sha256", "name"))
    return Initial(segments=segments_from_records(body["segments"]), **own)


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
        if len({(terms.delta, terms.plan.unit) for terms in self.candidates}) > 1:
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
        body = checked(record, dict[str, Any], "selection")
        law = (checked(body[name], float, name) for name in ("mean_trials", "trials_shape"))
        candidates = checked(body["candidates"], list[dict[str, Any]], "candidates")
        return cls(
            TrialCount(*law),
            tuple(map(Terms.from_record, candidates)),
            **fields_of(cls, body, ("settings", "score", "better", "request")),
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
        candidates = tuple(terms.plan for terms in self.candidates)
        return Trials(self.count, candidates, self.score, released.plan if released else None)


def is_trial_of(candidate: Terms, terms: Terms) -> bool:
    """Returns whether a run of these terms was trained as a candidate declares."""
    return dataclasses.replace(terms, trained=()) == candidate
