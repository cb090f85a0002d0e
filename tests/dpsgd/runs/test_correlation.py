"""Runs of SGD and of correlated noise: what is set, refused, chosen and recorded."""

import dataclasses
import json
import re
import shutil

import jax
import numpy as np
import optax
import pytest
from tiny_task import (
    calibrated,
    config_of,
    few_rows_are_calibrated,
    line,
    run_and_stop,
    short_blocks,
)

from accounting import attack_advantage, epsilon
from dpsgd import BandedToeplitz, Independent, RunConfig, resume, run
from dpsgd.noise import planning, strategies
from dpsgd.runs import checkpoint, correlation
from dpsgd.runs.correlation import ADAM, decided
from dpsgd.runs.history import LedgerError
from dpsgd.runs.ledger import read
from dpsgd.runs.optimizer import SGD, hyperparameters
from dpsgd.runs.settings import any_noise
from samplers import BallsAndBins, Population
from samplers.settings import SETTINGS

ROWS = Population(160)
SIZES = {"batch_size": 16, "epochs": 3}


def sgd(**settings):
    return config_of(**{"optimizer": "sgd", "momentum": 0.9, "learning_rate": 0.01, **settings})


def of(config):
    """The record of what is decided, and the configuration."""
    return decided(line, config, ROWS)


# --- SGD ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_is_that_of_optax_with_a_cosine_and_momentum_is_state(momentum):
    steps, gradients = 7, np.random.default_rng(0).normal(size=(7, 3)).astype(np.float32)
    expected = optax.sgd(optax.cosine_decay_schedule(0.5, steps), momentum)
    params = np.zeros(3, np.float32)
    ours, theirs = SGD.init(params), expected.init(params)
    ours = ours._replace(hyperparams=hyperparameters(0.5, steps, momentum))
    for gradient in gradients:
        moved, ours = SGD.update(gradient, ours, params)
        wanted, theirs = expected.update(gradient, theirs, params)
        np.testing.assert_allclose(moved, wanted, rtol=1e-5, atol=1e-7)


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


# --- What is set, and what is refused ----------------------------------------------------------


@pytest.mark.parametrize("name", ["balls-and-bins", "poisson"])
def test_the_cycle_of_a_sampler_becomes_the_bands_where_it_has_none(name):
    config, record = of(sgd(sampler=SETTINGS[name](**SIZES), bands=4))
    assert (config.sampler.cycle_length, config.bands, record["bands"]) == (4, 4, 4)
    assert len(config.coefficients) == 4
    mechanism = config.mechanism(ROWS)
    assert mechanism.noise == BandedToeplitz(config.coefficients)
    assert mechanism.noise == planning.best_noise(mechanism.sampler, 4, momentum=0.9)
    longer, _ = of(sgd(sampler=SETTINGS[name](**SIZES, cycle_length=5), bands=4))
    assert longer.build_sampler(ROWS).cycle_length == 5


@pytest.mark.parametrize("sampler", [SETTINGS["deterministic"], SETTINGS["shuffle"]])
def test_an_order_that_is_fixed_needs_no_cycle(sampler):
    order = {"order": "fixed"} if sampler.name == "shuffle" else {}
    config, _ = of(sgd(sampler=sampler(**SIZES, **order), bands=10))
    assert config.sampler == sampler(**SIZES, **order)
    assert config.mechanism(ROWS).noise.bands == 10


def test_a_sampler_that_was_made_before_takes_the_cycle_too():
    config, _ = of(sgd(sampler=BallsAndBins(160, 16, 2), bands=5))
    assert config.sampler == BallsAndBins(160, 16, 2, cycle_length=5)


BINS, ORDER = SETTINGS["balls-and-bins"], SETTINGS["deterministic"]
REFUSED = {
    "no order": ({"sampler": SETTINGS["shuffle"](**SIZES)}, "bands 4: Shuffle keeps no two steps"),
    "cycle": ({"sampler": BINS(**SIZES, cycle_length=2)}, "bands must be at most 2 here, got 4"),
    "epoch": ({"sampler": ORDER(**SIZES), "bands": 11}, "bands must be at most 10 here, got 11"),
    "long cycle": ({"bands": 11}, "bands 11: cycle_length must be at most the 10 steps"),
    "none": ({"bands": 0}, 'bands must be an integer >= 1 or "auto", got 0'),
    "no noise": ({"noise_multiplier": None, "non_private": True}, "bands correlate noise, and"),
    "exact": ({"secure_noise": True}, "secure_noise is exact where it is independent"),
    "few": ({"coefficients": (1.0, 0.5)}, "coefficients must be as many as bands, 4, got 2"),
    "wild": ({"bands": 2, "coefficients": (1.0, 2.0)}, "noise of the coefficients"),
    "alone": ({"bands": None, "coefficients": (1.0,)}, "coefficients are those of correlated"),
    "size": ({"bands_memory": "much"}, "bands_memory must be a size such as 8GB"),
    "beta": ({"momentum": 1.0}, "momentum must be in [0, 1), got 1.0"),
    "adam": ({"optimizer": "adam"}, "momentum is a setting of SGD"),
    "given": ({"sampler": BINS(**SIZES, cycle_length=2), "bands": "auto"}, "cycle_length is as"),
    "noise": ({"bands": "auto"}, "bands auto compares at one guarantee"),
}


