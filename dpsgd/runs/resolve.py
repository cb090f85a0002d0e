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

from dpsgd.core.mechanism import Mechanism
from dpsgd.core.noise import Independent
from dpsgd.core.queries import FullSums
from dpsgd.noise.correlated import error_of_sums
from dpsgd.runs.mechanism import (
    ResolvedRun,
    build_sampler,
    full_sums,
    impossible,
    scaled,
    unscaled,
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
    Lazy,
    NoiseMultiplier,
    NonPrivate,
    RunSpec,
    TargetEpsilon,
)
from dpsgd.runs.support import conflict_of, with_separation
from dpsgd.runs.task import calibration_of
from samplers import BallsAndBins, BatchSampler, Poisson, Population, UserPoisson
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
    run = choose(spec, task, rows, progress)
    noise_is_given = isinstance(spec.privacy, NoiseMultiplier | NonPrivate)
    subject = "the guarantee of the run" if noise_is_given else "the noise for the target epsilon"
    progress(f"finding {subject}")
    run = scaled(run)
    if noise := run.chosen.get("noise"):
        noise["noise_multiplier"] = run.mechanism.noise_multiplier
        progress(sentence({"noise": noise}))
    return run


def choose(
    spec: RunSpec, task: Any, rows: Rows, progress: Progress = lambda line: None
) -> ResolvedRun:
    """Returns a run with all choices made except the size of its noise.

    Args:
      spec: Settings, some of them open.
      task: Task, whose method `recommend`, if any, chooses settings.
      rows: Training rows, read for their shapes alone, and their population.
      progress: Function of one line of text.

    Raises:
      ValueError: as for `resolve`.
    """
    population = rows[1]
    spec = dataclasses.replace(spec, delta=spec.delta_of(population))
    chosen_spec, sampler, why = _with_settings(spec, task, rows)
    chosen: dict[str, Any] = {}
    if isinstance(spec.tables, Auto):
        chosen["tables"] = {"tables": chosen_spec.options()["tables"], "why": why}
    values = {**chosen_spec.options(), **vars(chosen_spec.sampler)}
    if names := [name for name in CHOICES if name in spec.open and name in values]:
        chosen["settings"] = to_json({name: values[name] for name in names})
        targeted = isinstance(spec.privacy, TargetEpsilon)  # else `warm_rate` has no effect
        if "learning_rate" in names and spec.init_from is not None and targeted:
            chosen["warm"] = {"why": "at the usual rate the run would forget its initial model"}
    if chosen:
        progress(sentence(chosen))
    chosen_spec, sums = _with_calibration(chosen_spec, sampler, task, progress)
    mechanism = unscaled(chosen_spec, sampler, sums)
    noised = with_noise(chosen_spec, mechanism, task, population, progress)
    return noised._replace(chosen={**chosen, **noised.chosen})


def _with_settings(spec: RunSpec, task: Any, rows: Rows) -> tuple[RunSpec, BatchSampler, str]:
    """Returns a spec with recommended settings, its sampler, and the reason for its tables."""
    tables, population, reason = spec.tables, rows[1], ""
    if not isinstance(tables, Dense):
        lazy = dataclasses.replace(spec, tables=Lazy(**vars(tables)))
        if not (why := str(conflict_of(lazy) or "")):
            lazy = _recommended(lazy, task, population)
            # Settings that no kind of tables allows are refused without naming lazy ones.
            sampler = build_sampler(dataclasses.replace(lazy, tables=Dense()), population)
            try:
                count, looked_up = _table_sizes(lazy, sampler, task, rows[0])
            except ValueError as error:
                why = str(error)
            else:
                from dpsgd.engine.feed import BLOCK_STEPS
                from dpsgd.engine.lazy.group import worthwhile

                why = f"they have {count / looked_up:.3g} times the rows that a batch looks up"
                if isinstance(tables, Lazy) or worthwhile(count, looked_up):
                    blocks = math.ceil(_FLUSH_STEPS * count / looked_up / BLOCK_STEPS)
                    lazy = lazy.but(flush_every=tables.flush_every or BLOCK_STEPS * blocks)
                    return lazy, sampler, why
        if isinstance(tables, Lazy):
            raise ValueError(f"tables lazy: {why}")
        reason, _, _ = why.partition(";")  # the remedy after ; applies to `lazy` only
    spec = _recommended(dataclasses.replace(spec, tables=Dense()), task, population)
    return spec, build_sampler(spec, population), reason


