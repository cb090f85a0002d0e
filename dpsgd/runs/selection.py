"""A private selection as its ledger declares it: the best of a random number of trials.

Its first line declares, before anything is drawn, the law of the number of trials and every
candidate; its attempt is that of the released model. One trial's cost is never a guarantee.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from accounting import TrialCount
from dpsgd.core.segments import Trials
from dpsgd.runs.records import checked
from dpsgd.runs.terms import Terms


@dataclass(frozen=True)
class Selection:
    """The best of a random number of trials, each of them one of the candidates.

    Attributes:
      count: The law of the number of trials, which stays secret.
      candidates: What a trial may be, each equally likely; their fingerprints hold the digest of
        the "config" that a trial of it has.
      score: The metric by which the best is chosen.
      better: Which of its values are better.
      fingerprint: What else it was begun with, as JSON values; it tells nothing of private data.
    """

    count: TrialCount
    candidates: tuple[Terms, ...]
    score: str
    better: Literal["higher", "lower"]
    fingerprint: Mapping[str, Any]

    def __post_init__(self) -> None:
        if not self.candidates:
            raise ValueError("a selection needs at least one candidate")
        if len({(terms.delta, terms.unit) for terms in self.candidates}) > 1:
            raise ValueError("candidates must have one delta, and protect one unit")

    def record(self) -> dict[str, Any]:
        """Returns the selection as JSON values."""
        return {
            **self.summary(),
            "fingerprint": dict(self.fingerprint),
            "candidates": [terms.record() for terms in self.candidates],
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
        """Returns the selection that `record` recorded.

        Raises:
          ValueError, LookupError, TypeError: if it is no such record.
        """
        fields = checked(record, dict[str, Any], "selection")
        return cls(
            TrialCount(
                checked(fields["mean_trials"], float, "mean_trials"),
                checked(fields["trials_shape"], float, "trials_shape"),
            ),
            tuple(map(Terms.from_record, checked(fields["candidates"], list[Any], "candidates"))),
            checked(fields["score"], str, "score"),
            checked(fields["better"], Literal["higher", "lower"], "better"),
            checked(fields["fingerprint"], dict[str, Any], "fingerprint"),
        )

    def check_released(self, terms: Terms) -> None:
        """Raises ValueError unless a model of these terms is one of the candidates."""
        for candidate in self.candidates:
            ours = dataclasses.replace(candidate, fingerprint={})
            same = ours == dataclasses.replace(terms, fingerprint={})
            if same and candidate.fingerprint["config"] == terms.fingerprint["config"]:
                return
        raise ValueError("what was released is none of the candidates that were declared")

    @property
    def delta(self) -> float:
        """The delta at which the guarantee is given."""
        return self.candidates[0].delta

    def trials(self, released: Terms | None = None) -> Trials:
        """Returns what was declared, as it is accounted for.

        Args:
          released: The terms of the model that was released, if one was.
        """
        candidates = tuple(terms.segment() for terms in self.candidates)
        shown = released.segment() if released else None
        return Trials(self.count, candidates, self.score, shown)
