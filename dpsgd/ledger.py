r"""The ledger of a run: what was declared before its noise was drawn, and what that costs.

A run that dies may have released anything whose noise it had drawn. So a block of steps is
*declared* first, in a line that is on the disk before the noise exists; and what was declared is
what is counted, whether or not it came to be used. The file is enough to price the run.

**Generations.** The noise of a step is a pure function of (root secret, generation, step). A run
that is resumed with everything unchanged repeats the same releases bit for bit: the same numbers,
seen twice, which cost nothing more. If anything changed (code, data, configuration, hardware), the
same noise would hide two different sums, and their difference would be free of noise. Then a new
*generation* begins: new keys for sampling and noise, and every step that it declares is counted in
addition. `Ledger.resume` decides, and a step may be repeated only on the very path on which it was
first taken: from a state that this generation made, or began from.

A later generation's keys are named by 64 bits of the hash of the line that begins it. So two copies
of one run directory that go different ways do not share noise either; their prices add up.

**Price.** Let generation g declare the steps S_g. Given all that was released before, it is part of
a run of its own mechanism with a fresh seed and fresh noise, so the sampler's dominating pair
bounds it, and the product of the pairs bounds the whole (Y. Zhu, J. Dong, Y.-X. Wang, Optimal
Accounting of Differential Privacy via Characteristic Function, 2022, on the adaptive composition
of dominating pairs). Where all generations have one sampler and one noise multiplier, the sampler
itself prices that product (`BatchSampler.privacy_of`: Poisson counts steps, the others count an
epoch that was entered as whole). Where they are of k kinds, basic composition adds them up: the
product of (eps_i, delta / k)-DP pairs is (sum of eps_i, delta)-DP (C. Dwork, K. Kenthapadi, F.
McSherry, I. Mironov, M. Naor, Our Data, Ourselves, 2006, Theorem 1).

The price of an unfinished run is that of its declared steps. It holds for a run that stopped for
reasons other than what it released; whoever stops because of what he saw chose among the prefixes
of the whole run, all of which the price of the *whole* run covers.

**Integrity.** Each line ends with a SHA-256 hash of itself and of all lines before it. A checkpoint
holds the hash of the last line at its time (the *head*), so a ledger that was edited, deleted or
rolled back behind the checkpoint is recognised, and refused. The hashes are not signatures: they
protect from accidents (an old copy restored, a file merged by hand), not from an owner who forges
the whole directory. A last line without its end is what a crash leaves of a line whose write did
not return: nothing was drawn under it, and it is removed.
"""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import samplers
from accounting import Bound, epsilon
from dpsgd.algorithm import Mechanism
from dpsgd.files import fsync_folder
from dpsgd.guarantee import ADJACENCY, Guarantee, notes_on
from samplers import BatchSampler

NO_HEAD = hashlib.sha256(b"dpsgd-ledger-v1").hexdigest()
"""The head of a ledger without lines."""


class LedgerError(ValueError):
    """A ledger that cannot be believed, or is in use: one line that says why."""


@dataclass(frozen=True)
class Terms:
    """Everything but the steps that the price of a generation depends on, and what it ran on.

    Attributes:
      mechanism: Sampler, sigma and C.
      delta: The delta at which the guarantee is given.
      reproducible_noise: Whether the noise came from a seed that can be guessed.
      fingerprint: Whatever the numbers of a step depend on, as JSON values: releases are repeated
        only where all of it is unchanged. It must not tell anything about private data.
    """

    mechanism: Mechanism
    delta: float
    reproducible_noise: bool
    fingerprint: Mapping[str, Any]


@dataclass(frozen=True)
class Generation:
    """Consecutive steps under one set of keys.

    Attributes:
      index: 0 for the first generation of a run, then 1, 2, ...
      key: The number by which `RootKey` derives this generation's keys.
      terms: What it ran on.
      origin: Head of the ledger in the checkpoint that it began from; `NO_HEAD` for none.
      steps: What it declared.
    """

    index: int
    key: int
    terms: Terms
    origin: str
    steps: range


