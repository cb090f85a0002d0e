"""How a command fails: what a user can mend in one line, what is our fault with its traceback."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dpsgd.runs.stop import INTERRUPTED, STOPPED, Stopped, interrupts
from experiments.cli.extras import how_to_get


def in_one_line(program: str, run: Callable[[], int]) -> int:
    """Returns the exit status of `run`; bad input is one clear line on stderr and status 2.

    A run that was asked to stop is a line too, and `STOPPED`; Ctrl-C elsewhere is one, and
    `INTERRUPTED`. With DPSGD_TRACEBACK set in the environment the traceback is shown all the same.
    """
    with interrupts() as interrupted:
        try:
            return run()
        except SystemExit:
            raise
        except BaseException as error:
            status, line = _line_of(error, interrupted())
            if line is None or (os.environ.get("DPSGD_TRACEBACK") and status != STOPPED):
                raise
            print(f"{program}: {_printable(line)}", file=sys.stderr)
            return status


@contextmanager
def naming_options(*kinds: type) -> Iterator[None]:
    """Has what is wrong with the fields of dataclasses named by the options that set them."""
    try:
        yield
    except ValueError as error:
        fields = [field.name for kind in kinds for field in dataclasses.fields(kind)]
        first, anywhere = "|".join(fields), "|".join(name for name in fields if "_" in name)
        option = rf"^({first})\b|\b({anywhere})\b"
        line = re.sub(option, lambda m: "--" + m[0].replace("_", "-"), str(error))
        raise ValueError(line) from error


def _line_of(error: BaseException, interrupted: bool) -> tuple[int, str | None]:
    """Returns the exit status that an error ends in and its line; None if the fault is ours."""
    if isinstance(error, Stopped):
        return STOPPED, str(error)
    if interrupted or isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, "interrupted"
    return 2, mendable(error)


def mendable(error: BaseException) -> str | None:
    """Returns the line about an error that a user can mend, or None if the fault is ours."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    if isinstance(error, (ValueError, OSError, MemoryError)):
        return str(error) or "out of memory"
    if isinstance(error, ModuleNotFoundError):
        return how_to_get(error.name or "")
    exhausted, found, where = str(error).partition("RESOURCE_EXHAUSTED: ")
    if found and not exhausted:  # XLA's own error: a bare RuntimeError to Python
        return (
            f"out of memory: {where.splitlines()[0]} Make the model, the batch or "
            "--microbatch-size smaller"
        )
    return None


def _printable(text: str) -> str:
    """Returns `text` with what would end or disturb the line (in a file's name, say) escaped."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
