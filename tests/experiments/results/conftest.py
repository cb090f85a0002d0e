"""Tests of reports train the tests' own task, found by its name."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "dpsgd" / "runs"))  # where `tiny_task` lies
