"""A private selection as its ledger declares it: the best of a random number of trials, no more.

A ledger that begins with a selection is that of one released model. Its first line declares, before
anything is drawn, the law of the number K of trials and every candidate that a trial may be; its
generation is that of the model that was released, as if it were a run. Its privacy cost is that of
the whole (`accounting.SelectionProfile`): that of one trial is never a guarantee, since the model
was chosen. Whether something was released already makes no difference to the cost.

A trial has the profile of its candidate, and each candidate's lies below the envelope of all
(`accounting.EnvelopeProfile`), which is what the selection's theorem is asked with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from accounting import (
    Bound,
    EnvelopeProfile,
    SelectionProfile,
    TrialCount,
    attack_advantage,
    epsilon,
)
from dpsgd.core.mechanism import Mechanism
from dpsgd.noise.registry import noise_record
from dpsgd.runs.records import checked
from dpsgd.runs.terms import Terms
from dpsgd.training.guarantee import ADJACENCY, Guarantee, notes_on


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

    @property
    def profile(self) -> SelectionProfile:
        """The privacy profile of the whole."""
        return SelectionProfile(
            EnvelopeProfile(tuple(kind.privacy() for kind in self._kinds)), self.count
        )

    @property
    def key(self) -> Hashable:
        """All that the guarantee depends on."""
        terms = (
            (t.mechanism, t.delta, t.unit, t.reproducible_noise, t.lazy_tables)
            for t in self.candidates
        )
        return self.count, self.score, *terms

    def check_released(self, terms: Terms) -> None:
        """Raises ValueError unless a model of these terms is one of the candidates."""
        for candidate in self.candidates:
            ours = dataclasses.replace(candidate, fingerprint={})
            same = ours == dataclasses.replace(terms, fingerprint={})
            if same and candidate.fingerprint["config"] == terms.fingerprint["config"]:
                return
        raise ValueError("what was released is none of the candidates that were declared")

    def guarantee(self, released: Terms | None = None) -> Guarantee:
        """Returns the guarantee of whatever is released: that of the whole.

        Args:
          released: The terms of the model that was; by default those of the first candidate stand
            for them.
        """
        terms = released or self.candidates[0]
        void, interval, distance = self._void(), None, Bound(0.0, 1.0)
        notes: tuple[str, ...] = ()
        if not void:
            # Of a score that is not known, nothing is proved from below.
            whole = epsilon(self.profile, terms.delta)
            trials = [part for one in self._kinds for part in one.parts(terms.delta)]
            interval = Bound(0.0, whole.covering(trials).upper)
            distance = Bound(0.0, attack_advantage(self.profile).upper)
            notes = (
                f"this is the privacy cost of the whole selection: {self.sentence()}; one trial "
                "would cost less, and this model is not one trial: it was chosen. The noise "
                "multiplier and the clipping norm are those of its trial. No lower end is computed",
                *dict.fromkeys(
                    f"of one trial: {note}"
                    for one in self._kinds
                    for note in notes_on(one, terms.delta, interval)
                ),
            )
        guarantee = Guarantee(
            epsilon=interval,
            delta=terms.delta,
            unit=terms.unit,
            adjacency=ADJACENCY,
            noise_multiplier=terms.mechanism.noise_multiplier,
            l2_clip_norm=terms.mechanism.l2_clip_norm,
            secure_noise=all(one.noise.exact for one in self._kinds),
            noise=noise_record(terms.mechanism.noise),
            full_sums=terms.mechanism.full_sums,
            scope="the best of a secret number of trials",
            void=void,
            notes=notes,
            total_variation=distance,
            left_out=(
                "how long the selection took, and what else its machine shows of it (processes, "
                "disk use, numbers of files), which tells of the number of trials: that number "
                "must stay secret",
                f"the rows of {self.score}, by which the best trial was chosen: they are not "
                "protected",
                "whatever lay in the folder of the selection before it was released",
            ),
        )
        return guarantee.with_lazy_tables() if terms.lazy_tables else guarantee

    def sentence(self) -> str:
        """Returns what is done, in words."""
        few = len(self.candidates)
        return (
            f"the best by {self.score} of a random number of trials (mean {self.count.mean:g}, "
            f"negative binomial of shape {self.count.shape:g}), each one of {few} "
            f"{'candidates' if few > 1 else 'candidate'} drawn at random"
        )

    @property
    def _kinds(self) -> list[Mechanism]:
        """The candidates' mechanisms that differ in more than the clipping norm."""
        mechanisms = (terms.mechanism for terms in self.candidates)
        return list(dict.fromkeys(dataclasses.replace(m, l2_clip_norm=1.0) for m in mechanisms))

    def _void(self) -> str:
        if any(terms.reproducible_noise for terms in self.candidates):
            return "reproducible noise: whoever guesses the seed can subtract it"
        if any(kind.noise_multiplier == 0 for kind in self._kinds):
            return "no noise was added"
        return ""
