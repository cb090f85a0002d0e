"""What tests of selections share: runs that were really trained, once for each candidate."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "runs"))

from tiny_task import line
from toy_trials import RATES, grid

from dpsgd import run


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """The folder of a finished run of each candidate, by its learning rate."""
    folder = tmp_path_factory.mktemp("trained")
    for config in grid():
        run(line, config, folder / str(config.optimizer.learning_rate))
    return {rate: folder / str(rate) for rate in RATES}
