"""The secret folder of a selection under way: its root, a journal of its trials, and their runs.

The number of trials, their candidates and ties are functions of the root; a trial is finished once
its line stands in the journal. See docs/explanation/secrecy-of-a-selection.md.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from accounting import TrialCount
from dpsgd.files import SECRET, destroy, open_own, parse_json
from dpsgd.noise.keys import RootKey
from dpsgd.runs.records import checked


@dataclass(frozen=True)
class Trial:
    """A finished trial.

    Attributes:
      number: 1, 2, ...
      score: What it came to; None if it failed or diverged, which is worse than any score.
      tie: An independent uniform number of 256 bits: of equal scores the larger one is the best.
    """

    number: int
    score: float | None
    tie: int

    def merit(self, better: Literal["higher", "lower"]) -> tuple[float, int]:
        """Returns what is larger for the better of two trials."""
        if self.score is None or not math.isfinite(self.score):
            return -math.inf, self.tie
        return (self.score if better == "higher" else -self.score), self.tie


class Vault:
    """The secret folder, held by one process.

    Attributes:
      path: The folder.
      count: The number K of trials.
      done: How many of them are finished.
      best: The best of these; None before the first.
    """

    def __init__(self, path: Path, root: RootKey, law: TrialCount, better: Any) -> None:
        """Opens the folder of a selection, and draws the number of its trials if need be."""
        self.path, self._root, self._better = path, root, better
        self._trials = path / "trials"
        self._trials.mkdir(mode=0o700, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
        self._journal = open_own(path / "journal.jsonl", flags, SECRET)
        try:
            self._lock()
            lines = self._read()
            if not lines:
                key = self._stream("number of trials", 0) >> 128
                generator = np.random.Generator(np.random.Philox(key=key))
                lines = [{"trials": law.draw(generator)}]
                self._append(lines[0])
            self.count = checked(lines[0].get("trials"), int, f"{path}: trials")
            self.done = 0
            self.best: Trial | None = None
            for line in lines[1:]:
                self._take(checked(line.get("score"), float | None, f"{path}: score"))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Lets another process have it."""
        os.close(self._journal)

    def candidate(self, trial: int, candidates: int) -> int:
        """Returns which of so many candidates a trial is: uniform to 2^-200, and independent."""
        return self._stream("candidates", trial) % candidates

    def folder(self, trial: int) -> Path:
        """Returns where a trial's run lies."""
        return self._trials / str(trial)

    def finish(self, score: float | None) -> None:
        """Writes down what the next trial came to, and destroys whichever is not the best."""
        self._append({"score": score if score is not None and math.isfinite(score) else None})
        self._take(score)
        self.clear()

    def clear(self) -> None:
        """Destroys the runs of all finished trials but the best one."""
        best = self.best.number if self.best else None
        for path in list(self._trials.iterdir()):
            if path.name not in (str(best), str(self.done + 1)):
                destroy(path)

    def _take(self, score: float | None) -> None:
        self.done += 1
        trial = Trial(self.done, score, self._stream("ties", self.done))
        if self.best is None or trial.merit(self._better) > self.best.merit(self._better):
            self.best = trial

    def _stream(self, purpose: str, number: int) -> int:
        """Returns a number of 256 bits: as random as the root, and independent of all others."""
        return self._root.child(f"selection: {purpose}").sampling_seed(number)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"another process is selecting in {self.path.parent}; wait for it to end"
            ) from None

    def _read(self) -> list[dict[str, Any]]:
        content = os.pread(self._journal, os.fstat(self._journal).st_size, 0)
        whole = content.rfind(b"\n") + 1
        os.ftruncate(self._journal, whole)  # at most a line that a crash left unended
        where = f"{self.path}: the journal is damaged"
        try:
            lines = [parse_json(line) for line in content[:whole].splitlines()]
        except ValueError:
            raise ValueError(where) from None
        return checked(lines, list[dict[str, Any]], where)

    def _append(self, line: dict[str, Any]) -> None:
        os.write(self._journal, f"{json.dumps(line)}\n".encode())
        os.fsync(self._journal)
