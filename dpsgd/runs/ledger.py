"""Reads and writes the ledger, which declares steps before their noise is drawn.

The line that declares a block of steps is on the disk before the noise of the block exists. The
privacy cost (`dpsgd.core.cost`) counts all declared steps, even those that a crash has cut off:
docs/explanation/declared-steps-and-attempts.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpsgd.core.cost import cost, without_initial
from dpsgd.core.guarantee import Guarantee
from dpsgd.core.segments import Part, check_together
from dpsgd.files import PUBLIC, fsync_folder, lock, open_own, parse_json
from dpsgd.runs.processes import Processes
from dpsgd.runs.records import checked, to_json
from dpsgd.runs.terms import Selection, Terms
from samplers.registry import UnknownPart

NO_HEAD = hashlib.sha256(b"dpsgd-ledger-v2").hexdigest()
"""Head of a ledger without lines."""

_EARLIER = {"generation", "fingerprint"}


class LedgerError(ValueError):
    """Error of a ledger that is damaged, missing, inconsistent or in use."""


@dataclass(frozen=True)
class Attempt:
    """Consecutive steps that were drawn independently of all other attempts.

    Attributes:
      index: Number of the attempt in its run, from 0 on.
      terms: Terms of the run, the same for all its attempts.
      steps: Range of the declared steps.
      drawing: `drawing_digest` of the mechanism.
      environment: Versions and devices at the beginning of the attempt.
      head: Hash of the ledger's line that begins the attempt.
    """

    index: int
    terms: Terms
    steps: range
    drawing: str = ""
    environment: Mapping[str, Any] = field(default_factory=dict)
    head: str = field(default="", compare=False)


@dataclass
class History:
    """Content of a ledger, in the order of its lines.

    Attributes:
      attempts: Attempts with their declared steps.
      lines: Latest attempt after each line, by the hash of the line, with the steps declared by
        then; None before the first attempt.
      audit: Verdict of the last audit; empty before.
      released: SHA-256 of the file of released parameters, from the line that closes the ledger of
        a finished run; empty before.
      selection: Private selection that the first line declares; None for a run. The only attempt
        of its ledger is the released model.
    """

    attempts: list[Attempt] = field(default_factory=list)
    lines: dict[str, Attempt | None] = field(default_factory=dict)
    audit: str = ""
    released: str = ""
    selection: Selection | None = None

    @classmethod
    def parse(cls, content: bytes, path: Path) -> History:
        """Parses a complete ledger.

        Args:
          content: Bytes of the file.
          path: Path of the file, for error messages.

        Raises:
          LedgerError: if the ledger is empty or invalid.
        """
        history = cls()
        history.read_on(content, path)
        if not history.lines:
            raise LedgerError(
                f"{path} is empty, so the privacy cost cannot be computed: restore it from a copy"
            )
        return history

    def read_on(self, content: bytes, path: Path) -> None:
        """Parses further lines.

        Args:
          content: Bytes that follow the lines read so far; a last line without end is ignored.
          path: Path of the file, for error messages.

        Raises:
          LedgerError: if a line is invalid.
        """
        lines = content.split(b"\n")[:-1]  # without a last line that has no end
        for number, line in enumerate(lines, len(self.lines) + 1):
            try:
                body = checked(parse_json(line), dict[str, Any], "it")
                if not self.lines and _EARLIER & {*body, *body.get("selection", ())}:
                    raise LedgerError(
                        f"{path} is of version 0.2.0 or earlier, whose runs this version cannot "
                        "read: resume and read them with that version, or train anew"
                    )
                stated = body.pop("hash")
                expected, head = line_of(body, self.head)
                if stated != head or expected != line + b"\n":
                    raise ValueError("its hash does not match its content and the lines before it")
                self.extend(body, head)
            except LedgerError:
                raise
            except UnknownPart as error:
                reason = f"cannot be accounted for: {error}"
                raise LedgerError(f"{path}, line {number} {reason}") from None
            except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
                reason = str(error).partition("\n")[0]
                raise LedgerError(
                    f"{path}, line {number}: {reason or 'damaged'}; the ledger was edited or "
                    "damaged, so the privacy cost cannot be computed; restore it from a copy"
                ) from None

    @property
    def head(self) -> str:
        """Hash of the last line."""
        return next(reversed(self.lines), NO_HEAD)

    @property
    def name(self) -> str:
        """Name of the run: the hash of the first line."""
        return next(iter(self.lines))

    def check_head(self, head: str, holder: str) -> None:
        """Refuses a ledger that lacks a line.

        Args:
          head: Hash of the line.
          holder: Name of the file that has the hash.

        Raises:
          LedgerError: if no line has this hash.
        """
        if head not in self.lines:
            raise LedgerError(
                f"the ledger lacks the last line that {holder} knows: it was rolled back or "
                "replaced, so the privacy cost cannot be computed; restore the newer ledger"
            )

    @property
    def parts(self) -> list[Part]:
        """Releases whose joint cost is the ledger's cost."""
        if self.selection is not None:
            return [self.selection.trials(*(attempt.terms for attempt in self.attempts))]
        # A run resumes only on the rows with which it began.
        return [
            dataclasses.replace(attempt.terms.plan, steps=attempt.steps, rows=self.name)
            for attempt in self.attempts
        ]

    @property
    def initial_digests(self) -> set[str]:
        """SHA-256 digests of trained models that began the run."""
        return {release.initial.sha256 for release in self.parts if release.initial}

    def guarantee(self, *earlier: History) -> Guarantee:
        """Returns the guarantee of all declared steps.

        Args:
          earlier: Finished runs, for the guarantee of a unit with rows in each of the runs.

        Raises:
          ValueError: if one of several runs is not finished, or `check_together` refuses them.
        """
        runs = (*earlier, self)
        releases = [release for run in runs for release in run.parts]
        if earlier:
            if not all(run.released for run in runs):
                raise ValueError(
                    "the joint cost of several runs needs finished ones: finish all of them"
                )
            check_together(releases)
            # A run that releases its initial parameters unchanged did not train them alone.
            counted = {run.released for run in runs if run.released not in run.initial_digests}
            releases = [
                without_initial(release)
                if release.initial and release.initial.sha256 in counted
                else release
                for release in releases
            ]
        last = self.selection or self.attempts[-1].terms
        return cost(releases, last.delta)

    def extend(self, body: dict[str, Any], head: str) -> None:
        """Adds a line to the history.

        Args:
          body: Content of the line, without hash.
          head: Hash of the line.

        Raises:
          ValueError: if the line contradicts earlier lines.
        """
        if self.released:
            raise ValueError("it follows the line that closes the ledger")
        if "released" in body:
            last = self.attempts[-1]
            if last.steps.stop != last.terms.mechanism.num_steps:
                raise ValueError("the model is released before the run's last step is declared")
            self.released = checked(body["released"], str, "released")
        elif "audit" in body:
            self.audit = checked(body["audit"], str, "audit")
        elif "selection" in body:
            if self.lines:
                raise ValueError("a selection must be declared in the first line")
            self.selection = Selection.from_record(body["selection"])
        elif "declare" in body:
            last = self.attempts[-1]
            first, stop = checked(body["declare"], list[int], "declare")
            if first != last.steps.stop or stop <= first:
                raise ValueError(f"steps {first} to {stop} do not follow the steps before them")
            steps = range(last.steps.start, stop)
            dataclasses.replace(last.terms.plan, steps=steps)  # refuses steps that the run has not
            self.attempts[-1] = dataclasses.replace(last, steps=steps)
        else:
            self._begin(body, head)
        self.lines[head] = self.attempts[-1] if self.attempts else None

    def _begin(self, body: dict[str, Any], head: str) -> None:
        index, first = (checked(body[name], int, name) for name in ("attempt", "first_step"))
        drawing = checked(body["drawing"], str, "drawing")
        environment = checked(body["environment"], dict[str, Any], "environment")
        if index != len(self.attempts):
            raise ValueError(f"attempt {index} does not follow attempt {len(self.attempts) - 1}")
        steps = range(first, first)
        if index:
            terms = self.attempts[0].terms
            if self.selection is not None:
                raise ValueError("a selection releases one model")
            if terms.plan.reproducible_noise:
                raise ValueError("a run under an insecure seed has one attempt")
            if not any(
                attempt.steps.start <= first <= attempt.steps.stop for attempt in self.attempts
            ):
                raise ValueError(
                    f"the attempt begins at step {first:,}, which no earlier attempt reached"
                )
        else:
            terms = Terms.from_record(body)
            if first:
                raise ValueError(f"the first attempt must begin at step 0, not {first:,}")
            if not (checked(body["nonce"], str, "nonce") or terms.plan.reproducible_noise):
                raise ValueError("it lacks a nonce, which tells runs apart")
            if self.selection is not None:
                self.selection.check_released(terms)
        dataclasses.replace(terms.plan, steps=steps)
        self.attempts.append(Attempt(index, terms, steps, drawing, environment, head))


