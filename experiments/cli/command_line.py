"""The command that carries out a configuration again."""

from __future__ import annotations

import dataclasses
import shlex
from typing import Any

from experiments.cli.config import TrainConfig

_POSITIONAL = ("data", "sampler")


def train_command(config: TrainConfig) -> str:
    """Returns `dpsgd train ...` as a shell takes it: what differs from the defaults, and no more.

    >>> from pathlib import Path
    >>> from experiments.cli.config import Poisson
    >>> config = TrainConfig(Path("my store"), Poisson(epochs=3), Path("run"), noise_multiplier=0.5)
    >>> train_command(config)
    "dpsgd train 'my store' sampler:poisson --epochs 3 --out run --noise-multiplier 0.5"
    """
    words = ["dpsgd", "train", str(config.data), f"sampler:{config.sampler.name}"]
    for part in (config.sampler, config):
        for field in dataclasses.fields(part):
            value = getattr(part, field.name)
            if field.name not in _POSITIONAL and value != field.default:
                words += _option(field.name.replace("_", "-"), value)
    return shlex.join(words)


def _option(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    if isinstance(value, tuple):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}", str(value)]
