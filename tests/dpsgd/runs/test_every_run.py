"""Runs of every kind go on to the bits of an undisturbed one, are audited, recorded and counted."""

import functools
import json
import shutil

import numpy as np
import pytest
from own_sampler import Coins
from tiny_task import (
    NAMES,
    Calibrated,
    assert_same,
    calibrated,
    config_of,
    contents,
    few_rows_are_calibrated,
    kinds,
    line,
    params_of,
    run_and_stop,
    short_blocks,
    words,
)

from accounting import epsilon
from dpsgd import Run, RunSpec, resume, run
from dpsgd.models.model import export
from dpsgd.noise.correlated import banded_square_root
from dpsgd.runs import plan
from dpsgd.runs.history import read
from samplers.settings import SETTINGS, settings_of

SGD_OF = {"optimizer": "sgd", "momentum": 0.9, "learning_rate": 0.01}
ORDER = {**SGD_OF, "sampler": SETTINGS["deterministic"](batch_size=16, epochs=3)}
WANTED = {**ORDER, "noise_multiplier": None, "target_epsilon": 8.0}
LAZY = {"tables": "lazy", "tables_learning_rate": 0.1, "tables_momentum": 0.5}
COINS = settings_of(Coins)(batch_size=16, epochs=3, heads=0.25)
BANDS = {**SGD_OF, "bands": 2, "coefficients": (1.0, 0.5)}
KINDS = {
    "dense": (line, {}),
    "auto bands": (line, {**WANTED, "bands": "auto"}),
    "decay": (line, {**BANDS, "average_decay": 0.5}),
    "own sampler": (line, {"sampler": COINS}),
    "platt": (calibrated, {"clipping": "automatic", "calibration": "platt", "average_tail": 0.5}),
    "classes": (kinds, {"calibration": "temperature"}),
    "lazy": (words, LAZY),
    "table": (words, {"train": "tab"}),
}


@pytest.fixture(scope="session")
def ran(tmp_path_factory):
    """What makes runs of a kind once: undisturbed, stopped, and stopped and resumed; and lines."""

    @functools.cache
    def of(kind):
        folder, lines = tmp_path_factory.mktemp("runs"), []
        task, options = KINDS[kind]
        spec = config_of(insecure_seed=3, audit=True, **options)
        with short_blocks(), few_rows_are_calibrated():
            run(task, spec, folder / "whole", name=NAMES.get(id(task)), progress=lines.append)
            run_and_stop(task, spec, folder / "stopped")
            shutil.copytree(folder / "stopped", folder / "resumed")
            resume(folder / "resumed", task, progress=lines.append)
        return folder, lines

    return of


@pytest.mark.short("table")
@pytest.mark.parametrize("kind", KINDS)
def test_a_stopped_run_goes_on_to_the_bits_of_an_undisturbed_one(kind, ran):
    folder, _ = ran(kind)
    # A clean stop flushes lazy tables, so that the rest of the run draws other noise.
    bits = () if kind == "lazy" else ("params.npz", "diagnostics_not_private.jsonl")
    for name in ("guarantee.json", *bits):
        whole, resumed = ((folder / at / name).read_bytes() for at in ("whole", "resumed"))
        assert whole == resumed, name
    (attempt,) = read(folder / "resumed" / "ledger.jsonl").attempts
    assert attempt == read(folder / "whole" / "ledger.jsonl").attempts[0]
    for at in ("whole", "resumed"):
        assert contents(folder / at, "report.json")["audit"].startswith("passed: ")
    record = contents(folder / "whole", "config.json")
    options = RunSpec.from_record(record, "here").options()
    asked = {name for name, value in KINDS[kind][1].items() if value not in (None, "auto", COINS)}
    assert {name: options[name] for name in asked} == {n: KINDS[kind][1][n] for n in asked}


# --- Correlated noise ----------------------------------------------------------------------------


