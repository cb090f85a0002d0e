"""The processes of one run: how they meet, what one tells the others, and how they end together.

They are those of `jax.distributed`, and talk by its store of keys and values: a few short messages
a block of steps. Sums of gradients travel apart from these, by the collectives of a step, and
without noise: the network between the processes must be as private as the rows.
"""

from __future__ import annotations

import atexit
import contextlib
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
"""After which JAX takes a process for dead that does not answer, and ends the others."""

PATIENCE_SECONDS = 600.0
"""For which processes wait for each other where they have the same to do."""

_LEAVING_SECONDS = 3.0
"""For which process 0, at whose address all meet, stays for the others to read why it ends."""

_FAILED = "dpsgd/failed"
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


class Lost(ConnectionError):
    """Another process of the run ended, or does not answer: one line that says so."""


class Processes:
    """The processes of a run, as one of them sees them. All make the same calls in the same order.

    Where there is one alone, each call returns at once what it was given.

    Attributes:
      index: Which this is, from 0 on.
      count: How many there are.
    """

    def __init__(self, index: int = 0, count: int = 1, client: Any = None) -> None:
        """Holds a client of JAX's store; use `current`."""
        self.index = index
        self.count = count
        self._client = client
        self._numbers = itertools.count()
        self._sent: list[int] = []

    def __repr__(self) -> str:
        return f"Processes(index={self.index}, count={self.count})"

    @classmethod
    def current(cls) -> Processes:
        """Returns the processes that `jax.distributed` has brought together, or this one alone."""
        global _current
        # JAX exports no store of values; and where it was not imported there is none.
        distributed = sys.modules.get("jax._src.distributed")
        if _current.count == 1 and distributed is not None:
            state = distributed.global_state
            if state.client is not None and state.num_processes > 1:
                _current = cls(state.process_id, state.num_processes, state.client)
        return _current

    @property
    def first(self) -> bool:
        """Whether this is process 0, which alone writes what the run releases."""
        return self.index == 0

    def share(self, value: Any = None, *, patience: float = PATIENCE_SECONDS) -> Any:
        """Returns the JSON value that process 0 gives, or raises Lost after `patience` seconds."""
        if self.count == 1:
            return value
        number = next(self._numbers)
        if self.first:
            self._set(f"dpsgd/{number}/all", json.dumps(value))
            self._sent.append(number)
            return value
        return json.loads(self._get(f"dpsgd/{number}/all", patience))

    def gather(self, value: Any, *, patience: float = PATIENCE_SECONDS) -> list[Any]:
        """Returns the JSON values of all processes, in their order, or raises Lost as `share`."""
        if self.count == 1:
            return [value]
        number = next(self._numbers)
        if not self.first:
            self._set(f"dpsgd/{number}/{self.index}", json.dumps(value))
            return json.loads(self._get(f"dpsgd/{number}/all", patience))
        others = range(1, self.count)
        texts = [self._get(f"dpsgd/{number}/{other}", patience) for other in others]
        values = [value, *map(json.loads, texts)]
        for read in self._sent:  # who is here has read what was sent before
            self._client.key_value_delete(f"dpsgd/{read}/")
        self._set(f"dpsgd/{number}/all", json.dumps(values))
        self._sent = [number]
        return values

    def any(self, flag: bool) -> bool:
        """Returns whether the flag of any process is set: the same in all."""
        return any(self.gather(bool(flag)))

    def check_alike(self, parts: Mapping[str, Any]) -> None:
        """Raises ValueError in all processes, which names what and where, if parts differ.

        Parts, which may be secrets, are JSON values by what they are of. Nothing is sent but
        digests, keyed by a number that is drawn for this, so that they say nothing afterwards. It
        waits without end: rows are read before.
        """
        key = bytes.fromhex(self.share(secrets.token_hex(32), patience=math.inf))
        digests = {
            name: hashlib.blake2b(json.dumps(part, sort_keys=True).encode(), key=key).hexdigest()
            for name, part in parts.items()
        }
        values = self.gather(digests, patience=math.inf)
        for index, value in enumerate(values):
            if found := [
                name
                for name in sorted({*value, *values[0]})
                if value.get(name) != values[0].get(name)
            ]:
                raise ValueError(
                    f"process {index} has not what process 0 has: {', '.join(found)}; all must be "
                    "given the same command and the same data, on machines of one kind"
                )

    def fail(self, reason: str) -> None:
        """Tells the others that this process ends, and why; they end when they next wait for it."""
        if self.count == 1:
            return
        with contextlib.suppress(Exception):  # another one was first, or the store is gone
            self._client.key_value_set(_FAILED, f"process {self.index}: {reason}")
        if self.first:
            time.sleep(_LEAVING_SECONDS)

    def _set(self, key: str, value: str) -> None:
        try:
            self._client.key_value_set(key, value)
        except Exception as error:
            raise self._lost(error) from None

    def _get(self, key: str, patience: float) -> str:
        """Returns a value when it is there, or raises as soon as any process has failed."""
        ends = time.monotonic() + patience
        while True:
            try:
                return self._client.blocking_key_value_get(key, 1000)
            except Exception as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise self._lost(error) from None
            if failed := dict(self._client.key_value_dir_get("dpsgd/")).get(_FAILED):
                raise Lost(f"another process ended; {failed}")
            if time.monotonic() > ends:
                owner = key.rpartition("/")[2].replace("all", "0")
                who = f"process {owner} of {self.count}"
                raise Lost(f"another process did not answer for {patience:.0f} s: {who}")

    @staticmethod
    def _lost(error: BaseException) -> Lost:
        return Lost(f"another process ended: {str(error).partition(chr(10))[0]}")