@dataclass(frozen=True)
class History:
    """What a ledger says, in the order in which it was written.

    Attributes:
      generations: With what each declared; at least one.
      heads: The hash of each line.
      beginnings: The line that begins each generation.
    """

    generations: list[Generation] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    beginnings: list[int] = field(default_factory=list)

    @property
    def head(self) -> str:
        """The hash of the last line."""
        return self.heads[-1] if self.heads else NO_HEAD

    def check_head(self, head: str, holder: str) -> None:
        """Raises LedgerError unless the line with hash `head`, which `holder` recorded, is here."""
        if head != NO_HEAD and head not in self.heads:
            raise LedgerError(
                f"the ledger is not the one that {holder} was written with: it was rolled back or "
                "replaced, so what was released cannot be counted; restore the newer ledger"
            )

    def guarantee(self) -> Guarantee:
        """Returns the guarantee that covers everything declared, by the ledger alone."""
        told = [generation for generation in self.generations if generation.steps]
        last = self.generations[-1].terms
        void, interval = "", None
        notes: tuple[str, ...] = ()
        if any(generation.terms.reproducible_noise for generation in told):
            void = "reproducible noise: whoever guesses the seed can subtract it"
        if any(generation.terms.mechanism.noise_multiplier == 0 for generation in told):
            void = "no noise was added"
        if len({generation.terms.mechanism.sampler.unit for generation in told}) > 1:
            void = "the generations of this run protect different units"
        if not void:
            interval = self._price(told, last.delta)
            notes = notes_on(last.mechanism, last.delta, interval)
        return Guarantee(
            epsilon=interval,
            delta=last.delta,
            unit=last.mechanism.sampler.unit,
            adjacency=ADJACENCY,
            noise_multiplier=last.mechanism.noise_multiplier,
            l2_clip_norm=last.mechanism.l2_clip_norm,
            void=void,
            notes=notes,
        )

    def _extend(self, body: dict[str, Any], head: str) -> None:
        """Takes in one more line, or raises ValueError if it does not follow the ones before."""
        if "steps" in body:
            last = self.generations[-1]
            first, stop = body["steps"]
            if first != last.steps.stop or stop <= first:
                raise ValueError(f"steps {first} to {stop} do not follow the ones before")
            steps = range(last.steps.start, stop)
            self.generations[-1] = dataclasses.replace(last, steps=steps)
        else:
            index, first = body["generation"], body["first_step"]
            if index != len(self.generations):
                raise ValueError(f"generation {index} does not follow the ones before")
            # The root is new to the first generation; later ones must differ in all copies of it.
            key = int(head[:16], 16) if index else 0
            steps = range(first, first)
            generation = Generation(index, key, _terms(body), body["origin"], steps)
            self.generations.append(generation)
            self.beginnings.append(len(self.heads))
        self.heads.append(head)

    def _price(self, told: list[Generation], delta: float) -> Bound:
        if not told:
            return Bound(0.0, 0.0, note="no step was declared: nothing was released")
        kinds: list[tuple[BatchSampler, float, list[range]]] = []
        for generation in told:
            mechanism = generation.terms.mechanism
            kind = mechanism.sampler, mechanism.noise_multiplier
            for sampler, noise, stretches in kinds:
                if (sampler, noise) == kind:
                    stretches.append(generation.steps)
                    break
            else:
                kinds.append((*kind, [generation.steps]))
        bounds = [
            epsilon(sampler.privacy_of(noise, stretches), delta / len(kinds))
            for sampler, noise, stretches in kinds
        ]
        if any(bound.confidence < 1 for bound in bounds):
            raise LedgerError("a sampler's price is an estimate, and an estimate is no guarantee")
        only = told[0]
        if len(told) == 1 and only.steps == range(only.terms.mechanism.sampler.num_steps):
            return bounds[0]
        covered = "; ".join(
            f"generation {g.index}: steps {g.steps.start:,} to {g.steps.stop - 1:,} of "
            f"{g.terms.mechanism.sampler.num_steps:,}"
            for g in told
        )
        note = (
            f"counted as declared ({covered}); epochs that were entered count whole except under "
            "Poisson, and no lower end is computed"
        )
        total = math.fsum(bound.upper for bound in bounds)  # of one number: that number
        upper = total if len(bounds) == 1 else math.nextafter(total, math.inf)
        return Bound(0.0, upper, note=note)


