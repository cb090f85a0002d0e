"""Runs of SGD and of correlated noise: recorded, resumed, calibrated and audited."""

import json
import shutil

import jax
import numpy as np
import pytest
from tiny_task import (
    config_of,
    line,
    run_and_stop,
    short_blocks,
)

from accounting import epsilon
from dpsgd import resume, run
from dpsgd.noise import planning
from dpsgd.runs import checkpoint, plan
from dpsgd.runs.history import LedgerError
from dpsgd.runs.ledger import read
from dpsgd.runs.optimizer import SGD, hyperparameters
from samplers import BallsAndBins
from samplers.settings import SETTINGS

SIZES = {"batch_size": 16, "epochs": 3}


def sgd(**settings):
    return config_of(**{"optimizer": "sgd", "momentum": 0.9, "learning_rate": 0.01, **settings})


# --- SGD ---------------------------------------------------------------------------------------


def test_the_noise_of_a_plan_is_of_the_steps_that_sgd_takes():
    """Its workload moves by what the optimizer moves by."""
    sampler = BallsAndBins(160, 16, 2)
    sizes = planning.workload(sampler, momentum=0.9).step_sizes
    state = SGD.init(np.zeros(1, np.float32))
    state = state._replace(hyperparams=hyperparameters(1.0, sampler.num_steps, 0.0))
    found = []
    for _ in range(sampler.num_steps):
        moved, state = SGD.update(np.ones(1, np.float32), state)
        found.append(-float(moved[0]))
    np.testing.assert_allclose(found, sizes, atol=1e-6)


ORDER = SETTINGS["deterministic"]
WANTED = {"noise_multiplier": None, "target_epsilon": 8.0}


@pytest.fixture(scope="module")
def auto(tmp_path_factory):
    """A run that chose its bands, undisturbed and stopped, and the lines that it said."""
    folder, lines = tmp_path_factory.mktemp("auto"), []
    order = ORDER(**SIZES)  # whose noise is found fastest
    config = sgd(**WANTED, sampler=order, bands="auto", insecure_seed=3)
    with short_blocks():
        run(line, config, folder / "whole", progress=lines.append)
        run_and_stop(line, config, folder / "cut")
    return folder, lines


def test_what_is_chosen_is_recorded_as_numbers_and_shown(auto):
    folder, lines = auto
    record = json.loads((folder / "whole" / "config.json").read_text())
    (attempt,) = read(folder / "whole" / "ledger.jsonl").attempts
    mechanism = attempt.terms.mechanism
    chosen = record["chosen"]["noise"]
    assert chosen["bands"] == record["bands"] == mechanism.noise.bands == 10
    assert record["coefficients"] == list(mechanism.noise.coefficients)
    assert chosen["noise_multiplier"] == mechanism.noise_multiplier
    assert 7.9 < epsilon(mechanism.privacy(), 1e-5).upper <= 8.0
    shown = f"hosen: noise of 10 bands, sigma {mechanism.noise_multiplier:.4g}, as it leaves 0."
    assert any(one.startswith(f"c{shown}") for one in lines)
    report = (folder / "whole" / "report.md").read_text()
    assert f"C{shown}" in report
    assert "| noise | BandedToeplitz noise of 10 bands |" in report


def params_of(out):
    return np.load(out / "params.npz")["['w']"]


def nothing(state):
    return state


def lost(state):
    return state._replace(noise=jax.tree.map(np.zeros_like, state.noise))


def shifted(state):
    """By a step, as each row is that of another."""
    return state._replace(noise=jax.tree.map(lambda rows: np.roll(rows, 1, axis=0), state.noise))


@pytest.mark.parametrize("bug", [nothing, lost, shifted])
def test_a_resumed_run_decides_nothing_and_a_history_that_is_lost_or_shifted_shows(
    auto, tmp_path, monkeypatch, bug
):
    def decides(*of, **how):
        raise AssertionError("a resumed run decides nothing")

    for module, name in ((planning, "plan"), (planning, "best_noise"), (plan, "resolve")):
        monkeypatch.setattr(module, name, decides)
    restore = checkpoint._restore
    monkeypatch.setattr(checkpoint, "_restore", lambda *of: bug(restore(*of)))
    folder, _ = auto
    out = shutil.copytree(folder / "cut", tmp_path / "run")
    if bug is not nothing:
        with pytest.raises(ValueError, match="does not hold the noise of its steps"):
            resume(out)
        return
    resume(out)
    assert len(read(out / "ledger.jsonl").attempts) == 1
    assert np.array_equal(params_of(out), params_of(folder / "whole"))


# --- Buffers in a fixed order ------------------------------------------------------------------


def test_a_run_with_buffers_records_their_numbers_and_goes_on_bit_for_bit(tmp_path, monkeypatch):
    config = sgd(**WANTED, sampler=ORDER(**SIZES), buffers=2, insecure_seed=3)
    lines: list[str] = []
    with short_blocks():
        run(line, config, tmp_path / "whole", progress=lines.append)
        run_and_stop(line, config, tmp_path / "cut")
        shutil.copytree(tmp_path / "cut", tmp_path / "lost")
        resume(tmp_path / "cut")
    assert np.array_equal(params_of(tmp_path / "cut"), params_of(tmp_path / "whole"))
    restore = checkpoint._restore
    monkeypatch.setattr(checkpoint, "_restore", lambda *of: lost(restore(*of)))
    with pytest.raises(ValueError, match="does not hold the noise of its steps"):
        resume(tmp_path / "lost")
    record = json.loads((tmp_path / "cut" / "config.json").read_text())
    (attempt,) = read(tmp_path / "cut" / "ledger.jsonl").attempts
    mechanism = attempt.terms.mechanism
    noise = mechanism.noise
    assert (record["weights"], record["decays"]) == (list(noise.weights), list(noise.decays))
    assert noise == planning.best_noise(mechanism.sampler, buffers=2, momentum=0.9)
    assert 7.9 < epsilon(mechanism.privacy(), 1e-5).upper <= 8.0
    shown = f"chosen: noise of 2 buffers, sigma {mechanism.noise_multiplier:.4g}"
    assert any(one.startswith(shown) for one in lines)


def test_a_run_goes_on_with_its_own_noise_alone(auto, tmp_path):
    out = shutil.copytree(auto[0] / "cut", tmp_path / "run")
    record = json.loads((out / "config.json").read_text())
    other = {"bands": 2, "coefficients": [1.0, 0.5]}
    (out / "config.json").write_text(json.dumps({**record, **other}))
    before = (out / "ledger.jsonl").read_bytes()
    with pytest.raises(LedgerError, match="begun with banded toeplitz noise and resumes only so"):
        resume(out)
    assert (out / "ledger.jsonl").read_bytes() == before