def _table_sizes(spec: RunSpec, sampler: BatchSampler, task: Any, rows: Any) -> tuple[int, int]:
    """Returns numbers of table rows, and of look-ups per batch, from shapes alone."""
    # `full_sums` checks the calibration, whose conflicts are none of tables.
    if conflict := conflict_of(dataclasses.replace(spec, calibration=None), sampler):
        raise ValueError(str(conflict))
    import jax

    from dpsgd.engine.lazy.group import find_tables
    from dpsgd.engine.programs import shapes_of_rows
    from dpsgd.gradients.frozen import RunLoss

    params = jax.eval_shape(lambda: task.init(spec.init_seed))
    example = shapes_of_rows(rows, *sampler.clipped_shape)
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
    spec = dataclasses.replace(spec, delta=spec.delta_of(population))
    names = {option.name for option in dataclasses.fields(RecommendationRequest)}
    options = {name: value for name, value in spec.options().items() if name in names}
    kind = "sgd" if isinstance(spec.optimizer, SGD) else "adam"  # closest optimizer with rules
    if spec.optimizer.learning_rate is None and ":" in (
        name := OWN["optimizer"].name_of(type(spec.optimizer))
    ):
        raise ValueError(f"learning_rate has no default for your own optimizer {name}; pass one")
    return RecommendationRequest(population.num_examples, **{**options, "optimizer": kind})


def _recommended(spec: RunSpec, task: Any, population: Population) -> RunSpec:
    """Returns a spec whose open settings are the task's recommendations."""
    sampler, names = spec.sampler, spec.open
    fields = {setting.name for setting in dataclasses.fields(Settings)}
    if not fields & set(names):
        return spec
    if isinstance(sampler, SamplerSettings) and hasattr(sampler, "batch_size"):
        batch_size, epochs = sampler.batch_size, getattr(sampler, "epochs", None)
    else:  # the sampler has no open batch size
        built = build_sampler(spec, population)
        batch_size, epochs = max(1, round(built.expected_batch_size)), built.epochs
    request = request_of(spec, population)
    request = dataclasses.replace(request, batch_size=batch_size, epochs=epochs)
    recommend = getattr(task, "recommend", None)
    settings = recommend(request) if callable(recommend) else generic(request)
    if not isinstance(settings, Settings):
        raise ValueError(
            f"recommend() of the task must return dpsgd.Settings, got {type(settings).__name__}"
        )
    values = {name: getattr(settings, name) for name in names if name in fields}
    if spec.init_from is not None and "learning_rate" in values:
        values["learning_rate"] = warm_rate(values["learning_rate"], request)
    if values.get("tables_learning_rate", 0.0) is None:
        values["tables_learning_rate"] = table_step_size(request, settings)
    sizes = {name: values.pop(name) for name in DEFAULTS if name in values}
    return spec.but(**values, sampler=dataclasses.replace(sampler, **sizes) if sizes else sampler)


def _with_calibration(
    spec: RunSpec, sampler: BatchSampler, task: Any, progress: Progress
) -> tuple[RunSpec, FullSums | None]:
    """Returns a spec with a calibration, by default the task's if possible, and its sums."""
    if spec.calibration == "none":
        return spec, None
    offered, why, sums = calibration_of(task), "", None
    kind: Any = offered.kind if offered else spec.calibration
    if not offered:
        hint = " for such labels" if hasattr(task, "calibration") else " (see dpsgd.runs.task.Task)"
        why = f"the task, a {type(task).__name__}, offers none{hint}"
    elif spec.calibration not in (None, kind):
        why = f"the task, a {type(task).__name__}, offers {kind}"
    else:
        tried = dataclasses.replace(spec, calibration=kind)
        try:
            sums = full_sums(tried, sampler)
            _check_rescaled(spec, task)
        except ValueError as error:
            why = str(error)
    if why and spec.calibration:
        raise ValueError(impossible(spec.calibration, why))
    if why and offered and spec.private:
        progress(f"no calibration: {why}")
    spec = dataclasses.replace(spec, calibration="none" if why else kind)
    return spec, None if why else sums


def _check_rescaled(spec: RunSpec, task: Any) -> None:
    """Raises ValueError if calibration would change parameters frozen by `train`."""
    if spec.train is None:
        return
    import jax

    from dpsgd.gradients.frozen import leaf_names

    refinement, (params, trained) = task.calibration(), _parameters(spec, task)
    applied = jax.make_jaxpr(lambda p: refinement.apply(p, refinement.start()))(params).jaxpr
    for k, (x, y) in enumerate(zip(applied.invars, applied.outvars, strict=True)):
        if x is not y and k not in trained:
            raise ValueError(f"it would rescale {leaf_names(params)[k]}, which train freezes")


