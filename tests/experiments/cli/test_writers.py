"""The log of a run reaches TensorBoard and Weights & Biases where something writes for them."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest

from experiments.cli import writers

ROW = (7, {"epsilon": 0.5, "examples_per_second": 10.0})


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


@pytest.mark.parametrize(
    ("kind", "module"),
    [("tensorboard", "tensorboardX"), ("tensorboard", "clu"), ("wandb", "wandb")],
)
def test_each_program_gets_every_number_of_a_row(tmp_path, monkeypatch, kind, module):
    said = []
    fake(monkeypatch, said)
    monkeypatch.setitem(writers.KINDS, kind, (module,))
    writers.writer(kind, tmp_path / "run").write_scalars(*ROW)
    assert {step for step, _ in said} == {ROW[0]}
    assert {name: x for _, scalars in said for name, x in scalars.items()} == ROW[1]
    assert not (tmp_path / "run").exists()


def test_a_missing_log_writer_is_refused_with_its_package(tmp_path, monkeypatch):
    monkeypatch.setattr(writers, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="--log-to wandb needs a module: pip install wandb"):
        writers.writer("wandb", tmp_path)
