"""Pools of worker processes that end with the process that started them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from typing import TypeVar

_Job = TypeVar("_Job")
_Result = TypeVar("_Result")

SPAWN = multiprocessing.get_context("spawn")
"""Spawned, since a fork of a process that runs JAX's threads can hang."""


def end_with_parent() -> None:
    """Ends this process once its parent is gone, at any time.

    A killed parent cannot end its workers, and a pool's workers hold both ends of the pipe that
    they wait on, so that no worker sees it close.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        """Waits for the parent's end, and ends this process."""
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def pool(workers: int | None = None) -> ProcessPoolExecutor:
    """Returns a pool of processes that end with this one.

    Args:
      workers: Number of processes; None for one per processor.
    """
    return ProcessPoolExecutor(workers, mp_context=SPAWN, initializer=end_with_parent)


@contextmanager
def deaf_to_interrupts() -> Iterator[None]:
    """Blocks Ctrl-C in all processes spawned inside.

    A terminal sends it to all processes at once; the parent alone decides what its workers do. A
    Ctrl-C that comes meanwhile reaches the parent at the end of the block.
    """
    resource_tracker.ensure_running()  # which unblocks the signal when it begins
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def each(
    function: Callable[[_Job], _Result], jobs: Sequence[_Job], workers: int | None = None
) -> Iterator[_Result]:
    """Yields function(job) for each job, in their order.

    Args:
      function: Function to compute; pickled, as jobs and results are.
      jobs: Arguments of the calls.
      workers: Number of processes; None for one per processor.

    Raises:
      ValueError: With the message of a ValueError of the function.
    """
    with pool(workers) as executor:
        try:
            with deaf_to_interrupts():
                futures = [executor.submit(_result, function, job) for job in jobs]
            for future in futures:
                yield future.result()
        except BaseException:
            for process in multiprocessing.active_children():
                process.terminate()  # their results are no longer needed
            raise


def _result(function: Callable[[_Job], _Result], job: _Job) -> _Result:
    try:
        return function(job)
    except ValueError as error:  # of a class that may need other arguments to be unpickled
        raise ValueError(str(error)) from error
