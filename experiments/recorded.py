"""A configuration as JSON values, for the record of its run, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpsgd.runs.records import build, checked, plain
from experiments.cli.config import SAMPLERS, TrainConfig
from experiments.tasks.clicks.store import Store


def describe(config: TrainConfig, store: Store) -> dict[str, Any]:
    """Returns the whole configuration of a run as JSON values, with what it needs of its data.

    The data's digest is not among them: it depends on every row, and no noise hides it.
    """
    return {
        **plain(config),
        "data": str(config.data.resolve()),
        "sampler": {"name": config.sampler.name, **plain(config.sampler)},
        "model_sizes": plain(config.model_config()),
        "schema": plain(store.schema),
        "hash_seed": store.hash_seed,
    }


def config_from(record: Mapping[str, Any], *, out: Path, data: Path | None) -> TrainConfig:
    """Returns the configuration that `describe` recorded.

    Args:
      record: What `config.json` holds.
      out: The run directory, wherever it lies now.
      data: The store, if not where it lay.

    Raises:
      ValueError: if it is not the record of a configuration.
    """
    where = f"{out / 'config.json'} is damaged, or of another version"
    fields = dict(checked(record.get("sampler"), Mapping[str, Any], f"{where}: sampler"))
    name = checked(fields.pop("name", None), str, f"{where}: sampler, name")
    if name not in SAMPLERS:
        raise ValueError(f"{where}: sampler, name is one of {', '.join(SAMPLERS)}")
    sampler: Any = build(SAMPLERS[name], fields, f"{where}: sampler")
    known = {field.name for field in dataclasses.fields(TrainConfig)}
    given = {name: value for name, value in record.items() if name in known}
    data = data or Path(checked(record.get("data"), str, f"{where}: data"))
    config = build(TrainConfig, {**given, "out": out, "data": data, "sampler": sampler}, where)
    try:
        config.check()
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return config
