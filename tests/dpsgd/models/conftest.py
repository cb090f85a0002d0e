"""Models are of the tasks that tests of runs train, found as those find them: by name."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "runs"))
