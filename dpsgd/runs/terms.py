"""Terms of a run, which determine the privacy cost of its steps, and selections."""

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
from dpsgd.noise.registry import NOISES
from dpsgd.removed import removal_notice
from dpsgd.runs.drawing import own_code
from dpsgd.runs.records import checked, fields_of, near, stated, to_json
from samplers.registry import UnknownPart
from samplers.settings import SAMPLERS


@dataclass(frozen=True)
class Terms:
    """Terms that determine a run's privacy cost, and identify the run.

    Attributes:
      plan: Segment of all steps of the run.
      delta: Delta of the guarantee.
      config: Digest of the configuration, see `config_digest`.
      trained: Names of the trained parameters, if others are frozen.
    """

    plan: Segment
    delta: float
    config: str = ""
    trained: tuple[str, ...] = ()

    @property
    def mechanism(self) -> Mechanism:
        """Mechanism of the run: sampler, noise and clipping norm."""
        return self.plan.mechanism

    def record(self) -> dict[str, Any]:
        """Returns the terms as JSON values."""
        record = {**_segment_record(self.plan), **stated(self, _OF_TERMS)}
        if model := self.plan.initial:
            segments = segment_records(model.segments)
            record["initial"] = {"sha256": model.sha256, "name": model.name, "segments": segments}
        return record

    @classmethod
    def from_record(cls, body: Mapping[str, Any]) -> Terms:
        """Returns the terms in a record.

        Raises:
          ValueError: if a field is missing, refused or unknown: another version may count it.
        """
        _check_known(body, {*_OF_RECORD, *_OF_TERMS, "initial"})
        values, started = fields_of(cls, body, _OF_TERMS), dict[str, Any]()
        check_guarantee_delta(values["delta"])
        if body.get("initial") is not None:
            model = checked(body["initial"], dict[str, Any], "initial")
            segments = segments_from_records(model["segments"])
            _check_known(model, {"sha256", "name", "segments"})
            names = fields_of(Initial, model, ("sha256", "name"))
            started["initial"] = Initial(segments=segments, **names)
        return cls(_segment_from_record(body, **started), **values)


_OF_TERMS = ("delta", "config", "trained")
_OF_SEGMENT = ("unit", "lazy_tables", "not_covered", "rows", "reproducible_noise")
_OF_MECHANISM = ("noise_multiplier", "l2_clip_norm", "noise", "full_sums", "adjacency", "code")
_OF_RECORD = ("sampler", *_OF_MECHANISM, *_OF_SEGMENT)
_OF_LAW = ("mean_trials", "trials_shape")
_OF_SELECTION = ("settings", "score", "better", "request")


def _check_known(body: Mapping[str, Any], known: set[str]) -> None:
    """Raises ValueError for a field that is unknown: another version may count it."""
    for name in body:
        if name not in known:
            raise ValueError(f"{name} is unknown{near(name, known)}")


def _segment_record(segment: Segment) -> dict[str, Any]:
    """Returns a segment as JSON values, without steps and initial model."""
    return {**mechanism_record(segment.mechanism), **stated(segment, _OF_SEGMENT)}


def _segment_from_record(body: Mapping[str, Any], **more: Any) -> Segment:
    """Returns the segment in a record, with further fields from the caller."""
    return Segment(mechanism_from_record(body), **fields_of(Segment, body, _OF_SEGMENT), **more)


def mechanism_record(mechanism: Mechanism) -> dict[str, Any]:
    """Returns a mechanism's terms as JSON values.

    Its privacy cost follows from them, and from the code of an own sampler or noise.

    >>> from samplers import Poisson
    >>> mechanism = Mechanism(Poisson(1_000, batch_size=50), 1.0, l2_clip_norm=4.0)
    >>> mechanism_record(mechanism)["noise_multiplier"]
    1.0

    Raises:
      ValueError: If an own sampler has a term called `name`, which would hide its class.
    """
    sampler, clip, noise = mechanism.sampler, mechanism.l2_clip_norm, mechanism.noise
    sampler_name, terms = SAMPLERS.name_of(type(sampler)), sampler.terms()
    if "name" in terms:
        raise ValueError(
            f"the sampler {sampler_name} has a term or field called name, under which ledgers "
            "state its class: choose another name for it"
        )
    return to_json(
        {
            "sampler": {"name": sampler_name, **terms},
            "noise_multiplier": mechanism.noise_multiplier,
            "l2_clip_norm": clip if math.isfinite(clip) else None,
            "noise": noise.record(),
            "full_sums": mechanism.full_sums,
            "adjacency": ADJACENCY,
            **({"code": code} if (code := own_code(mechanism)) else {}),
        }
    )


