"""What tests of whole steps share is a module beside this: they find it on Python's path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
