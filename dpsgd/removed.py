"""Options, fields, values and commands of earlier versions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

REMOVED = frozenset(
    {
        "bands_memory",
        "bounds_epsilon",
        "budget_minutes",
        "buffers",
        "clip_count_share",
        "clip_quantile",
        "clip_rate",
        "clipping=quantile",
        "command=plan",
        "coordinator",
        "data_release",
        "decays",
        "earlier",
        "features=scattering",
        "figures=batch_sizes",
        "figures=epochs",
        "figures=keep",
        "figures=noise_multipliers",
        "figures=num_samples",
        "figures=points",
        "figures=seconds",
        "figures=steps",
        "init_map",
        "init_sha256",
        "noise=buffered toeplitz",
        "noise=secure",
        "num_processes",
        "outer_bounds",
        "private_bounds",
        "private_delta",
        "private_epsilon",
        "private_quantile",
        "private_values",
        "process_id",
        "program_cache",
        "quantile_epsilon",
        "sample_weight",
        "secure_noise",
        "shard_rows_from",
        "tables_weight_decay",
        "target_advantage",
        "task=text",
        "watchdog_seconds",
        "weight",
        "weight_bound",
        "weights",
    }
)
"""Names in Python's spelling (`secure_noise`), and values as `name=value` (`clipping=quantile`)."""

NOTICE = "removed in 0.3.0; see CHANGELOG.md"


def removal_notice(name: str, value: object = None) -> str | None:
    """Returns the notice about a removed option, field or value.

    Args:
      name: Name of an option or field, with or without leading dashes: `--secure-noise`; `command`
        for a command, `figures` for an option of `scripts/figures`.
      value: Value given to the option; name of the command, or of the option of `scripts/figures`.

    Returns:
      `NOTICE`, or None for a name and value that were not removed.

    >>> removal_notice("--batch-size") is None
    True
    """
    name = name.removeprefix("--").removeprefix("no-").replace("-", "_")
    return NOTICE if name in REMOVED or f"{name}={value}" in REMOVED else None


def without_removed(function: Callable[P, R]) -> Callable[P, R]:
    """Wraps a function to refuse removed arguments by their notice."""

    @functools.wraps(function)
    def checked(*args: P.args, **given: P.kwargs) -> R:
        for name, value in given.items():
            if notice := removal_notice(name, value):
                raise ValueError(f"{name}: {notice}")
        return function(*args, **given)

    return checked
