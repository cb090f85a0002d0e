"""What a run chooses where it is left open: once, of public numbers, and recorded as numbers."""

import json
import math
import re
from dataclasses import dataclass, replace

import numpy as np
import pytest
from tiny_task import Line, config_of, line, run_and_stop, short_blocks

from dpsgd import BandedToeplitz, Mechanism, RunConfig, Settings, resume, run
from dpsgd.runs.settings import Aim, any_noise, choose, generic, open_settings
from samplers import BallsAndBins, Deterministic, Population
from samplers.settings import SETTINGS, settings_of

OPEN = RunConfig(SETTINGS["shuffle"](), noise_multiplier=1.0, audit=False)
RECOMMENDED = Settings(batch_size=16, epochs=3, l2_clip_norm=2.0, learning_rate=0.05)
ALL = ["batch_size", "epochs", "l2_clip_norm", "learning_rate"]


@dataclass(frozen=True)
class Recommending(Line):
    """The line, with a rule of its own."""

    def recommend(self, aim):
        epochs = RECOMMENDED.epochs if aim.most_epochs is None else min(aim.most_epochs, 50)
        return replace(RECOMMENDED, epochs=epochs)


def test_a_task_without_a_rule_has_the_constants_and_no_batch_larger_than_its_rows():
    assert generic(Aim(88_000, 1e-5)) == Settings(1024, 10, 4.0, 3e-3)
    assert generic(Aim(300, 1e-2)) == Settings(300, 10, 4.0, 3e-3)
    assert [generic(Aim(5000, 1e-3, most_epochs=n)).epochs for n in (3, 10, 99)] == [3, 10, 10]


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({}, ALL),
        ({"learning_rate": 0.5}, ALL[:3]),
        ({"l2_clip_norm": 0.5, "sampler": SETTINGS["shuffle"](epochs=7)}, [ALL[0], ALL[3]]),
        ({"sampler": SETTINGS["poisson"](batch_size=40, epochs=7)}, ALL[2:]),
        ({"sampler": BallsAndBins(160, 16, 2)}, ALL[2:]),
        ({"sampler": BallsAndBins(160, 16, 2), "learning_rate": 1.0, "l2_clip_norm": 1.0}, []),
    ],
)
def test_what_is_given_stays_and_what_is_open_is_what_the_task_recommends(given, names):
    config = replace(OPEN, **given)
    assert open_settings(config) == names
    found = choose(Recommending(), config, Population(160))
    assert open_settings(found) == []
    for name in ALL:
        old, new = (getattr(c.sampler if name in ALL[:2] else c, name) for c in (config, found))
        assert new == (getattr(RECOMMENDED, name) if name in names else old)
    assert replace(found, sampler=config.sampler, l2_clip_norm=None, learning_rate=None) == replace(
        config, l2_clip_norm=None, learning_rate=None
    )


@dataclass(frozen=True)
class Listening(Line):
    """The line, which keeps what it was asked."""

    aims: tuple = ()

    def recommend(self, aim):
        object.__setattr__(self, "aims", (*self.aims, aim))
        return Settings()


def test_a_rule_is_told_the_rows_and_the_guarantee_and_sizes_that_are_decided_already():
    task = Listening()
    target = replace(OPEN, noise_multiplier=None, target_epsilon=3.0)
    choose(task, target, Population(160))
    choose(task, replace(target, target_delta=0.05), Population(160), most_epochs=4)
    choose(task, replace(OPEN, sampler=SETTINGS["shuffle"](epochs=7)), Population(160))
    choose(task, replace(OPEN, sampler=BallsAndBins(160, 16, 2)), Population(160))
    choose(task, replace(OPEN, noise_multiplier=None, non_private=True), Population(160))
    assert task.aims == (
        Aim(160, 1e-5, target_epsilon=3.0),
        Aim(160, 0.05, target_epsilon=3.0, most_epochs=4),
        Aim(160, 1e-5, noise_multiplier=1.0, epochs=7),
        Aim(160, 1e-5, noise_multiplier=1.0, batch_size=16, epochs=2),
        Aim(160, 1e-5),
    )
    assert [aim.private for aim in task.aims] == [True, True, True, True, False]


def test_a_recommendation_that_is_none_is_refused_in_a_line(tmp_path):
    class Wrong(Line):
        def recommend(self, aim):
            return {"epochs": 3}

    class Wild(Line):
        def recommend(self, aim):
            return Settings(learning_rate=float("nan"))

    for task, why in ((Wrong(), "must return dpsgd.Settings, got dict"), (Wild(), "learning_rate")):
        with pytest.raises(ValueError, match=why) as refused:
            run(task, OPEN, tmp_path / "run")
        assert "\n" not in str(refused.value)
    assert not list(tmp_path.iterdir())


def test_noise_that_need_not_be_calibrated_leaves_the_rest():
    target = replace(OPEN, noise_multiplier=None, target_advantage=0.1)
    assert any_noise(target) == replace(OPEN, calibration="none")
    plain = replace(OPEN, noise_multiplier=None, non_private=True)
    assert any_noise(plain) == plain


