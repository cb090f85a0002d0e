"""Over how many steps a run's noise is correlated, and how: decided before it begins.

All that it goes by is public: the run's steps, their sizes and the guarantee that is wanted.
`config.json` records plain numbers, and no resumed run decides anything.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from dpsgd.sizes import bytes_of
from samplers import BatchSampler, Population

if TYPE_CHECKING:
    from dpsgd.runs.config import RunConfig

Progress = Callable[[str], None]

NEAR = 1.02
"""Up to so many times the least error a smaller number of bands is taken: it needs less memory."""

ADAM = (
    "Adam gains nothing from correlated noise: it divides by the size of what it sees in single "
    "steps, and in a single step correlated noise is larger"
)


def check(config: RunConfig) -> None:
    """Raises ValueError, which names the setting, for bands or buffers that no run can have."""
    bands = config.bands
    _check_buffers(config)
    if bands is None or bands == 1:
        if config.coefficients is not None:
            raise ValueError("coefficients are those of correlated noise: give bands as well")
        return
    if bands != "auto" and not (isinstance(bands, int) and bands >= 1):
        raise ValueError(f'bands must be an integer >= 1 or "auto", got {bands!r}')
    bytes_of(config.bands_memory, "bands_memory")
    if config.non_private:
        raise ValueError("bands correlate noise, and non_private has none: leave one of them out")
    if config.secure_noise:
        raise ValueError("secure_noise is exact where it is independent: leave out bands")
    if config.coefficients is not None:
        if len(config.coefficients) != bands:
            raise ValueError(
                f"coefficients must be as many as bands, {bands}, got {len(config.coefficients)}"
            )
        config.noise()  # refuses those that no noise has


def _check_buffers(config: RunConfig) -> None:
    buffers, given = config.buffers, (config.weights, config.decays)
    if buffers is None:
        if given != (None, None):
            raise ValueError("weights and decays are those of buffers: give buffers as well")
        return
    if buffers < 1:
        raise ValueError(f"buffers must be at least 1, got {buffers}")
    if config.bands is not None:
        raise ValueError("buffers correlate noise in place of bands: leave one of them out")
    if config.non_private:
        raise ValueError("buffers correlate noise, and non_private has none: leave one of them out")
    if config.secure_noise:
        raise ValueError("secure_noise is exact where it is independent: leave out buffers")
    weights, decays = given
    if weights is None and decays is None:
        return
    if weights is None or decays is None or not len(weights) == len(decays) == buffers:
        raise ValueError(f"weights and decays must be as many as buffers, {buffers}: give both")
    config.noise()  # refuses those that no noise has


def kept_apart(sampler: Any, bands: int | str | None) -> Any:
    """Returns a sampler, or its settings, with the cycle that so many bands ask for.

    It is left as it is where it has a cycle already, or can have none.
    """
    if isinstance(bands, int) and bands > 1 and getattr(sampler, "cycle_length", None) == 1:
        return dataclasses.replace(sampler, cycle_length=bands)
    return sampler


@contextmanager
def apart(sampler: Any, bands: int | str | None) -> Iterator[Any]:
    """Gives what `kept_apart` returns; if the data do not fit the cycle, it is the bands' fault."""
    kept = sampler
    try:
        kept = kept_apart(sampler, bands)
        yield kept
    except ValueError as error:
        if re.search("cycle.length", str(error)) and kept != sampler:
            raise ValueError(f"bands {bands}: {error}") from None
        raise


def check_apart(sampler: BatchSampler, bands: int | str | None) -> None:
    """Raises ValueError if a sampler keeps no two steps of an example so far apart."""
    if not isinstance(bands, int) or bands <= (apart := sampler.separation):
        return
    name = type(sampler).__name__
    if apart > 1:
        raise ValueError(
            f"bands must be at most {apart} here, got {bands}: two steps that an example may take "
            f"part in are so far apart under {name}"
        )
    raise ValueError(
        f"bands {bands}: {name} keeps no two steps of an example apart, as correlated noise asks "
        "for; balls-and-bins, poisson, deterministic and shuffle with a fixed order can"
    )


def check_order(sampler: BatchSampler, buffers: int | None) -> None:
    """Raises ValueError if noise has buffers, and a sampler draws."""
    if buffers is not None and sampler.period is None:
        raise ValueError(
            f"buffers {buffers}: they correlate noise over all steps, which asks for an order that "
            f"is known, and {type(sampler).__name__} draws; deterministic and shuffle with a fixed "
            "order do not"
        )


