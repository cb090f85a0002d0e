"""The runs of a sweep, each with a name that says what it is."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpsgd.runs.recommendation import Settings
from dpsgd.runs.spec import RunSpec
from dpsgd.runs.support import checked_spec
from experiments.sweeps.config import AXES, IN_SAMPLER, PRIVACY, Grid, Sweep
from samplers.settings import SamplerSettings


@dataclass(frozen=True)
class Cell:
    """One combination of the values of a grid's axes: what is alike in all repetitions."""

    sampler: SamplerSettings
    learning_rate: float
    l2_clip_norm: float
    noise_multiplier: float | None = None
    target_epsilon: float | None = None
    target_advantage: float | None = None
    bands: int = 1

    @property
    def non_private(self) -> bool:
        """Whether its runs neither clip nor add noise."""
        return all(getattr(self, axis) is None for axis in PRIVACY)

    def value(self, axis: str) -> Any:
        """Returns where the cell lies on an axis of its grid; None where it has no place there."""
        if self.non_private and axis in ("l2_clip_norm", "bands"):
            return None
        return getattr(self.sampler if axis in IN_SAMPLER else self, axis, None)

    @property
    def sampler_name(self) -> str:
        """The sampler, with those of its settings that are not the defaults.

        >>> from samplers.settings import SETTINGS
        >>> Cell(SETTINGS["shuffle"](order="fixed"), 1e-3, 1.0).sampler_name
        'shuffle order-fixed'
        """
        settings = [
            f"{field.name}-{_digits(getattr(self.sampler, field.name))}"
            for field in dataclasses.fields(self.sampler)
            if field.name not in IN_SAMPLER and getattr(self.sampler, field.name) != field.default
        ]
        return " ".join([self.sampler.name, *settings])

    @property
    def name(self) -> str:
        """Every value by which it differs from other cells, fit for a folder.

        >>> from samplers.settings import SETTINGS
        >>> poisson = SETTINGS["poisson"](batch_size=1024, epochs=10)
        >>> Cell(poisson, 3e-3, 4.0, noise_multiplier=0.5).name
        'poisson-sigma0.5-b1024-e10-lr0.003-c4'
        >>> Cell(poisson, 3e-3, 4.0).name  # nothing is clipped without noise
        'poisson-nonprivate-b1024-e10-lr0.003'
        """
        values = [
            f"{short}{_digits(value)}"
            for axis, (short, _, _) in AXES.items()
            if (value := self.value(axis)) is not None and (axis, value) != ("bands", 1)
        ]
        private = ["nonprivate"] if self.non_private else []
        return "-".join([self.sampler_name.replace(" ", "-"), *private, *values])


@dataclass(frozen=True)
class PlannedRun:
    """A cell's run in one repetition, with its spec and its directory."""

    cell: Cell
    spec: RunSpec
    out: Path

    @property
    def name(self) -> str:
        """Name of the run's folder."""
        return self.out.name


def cells(grid: Grid) -> list[Cell]:
    """Returns every combination of the values of a grid's axes, each once."""
    privacy: list[dict[str, Any]] = [
        {axis: value} for axis in PRIVACY for value in getattr(grid, axis)
    ]
    privacy += [{}] if grid.non_private else []
    axes = itertools.product(
        grid.samplers(),
        itertools.product(*(getattr(grid, axis) for axis in IN_SAMPLER)),
        *(getattr(grid, axis) for axis in ("learning_rate", "l2_clip_norm", "bands")),
        privacy,
    )
    found = [
        Cell(
            sized(sampler, dict(zip(IN_SAMPLER, sizes, strict=True))),
            learning_rate,
            # Without privacy nothing is clipped: one cell, whatever norms its grid has.
            l2_clip_norm if wanted else Settings.l2_clip_norm,
            bands=bands if wanted else 1,
            **wanted,
        )
        for sampler, sizes, learning_rate, l2_clip_norm, bands, wanted in axes
    ]
    return list({cell.name: cell for cell in found}.values())


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
    unique = {cell.name: cell for grid in sweep.grid for cell in cells(grid)}
    runs = []
    for cell, (number, seed) in itertools.product(unique.values(), enumerate(seeds)):
        repetition = f"r{number}" if seed is None else f"seed{seed}"
        settings = {
            **sweep.run,
            **{axis: getattr(cell, axis) for axis in AXES if axis not in IN_SAMPLER},
            "bands": cell.bands if cell.bands > 1 else None,
            "sampler": cell.sampler,
            "non_private": cell.non_private,
            "insecure_seed": seed,
        }
        # What a sweep does not ask for is no part of what it compares.
        settings.setdefault("calibration", "none")
        if cell.non_private:  # asked of all runs, and this one has no noise and clips nothing
            settings |= {"secure_noise": False, "calibration": "none"}
        spec = checked_spec(settings, f"{where}, run")
        begun = spec.init_seed + (number if seed is None else seed)
        spec = dataclasses.replace(spec, init_seed=begun % 2**32)
        runs.append(PlannedRun(cell, spec, folder / f"{cell.name}-{repetition}"))
    return runs


def _digits(value: Any) -> str:
    """Returns the shortest text that names a value of a setting and no other one.

    >>> _digits(4.0), _digits(0.30000000000000004), _digits((8, 64)), _digits("fixed")
    ('4', '0.30000000000000004', '8+64', 'fixed')
    """
    if isinstance(value, tuple):
        return "+".join(map(_digits, value))
    return str(value).removesuffix(".0")
