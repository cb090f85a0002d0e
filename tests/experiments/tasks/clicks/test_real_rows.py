"""On real click data, the shipped defaults reach the AUC that the README promises."""

import pytest

from experiments.cli import config
from experiments.tasks.clicks.criteo import display
from experiments.train import train


@pytest.fixture(scope="module")
def store(real_criteo_rows, tmp_path_factory):
    path = tmp_path_factory.mktemp("real") / "store"
    display.prepare(real_criteo_rows, path)
    return path


def test_without_privacy_the_model_ranks_real_clicks(store, tmp_path):
    record = train(
        config.TrainConfig(
            data=store,
            sampler=config.Shuffle(epochs=1),
            out=tmp_path / "run",
            non_private=True,
            learning_rate=1e-2,
        )
    )
    assert record["test_auc"] >= 0.745


@pytest.mark.parametrize(
    ("epsilon", "settings", "auc"),
    [
        pytest.param(8.0, {}, 0.73, marks=pytest.mark.long),
        (1.0, {"learning_rate": 5e-3}, 0.705),
    ],
)
def test_private_training_ranks_real_clicks_at_a_certified_epsilon(
    store, tmp_path, epsilon, settings, auc
):
    record = train(
        config.TrainConfig(
            data=store,
            sampler=config.BallsAndBins(),
            out=tmp_path / "run",
            target_epsilon=epsilon,
            audit=False,
            **settings,
        )
    )
    assert record["num_examples"] == 88_000
    assert record["delta"] == 1 / 88_000
    assert record["epsilon_upper"] <= epsilon
    assert record["test_auc"] >= auc
