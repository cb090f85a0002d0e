"""What plants bugs is a module beside this: the tests find it on Python's path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
