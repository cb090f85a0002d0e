"""Chooses the settings that a run leaves open; no other module does.

Choices depend on public values alone: numbers of rows and steps, shapes, and the wanted guarantee.
`config.json` records the results, so that a resumed run chooses nothing. `dpsgd.runs.support` lists
the combinations that are refused.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from accounting.records import named
from dpsgd.core.noise import Independent
from dpsgd.noise.correlated import error_of_sums
from dpsgd.runs.mechanism import (
    ResolvedRun,
    build_sampler,
    full_sums,
    impossible,
    resolved,
)
from dpsgd.runs.recommendation import (
    CHOICES,
    RecommendationRequest,
    Settings,
    generic,
    sentence,
    table_step_size,
    warm_rate,
)
from dpsgd.runs.records import to_json
from dpsgd.runs.spec import (
    OWN,
    SGD,
    Adam,
    AdamW,
    Auto,
    Banded,
    Dense,
    LastStep,
    Lazy,
    NoiseMultiplier,
    NonPrivate,
    RunSpec,
    TargetEpsilon,
)
from dpsgd.runs.support import check, conflict_of, with_separation
from dpsgd.runs.task import calibration_of
from samplers import BallsAndBins, Poisson, Population, UserPoisson
from samplers.settings import DEFAULTS, SAMPLERS, SamplerSettings

Rows = tuple[Any, Population]
Progress = Callable[[str], None]

ADAM = (
    "Adam gains nothing from correlated noise: it divides by the gradient's size in single steps, "
    "where correlated noise is larger"
)

_MOST_BANDS = 1024

_FLUSH_STEPS = 20 / 3
"""Flush interval in steps, per ratio of table rows to rows looked up in a step. A step takes at
least 3 times longer per row than a flush, so flushes take at most 1/20 of the time."""


def resolve(
    spec: RunSpec, task: Any, rows: Rows, progress: Progress = lambda line: None
) -> ResolvedRun:
    """Returns the resolved run of a spec.

    Args:
      spec: Settings, some of them open.
      task: Task, whose method `recommend`, if any, chooses settings (see `dpsgd.runs.task.Task`).
      rows: Training rows, read for their shapes alone, and their population.
      progress: Function of one line of text.

    Raises:
      ValueError: for options that do not go together or do not fit the data, for a recommendation
        that cannot be run, or a target out of reach.

    Given options stay unchanged.
    """
    spec, chosen = choose(spec, task, rows, progress)
    noise_is_given = isinstance(spec.privacy, NoiseMultiplier | NonPrivate)
    subject = "the guarantee of the run" if noise_is_given else "the noise for the target epsilon"
    progress(f"finding {subject}")
    run = resolved(spec, rows[1])
    if "noise" in chosen:
        noise = {**chosen["noise"], "noise_multiplier": run.mechanism.noise_multiplier}
        progress(sentence({"noise": noise}))
        chosen = {**chosen, "noise": noise}
    return dataclasses.replace(run, chosen=chosen)


def choose(
    spec: RunSpec, task: Any, rows: Rows, progress: Progress = lambda line: None
) -> tuple[RunSpec, dict[str, Any]]:
    """Returns a spec with all choices made but the noise's size.

    The second result is `ResolvedRun.chosen`.

    Args:
      spec: Settings, some of them open.
      task: Task, whose method `recommend`, if any, chooses settings.
      rows: Training rows, read for their shapes alone, and their population.
      progress: Function of one line of text.

    Raises:
      ValueError: as for `resolve`.
    """
    population = rows[1]
    check(spec, population.num_examples)
    chosen_spec, why = _with_settings(spec, task, rows)
    chosen: dict[str, Any] = {}
    if isinstance(spec.tables, Auto):
        chosen["tables"] = {"tables": chosen_spec.options()["tables"], "why": why}
    values = {**chosen_spec.options(), **vars(chosen_spec.sampler)}
    by_rule = [*spec.open, *(["average_tail"] if averages_by_rule(spec) else [])]
    if names := [name for name in CHOICES if name in by_rule and name in values]:
        chosen["settings"] = to_json({name: values[name] for name in names})
        targeted = isinstance(spec.privacy, TargetEpsilon)  # else `warm_rate` has no effect
        if "learning_rate" in names and spec.init_from is not None and targeted:
            chosen["warm"] = {"why": "at the usual rate the run would forget its initial model"}
    if chosen:
        progress(sentence(chosen))
    chosen_spec = _with_calibration(chosen_spec, task, population, progress)
    chosen_spec, noise = with_noise(chosen_spec, task, population, progress)
    falling = dataclasses.replace(chosen_spec.optimizer, schedule=chosen_spec.optimizer.step_sizes)
    chosen_spec = dataclasses.replace(
        chosen_spec, optimizer=falling, delta=spec.delta_of(population)
    )
    return chosen_spec, {**chosen, "noise": noise} if noise else chosen


def _with_settings(spec: RunSpec, task: Any, rows: Rows) -> tuple[RunSpec, str]:
    """Returns a spec with recommended settings, and the reason for its tables."""
    tables, population = spec.tables, rows[1]
    if isinstance(tables, Dense):
        return _recommended(spec, task, population), ""
    lazy = dataclasses.replace(spec, tables=Lazy(**vars(tables)))
    if not (why := str(conflict_of(lazy) or "")):
        lazy = _recommended(lazy, task, population)
        # Settings that no kind of tables allows are refused without naming lazy ones.
        build_sampler(dataclasses.replace(lazy, tables=Dense()), population)
        try:
            count, looked_up = _table_sizes(lazy, task, rows)
        except ValueError as error:
            why = str(error)
        else:
            from dpsgd.engine.feed import BLOCK_STEPS
            from dpsgd.engine.lazy.group import worthwhile

            why = f"they have {count / looked_up:.3g} times the rows that a batch looks up"
            if isinstance(tables, Lazy) or worthwhile(count, looked_up):
                blocks = math.ceil(_FLUSH_STEPS * count / looked_up / BLOCK_STEPS)  # whole ones
                return lazy.but(flush_every=tables.flush_every or BLOCK_STEPS * blocks), why
    if isinstance(tables, Lazy):
        raise ValueError(f"tables lazy: {why}")
    reason, _, _ = why.partition(";")  # the remedy after ; applies to `lazy` only
    return _recommended(dataclasses.replace(spec, tables=Dense()), task, population), reason


def _table_sizes(spec: RunSpec, task: Any, rows: Rows) -> tuple[int, int]:
    """Returns numbers of table rows, and of look-ups per batch, from shapes alone."""
    import jax

    from dpsgd.engine.lazy.group import find_tables
    from dpsgd.engine.programs import shapes_of_rows
    from dpsgd.gradients.frozen import RunLoss

    sampler = build_sampler(spec, rows[1])
    params = jax.eval_shape(lambda: task.init(spec.init_seed))
    example = shapes_of_rows(rows[0], *sampler.clipped_shape)
    lookups = find_tables(RunLoss.restrict(task.loss, spec.train), params, example)
    leaves = jax.tree.leaves(params)
    clipped = sampler.padded_batch_size // math.prod(sampler.clipped_shape)
    return sum(leaves[k].shape[0] for k in lookups), clipped * sum(lookups.values())


def request_of(spec: RunSpec, population: Population) -> RecommendationRequest:
    """Returns a recommendation's request.

    Args:
      spec: Settings of the run.
      population: Public facts about the rows.
    """
    names = {option.name for option in dataclasses.fields(RecommendationRequest)}
    options = {name: value for name, value in spec.options().items() if name in names}
    kind = "sgd" if isinstance(spec.optimizer, SGD) else "adam"  # closest optimizer with rules
    if spec.optimizer.learning_rate is None and ":" in (
        name := OWN["optimizer"].name_of(type(spec.optimizer))
    ):
        raise ValueError(f"learning_rate has no default for your own optimizer {name}; pass one")
    options |= {"optimizer": kind, "target_delta": spec.delta_of(population)}
    return RecommendationRequest(population.num_examples, **options)


def _recommended(spec: RunSpec, task: Any, population: Population) -> RunSpec:
    """Returns a spec whose open settings are the task's recommendations."""
    sampler, names = spec.sampler, spec.open
    fields = {setting.name for setting in dataclasses.fields(Settings)} - {"average_tail"}
    if not fields & set(names):
        return spec
    if isinstance(sampler, SamplerSettings) and hasattr(sampler, "batch_size"):
        batch_size, epochs = sampler.batch_size, getattr(sampler, "epochs", None)
    else:  # the sampler has no open batch size
        built = build_sampler(spec, population)
        batch_size, epochs = max(1, round(built.expected_batch_size)), built.epochs
    request = dataclasses.replace(
        request_of(spec, population),
        batch_size=batch_size,
        epochs=epochs,
        may_average=averages_by_rule(spec) and isinstance(spec.tables, Dense),
    )
    recommend = getattr(task, "recommend", None)
    settings = recommend(request) if callable(recommend) else generic(request)
    if not isinstance(settings, Settings):
        raise ValueError(
            f"recommend() of the task must return dpsgd.Settings, got {type(settings).__name__}"
        )
    values = {name: getattr(settings, name) for name in names if name in fields}
    if spec.init_from is not None and "learning_rate" in values:
        values["learning_rate"] = warm_rate(values["learning_rate"], request)
    if request.may_average and settings.average_tail:
        values |= {"average_tail": settings.average_tail, "schedule": "constant"}
    if values.get("tables_learning_rate", 0.0) is None:
        values["tables_learning_rate"] = table_step_size(request, settings)
    sizes = {name: values.pop(name) for name in DEFAULTS if name in values}
    return spec.but(**values, sampler=dataclasses.replace(sampler, **sizes) if sizes else sampler)


