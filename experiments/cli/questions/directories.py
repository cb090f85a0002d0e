"""Questions about a run's directory: `dpsgd resume`, `batches` and `ledger`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from accounting.records import Count, Must, Named
from experiments.cli.options import PLACE
from experiments.cli.questions import OfRun, ReadsLedgers
from experiments.cli.questions.prepare import Pipeline

LogTo = Literal["tensorboard", "wandb"]

_PROCESS = re.compile(r"([0-9]{1,6})/([0-9]{1,6})@(.+:([0-9]{1,5}))")


def _is_process(text: str | None) -> bool:
    if text is None:
        return True
    if (match := _PROCESS.fullmatch(text)) is None:
        return False
    return int(match[1]) < int(match[2]) and 0 < int(match[4]) < 2**16


@dataclass(frozen=True, kw_only=True)
class Devices:
    """Devices and processes of a run. They change the bits of a model, never its guarantee.

    Attributes:
      num_devices: Devices that train together, each with a part of every batch. Default: all.
      process: INDEX/COUNT@HOST:PORT, such as 0/4@host0:1234: number of this process, number of
        processes, and address of process 0. Start each with the same command, except for INDEX.
        Default: from Slurm or Kubernetes if they started several processes, else a single process.
    """

    num_devices: Count | None = None
    process: Annotated[
        str | None, Must("INDEX/COUNT@HOST:PORT, INDEX below COUNT", _is_process)
    ] = None

    @property
    def meeting(self) -> tuple[str | None, int | None, int | None]:
        """Address of process 0, number of processes, own index.

        All are None if `process` is None.

        >>> Devices(process="0/4@host0:1234").meeting
        ('host0:1234', 4, 0)
        """
        if self.process is None:
            return None, None, None
        match = _PROCESS.fullmatch(self.process)
        assert match is not None, "checked"
        return match[3], int(match[2]), int(match[1])


@dataclass(frozen=True, kw_only=True)
class OnDevices(OfRun):
    """Base of questions that continue a run.

    Attributes:
      data: Path of the training data. Default: the path that the run recorded.
    """

    ANSWERED_BY: ClassVar[str] = "runs"

    data: Path | None = None
    devices: Devices = field(default_factory=Devices)


@dataclass(frozen=True, kw_only=True)
class Resume(OnDevices):
    """Resume a run that was stopped, from its last checkpoint.

    Attributes:
      log_to: Also send steps, epsilon so far and examples per second to this program.
    """

    log_to: LogTo | None = None


@dataclass(frozen=True, kw_only=True)
class Batches(OnDevices):
    """Draw the batches of all remaining steps of a run, and write them in step order.

    For rows on storage without random access: `dpsgd resume` reads the files in order, and destroys
    them at the end. Create the run by `dpsgd train ... --begin --data-on host`; if it is killed,
    draw its batches again. The files are as secret as the sampling seed: they tell which rows take
    part.

    Attributes:
      out: Folder to create for the batches, readable only by its owner, under the same path on all
        workers.
    """

    out: Annotated[Path, PLACE]
    pipeline: Pipeline = field(default_factory=Pipeline)

    def check(self) -> None:
        """Refuses options of a pipeline without one."""
        self.pipeline.check()


@dataclass(frozen=True, kw_only=True)
class Ledger(ReadsLedgers, OfRun):
    """Print the releases of a run so far, and their privacy cost, from its ledger.

    The run may be finished, running or killed.

    Attributes:
      earlier: Directories of earlier finished runs. Also prints epsilon for a unit with rows in one
        of the runs, and for a unit with rows in all of them.
    """

    ANSWERED_BY: ClassVar[str] = "costs"

    earlier: Annotated[tuple[Path, ...], Named("with")] = ()
