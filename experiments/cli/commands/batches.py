"""`dpsgd batches`: the batches of a run, drawn ahead."""

from __future__ import annotations

import importlib
from typing import Any

from dpsgd.engine.batch_files import draw_here
from dpsgd.runs.run import Run
from experiments.cli.commands.prepare import runner_of
from experiments.cli.console import Console, counted
from experiments.cli.devices import placement_of
from experiments.cli.options import look_in_the_current_folder
from experiments.cli.questions.directories import Batches
from experiments.tasks import task_of


def run(asked: Batches) -> None:
    """Runs `dpsgd batches`."""
    with Console() as console:
        console.progress("starting")
        look_in_the_current_folder()
        task = task_of(asked.run, data=asked.data)
        write: Any = draw_here
        if asked.pipeline.beam:
            draws = importlib.import_module("experiments.beam.draws")
            write = draws.drawn_by(runner_of(asked.pipeline).write_batches, task.columns)
        place = placement_of(asked.devices)
        begun = Run.open(asked.run, task, placement=place, progress=console.progress)
        files = begun.draw(asked.out, write)
        if files is None:
            console.line(f"the run is finished, and needs no batches: dpsgd report {asked.run}")
        else:
            console.line(f"{counted(files, 'file')} in {asked.out}; dpsgd resume {asked.run}")
