"""Secret folder of an unfinished selection: its secret, journal of trials, and their runs.

The number of trials, their candidates and ties are functions of the secret; a trial is finished
once its line is in the journal. See docs/explanation/secrecy-of-a-selection.md.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np

from accounting import TrialCount
from dpsgd.files import SECRET, append_line, destroy, lock, open_own, parse_json, write_atomically
from dpsgd.runs.records import checked

TRIALS = "trials"
"""Folder of the runs of trials, by number, which errors must not name."""


class VaultSecret:
    """Secret of a selection, 256 bits in a file of its vault that only its owner reads.

    >>> VaultSecret(bytes(32)).stream("ties", 1) == VaultSecret(bytes(32)).stream("ties", 2)
    False
    """

    def __init__(self, secret: bytes) -> None:
        """Stores 32 bytes; prefer `generate` and `load`."""
        self._secret = secret

    @classmethod
    def generate(cls) -> VaultSecret:
        """Returns a secret from the operating system's entropy."""
        return cls(os.urandom(32))

    def save(self, path: Path, selection: str) -> None:
        """Writes the secret to a file.

        The file also has its inode number, so that `load` refuses a copy. A process that is killed
        before the folder has its name leaves a hidden folder, with a secret that nothing uses.

        Args:
          path: File to create.
          selection: Name of the selection: the hash of its ledger's first line.

        Raises:
          OSError: If the file cannot be written.
        """

        def write(file: IO[bytes]) -> None:
            number = os.fstat(file.fileno()).st_ino
            record = {"secret": self._secret.hex(), "selection": selection, "number": number}
            file.write(json.dumps(record).encode())

        write_atomically(path, write, mode=SECRET)

    @classmethod
    def load(cls, path: Path, selection: str) -> VaultSecret:
        """Reads the secret of a selection.

        Args:
          path: File of the secret.
          selection: Name of the selection: the hash of its ledger's first line.

        Raises:
          OSError: If it cannot be read.
          ValueError: If the file is a link, damaged, a copy, or of another selection.
        """
        with os.fdopen(open_own(path, os.O_RDONLY, SECRET), "rb") as file:
            number, content = os.fstat(file.fileno()).st_ino, file.read(2**12)
        folder = path.parent.parent
        try:
            record = checked(parse_json(content), dict[str, Any], "secret")
            secret = cls(bytes.fromhex(checked(record["secret"], str, "secret")))
            name, inode = record["selection"], record["number"]
        except (ValueError, LookupError):  # whose message may quote the file
            raise ValueError(f"{path} is damaged, or of an earlier version") from None
        if name != selection:
            raise ValueError(f"{path} is the secret of another selection: restore this one's")
        if inode != number:
            raise ValueError(
                f"{folder} is a copy of an unfinished selection, whose cost counts one release for "
                "its number of trials: resume the original, or start a new selection"
            )
        return secret

    def stream(self, purpose: str, number: int) -> int:
        """Returns 256 pseudorandom bits.

        They are independent for each purpose and number.

        Args:
          purpose: Name of the numbers, such as "ties".
          number: Index of the number.
        """
        hash_options: Any = {"key": self._secret, "digest_size": 32, "person": b"dpsgd selection"}
        return int.from_bytes(
            hashlib.blake2b(f"{purpose} {number}".encode(), **hash_options).digest()
        )

    def blind(self, text: str) -> str:
        """Returns a keyed digest, which shows nothing of `text`.

        >>> VaultSecret(bytes(32)).blind("rows") == VaultSecret(bytes(31) + b"1").blind("rows")
        False
        """
        return hashlib.blake2b(
            text.encode(), digest_size=16, key=self._secret, person=b"dpsgd blind"
        ).hexdigest()

    def __repr__(self) -> str:
        return "VaultSecret(<secret>)"


@dataclass(frozen=True)
class Trial:
    """Finished trial.

    Attributes:
      number: Number of the trial, from 1.
      score: Score of the trial; None if it failed or diverged, which is worse than any score.
      tie: Independent uniform integer of 256 bits: among equal scores the largest wins.
    """

    number: int
    score: float | None
    tie: int

    def merit(self, better: Literal["higher", "lower"]) -> tuple[float, int]:
        """Returns a tuple that is larger for the better trial.

        >>> Trial(1, 0.5, tie=7).merit("higher") < Trial(2, 0.6, tie=3).merit("higher")
        True
        """
        if self.score is None or not math.isfinite(self.score):
            return -math.inf, self.tie
        return (self.score if better == "higher" else -self.score), self.tie


class Vault:
    """Secret folder, locked by one process.

    Attributes:
      path: Path of the folder.
      count: Number K of trials.
      done: Number of finished trials.
      best: Best finished trial; None before the first.
    """

    def __init__(self, path: Path, secret: VaultSecret, law: TrialCount, better: Any) -> None:
        """Opens the folder of a selection, and draws the number of trials if it is new."""
        self.path, self._secret, self._better = path, secret, better
        self._trials = path / TRIALS
        self._trials.mkdir(mode=0o700, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
        self._journal = open_own(path / "journal.jsonl", flags, SECRET)
        try:
            self._lock()
            lines = self._read()
            if not lines:
                key = secret.stream("number of trials", 0) >> 128
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
        """Unlocks the folder for other processes."""
        os.close(self._journal)

    def candidate(self, trial: int, candidates: int) -> int:
        """Returns a trial's candidate index, uniform to 2^-200.

        Args:
          trial: Number of the trial.
          candidates: Number of candidates.
        """
        return self._secret.stream("candidates", trial) % candidates

    def folder(self, trial: int) -> Path:
        """Returns the directory of a trial's run."""
        return self._trials / str(trial)

    def finish(self, score: float | None) -> None:
        """Records the next trial's score, and destroys surplus runs."""
        self._append({"score": score if score is not None and math.isfinite(score) else None})
        self._take(score)
        self.clear()

    def clear(self) -> None:
        """Destroys the runs of all finished trials but the best."""
        best = self.best.number if self.best else None
        for path in list(self._trials.iterdir()):
            if path.name not in (str(best), str(self.done + 1)):
                destroy(path)

    def _take(self, score: float | None) -> None:
        self.done += 1
        trial = Trial(self.done, score, self._secret.stream("ties", self.done))
        if self.best is None or trial.merit(self._better) > self.best.merit(self._better):
            self.best = trial

    def _lock(self) -> None:
        try:
            lock(self._journal, self.path / "journal.jsonl")
        except BlockingIOError:
            raise ValueError(
                f"another process is selecting in {self.path.parent}; wait for it to end"
            ) from None

    def _read(self) -> list[dict[str, Any]]:
        content = os.pread(self._journal, os.fstat(self._journal).st_size, 0)
        complete_bytes = content.rfind(b"\n") + 1
        os.ftruncate(self._journal, complete_bytes)  # at most a line that a crash left unended
        location = f"{self.path}: the journal is damaged"
        try:
            lines = [parse_json(line) for line in content[:complete_bytes].splitlines()]
        except ValueError:
            raise ValueError(location) from None
        return checked(lines, list[dict[str, Any]], location)

    def _append(self, line: dict[str, Any]) -> None:
        append_line(self._journal, f"{json.dumps(line)}\n".encode())
