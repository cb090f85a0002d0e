"""What tests of whole runs share: a task that trains in a second, and runs of it that were stopped.

They find their own task as a user's command finds one: by a name on Python's path.
"""

import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from tiny_task import config_of, line, run_and_stop, short_blocks

from dpsgd import resume


@pytest.fixture(autouse=True)
def short():
    with short_blocks():
        yield


@pytest.fixture(scope="session")
def stopped_once(tmp_path_factory):
    with short_blocks():
        return run_and_stop(line, config_of(), tmp_path_factory.mktemp("stopped") / "run")


@pytest.fixture
def stopped(stopped_once, tmp_path):
    """A run of its own that was stopped at step 16 of 30."""
    return shutil.copytree(stopped_once, tmp_path / "run")


@pytest.fixture(scope="session")
def finished(stopped_once, tmp_path_factory):
    out = shutil.copytree(stopped_once, tmp_path_factory.mktemp("finished") / "run")
    with short_blocks():
        resume(out)
    return out
