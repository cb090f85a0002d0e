"""Fits one program to the rows of a file, and prints what it gave as a line of JSON.

It runs in the interpreter of that program's library: `python run.py PROGRAM ROWS SETTINGS`.
"""

import importlib
import json
import resource
import sys
import time
import types
import warnings

import numpy as np

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    name, path, settings = sys.argv[1:]
    with np.load(path) as arrays:
        work = types.SimpleNamespace(**arrays, **json.loads(settings))
    program = importlib.import_module(name)
    begin = time.process_time()
    scores, told = program.fit(work)
    spent = time.process_time() - begin
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = {"scores": np.ravel(scores).tolist(), "cpu_seconds": spent, "peak_bytes": peak, **told}
    print(json.dumps(found, default=float))