@pytest.mark.parametrize(("settings", "why"), REFUSED.values(), ids=REFUSED)
def test_bands_that_a_run_cannot_have_are_refused_in_one_line(settings, why, tmp_path):
    with pytest.raises(ValueError, match=re.escape(why)) as refused:
        run(line, sgd(**{"bands": 4, **settings}), tmp_path / "run")
    assert "\n" not in str(refused.value)
    assert not list(tmp_path.iterdir())


def test_time_for_a_run_chooses_no_bands(tmp_path):
    config = sgd(sampler=BINS(), noise_multiplier=None, target_epsilon=3.0, bands="auto")
    with pytest.raises(ValueError, match="bands auto goes by the number of steps"):
        run(line, config, tmp_path / "run", budget_minutes=1.0)
    timed = any_noise(sgd(bands=4)).mechanism(ROWS)
    assert timed.noise.bands == timed.sampler.cycle_length == 4


# --- What is chosen ----------------------------------------------------------------------------


def test_adam_is_answered_by_one_band_and_told_why(tmp_path):
    lines = []
    wanted = {"noise_multiplier": None, "target_epsilon": 3.0}
    config, record = of(config_of(bands="auto", **wanted))
    assert (config.bands, config.coefficients) == (1, None)
    assert record == {"bands": 1, "why": ADAM}
    assert config.mechanism(ROWS).noise == Independent()
    given, _ = decided(line, config_of(bands=2), ROWS, lines.append)
    assert given.mechanism(ROWS).noise.bands == 2
    assert f"note: {ADAM}" in lines


WANTED = {"noise_multiplier": None, "target_epsilon": 8.0}


@pytest.mark.short("settings[2-7]*")
@pytest.mark.parametrize(
    ("settings", "bands", "why"),
    [
        pytest.param({}, 10, "it leaves 0.", marks=pytest.mark.long),
        ({"target_epsilon": 3.0}, 2, "it leaves 0."),
        ({"sampler": ORDER(**SIZES), "bands_memory": "20B"}, 2, "it leaves 0."),
        ({"bands_memory": "8B"}, 1, "8B hold no noise vector"),
        ({"sampler": SETTINGS["shuffle"](**SIZES)}, 1, "Shuffle keeps no two steps"),
        ({"sampler": BINS(batch_size=80, epochs=1), "target_epsilon": 0.2}, 1, "a larger b asks"),
        ({"sampler": ORDER(**SIZES)}, 10, "it leaves 0."),
        ({"sampler": ORDER(**SIZES), "target_epsilon": None, "noise_multiplier": 2.0}, 10, "it"),
    ],
)
def test_auto_is_what_leaves_least_error_at_the_guarantee_and_fits(settings, bands, why):
    config, record = of(sgd(**{**WANTED, "bands": "auto", **settings}))
    assert (config.bands, record["bands"]) == (bands, bands)
    assert why in record["why"]


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
    (generation,) = read(folder / "whole" / "ledger.jsonl").generations
    mechanism = generation.terms.mechanism
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

    for module, name in ((planning, "plan"), (strategies, "optimized"), (correlation, "decided")):
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
    assert len(read(out / "ledger.jsonl").generations) == 1
    assert np.array_equal(params_of(out), params_of(folder / "whole"))


def test_a_record_without_its_coefficients_is_refused(auto):
    record = json.loads((auto[0] / "whole" / "config.json").read_text())
    RunConfig.from_record(record, "here")
    with pytest.raises(ValueError, match=r"^here: coefficients are missing, and bands are 10$"):
        RunConfig.from_record({**record, "coefficients": None}, "here")


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
    (generation,) = read(tmp_path / "cut" / "ledger.jsonl").generations
    mechanism = generation.terms.mechanism
    noise = mechanism.noise
    assert (record["weights"], record["decays"]) == (list(noise.weights), list(noise.decays))
    assert noise == planning.best_noise(mechanism.sampler, buffers=2, momentum=0.9)
    assert 7.9 < epsilon(mechanism.privacy(), 1e-5).upper <= 8.0
    shown = f"chosen: noise of 2 buffers, sigma {mechanism.noise_multiplier:.4g}"
    assert any(one.startswith(shown) for one in lines)
    with pytest.raises(ValueError, match=r"^here: weights are missing, and buffers are 2$"):
        RunConfig.from_record({**record, "weights": None, "decays": None}, "here")


