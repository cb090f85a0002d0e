"""Decides how a run resumes, with which seeds; stores a seed at a clean stop.

Rules and their reasons: docs/explanation/declared-steps-and-attempts.md. Otherwise
sampling seeds exist only in memory.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from dpsgd.files import (
    DAMAGED,
    SECRET,
    destroy,
    fsync_folder,
    open_own,
    parse_json,
    reserve,
    unfinished_path,
    write_atomically,
)
from dpsgd.noise.keys import Keys, Seeds
from dpsgd.runs.checkpoint import Checkpoint
from dpsgd.runs.drawing import own_code
from dpsgd.runs.history import Attempt, History, LedgerError
from dpsgd.runs.records import checked
from dpsgd.runs.terms import Terms
from samplers import BatchSampler
from samplers.randomness import check_seed
from samplers.settings import SAMPLERS

STOP = "secret.json"
"""File of a clean stop, with its sampling seed."""

_RESERVED = ".secret.reserved"
_MOST_BYTES = 1024


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
    """Resumption of the last attempt, with new noise."""

    stop: Stop | None = None
    """Clean stop whose sampling seed continues; None for new seeds."""


class NewAttempt(NamedTuple):
    """New attempt with fresh noise, draws and noise history."""


Decision = Continue | NewAttempt


def decide(
    history: History, saved: Checkpoint | None, stop: Stop | None, terms: Terms, drawing: str
) -> Decision:
    """Decides how a run resumes, from `saved` or from its start.

    Args:
      history: Ledger of the run.
      saved: Newest undamaged checkpoint; None without any.
      stop: Clean stop of the previous process; None without one.
      terms: Terms with which the run would resume.
      drawing: `drawing_digest` of the mechanism in this process.

    Raises:
      LedgerError: if the run cannot resume as its guarantee assumes.
    """
    last, began, now = history.attempts[-1], history.attempts[0].terms.record(), terms.record()
    if changed := [name for name in {**began, **now} if began.get(name) != now.get(name)]:
        raise LedgerError(
            f"line 1: the run began with another {', '.join(changed)}: restore it, or start a new "
            "run"
        )
    step = saved.step if saved else 0
    on_path = saved is not None and _attempt_of(history, saved).index == last.index
    of_stop = [attempt for attempt in history.attempts if stop and attempt.head == stop.attempt]
    if stop and of_stop and stop.step > of_stop[0].steps.stop:
        raise LedgerError(
            f"the run stopped at step {stop.step:,}, which its ledger does not declare: it was "
            "rolled back or cut; restore the newer ledger"
        )
    if step < terms.mechanism.num_steps and history.released:
        raise LedgerError(
            "the run has released its model, but report.json and the last checkpoint are missing: "
            "restore report.json from a copy"
        )
    if terms.plan.reproducible_noise:
        return Continue()
    _check_own_draws(history, drawing)
    if step != last.steps.stop or not (on_path or not last.steps):
        return NewAttempt()
    if on_path and step == terms.mechanism.num_steps:
        return Continue()
    if drawing != last.drawing:
        return NewAttempt()
    if stop is not None and (stop.attempt, stop.step) == (last.head, step):
        return Continue(stop)
    return NewAttempt() if last.steps else Continue()


def _check_own_draws(history: History, drawing: str) -> None:
    """Raises LedgerError if an own sampler or noise draws differently than for declared steps."""
    names = own_code(history.attempts[0].terms.mechanism)
    if names and any(a.steps and a.drawing != drawing for a in history.attempts):
        raise LedgerError(
            f"the {' or the '.join(names)} draws differently than when the run declared steps: "
            "restore the code that it uses, or start a new run (the declared steps still count)"
        )


def _attempt_of(history: History, saved: Checkpoint) -> Attempt:
    """Returns the attempt of a checkpoint; raises LedgerError if it contradicts the ledger."""
    name = f"the checkpoint of step {saved.step:,}"
    history.check_head(saved.ledger_head, name)
    by_then = history.lines[saved.ledger_head]
    if by_then is None or not by_then.steps.start <= saved.step <= by_then.steps.stop:
        raise LedgerError(
            f"{name} is not of this run, whose ledger did not declare that step when the "
            "checkpoint was written: restore the checkpoint of this run"
        )
    return by_then


# --- Sampling seeds ------------------------------------------------------------------------------


class EpochSeeds:
    """Function that returns an independent sampling seed for each drawn epoch.

    >>> seeds = EpochSeeds(7, {1: 5})
    >>> seeds(1), seeds(0) == seeds(2), seeds
    (5, False, EpochSeeds(<secret>))
    """

    def __init__(self, secret: int, known: dict[int, int]) -> None:
        """Derives the seeds from a 256-bit secret, except for the epochs in `known`."""
        self._secret, self._known = secret.to_bytes(32, "little"), dict(known)

    def __call__(self, epoch: int) -> int:
        if epoch in self._known:
            return self._known[epoch]
        hash_options: Any = {"key": self._secret, "digest_size": 32, "person": b"dpsgd epoch"}
        return int.from_bytes(hashlib.blake2b(epoch.to_bytes(8, "little"), **hash_options).digest())

    def __repr__(self) -> str:
        return "EpochSeeds(<secret>)"


def keys_of(decision: Decision, sampler: BatchSampler, insecure_seed: int | None) -> Keys:
    """Returns the keys with which a run begins or resumes.

    Args:
      decision: Decision how the run resumes; a clean stop brings its sampling seed.
      sampler: Sampler of the run.
      insecure_seed: Seed of all keys, for debugging; None for fresh keys.
    """
    keys = Keys.of(insecure_seed)
    if insecure_seed is not None:
        return keys
    stop = decision.stop if isinstance(decision, Continue) else None
    # Processes that did not read the file come here, too: all must have the same seeds.
    if stop is not None and stop.seed is not None and stop.epoch is None:
        return Keys(keys.root, seeds=stop.seed)
    if not _by_epoch(sampler):
        return keys
    known_seeds = {stop.epoch: stop.seed} if stop and stop.seed is not None else {}
    return Keys(keys.root, seeds=EpochSeeds(keys.root.sampling_seed(), known_seeds))  # type: ignore[arg-type]


def _by_epoch(sampler: BatchSampler) -> bool:
    # A sampler from outside the package may draw all epochs from one seed.
    return not SAMPLERS.is_own(sampler)


def stop_at(step: int, attempt: str, sampler: BatchSampler, seeds: Seeds) -> Stop:
    """Returns the clean stop at `step`.

    Args:
      step: Number of steps done.
      attempt: Hash of the ledger's line that begins the attempt.
      sampler: Sampler of the run.
      seeds: Sampling seeds of this process; the next one gets the seed that it needs, if any.
    """
    if step >= sampler.num_steps:
        return Stop(attempt, step)
    if not callable(seeds):
        return Stop(attempt, step, None, seeds)
    following = sampler.drawn_epoch(step // sampler.steps_per_epoch)
    epoch_began = (
        step > 0 and sampler.drawn_epoch((step - 1) // sampler.steps_per_epoch) == following
    )
    if not epoch_began or sampler.as_entered([range(1)]) == [[range(1)]]:  # steps are independent
        return Stop(attempt, step)
    return Stop(attempt, step, following, seeds(following))


def constant_seed(sampler: BatchSampler, seeds: Seeds, step: int) -> int:
    """Returns the sampling seed of one epoch.

    Args:
      sampler: Sampler of the run.
      seeds: Sampling seeds of the attempt.
      step: Step whose epoch is meant.
    """
    if not callable(seeds):
        return seeds
    return seeds(sampler.drawn_epoch(min(step, sampler.num_steps - 1) // sampler.steps_per_epoch))


class StopFile:
    """File of a run directory with its clean stop, which only its owner can read.

    Attributes:
      path: Path of the file.
    """

    def __init__(self, folder: Path) -> None:
        """Sets the paths of the file and of the file that reserves its disk space."""
        self.path, self._reserved = folder / STOP, folder / _RESERVED

    @property
    def remains(self) -> list[Path]:
        """Existing files of a clean stop, half-written ones included."""
        paths = self._reserved, self.path, unfinished_path(self.path)
        return [path for path in paths if os.path.lexists(path)]

    def reserve(self) -> None:
        """Reserves disk space for a clean stop."""
        if not self._reserved.exists():
            reserve(self._reserved, _MOST_BYTES)

    def write(self, stop: Stop) -> None:
        """Writes a clean stop with its seed."""
        record = {**stop._asdict(), "seed": None if stop.seed is None else f"{stop.seed:x}"}
        record["sha256"] = _digest(record)
        content = json.dumps(record).encode() + b"\n"
        options: Any = {"mode": SECRET, "reserved": self._reserved}
        write_atomically(self.path, lambda file: file.write(content), **options)

    def read(self, sampler: BatchSampler) -> Stop | None:
        """Reads a clean stop; None if missing or damaged.

        A stop without the seed that it needs counts as damaged.

        Raises:
          ValueError: if the file is a link or has other names, under which the seed would remain.
        """
        try:
            descriptor = open_own(self.path, os.O_RDONLY, SECRET)
        except FileNotFoundError:
            return None
        with os.fdopen(descriptor, "rb") as file:
            content = file.read(_MOST_BYTES)
        try:
            record = checked(parse_json(content), dict[str, Any], STOP)
            if record.pop("sha256") != _digest(record):
                return None
            kinds = {"attempt": str, "step": int, "epoch": int | None, "seed": str | None}
            attempt, step, epoch, seed = (
                checked(record[name], kinds[name], STOP) for name in kinds
            )
            stop = Stop(attempt, step, epoch, None if seed is None else check_seed(int(seed, 16)))
        except DAMAGED:
            return None
        needed = stop_at(step, attempt, sampler, (lambda epoch: 0) if _by_epoch(sampler) else 0)
        seeded = stop.seed is not None or (needed.seed is None and epoch is None)
        return stop if seeded and epoch in (None, needed.epoch) else None

    def destroy(self) -> None:
        """Destroys the files of a clean stop."""
        if remains := self.remains:
            for path in remains:
                destroy(path)
            fsync_folder(self.path.parent)


def _digest(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