class Ledger:
    """A run's ledger, open for writing; whoever has it open owns the run.

    The file is locked as long as it is open, and the system drops the lock when the process ends,
    however it ends.

    Attributes:
      path: The file.
      history: What it says.
    """

    path: Path
    history: History

    def __init__(self, path: Path, descriptor: int, history: History) -> None:
        """Holds an open, locked file; use `create` and `open`."""
        self.path = path
        self.history = history
        self._descriptor = descriptor

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file and drops the lock."""
        os.close(self._descriptor)

    @classmethod
    def create(cls, path: Path, terms: Terms) -> Ledger:
        """Makes the ledger of a new run, whose first generation has `terms`.

        Raises:
          FileExistsError: if there is one.
          OSError: if it cannot be written.
        """
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o666)
        try:
            _lock(descriptor, path)
            fsync_folder(path.parent)
            ledger = cls(path, descriptor, History())
            ledger._begin(terms, step=0, origin=NO_HEAD)
        except BaseException:
            os.close(descriptor)
            raise
        return ledger

    @classmethod
    def open(cls, path: Path) -> Ledger:
        """Opens the ledger of a run that goes on.

        Raises:
          LedgerError: if it is missing, damaged, or open in another process.
        """
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_APPEND)
        except FileNotFoundError:
            raise _missing(path) from None
        try:
            _lock(descriptor, path)
            content = path.read_bytes()
            history = _parse(content, path)
            whole = content.rfind(b"\n") + 1
            if whole < len(content):
                os.ftruncate(descriptor, whole)
                os.fsync(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(path, descriptor, history)

    def resume(self, terms: Terms, *, step: int, origin: str, repeatable: bool) -> Generation:
        """Returns the generation in which a run goes on from a checkpoint: the last, or a new one.

        The last generation goes on if its terms are unchanged and the checkpoint lies on its path
        (it was written in it, or is what it began from), and if the steps that were declared after
        the checkpoint, which will be taken again, are repeated bit for bit.

        Args:
          terms: What the run would go on with.
          step: Steps done in the checkpoint; 0 for none.
          origin: Head of the ledger in the checkpoint; `NO_HEAD` for none.
          repeatable: Whether this machine repeats a computation bit for bit in another process.
        """
        last = self.history.generations[-1]
        own = (origin, step) == (last.origin, last.steps.start) or (
            origin in self.history.heads[self.history.beginnings[-1] :]
        )
        again = step < last.steps.stop
        if _record(terms) == _record(last.terms) and own and (repeatable or not again):
            return last
        return self._begin(terms, step=step, origin=origin)

    def declare(self, steps: range) -> None:
        """Declares `steps` in the last generation; when this returns, that is on the disk.

        Steps that this generation declared before are not declared again: they are repeated.

        Raises:
          ValueError: if they do not join what was declared before, or lie outside the run.
          OSError: if it cannot be written; the ledger is then as it was.
        """
        last = self.history.generations[-1]
        missing = range(max(steps.start, last.steps.stop), steps.stop)
        if steps.start < last.steps.start or missing.start > last.steps.stop:
            raise ValueError(f"{steps} does not join the declared {last.steps}")
        if steps.stop > last.terms.mechanism.sampler.num_steps:
            raise ValueError(f"{steps} goes beyond the run's last step")
        if missing:
            self._append({"steps": [missing.start, missing.stop]})

    def _begin(self, terms: Terms, *, step: int, origin: str) -> Generation:
        self._append(
            {
                "generation": len(self.history.generations),
                "first_step": step,
                "origin": origin,
                **_record(terms),
            }
        )
        return self.history.generations[-1]

    def _append(self, body: dict[str, Any]) -> None:
        line, head = _line(body, self.history.head)
        length = os.fstat(self._descriptor).st_size
        try:
            # One call: the system writes a line of this length whole, or (disk full) in part.
            if os.write(self._descriptor, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
            os.fsync(self._descriptor)
        except OSError:
            os.ftruncate(self._descriptor, length)
            raise
        self.history._extend(body, head)


def read(path: Path) -> History:
    """Reads a ledger, also while a run is writing it.

    Raises:
      LedgerError: if it is missing or damaged.
    """
    try:
        return _parse(path.read_bytes(), path)
    except FileNotFoundError:
        raise _missing(path) from None


def _parse(content: bytes, path: Path) -> History:
    history = History()
    for number, line in enumerate(content.split(b"\n")[:-1], 1):  # what has no end is not a line
        try:
            body = json.loads(line)
            stated = body.pop("hash")
            expected, head = _line(body, history.head)
            if stated != head or expected != line + b"\n":
                raise ValueError("its hash does not fit it and the lines before")
            history._extend(body, head)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise LedgerError(
                f"{path}, line {number}: {error or 'damaged'}; the ledger was edited or damaged, "
                "so what was released cannot be counted; restore it from a copy"
            ) from None
    if not history.generations:
        raise LedgerError(f"{path} is empty: what was released cannot be counted")
    return history


def _line(body: dict[str, Any], previous: str) -> tuple[bytes, str]:
    """Returns a line of the file and its hash, which covers the lines before by `previous`."""
    text = json.dumps(body, allow_nan=False)
    head = hashlib.sha256(f"{previous} {text}".encode()).hexdigest()
    return f'{text[:-1]}, "hash": "{head}"}}\n'.encode(), head


def _record(terms: Terms) -> dict[str, Any]:
    """Returns `terms` as JSON values."""
    mechanism = terms.mechanism
    sampler = mechanism.sampler
    fields = {f.name: getattr(sampler, f.name) for f in dataclasses.fields(sampler)}
    finite = math.isfinite(mechanism.l2_clip_norm)
    record = {
        "sampler": {"name": type(sampler).__name__, **fields},
        "noise_multiplier": mechanism.noise_multiplier,
        "l2_clip_norm": mechanism.l2_clip_norm if finite else None,
        "unit": sampler.unit,
        "adjacency": ADJACENCY,
        "delta": terms.delta,
        "reproducible_noise": terms.reproducible_noise,
        "fingerprint": dict(terms.fingerprint),
    }
    return json.loads(json.dumps(record, allow_nan=False))  # plain types: what will be read back


def _terms(body: dict[str, Any]) -> Terms:
    """Returns the terms in a line of the ledger, as `_record` wrote them."""
    fields = dict(body["sampler"])
    name = fields.pop("name")
    kind = getattr(samplers, name, None)
    if not (isinstance(kind, type) and issubclass(kind, BatchSampler)):
        raise ValueError(f"this version knows no sampler {name!r}, and cannot price it")
    clip = body["l2_clip_norm"]
    sampler = kind(**fields)
    if (sampler.unit, ADJACENCY) != (body["unit"], body["adjacency"]):
        raise ValueError("this version would price it for another unit or adjacency")
    return Terms(
        Mechanism(sampler, body["noise_multiplier"], math.inf if clip is None else clip),
        body["delta"],
        body["reproducible_noise"],
        body["fingerprint"],
    )


def _missing(path: Path) -> LedgerError:
    return LedgerError(
        f"{path} is missing: without it what was released cannot be counted; restore it, or start "
        "a new run"
    )


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise LedgerError(
            f"another process is training in {path.parent}; wait for it to end"
        ) from None