def averages_by_rule(spec: RunSpec) -> bool:
    """Returns True if the task may choose an average of parameters.

    Learning rate, schedule and average must be open: the task chooses a rate for the average.
    """
    chosen = spec.optimizer.learning_rate, spec.optimizer.schedule
    return chosen == (None, None) and isinstance(spec.average, LastStep)


def _with_calibration(
    spec: RunSpec, task: Any, population: Population, progress: Progress
) -> RunSpec:
    """Returns a spec with its calibration chosen: by default the task's, if possible."""
    if spec.calibration == "none":
        return spec
    offered, why = calibration_of(task), ""
    kind: Any = offered.kind if offered else spec.calibration
    if not offered:
        hint = " for such labels" if hasattr(task, "calibration") else " (see dpsgd.runs.task.Task)"
        why = f"the task, a {type(task).__name__}, offers none{hint}"
    elif spec.calibration not in (None, kind):
        why = f"the task, a {type(task).__name__}, offers {kind}"
    else:
        tried = dataclasses.replace(spec, calibration=kind)
        try:
            full_sums(tried, build_sampler(spec, population), spec.delta_of(population))
            _check_rescaled(spec, task)
        except ValueError as error:
            why = str(error)
    if why and spec.calibration:
        raise ValueError(impossible(spec.calibration, why))
    if why and offered and spec.private:
        progress(f"no calibration: {why}")
    return dataclasses.replace(spec, calibration="none" if why else kind)


