"""What tests of whole runs share."""

import pytest

from experiments.tasks.clicks.synthetic import rows as synthetic


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A store of 200 generated rows."""
    path = tmp_path_factory.mktemp("data") / "store"
    synthetic.write_store(path, 200, seed=0)
    return path
