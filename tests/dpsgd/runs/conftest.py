"""Tests of runs find their own task as a user's command finds one: by a name on Python's path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
