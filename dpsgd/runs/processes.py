"""Processes of one run: how they connect, exchange values and end together.

They are the processes of `jax.distributed`, and exchange a few short messages per block of steps
through its key-value store. Sums of gradients travel separately, through the collectives of a step,
and without noise: the network between the processes must be as private as the rows.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import itertools
import json
import math
import os
import secrets
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dpsgd.runs.stop import MET, Stopped, report, watched

HEARTBEAT_SECONDS = 15
"""Seconds without an answer after which JAX declares a process dead and ends the others."""

PATIENCE_SECONDS = 600.0
"""Default seconds that a process waits for a value from another one."""

_LEAVING_SECONDS = 3.0
"""Seconds that a failed process 0, which hosts the store, stays reachable for the others."""

_FAILED = "dpsgd/failed"
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


class Lost(ConnectionError):
    """Another process of the run ended or does not answer."""


class Processes:
    """Processes of a run, which all make the same calls in order.

    A single process gets its own values back at once.

    Attributes:
      index: Index of this process, from 0.
      count: Number of processes.
    """

    def __init__(self, index: int = 0, count: int = 1, client: Any = None) -> None:
        """Stores a client of JAX's key-value store; use `current`."""
        self.index = index
        self.count = count
        self._client = client
        self._numbers = itertools.count()

    def __repr__(self) -> str:
        return f"Processes(index={self.index}, count={self.count})"

    @classmethod
    def current(cls) -> Processes:
        """Returns the processes connected by `jax.distributed`, or this one alone."""
        global _current
        # JAX does not export its store, which exists only after JAX was imported.
        distributed = sys.modules.get("jax._src.distributed")
        state: Any = distributed and distributed.global_state
        several = state and state.client is not None and state.num_processes > 1
        client = state.client if several else None
        if client is not _current._client:  # they connected, or the run of others has ended
            _current = cls(state.process_id, state.num_processes, client) if several else cls()
        return _current

    @property
    def first(self) -> bool:
        """True for process 0, which alone writes the run's releases."""
        return self.index == 0

    def share(self, value: Any = None, *, patience: float = PATIENCE_SECONDS) -> Any:
        """Returns the value of process 0.

        >>> Processes().share([1, 2])
        [1, 2]

        Args:
          value: JSON value; only the value of process 0 is sent.
          patience: Seconds to wait for each process.

        Raises:
          Lost: if a process ended, or does not answer for `patience` seconds.
        """
        return self.gather(value if self.first else None, patience=patience)[0]

    def gather(self, value: Any, *, patience: float = PATIENCE_SECONDS) -> list[Any]:
        """Returns the values of all processes, by index.

        >>> Processes().gather("ready")
        ['ready']

        Args:
          value: JSON value of this process.
          patience: Seconds to wait for each process.

        Raises:
          Lost: if a process ended, or does not answer for `patience` seconds.
        """
        if self.count == 1:
            return [value]
        number = next(self._numbers)
        if not self.first:
            self._set(f"dpsgd/{number}/{self.index}", json.dumps(value))
            return json.loads(self._get(f"dpsgd/{number}/all", patience))
        followers = range(1, self.count)
        texts = [self._get(f"dpsgd/{number}/{follower}", patience) for follower in followers]
        values = [value, *map(json.loads, texts)]
        if number:  # a process that answers has read all earlier values
            self._client.key_value_delete(f"dpsgd/{number - 1}/")
        self._set(f"dpsgd/{number}/all", json.dumps(values))
        return values

    def any(self, flag: bool) -> bool:
        """Returns True in all processes if any flag is true."""
        return any(self.gather(bool(flag)))

    def check_alike(self, entries: Mapping[str, Any]) -> None:
        """Raises ValueError in all processes if their parts differ.

        The error names a process and its different parts. Only digests are sent, with a random key
        that is used once, so that they reveal nothing afterwards. Processes wait without a time
        limit, because each may read its rows first.

        Args:
          entries: JSON values by name; they may be secret.
        """
        key = bytes.fromhex(self.share(secrets.token_hex(32), patience=math.inf))
        digests = {
            name: hashlib.blake2b(json.dumps(entry, sort_keys=True).encode(), key=key).hexdigest()
            for name, entry in entries.items()
        }
        values = self.gather(digests, patience=math.inf)
        for index, value in enumerate(values):
            if differing := [
                name
                for name in sorted({*value, *values[0]})
                if value.get(name) != values[0].get(name)
            ]:
                raise ValueError(
                    f"process {index} and process 0 differ in {', '.join(differing)}: give all "
                    "processes the same command and data, on machines of one kind"
                )

    def fail(self, reason: str) -> None:
        """Tells the other processes that this one ends, and why.

        They end when they next wait for a value.
        """
        if self.count == 1:
            return
        with contextlib.suppress(Exception):  # another process failed first, or the store is gone
            self._client.key_value_set(_FAILED, f"process {self.index}: {reason}")
        if self.first:
            time.sleep(_LEAVING_SECONDS)

    def _set(self, key: str, value: str) -> None:
        try:
            self._client.key_value_set(key, value)
        except Exception as error:
            raise self._lost(error) from None

    def _get(self, key: str, patience: float) -> str:
        """Returns a value once it is stored; raises Lost once a process has failed."""
        deadline = time.monotonic() + patience
        while True:
            try:
                return self._client.blocking_key_value_get(key, 1000)
            except Exception as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise self._lost(error) from None
            if failed := dict(self._client.key_value_dir_get("dpsgd/")).get(_FAILED):
                raise Lost(f"another process ended; {failed}")
            if time.monotonic() > deadline:
                owner = key.rpartition("/")[2].replace("all", "0")
                who = f"process {owner} of {self.count}"
                raise Lost(f"another process did not answer for {patience:.0f} s: {who}")

    @staticmethod
    def _lost(error: BaseException) -> Lost:
        return Lost(f"another process ended: {str(error).partition(chr(10))[0]}")


