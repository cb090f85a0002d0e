"""The terms of an attempt: all but its steps that its privacy cost depends on."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from accounting import DataRelease, check_guarantee_delta
from dpsgd.core.guarantee import ADJACENCY
from dpsgd.core.mechanism import Mechanism
from dpsgd.core.queries import FullSums
from dpsgd.core.segments import Segment
from dpsgd.noise.registry import noise_from_record, noise_record
from dpsgd.runs.records import build, checked, to_json
from samplers.settings import kind_of, name_of


@dataclass(frozen=True)
class Terms:
    """Everything but the steps that the price of an attempt depends on, and what it ran on.

    Attributes:
      mechanism: Sampler, sigma and C.
      delta: The delta at which the guarantee is given.
      reproducible_noise: Whether the noise came from a seed that can be guessed.
      fingerprint: Whatever the numbers of a step depend on, as JSON values: releases are repeated
        only where all of it is unchanged. It must not tell anything about private data.
      unit: What is protected, see `BatchSampler.protected_unit`; by default as where every row of
        the data is an example.
      earlier: What is guaranteed to the rows of models that the run started from.
    """

    mechanism: Mechanism
    delta: float
    reproducible_noise: bool
    fingerprint: Mapping[str, Any]
    unit: str = ""
    earlier: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "unit", self.unit or self.mechanism.sampler.unit)

    @property
    def lazy_tables(self) -> bool:
        """Whether the noise of tables comes late."""
        return self.fingerprint.get("tables") == "lazy"

    def segment(self, steps: range | None = None) -> Segment:
        """Returns these steps, by default all, as they are accounted for."""
        how: dict[str, Any] = {} if steps is None else {"steps": steps}
        how |= {"reproducible_noise": self.reproducible_noise, "lazy_tables": self.lazy_tables}
        return Segment(self.mechanism, unit=self.unit, earlier=self.earlier, **how)

    def record(self) -> dict[str, Any]:
        """Returns the terms as JSON values."""
        mechanism = self.mechanism
        sampler, release = mechanism.sampler, mechanism.data_release
        finite = math.isfinite(mechanism.l2_clip_norm)
        record = {
            "sampler": {"name": name_of(type(sampler)), **sampler.terms()},
            "noise_multiplier": mechanism.noise_multiplier,
            "l2_clip_norm": mechanism.l2_clip_norm if finite else None,
            "noise": noise_record(mechanism.noise),
            "full_sums": to_json(mechanism.full_sums),
            "unit": self.unit,
            "adjacency": ADJACENCY,
            "delta": self.delta,
            "reproducible_noise": self.reproducible_noise,
            "fingerprint": dict(self.fingerprint),
            **({"earlier": list(self.earlier)} if self.earlier else {}),
            **({"data_release": to_json(release)} if release else {}),
        }
        return json.loads(json.dumps(record, allow_nan=False, default=_plain))  # as it is read back

    @classmethod
    def from_record(cls, body: Mapping[str, Any]) -> Terms:
        """Returns the terms in a line of the ledger, as `record` gave them.

        The sampler has the price of the one that was recorded; a tree it knows by its shape alone.
        """
        fields = dict(checked(body["sampler"], dict[str, Any], "sampler"))
        # Whoever reads a ledger executes nothing that it names.
        sampler = kind_of(checked(fields.pop("name"), str, "name")).from_terms(fields)
        if "noise" not in body:
            raise ValueError("it is of an earlier version, which said otherwise what noise is")
        if body["adjacency"] != ADJACENCY:
            raise ValueError("this version would account for it with another adjacency")
        clip = body["l2_clip_norm"]
        sums = checked(body["full_sums"], dict[str, Any] | None, "full_sums")
        release = checked(body.get("data_release"), dict[str, Any] | None, "data_release")
        return cls(
            Mechanism(
                sampler,
                checked(body["noise_multiplier"], float, "noise_multiplier"),
                math.inf if clip is None else checked(clip, float, "l2_clip_norm"),
                noise_from_record(checked(body["noise"], dict[str, Any], "noise")),
                None if sums is None else build(FullSums, sums, "full_sums"),
                None if release is None else build(DataRelease, release, "data_release"),
            ),
            check_guarantee_delta(checked(body["delta"], float, "delta")),
            checked(body["reproducible_noise"], bool, "reproducible_noise"),
            checked(body["fingerprint"], dict[str, Any], "fingerprint"),
            checked(body["unit"], str, "unit"),
            tuple(checked(body.get("earlier", []), list[str], "earlier")),
        )


def _plain(value: Any) -> Any:
    """Returns a number of NumPy's as Python's, which JSON knows."""
    if isinstance(value, np.generic):
        return value.item()
    raise ValueError(f"a ledger holds JSON values, and {value!r} is none")