_current = Processes()


def launched_by_cluster() -> bool:
    """Whether Slurm or Kubernetes, of an indexed job, started this process as one of several."""
    slurm = int(os.environ.get("SLURM_STEP_NUM_TASKS") or 1) > 1 and "SLURM_PROCID" in os.environ
    return slurm or {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= os.environ.keys()


@contextmanager
def together(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    watchdog_seconds: float,
    out: Path,
) -> Iterator[Processes]:
    """Has the context be carried out by all processes of a run, or, where there is one, by this.

    Each has a watchdog (`dpsgd.runs.stop`) from here on, and whatever ends one of them ends all
    within 30 seconds, in one line and with another exit status than 0. It must come before JAX is
    used, or a thread is begun.

    Args:
      coordinator: HOST:PORT of process 0, at which they meet; by default what the cluster says, if
        it started several.
      num_processes: How many there are, likewise.
      process_id: Which this is, from 0 on, likewise.
      watchdog_seconds: The most without a step.
      out: The run directory, for what is said.

    Raises:
      Lost: if another process ended.
    """
    if num_processes == 1 or (coordinator is None and not launched_by_cluster()):
        yield Processes()
        return
    this = "this process" if process_id is None else f"process {process_id} of {num_processes}"
    resumes = f"`dpsgd resume {out}` of all processes resumes where it was saved"

    def line(met: bool, why: str) -> str:
        if not met:
            place = coordinator or "the address that the cluster says"
            return (
                f"{this} did not meet the others at {place} ({why}): start all of them, each with "
                "its own --process INDEX/... and otherwise alike, and choose a port that is free"
            )
        aborted = why in ("SIGABRT", "SIGSEGV")
        because = "another one ended, or did not answer" if aborted else why
        return f"{this} was ended: {because}; {resumes}"

    watched(watchdog_seconds, line)
    try:
        processes = _connect(coordinator, num_processes, process_id)
    except RuntimeError as error:  # if it does not end the process
        raise Lost(line(False, str(error).partition("\n")[0])) from None
    report(MET)
    try:
        yield processes
    except Stopped:  # as all do
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
    """Brings the processes of a run together; before JAX has made anything of its devices.

    On CPUs sums go by Gloo, on GPUs by NCCL. Where this fails, JAX ends the process.
    """
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # On one machine nobody else is to find the port.
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
    """Leaves when all processes do: process 0, at whose address they meet, must not be early."""
    import jax

    jax.distributed.shutdown()
