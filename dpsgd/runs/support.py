"""The one table of what has no proof together: what refuses it, and what prints it for the docs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from accounting import epsilon
from dpsgd.gradients.rules import FlatClipping
from dpsgd.runs.spec import Banded, Lazy, MovingAverage, RunSpec, TailAverage
from samplers import BatchSampler, Population, UnitTree
from samplers.settings import SETTINGS, SamplerSettings

Trait = Literal[
    "non_private",
    "bands",
    "tables lazy",
    "average_tail",
    "average_decay",
    "calibration",
    "overflow accumulate",
    "clipping",
    "no minimum separation",
    "protected units of several rows",
]
"""What a run may be refused by: in the words of options, and of what samplers have."""


class Unsupported(NamedTuple):
    """Traits of a run that do not go together: any of the first with any of the second."""

    first: tuple[Trait, ...]
    second: tuple[Trait, ...]
    reason: str
    mend: str = "leave out one of them"


UNSUPPORTED = (
    Unsupported(
        ("tables lazy",),
        ("bands",),
        "deferred noise is the sum of independent noise of many steps, and correlated noise has "
        "another law",
    ),
    Unsupported(
        ("tables lazy",),
        ("overflow accumulate",),
        "the rows of a step are read once, and overflow accumulate takes several passes",
        "take overflow truncate",
    ),
    Unsupported(
        ("tables lazy",),
        ("average_tail", "average_decay"),
        "deferred noise has the law of the parameters after a step, and not of their average",
        "leave out the average, or take tables dense",
    ),
    Unsupported(
        ("non_private",),
        ("bands",),
        "without privacy there is no noise, which could be correlated",
    ),
    Unsupported(
        ("non_private",),
        ("clipping",),
        "without privacy nothing is clipped",
    ),
    Unsupported(
        ("bands",),
        ("no minimum separation",),
        "correlated noise needs a minimum separation of the steps that an example takes part in",
        "take balls-and-bins, poisson, deterministic, or shuffle with a fixed order",
    ),
    Unsupported(
        ("calibration",),
        ("non_private",),
        "it mends what clipping does to predictions, and without privacy nothing is clipped",
    ),
    Unsupported(
        ("calibration",),
        ("protected units of several rows",),
        "its sums clip each row by itself, and other units are protected",
    ),
)
"""All that is refused of choices that are possible alone: the one table, which `check` reads and
`support_matrix` prints."""


def traits_of(spec: RunSpec, sampler: BatchSampler | None = None) -> set[Trait]:
    """Returns the traits of a run by which it may be refused, as far as its sampler is known."""
    noise, bands = spec.noise, getattr(spec.noise, "bands", 1)
    several = getattr(spec.sampler, "overflow", None) == "accumulate"
    has: dict[Trait, bool] = {
        "non_private": not spec.private,
        "bands": isinstance(noise, Banded) and bands != 1,
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
    return {name for name, holds in has.items() if holds}


def rule_against(traits: set[Trait]) -> tuple[int, Unsupported, str] | None:
    """Returns the first rule that refuses a run, its number, and the two traits in words."""
    for number, rule in enumerate(UNSUPPORTED, 1):
        found = [[one for one in side if one in traits] for side in (rule.first, rule.second)]
        if all(found):
            return number, rule, " and ".join(side[0] for side in found)
    return None


def refusal(spec: RunSpec, sampler: BatchSampler | None = None) -> str:
    """Returns why a run is not supported, in a line; empty if it is."""
    if (found := rule_against(traits_of(spec, sampler))) is None:
        return ""
    _, rule, words = found
    return f"{words}: {rule.reason}; {rule.mend}"


def check(spec: RunSpec, num_examples: int | None = None) -> None:
    """Raises ValueError, which names the options, for choices that do not go together.

    Nor must sizes exceed `num_examples`, once they are known.
    """
    if why := refusal(spec):
        raise ValueError(why)
    if num_examples is not None and isinstance(spec.sampler, SamplerSettings):
        spec.sampler.check_sizes(num_examples)


def checked_spec(options: Mapping[str, Any], where: str) -> RunSpec:
    """Returns `RunSpec.of` options whose choices go together, or raises ValueError at `where`."""
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
"""The rows of the support matrix: each a sampler with settings, here of 64 examples."""

COLUMNS: dict[str, dict[str, Any]] = {
    "independent noise": {},
    "banded noise": {"bands": 2},
    "lazy tables": {"tables": "lazy", "tables_learning_rate": 0.5, "tables_momentum": 0.0},
    "calibration": {"calibration": "platt"},
}
"""Its columns: each some options."""


def example_data() -> Population:
    """Returns the data of the support matrix: 4 users with 16 examples each, in sessions of 4."""
    tree = UnitTree.even((4, 4, 4), ("user", "session"))
    return Population(64, max_contributions=16, num_users=4, tree=tree)


@functools.cache
def support_matrix() -> str:
    """Returns which choices go together, why others do not, and how tight costs are: Markdown."""
    columns = [*COLUMNS, "data shards", "accounting"]
    lines = [f"| sampler | {' | '.join(columns)} |", f"| --- |{' --- |' * len(columns)}"]
    for label, (name, settings) in SAMPLERS.items():
        asked = SETTINGS[name](**settings)
        built = asked.build(example_data(), 1e-5)
        with contextlib.suppress(ValueError):  # no sampler of users has a cycle
            built = with_separation(asked, 2).build(example_data(), 1e-5)
        cells = []
        for options in COLUMNS.values():
            spec = RunSpec.of(asked, noise_multiplier=1.0, **options)
            found = rule_against(traits_of(spec, built))
            cells.append("yes" if found is None else f"no ({found[0]})")
        cells.append("no")
        with contextlib.suppress(TypeError, ValueError):  # no such setting, or not with the others
            dataclasses.replace(asked, num_shards=2).build(example_data(), 1e-5)
            cells[-1] = "yes"
        cost = epsilon(built.untruncated().privacy(1.0), 1e-5)
        cells.append("bounds" if cost.note else "tight")
        lines.append(f"| {label} | {' | '.join(cells)} |")
    lines.append("")
    for number, rule in enumerate(UNSUPPORTED, 1):
        words = " with ".join(" or ".join(side) for side in (rule.first, rule.second))
        lines.append(f"{number}. {words}: {rule.reason}; {rule.mend}.")
    return "\n".join([*lines, ""])


def with_separation(sampler: Any, bands: int | None) -> Any:
    """Returns a sampler, or its settings, with a cycle of `bands` steps if it can have one."""
    if bands is not None and bands > 1 and getattr(sampler, "cycle_length", None) == 1:
        return dataclasses.replace(sampler, cycle_length=bands)
    return sampler
