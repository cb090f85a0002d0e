"""Questions about a run of a task: `dpsgd train`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accounting.records import Count
from dpsgd.files import check_writable
from dpsgd.runs.spec import known_options
from dpsgd.runs.support import check
from experiments.cli.options import Option, word_of
from experiments.cli.questions.about_runs import FOR_PROGRAMS, OfTask
from experiments.cli.questions.directories import Devices, LogTo
from experiments.cli.tasks import DEFAULT


@dataclass(frozen=True, kw_only=True)
class Train(OfTask):
    """Train a task with differential privacy and write a run directory.

    After sampler:NAME or --task NAME, --help lists only the options that apply to it.

    Batch size, epochs, clipping norm and learning rate that you omit are chosen before the run from
    the number of rows and the guarantee, and recorded; the rule was found on public data. Choosing
    them by results on private rows costs privacy that the guarantee does not cover.

    Attributes:
      out: Run directory to create; must not exist. Not needed with --dry-run.
      begin: Create the run directory and take no step, so that `dpsgd batches` can draw batches
        ahead; `dpsgd resume` then trains.
      dry_run: Print steps, padding, parameters, memory, measured seconds per step, hours and the
        guarantee. Uses generated rows; nothing is trained or written, and no private row is read.
        --num-devices may exceed the available devices, and --num-examples the rows of DATA.
      num_examples: Number of training rows that a dry run assumes; without DATA they have the
        columns of Criteo Display Ads.
      log_to: Also send the rows of training_log.csv (steps, epsilon so far, examples per second) to
        this program.
    """

    out: Path | None
    begin: bool = False
    dry_run: bool = False
    num_examples: Count | None = None
    log_to: LogTo | None = None
    devices: Devices = field(default_factory=Devices)

    @classmethod
    def offered(cls) -> dict[str, Any]:
        """Returns the run options except those for programs."""
        excluded = {"sampler", *FOR_PROGRAMS}
        return {n: option.default for n, option in known_options().items() if n not in excluded}

    @classmethod
    def options(cls, words: Sequence[str]) -> list[Option]:
        """Returns the options; a dry run needs fewer.

        Args:
          words: Words after the command.
        """
        options = super().options(words)
        if "--dry-run" not in words:
            return [option for option in options if option.name != "num_examples"]
        optional = {"out", *(["data"] if word_of(words, "num-examples") is not None else [])}
        return [
            dataclasses.replace(option, default=None) if option.name in optional else option
            for option in options
        ]

    @classmethod
    def elsewhere(cls, name: str) -> str:
        """Returns where an unknown option belongs, or "".

        Args:
          name: Name of the option in Python's spelling.
        """
        return "it goes with --dry-run" if name == "num_examples" else super().elsewhere(name)

    def check(self) -> None:
        """Refuses impossible runs before training code is imported."""
        if not self.dry_run:
            assert self.out is not None, "required"
            check_writable(self.out)
        if self.lacks_data and self.task != DEFAULT:
            raise ValueError(f"--task {self.task} needs DATA, whose columns a dry run measures")
        check(self.spec, self.num_examples or getattr(self.subject, "num_examples", None))
