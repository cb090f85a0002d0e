"""Reads and checks a ledger: its chained lines, attempts and declared steps, and their cost.

The privacy cost (`dpsgd.core.cost`) counts all declared steps, even those that a crash has cut off:
docs/explanation/declared-steps-and-attempts.md.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dpsgd.core.cost import cost, without_initial
from dpsgd.core.guarantee import Guarantee
from dpsgd.core.segments import Part, Segment, check_together
from dpsgd.files import parse_json
from dpsgd.runs.drawing import own_code
from dpsgd.runs.records import checked
from dpsgd.runs.terms import Selection, Terms, is_trial_of
from samplers.registry import UnknownPart

NO_HEAD = hashlib.sha256(b"dpsgd-ledger-v2").hexdigest()
"""Head of a ledger without lines."""


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
      price: `price_of` the run or selection when it began; None without own samplers or noises.
    """

    attempts: list[Attempt] = field(default_factory=list)
    lines: dict[str, Attempt | None] = field(default_factory=dict)
    audit: str = ""
    released: str = ""
    selection: Selection | None = None
    price: list[float] | None = field(default=None, compare=False)

    @classmethod
    def parse(cls, content: bytes, path: Path) -> History:
        """Parses a complete ledger.

        Args:
          content: Bytes of the file.
          path: Path of the file, for error messages.

        Raises:
          LedgerError: if the ledger is empty or invalid, or own samplers and noises state another
            price than in the first line.
        """
        history = cls()
        history.read_on(content, path)
        if not history.lines:
            raise LedgerError(
                f"{path} is empty, so the privacy cost cannot be computed: restore it from a copy"
            )
        history._check_price()
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
                stated = body.pop("hash")
                expected, head = line_of(body, self.head)
                if stated != head or expected != line + b"\n":
                    raise ValueError("its hash does not match its content and the lines before it")
                self.extend(body, head)
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
                f"the ledger lacks the last line that {holder} refers to: it was rolled back or "
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

    def _check_price(self) -> None:
        """Raises LedgerError if own samplers and noises state another price than when it began.

        A changed import of its file, or a changed class without a file, shows in the price alone.
        """
        if self.price is None or not (self.selection or self.attempts):
            return
        now = price_of(self.selection or self.attempts[0].terms)["price"]
        if len(now) != len(self.price) or not np.allclose(now, self.price, rtol=1e-6, atol=0.0):
            mechanisms = [mechanism for piece in self.parts for mechanism in piece.mechanisms]
            names = dict.fromkeys(name for mechanism in mechanisms for name in own_code(mechanism))
            raise LedgerError(
                f"the {' or the '.join(names)} states another price of the run than when the run "
                "began: restore the code that it uses, or start a new run (the declared steps "
                "still count)"
            )

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
          ValueError: if the line contradicts earlier lines, or has an unknown field, which
            another version may count.
        """
        body = dict(body)
        if self.released:
            raise ValueError("it follows the line that closes the ledger")
        if not self.lines:
            self.price = checked(body.pop("price", None), list[float] | None, "price")
        if "released" in body:
            last = self.attempts[-1]
            if last.steps.stop != last.terms.mechanism.num_steps:
                raise ValueError("the model is released before the run's last step is declared")
            self.released = checked(body.pop("released"), str, "released")
        elif "audit" in body:
            self.audit = checked(body.pop("audit"), str, "audit")
        elif "selection" in body:
            if self.lines:
                raise ValueError("a selection must be declared in the first line")
            self.selection = Selection.from_record(body.pop("selection"))
        elif "declare" in body:
            last = self.attempts[-1]
            first, stop = checked(body.pop("declare"), list[int], "declare")
            if first != last.steps.stop or stop <= first:
                raise ValueError(f"steps {first} to {stop} do not follow the steps before them")
            steps = range(last.steps.start, stop)
            dataclasses.replace(last.terms.plan, steps=steps)  # refuses steps that the run has not
            self.attempts[-1] = dataclasses.replace(last, steps=steps)
        else:
            self._begin(body, head)
        if body:
            raise ValueError(f"{next(iter(body))} is unknown")
        self.lines[head] = self.attempts[-1] if self.attempts else None

    def _begin(self, body: dict[str, Any], head: str) -> None:
        index, first = (checked(body.pop(name), int, name) for name in ("attempt", "first_step"))
        drawing = checked(body.pop("drawing"), str, "drawing")
        environment = checked(body.pop("environment"), dict[str, Any], "environment")
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
            nonce, terms = checked(body.pop("nonce"), str, "nonce"), Terms.from_record(body)
            body.clear()
            if first:
                raise ValueError(f"the first attempt must begin at step 0, not {first:,}")
            if not (nonce or terms.plan.reproducible_noise):
                raise ValueError("it lacks a nonce, which tells runs apart")
            declared = self.selection.candidates if self.selection else ()
            if self.selection and not any(is_trial_of(each, terms) for each in declared):
                raise ValueError("the released model belongs to none of the declared candidates")
        dataclasses.replace(terms.plan, steps=steps)
        self.attempts.append(Attempt(index, terms, steps, drawing, environment, head))


def price_of(terms: Terms | Selection) -> dict[str, list[float]]:
    """Returns the price of own samplers and noises, for a ledger's first line; else nothing.

    It holds both bounds on epsilon: of a selection; or of a complete run, and of this run after an
    attempt at its first half. Infinity is the largest float, for JSON.
    """
    plan = terms.trials() if isinstance(terms, Selection) else terms.plan
    if not any(map(own_code, plan.mechanisms)):
        return {}
    releases: list[list[Part]] = [[plan]]
    if isinstance(plan, Segment):
        half = range(-(-plan.mechanism.num_steps // 2))
        releases.append([dataclasses.replace(plan, steps=half), plan])
    costs = [cost(pieces, terms.delta).epsilon for pieces in releases]
    bounds = [bound for epsilon in costs if epsilon for bound in (epsilon.lower, epsilon.upper)]
    return {"price": [min(bound, sys.float_info.max) for bound in bounds]}


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


def read(path: Path) -> History:
    """Reads a ledger, even during its run.

    Raises:
      LedgerError: if the ledger is missing or damaged.
    """
    try:
        return History.parse(path.read_bytes(), path)
    except FileNotFoundError:
        raise missing_error(path) from None


def missing_error(path: Path) -> LedgerError:
    """Returns the error of a ledger that is missing."""
    return LedgerError(
        f"{path} is missing, so the privacy cost cannot be computed: restore it, or start a new run"
    )
