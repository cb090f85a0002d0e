"""Devices and processes of a run, as `experiments.cli.questions.directories.Devices` asks."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

import jax

from dpsgd.engine.placement import Placement
from dpsgd.runs import processes
from experiments.cli.questions.directories import Devices

WATCHDOG_SECONDS = 600.0
"""Seconds without a step after which a run of several processes stops."""


def placement_of(devices: Devices) -> Placement | None:
    """Returns the devices of a run; None for one.

    Raises:
      ValueError: If this machine has fewer.
    """
    available = Placement.default().devices
    count = devices.num_devices or len(available)
    if count < len(available) and jax.process_count() > 1:
        raise ValueError("--num-devices is for one process; several of them use all devices")
    if count > len(available):
        raise ValueError(
            f"--num-devices is {count}, and this machine has {len(available)} of the kind "
            f"{jax.default_backend()}"
        )
    return None if count == 1 else Placement(available[:count])


def together(devices: Devices, out: Path) -> AbstractContextManager[processes.Processes]:
    """Returns the context in which all processes of a run work.

    Args:
      devices: Devices and processes.
      out: Run directory.
    """
    return processes.together(*devices.meeting, watchdog_seconds=WATCHDOG_SECONDS, out=out)
