"""Models of correlated noise are trained as their setting says, once, and compared seed by seed."""

import dataclasses
import math

import pytest

from dpsgd import BandedToeplitz, Independent
from experiments.benchmarks.sgd_models import Auc, Mean, Models, Setting, gain
from experiments.tasks.clicks.task import Clicks
from samplers import BallsAndBins, Deterministic

SETTING = Setting(8.0, 100, 2, 0.1)


@pytest.mark.long
def test_a_setting_is_a_mechanism_of_the_guarantee_that_it_names():
    banded = dataclasses.replace(SETTING, bands=5)
    known = dataclasses.replace(banded, order="deterministic")
    for setting, sampler in (
        (SETTING, BallsAndBins(1000, 100, 2)),
        (banded, BallsAndBins(1000, 100, 2, cycle_length=5)),
        (known, Deterministic(1000, 100, 2)),
    ):
        mechanism = setting.mechanism(1000)
        assert mechanism.sampler == sampler
        assert isinstance(mechanism.noise, Independent if setting is SETTING else BandedToeplitz)
        assert mechanism.noise.bands == setting.bands
        assert mechanism.privacy().epsilon(1e-3).upper <= 8.0


@pytest.mark.long
def test_a_model_is_trained_by_its_optimizer_and_what_it_gave_is_written_down(
    store, tmp_path, monkeypatch
):
    models = Models(Clicks(store), 1, tmp_path / "written")
    one = dataclasses.replace(SETTING, bands=2, epochs=1)
    settings = one, dataclasses.replace(one, bands=1, momentum=None)
    found = [models.trained(setting) for setting in settings]
    assert found[0] != found[1]
    monkeypatch.setattr(Models, "_params", None)
    assert [models.trained(setting) for setting in settings] == found
    assert len(list((tmp_path / "written").iterdir())) == 2


def test_a_gain_is_the_mean_of_the_differences_seed_by_seed(store, monkeypatch):
    given = {1: [0.7, 0.8, 0.9], 2: [0.72, 0.84, 0.93]}
    monkeypatch.setattr(
        Models, "trained", lambda self, setting: [Auc(0.0, x) for x in given[setting.bands]]
    )
    mean, error = gain(
        Models(Clicks(store), 3), dataclasses.replace(SETTING, bands=2), SETTING, "gain", 0.029
    )
    assert mean.value == pytest.approx(0.03)
    assert mean.holds is True
    assert error.value == pytest.approx(0.01 / math.sqrt(3))
    assert math.isnan(Mean.of([1.0]).error)
    assert len(list(Mean.of([1.0]).rows("one"))) == 1
