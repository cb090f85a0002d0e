"""The gate's cheap part: no public name is made private."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from gate import names


def test_no_public_name_turned_private():
    assert not names.turned_private()
