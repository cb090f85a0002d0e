"""Whether the tables of a run are lazy, and how they are trained: decided before it begins.

All that it goes by is public: the sizes of the model and of a batch, and the law of the noise.
`config.json` records plain words and numbers, and no resumed run decides anything.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from dpsgd.engine.lazy.gaps import LARGEST
from dpsgd.runs import settings
from samplers import BatchSampler, Population

if TYPE_CHECKING:
    from dpsgd.engine.lazy.group import LazyTables
    from dpsgd.runs.config import RunConfig

PyTree = Any

_DENSE: dict[str, Any] = {
    "tables": "dense",
    "tables_learning_rate": None,
    "tables_momentum": None,
    "tables_weight_decay": 0.0,
    "flush_every": None,
}

_ROWS_AGAIN = 20 / 3
"""Rows of the tables, for each that a batch looks up, that a flush reads once in so many steps: to
read a row, differentiate, noise and write it takes a step at least three times what a flush takes
for it, which so is at most a twentieth of the steps."""


def check(config: RunConfig) -> None:
    """Raises ValueError, which names the setting, for lazy tables that no run can have."""
    if config.tables == "dense":
        for name, default in _DENSE.items():
            if getattr(config, name) != default:
                raise ValueError(
                    f"{name} is a setting of lazy tables: give tables lazy, or leave it out"
                )
        return
    rate, momentum, decay = (getattr(config, name) for name in list(_DENSE)[1:4])
    if rate is not None and not 0 < rate <= LARGEST:
        raise ValueError(f"tables_learning_rate must be > 0 and at most {LARGEST:g}, got {rate}")
    if momentum is not None and not 0 <= momentum < 1:
        raise ValueError(f"tables_momentum must be in [0, 1), got {momentum}")
    if not 0 <= decay < math.inf:
        raise ValueError(f"tables_weight_decay must be finite and >= 0, got {decay}")
    if rate is not None and decay * rate > 1:
        raise ValueError(
            "tables_weight_decay times tables_learning_rate must be at most 1, or rows grow that "
            f"nobody reads: got {decay} times {rate}"
        )
    if config.flush_every is not None and config.flush_every < 1:
        raise ValueError(f"flush_every must be at least 1, got {config.flush_every}")
    if config.tables == "lazy" and (why := _obstacle(config)):
        raise ValueError(f"tables lazy: {why}")


def _obstacle(config: RunConfig) -> str:
    """Returns what in a configuration keeps noise from coming late, or an empty text."""
    if config.bands not in (None, 1) or config.buffers is not None:
        name = "bands" if config.buffers is None else "buffers"
        return (
            "what comes late is the sum of independent noise of many steps, and correlated noise "
            f"has another law; leave out {name}"
        )
    if config.secure_noise:
        return "what comes late is no exact noise of single steps; leave out secure_noise"
    if getattr(config.sampler, "overflow", None) == "accumulate":
        return (
            "the rows of a step are read once, and overflow accumulate takes several passes; take "
            "overflow truncate"
        )
    return ""


def chosen(
    task: Any,
    config: RunConfig,
    rows: tuple[PyTree, Population],
    *,
    most_epochs: int | None = None,
) -> tuple[RunConfig, str]:
    """Returns a configuration that leaves nothing open, and why its tables are as auto has them.

    Args:
      task: What is trained, see `settings.choose`.
      config: As it was asked for.
      rows: Of the task, of which the shapes are read, and what is public of them.
      most_epochs: For which there is time.

    Raises:
      ValueError: if tables are to be lazy and cannot, and as for `settings.choose`.
    """

    def choose(config: RunConfig) -> RunConfig:
        return settings.choose(task, config, rows[1], most_epochs=most_epochs)

    if config.tables == "dense":
        return choose(config), ""
    why = _obstacle(config)
    if not why:
        lazy = choose(dataclasses.replace(config, tables="lazy"))
        try:
            count, looked_up = _sizes(task, lazy, rows)
        except ValueError as error:
            if config.tables == "lazy":
                raise ValueError(f"tables lazy: {error}") from None
            why = str(error)
        else:
            from dpsgd.engine.lazy.group import worthwhile

            why = f"they have {count / looked_up:.3g} times the rows that a batch looks up"
            if config.tables == "lazy" or worthwhile(count, looked_up):
                steps = lazy.flush_every or _flush_every(count, looked_up)
                lazy = dataclasses.replace(lazy, flush_every=steps)
                check(lazy)
                return lazy, why if config.tables == "auto" else ""
    return choose(dataclasses.replace(config, **_DENSE)), why


def _sizes(task: Any, config: RunConfig, rows: tuple[PyTree, Population]) -> tuple[int, int]:
    """Returns how many rows the tables have, and how many a batch looks up.

    Raises:
      ValueError: if there are no tables, or a step has several passes.
    """
    import jax

    from dpsgd.engine.lazy.group import found_tables
    from dpsgd.engine.programs import shapes_of_rows
    from dpsgd.gradients.losses import row_of

    data, population = rows
    sampler = _sampler(config, population)
    params = jax.eval_shape(lambda: task.init(config.init_seed))
    example = shapes_of_rows(data, *sampler.clipped_shape)
    found = found_tables(task.loss, params, example)
    leaves = jax.tree.leaves(params)
    read = jax.eval_shape(found.rows, row_of(task.loss, example))
    clipped = sampler.padded_batch_size // math.prod(sampler.clipped_shape)
    return (
        sum(leaves[k].shape[0] for k in found.tables),
        clipped * sum(one.size for one in read.values()),
    )


def _sampler(config: RunConfig, population: Population) -> BatchSampler:
    sampler = config.build_sampler(population)
    if sampler.accumulates:
        raise ValueError("the rows of a step are read once, and its batches take several passes")
    return sampler


def _flush_every(count: int, looked_up: int) -> int:
    """Returns the steps between flushes, such that these take at most a twentieth of the time.

    >>> _flush_every(5_000_000, 26 * 1024)
    1280
    """
    from dpsgd.engine.feed import BLOCK_STEPS  # a flush ends a block: it comes after whole ones

    return BLOCK_STEPS * math.ceil(_ROWS_AGAIN * count / looked_up / BLOCK_STEPS)


def as_decided(config: RunConfig, found: RunConfig) -> RunConfig:
    """Returns a configuration with what `chosen` has added to it in another, if it has."""
    if config.tables == "dense":
        return config
    if (config.tables, found.tables) == ("auto", "dense"):
        return dataclasses.replace(config, **_DENSE)
    names = ("tables_learning_rate", "tables_momentum", "flush_every")
    given = {name: getattr(config, name) for name in names}
    numbers = {k: getattr(found, k) if value is None else value for k, value in given.items()}
    return dataclasses.replace(config, **{**numbers, "tables": "lazy"})


def lazy_tables(config: RunConfig, num_steps: int) -> LazyTables | None:
    """Returns how the tables of a run are trained whose noise comes late; None where it does not.

    Args:
      config: With nothing left open.
      num_steps: Of the run.
    """
    if config.tables == "dense":
        return None
    from dpsgd.engine.lazy.group import LazyTables
    from dpsgd.runs.optimizer import Cosine

    rate, momentum = config.tables_learning_rate, config.tables_momentum
    assert rate is not None, "`chosen` leaves nothing open"
    assert momentum is not None, "`chosen` leaves nothing open"
    return LazyTables(Cosine(rate, num_steps), momentum, config.tables_weight_decay)
