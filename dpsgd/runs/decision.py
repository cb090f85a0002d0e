"""Decides from a run's files how the run resumes.

Rules and their reasons: docs/explanation/declared-steps-and-attempts.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dpsgd.runs.history import History
from dpsgd.runs.terms import Terms


class Saved(NamedTuple):
    """Place of a checkpoint in a run."""

    step: int
    """Number of steps done."""
    attempt: int
    """Index of the attempt that computed the state."""
    head: str
    """Hash of the ledger's last line when the checkpoint was written."""


class Stop(NamedTuple):
    """Clean stop of an attempt at a checkpoint, with its sampling seed."""

    attempt: str
    """Hash of the ledger's line that begins the attempt."""
    step: int
    """Number of steps done."""
    epoch: int | None = None
    """Unfinished epoch that `seed` draws; None for all or without seed."""
    seed: int | None = None
    """Sampling seed; None if the next process needs none."""

    def __repr__(self) -> str:
        """Returns a text without the seed, safe in tracebacks."""
        return f"Stop(attempt={self.attempt!r}, step={self.step}, epoch={self.epoch})"


class Continue(NamedTuple):
    """Resumption of the last attempt from a checkpoint, with new noise."""

    saved: Saved | None
    """Checkpoint; None for the start of the run."""
    stop: Stop | None = None
    """Clean stop whose sampling seed continues; None for new seeds."""

    @property
    def step(self) -> int:
        """Number of steps done."""
        return self.saved.step if self.saved else 0


class NewAttempt(NamedTuple):
    """New attempt from a checkpoint, with fresh noise, draws and noise history."""

    saved: Saved | None
    """Checkpoint; None for the start of the run."""

    @property
    def step(self) -> int:
        """Number of steps done."""
        return self.saved.step if self.saved else 0


class Refuse(NamedTuple):
    """Refusal of a run that cannot resume as its guarantee assumes."""

    reason: str
    """Reason in one line."""


Decision = Continue | NewAttempt | Refuse


def decide(
    history: History, checkpoints: Sequence[Saved], stop: Stop | None, terms: Terms, drawing: str
) -> Decision:
    """Decides how a run resumes.

    Args:
      history: Ledger of the run.
      checkpoints: Undamaged checkpoints, newest first.
      stop: Clean stop of the previous process; None without one.
      terms: Terms with which the run would resume.
      drawing: `drawing_digest` of the sampler in this process.
    """
    last, began = history.attempts[-1], history.attempts[0].terms.record()
    now = terms.record()
    if changed := [name for name in {**began, **now} if began.get(name) != now.get(name)]:
        return Refuse(
            f"line 1: the run began with another {', '.join(changed)}: restore it, or start a new "
            "run"
        )
    saved = checkpoints[0] if checkpoints else None
    if saved and (why := contradiction(history, saved)):
        return Refuse(why)
    of_stop = [
        attempt
        for attempt in history.attempts
        if stop and history.heads[attempt.line] == stop.attempt
    ]
    if stop and of_stop and stop.step > of_stop[0].steps.stop:
        return Refuse(
            f"the run stopped at step {stop.step:,}, which its ledger does not declare: it was "
            "rolled back or cut; restore the newer ledger"
        )
    step = saved.step if saved else 0
    if step < terms.mechanism.num_steps and history.released:
        return Refuse(
            "the run has released its model, but report.json and the last checkpoint are missing: "
            "restore report.json from a copy"
        )
    if terms.plan.reproducible_noise:
        return Continue(saved)
    on_path = saved is not None and saved.attempt == last.index
    if step != last.steps.stop or not (on_path or not last.steps):
        return NewAttempt(saved)
    if on_path and step == terms.mechanism.num_steps:
        return Continue(saved)
    if drawing != last.drawing:
        return NewAttempt(saved)
    if stop is not None and (stop.attempt, stop.step) == (history.heads[last.line], step):
        return Continue(saved, stop)
    return NewAttempt(saved) if last.steps else Continue(saved)


def contradiction(history: History, saved: Saved) -> str:
    """Returns why a checkpoint contradicts the ledger, or "".

    Args:
      history: Ledger of the run.
      saved: Place of the checkpoint.
    """
    if why := history.lacks(saved.head, f"the checkpoint of step {saved.step:,}"):
        return why
    by_then = history.declared[history.heads.index(saved.head)]
    if by_then is None or by_then.index != saved.attempt:
        return f"the checkpoint of step {saved.step:,} is not of this run: restore its own"
    declared = by_then.steps
    if not declared.start <= saved.step <= declared.stop:
        return (
            f"the checkpoint of step {saved.step:,} is not of this run, whose ledger declared "
            f"steps {declared.start:,} to {declared.stop:,} when it was written: restore its own"
        )
    return ""
