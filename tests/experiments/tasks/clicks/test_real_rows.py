"""On real click data, the shipped defaults reach the AUC that the README promises."""

import pytest

from dpsgd import RunConfig, run
from experiments.tasks.clicks.criteo import display
from experiments.tasks.clicks.task import Clicks
from samplers.settings import SETTINGS


@pytest.fixture(scope="module")
def store(real_criteo_rows, tmp_path_factory):
    path = tmp_path_factory.mktemp("real") / "store"
    display.prepare(real_criteo_rows, path)
    return path


def test_without_privacy_the_model_ranks_real_clicks(store, tmp_path):
    config = RunConfig(SETTINGS["shuffle"](epochs=1), non_private=True, learning_rate=1e-2)
    record = run(Clicks(store), config, tmp_path / "run")
    assert record["metrics"]["test_auc"] >= 0.745


@pytest.mark.long
@pytest.mark.parametrize(
    ("epsilon", "settings", "auc"), [(8.0, {}, 0.73), (1.0, {"learning_rate": 5e-3}, 0.705)]
)
def test_private_training_ranks_real_clicks_at_a_certified_epsilon(
    store, tmp_path, epsilon, settings, auc
):
    sampler = SETTINGS["balls-and-bins"]()
    config = RunConfig(sampler, target_epsilon=epsilon, audit=False, **settings)
    record = run(Clicks(store), config, tmp_path / "run")
    assert record["num_examples"] == 88_000
    assert record["delta"] == 1 / 88_000
    assert record["epsilon_upper"] <= epsilon
    assert record["metrics"]["test_auc"] >= auc
