"""How a command fails: what a user can mend in one line, what is our fault with its traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable


def in_one_line(program: str, run: Callable[[], int]) -> int:
    """Returns the exit status of `run`; bad input is one clear line on stderr and status 2.

    With DPSGD_TRACEBACK set in the environment the traceback is shown all the same.
    """
    try:
        return run()
    except (ValueError, OSError, MemoryError) as error:
        if os.environ.get("DPSGD_TRACEBACK"):
            raise
        print(f"{program}: {_printable(str(error) or 'out of memory')}", file=sys.stderr)
        return 2


def _printable(text: str) -> str:
    """Returns `text` with what would end or disturb the line (in a file's name, say) escaped."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
