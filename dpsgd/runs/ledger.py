"""The ledger of a run: what was declared before its noise was drawn, and what that costs.

A block of steps is declared in a line that is on the disk before its noise exists; the declared
steps are counted, whether or not they came to be used:
docs/explanation/declared-steps-and-attempts.md.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpsgd.files import PUBLIC, fsync_folder, lock, open_own
from dpsgd.runs.history import Attempt, History, LedgerError, line_of
from dpsgd.runs.processes import Processes
from dpsgd.runs.records import to_json
from dpsgd.runs.terms import Terms

_VISIBLE_SECONDS = 60.0
"""After which a line that one machine has written, and fsynced, is seen by all."""


class Ledger:
    """A run's ledger, open for writing; whoever has it open owns the run.

    The file is locked as long as it is open, and the system drops the lock when the process ends,
    however it ends. Of several processes, process 0 writes it and the others read on: none takes
    part in the sum of a block before the line that declares it is on the disk, and in the file that
    this process reads. All of them make the same calls.

    Attributes:
      path: The file.
      history: What it says.
    """

    path: Path
    history: History

    def __init__(
        self, path: Path, history: History, descriptor: int | None, processes: Processes
    ) -> None:
        """Holds an open, locked file, or none in a process that reads; use `create` and `open`."""
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
        """Makes the ledger of a new run, whose first attempt has `terms`; there must be none."""
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
        """Opens the ledger of a run that resumes, in all of its processes; by default this one.

        Raises:
          LedgerError: if it is missing, damaged, open in another run, or another one in each
            process.
        """
        processes = processes or Processes()
        if not processes.first:
            ledger = cls(path, History(), None, processes)
            ledger._follow()
            return ledger
        try:
            descriptor = open_own(path, os.O_RDWR | os.O_APPEND)
        except FileNotFoundError:
            raise _missing(path) from None
        except ValueError as error:
            raise LedgerError(str(error)) from None
        try:
            _lock(descriptor, path)
            content = path.read_bytes()
            history = History.parse(content, path)
            whole = content.rfind(b"\n") + 1
            if whole < len(content):
                os.ftruncate(descriptor, whole)
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
        """Begins an attempt at a step, in all processes; it declares none yet.

        Args:
          terms: What the run was begun with.
          step: Steps done in the state from which it goes on.
          drawing: Digest of what the sampler draws.
          environment: Versions and devices, for readers.

        Raises:
          OSError: if it cannot be written.
        """
        if self._descriptor is not None:
            index = len(self.history.attempts)
            body: dict[str, Any] = {"attempt": index, "first_step": step, "drawing": drawing}
            if not index:
                record = terms.record()
                Terms.from_record(record)  # what cannot be read back is refused before
                nonce = "" if terms.plan.reproducible_noise else secrets.token_hex(16)
                body |= {"nonce": nonce, **record}
            self._append({**body, "environment": to_json(environment)})
        self._follow()
        return self.history.attempts[-1]

    def declare(self, steps: range) -> None:
        """Declares `steps` in the last attempt; when this returns, that is on the disk.

        Under an insecure seed, steps that were declared before are repeated.

        Raises:
          ValueError: if they do not join what was declared before, or lie outside the run.
          LedgerError: if process 0 has not declared them.
          OSError: if it cannot be written; the ledger is then as it was.
        """
        if self._descriptor is not None:
            last = self.history.attempts[-1]
            missing = steps
            if last.terms.plan.reproducible_noise and steps.start <= last.steps.stop:
                missing = range(last.steps.stop, steps.stop)
            if missing.start != last.steps.stop:
                raise ValueError(f"{steps} does not follow the declared {last.steps}")
            if steps.stop > last.terms.mechanism.num_steps:
                raise ValueError(f"{steps} goes beyond the run's last step")
            if missing:
                self._append({"declare": [missing.start, missing.stop]})
        self._follow()
        declared = self.history.attempts[-1].steps
        if not (declared.start <= steps.start and steps.stop <= declared.stop):
            raise LedgerError(f"{self.path}: process 0 has not declared {steps}, and takes them")

    def audited(self, verdict: str) -> None:
        """Writes down what an audit (that of process 0) found, unless the last found the same."""
        if self._descriptor is not None and self.history.audit != verdict:
            self._append({"audit": verdict})
        self._follow()

    def release(self, digest: str) -> None:
        """Closes the ledger, in process 0, by the SHA-256 of the file of the released model."""
        if self.history.released and self.history.released != digest:
            raise LedgerError(
                f"{self.path} says that other parameters were released than these: restore "
                "params.npz from a copy"
            )
        if not self.history.released:
            self.history.check_complete()
            self._append({"released": digest})

    def _append(self, body: dict[str, Any]) -> None:
        assert self._descriptor is not None, "process 0 writes the ledger"
        if self.history.released:
            raise LedgerError(f"{self.path} is closed: the run is finished, and releases no more")
        self._check_in_place(self._descriptor)
        line, head = line_of(body, self.history.head)
        length = os.fstat(self._descriptor).st_size
        try:
            # One call: the system writes a line of this length whole, or (disk full) in part.
            if os.write(self._descriptor, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self._descriptor)
        except OSError as error:
            os.ftruncate(self._descriptor, length)
            raise OSError(error.errno, error.strerror, str(self.path)) from None
        self.history.extend(body, head)

    def _check_in_place(self, descriptor: int) -> None:
        """Raises LedgerError if the locked file has lost its name: nobody would read its lines."""
        try:
            if os.path.samestat(os.fstat(descriptor), os.stat(self.path)):
                return
        except FileNotFoundError:
            pass
        raise LedgerError(
            f"{self.path} was replaced or removed while the run had it open: restore it from a copy"
        )

    def _follow(self) -> None:
        """Reads on what process 0 has written, and compares the ledger with its."""
        head = self._processes.share(self.history.head)
        if self._descriptor is not None:
            return
        ends = time.monotonic() + _VISIBLE_SECONDS
        while True:  # other machines may see a file that is shared a little later
            with contextlib.suppress(FileNotFoundError), self.path.open("rb") as file:
                file.seek(self._size)
                while self.history.head != head and (line := file.readline()).endswith(b"\n"):
                    self.history.read_on(line, self.path)
                    self._size += len(line)
            if self.history.head == head:
                return
            if time.monotonic() > ends:
                raise LedgerError(
                    f"{self.path} is not the ledger of process 0: all processes must share one run "
                    "directory, on one file system"
                )
            time.sleep(0.1)


def read(path: Path) -> History:
    """Reads a ledger, also while a run is writing it, or raises LedgerError."""
    try:
        return History.parse(path.read_bytes(), path)
    except FileNotFoundError:
        raise _missing(path) from None


def _missing(path: Path) -> LedgerError:
    return LedgerError(
        f"{path} is missing: without it what was released cannot be counted; restore it, or start "
        "a new run"
    )


def _lock(descriptor: int, path: Path) -> None:
    try:
        lock(descriptor, path)
    except BlockingIOError:
        raise LedgerError(
            f"another process is training in {path.parent}; wait for it to end"
        ) from None
