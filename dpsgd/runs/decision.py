"""How a run resumes: the same attempt, a new one, or not at all. A pure function of its files.

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
    """Attempt that made the state."""
    head: str
    """Head of the ledger when it was written."""


class Stop(NamedTuple):
    """Clean stop of an attempt: nothing is declared beyond its checkpoint."""

    attempt: str
    """Hash of the ledger's line that begins the attempt."""
    step: int
    """Number of steps done."""
    epoch: int | None = None
    """Drawn epoch that the seed serves; None for all epochs."""
    seed: int | None = None
    """Sampling seed; None if no drawn epoch is unfinished."""

    def __repr__(self) -> str:
        """Returns the stop without its seed, which tracebacks with local variables would show."""
        return f"Stop(attempt={self.attempt!r}, step={self.step}, epoch={self.epoch})"


class Continue(NamedTuple):
    """The last attempt goes on from a checkpoint, with new noise."""

    saved: Saved | None
    """Checkpoint; None for the start of the run."""
    stop: Stop | None = None
    """Clean stop, whose sampling seed serves again."""

    @property
    def step(self) -> int:
        """Number of steps done."""
        return self.saved.step if self.saved else 0


class NewAttempt(NamedTuple):
    """A new attempt goes on from a checkpoint, with new noise, new draws and no noise history."""

    saved: Saved | None
    """Checkpoint; None for the start of the run."""

    @property
    def step(self) -> int:
        """Number of steps done."""
        return self.saved.step if self.saved else 0


class Refuse(NamedTuple):
    """The run cannot resume as its guarantee assumes."""

    reason: str
    """One line."""


Decision = Continue | NewAttempt | Refuse


def decide(
    history: History, checkpoints: Sequence[Saved], stop: Stop | None, terms: Terms, drawing: str
) -> Decision:
    """Returns how a run resumes.

    Args:
      history: Ledger of the run.
      checkpoints: Checkpoints that are whole, the newest first.
      stop: Clean stop that was left behind, if any.
      terms: Terms with which the run would resume.
      drawing: Digest of what the sampler draws now.
    """
    last, began = history.attempts[-1], history.attempts[0].terms.record()
    now = terms.record()
    if changed := [name for name in {**began, **now} if began.get(name) != now.get(name)]:
        return Refuse(
            f"line 1: the run was begun with another {', '.join(changed)}, and resumes only as it "
            "was begun: restore it, or start a new run"
        )
    saved = checkpoints[0] if checkpoints else None
    if saved and (why := contradiction(history, saved)):
        return Refuse(why)
    of_stop = [one for one in history.attempts if stop and history.heads[one.line] == stop.attempt]
    if stop and of_stop and stop.step > of_stop[0].steps.stop:
        return Refuse(
            f"the run stopped at step {stop.step:,}, which its ledger does not declare: it was "
            "rolled back or cut; restore the newer ledger"
        )
    step = saved.step if saved else 0
    if step < terms.mechanism.num_steps and history.released:
        return Refuse(
            "the run has released its model, and its report and its last checkpoint are gone: "
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
    """Returns why a checkpoint is not of this ledger; empty if it is."""
    if why := history.lacks(saved.head, f"the checkpoint of step {saved.step:,}"):
        return why
    by_then = history.declared[history.heads.index(saved.head)]
    if by_then is None or by_then.index != saved.attempt:
        return f"the checkpoint of step {saved.step:,} is not of this run: restore its own"
    known = by_then.steps
    if not known.start <= saved.step <= known.stop:
        return (
            f"the checkpoint of step {saved.step:,} is not of this run, whose ledger had "
            f"declared the steps from {known.start:,} up to {known.stop:,} when it was written"
        )
    return ""
