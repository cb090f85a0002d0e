"""The log of training: steps, what they cost so far, and how fast they are; a run's stages.

**What the log tells.** Nothing in it is computed of rows, of losses or of drawn batches. Steps and
epsilon are functions of the ledger, which is public. Throughput is the *expected* batch size times
steps over seconds, as a mean since the process began, to three digits, twice a minute at most: it
is what the progress line shows and `report.json` ends with. How long a step takes is a side channel
that no guarantee covers. A private selection, whose times are secret, has no log.
"""

from __future__ import annotations

import csv
import io
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from dpsgd.files import write_atomically

LOG = "training_log.csv"
"""The log, in the directory of its run."""

COLUMNS = ("step", "epsilon", "examples_per_second")

_SECONDS = 30.0
"""Between two rows, at least."""
_SHARE = 0.01
"""Of the time, at most, that goes into the cost of the steps so far, after the first row."""

WORDS = {
    "read": "starting and reading the data",
    "accounting": "accounting",
    "compile": "compiling",
    "audit": "audit",
    "train": "training",
    "calibrate": "calibration",
    "evaluate": "evaluation",
}
"""The stages of a run in their order, of which training is one, and what reports call them."""


class Stages:
    """Seconds of each stage; one lasts until the next begins, so that their sum is all the time.

    >>> times = iter([1.0, 4.0, 5.0, 7.0])
    >>> stages = Stages(0.0, lambda: next(times))
    >>> for stage in ("accounting", "train", "accounting"):
    ...     stages.begin(stage)
    >>> stages.seconds()
    {'read': 1.0, 'accounting': 5.0, 'train': 1.0}
    """

    def __init__(
        self, started: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self.started = clock() if started is None else started
        self._stage, self._since = "read", self.started
        self._seconds: dict[str, float] = {}

    def begin(self, stage: str) -> None:
        """Ends the present stage, and begins one of `WORDS`, which may have been there before."""
        now = self._clock()
        self._seconds[self._stage] = self._seconds.get(self._stage, 0.0) + now - self._since
        self._stage, self._since = stage, now

    def seconds(self) -> dict[str, float]:
        """Returns the seconds of each stage so far, in the order of `WORDS`."""
        self.begin(self._stage)
        return {stage: self._seconds[stage] for stage in WORDS if stage in self._seconds}


@runtime_checkable
class MetricWriter(Protocol):
    """Where the log of a run goes, besides its directory: those of `clu.metric_writers` are such.

    It is given `epsilon`, the proved upper end of all that was declared by then, and
    `examples_per_second`. Epsilons of one run, read one after another, are no guarantee of a run
    that stops by what its releases show: see `dpsgd.cost`.
    """

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Writes numbers by their names, which are those of `step`."""


class CsvWriter:
    """A file of `COLUMNS`, which is whole after each row; a step that comes again takes its place.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / LOG
    ...     for begin, step in ((0, 10), (10, 20), (10, 15)):
    ...         CsvWriter(path, begin).write_scalars(step, {"epsilon": step / 10})
    ...     print(path.read_text())
    step,epsilon,examples_per_second
    10,1.0,
    15,1.5,
    <BLANKLINE>
    """

    def __init__(self, path: Path, step: int) -> None:
        """Opens the file of a run that resumes at `step`; rows of later steps are left out.

        So are damaged ones: the log repeats the ledger and decides nothing.
        """
        self._path = path
        lines = path.read_text(errors="replace").splitlines()[1:] if path.exists() else []
        found = [line.split(",") for line in lines if line.isascii()]
        self._rows = {int(row[0]): row[1:] for row in found if row[0].isdecimal()}
        self._cut(step)

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Writes a row."""
        self._cut(step - 1)
        self._rows[step] = [str(scalars.get(name, "")) for name in COLUMNS[1:]]
        text = io.StringIO()
        lines = csv.writer(text, lineterminator="\n")
        lines.writerows([COLUMNS, *([step, *row] for step, row in self._rows.items())])
        write_atomically(self._path, lambda file: file.write(text.getvalue().encode()))

    def _cut(self, step: int) -> None:
        self._rows = {at: row for at, row in self._rows.items() if at <= step}


class TrainingLog:
    """Writes a row now and then, and the last one, to all writers."""

    def __init__(
        self, writers: Sequence[MetricWriter], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._writers, self._clock = writers, clock
        self._due = clock() + _SECONDS

    def offer(self, step: int, epsilon: Callable[[], float | None], rate: float) -> None:
        """Writes a row of these steps if one is due: only then the epsilon so far is asked for."""
        if (began := self._clock()) >= self._due:
            self.write(step, epsilon(), rate)
            now = self._clock()
            self._due = now + max(_SECONDS, (now - began) / _SHARE)

    def write(self, step: int, epsilon: float | None, rate: float) -> None:
        """Writes a row; an epsilon that is None or infinite is left out."""
        scalars = {"examples_per_second": float(f"{rate:.3g}")}
        if epsilon is not None and math.isfinite(epsilon):
            scalars["epsilon"] = epsilon
        for writer in self._writers:
            writer.write_scalars(step, scalars)
