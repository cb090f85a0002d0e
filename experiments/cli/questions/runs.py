"""Questions about a run of a task: `dpsgd train`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpsgd.files import check_writable
from dpsgd.runs.spec import known_options
from dpsgd.runs.support import check
from experiments.cli.questions.about_runs import FOR_PROGRAMS, OfTask
from experiments.cli.questions.directories import Devices, LogTo


@dataclass(frozen=True, kw_only=True)
class Train(OfTask):
    """Train a task with differential privacy and write a run directory.

    After sampler:NAME or --task NAME, --help lists only the options that apply to it.

    Batch size, epochs, clipping norm and learning rate that you omit are chosen before the run from
    the number of rows and the guarantee, and recorded; the rule was found on public data. Choosing
    them by results on private rows costs privacy that the guarantee does not cover.

    Attributes:
      out: Run directory to create; must not exist.
      begin: Create the run directory and take no step, so that `dpsgd batches` can draw batches
        ahead; `dpsgd resume` then trains.
      dry_run: Print steps, padding, parameters, memory, measured seconds per step, hours and the
        guarantee. Uses generated rows; nothing is trained or written, and no private row is read.
      log_to: Also send the rows of training_log.csv (steps, epsilon so far, examples per second) to
        this program.
    """

    out: Path
    begin: bool = False
    dry_run: bool = False
    log_to: LogTo | None = None
    devices: Devices = field(default_factory=Devices)

    @classmethod
    def offered(cls) -> dict[str, Any]:
        """Returns the run options except those for programs."""
        excluded = {"sampler", *FOR_PROGRAMS}
        return {n: option.default for n, option in known_options().items() if n not in excluded}

    def check(self) -> None:
        """Refuses impossible runs before training code is imported."""
        if not self.dry_run:
            check_writable(self.out)
        check(self.spec, getattr(self.subject, "num_examples", None))
