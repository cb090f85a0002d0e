"""Work for all processors: processes of our own, which end with what asked for them."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import TypeVar

_Job = TypeVar("_Job")
_Result = TypeVar("_Result")

SPAWN = multiprocessing.get_context("spawn")
"""Spawned, since a fork of a process that runs JAX's threads can hang."""


@contextmanager
def deaf_to_interrupts() -> Iterator[None]:
    """Has processes that are spawned inside never hear Ctrl-C, not even while they import.

    A terminal sends it to all processes at once; what the others do is the parent's to decide. It
    hears one that comes meanwhile right afterwards.
    """
    resource_tracker.ensure_running()  # which unblocks the signal when it begins
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def each(
    function: Callable[[_Job], _Result], jobs: Sequence[_Job], workers: int | None = None
) -> Iterator[_Result]:
    """Yields function(job) for each job, in their order.

    Args:
      function: What is computed; pickled, as jobs and results are.
      jobs: Its arguments.
      workers: Number of processes; None for one a processor.
    """
    with ProcessPoolExecutor(workers, mp_context=SPAWN) as pool:
        try:
            with deaf_to_interrupts():
                futures = [pool.submit(function, job) for job in jobs]
            for future in futures:
                yield future.result()
        except BaseException:
            for process in multiprocessing.active_children():
                process.terminate()  # nobody waits for what they are at
            raise
