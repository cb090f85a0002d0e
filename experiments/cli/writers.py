"""Writers of a run's log for other programs, where these are installed: TensorBoard and W&B."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from dpsgd.runs.log import MetricWriter

Write = Callable[[int, Mapping[str, float]], Any]

LogTo = Literal["tensorboard", "wandb"] | None
KINDS = {"tensorboard": ("tensorboardX", "clu"), "wandb": ("wandb",)}
"""Modules that write for a program, of which one is enough."""


class _Late:
    """A writer that is opened at its first row: not before the run directory is there."""

    def __init__(self, opened: Callable[[], Write]) -> None:
        self._opened = opened
        self._write: Write | None = None

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Writes a row."""
        self._write = self._write or self._opened()
        self._write(step, scalars)


def writer(kind: Literal["tensorboard", "wandb"], out: Path) -> MetricWriter:
    """Returns what writes the log of the run in `out`, into its folder `tensorboard` or to W&B.

    Raises:
      ValueError: if no module is installed that does.
    """
    module = next((name for name in KINDS[kind] if find_spec(name)), None)
    if module is None:
        raise ValueError(f"--log-to {kind} needs a module: pip install {KINDS[kind][0]}")
    return _Late(lambda: _OPEN[module](out))


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
