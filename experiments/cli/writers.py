"""Writers of a run's training log to TensorBoard and W&B."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from dpsgd.runs.log import MetricWriter

Write = Callable[[int, Mapping[str, float]], Any]

LogTo = Literal["tensorboard", "wandb"] | None
KINDS = {"tensorboard": ("tensorboardX", "clu"), "wandb": ("wandb",)}
"""Modules that can write for each program; one is enough."""


def writer(kind: Literal["tensorboard", "wandb"], out: Path) -> MetricWriter:
    """Returns a writer of training logs to TensorBoard or W&B.

    Args:
      kind: Program that shows the log.
      out: Run directory; TensorBoard's files go to its folder `tensorboard`, which is opened at the
        first row of the log.

    Raises:
      ValueError: If no module for the program is installed.
    """
    module = next((name for name in KINDS[kind] if find_spec(name)), None)
    if module is None:
        raise ValueError(f"--log-to {kind} needs a module: pip install {KINDS[kind][0]}")
    opened = functools.cache(lambda: _OPEN[module](out))
    return SimpleNamespace(write_scalars=lambda step, scalars: opened()(step, scalars))


def _tensorboard_x(out: Path) -> Write:
    events: Any = importlib.import_module("tensorboardX").SummaryWriter(str(out / "tensorboard"))

    def write(step: int, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            events.add_scalar(name, value, step)
        events.flush()

    return write


def _clu(out: Path) -> Write:
    writers: Any = importlib.import_module("clu.metric_writers")
    return writers.SummaryWriter(str(out / "tensorboard")).write_scalars


def _wandb(out: Path) -> Write:
    wandb: Any = importlib.import_module("wandb")
    wandb.init(project="dpsgd", name=out.name)
    return lambda step, scalars: wandb.log(dict(scalars), step=step)


_OPEN = {"tensorboardX": _tensorboard_x, "clu": _clu, "wandb": _wandb}
