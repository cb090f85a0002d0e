"""What a ledger says, line by line: attempts, declared steps, audits, and what was released.

Its privacy cost is that of the declared steps (`dpsgd.core.cost`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpsgd.core.cost import cost, without_initial
from dpsgd.core.guarantee import Guarantee
from dpsgd.core.segments import Part, check_together
from dpsgd.files import parse_json
from dpsgd.runs.records import checked
from dpsgd.runs.terms import Selection, Terms
from samplers.settings import UnknownSampler

NO_HEAD = hashlib.sha256(b"dpsgd-ledger-v1").hexdigest()
"""The head of a ledger without lines."""


class LedgerError(ValueError):
    """A ledger that cannot be believed, or is in use: one line that says why."""


@dataclass(frozen=True)
class Attempt:
    """Consecutive steps under one set of keys.

    Attributes:
      index: 0 for the first attempt of a run, then 1, 2, ...
      key: The number by which `RootKey` derives this attempt's keys: 64 bits of the hash of the
        line that begins it, and 0 for the first of a run whose noise is reproducible.
      terms: What it ran on.
      origin: Head of the ledger in the checkpoint that it began from; `NO_HEAD` for none.
      steps: What it declared.
      line: The line that begins it, from 0 on.
    """

    index: int
    key: int
    terms: Terms
    origin: str
    steps: range
    line: int = field(compare=False)


@dataclass
class History:
    """What a ledger says, in the order in which it was written.

    Attributes:
      attempts: With what each declared; at least one.
      heads: The hash of each line.
      declared: What the attempt of each line had declared by then.
      audit: What the last audit found.
      released: SHA-256 of the file of the released parameters, in the line that closes the ledger
        of a finished run; empty before.
      selection: What its first line declares, of the ledger of a private selection, whose model is
        the one attempt, if it was released.
    """

    attempts: list[Attempt] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    declared: list[range] = field(default_factory=list)
    audit: str = ""
    released: str = ""
    selection: Selection | None = None

    @classmethod
    def parse(cls, content: bytes, path: Path) -> History:
        """Reads the lines of the ledger at `path`, of which each must fit the ones before."""
        history = cls()
        history.read_on(content, path)
        if not history.heads:
            raise LedgerError(f"{path} is empty: what was released cannot be counted")
        return history

    def read_on(self, content: bytes, path: Path) -> None:
        """Takes in the lines that follow those that were read, or raises LedgerError."""
        lines = content.split(b"\n")[:-1]  # what has no end is not a line
        for number, line in enumerate(lines, len(self.heads) + 1):
            try:
                body = checked(parse_json(line), dict[str, Any], "it")
                stated = body.pop("hash")
                expected, head = line_of(body, self.head)
                if stated != head or expected != line + b"\n":
                    raise ValueError("its hash does not fit it and the lines before")
                self.extend(body, head)
            except UnknownSampler as error:
                line_at = f"{path}, line {number}"
                raise LedgerError(f"{line_at} cannot be accounted for: {error}") from None
            except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
                reason = str(error).partition("\n")[0]
                raise LedgerError(
                    f"{path}, line {number}: {reason or 'damaged'}; the ledger was edited or "
                    "damaged, so what was released cannot be counted; restore it from a copy"
                ) from None

    @property
    def head(self) -> str:
        """The hash of the last line."""
        return self.heads[-1] if self.heads else NO_HEAD

    @property
    def name(self) -> str:
        """Names the run: the hash of its first line."""
        return self.heads[0]

    @property
    def untouched(self) -> bool:
        """Whether no step was declared yet, nor an attempt after the first."""
        return len(self.attempts) == 1 and not self.attempts[0].steps

    def check_head(self, head: str, holder: str) -> None:
        """Raises LedgerError unless the line with hash `head`, which `holder` recorded, is here."""
        if head != NO_HEAD and head not in self.heads:
            raise LedgerError(
                f"the ledger is not the one that {holder} was written with: it was rolled back or "
                "replaced, so what was released cannot be counted; restore the newer ledger"
            )

    def check_origin(self, step: int, origin: str) -> None:
        """Raises LedgerError unless a checkpoint of `step` can be of this run.

        `origin` is the head of the ledger in it. Without a checkpoint they are 0 and `NO_HEAD`.
        """
        self.check_head(origin, f"the checkpoint of step {step:,}")
        known = range(0) if origin == NO_HEAD else self.declared[self.heads.index(origin)]
        if not known.start <= step <= known.stop:
            raise LedgerError(
                f"the checkpoint of step {step:,} is not of this run, whose ledger had declared "
                f"the steps from {known.start:,} up to {known.stop:,} when it was written"
            )

    def check_complete(self) -> None:
        """Raises ValueError unless all steps of the run are declared."""
        last = self.attempts[-1]
        if last.steps.stop != last.terms.mechanism.num_steps:
            raise ValueError("a model is released when all steps are declared")

    def resumes(
        self, terms: Terms, *, step: int, origin: str, repeatable: bool, alone: bool
    ) -> bool:
        """Whether the last attempt resumes from a checkpoint: see `Ledger.resume`."""
        last = self.attempts[-1]
        exact = repeatable or (alone and not step < last.steps.stop)
        return terms.record() == last.terms.record() and self._made(step, origin) and exact

    def may_draw_anew(self, terms: Terms, *, step: int, origin: str, alone: bool) -> bool:
        """Whether another attempt may draw the pending noise in a checkpoint.

        No other attempt has drawn it, nor ever will, and its law is still what it was: see
        docs/explanation/declared-steps-and-attempts.md.
        """
        last = self.attempts[-1]
        untouched = alone and self._made(step, origin) and not step < last.steps.stop
        return untouched and _law_of_noise(terms) == _law_of_noise(last.terms)

    def _made(self, step: int, origin: str) -> bool:
        """Whether the last attempt made the state of a checkpoint, or began from it."""
        last = self.attempts[-1]
        return (origin, step) == (last.origin, last.steps.start) or (
            origin in self.heads[last.line :]
        )

    @property
    def parts(self) -> list[Part]:
        """What was declared, as it is priced."""
        if self.selection is not None:
            return [self.selection.trials(*(attempt.terms for attempt in self.attempts))]
        return [attempt.terms.segment(attempt.steps) for attempt in self.attempts]

    @property
    def initial_digests(self) -> set[str]:
        """SHA-256 of the trained models that the attempts started from."""
        return {part.initial.sha256 for part in self.parts if part.initial}

    def guarantee(self, *earlier: History) -> Guarantee:
        """Returns the guarantee that covers everything declared, by the ledger alone.

        Args:
          earlier: Finished runs; with them, it is the guarantee for a unit with rows in every run.

        Raises:
          ValueError: if one of several runs is not finished, or `check_together` refuses them.
        """
        runs = (*earlier, self)
        parts = [part for run in runs for part in run.parts]
        if earlier:
            if not all(run.released for run in runs):
                raise ValueError("only finished runs are counted together")
            check_together(parts)
            # A run that releases its initial parameters unchanged did not train them alone.
            counted = {run.released for run in runs if run.released not in run.initial_digests}
            parts = [
                without_initial(part) if part.initial and part.initial.sha256 in counted else part
                for part in parts
            ]
        last = self.selection or self.attempts[-1].terms
        return cost(parts, last.delta)

    def extend(self, body: dict[str, Any], head: str) -> None:
        """Takes in one more line, or raises ValueError if it does not follow the ones before."""
        if self.released:
            raise ValueError("it follows the line that closes the ledger")
        if "released" in body:
            self.check_complete()
            self.released = checked(body["released"], str, "released")
        elif "audit" in body:
            self.audit = checked(body["audit"], str, "audit")
        elif "selection" in body:
            if self.heads:
                raise ValueError("a selection is declared before all else")
            self.selection = Selection.from_record(body["selection"])
        elif "steps" in body:
            last = self.attempts[-1]
            first, stop = checked(body["steps"], list[int], "steps")
            if first != last.steps.stop or stop <= first:
                raise ValueError(f"steps {first} to {stop} do not follow the ones before")
            steps = range(last.steps.start, stop)
            last.terms.segment(steps)  # refuses steps that the run has not
            self.attempts[-1] = dataclasses.replace(last, steps=steps)
        else:
            self._begin(body, head)
        self.heads.append(head)
        self.declared.append(self.attempts[-1].steps if self.attempts else range(0))

    def _begin(self, body: dict[str, Any], head: str) -> None:
        if "generation" in body:
            raise ValueError("it is of version 0.1.0, whose unfinished runs cannot be resumed")
        index, first = (checked(body[name], int, name) for name in ("attempt", "first_step"))
        origin, nonce = (checked(body[name], str, name) for name in ("origin", "nonce"))
        if index != len(self.attempts):
            raise ValueError(f"attempt {index} does not follow the ones before")
        self.check_origin(first, origin)
        terms, steps = Terms.from_record(body), range(first, first)
        terms.segment(steps)
        if not nonce and (index or not terms.reproducible_noise):
            raise ValueError("it has no nonce: in a copy the same keys would begin")
        if self.selection is not None:
            if index:
                raise ValueError("a selection releases one model")
            self.selection.check_released(terms)
        if index:
            check_same_noise(self.attempts[-1].terms, terms)
        key = int(head[:16], 16) if nonce else 0
        self.attempts.append(Attempt(index, key, terms, origin, steps, len(self.heads)))


def _law_of_noise(terms: Terms) -> tuple[Any, ...]:
    """Returns what the law of pending noise depends on, and more: the whole configuration."""
    record = terms.record()
    return {**record, "fingerprint": None}, terms.fingerprint.get("config")


def check_same_noise(before: Terms, after: Terms) -> None:
    """Raises LedgerError unless the noise has one law in both."""
    if after.mechanism.noise != before.mechanism.noise:
        name = before.mechanism.noise.name
        raise LedgerError(
            f"this run was begun with {name} noise and resumes only so: what its guarantee covers "
            "holds for all of its steps; start a new run"
        )


def line_of(body: dict[str, Any], previous: str) -> tuple[bytes, str]:
    """Returns a line of the file and its hash, which covers the lines before by `previous`."""
    text = json.dumps(body, allow_nan=False)
    head = hashlib.sha256(f"{previous} {text}".encode()).hexdigest()
    return f'{text[:-1]}, "hash": "{head}"}}\n'.encode(), head
