"""The log of a run reaches TensorBoard and Weights & Biases where something writes for them."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_task import Line

import dpsgd
from dpsgd import RunSpec
from dpsgd.runs import log as writers
from samplers import Deterministic
from samplers.settings import SETTINGS


def fake(monkeypatch, said):
    """Puts modules in place of those that may be installed, which write into `said`."""

    def events(folder):
        return SimpleNamespace(
            add_scalar=lambda name, value, step: said.append((step, {name: value})),
            write_scalars=lambda step, scalars: said.append((step, dict(scalars))),
            flush=lambda: None,
        )

    names = {
        "tensorboardX": {"SummaryWriter": events},
        "clu": {},
        "clu.metric_writers": {"SummaryWriter": events},
        "wandb": {
            "init": lambda **how: None,
            "log": lambda scalars, step: said.append((step, scalars)),
        },
    }
    for name, content in names.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)


PROGRAMS = [("tensorboard", "tensorboardX"), ("tensorboard", "clu"), ("wandb", "wandb")]


@pytest.mark.parametrize(("kind", "module"), PROGRAMS)
def test_each_program_gets_the_last_row_of_a_run(tmp_path, monkeypatch, kind, module):
    said = []
    fake(monkeypatch, said)
    monkeypatch.setitem(writers.KINDS, kind, (module,))
    spec = RunSpec.of(
        SETTINGS["deterministic"](batch_size=40, epochs=1), audit=False, noise_multiplier=1.0
    )
    log = tmp_path / "run" / kind
    report = dpsgd.run(Line(), spec, tmp_path / "run", name="tiny_task:Line", log=log)
    assert {step for step, _ in said} == {report["num_steps"]}
    rows = {name: x for _, scalars in said for name, x in scalars.items()}
    assert rows.keys() == {"epsilon", "examples_per_second"}
    assert rows["epsilon"] == report["epsilon_upper"]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_training_without_a_directory_logs_to_a_program(tmp_path, monkeypatch):
    said = []
    fake(monkeypatch, said)
    algorithm = dpsgd.dpsgd(lambda w, x: ((w - x) ** 2).sum(), optax.sgd(0.1))
    mechanism = dpsgd.Mechanism(Deterministic(40, batch_size=10), 1.0, 1.0)
    rows = np.zeros((40, 2), np.float32)
    trained = dpsgd.train(algorithm, mechanism, jnp.zeros(2), rows, audit=False, log="wandb")
    [(step, scalars)] = said
    assert (step, scalars["epsilon"]) == (4, trained.guarantee.epsilon.upper)


def test_a_missing_log_writer_is_refused_with_its_package(tmp_path, monkeypatch):
    monkeypatch.setattr(writers, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="log to wandb needs: pip install wandb"):
        writers.writer_of(tmp_path / "wandb")
    assert not any(tmp_path.iterdir())


def test_a_log_in_no_folder_is_refused_before_training(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        writers.writer_of(tmp_path / "missing" / "log.csv")
