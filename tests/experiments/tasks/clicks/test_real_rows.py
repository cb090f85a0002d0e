"""On real click data, the shipped defaults reach the AUC that the README promises."""

import pytest

from dpsgd import RunSpec, run
from experiments.tasks.clicks.criteo import display
from experiments.tasks.clicks.task import Clicks
from samplers.settings import SETTINGS


@pytest.fixture(scope="module")
def store(real_criteo_rows, tmp_path_factory):
    path = tmp_path_factory.mktemp("real") / "store"
    display.prepare(real_criteo_rows, path)
    return path


@pytest.mark.long
def test_without_privacy_the_model_ranks_real_clicks(store, tmp_path):
    config = RunSpec.of(SETTINGS["shuffle"](), non_private=True)
    record = run(Clicks(store), config, tmp_path / "run")
    assert record["metrics"]["test_auc"] >= 0.745


@pytest.mark.long
@pytest.mark.parametrize(("epsilon", "auc", "log_loss"), [(8.0, 0.742, 0.502), (1.0, 0.73, 0.509)])
def test_private_training_predicts_real_clicks_at_a_certified_epsilon(
    store, tmp_path, epsilon, auc, log_loss
):
    config = RunSpec.of(SETTINGS["balls-and-bins"](), target_epsilon=epsilon, audit=False)
    record = run(Clicks(store), config, tmp_path / "run")
    assert record["num_examples"] == 88_000
    assert record["delta"] == 3e-6
    assert record["epsilon_upper"] <= epsilon
    assert record["metrics"]["test_auc"] >= auc
    assert record["metrics"]["test_log_loss"] <= log_loss
