"""On real rows, the shipped settings reach the AUC that pages promise."""

import pytest

from dpsgd import RunSpec, run
from experiments.tasks.clicks.formats import DISPLAY, table_format, table_schema
from experiments.tasks.clicks.task import Clicks
from samplers.settings import SETTINGS


@pytest.fixture(scope="module")
def store(real_criteo_rows, tmp_path_factory):
    path = tmp_path_factory.mktemp("real") / "store"
    DISPLAY.prepare(real_criteo_rows, path)
    return path


@pytest.mark.long
def test_without_privacy_the_model_ranks_real_clicks(store, tmp_path):
    config = RunSpec.of(SETTINGS["shuffle"](), non_private=True)
    record = run(Clicks(store), config, tmp_path / "run")
    assert record["metrics"]["test_auc"] >= 0.745


@pytest.mark.long
@pytest.mark.parametrize(("epsilon", "auc", "log_loss"), [(8.0, 0.742, 0.502), (1.0, 0.73, 0.509)])
def test_private_training_predicts_real_clicks(store, tmp_path, epsilon, auc, log_loss):
    config = RunSpec.of(SETTINGS["balls-and-bins"](), target_epsilon=epsilon, audit=False)
    record = run(Clicks(store), config, tmp_path / "run")
    assert record["num_examples"] == 88_000
    assert record["delta"] == 3e-6
    assert record["epsilon_upper"] <= epsilon
    assert record["metrics"]["test_auc"] >= auc
    assert record["metrics"]["test_log_loss"] <= log_loss


TABLES = {
    "adult": {
        "label": "income",
        "classes": ("<=50K", ">50K"),
        "categories": (
            *("workclass", "education", "marital-status", "occupation", "relationship"),
            *("race", "sex", "native-country"),
        ),
        "bounds": {
            **{"age": (16, 90), "fnlwgt": (1e4, 1e6), "education-num": (0, 16)},
            **{"capital-gain": (0, 1e5), "capital-loss": (0, 5e3), "hours-per-week": (0, 99)},
        },
    },
    "bank": {
        "label": "y",
        "classes": ("no", "yes"),
        "categories": (
            *("poutcome", "job", "marital", "education", "default", "housing", "loan"),
            *("contact", "month"),
        ),
        "bounds": {
            **{"day": (0, 31), "campaign": (0, 60), "duration": (0, 4000), "pdays": (0, 900)},
            **{"previous": (0, 60), "age": (17, 95), "balance": (-8e3, 1e5)},
        },
    },
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "epsilon", "auc"),
    [("adult", 3.0, 0.907), ("adult", 1.0, 0.904), ("bank", 3.0, 0.908), ("bank", 1.0, 0.904)],
)
def test_a_linear_model_learns_numbers_with_public_bounds(real, tmp_path, name, epsilon, auc):
    table = TABLES[name]
    schema = table_schema(numbers=tuple(table["bounds"]), **table)
    table_format(schema).prepare([real(f"{name}.csv.gz")], tmp_path / "store")
    config = RunSpec.of(SETTINGS["balls-and-bins"](), target_epsilon=epsilon, audit=False)
    record = run(Clicks(tmp_path / "store", model="linear"), config, tmp_path / "run")
    assert record["epsilon_upper"] <= epsilon
    assert record["metrics"]["test_auc"] >= auc