_current = Processes()


def launched_by_cluster() -> bool:
    """Returns True if a cluster started several processes.

    It knows Slurm and the indexed jobs of Kubernetes.
    """
    slurm = int(os.environ.get("SLURM_STEP_NUM_TASKS") or 1) > 1 and "SLURM_PROCID" in os.environ
    return slurm or {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= os.environ.keys()


def _failure_line(this: str, place: str, resumes: str, met: bool, why: str) -> str:
    """Returns the line that says why a process ended."""
    if not met:
        return (
            f"{this} did not meet the others at {place} ({why}): start all processes with equal "
            "options but --process INDEX/..., and choose a free port"
        )
    aborted = why in ("SIGABRT", "SIGSEGV")
    because = "another process ended, or did not answer" if aborted else why
    return f"{this} was ended: {because}; {resumes}"


@contextmanager
def together(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    watchdog_seconds: float,
    out: Path,
) -> Iterator[Processes]:
    """Connects the processes of a run for the context.

    A run of one process runs here alone. Each of several processes gets a watchdog
    (`dpsgd.runs.stop`): if one fails, all end within 30 seconds, with one line and a nonzero exit
    status. Enter the context before using JAX or starting a thread.

    Args:
      coordinator: HOST:PORT of process 0, where the processes meet; by default from the cluster.
      num_processes: Number of processes; by default from the cluster.
      process_id: Index of this process, from 0; by default from the cluster.
      watchdog_seconds: Longest time between steps, in seconds.
      out: Run directory that messages name.

    Raises:
      Lost: if another process ended, or the processes did not meet.
    """
    if num_processes == 1 or (coordinator is None and not launched_by_cluster()):
        yield Processes()
        return
    this = "this process" if process_id is None else f"process {process_id} of {num_processes}"
    resumes = f"run `dpsgd resume {out}` in all processes to resume from the last checkpoint"
    place = coordinator or "the cluster's address"
    line = functools.partial(_failure_line, this, place, resumes)
    watched(watchdog_seconds, line)
    try:
        processes = _connect(coordinator, num_processes, process_id)
    except RuntimeError as error:  # unless JAX ends the process
        raise Lost(line(False, str(error).partition("\n")[0])) from None
    report(MET)
    try:
        yield processes
    except Stopped:  # all processes stop alike
        _disconnect()
        raise
    except BaseException as error:
        # JAX would wait for the others before it lets the interpreter end.
        atexit.register(_end)
        if type(error).__name__ == "JaxRuntimeError" and "RESOURCE_EXHAUSTED" not in str(error):
            error = Processes._lost(error)
        processes.fail(str(error).partition("\n")[0] or type(error).__name__)
        if isinstance(error, Lost):
            raise Lost(f"{error}; {resumes}") from None
        raise
    _disconnect()


def _end() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(2)


def _connect(
    coordinator: str | None, num_processes: int | None, process_id: int | None
) -> Processes:
    """Connects the processes of a run, before JAX initializes its devices.

    Collectives use Gloo on CPUs and NCCL on GPUs. If connecting fails, JAX ends the process.
    """
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # On one machine, other machines must not reach the port.
    loopback = coordinator is not None and coordinator.rpartition(":")[0] in _LOOPBACK
    jax.distributed.initialize(
        coordinator,
        num_processes,
        process_id,
        heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        shutdown_timeout_seconds=HEARTBEAT_SECONDS,
        coordinator_bind_address=coordinator if loopback else None,
    )
    return Processes.current()


def _disconnect() -> None:
    """Disconnects once all processes do, because process 0 hosts their store."""
    import jax

    jax.distributed.shutdown()
