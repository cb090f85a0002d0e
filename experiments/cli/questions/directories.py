"""Questions about a run's directory: `dpsgd resume`, `batches` and `ledger`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from accounting.records import Count, Must, Named
from experiments.cli.options import PLACE
from experiments.cli.questions import OfRun
from experiments.cli.questions.prepare import Pipeline

LogTo = Literal["tensorboard", "wandb"]

_PROCESS = re.compile(r"([0-9]{1,6})/([0-9]{1,6})@(.+:([0-9]{1,5}))")


def _is_process(text: str | None) -> bool:
    if text is None:
        return True
    if (found := _PROCESS.fullmatch(text)) is None:
        return False
    return int(found[1]) < int(found[2]) and 0 < int(found[4]) < 2**16


@dataclass(frozen=True, kw_only=True)
class Devices:
    """Devices and processes of a run. They change the bits of a model, never its guarantee.

    Attributes:
      num_devices: Devices that train together, each with a part of every batch. Default: all.
      process: INDEX/COUNT@HOST:PORT, such as 0/4@host0:1234: number of this process, number of
        processes, and where process 0 listens; all are started with the same command. Default:
        from Slurm or Kubernetes if they started several processes, else a single process.
    """

    num_devices: Count | None = None
    process: Annotated[
        str | None, Must("INDEX/COUNT@HOST:PORT, INDEX below COUNT", _is_process)
    ] = None

    @property
    def meeting(self) -> tuple[str | None, int | None, int | None]:
        """Address of process 0, number of processes and index of this one; None if not given."""
        if self.process is None:
            return None, None, None
        found = _PROCESS.fullmatch(self.process)
        assert found is not None, "checked"
        return found[3], int(found[2]), int(found[1])


@dataclass(frozen=True, kw_only=True)
class OnDevices(OfRun):
    """Base of questions that go on with a run.

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
    """Draw the batches of all steps that a run has left, and write them in step order.

    For rows on storage without random access: `dpsgd resume` then reads the files one after the
    other, and destroys them in the end. The run must have been begun (`dpsgd train ... --begin`)
    with --data-on host; after a kill its batches are drawn again. They are as secret as the
    sampling seed: who reads them knows who takes part.

    Attributes:
      out: Folder to create for the batches, readable by its owner alone. All workers need the same
        path to it.
    """

    out: Annotated[Path, PLACE]
    pipeline: Pipeline = field(default_factory=Pipeline)

    def check(self) -> None:
        """Refuses options of a pipeline without one."""
        self.pipeline.check()


@dataclass(frozen=True, kw_only=True)
class Ledger(OfRun):
    """Print what a run has released so far and what that costs, by its ledger alone.

    The run may be finished, running or killed.

    Attributes:
      earlier: Directories of earlier finished runs. Also prints epsilon for a unit with rows in one
        of the runs, and for a unit with rows in all of them.
    """

    ANSWERED_BY: ClassVar[str] = "costs"

    earlier: Annotated[tuple[Path, ...], Named("with")] = ()