def mechanism_from_record(body: Mapping[str, Any]) -> Mechanism:
    """Returns the mechanism in a `mechanism_record`.

    Its sampler has the recorded cost, but only the shape of a unit tree.
    """
    fields = dict(checked(body["sampler"], dict[str, Any], "sampler"))
    # Reading a ledger executes no code that the ledger names.
    sampler = SAMPLERS.find(checked(fields.pop("name"), str, "name")).from_terms(fields)
    if body["adjacency"] != ADJACENCY:
        raise ValueError("this version would account for it with another adjacency")
    noise = checked(body["noise"], dict[str, Any], "noise")
    if notice := removal_notice("noise", noise.get("name")):
        raise ValueError(f"{noise['name']} noise: {notice}")
    clip = checked(body["l2_clip_norm"], float | None, "l2_clip_norm")
    mechanism = Mechanism(
        sampler,
        l2_clip_norm=math.inf if clip is None else clip,
        noise=NOISES.read(noise, ("noise",)),
        **fields_of(Mechanism, body, ("noise_multiplier", "full_sums")),
    )
    for name, code in own_code(mechanism).items():
        if checked(body.get("code", {}), dict[str, str], "code").get(name) != code:
            raise UnknownPart(
                f"the file of the {name} changed after the run began, and its new code would "
                "price the steps of its old code: restore the file, or start a new run (the "
                "declared steps still count)"
            )
    return mechanism


def segment_records(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """Returns the segments of a run as JSON values.

    Another run can compute the cost of both from them. The list is empty if it cannot: for
    selections, runs that started from a trained model, and samplers or noises from outside this
    package.
    """
    records = []
    for segment in parts:
        if not isinstance(segment, Segment) or segment.initial is not None:
            return []
        steps = [segment.steps.start, segment.steps.stop]
        records.append({**_segment_record(segment), "steps": steps})
        if own_code(segment.mechanism):
            return []
    return records


def segments_from_records(records: Any) -> tuple[Segment, ...]:
    """Returns the segments in `segment_records`.

    Raises:
      ValueError: if a record is damaged, or has a field that this version does not know.
    """
    segments = []
    for body in checked(records, list[dict[str, Any]], "segments"):
        _check_known(body, {*_OF_RECORD, "steps"})
        steps = range(*checked(body["steps"], tuple[int, int], "steps"))
        segments.append(_segment_from_record(body, steps=steps))
    return tuple(segments)


@dataclass(frozen=True)
class Selection:
    """The best of a random number of trials, each a run of one candidate.

    The first line of its ledger declares it before anything is drawn. The cost of one trial is
    never a guarantee.

    Attributes:
      count: Law of the number of trials, which stays secret.
      candidates: Terms of the possible trials, each equally likely.
      settings: Configuration of each candidate's trials, as JSON values.
      score: Metric that determines the best trial.
      better: Direction of better scores.
      request: Digests of task, candidates and data, as JSON values; they tell nothing of private
        data.
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
            raise ValueError("settings and candidates must be equally many")
        if len({(terms.delta, terms.plan.unit) for terms in self.candidates}) > 1:
            raise ValueError("candidates must have the same delta and the same protected unit")

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
        """Returns a public summary of the selection, as JSON values."""
        return {
            "mean_trials": self.count.mean,
            "trials_shape": self.count.shape,
            "score": self.score,
            "better": self.better,
            "candidates": len(self.candidates),
        }

    @classmethod
    def from_record(cls, record: Any) -> Selection:
        """Returns the selection in a record made by `record`."""
        body = checked(record, dict[str, Any], "selection")
        _check_known(body, {*_OF_LAW, "candidates", *_OF_SELECTION})
        law = (checked(body[name], float, name) for name in _OF_LAW)
        candidates = checked(body["candidates"], list[dict[str, Any]], "candidates")
        return cls(
            TrialCount(*law),
            tuple(map(Terms.from_record, candidates)),
            **fields_of(cls, body, _OF_SELECTION),
        )

    @property
    def delta(self) -> float:
        """The delta at which the guarantee is given."""
        return self.candidates[0].delta

    def trials(self, released: Terms | None = None) -> Trials:
        """Returns the declared trials and the released model, for accounting."""
        candidates = tuple(terms.plan for terms in self.candidates)
        return Trials(self.count, candidates, self.score, released.plan if released else None)


def is_trial_of(candidate: Terms, terms: Terms) -> bool:
    """Returns True if a run was trained as declared.

    Args:
      candidate: Declared terms.
      terms: Terms of the run, which also name its trained parameters.
    """
    return dataclasses.replace(terms, trained=()) == candidate
