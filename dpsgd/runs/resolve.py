"""The only place that chooses what a run leaves open, and that knows what has a proof together.

All that it goes by is public: numbers of rows and steps, shapes, the guarantee that is wanted, and
how long a step takes on generated rows. `config.json` records plain values: no resumed run chooses.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from dpsgd.core.mechanism import Mechanism
from dpsgd.core.queries import FullSums
from dpsgd.noise import planning
from dpsgd.noise.base import Independent, Noise, Secure
from dpsgd.noise.strategies import banded_square_root
from dpsgd.runs import search
from dpsgd.runs.recommendation import (
    CHOICES,
    RecommendationRequest,
    Settings,
    generic,
    sentence,
    table_step_size,
)
from dpsgd.runs.records import to_json
from dpsgd.runs.spec import (
    Auto,
    Banded,
    Buffered,
    Dense,
    Lazy,
    NoiseMultiplier,
    NonPrivate,
    RunSpec,
)
from dpsgd.sizes import bytes_of
from samplers import BatchSampler, Population, UnitTree
from samplers.settings import DEFAULTS, SETTINGS, SamplerSettings, name_of

if TYPE_CHECKING:
    from dpsgd.engine.placement import Placement
    from dpsgd.runs.budget import Budget

PyTree = Any
Progress = Callable[[str], None]

ADAM = (
    "Adam gains nothing from correlated noise: it divides by the size of what it sees in single "
    "steps, and in a single step correlated noise is larger"
)

_NEAR = 1.02
"""Up to so many times the least error a smaller number of bands is taken: it needs less memory."""

_ROWS_AGAIN = 20 / 3
"""Rows of the tables, for each that a batch looks up, that a flush reads once in so many steps: to
read a row, differentiate, noise and write it takes a step at least three times what a flush takes
for it, which so is at most a twentieth of the steps."""


@dataclass(frozen=True)
class ResolvedRun:
    """A run of which nothing is left open.

    Attributes:
      spec: How it is trained.
      mechanism: Sampler, noise and clipping norm: what its guarantee is computed of.
      delta: Of the guarantee.
      chosen: What was chosen and why, as JSON values: "settings" by option, what the "noise" became
        if it is correlated and what "tables" if that was left open, and, where time was limited,
        "budget_minutes" and "epoch_seconds".
    """

    spec: RunSpec
    mechanism: Mechanism
    delta: float
    chosen: Mapping[str, Any] = field(default_factory=dict)


# --- What goes together -------------------------------------------------------------------------


Trait = Literal[
    "non_private",
    "secure_noise",
    "bands",
    "bands auto",
    "buffers",
    "tables lazy",
    "calibration platt",
    "budget_minutes",
    "shard_rows_from",
    "overflow accumulate",
    "no minimum separation",
    "random order",
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
        ("bands", "buffers"),
        "deferred noise is the sum of independent noise of many steps, and correlated noise has "
        "another law",
    ),
    Unsupported(
        ("tables lazy",),
        ("secure_noise",),
        "deferred noise is not the exact noise of single steps",
    ),
    Unsupported(
        ("tables lazy",),
        ("overflow accumulate",),
        "the rows of a step are read once, and overflow accumulate takes several passes",
        "take overflow truncate",
    ),
    Unsupported(
        ("non_private",),
        ("secure_noise", "bands", "buffers"),
        "without privacy there is no noise, which could be exact or correlated",
    ),
    Unsupported(
        ("bands",),
        ("no minimum separation",),
        "correlated noise needs a minimum separation of the steps that an example takes part in",
        "take balls-and-bins, poisson, deterministic, or shuffle with a fixed order",
    ),
    Unsupported(
        ("buffers",),
        ("random order",),
        "noise that is correlated over all steps needs an order that is known",
        "take deterministic, or shuffle with a fixed order",
    ),
    Unsupported(
        ("secure_noise",),
        ("shard_rows_from",),
        "secure noise is drawn for whole arrays, and parameters cannot be sharded by rows",
    ),
    Unsupported(
        ("calibration platt",),
        ("non_private",),
        "it mends what clipping does to predictions, and without privacy nothing is clipped",
    ),
    Unsupported(
        ("calibration platt",),
        ("protected units of several rows",),
        "its sums clip each row by itself, and other units are protected",
    ),
    Unsupported(
        ("bands auto",),
        ("budget_minutes",),
        "bands auto goes by the number of steps, and budget_minutes chooses it by their time, "
        "which bands make longer",
        "give a number of bands, or epochs",
    ),
)
"""All that is refused of choices that are possible alone: the one table, which `check` reads and
`support_matrix` prints."""


def _traits(
    spec: RunSpec, sampler: BatchSampler | None = None, *, sharded: bool = False
) -> set[Trait]:
    """Returns the traits of a run by which it may be refused, as far as its sampler is known."""
    noise, bands = spec.noise, getattr(spec.noise, "bands", 1)
    several = getattr(spec.sampler, "overflow", None) == "accumulate"
    has: dict[Trait, bool] = {
        "non_private": not spec.private,
        "secure_noise": isinstance(noise, Secure),
        "bands": isinstance(noise, Banded) and bands != 1,
        "bands auto": bands == "auto",
        "buffers": isinstance(noise, Buffered),
        "tables lazy": isinstance(spec.tables, Lazy),
        "calibration platt": spec.calibration == "platt",
        "budget_minutes": spec.budget_minutes is not None,
        "shard_rows_from": sharded,
        "overflow accumulate": several if sampler is None else sampler.accumulates or several,
    }
    if sampler is not None:
        has["no minimum separation"] = sampler.separation == 1 and bands != "auto"
        has["random order"] = sampler.period is None
        has["protected units of several rows"] = sampler.unit != "example"
    return {name for name, holds in has.items() if holds}


def _refusal(traits: set[Trait]) -> tuple[int, Unsupported, str] | None:
    """Returns the first rule that refuses a run, its number, and the two traits in words."""
    for number, rule in enumerate(UNSUPPORTED, 1):
        found = [[one for one in side if one in traits] for side in (rule.first, rule.second)]
        if all(found):
            return number, rule, " and ".join(side[0] for side in found)
    return None


def refusal(
    spec: RunSpec, sampler: BatchSampler | None = None, placement: Placement | None = None
) -> str:
    """Returns why a run is not supported, in a line; empty if it is.

    Args:
      spec: What is asked for.
      sampler: Of its data, once they are known.
      placement: On which devices it is trained.
    """
    sharded = placement is not None and placement.shard_rows_from is not None
    if (found := _refusal(_traits(spec, sampler, sharded=sharded))) is None:
        return ""
    _, rule, words = found
    return f"{words}: {rule.reason}; {rule.mend}"


def check(
    spec: RunSpec, num_examples: int | None = None, placement: Placement | None = None
) -> None:
    """Raises ValueError, which names the options, for choices that do not go together.

    Args:
      spec: What is asked for.
      num_examples: Of its data, once they are known: its sizes must not exceed them.
      placement: On which devices it is trained.
    """
    if why := refusal(spec, placement=placement):
        raise ValueError(why)
    if isinstance(spec.sampler, SamplerSettings):
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
    "secure noise": {"secure_noise": True},
    "banded noise": {"bands": 2, "coefficients": (1.0, 0.5)},
    "buffered noise": {"buffers": 1, "weights": (0.5,), "decays": (0.5,)},
    "lazy tables": {"tables": "lazy", "tables_learning_rate": 0.5, "tables_momentum": 0.0},
    "Platt scaling": {"calibration": "platt"},
}
"""Its columns: each some options."""


def example_data() -> Population:
    """Returns the data of the support matrix: 4 users with 16 examples each, in sessions of 4."""
    tree = UnitTree.even((4, 4, 4), ("user", "session"))
    return Population(64, max_contributions=16, num_users=4, tree=tree)


def support_matrix() -> str:
    """Returns which choices go together, and why others do not, as Markdown."""
    lines = [f"| sampler | {' | '.join(COLUMNS)} |", f"| --- |{' --- |' * len(COLUMNS)}"]
    for label, (name, settings) in SAMPLERS.items():
        asked = SETTINGS[name](**settings)
        built = asked.build(example_data(), 1e-5)
        with contextlib.suppress(ValueError):  # no sampler of users has a cycle
            built = with_separation(asked, 2).build(example_data(), 1e-5)
        cells = []
        for options in COLUMNS.values():
            spec = RunSpec.of(asked, noise_multiplier=1.0, **options)
            found = _refusal(_traits(spec, built))
            cells.append("yes" if found is None else f"no ({found[0]})")
        lines.append(f"| {label} | {' | '.join(cells)} |")
    lines.append("")
    for number, rule in enumerate(UNSUPPORTED, 1):
        words = " with ".join(" or ".join(side) for side in (rule.first, rule.second))
        lines.append(f"{number}. {words}: {rule.reason}; {rule.mend}.")
    return "\n".join([*lines, ""])


# --- The sampler, the noise and the mechanism ---------------------------------------------------


def build_sampler(spec: RunSpec, population: Population) -> BatchSampler:
    """Returns the sampler of a run on these data, with the minimum separation that bands ask for.

    Raises:
      ValueError: if it does not fit them, or the noise does not go with it.
    """
    bands = _bands(spec)
    sampler = with_separation(spec.sampler, bands)
    try:
        if isinstance(sampler, SamplerSettings):
            built = sampler.build(population, spec.delta_of(population))
        else:
            built = sampler.of(population)
    except ValueError as error:
        if re.search("cycle.length", str(error)) and sampler != spec.sampler:
            raise ValueError(f"bands {bands}: {error}") from None
        raise
    if bands is not None and bands > built.separation > 1:
        raise ValueError(
            f"bands must be at most {built.separation} here, got {bands}: that is the minimum "
            f"separation of {name_of(type(built))}"
        )
    if why := refusal(dataclasses.replace(spec, calibration=None), built):  # made by itself
        raise ValueError(why)
    return built


def with_separation(sampler: Any, bands: int | None) -> Any:
    """Returns a sampler, or its settings, with a cycle of `bands` steps if it can have one."""
    if bands is not None and bands > 1 and getattr(sampler, "cycle_length", None) == 1:
        return dataclasses.replace(sampler, cycle_length=bands)
    return sampler


def _bands(spec: RunSpec) -> int | None:
    bands = spec.noise.bands if isinstance(spec.noise, Banded) else None
    return None if bands == "auto" else bands


def noise_of(spec: RunSpec) -> Noise:
    """Returns the law of the noise of a spec that leaves nothing open."""
    law = spec.noise.law if isinstance(spec.noise, Banded | Buffered) else spec.noise
    assert law is not None, "`resolve` leaves nothing open"
    return law


def full_sums(spec: RunSpec, sampler: BatchSampler, delta: float) -> FullSums:
    """Returns the full-batch queries by which a run is calibrated, see `dpsgd.runs.search.platt`.

    Raises:
      ValueError: if it cannot be calibrated, or that would not pay.
    """
    if found := _refusal(_traits(dataclasses.replace(spec, calibration="platt"), sampler)):
        raise ValueError(f"{found[1].reason} (here one {sampler.unit})")
    assert not isinstance(spec.privacy, NonPrivate), "refused by the table"
    return search.platt(sampler, delta, spec.privacy)


def resolved(spec: RunSpec, population: Population) -> ResolvedRun:
    """Returns the run of a spec that leaves nothing open but the size of its noise.

    Raises:
      ValueError: for a sampler that does not fit the data, or a target out of reach.
    """
    sampler, delta = build_sampler(spec, population), spec.delta_of(population)
    goal = spec.privacy
    if isinstance(goal, NonPrivate):
        mechanism = Mechanism(sampler, noise_multiplier=0.0, l2_clip_norm=math.inf)
    else:
        sums = full_sums(spec, sampler, delta) if spec.calibration == "platt" else None
        noise = noise_of(spec)
        sigma = search.smallest_noise(goal, delta, sampler, noise, sums)
        assert spec.l2_clip_norm is not None, "`resolve` leaves nothing open"
        mechanism = Mechanism(sampler, sigma, spec.l2_clip_norm, noise, sums)
    return ResolvedRun(spec, mechanism, delta)


# --- Choices -------------------------------------------------------------------------------------


def resolve(
    spec: RunSpec,
    task: Any,
    rows: tuple[PyTree, Population],
    timer: Budget | None = None,
    progress: Progress = lambda line: None,
) -> ResolvedRun:
    """Returns the run that a spec asks for, with what was chosen; what is given stays as it is.

    Args:
      spec: What is asked for.
      task: Recommends settings, if it has a method `recommend` (see `dpsgd.runs.task.Task`).
      rows: Of the task, of which the shapes are read, and what is public of them.
      timer: Finds how many epochs there is time for, if the spec has `budget_minutes`.
      progress: Called with one line of text.

    Raises:
      ValueError: for choices that do not go together or do not fit the data, for a recommendation
        that cannot be run, or a target out of reach.
    """
    spec, chosen = choose(spec, task, rows, timer, progress)
    given = isinstance(spec.privacy, NoiseMultiplier | NonPrivate)
    progress(
        "finding the guarantee of the run"
        if given
        else "finding the noise for the guarantee that is wanted"
    )
    run = resolved(spec, rows[1])
    if "noise" in chosen:
        noise = {**chosen["noise"], "noise_multiplier": run.mechanism.noise_multiplier}
        progress(sentence({"noise": noise}))
        chosen = {**chosen, "noise": noise}
    return dataclasses.replace(run, chosen=chosen)


def choose(
    spec: RunSpec,
    task: Any,
    rows: tuple[PyTree, Population],
    timer: Budget | None = None,
    progress: Progress = lambda line: None,
) -> tuple[RunSpec, dict[str, Any]]:
    """Returns a spec that leaves nothing open but the size of its noise, and what was chosen.

    Args:
      spec: As for `resolve`, like all that follow.
      task: Likewise.
      rows: Likewise.
      timer: Likewise.
      progress: Likewise.

    Raises:
      ValueError: as for `resolve`.
    """
    population = rows[1]
    check(spec, population.num_examples)
    reasons: list[str] = []

    def choice(most_epochs: int | None = None) -> RunSpec:
        found, why = _with_settings(spec, task, rows, most_epochs)
        reasons.append(why)
        return found

    chosen: dict[str, Any] = {}
    if spec.budget_minutes is None:
        found = choice()
    elif timer is None:
        raise ValueError("budget_minutes is for a single run: give epochs")
    elif "epochs" not in spec.open:
        raise ValueError(
            "budget_minutes is the time by which epochs are chosen, and here they are given, or "
            "the sampler has none: leave out one or the other"
        )
    else:
        progress("timing steps on generated rows")
        found, seconds = timer.choose(choice)
        found = dataclasses.replace(found, budget_minutes=None)
        chosen = {"budget_minutes": spec.budget_minutes, "epoch_seconds": seconds}
    if isinstance(spec.tables, Auto):
        chosen["tables"] = {"tables": found.options()["tables"], "why": reasons[-1]}
    values = {**found.options(), **vars(found.sampler)}
    if names := [name for name in CHOICES if name in spec.open and name in values]:
        chosen["settings"] = to_json({name: values[name] for name in names})
    if chosen:
        progress(sentence(chosen))
    found = _with_calibration(found, task, population, progress)
    found, noise = with_noise(found, task, population, progress)
    found = dataclasses.replace(found, delta=spec.delta_of(population))
    return found, {**chosen, "noise": noise} if noise else chosen


def _with_settings(
    spec: RunSpec, task: Any, rows: tuple[PyTree, Population], most_epochs: int | None
) -> tuple[RunSpec, str]:
    """Returns a spec of sizes, rates and tables that are recommended, and why of its tables."""

    def recommended(spec: RunSpec) -> RunSpec:
        return _recommended(spec, task, rows[1], most_epochs)

    tables = spec.tables
    if isinstance(tables, Dense):
        return recommended(spec), ""
    lazy = dataclasses.replace(spec, tables=Lazy(**vars(tables)))
    if not (why := refusal(lazy)):
        lazy = recommended(lazy)
        try:
            count, looked_up = _table_sizes(task, lazy, rows)
        except ValueError as error:
            why = str(error)
        else:
            from dpsgd.engine.lazy.group import worthwhile

            why = f"they have {count / looked_up:.3g} times the rows that a batch looks up"
            if isinstance(tables, Lazy) or worthwhile(count, looked_up):
                return lazy.but(
                    flush_every=tables.flush_every or _flush_every(count, looked_up)
                ), why
    if isinstance(tables, Lazy):
        raise ValueError(f"tables lazy: {why}")
    return recommended(dataclasses.replace(spec, tables=Dense())), why


def _recommended(
    spec: RunSpec, task: Any, population: Population, most_epochs: int | None
) -> RunSpec:
    """Returns a spec with what the task recommends where it is left open.

    Raises:
      ValueError: if what it recommends is not `Settings`, or cannot be run.
    """
    sampler, names = spec.sampler, spec.open
    own = {one.name for one in dataclasses.fields(Settings)}
    if not own & set(names):
        return spec
    if isinstance(sampler, SamplerSettings) and hasattr(sampler, "batch_size"):
        batch_size, epochs = sampler.batch_size, getattr(sampler, "epochs", None)
    else:  # its sizes are chosen otherwise
        built = build_sampler(spec, population)
        batch_size, epochs = max(1, round(built.expected_batch_size)), built.epochs
    known = {one.name for one in dataclasses.fields(RecommendationRequest)}
    request = RecommendationRequest(
        population.num_examples,
        batch_size=batch_size,
        epochs=epochs,
        most_epochs=most_epochs,
        **{name: value for name, value in spec.options().items() if name in known}
        | {"target_delta": spec.delta_of(population)},
    )
    recommend = getattr(task, "recommend", None)
    settings = recommend(request) if callable(recommend) else generic(request)
    if not isinstance(settings, Settings):
        raise ValueError(
            f"recommend() of the task must return dpsgd.Settings, got {type(settings).__name__}"
        )
    found = {name: getattr(settings, name) for name in names if name in own}
    if found.get("tables_learning_rate", 0.0) is None:
        found["tables_learning_rate"] = table_step_size(request, settings)
    sizes = {name: found.pop(name) for name in DEFAULTS if name in found}
    return spec.but(**found, sampler=dataclasses.replace(sampler, **sizes) if sizes else sampler)


def _table_sizes(task: Any, spec: RunSpec, rows: tuple[PyTree, Population]) -> tuple[int, int]:
    """Returns how many rows the tables have, and how many a batch looks up.

    Raises:
      ValueError: if there are no tables, or a step has several passes.
    """
    import jax

    from dpsgd.engine.lazy.group import found_tables
    from dpsgd.engine.programs import shapes_of_rows
    from dpsgd.gradients.losses import row_of

    data, population = rows
    sampler = build_sampler(spec, population)
    params = jax.eval_shape(lambda: task.init(spec.init_seed))
    example = shapes_of_rows(data, *sampler.clipped_shape)
    found = found_tables(task.loss, params, example)
    leaves = jax.tree.leaves(params)
    read = jax.eval_shape(found.rows, row_of(task.loss, example))
    clipped = sampler.padded_batch_size // math.prod(sampler.clipped_shape)
    return (
        sum(leaves[k].shape[0] for k in found.tables),
        clipped * sum(one.size for one in read.values()),
    )


def _flush_every(count: int, looked_up: int) -> int:
    """Returns the steps between flushes, such that these take at most a twentieth of the time.

    >>> _flush_every(5_000_000, 26 * 1024)
    1280
    """
    from dpsgd.engine.feed import BLOCK_STEPS  # a flush ends a block: it comes after whole ones

    return BLOCK_STEPS * math.ceil(_ROWS_AGAIN * count / looked_up / BLOCK_STEPS)


def _with_calibration(
    spec: RunSpec, task: Any, population: Population, progress: Progress
) -> RunSpec:
    """Returns a spec that says whether its run is calibrated: by default, if it can be."""
    if spec.calibration == "none":
        return spec
    offered, why = callable(getattr(task, "calibration", None)), ""
    if not offered:
        why = f"the task, a {type(task).__name__}, offers none (see dpsgd.runs.task.Task)"
    else:
        try:
            full_sums(spec, build_sampler(spec, population), spec.delta_of(population))
        except ValueError as error:
            why = str(error)
    if why and spec.calibration:
        raise ValueError(f"calibration {spec.calibration} cannot be had: {why}; leave it out")
    if why and offered and spec.private:
        progress(f"no calibration: {why}")
    return dataclasses.replace(spec, calibration="none" if why else "platt")


def with_noise(
    spec: RunSpec, task: Any, population: Population, progress: Progress = lambda line: None
) -> tuple[RunSpec, dict[str, Any]]:
    """Returns a spec with the numbers of its noise, and the record of those that were chosen."""
    noise, record = spec.noise, dict[str, Any]()
    if isinstance(noise, Banded) and noise.bands == "auto":
        bands, why = _best_bands(spec, noise, task, population, progress)
        noise, record = Banded(bands, noise.memory), {"bands": bands, "why": why}
        spec = dataclasses.replace(spec, noise=noise)
    sampler = build_sampler(spec, population)  # refuses one that does not go with it
    if isinstance(noise, Banded) and noise.bands == 1:
        return dataclasses.replace(spec, noise=Independent()), record
    if not isinstance(noise, Banded | Buffered):
        return spec, record
    momentum = getattr(spec.optimizer, "momentum", None)
    if momentum is None:
        progress(f"note: {ADAM}")
    spec = dataclasses.replace(spec, sampler=with_separation(spec.sampler, _bands(spec)))
    if noise.law is not None:
        return spec, record
    progress("finding the noise that disturbs the iterates least")
    count = {"buffers": noise.buffers} if isinstance(noise, Buffered) else {"bands": noise.bands}
    law = planning.best_noise(sampler, **count, momentum=momentum or 0.0)
    numbers: Any = {k: tuple(v) for k, v in law.describe().items()}
    spec = dataclasses.replace(spec, noise=dataclasses.replace(noise, **numbers))
    return spec, {**count, **record}


def _best_bands(
    spec: RunSpec, noise: Banded, task: Any, population: Population, progress: Progress
) -> tuple[int, str]:
    """Returns the number of bands that leaves least error at the wanted guarantee, and why."""
    momentum, goal = getattr(spec.optimizer, "momentum", None), spec.privacy
    if momentum is None:
        return 1, ADAM
    sampler = build_sampler(spec, population)
    if getattr(sampler, "cycle_length", 1) > 1:
        raise ValueError(
            "cycle_length is as long as bands, which auto chooses: leave it out, or give bands"
        )
    of_sampler = planning.most_bands(sampler)
    if of_sampler == 1:
        return 1, f"{name_of(type(sampler))} has no minimum separation"
    import jax

    params = jax.eval_shape(lambda: task.init(spec.init_seed))
    num_params = sum(leaf.size for leaf in jax.tree.leaves(params))
    memory = bytes_of(noise.memory, "bands_memory")
    most = planning.most_bands(sampler, memory=memory, num_params=num_params)
    if most == 1:
        return 1, f"{noise.memory} hold no noise vector of the model"
    delta = spec.delta_of(population)
    assert not isinstance(goal, NonPrivate), "`check` refuses bands without noise"
    target = getattr(goal, "epsilon", None)
    if isinstance(goal, NoiseMultiplier):
        if sampler.separation < of_sampler:
            raise ValueError(
                "bands auto compares at one guarantee, and under this sampler that of a "
                "noise_multiplier depends on bands: give target_epsilon, target_advantage or bands"
            )
        target = sampler.privacy(goal.noise_multiplier).epsilon(delta).upper
    sums = full_sums(spec, sampler, delta) if spec.calibration == "platt" else None
    candidates = planning.plan(
        sampler,
        planning.tried_bands(most),
        epsilon=target,
        delta=delta,
        advantage=getattr(goal, "advantage", None),
        momentum=momentum,
        release=None if sums is None else sums.release(sums.count).noise_multiplier,
        progress=lambda line: progress(f"comparing correlated noise: {line}"),
    )
    least = min(candidate.error for candidate in candidates)
    best = next(candidate for candidate in candidates if candidate.error <= _NEAR * least)
    if best.bands == 1:
        return 1, "at this guarantee a larger b asks for more noise than correlation saves"
    return best.bands, f"it leaves {best.error:.2g} of the error of independent noise"


# --- Specs that need no choice, or were given one ---------------------------------------------


def with_any_noise(spec: RunSpec, population: Population) -> ResolvedRun:
    """Returns a run of the same program, of noise whose numbers need not be searched for."""
    noise = spec.noise
    if isinstance(noise, Banded) and noise.bands == "auto":
        noise = Independent()
    elif isinstance(noise, Banded) and noise.law is None:
        law = banded_square_root(int(noise.bands))
        noise = dataclasses.replace(noise, coefficients=tuple(law.coefficients))
    elif isinstance(noise, Buffered) and noise.law is None:
        some = (0.5 / noise.buffers,) * noise.buffers
        noise = dataclasses.replace(noise, weights=some, decays=some)
    privacy = NoiseMultiplier(1.0) if spec.private else spec.privacy
    how: dict[str, Any] = {"noise": noise, "privacy": privacy, "calibration": "none"}
    return resolved(dataclasses.replace(spec, **how), population)


def differing(asked: RunSpec, found: RunSpec) -> list[str]:
    """Returns the options in which a resolved spec is not what was asked for.

    Args:
      asked: In which choices may be left open.
      found: Which is held against it.
    """
    if isinstance(asked.tables, Auto):
        lazy = isinstance(found.tables, Lazy)
        tables = Lazy(**vars(asked.tables)) if lazy else Dense()
        asked = dataclasses.replace(asked, tables=tables)
    if isinstance(asked.noise, Banded) and asked.noise.bands in ("auto", 1):
        asked = dataclasses.replace(asked, noise=found.noise)
    sampler = with_separation(asked.sampler, _bands(found))
    if isinstance(sampler, SamplerSettings) and type(sampler) is type(found.sampler):
        sizes = {name: getattr(found.sampler, name) for name in sampler.open_sizes()}
        sampler = dataclasses.replace(sampler, **sizes)
    asked = dataclasses.replace(asked, sampler=sampler)
    left = {*asked.open, "target_delta", "decays"}
    ours, theirs = asked.options(), found.options()
    names = (name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name))
    return [name for name in names if name not in left or ours[name] is not None]
