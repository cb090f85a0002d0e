"""Errors of commands: one line if the user can fix them, else a traceback."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from dpsgd.runs.stop import INTERRUPTED, STOPPED, Stopped, interrupts

EXTRAS = {
    "apache_beam": "beam",
    "array_record": "tfds",
    "dp_accounting": "peers",
    "importlib_resources": "tfds",
    "jinja2": "figures",
    "markdown_it": "cli",
    "matplotlib": "figures",
    "polars": "figures",
    "pyarrow": "data",
    "sklearn": "sklearn",
    "tensorflow_datasets": "tfds",
}
"""Extra that installs each optional module."""

UNREAD = 128 + signal.SIGPIPE
"""Exit status of a command whose output pipe was closed, as shells report it."""


def in_one_line(program: str, run: Callable[[], int]) -> int:
    """Runs a command and prints its error in one line.

    The status is 2 for bad input and for errors in modules of the current folder or PYTHONPATH,
    `STOPPED` for a run that was asked to stop, and `INTERRUPTED` for Ctrl-C elsewhere. If
    DPSGD_TRACEBACK is set in the environment, the error is raised with its traceback.

    Args:
      program: Name of the program, which begins the line.
      run: Function that carries out the command and returns its exit status.

    Returns:
      Exit status.
    """
    with interrupts() as interrupted:
        try:
            try:
                return run()
            finally:
                sys.stdout.flush()
        except SystemExit:
            raise
        except BrokenPipeError:  # the reader closed the pipe, as `head` does
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return UNREAD
        except BaseException as error:
            status, line = _line_of(error, interrupted())
            if line is None or (os.environ.get("DPSGD_TRACEBACK") and status != STOPPED):
                raise
            # Characters that would break the line (in a file's name, say) are escaped.
            line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
            print(f"{program}: {line}", file=sys.stderr)
            return status


def _line_of(error: BaseException, interrupted: bool) -> tuple[int, str | None]:
    """Returns the exit status and the message of an error; None in place of a bug's message."""
    if isinstance(error, Stopped):
        return STOPPED, str(error)
    if interrupted or isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, "interrupted"
    return 2, mendable(error) or _in_own_code(error)


def _in_own_code(error: BaseException) -> str | None:
    """Returns place and message of an error that a module of the user's led to, or None."""
    on_path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    folders = {Path(folder).resolve() for folder in (".", *on_path)}
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<") and Path(frame.filename).resolve().parent in folders
    ]
    if not frames:
        return None
    message = f"{type(error).__name__}: {error}".partition("\n")[0]
    innermost = frames[-1]
    file_name = Path(innermost.filename).name
    return f"{file_name}, line {innermost.lineno}, in {innermost.name}: {message}"


def mendable(error: BaseException) -> str | None:
    """Returns the message of a user's error; None for bugs.

    >>> mendable(ValueError("--epochs 0: must be at least 1")), mendable(TypeError("a bug"))
    ('--epochs 0: must be at least 1', None)
    """
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    if isinstance(error, (ValueError, OSError, MemoryError)):
        return str(error) or "out of memory"
    if isinstance(error, ModuleNotFoundError):
        return how_to_get(error.name or "")
    before_code, separator, details = str(error).partition("RESOURCE_EXHAUSTED: ")
    if separator and not before_code:  # XLA's own error: a bare RuntimeError to Python
        return (
            f"out of memory: {details.splitlines()[0]} Make the model, the batch or "
            "--microbatch-size smaller"
        )
    return None


def require(module: str) -> None:
    """Checks that a module is installed, before any work.

    Raises:
      ModuleNotFoundError: If the module is not installed.
    """
    if find_spec(module) is None:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)


def how_to_get(module: str) -> str | None:
    """Returns how to install a module; None without an extra.

    >>> how_to_get("matplotlib.figure")
    "matplotlib is not installed: pip install 'dpsgd[figures]'"
    """
    name = module.split(".")[0]
    if name not in EXTRAS:
        return None
    return f"{name} is not installed: pip install 'dpsgd[{EXTRAS[name]}]'"
