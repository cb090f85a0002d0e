"""Logs steps, epsilon and throughput of training; times a run's stages.

**Disclosure.** The log does not use rows, losses or drawn batches. Steps and epsilon are functions
of the ledger, which is public. Throughput is the *expected* batch size times steps divided by
seconds, averaged since the process began, rounded to three digits and written at most twice a
minute; the progress line and `report.json` show the same mean. The duration of a step is a side
channel that no guarantee covers. A private selection, whose times are secret, has no log.
"""

from __future__ import annotations

import csv
import functools
import importlib
import io
import math
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol, runtime_checkable

from dpsgd.files import check_writable, write_atomically

LOG = "training_log.csv"
"""Name of the log file in the run directory."""

COLUMNS = ("step", "epsilon", "examples_per_second")

_SECONDS = 30.0
"""Least seconds between two rows, except before the last one."""
_SHARE = 0.01
"""Largest fraction of time for computing epsilon, after the first row."""

WORDS = {
    "read": "starting and reading the data",
    "accounting": "accounting",
    "compile": "compiling",
    "audit": "audit",
    "train": "training",
    "calibrate": "calibration",
    "evaluate": "evaluation",
}
"""Stages of a run in their order, with their names in reports."""


class Stages:
    """Timer of a run's stages; each stage lasts until the next begins.

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
        """Begins `stage`, a key of `WORDS`."""
        now = self._clock()
        self._seconds[self._stage] = self._seconds.get(self._stage, 0.0) + now - self._since
        self._stage, self._since = stage, now

    def seconds(self) -> dict[str, float]:
        """Returns the seconds of each stage so far."""
        self.begin(self._stage)
        return {stage: self._seconds[stage] for stage in WORDS if stage in self._seconds}


@runtime_checkable
class MetricWriter(Protocol):
    """Writer of a run's log, such as the writers of `clu.metric_writers`.

    It receives `epsilon`, the proved upper bound on epsilon of the steps declared so far, and
    `examples_per_second`. These epsilons are no guarantee if you stop a run because of its
    releases: see `dpsgd.cost`.
    """

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Writes the numbers of one step.

        Args:
          step: Number of steps done.
          scalars: Numbers by name.
        """


class CsvWriter:
    """Writer of a CSV file of `COLUMNS`, complete after each row.

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
        """Opens the log of a run that resumes at `step`; drops later rows.

        Damaged rows are left out, too: no result depends on the log.
        """
        self._path = path
        lines = path.read_text(errors="replace").splitlines()[1:] if path.exists() else []
        rows = [line.split(",") for line in lines if line.isascii()]
        self._rows = {int(row[0]): row[1:] for row in rows if row[0].isdecimal()}
        self._drop_rows_after(step)

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Writes the row of `step`, and removes later rows.

        Args:
          step: Number of steps done.
          scalars: Numbers by name; `COLUMNS` are written.
        """
        self._drop_rows_after(step - 1)
        self._rows[step] = [str(scalars.get(name, "")) for name in COLUMNS[1:]]
        text = io.StringIO()
        lines = csv.writer(text, lineterminator="\n")
        lines.writerows([COLUMNS, *([step, *row] for step, row in self._rows.items())])
        write_atomically(self._path, lambda file: file.write(text.getvalue().encode()))

    def _drop_rows_after(self, step: int) -> None:
        self._rows = {row_step: row for row_step, row in self._rows.items() if row_step <= step}


class TrainingLog:
    """Log that sends at most two rows per minute to its writers."""

    def __init__(
        self, writers: Sequence[MetricWriter], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._writers, self._clock = writers, clock
        self._due = clock() + _SECONDS

    def offer(self, step: int, epsilon: Callable[[], float | None], rate: float) -> None:
        """Writes a row if one is due.

        Args:
          step: Number of steps done.
          epsilon: Function that computes epsilon so far, called only for a row that is due.
          rate: Throughput in examples per second.
        """
        if (began := self._clock()) >= self._due:
            self.write(step, epsilon(), rate)
            now = self._clock()
            self._due = now + max(_SECONDS, (now - began) / _SHARE)

    def write(self, step: int, epsilon: float | None, rate: float) -> None:
        """Writes a row.

        Args:
          step: Number of steps done.
          epsilon: Proved epsilon of the steps; left out if None or infinite.
          rate: Throughput in examples per second.
        """
        scalars = {"examples_per_second": float(f"{rate:.3g}")}
        if epsilon is not None and math.isfinite(epsilon):
            scalars["epsilon"] = epsilon
        for writer in self._writers:
            writer.write_scalars(step, scalars)


# --- Writers of other programs --------------------------------------------------------------------

Write = Callable[[int, Mapping[str, float]], Any]

KINDS = {"tensorboard": ("tensorboardX", "clu"), "wandb": ("wandb",)}
"""Modules that can write for each program; one is enough."""


def writer_of(log: MetricWriter | str | Path | None) -> MetricWriter | None:
    """Returns the writer of a log.

    Args:
      log: Path of a new CSV file; or "tensorboard", or a path that ends so, for a folder of events
        that opens at the first row; or "wandb", or NAME/wandb for a W&B run of that name; or a
        writer; or None.

    Raises:
      TypeError: If `log` is something else.
      ValueError: If the path has another ending, or no module for the program is installed.
      OSError: If the file exists, its folder does not, or it cannot be written.
    """
    if log is None or isinstance(log, MetricWriter):
        return log
    if not isinstance(log, str | Path):
        raise TypeError(
            "log must be a path or have write_scalars(step, scalars), got a value of type "
            f"{type(log).__name__}"
        )
    path = Path(log)
    if path.name in KINDS:
        module = next((name for name in KINDS[path.name] if find_spec(name)), None)
        if module is None:
            raise ValueError(f"log to {path.name} needs: pip install {KINDS[path.name][0]}")
        opened = functools.cache(lambda: _OPEN[module](path))
        return SimpleNamespace(write_scalars=lambda step, scalars: opened()(step, scalars))
    if path.suffix != ".csv":
        raise ValueError(
            f"log={str(log)!r} must end in .csv, tensorboard or wandb; pass a writer for another "
            "format"
        )
    if path.exists():
        raise FileExistsError(f"log={str(log)!r} exists; name another file")
    if not path.absolute().parent.is_dir():
        raise FileNotFoundError(f"log={str(log)!r}: there is no folder {path.parent}")
    check_writable(path)
    return CsvWriter(path, 0)


def _tensorboard_x(path: Path) -> Write:
    events: Any = importlib.import_module("tensorboardX").SummaryWriter(str(path))

    def write(step: int, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            events.add_scalar(name, value, step)
        events.flush()

    return write


def _clu(path: Path) -> Write:
    writers: Any = importlib.import_module("clu.metric_writers")
    return writers.SummaryWriter(str(path)).write_scalars


def _wandb(path: Path) -> Write:
    wandb: Any = importlib.import_module("wandb")
    wandb.init(project="dpsgd", name=path.parent.name or None)
    return lambda step, scalars: wandb.log(dict(scalars), step=step)


_OPEN = {"tensorboardX": _tensorboard_x, "clu": _clu, "wandb": _wandb}