@pytest.mark.long
def test_bands_that_are_chosen_are_recorded_and_shown(ran):
    folder, lines = ran("auto bands")
    record = contents(folder / "whole", "config.json")
    mechanism = read(folder / "whole" / "ledger.jsonl").attempts[0].terms.mechanism
    noise, sigma = mechanism.noise, mechanism.noise_multiplier
    assert noise == banded_square_root(record["bands"])
    assert record["chosen"]["noise"].items() >= {"bands": 8, "noise_multiplier": sigma}.items()
    assert 7.9 < epsilon(mechanism.privacy(), 1e-5).upper <= 8.0
    shown = f"hosen: noise of 8 bands, sigma {sigma:.4g}"
    assert any(one.startswith(f"c{shown}") for one in lines)
    assert f"C{shown}" in (folder / "whole" / "report.md").read_text()


def test_a_resumed_run_keeps_its_recorded_decisions_and_noise(ran, tmp_path, monkeypatch):
    def decides(*of, **how):
        raise AssertionError("a resumed run decides nothing")

    monkeypatch.setattr(plan, "resolve", decides)
    folder, _ = ran("table")
    out = shutil.copytree(folder / "stopped", tmp_path / "run")
    record, before = contents(out, "config.json"), (out / "ledger.jsonl").read_bytes()
    other = {"bands": 2, "coefficients": [1.0, 0.5]}
    (out / "config.json").write_text(json.dumps({**record, **other}))
    with pytest.raises(ValueError, match="is not the configuration that the ledger records"):
        resume(out)
    assert (out / "ledger.jsonl").read_bytes() == before
    (out / "config.json").write_text(json.dumps(record))
    resume(out)
    assert_same(out, folder / "resumed")


# --- A part of the parameters --------------------------------------------------------------------


def test_a_part_is_trained_and_named_and_the_rest_keeps_its_bits(ran, tmp_path):
    folder = ran("table")[0] / "whole"
    for leaf, before in words.init(0).items():
        assert np.array_equal(params_of(folder)[f"['{leaf}']"], before) == (leaf != "table")
    assert read(folder / "ledger.jsonl").attempts[0].terms.trained == ("table",)
    export(folder, tmp_path / "model", task=words)
    assert contents(tmp_path / "model", "guarantee.json")["trained"] == ["table"]


class Shifted(Calibrated):
    """The same with a leaf that its calibration leaves alone."""

    def init(self, seed):
        return super().init(seed) | {"shift": np.zeros(1, np.float32)}

    def loss(self, params, example):
        return super().loss(params, example) + params["shift"][0]

    def calibration(self):
        slope = super().calibration()
        apply = slope.apply
        object.__setattr__(slope, "apply", lambda params, state: params | apply(params, state))
        return slope


def test_calibration_of_frozen_parameters_is_refused_or_omitted(tmp_path):
    with few_rows_are_calibrated():
        config = config_of(calibration="platt", insecure_seed=3)
        Run.create(calibrated, config.but(train="w"), tmp_path / "all")
        with pytest.raises(ValueError, match="rescale w, which train freezes; leave it out"):
            run(Shifted(), config.but(train="shift"), tmp_path / "calibrated")
        run(Shifted(), config.but(train="shift", calibration=None), tmp_path / "open")
    assert np.array_equal(params_of(tmp_path / "open")["['w']"], Shifted().init(0)["w"])


# --- A sampler from outside the package ----------------------------------------------------------


@pytest.mark.long
def test_a_sampler_of_ones_own_is_known_by_its_qualified_name(tmp_path):
    out, lines = tmp_path / "run", []
    with short_blocks():
        run_and_stop(line, config_of(sampler=COINS), out)
        record = resume(out, progress=lines.append)
    assert contents(out, "config.json")["sampler"] == {
        "name": "own_sampler:Coins", "batch_size": 16, "epochs": 3, "num_shards": 1, "heads": 0.25,
    }  # fmt: skip
    assert "importing the module of your own sampler, own_sampler:Coins" in lines
    history, sampler = read(out / "ledger.jsonl"), Coins(160, 16, 3, heads=0.25)
    assert history.attempts[0].terms.mechanism.sampler == sampler
    assert record["sampler"] == "own_sampler:Coins"
    cost = history.attempts[0].terms.mechanism.privacy()
    assert epsilon(cost, 1e-5) == epsilon(sampler.privacy(1.0), 1e-5)
