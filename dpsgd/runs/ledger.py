"""Writes the ledger, which declares steps before their noise is drawn.

The line that declares a block of steps is on the disk before the noise of the block exists.
`dpsgd.runs.history` reads and checks the lines.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpsgd.files import PUBLIC, append_line, fsync_folder, lock, open_own
from dpsgd.runs.history import Attempt, History, LedgerError, line_of, missing_error, price_of
from dpsgd.runs.processes import Processes
from dpsgd.runs.records import to_json
from dpsgd.runs.terms import Terms

_VISIBLE_SECONDS = 60.0
"""Seconds that a process waits to see a line of process 0."""


class Ledger:
    """Ledger of a run, open for writing and locked against other jobs.

    The system drops the lock when the process ends, even in a crash. Of several processes, process
    0 writes the file and the others read each new line. A process takes part in the sum of a block
    only after it has read the line that declares the block. All processes make the same calls.

    Attributes:
      path: Path of the ledger.
      history: Content of the ledger.
    """

    path: Path
    history: History

    def __init__(
        self, path: Path, history: History, descriptor: int | None, processes: Processes
    ) -> None:
        """Wraps a locked file, or None to read only; use `create` or `open`."""
        self.path, self.history = path, history
        self._descriptor, self._processes, self._size = descriptor, processes, 0

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file and drops the lock."""
        if self._descriptor is not None:
            os.close(self._descriptor)

    @classmethod
    def create(
        cls, path: Path, terms: Terms, drawing: str = "", environment: Mapping[str, Any] = {}
    ) -> Ledger:
        """Creates a ledger with a first attempt.

        Args:
          path: File to create.
          terms: Terms of the run.
          drawing: `drawing_digest` of the mechanism.
          environment: Versions and devices, as JSON values.

        Raises:
          OSError: if `path` exists.
        """
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, PUBLIC)
        try:
            _lock(descriptor, path)
            fsync_folder(path.parent)
            ledger = cls(path, History(), descriptor, Processes())
            ledger.begin(terms, step=0, drawing=drawing, environment=environment)
        except BaseException:
            os.close(descriptor)
            raise
        return ledger

    @classmethod
    def open(cls, path: Path, processes: Processes | None = None) -> Ledger:
        """Opens and locks the ledger of a run.

        Args:
          path: File of the ledger.
          processes: Processes of the run, which all make this call; by default this one alone.

        Raises:
          LedgerError: if the ledger is missing, damaged, locked by another process, or differs
            between processes; or if own parts now state another price.
        """
        processes = processes or Processes()
        if not processes.first:
            ledger = cls(path, History(), None, processes)
            ledger._follow()
            return ledger
        try:
            descriptor = open_own(path, os.O_RDWR | os.O_APPEND)
        except FileNotFoundError:
            raise missing_error(path) from None
        except ValueError as error:
            raise LedgerError(str(error)) from None
        try:
            _lock(descriptor, path)
            content = path.read_bytes()
            history = History.parse(content, path)
            complete_bytes = content.rfind(b"\n") + 1
            if complete_bytes < len(content):
                os.ftruncate(descriptor, complete_bytes)
                os.fsync(descriptor)
            ledger = cls(path, history, descriptor, processes)
            ledger._follow()
        except BaseException:
            os.close(descriptor)
            raise
        return ledger

    def begin(
        self, terms: Terms, *, step: int, drawing: str, environment: Mapping[str, Any]
    ) -> Attempt:
        """Begins an attempt without declared steps, in all processes.

        Args:
          terms: Terms of the run.
          step: Number of steps done in the state that the attempt starts with.
          drawing: `drawing_digest` of the mechanism.
          environment: Versions and devices, as JSON values.

        Raises:
          OSError: if the line cannot be written.
        """
        if self._descriptor is not None:
            index = len(self.history.attempts)
            body: dict[str, Any] = {"attempt": index, "first_step": step, "drawing": drawing}
            if not index:
                nonce = "" if terms.plan.reproducible_noise else secrets.token_hex(16)
                body |= {"nonce": nonce, **terms.record(), **price_of(terms)}
            self._append({**body, "environment": to_json(environment)})
        self._follow()
        return self.history.attempts[-1]

    def declare(self, steps: range) -> None:
        """Declares `steps` in the last attempt, durably on return.

        Under an insecure seed, only steps that were not declared before are added.

        Raises:
          ValueError: if `steps` does not follow the declared steps, or exceeds the run's last step.
          LedgerError: if process 0 has not declared `steps`.
          OSError: if the line cannot be written; the ledger is then unchanged.
        """
        if self._descriptor is not None:
            last = self.history.attempts[-1]
            missing = steps
            if last.terms.plan.reproducible_noise and steps.start <= last.steps.stop:
                missing = range(last.steps.stop, steps.stop)
            if missing:
                self._append({"declare": [missing.start, missing.stop]})
        self._follow()
        declared = self.history.attempts[-1].steps
        if not (declared.start <= steps.start and steps.stop <= declared.stop):
            raise LedgerError(f"{self.path}: process 0 takes {steps} without having declared them")

    def audited(self, verdict: str) -> None:
        """Records the audit verdict of process 0, unless unchanged."""
        if self._descriptor is not None and self.history.audit != verdict:
            self._append({"audit": verdict})
        self._follow()

    def release(self, digest: str) -> None:
        """Closes the ledger, in process 0.

        Args:
          digest: SHA-256 of the file of released parameters.

        Raises:
          LedgerError: if the ledger is closed with another digest.
          ValueError: if not all steps are declared.
        """
        if self.history.released and self.history.released != digest:
            raise LedgerError(
                f"{self.path} records that other parameters were released: restore params.npz "
                "from a copy"
            )
        if not self.history.released:
            self._append({"released": digest})

    def _append(self, body: dict[str, Any]) -> None:
        assert self._descriptor is not None, "process 0 writes the ledger"
        self._check_in_place(self._descriptor)
        line, head = line_of(body, self.history.head)
        history = dataclasses.replace(
            self.history, attempts=[*self.history.attempts], lines={**self.history.lines}
        )
        history.extend(body, head)  # refuses an invalid line
        try:
            append_line(self._descriptor, line)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from None
        self.history = history

    def _check_in_place(self, descriptor: int) -> None:
        """Raises LedgerError if `path` no longer names the locked file."""
        try:
            if os.path.samestat(os.fstat(descriptor), os.stat(self.path)):
                return
        except FileNotFoundError:
            pass
        raise LedgerError(
            f"{self.path} was replaced or removed while the run had it open: restore it from a copy"
        )

    def _follow(self) -> None:
        """Reads lines up to the head of process 0, or raises LedgerError."""
        head = self._processes.share(self.history.head)
        if self._descriptor is not None:
            return
        deadline = time.monotonic() + _VISIBLE_SECONDS
        while True:  # a shared file system may show the line to other machines later
            with contextlib.suppress(FileNotFoundError), self.path.open("rb") as file:
                file.seek(self._size)
                while self.history.head != head and (line := file.readline()).endswith(b"\n"):
                    self.history.read_on(line, self.path)
                    self._size += len(line)
            if self.history.head == head:
                return
            if time.monotonic() > deadline:
                raise LedgerError(
                    f"{self.path} is not the ledger of process 0: all processes must share one run "
                    "directory, on one file system"
                )
            time.sleep(0.1)


def _lock(descriptor: int, path: Path) -> None:
    try:
        lock(descriptor, path)
    except BlockingIOError:
        raise LedgerError(
            f"another process is training in {path.parent}; wait for it to end"
        ) from None
