"""Settings of samplers: a sampler's name and fields, before the data are known.

The settings of a sampler are the fields of its dataclass, except the fields of `Population` and
`target_delta`, which the data and the run give. A sampler in `KINDS` has settings and options on
the command line; a sampler of another package is named "module:QualName".
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Mapping
from typing import Any, ClassVar

from accounting.records import Record, field_types
from samplers.balls_and_bins import BallsAndBins
from samplers.base import BatchSampler
from samplers.deterministic import Deterministic
from samplers.full_batch import FullBatch
from samplers.multistage import Multistage
from samplers.poisson import Poisson
from samplers.population import Population
from samplers.registry import Registry
from samplers.shuffle import Shuffle
from samplers.units_then_poisson import UnitsThenPoisson
from samplers.user_poisson import UserPoisson

KINDS: tuple[type[BatchSampler], ...] = (
    Deterministic,
    Shuffle,
    Poisson,
    BallsAndBins,
    Multistage,
    UnitsThenPoisson,
    UserPoisson,
)
"""Samplers of this package, which commands, runs and ledgers know by name."""

DEFAULTS = {"batch_size": 1024, "epochs": 10}
"""Default sizes of settings; sampler classes have no default size."""

_OF_DATA = {field.name for field in dataclasses.fields(Population)}


SAMPLERS = Registry(
    "sampler",
    BatchSampler,
    {re.sub(r"(?<!^)(?=[A-Z])", "-", kind.__name__).lower(): kind for kind in KINDS},
    (FullBatch,),
)
"""Samplers by name."""


@dataclasses.dataclass(frozen=True)
class SamplerSettings(Record):
    """Settings of a run's sampler, of the type that `settings_of` returns.

    A size of None is open (see `open_sizes`): the run chooses it, or `DEFAULTS` hold.

    >>> settings_of(BallsAndBins)(batch_size=10, assignment="fixed").build(Population(100))
    ... # doctest: +ELLIPSIS
    BallsAndBins(num_examples=100, batch_size=10, epochs=10, ..., assignment='fixed')
    """

    sampler: ClassVar[type[BatchSampler]]
    name: ClassVar[str]

    def __reduce__(self) -> tuple[Any, ...]:
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return _rebuilt, (type(self).sampler, fields)

    def build(self, population: Population, target_delta: float | None = None) -> BatchSampler:
        """Builds the sampler for the data.

        Args:
          population: Public facts of the rows that the sampler draws from.
          target_delta: Delta of the guarantee, for samplers that choose a size by it.

        Raises:
          ValueError: If the data lack units that the sampler needs, or do not fit its sizes.
        """
        chosen = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        chosen |= {name: DEFAULTS[name] for name in self.open_sizes()}
        size, n = chosen.get("batch_size", 1), population.num_examples
        if size == DEFAULTS["batch_size"] and 1 <= n < size:
            raise ValueError(
                f"batch_size is {size} by default, which is more than the {n} training examples: "
                "give a smaller one"
            )
        data_values = {**vars(population), "target_delta": target_delta}
        for field in _fields(self.sampler):
            if field.name in data_values:
                chosen[field.name] = data_values[field.name]
                needed = field.name in _OF_DATA and field.default is dataclasses.MISSING
                if data_values[field.name] is None and needed:
                    raise ValueError(f"the sampler {self.name} draws {_NEEDS[field.name]}")
        return self.sampler(**chosen)

    def num_units(self, population: Population) -> int:
        """Returns the number of protected units in the data."""
        users = population.num_users if "num_users" in self.of_data() else None
        return users or population.num_examples

    def open_sizes(self) -> list[str]:
        """Returns the names of sizes that are None.

        >>> settings_of(Shuffle)(epochs=3).open_sizes()
        ['batch_size']
        """
        names = [field.name for field in dataclasses.fields(self) if field.name in DEFAULTS]
        return [name for name in names if getattr(self, name) is None]

    def check_sizes(self, num_examples: int) -> None:
        """Raises ValueError if `batch_size` exceeds the data."""
        size = getattr(self, "batch_size", None)
        if size is not None and size > num_examples:
            raise ValueError(
                f"batch_size must be at most the {num_examples:,} training examples, got {size}"
            )

    @classmethod
    def of_data(cls) -> set[str]:
        """Returns the names of fields that the data give."""
        return {field.name for field in _fields(cls.sampler)} & _OF_DATA

    def record(self) -> dict[str, Any]:
        """Returns the sampler's name and settings as JSON values."""
        return {"name": self.name, **dataclasses.asdict(self)}


_NEEDS = {
    "tree": "units, and these data have no unit columns: see 'Users and episodes', or in a program "
    "pass UnitData.of_tree(UnitTree.from_columns(...), columns)",
    "max_contributions": "users, and these data have no user column with a cap: prepare a table "
    "with --user and give --max-contributions (see 'Users of a table'), or in a program pass "
    "cap_contributions(...).of_examples(columns)",
}


def _rebuilt(kind: type[BatchSampler], fields: Mapping[str, Any]) -> SamplerSettings:
    return settings_of(kind)(**fields)


def _fields(kind: type[BatchSampler]) -> list[dataclasses.Field]:
    return [field for field in dataclasses.fields(kind) if field.init]  # type: ignore[arg-type]


@functools.cache
def settings_of(kind: type[BatchSampler]) -> type[Any]:
    """Returns the frozen dataclass of a sampler's settings.

    Raises:
      ValueError: If the sampler is not a frozen dataclass.
    """
    hints = field_types(SAMPLERS.check(kind))
    fields: list[tuple[str, Any, Any]] = []
    for field in _fields(kind):
        if field.name not in _OF_DATA and field.name != "target_delta":
            hint, default = hints[field.name], field.default
            if field.name in DEFAULTS:
                hint, default = hint | None, None
            elif field.name == "steps":
                default = dataclasses.MISSING  # required: no default length is right
            fields.append((field.name, hint, dataclasses.field(default=default)))
    fields.sort(key=lambda field: field[2].default is not dataclasses.MISSING)
    summary = inspect.cleandoc(kind.__doc__ or "").partition("\n")[0]
    members = {
        "__doc__": summary,
        "__module__": __name__,
        "sampler": kind,
        "name": SAMPLERS.name_of(kind),
    }
    return dataclasses.make_dataclass(
        kind.__name__, fields, bases=(SamplerSettings,), namespace=members, frozen=True
    )


SETTINGS: dict[str, type[Any]] = {
    name: settings_of(kind) for name, kind in SAMPLERS.built_in.items()
}
"""The type of the settings of each of the package's samplers, by name."""
