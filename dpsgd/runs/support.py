"""Table of unsupported combinations of options, used for refusals and for the docs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from accounting import epsilon
from dpsgd.core.noise import Independent
from dpsgd.gradients.rules import FlatClipping
from dpsgd.runs.spec import Banded, Lazy, MovingAverage, RunSpec, TailAverage
from samplers import BatchSampler, Population, UnitTree
from samplers.settings import SETTINGS, SamplerSettings

Trait = Literal[
    "non_private",
    "bands",
    "noise",
    "tables lazy",
    "average_tail",
    "average_decay",
    "calibration",
    "overflow accumulate",
    "clipping",
    "no minimum separation",
    "protected units of several rows",
]
"""Options, and properties of samplers, that may exclude each other."""


class Unsupported(NamedTuple):
    """Traits that exclude each other: any in `first` and any in `second`."""

    first: tuple[Trait, ...]
    second: tuple[Trait, ...]
    reason: str
    mend: str = "leave out one of them"


UNSUPPORTED = (
    Unsupported(
        ("tables lazy",),
        ("bands", "noise"),
        "deferred noise sums the independent noise of many steps, and correlated noise has another "
        "distribution",
    ),
    Unsupported(
        ("tables lazy",),
        ("overflow accumulate",),
        "lazy tables read the rows of a step once, and overflow accumulate takes several passes",
        "use overflow truncate",
    ),
    Unsupported(
        ("tables lazy",),
        ("average_tail", "average_decay"),
        "deferred noise has the distribution of parameters after a step, not of their average",
        "leave out the average, or use tables dense",
    ),
    Unsupported(
        ("non_private",),
        ("bands", "noise"),
        "without privacy there is no noise",
    ),
    Unsupported(
        ("non_private",),
        ("clipping",),
        "without privacy nothing is clipped",
    ),
    Unsupported(
        ("bands",),
        ("no minimum separation",),
        "correlated noise needs a minimum separation between the steps of an example",
        "use balls-and-bins, poisson, deterministic, or shuffle with a fixed order",
    ),
    Unsupported(
        ("calibration",),
        ("non_private",),
        "it corrects the bias of clipping, and without privacy nothing is clipped",
    ),
    Unsupported(
        ("calibration",),
        ("protected units of several rows",),
        "its sums clip single rows, but the protected units have several",
    ),
)
"""Combinations of possible options that `check` refuses and `support_matrix` prints."""


class Conflict(NamedTuple):
    """Rule that refuses a run; as text, the reason and the remedy."""

    rule: Unsupported
    traits: tuple[Trait, Trait]

    def __str__(self) -> str:
        return f"{' and '.join(self.traits)}: {self.rule.reason}; {self.rule.mend}"


def conflict_of(spec: RunSpec, sampler: BatchSampler | None = None) -> Conflict | None:
    """Returns the first rule that refuses a run, or None.

    >>> print(conflict_of(RunSpec.of(SETTINGS["poisson"](), non_private=True, bands=2)))
    non_private and bands: without privacy there is no noise; leave out one of them

    Args:
      spec: Settings of the run.
      sampler: Sampler of the run; without it, rules about samplers are not applied.
    """
    bands = spec.noise.bands
    several = getattr(spec.sampler, "overflow", None) == "accumulate"
    has: dict[Trait, bool] = {
        "non_private": not spec.private,
        "bands": bands != 1,
        "noise": type(spec.noise) not in (Independent, Banded),
        "tables lazy": isinstance(spec.tables, Lazy),
        "average_tail": isinstance(spec.average, TailAverage),
        "average_decay": isinstance(spec.average, MovingAverage),
        "clipping": not isinstance(spec.clipping, FlatClipping),
        "calibration": spec.calibration not in (None, "none"),
        "overflow accumulate": several if sampler is None else sampler.accumulates or several,
    }
    if sampler is not None:
        has["no minimum separation"] = sampler.separation == 1 and bands != "auto"
        has["protected units of several rows"] = sampler.unit != "example"
    for rule in UNSUPPORTED:
        matches = [
            [trait for trait in side if has.get(trait)] for side in (rule.first, rule.second)
        ]
        if all(matches):
            return Conflict(rule, (matches[0][0], matches[1][0]))
    return None


def check(spec: RunSpec, num_examples: int | None = None) -> None:
    """Refuses options that do not go together.

    Args:
      spec: Settings of the run.
      num_examples: Number of rows, which the sampler's sizes must not exceed; None if unknown.

    Raises:
      ValueError: if a rule excludes the options; the message names them.
    """
    if conflict := conflict_of(spec):
        raise ValueError(str(conflict))
    if num_examples is not None and isinstance(spec.sampler, SamplerSettings):
        spec.sampler.check_sizes(num_examples)


def checked_spec(options: Mapping[str, Any], where: str) -> RunSpec:
    """Returns a spec whose options go together.

    Args:
      options: Values by the names of `known_options`, and "sampler".
      where: Prefix of error messages.

    Raises:
      ValueError: if an option is refused, or options do not go together.
    """
    try:
        check(spec := RunSpec.of(**options))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return spec


_SIZES = {"batch_size": 16, "epochs": 2}
_EPISODES = {"draws": (2, 2, 2), "steps": 4}
_USERS = {"clipped_level": 1, "protected_level": 1}
SAMPLERS: dict[str, tuple[str, dict[str, Any]]] = {
    "deterministic": ("deterministic", _SIZES),
    "shuffle": ("shuffle", _SIZES),
    "shuffle, order fixed": ("shuffle", {**_SIZES, "order": "fixed"}),
    "poisson": ("poisson", _SIZES),
    "poisson, overflow accumulate": ("poisson", {**_SIZES, "overflow": "accumulate"}),
    "balls-and-bins": ("balls-and-bins", _SIZES),
    "multistage": ("multistage", _EPISODES),
    "multistage, users protected": ("multistage", {**_EPISODES, **_USERS}),
    "units-then-poisson": (
        "units-then-poisson",
        {"draws": (2, 2), "steps": 4, "sampling_prob": 0.5},
    ),
    "user-poisson": ("user-poisson", _SIZES),
}
"""Rows of the support matrix: samplers with settings for 64 examples, by label."""

COLUMNS: dict[str, dict[str, Any]] = {
    "independent noise": {},
    "banded noise": {"bands": 2},
    "lazy tables": {"tables": "lazy", "tables_learning_rate": 0.5, "tables_momentum": 0.0},
    "calibration": {"calibration": "platt"},
}
"""Columns of the support matrix: options by label."""


def example_data() -> Population:
    """Returns a population of 4 users with 16 examples each."""
    tree = UnitTree.even((4, 4, 4), ("user", "session"))
    return Population(64, max_contributions=16, num_users=4, tree=tree)


@functools.cache
def support_matrix() -> str:
    """Returns the Markdown table of supported options, with reasons.

    Its last columns tell whether data shards are supported, and whether the accounting is tight.
    """
    columns = [*COLUMNS, "data shards", "accounting"]
    lines = [f"| sampler | {' | '.join(columns)} |", f"| --- |{' --- |' * len(columns)}"]
    for label, (name, settings) in SAMPLERS.items():
        requested = SETTINGS[name](**settings)
        built = requested.build(example_data(), 1e-5)
        with contextlib.suppress(ValueError):  # samplers of users have no cycle
            built = with_separation(requested, 2).build(example_data(), 1e-5)
        cells = []
        for options in COLUMNS.values():
            spec = RunSpec.of(requested, noise_multiplier=1.0, **options)
            conflict = conflict_of(spec, built)
            cells.append("yes" if not conflict else f"no ({UNSUPPORTED.index(conflict.rule) + 1})")
        cells.append("no")
        with contextlib.suppress(TypeError, ValueError):  # no such setting, or not with the others
            dataclasses.replace(requested, num_shards=2).build(example_data(), 1e-5)
            cells[-1] = "yes"
        cost = epsilon(built.untruncated().privacy(1.0), 1e-5)
        cells.append("bounds" if cost.note else "tight")
        lines.append(f"| {label} | {' | '.join(cells)} |")
    lines.append("")
    for number, rule in enumerate(UNSUPPORTED, 1):
        words = " with ".join(" or ".join(side) for side in (rule.first, rule.second))
        lines.append(f"{number}. {words}: {rule.reason}; {rule.mend}.")
    return "\n".join([*lines, ""])


def with_separation(sampler: Any, bands: int | Literal["auto"]) -> Any:
    """Returns a sampler with cycles of `bands` steps if possible.

    A cycle that was given, or a sampler without cycles, stays unchanged.

    >>> from samplers import BallsAndBins
    >>> with_separation(BallsAndBins(1_000, batch_size=50, epochs=4), 4).cycle_length
    4

    Args:
      sampler: Sampler, or its settings.
      bands: Number of steps over which noise is correlated; auto if it is open.
    """
    if bands != "auto" and bands > 1 and getattr(sampler, "cycle_length", None) == 1:
        return dataclasses.replace(sampler, cycle_length=bands)
    return sampler
