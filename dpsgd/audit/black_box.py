"""Bounds epsilon from below by the outputs of many complete runs.

Game, bound and scores: docs/explanation/black-box-audit.md.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from accounting import Bound
from accounting.checks import check_guarantee_delta
from accounting.profile import format_delta
from dpsgd.audit.trials import Runs, Scores
from dpsgd.core.mechanism import Mechanism
from dpsgd.engine.algorithm import Algorithm, dpsgd
from dpsgd.noise.keys import RootKey

GAMES = {"others -1": -1, "others 0": 0, "others +1": 1}
"""Gradient of every example except the canary, in units of C, by name of the game."""

CONFIDENCE = 0.99
_THRESHOLDS = 400

Play = Callable[[int, int], tuple[Scores, Scores]]
"""(gradient of all other examples in units of C, trials) -> scores of that many fresh runs with the
canary, and scores of equally many runs without it.
"""


class Event(NamedTuple):
    """Event {score >= threshold} if `present`, {score <= threshold} otherwise.

    Attributes:
      score: Name of the score.
      present: True if the event favours runs with the canary, False if runs without it.
      threshold: Threshold of the score.
    """

    score: str
    present: bool
    threshold: float

    def sides(self, present: Scores, absent: Scores) -> tuple[np.ndarray, np.ndarray, float]:
        """Returns scores and threshold of the event {score >= threshold}.

        Returns:
          float64[trials] of the world that the event favours, float64[trials] of the opposite
          world, and the threshold.
        """
        if self.present:
            return present[self.score], absent[self.score], self.threshold
        return -absent[self.score], -present[self.score], -self.threshold


class BlackBoxReport(NamedTuple):
    """Lower bound on epsilon, proved by the outputs of many runs.

    Attributes:
      epsilon_lower: Lower bound: no smaller epsilon holds at `delta`, with `confidence`.
      claim: Claimed interval; its upper end is the promised epsilon.
      delta: Probability delta of the bound and of the claim.
      confidence: Probability that `epsilon_lower` is a valid bound.
      trials: Number of counted runs in each world.
      event: Event that was counted.
      game: Name of the game in which the event was counted, a key of `GAMES`.
      true_positives: Number of runs with the event in the world that the event favours.
      false_positives: Number of runs with the event in the other world.
      present: Event's score in each counted run with the canary, float64[trials].
      absent: Event's score in each counted run without the canary, float64[trials].
    """

    epsilon_lower: float
    claim: Bound
    delta: float
    confidence: float
    trials: int
    event: Event
    game: str
    true_positives: int
    false_positives: int
    present: np.ndarray
    absent: np.ndarray

    @property
    def violation(self) -> bool:
        """True if the lower bound exceeds the claim."""
        return self.epsilon_lower > self.claim.upper

    @property
    def formatted_bound(self) -> str:
        """Lower bound as text, rounded down."""
        return Bound(self.epsilon_lower, math.inf).format_lower()

    @property
    def detection_limit(self) -> float:
        """Lower bound that these trials would give without false positives."""
        rate = self.true_positives / self.trials
        unseen = -math.log((1 - self.confidence) / 2) / self.trials
        return math.log(rate / unseen) if rate > 0 else -math.inf

    def lines(self) -> list[str]:
        """Returns the report as lines of text, the verdict last."""
        relation = ">=" if self.event.present else "<="
        world, opposite = ("with", "without") if self.event.present else ("without", "with")
        lines = [
            f"game: canary +1, {self.game}; {self.trials:,} runs counted in each world",
            f"event: {self.event.score} {relation} {self.event.threshold:.4g}, in "
            f"{self.true_positives:,} runs {world} the canary and {self.false_positives:,} runs "
            f"{opposite} it",
            f"epsilon >= {self.formatted_bound} at delta {format_delta(self.delta)}, "
            f"with confidence {self.confidence:.0%}",
            f"claimed: epsilon <= {self.claim.format_upper()}",
            f"detection limit: {self.detection_limit:.3f}",
        ]
        if self.violation:
            return [*lines, "black-box audit: VIOLATION: the claim is wrong"]
        if self.detection_limit <= self.claim.upper:
            lines.append(
                "too few trials to refute this claim, even if it were wrong: raise --trials"
            )
        return [*lines, "black-box audit: consistent with the claim"]


def black_box_audit(
    mechanism: Mechanism,
    claim: Bound,
    *,
    delta: float,
    trials: int,
    confidence: float = CONFIDENCE,
    root: RootKey | None = None,
    build: Callable[..., Algorithm] = dpsgd,
    progress: Callable[[str], None] = lambda line: None,
) -> BlackBoxReport:
    """Bounds epsilon of `mechanism` from below by many runs.

    The runs draw batches with the mechanism's sampler and take the training step.

    Args:
      mechanism: Sampler, sigma and C of the runs.
      claim: Interval that is claimed to contain epsilon.
      delta: Probability delta of the claim, in (0, 0.1).
      trials: Number of runs in each world, at least 100; about half of them are counted.
      confidence: Confidence of the bound; a false VIOLATION has probability at most 1 - confidence.
      root: Source of all randomness, by default fresh entropy.
      build: Function (loss_fn, optimizer) -> Algorithm.
      progress: Function called with a line of text from time to time.

    Raises:
      ValueError: For fewer than 100 trials, a mechanism without noise, or one that clips units.
    """
    if trials < 100:
        raise ValueError(f"trials must be at least 100, got {trials}")
    if mechanism.noise_multiplier == 0:
        raise ValueError("noise_multiplier is 0: a run without noise has no guarantee to audit")
    if mechanism.sampler.clipped_shape:
        raise ValueError(
            "the sampler clips units of examples; the black-box audit needs one that clips examples"
        )
    runs = Runs(mechanism, root or RootKey.from_entropy(), build, progress)
    return bound_epsilon(
        runs.scores, claim, delta=delta, trials=trials, confidence=confidence, progress=progress
    )


def bound_epsilon(
    play: Play,
    claim: Bound,
    *,
    delta: float,
    trials: int,
    confidence: float = CONFIDENCE,
    progress: Callable[[str], None] = lambda line: None,
) -> BlackBoxReport:
    """Bounds epsilon of the mechanism that `play` runs.

    About half of the trials choose an event, and the other half count it.

    Args:
      play: Function that runs the mechanism and returns scores, see `Play`.
      claim: Interval that is claimed to contain epsilon.
      delta: Probability delta of the claim, in (0, 0.1).
      trials: Number of runs in each world.
      confidence: Probability that the bound is valid.
      progress: Function called with a line of text from time to time.

    Raises:
      ValueError: If `delta` is not in (0, 0.1).

    >>> def play(gradient, trials):
    ...     return {"sum": np.ones(trials)}, {"sum": np.zeros(trials)}
    >>> bound_epsilon(play, Bound(0.9, 1.0), delta=1e-6, trials=300).violation
    True
    """
    check_guarantee_delta(delta)
    counted = trials // 2
    shares = -(-(trials - counted) // len(GAMES))
    choice = {}
    for game, gradient in GAMES.items():
        progress(f"choosing: {game}")
        choice[game] = choose_event(*play(gradient, shares), delta, confidence)
    game = max(choice, key=lambda name: choice[name][0])
    event = choice[game][1]
    progress(f"counting: {game}")
    present, absent = play(GAMES[game], counted)
    favoured, opposite, threshold = event.sides(present, absent)
    hits, misses = (int(np.sum(side >= threshold)) for side in (favoured, opposite))
    lower = float(_log_ratio(hits, misses, favoured.size, opposite.size, delta, confidence))
    return BlackBoxReport(
        max(0.0, lower),  # 0 holds without any trial
        claim,
        delta,
        confidence,
        counted,
        event,
        game,
        hits,
        misses,
        present[event.score],
        absent[event.score],
    )


def choose_event(
    present: Scores, absent: Scores, delta: float, confidence: float
) -> tuple[float, Event]:
    """Returns the largest bound of an event, and the event.

    The bound is biased, because the same trials choose the event.
    """
    best = -math.inf, Event(next(iter(present)), True, math.inf)
    for name, is_present in itertools.product(present, (True, False)):
        favoured, opposite, _ = Event(name, is_present, math.nan).sides(present, absent)
        favoured, opposite = np.sort(favoured), np.sort(opposite)
        ranks = np.unique(np.geomspace(1, favoured.size, _THRESHOLDS).astype(int))
        thresholds = favoured[-ranks]
        hits, misses = (
            side.size - np.searchsorted(side, thresholds) for side in (favoured, opposite)
        )
        bounds = _log_ratio(hits, misses, favoured.size, opposite.size, delta, confidence)
        k = int(np.argmax(bounds))
        threshold = float(thresholds[k])
        best = max(
            best,
            (float(bounds[k]), Event(name, is_present, threshold if is_present else -threshold)),
            key=lambda candidate: candidate[0],
        )
    return best


def _log_ratio(hits, misses, favoured: int, opposite: int, delta: float, confidence: float) -> Any:
    """Returns log((p - delta) / q), or -inf for p <= delta.

    p is the lower Clopper-Pearson bound of hits / favoured, q the upper one of misses / other.
    """
    error = (1 - confidence) / 2
    with np.errstate(divide="ignore", invalid="ignore"):
        p = np.where(hits > 0, stats.beta.ppf(error, hits, favoured - hits + 1), 0.0)
        q = np.where(
            misses < opposite, stats.beta.ppf(1 - error, misses + 1, opposite - misses), 1.0
        )
        return np.where(p > delta, np.log(np.maximum(p - delta, 1e-300) / q), -np.inf)
