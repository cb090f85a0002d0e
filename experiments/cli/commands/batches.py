"""`dpsgd batches`: the batches of a run, drawn ahead."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro

from experiments.cli.commands.prepare import Pipeline
from experiments.cli.devices import Devices


@dataclass(frozen=True, kw_only=True)
class Batches:
    """Draw the batches of all steps that a run has left, and write them in step order.

    For rows on storage without random access: `dpsgd resume` then reads the files one after the
    other, to the same bits, and destroys them in the end. The run must have been begun (`dpsgd
    train ... --begin`) with --data-on host, and resume where and as it would now: if anything else
    changes, its batches are drawn again. They are as secret as its root: who reads them knows who
    takes part.
    """

    run: tyro.conf.Positional[Path]
    """Run directory."""
    out: tyro.conf.Positional[Path]
    """Folder to create for the batches, readable by its owner alone. All workers need the same path
    to it."""
    data: Path | None = None
    """Path of the training data. Default: the path that the run recorded."""
    devices: Devices = field(default_factory=Devices)
    pipeline: Pipeline = field(default_factory=Pipeline)


def run(config: Batches) -> None:
    """Runs `dpsgd batches`."""
    from experiments.cli.console import Console, counted

    runner = config.pipeline.chosen()
    with Console() as console:
        console.progress("starting")
        from dpsgd.engine.batch_files import draw_here
        from dpsgd.runs.run import Run
        from experiments.cli.options import look_in_the_current_folder
        from experiments.tasks import task_of

        look_in_the_current_folder()
        task = task_of(config.run, data=config.data)
        write: Any = draw_here
        if runner is not None:
            from experiments.beam.draws import drawn_by

            write = drawn_by(runner.write_batches, task.columns)
        begun = Run.open(
            config.run, task, placement=config.devices.placement(), progress=console.progress
        )
        files = begun.draw(config.out, write)
        if files is None:
            console.line(f"the run is finished, and needs no batches: dpsgd report {config.run}")
        else:
            console.line(f"{counted(files, 'file')} in {config.out}; dpsgd resume {config.run}")
