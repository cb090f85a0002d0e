"""Writers of a training log: CSV, TensorBoard and W&B."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dpsgd.files import check_writable
from dpsgd.runs.log import CsvWriter, MetricWriter

Write = Callable[[int, Mapping[str, float]], Any]

KINDS = {"tensorboard": ("tensorboardX", "clu"), "wandb": ("wandb",)}
"""Modules that can write for each program; one is enough."""


def writer_of(log: MetricWriter | str | Path | None) -> MetricWriter | None:
    """Returns the writer of a log.

    Args:
      log: Path of a new CSV file; or "tensorboard", or a path that ends so, for a folder of events
        that opens at the first row; or "wandb", or NAME/wandb for a W&B run of that name; or a
        writer; or None.

    Raises:
      TypeError: If `log` is something else.
      ValueError: If the path has another ending, or no module for the program is installed.
      OSError: If the file exists, or cannot be written.
    """
    if log is None or isinstance(log, MetricWriter):
        return log
    if not isinstance(log, str | Path):
        raise TypeError(
            f"log must be a path or have write_scalars(step, scalars), got a {type(log).__name__}"
        )
    path = Path(log)
    if path.name in KINDS:
        module = next((name for name in KINDS[path.name] if find_spec(name)), None)
        if module is None:
            raise ValueError(f"log to {path.name} needs: pip install {KINDS[path.name][0]}")
        opened = functools.cache(lambda: _OPEN[module](path))
        return SimpleNamespace(write_scalars=lambda step, scalars: opened()(step, scalars))
    if path.suffix != ".csv":
        raise ValueError(
            f"log={str(log)!r} must end in .csv, tensorboard or wandb; pass a writer for another "
            "format"
        )
    if path.exists():
        raise FileExistsError(f"log={str(log)!r} exists; name another file")
    check_writable(path)
    return CsvWriter(path, 0)


def _tensorboard_x(path: Path) -> Write:
    events: Any = importlib.import_module("tensorboardX").SummaryWriter(str(path))

    def write(step: int, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            events.add_scalar(name, value, step)
        events.flush()

    return write


def _clu(path: Path) -> Write:
    writers: Any = importlib.import_module("clu.metric_writers")
    return writers.SummaryWriter(str(path)).write_scalars


def _wandb(path: Path) -> Write:
    wandb: Any = importlib.import_module("wandb")
    wandb.init(project="dpsgd", name=path.parent.name or None)
    return lambda step, scalars: wandb.log(dict(scalars), step=step)


_OPEN = {"tensorboardX": _tensorboard_x, "clu": _clu, "wandb": _wandb}
