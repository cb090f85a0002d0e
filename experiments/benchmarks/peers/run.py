"""Fits one program to the rows of a file, and prints what it gave as a line of JSON.

It runs in the interpreter of that program's library: `python run.py PROGRAM ROWS SETTINGS`.
"""

import contextlib
import importlib
import json
import resource
import sys
import time
import types
import warnings
from pathlib import Path

import numpy as np


def peak_bytes():
    """Returns the largest memory of this program: its usage counts what its parent had too."""
    with contextlib.suppress(OSError):
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.partition("VmHWM:")[2].split()[0])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    name, path, settings = sys.argv[1:]
    with np.load(path) as arrays:
        work = types.SimpleNamespace(**arrays, **json.loads(settings))
    program = importlib.import_module(name)
    begin = time.process_time()
    scores, told = program.fit(work)
    spent = time.process_time() - begin
    scores = np.ravel(scores).tolist()
    found = {"scores": scores, "cpu_seconds": spent, "peak_bytes": peak_bytes(), **told}
    print(json.dumps(found, default=float))
