"""Tests of the site share a browser."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