def decided(
    task: Any,
    config: RunConfig,
    population: Population,
    progress: Progress = lambda line: None,
) -> tuple[RunConfig, dict[str, Any]]:
    """Returns a configuration with the numbers of its noise, and the record of what was decided.

    Args:
      task: What is trained.
      config: With nothing else left open.
      population: What is public of the training rows.
      progress: Called with one line of text.

    Raises:
      ValueError: if bands are asked for that the run cannot have.
    """
    bands, record = config.bands, dict[str, Any]()
    if bands == "auto":
        bands, record["why"] = _best(task, config, population, progress)
        record = {"bands": bands, **record}
        config = dataclasses.replace(config, bands=bands)
    sampler = config.build_sampler(population)  # refuses one that does not go with them
    if config.buffers is None and (bands is None or bands == 1):
        return config, record
    if config.optimizer == "adam":
        progress(f"note: {ADAM}")
    if config.buffers is not None:
        return _buffered(config, sampler, config.buffers, progress), {"buffers": config.buffers}
    assert isinstance(bands, int), "without buffers, a number by now"
    config = dataclasses.replace(config, sampler=kept_apart(config.sampler, bands))
    if config.coefficients is None:
        from dpsgd.noise.planning import workload
        from dpsgd.noise.strategies import optimized

        progress("finding the noise that disturbs the iterates least")
        coefficients = optimized(workload(sampler, momentum=config.momentum), bands).coefficients
        config = dataclasses.replace(config, coefficients=tuple(coefficients))
    return config, {"bands": bands, **record}


def _buffered(
    config: RunConfig, sampler: BatchSampler, buffers: int, progress: Progress
) -> RunConfig:
    if config.weights is not None:
        return config
    from dpsgd.noise.planning import workload
    from dpsgd.noise.strategies import optimized_buffers

    progress("finding the noise that disturbs the iterates least")
    assert sampler.period is not None, "`check_order` refuses others"
    run = workload(sampler, momentum=config.momentum)
    noise = optimized_buffers(run, buffers, sampler.period)
    weights, decays = tuple(noise.weights), tuple(noise.decays)
    return dataclasses.replace(config, weights=weights, decays=decays)


def as_decided(config: RunConfig, found: RunConfig) -> RunConfig:
    """Returns a configuration with what `decided` has added to it in another, if it has."""
    sampler = kept_apart(config.sampler, config.bands)
    chosen = ("coefficients", "weights", "decays")
    numbers = {name: getattr(config, name) or getattr(found, name) for name in chosen}
    return dataclasses.replace(config, sampler=sampler, **numbers)


def _best(
    task: Any, config: RunConfig, population: Population, progress: Progress
) -> tuple[int, str]:
    """Returns the number of bands that leaves least error at the wanted guarantee, and why."""
    from dpsgd.noise import planning

    if config.optimizer == "adam":
        return 1, ADAM
    sampler = config.build_sampler(population)
    if getattr(sampler, "cycle_length", 1) > 1:
        raise ValueError(
            "cycle_length is as long as bands, which auto chooses: leave it out, or give bands"
        )
    memory = bytes_of(config.bands_memory, "bands_memory")
    of_sampler = planning.most_bands(sampler)
    if of_sampler == 1:
        return 1, f"{type(sampler).__name__} keeps no two steps of an example apart"
    import jax

    num_params = sum(map(np.size, jax.tree.leaves(task.init(config.init_seed))))
    most = planning.most_bands(sampler, memory=memory, num_params=num_params)
    if most == 1:
        return 1, f"{config.bands_memory} hold no noise vector of the model"
    delta = config.delta(population)
    target = config.target_epsilon
    if config.noise_multiplier is not None:
        if sampler.separation < of_sampler:
            raise ValueError(
                "bands auto compares at one guarantee, and under this sampler that of a "
                "noise_multiplier depends on bands: give target_epsilon, target_advantage or bands"
            )
        target = sampler.privacy(config.noise_multiplier).epsilon(delta).upper
    sums = config.full_sums(sampler, delta) if config.calibration == "platt" else None
    candidates = planning.plan(
        sampler,
        planning.tried_bands(most),
        epsilon=target,
        delta=delta,
        advantage=config.target_advantage,
        momentum=config.momentum,
        release=None if sums is None else sums.release(sums.count).noise_multiplier,
        progress=lambda line: progress(f"comparing correlated noise: {line}"),
    )
    least = min(candidate.error for candidate in candidates)
    best = next(candidate for candidate in candidates if candidate.error <= NEAR * least)
    if best.bands == 1:
        return 1, "at this guarantee a larger b asks for more noise than correlation saves"
    return best.bands, f"it leaves {best.error:.2g} of the error of independent noise"
