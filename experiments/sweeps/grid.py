"""Grids of a sweep: every combination of the values of axes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from dpsgd.runs.recommendation import Settings
from dpsgd.runs.records import build, near
from dpsgd.runs.spec import known_options
from experiments.results.table import (
    AXES,
    IN_SAMPLER,
    PRIVACY,
    WITH_NOISE,
    digits,
    sampler_settings,
)
from samplers.settings import SAMPLERS, SamplerSettings, settings_of

DEFAULTS: dict[str, Any] = {
    **{name: getattr(Settings, name) for name in ("batch_size", "epochs", "learning_rate")},
    "l2_clip_norm": Settings.l2_clip_norm,
    "bands": 1,
}
"""Values of axes that a grid does not name."""

OUTSIDE_PRIVACY = ("l2_clip_norm", "bands")
"""Axes beside `PRIVACY` that a run without privacy does not have."""

GRID_OPTIONS = ("sampler", *AXES, "non_private")
"""Options of a run that its grid sets."""

Cells = dict[str, dict[str, Any]]
"""Options of runs that differ only in their randomness, by folder name."""


def product(axes: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """Returns every combination of the values of axes, as options.

    Args:
      axes: One value or a list for each axis.
      where: Place in the file, for error messages.

    Raises:
      ValueError: If an axis has no value or a repeated one, or a sampler is unknown, names a size
        or has an invalid setting.

    >>> axes = {"sampler": ["poisson", "shuffle"], "noise_multiplier": 0.5}
    >>> [options["sampler"].name for options in product(axes, "sweep.toml")]
    ['poisson', 'shuffle']
    """
    lists = {
        name: values if isinstance(values, list) else [values] for name, values in axes.items()
    }
    for name, values in lists.items():
        if not values:
            raise ValueError(f"{where}: {name} needs at least one value")
        if any(values.count(value) > 1 for value in values):
            raise ValueError(f"{where}: {name} holds a value twice: {values}")
    combos = []
    for combination in itertools.product(*lists.values()):
        options = dict(zip(lists, combination, strict=True))
        sizes = {name: options.pop(name) for name in IN_SAMPLER if name in options}
        place = f"{where}, sampler[{lists['sampler'].index(options['sampler'])}]"
        combos.append({**options, "sampler": _sampler(options["sampler"], sizes, place)})
    return combos


def _sampler(value: Any, sizes: Mapping[str, Any], where: str) -> SamplerSettings:
    """Returns a sampler from its name, or a table of name and settings, with the sizes it knows."""
    fields = dict(value) if isinstance(value, dict) else {"name": value}
    try:
        kind = settings_of(SAMPLERS.find(str(fields.pop("name", None))))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    for axis in IN_SAMPLER:
        if axis in fields:
            raise ValueError(f"{where}: {axis} is an axis of the grid; set it there")
    field_names = {field.name for field in dataclasses.fields(kind)}
    return build(kind, fields | {k: v for k, v in sizes.items() if k in field_names}, where)


def name_of(options: Mapping[str, Any]) -> str:
    """Returns a folder name with every value that distinguishes options.

    >>> from samplers.settings import SETTINGS
    >>> options = {"learning_rate": 3e-3, "l2_clip_norm": 4.0, "bands": 1}
    >>> options["sampler"] = SETTINGS["poisson"](batch_size=1024, epochs=10)
    >>> name_of({**options, "noise_multiplier": 0.5})
    'poisson-sigma0.5-b1024-e10-lr0.003-c4'
    >>> name_of({**options, "non_private": True})  # nothing is clipped without noise
    'poisson-nonprivate-b1024-e10-lr0.003'
    >>> name_of({"sampler": SETTINGS["poisson"](), "train": "a/b|c"})
    'poisson-traina%2Fb%7Cc'
    """
    sampler, non_private = options["sampler"], options.get("non_private")
    sizes = {axis: getattr(sampler, axis, None) for axis in IN_SAMPLER}
    values = {**options, **sizes, **(dict.fromkeys(OUTSIDE_PRIVACY) if non_private else {})}
    other_names = [name for name in options if name not in (*AXES, "sampler", "non_private")]
    pairs = [
        f"{AXES[axis].short if axis in AXES else axis}{_quoted(value)}"
        for axis in (*AXES, *other_names)
        if (value := values.get(axis)) is not None and (axis, value) != ("bands", 1)
    ]
    words = sampler_settings(sampler).split()
    return "-".join([sampler.name, *words, *(["nonprivate"] if non_private else []), *pairs])


def _quoted(value: Any) -> str:
    values = value if isinstance(value, tuple | list) else [value]
    return "+".join(
        quote(x, safe="") if isinstance(x, str) else quote(digits(x), safe="+") for x in values
    )


@dataclass(frozen=True)
class Grid:
    """Runs of one panel: every combination of the values of its axes.

    With `tune`, the panel and the tables show for each point the values of these axes that are best
    together on the validation rows. Grids with one title share a panel.
    """

    x: str
    """Axis of the panel."""
    axes: Mapping[str, Any]
    """Values of options, each one value or a list, including the sampler."""
    non_private: bool = False
    """Also train without clipping and noise (only that, if no axis is about privacy)."""
    tune: tuple[str, ...] = ()
    """Axis or axes whose best values on the validation rows are shown."""
    title: str = ""
    """Title of the panel."""

    @classmethod
    def parse(cls, table: Mapping[str, Any], where: str) -> Grid:
        """Returns the grid that a table of a file describes.

        Args:
          table: Table of the file.
          where: Place in the file, for error messages.

        Raises:
          ValueError: If the table is invalid.
        """
        fields = {f.name for f in dataclasses.fields(cls)} - {"axes"}
        axes = {name: value for name, value in table.items() if name not in fields}
        settings = {k: v for k, v in table.items() if k in fields}
        if isinstance(tune := settings.get("tune"), str):
            settings["tune"] = [tune]
        grid = build(cls, settings | {"axes": axes}, where)
        options = {*known_options(), *IN_SAMPLER} - {"insecure_seed", "non_private"}
        for name in axes:
            if name not in options:
                hint = near(name, options) or f": there are {', '.join(options)}"
                raise ValueError(f"{where}: {name!a} is unknown{hint}")
        privacy_axes = [name for name in PRIVACY if name in axes]
        if len(privacy_axes) > 1:
            raise ValueError(f"{where}: give {' or '.join(privacy_axes)}, not both")
        if not (privacy_axes or grid.non_private):
            raise ValueError(f"{where}: give {', '.join(PRIVACY)} or non_private = true")
        for role, axis in (("x", grid.x), *(("tune", name) for name in grid.tune)):
            if axis not in {**DEFAULTS, **axes}:
                listed = ", ".join(map(repr, {**dict.fromkeys(AXES), **axes}))
                problem = "has no value here" if axis in AXES else f"is none of {listed}"
                raise ValueError(f"{where}, {role}: {axis!a} {problem}")
        if grid.x in grid.tune:
            raise ValueError(f"{where}: x and tune are both {grid.x}; tune another axis")
        grid.cells(where)
        return grid

    def cells(self, where: str = "grid") -> Cells:
        """Returns every combination of the values of its axes.

        Args:
          where: Place in the file, for error messages.

        Raises:
          ValueError: For an invalid value; the message begins with `where`.
        """
        if "sampler" not in self.axes:
            raise ValueError(f"{where}: sampler is missing")
        private = any(name in self.axes for name in PRIVACY)
        axes = {**DEFAULTS, **self.axes}
        cells = product(axes, where) if private else []
        if self.non_private:
            # Without privacy nothing is clipped: one cell, whatever norms the grid has.
            of_privacy = {*PRIVACY, *WITH_NOISE}
            plain = {name: values for name, values in axes.items() if name not in of_privacy}
            plain |= {name: DEFAULTS[name] for name in OUTSIDE_PRIVACY}
            combos = product(plain, where)
            cells += [{**options, "non_private": True} for options in combos]
        return {name_of(options): options for options in cells}
