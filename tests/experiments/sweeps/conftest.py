"""Tests of sweeps train the tests' own tasks, in this process where they look on."""

import sys
from pathlib import Path

import pytest

from experiments.sweeps import engine, workers

HERE = Path(__file__).parent
for place in (HERE, HERE.parents[1] / "dpsgd" / "runs"):  # of `stored_task` and `tiny_task`
    sys.path.insert(0, str(place))


@pytest.fixture
def in_this_process(monkeypatch):
    """Has a sweep's runs carried out one after another, where a test can see them."""

    def carry_out(record, todo, number, progress):
        assert number >= 1
        return ((one, workers._outcome(record, one, progress)) for one, _ in todo)

    monkeypatch.setattr(engine, "carry_out", carry_out)
    monkeypatch.setattr(engine, "most_useful", lambda: 1)
    monkeypatch.setattr(workers, "each", lambda function, jobs, number: map(function, jobs))