def _check_rescaled(spec: RunSpec, task: Any) -> None:
    """Raises ValueError if calibration would change parameters frozen by `train`."""
    if spec.train is None:
        return
    import jax

    from dpsgd.gradients.frozen import leaf_names, matching_leaves

    params = jax.eval_shape(lambda: task.init(spec.init_seed))
    refinement, trained = task.calibration(), matching_leaves(params, spec.train)
    applied = jax.make_jaxpr(lambda p: refinement.apply(p, refinement.start()))(params).jaxpr
    for k, (before, after) in enumerate(zip(applied.invars, applied.outvars, strict=True)):
        if before is not after and k not in trained:
            raise ValueError(f"it would rescale {leaf_names(params)[k]}, which train freezes")


def with_noise(
    spec: RunSpec, task: Any, population: Population, progress: Progress = lambda line: None
) -> tuple[RunSpec, dict[str, Any]]:
    """Returns a spec with its bands chosen, and the choice's record.

    Args:
      spec: Settings of the run.
      task: Task, read for the shapes of its parameters.
      population: Public facts about the rows.
      progress: Function of one line of text.

    Raises:
      ValueError: if the sampler does not go with the bands.
    """
    noise, record = spec.noise, dict[str, Any]()
    if isinstance(noise, Banded) and noise.bands == "auto":
        bands, why = _best_bands(spec, task, population, progress)
        noise, record = Banded(bands), {"bands": bands, "why": why}
        spec = dataclasses.replace(spec, noise=noise)
    build_sampler(spec, population)  # refuses a sampler that does not go with the bands
    if noise.bands == 1:
        independent = Independent() if isinstance(noise, Banded) else noise
        return dataclasses.replace(spec, noise=independent), record
    if isinstance(spec.optimizer, Adam | AdamW):
        progress(f"note: {ADAM}")
    sampler = with_separation(spec.sampler, noise.bands)
    return dataclasses.replace(spec, sampler=sampler), record


