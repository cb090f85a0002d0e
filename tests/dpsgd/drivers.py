"""Drivers are what a test runs in a process of its own: a script, or tests that begin JAX anew."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def ended(*words, **variables):
    """What a process of Python printed, which ended as it should."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, **variables},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-9_000:] + done.stderr[-9_000:]
    return done.stdout


def passed(driver, *options, **variables):
    """Runs the tests of a driver, which end at the first that fails."""
    with tempfile.TemporaryDirectory() as folder:
        usual = ["--override-ini=addopts=--import-mode=importlib", "--timeout=1800", "-qx"]
        usual += ["-p", "no:cacheprovider", f"--basetemp={folder}/tests"]
        ended("-m", "pytest", *usual, *options, driver, **variables)
