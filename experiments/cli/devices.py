"""Where a run computes, as the command line says it: groups of options of several commands."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dpsgd.sizes import bytes_of

if TYPE_CHECKING:
    from dpsgd.engine import placement
    from dpsgd.runs import processes


def rows_from(size: str | None) -> int | None:
    """Returns the bytes that --shard-rows-from names, if it is given.

    Raises:
      ValueError: if it names none.
    """
    if size is None:
        return None
    if not (found := bytes_of(size, "--shard-rows-from")):
        raise ValueError(f"--shard-rows-from must be at least 1 byte, got {size}")
    return found


@dataclass(frozen=True, kw_only=True)
class Devices:
    """The devices of a run. Other ones change the bits of a model, and never its guarantee."""

    num_devices: int | None = None
    """Devices that train together, each with a part of every batch. Default: all."""

    shard_rows_from: str | None = None
    """Shard parameters of at least this size, such as 512MB, over the devices by rows, with
    their optimizer state. Default: only if the state needs more than half of a device; then from
    64MiB."""

    def __post_init__(self) -> None:
        if self.num_devices is not None and self.num_devices < 1:
            raise ValueError(f"--num-devices must be at least 1, got {self.num_devices}")
        rows_from(self.shard_rows_from)

    def placement(self) -> placement.Placement | None:
        """Returns the devices of a run; None for one.

        Raises:
          ValueError: if there are not so many.
        """
        import jax

        from dpsgd.engine.placement import Placement

        devices = Placement.default().devices
        count = self.num_devices or len(devices)
        if count < len(devices) and jax.process_count() > 1:
            raise ValueError("--num-devices is for one process: of several, each takes all it has")
        if count > len(devices):
            raise ValueError(
                f"--num-devices is {count}, and this machine has {len(devices)} of the kind "
                f"{jax.default_backend()}"
            )
        return None if count == 1 else Placement(devices[:count], rows_from(self.shard_rows_from))


@dataclass(frozen=True, kw_only=True)
class Processes:
    """The processes of a run, on one host or several."""

    coordinator: str | None = None
    """HOST:PORT of process 0, where the processes of a run meet. Default: from Slurm or Kubernetes
    if they started several processes, else a single process."""
    num_processes: int | None = None
    """Processes that train together, with --coordinator; each is started with the same command."""
    process_id: int | None = None
    """Number of this process, from 0, with --coordinator."""
    watchdog_seconds: float = 600.0
    """Seconds without a step after which a run of several processes stops, because one of them
    hangs."""

    def __post_init__(self) -> None:
        together = self.coordinator, self.num_processes, self.process_id
        if None in together and any(value is not None for value in together):
            raise ValueError("--coordinator, --num-processes and --process-id are given together")
        if self.coordinator is not None:
            assert self.num_processes is not None  # given together
            assert self.process_id is not None
            host, _, port = self.coordinator.rpartition(":")
            if not host or not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 2**16:
                raise ValueError(f"--coordinator must be HOST:PORT, got {self.coordinator}")
            if self.num_processes < 1:
                raise ValueError(f"--num-processes must be at least 1, got {self.num_processes}")
            if not 0 <= self.process_id < self.num_processes:
                raise ValueError(
                    f"--process-id must lie in [0, {self.num_processes}), got {self.process_id}"
                )
        if not 0 < self.watchdog_seconds < float("inf"):
            raise ValueError(
                f"--watchdog-seconds must be finite and > 0, got {self.watchdog_seconds}"
            )

    def together(self, out: Path) -> AbstractContextManager[processes.Processes]:
        """Returns the context that all processes of the run in `out` carry out."""
        from dpsgd.runs.processes import together

        given = self.coordinator, self.num_processes, self.process_id
        return together(*given, watchdog_seconds=self.watchdog_seconds, out=out)