NOT_BUFFERED = {
    "draws": ({"sampler": BINS(**SIZES)}, "BallsAndBins draws; deterministic and shuffle"),
    "bands": ({"bands": 4}, "buffers correlate noise in place of bands: leave one of them out"),
    "none": ({"buffers": 0}, "buffers must be at least 1, got 0"),
    "no noise": ({"noise_multiplier": None, "non_private": True}, "buffers correlate noise, and"),
    "exact": ({"secure_noise": True}, "secure_noise is exact where it is independent"),
    "few": ({"weights": (0.5,), "decays": (0.5,)}, "must be as many as buffers, 2: give both"),
    "half": ({"weights": (0.5, 0.1)}, "must be as many as buffers, 2: give both"),
    "wild": ({"weights": (9.0, 0.5), "decays": (0.5, 0.5)}, "grows from step to step"),
    "alone": ({"buffers": None, "weights": (0.5,)}, "weights and decays are those of buffers"),
}


@pytest.mark.parametrize(("settings", "why"), NOT_BUFFERED.values(), ids=NOT_BUFFERED)
def test_buffers_that_a_run_cannot_have_are_refused_in_one_line(settings, why, tmp_path):
    with pytest.raises(ValueError, match=re.escape(why)) as refused:
        run(line, sgd(**{"sampler": ORDER(**SIZES), "buffers": 2, **settings}), tmp_path / "run")
    assert "\n" not in str(refused.value)
    assert not list(tmp_path.iterdir())


def test_a_run_goes_on_with_its_own_noise_alone(auto, tmp_path):
    out = shutil.copytree(auto[0] / "cut", tmp_path / "run")
    record = json.loads((out / "config.json").read_text())
    other = {"bands": 2, "coefficients": [1.0, 0.5]}
    (out / "config.json").write_text(json.dumps({**record, **other}))
    before = (out / "ledger.jsonl").read_bytes()
    with pytest.raises(LedgerError, match="begun with banded toeplitz noise and goes on only so"):
        resume(out)
    assert (out / "ledger.jsonl").read_bytes() == before


# --- What it costs, and with what it ends ------------------------------------------------------


def test_an_attack_advantage_is_met_with_bands():
    wanted = {"noise_multiplier": None, "target_advantage": 0.2}
    config, _ = of(sgd(**wanted, bands=5))
    found = attack_advantage(config.mechanism(ROWS).privacy()).upper
    assert 0.199 < found <= 0.2
    chosen, _ = of(sgd(**wanted, sampler=ORDER(**SIZES), bands="auto"))
    assert chosen.bands == 10


def test_a_calibration_ends_the_run_with_independent_noise_and_is_paid_for(tmp_path):
    wanted = {"noise_multiplier": None, "target_epsilon": 6.0, "calibration": "platt"}
    config = sgd(**wanted, sampler=ORDER(**SIZES), bands=2)
    with few_rows_are_calibrated():
        report = run(calibrated, config, tmp_path / "run")
    mechanism = read(tmp_path / "run" / "ledger.jsonl").generations[0].terms.mechanism
    assert mechanism.noise.bands == 2
    assert mechanism.of_sums().noise == Independent()
    assert 5.9 < report["epsilon_upper"] <= 6.0
    alone = dataclasses.replace(mechanism, full_sums=None).privacy()
    assert epsilon(alone, 1e-5).upper < 0.99 * report["epsilon_upper"]


# --- Noise that is not what a run claims -------------------------------------------------------


def independent(noise, total, state, key, step, scales):
    return Independent().add(total, state, key, step, scales)[0], state


def of_another_matrix(noise, total, state, key, step, scales):
    return ADD(BandedToeplitz((1.0, 0.9)), total, state, key, step, scales)


ADD = BandedToeplitz.add


@pytest.mark.parametrize(
    ("bug", "second"),
    [pytest.param(independent, 0.53, marks=pytest.mark.long), (of_another_matrix, 0.54)],
)
def test_a_run_whose_noise_is_not_that_of_its_bands_is_refused_before_it_begins(
    bug, second, tmp_path, monkeypatch
):
    monkeypatch.setattr(BandedToeplitz, "add", bug)
    config = sgd(bands=2, coefficients=(1.0, second), audit=True)  # no program has these
    with pytest.raises(
        ValueError, match=r"not what its guarantee assumes.*noise is what key, step"
    ):
        run(line, config, tmp_path / "run")
    assert not list(tmp_path.iterdir())
