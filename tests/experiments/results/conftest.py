"""Tests of reports train the tests' own task, found by its name."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "dpsgd" / "runs"))  # where `tiny_task` lies

from tiny_task import Line

import dpsgd
from dpsgd import RunSpec
from samplers.settings import SETTINGS


@pytest.fixture(scope="package")
def runs(tmp_path_factory):
    """Runs of a line: one with a tight guarantee, one with a loose one, and one without."""
    folder = tmp_path_factory.mktemp("pages")
    for name, sampler, settings, noise in (
        ("private", "poisson", {"overflow": "accumulate"}, {"noise_multiplier": 1.0}),
        ("shuffled", "shuffle", {}, {"noise_multiplier": 1.0}),
        ("plain", "deterministic", {}, {"non_private": True}),
    ):
        sampler = SETTINGS[sampler](batch_size=40, epochs=1, **settings)
        config = RunSpec.of(sampler, audit=False, **noise)
        dpsgd.run(Line(), config, folder / name, name="tiny_task:Line")
    return [folder / name for name in ("private", "shuffled", "plain")]
