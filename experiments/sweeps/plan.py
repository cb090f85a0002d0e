"""The runs of a sweep, each in a folder whose name says what it is."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from pathlib import Path

from dpsgd.runs.spec import RunSpec
from dpsgd.runs.support import checked_spec
from experiments.sweeps.config import Sweep


@dataclass(frozen=True)
class PlannedRun:
    """One repetition of a cell: a combination of the values of a grid's axes."""

    cell: str
    """Name of the cell."""
    spec: RunSpec
    out: Path
    """Run directory."""


def plan(sweep: Sweep, folder: Path, where: str) -> list[PlannedRun]:
    """Returns the runs of a sweep, each once, in the order of its file.

    The initial parameters of a repetition are its own, and alike for all cells: so that cells are
    compared from the same beginnings, and error bars hold all that is random.

    Raises:
      ValueError: for a setting of the wrong type, or a configuration that cannot be run.
    """
    seeds = sweep.insecure_seeds or (None,) * (sweep.repetitions or 0)
    cells = {name: options for grid in sweep.grid for name, options in grid.cells(where).items()}
    runs = []
    for (name, options), (number, seed) in itertools.product(cells.items(), enumerate(seeds)):
        # What a sweep does not ask for is no part of what it compares.
        settings = {"calibration": "none", **sweep.run, **options, "insecure_seed": seed}
        settings["bands"] = None if options["bands"] == 1 else options["bands"]
        if "non_private" in options:  # asked of all runs, and this one has no noise and no clipping
            settings |= {"secure_noise": False, "calibration": "none"}
        spec = checked_spec(settings, f"{where}, run")
        begun = spec.init_seed + (number if seed is None else seed)
        spec = dataclasses.replace(spec, init_seed=begun % 2**32)
        repetition = f"r{number}" if seed is None else f"seed{seed}"
        runs.append(PlannedRun(name, spec, folder / f"{name}-{repetition}"))
    return runs
