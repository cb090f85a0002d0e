"""Devices and processes of a run."""

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
    """Returns the placement of a run; None for one device.

    Raises:
      ValueError: If this machine has fewer devices than asked for.
    """
    available = Placement.default().devices
    count = devices.num_devices or len(available)
    if count < len(available) and jax.process_count() > 1:
        raise ValueError(
            f"--num-devices {count} works in a single process only; several processes use all "
            "devices: leave it out"
        )
    if count > len(available):
        raise ValueError(
            f"--num-devices {count} exceeds this machine's {len(available)} "
            f"{jax.default_backend()} device(s)"
        )
    return None if count == 1 else Placement(available[:count])


def together(devices: Devices, out: Path) -> AbstractContextManager[processes.Processes]:
    """Returns the context that joins a run's processes.

    Args:
      devices: Devices and processes.
      out: Run directory.
    """
    return processes.together(*devices.meeting, watchdog_seconds=WATCHDOG_SECONDS, out=out)
