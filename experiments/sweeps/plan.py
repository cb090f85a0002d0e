"""The runs of a sweep, each with a name that says what it is."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpsgd.runs.recommendation import Settings
from dpsgd.runs.spec import RunSpec
from dpsgd.runs.support import checked_spec
from experiments.results.table import AXES, IN_SAMPLER, PRIVACY, digits, sampler_settings
from experiments.sweeps.config import Grid, Sweep
from samplers.settings import SamplerSettings

IN_PRIVATE = ("l2_clip_norm", "bands")
"""Axes on which a run without privacy has no place, beside those of privacy."""


@dataclass(frozen=True)
class PlannedRun:
    """One repetition of a cell: a combination of the values of a grid's axes."""

    cell: str
    """Name of the cell."""
    spec: RunSpec
    out: Path
    """Run directory."""


def cells(grid: Grid) -> dict[str, dict[str, Any]]:
    """Returns the options of every combination of the values of a grid's axes, by its name."""
    privacy: list[dict[str, Any]] = [
        {axis: value} for axis in PRIVACY for value in getattr(grid, axis)
    ]
    privacy += [{"non_private": True}] if grid.non_private else []
    others = ("learning_rate", *IN_PRIVATE)
    found = {}
    for sampler, sizes, *values, wanted in itertools.product(
        grid.samplers(),
        itertools.product(*(getattr(grid, axis) for axis in IN_SAMPLER)),
        *(getattr(grid, axis) for axis in others),
        privacy,
    ):
        options = dict(zip(others, values, strict=True)) | wanted
        if "non_private" in wanted:
            # Without privacy nothing is clipped: one cell, whatever norms its grid has.
            options |= {"l2_clip_norm": Settings.l2_clip_norm, "bands": 1}
        options["sampler"] = sized(sampler, dict(zip(IN_SAMPLER, sizes, strict=True)))
        found[name_of(options)] = options
    return found


def name_of(options: Mapping[str, Any]) -> str:
    """Returns every value by which a cell differs from others, fit for a folder.

    >>> from samplers.settings import SETTINGS
    >>> options = {"learning_rate": 3e-3, "l2_clip_norm": 4.0, "bands": 1}
    >>> options["sampler"] = SETTINGS["poisson"](batch_size=1024, epochs=10)
    >>> name_of({**options, "noise_multiplier": 0.5})
    'poisson-sigma0.5-b1024-e10-lr0.003-c4'
    >>> name_of({**options, "non_private": True})  # nothing is clipped without noise
    'poisson-nonprivate-b1024-e10-lr0.003'
    """
    sampler, without = options["sampler"], options.get("non_private")
    sizes = {axis: getattr(sampler, axis, None) for axis in IN_SAMPLER}
    values = {**options, **sizes, **(dict.fromkeys(IN_PRIVATE) if without else {})}
    parts = [
        f"{short}{digits(value)}"
        for axis, (short, _, _) in AXES.items()
        if (value := values.get(axis)) is not None and (axis, value) != ("bands", 1)
    ]
    own = sampler_settings(sampler).split()
    return "-".join([sampler.name, *own, *(["nonprivate"] if without else []), *parts])


def sized(sampler: SamplerSettings, sizes: dict[str, int]) -> SamplerSettings:
    """Returns the sampler with those of the sizes that are settings of it."""
    names = {field.name for field in dataclasses.fields(sampler)}
    return dataclasses.replace(sampler, **{k: v for k, v in sizes.items() if k in names})


def plan(sweep: Sweep, folder: Path, where: str) -> list[PlannedRun]:
    """Returns the runs of a sweep, each once, in the order of its file.

    The initial parameters of a repetition are its own, and alike for all cells: so that cells are
    compared from the same beginnings, and error bars hold all that is random.

    Args:
      sweep: What is asked for.
      folder: Where the run directories lie.
      where: What the sweep is called in errors.

    Raises:
      ValueError: for a setting of the wrong type, or a configuration that cannot be run.
    """
    seeds = sweep.insecure_seeds or (None,) * (sweep.repetitions or 0)
    unique = {name: options for grid in sweep.grid for name, options in cells(grid).items()}
    runs = []
    for (name, options), (number, seed) in itertools.product(unique.items(), enumerate(seeds)):
        settings = {**sweep.run, **options, "insecure_seed": seed}
        settings["bands"] = options["bands"] if options["bands"] > 1 else None
        # What a sweep does not ask for is no part of what it compares.
        settings.setdefault("calibration", "none")
        if "non_private" in options:  # asked of all runs, and this one has no noise and no clipping
            settings |= {"secure_noise": False, "calibration": "none"}
        spec = checked_spec(settings, f"{where}, run")
        begun = spec.init_seed + (number if seed is None else seed)
        spec = dataclasses.replace(spec, init_seed=begun % 2**32)
        repetition = f"r{number}" if seed is None else f"seed{seed}"
        runs.append(PlannedRun(name, spec, folder / f"{name}-{repetition}"))
    return runs