@pytest.mark.long
def test_a_run_records_its_choice_as_numbers_and_shows_it(tmp_path):
    lines = []
    config = replace(OPEN, learning_rate=0.1)
    run(Recommending(), config, tmp_path / "run", progress=lines.append)
    record = json.loads((tmp_path / "run" / "config.json").read_text())
    chosen = {"batch_size": 16, "epochs": 3, "l2_clip_norm": 2.0}
    assert record["chosen"] == {"settings": chosen}
    sizes = {name: record["sampler"][name] for name in ("batch_size", "epochs")}
    assert {**sizes, "l2_clip_norm": record["l2_clip_norm"]} == chosen
    assert record["learning_rate"] == 0.1
    shown = "hosen: batch size 16, epochs 3, clipping norm 2"
    assert f"c{shown}" in lines
    assert f"C{shown}" in (tmp_path / "run" / "report.md").read_text()
    terms = json.loads((tmp_path / "run" / "ledger.jsonl").open().readline())
    assert (terms["sampler"]["epochs"], terms["l2_clip_norm"]) == (3, 2.0)  # what is priced


@pytest.mark.parametrize(
    ("noise", "weak"),
    [({"noise_multiplier": 1.0}, True), ({"noise_multiplier": 0.01}, False), (None, False)],
    ids=["much", "little", "none"],
)
def test_noise_that_outweighs_what_the_rows_can_teach_is_told_at_once_and_reported(
    tmp_path, noise, weak
):
    lines = []
    how = {"noise_multiplier": None, "non_private": True} if noise is None else noise
    config = config_of(**how, sampler=SETTINGS["deterministic"](batch_size=16, epochs=3))
    record = run(line, config, tmp_path / "run", progress=lines.append)
    start = next(i for i, text in enumerate(lines) if text.startswith("steps "))
    assert any(text.startswith("note: 160 rows are few") for text in lines[:start]) == weak
    assert (record["signal_to_noise"] is None) == (noise is None)
    text = (tmp_path / "run" / "report.md").read_text()
    assert ("160 rows are few for this much noise" in text) == weak


def test_the_signal_is_that_of_the_steps_and_the_noise_that_is_independent():
    sampler = Deterministic(1000, 100, 4)
    mechanism = Mechanism(sampler, 2.0, 7.0)
    noise = sum(np.random.default_rng(0).normal(0, 2.0 * 7.0, (40, 100_000)))
    assert mechanism.signal_to_noise == pytest.approx(40 * 100 * 7.0 / noise.std(), rel=0.02)
    banded = replace(mechanism, noise=BandedToeplitz((2.0, 1.0)))
    assert banded.signal_to_noise == replace(mechanism, noise_multiplier=0.0).signal_to_noise
    assert math.isinf(banded.signal_to_noise)


def test_a_run_that_leaves_nothing_open_says_nothing_of_choices(tmp_path):
    config = config_of(l2_clip_norm=1.0, learning_rate=0.1)
    run(line, config, tmp_path / "run")
    assert "chosen" not in json.loads((tmp_path / "run" / "config.json").read_text())
    assert "hosen" not in (tmp_path / "run" / "report.md").read_text()


@pytest.mark.long
def test_a_resumed_run_keeps_what_was_chosen(tmp_path, monkeypatch):
    def recommend(task, aim):
        raise AssertionError("a resumed run chooses nothing")

    config = replace(OPEN, insecure_seed=1)
    with short_blocks():
        whole = run(Recommending(), config, tmp_path / "whole")
        out = run_and_stop(Recommending(), config, tmp_path / "run")
        monkeypatch.setattr(Recommending, "recommend", recommend)
        assert resume(out)["params_sha256"] == whole["params_sha256"]


@pytest.mark.parametrize("name", ALL)
def test_a_recorded_configuration_that_leaves_something_open_is_refused(name):
    record = choose(line, OPEN, Population(160)).record()
    assert open_settings(RunConfig.from_record(record, "here")) == []
    (record["sampler"] if name in record["sampler"] else record)[name] = None
    with pytest.raises(ValueError, match=f"^here: {name} is left open$"):
        RunConfig.from_record(record, "here")


def test_samplers_that_nobody_chooses_for_have_the_constants_and_name_them():
    built = SETTINGS["shuffle"]().build(Population(5000))
    assert (built.batch_size, built.epochs) == (1024, 10)
    words = r"epochs: .*; by default what the run chooses, see `dpsgd train`; elsewhere 10\."
    assert re.search(words, SETTINGS["poisson"].__doc__)
    with pytest.raises(ValueError, match="batch_size is 1024 by default, which is more than the 5"):
        SETTINGS["shuffle"](epochs=3).build(Population(5))
    assert settings_of(BallsAndBins)(batch_size=5).build(Population(50)).epochs == 10