def _best_bands(
    spec: RunSpec, task: Any, population: Population, progress: Progress
) -> tuple[int, str]:
    """Returns the power of two of bands with the least error, and why.

    The error of summed gradients is sigma E(b, N) / (B N) with b bands, N steps, expected batch
    size B, E of `error_of_sums`, and the sigma of the wanted guarantee.
    """
    if not isinstance(spec.optimizer, SGD):
        is_adam = isinstance(spec.optimizer, Adam | AdamW)
        return 1, ADAM if is_adam else "the error is known for SGD alone"
    sampler: Any = build_sampler(dataclasses.replace(spec, noise=Independent()), population)
    cyclic = isinstance(sampler, BallsAndBins | Poisson) and not isinstance(sampler, UserPoisson)
    if cyclic and sampler.cycle_length > 1:
        raise ValueError(
            "cycle_length must equal bands, which auto chooses: leave it out, or give bands"
        )
    # Each group needs a batch.
    most = sampler.num_examples // sampler.batch_size if cyclic else sampler.separation
    if most == 1:
        return 1, f"{SAMPLERS.name_of(type(sampler))} has no minimum separation"
    if cyclic and isinstance(spec.privacy, NoiseMultiplier):
        raise ValueError(
            "bands=auto needs target_epsilon under this sampler, where the cost of a "
            "noise_multiplier depends on bands: give target_epsilon or bands"
        )
    most = min(most, _MOST_BANDS, 1 + _most_vectors(spec, task))
    if most == 1:
        return 1, "a noise vector of the model takes more than 2 GiB"
    errors = {}
    for bands in (2**k for k in range(most.bit_length())):
        progress(f"comparing correlated noise: b = {bands}")
        banded = dataclasses.replace(spec, noise=Banded(bands), l2_clip_norm=1.0)
        mechanism = resolved(banded, population).mechanism
        steps = mechanism.sampler.num_steps
        distance = steps * mechanism.sampler.expected_batch_size
        errors[bands] = mechanism.noise_multiplier * error_of_sums(bands, steps) / distance
    best = min(errors, key=errors.__getitem__)
    if best == 1:
        return 1, "more bands would need more noise than correlation cancels"
    ratio = errors[best] / errors[1]
    return best, f"its error is about {ratio:.2g} times that of independent noise"


def _most_vectors(spec: RunSpec, task: Any) -> int:
    """Returns how many noise vectors of the trained parameters 2 GiB hold."""
    import jax

    from dpsgd.gradients.frozen import matching_leaves

    params = jax.eval_shape(lambda: task.init(spec.init_seed))
    trained = matching_leaves(params, spec.train or "")
    return 2**29 // sum(x.size for k, x in enumerate(jax.tree.leaves(params)) if k in trained)


def differing(requested: RunSpec, resolved_spec: RunSpec) -> list[str]:
    """Returns the names of options that differ from those given.

    Args:
      requested: Settings as given; open ones match every choice.
      resolved_spec: Settings of a run, without open choices.
    """
    ours, theirs = requested.options(), resolved_spec.options()
    sampler = with_separation(requested.sampler, resolved_spec.noise.bands)
    if isinstance(sampler, SamplerSettings) and type(sampler) is type(resolved_spec.sampler):
        sizes = {name: getattr(resolved_spec.sampler, name) for name in sampler.open_sizes()}
        sampler = dataclasses.replace(sampler, **sizes)
    ours["sampler"] = sampler
    if requested.delta == "1/n":  # the resolved delta is a number
        ours["target_delta"] = None
    if isinstance(requested.tables, Auto):
        ours["tables"] = theirs["tables"]
        if isinstance(resolved_spec.tables, Dense):
            ours = {name: x for name, x in ours.items() if name not in named(Lazy)}
    if ours.get("bands") == "auto":
        ours |= {name: theirs.get(name) for name in named(Banded)}
    elif ours.get("bands") == 1:
        ours |= dict.fromkeys(named(Banded))
    if None not in (requested.init_from, resolved_spec.init_from):  # wherever the model lies
        ours["init_from"] = resolved_spec.init_from
    open_names = {*requested.open, "target_delta", "schedule"}
    open_names |= {"average_tail"} if averages_by_rule(requested) else set()
    names = (name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name))
    return [name for name in names if name not in open_names or ours.get(name) is not None]