def with_noise(
    spec: RunSpec, mechanism: Mechanism, task: Any, population: Population, progress: Progress
) -> ResolvedRun:
    """Returns a spec with its bands chosen, its mechanism, and the choice's record.

    Args:
      spec: Settings of the run, whose delta is a number.
      mechanism: Mechanism of the run, from `unscaled`.
      task: Task, read for the shapes of its parameters.
      population: Public facts about the rows.
      progress: Function of one line of text.
    """
    noise, chosen = spec.noise, dict[str, Any]()
    if isinstance(noise, Banded) and noise.bands == "auto":
        mechanism, why = _best_bands(spec, mechanism, task, population, progress)
        noise = Banded(mechanism.noise.bands)
        chosen["noise"] = {"bands": noise.bands, "why": why}
    if noise.bands == 1 and isinstance(noise, Banded):
        noise = Independent()
        mechanism = dataclasses.replace(mechanism, noise=noise)
    elif noise.bands != 1 and isinstance(spec.optimizer, Adam | AdamW):
        progress(f"note: {ADAM}")
    sampler = with_separation(spec.sampler, noise.bands)
    return ResolvedRun(dataclasses.replace(spec, noise=noise, sampler=sampler), mechanism, chosen)


def _best_bands(
    spec: RunSpec, mechanism: Mechanism, task: Any, population: Population, progress: Progress
) -> tuple[Mechanism, str]:
    """Returns a mechanism with the power of two of bands of least error, and why.

    The error of summed gradients is sigma E(b, N) / (B N) with b bands, N steps, expected batch
    size B, E of `error_of_sums`, and the sigma of the wanted guarantee.
    """
    if not isinstance(spec.optimizer, SGD):
        is_adam = isinstance(spec.optimizer, Adam | AdamW)
        return mechanism, ADAM if is_adam else "the error is known for SGD alone"
    sampler: Any = mechanism.sampler
    cyclic = isinstance(sampler, BallsAndBins | Poisson) and not isinstance(sampler, UserPoisson)
    if cyclic and sampler.cycle_length > 1:
        raise ValueError(
            "cycle_length must equal bands, which auto chooses: leave it out, or give bands"
        )
    # Each group needs a batch.
    most = sampler.num_examples // sampler.batch_size if cyclic else sampler.separation
    if most == 1:
        return mechanism, f"{SAMPLERS.name_of(type(sampler))} has no minimum separation"
    if cyclic and isinstance(spec.privacy, NoiseMultiplier):
        raise ValueError(
            "bands=auto needs target_epsilon under this sampler, where the cost of a "
            "noise_multiplier depends on bands: give target_epsilon or bands"
        )
    size = sum(leaf.size for leaf in _parameters(spec, task)[1].values())
    most = min(most, _MOST_BANDS, 1 + 2**29 // size)  # vectors of noise in 2 GiB
    if most == 1:
        return mechanism, "a noise vector of the model takes more than 2 GiB"
    tried: list[tuple[float, Mechanism]] = []
    for bands in (2**k for k in range(most.bit_length())):
        progress(f"comparing correlated noise: b = {bands}")
        banded = dataclasses.replace(spec, noise=Banded(bands), l2_clip_norm=1.0)
        sampler, sums = build_sampler(banded, population), mechanism.full_sums
        mechanism = unscaled(banded, sampler, sums)
        sigma = scaled(ResolvedRun(banded, mechanism)).mechanism.noise_multiplier
        steps, batch_size = sampler.num_steps, sampler.expected_batch_size
        tried.append((sigma * error_of_sums(bands, steps) / (steps * batch_size), mechanism))
    least, best = min(tried, key=lambda candidate: candidate[0])
    if best is tried[0][1]:
        return best, "more bands would need more noise than correlation cancels"
    return best, f"its error is about {least / tried[0][0]:.2g} times that of independent noise"


def _parameters(spec: RunSpec, task: Any) -> tuple[Any, dict[int, Any]]:
    """Returns shapes of all parameters, and those of the trained ones by index of the leaf."""
    import jax

    from dpsgd.gradients.frozen import matching_leaves

    params = jax.eval_shape(lambda: task.init(spec.init_seed))
    leaves = jax.tree.leaves(params)
    return params, {k: leaves[k] for k in matching_leaves(params, spec.train or "")}
