"""The gate's cheap parts, and in the long tier all of it but the planted faults."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from gate import intervals, names, readers, runs


def test_no_public_name_turned_private():
    assert not names.turned_private()


@pytest.mark.parametrize("every", [20, pytest.param(1, marks=pytest.mark.long)])
def test_certified_intervals_meet_the_frozen_ones(every):
    assert not intervals.check(every)


@pytest.mark.long
def test_readers_make_the_frozen_columns():
    assert not readers.check()


@pytest.mark.short("banded")
@pytest.mark.parametrize("name", runs.RUNS)
def test_runs_end_in_the_frozen_parameters(name):
    assert not runs.check([name])