def line_of(body: dict[str, Any], previous: str) -> tuple[bytes, str]:
    """Returns a ledger line and its hash.

    >>> line, head = line_of({"declare": [0, 10]}, NO_HEAD)
    >>> line[:18], len(head)
    (b'{"declare": [0, 10', 64)

    Args:
      body: JSON object without hash.
      previous: Hash of the line before, to which this line is chained.
    """
    text = json.dumps(body, allow_nan=False)
    head = hashlib.sha256(f"{previous} {text}".encode()).hexdigest()
    return f'{text[:-1]}, "hash": "{head}"}}\n'.encode(), head


# --- Writing --------------------------------------------------------------------------------------

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
            between processes.
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
                body |= {"nonce": nonce, **terms.record()}
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
        history.extend(body, head)  # refuses what must not be written
        length = os.fstat(self._descriptor).st_size
        try:
            # One call: the system writes a line of this length whole, or (disk full) in part.
            if os.write(self._descriptor, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self._descriptor)
        except OSError as error:
            os.ftruncate(self._descriptor, length)
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


def read(path: Path) -> History:
    """Reads a ledger, even during its run.

    Raises:
      LedgerError: if the ledger is missing or damaged.
    """
    try:
        return History.parse(path.read_bytes(), path)
    except FileNotFoundError:
        raise _missing(path) from None


def _missing(path: Path) -> LedgerError:
    return LedgerError(
        f"{path} is missing, so the privacy cost cannot be computed: restore it, or start a new run"
    )


def _lock(descriptor: int, path: Path) -> None:
    try:
        lock(descriptor, path)
    except BlockingIOError:
        raise LedgerError(
            f"another process is training in {path.parent}; wait for it to end"
        ) from None
