"""Runs with lazy tables: what is chosen is recorded, and what cannot be is refused in one line."""

import dataclasses
import json
from dataclasses import replace

import pytest
from tiny_task import Words, config_of, line, words

from dpsgd import Settings, run
from dpsgd.runs import engine, tables
from dpsgd.runs.config import RunConfig
from dpsgd.runs.job import rows_of
from dpsgd.runs.records import plain
from dpsgd.runs.settings import Aim, choose, sentence
from dpsgd.runs.stages import Stages
from dpsgd.runs.step_sizes import of_lazy_tables
from samplers import Population
from samplers.settings import SETTINGS

MANY = Words(words=4000)
"""So many that auto has their noise come late."""

REFUSED = {
    "a rate of dense tables": (
        dict(tables_learning_rate=1.0),
        "tables_learning_rate is a setting of lazy tables",
    ),
    "flushes of dense tables": (dict(flush_every=8), "flush_every is a setting of lazy tables"),
    "a rate of nothing": (
        dict(tables="lazy", tables_learning_rate=0.0),
        "tables_learning_rate must be > 0",
    ),
    "a rate that float32 cannot hold": (
        dict(tables="lazy", tables_learning_rate=1e20),
        "tables_learning_rate must be > 0 and at most",
    ),
    "decay beyond what is there": (
        dict(tables="lazy", tables_learning_rate=0.5, tables_weight_decay=3.0),
        "tables_weight_decay times tables_learning_rate must be at most 1",
    ),
    "a momentum of 1": (dict(tables="lazy", tables_momentum=1.0), "tables_momentum must be in"),
    "negative decay": (dict(tables="auto", tables_weight_decay=-1.0), "tables_weight_decay must"),
    "no flush": (dict(tables="lazy", flush_every=0), "flush_every must be at least 1"),
    "bands": (
        dict(tables="lazy", bands="auto", optimizer="sgd"),
        "tables lazy: .* leave out bands",
    ),
    "buffers": (dict(tables="lazy", buffers=2), "tables lazy: .* leave out buffers"),
    "secure noise": (
        dict(tables="lazy", secure_noise=True),
        "tables lazy: .* leave out secure_noi",
    ),
    "several passes": (
        dict(tables="lazy", sampler=SETTINGS["poisson"](overflow="accumulate")),
        "tables lazy: .* accumulate takes several passes",
    ),
}


@pytest.mark.parametrize(("settings", "named"), REFUSED.values(), ids=REFUSED)
def test_what_no_run_can_have_is_refused_by_its_setting(settings, named):
    with pytest.raises(ValueError, match=f"^{named}"):
        config_of(**settings).check()


def test_a_loss_without_tables_is_refused_with_the_use_that_prevents_them(tmp_path):
    with pytest.raises(ValueError, match=r"^tables lazy: the loss has no tables, .* dot_general$"):
        run(line, config_of(tables="lazy"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


AUTO = {
    "many rows": (MANY, {}, "lazy", "they have 37 times the rows that a batch looks up"),
    "few rows": (words, {}, "dense", "they have 3.7 times the rows that a batch looks up"),
    "no tables": (line, {}, "dense", "the loss has no tables"),
    "secure noise": (MANY, {"secure_noise": True}, "dense", "leave out secure_noise"),
    "several passes": (
        MANY,
        {"sampler": SETTINGS["poisson"](batch_size=16, epochs=3, overflow="accumulate")},
        "dense",
        "accumulate takes several passes",
    ),
}


@pytest.mark.parametrize(("task", "settings", "expected", "named"), AUTO.values(), ids=AUTO)
def test_auto_is_decided_by_public_sizes_with_a_reason(task, settings, expected, named):
    given = {"tables_learning_rate": 0.5, "tables_momentum": 0.9}
    asked = config_of(tables="auto", **given, **settings)
    found, why = tables.chosen(task, asked, rows_of(task))
    assert found.tables == expected
    assert named in why
    expected_rate, expected_momentum = (0.5, 0.9) if expected == "lazy" else (None, None)
    assert found.tables_learning_rate == expected_rate
    assert found.tables_momentum == expected_momentum
    assert tables.as_decided(asked, found) == found
    assert found == RunConfig.from_record(plain(found.record()), "here")
    said = sentence({"settings": {}, "tables": {"tables": found.tables, "why": why}})
    assert said == f"chosen: tables {expected}, as {why}"


def test_what_is_left_open_of_lazy_tables_is_chosen_once_and_recorded():
    lines = []
    asked = MANY, config_of(tables="auto"), rows_of(MANY), None, None, Stages()
    config, found = engine._chosen(*asked, lines.append)
    record = json.loads(json.dumps({**config.record(), **found}))
    assert tables.as_decided(asked[1], config) == config
    assert tables.as_decided(replace(asked[1], tables="lazy"), config) == config
    rate = of_lazy_tables(Aim(160, 1e-5, noise_multiplier=1.0), Settings(16, 3))
    chosen = {"tables_learning_rate": rate, "tables_momentum": 0.0, "flush_every": 256}
    assert {name: record[name] for name in chosen} == chosen
    assert record["tables"] == "lazy"
    assert record["chosen"]["settings"] == chosen
    assert any(
        line.startswith("chosen: ") and "tables lazy, as they have 37 times" in line
        for line in lines
    )
    for name in ("tables", *chosen):
        torn = {**record, name: "auto" if name == "tables" else None}
        with pytest.raises(ValueError, match=f"^here: {name} is left open$"):
            RunConfig.from_record(torn, "here")


def test_a_task_is_told_of_lazy_tables_and_may_recommend_their_steps():
    seen = []

    class Recommending(Words):
        def recommend(self, aim):
            seen.append(aim)
            return Settings(tables_learning_rate=0.7, tables_momentum=0.5)

    asked = config_of(tables="lazy", l2_clip_norm=None)
    found, _ = tables.chosen(Recommending(), asked, rows_of(words))
    assert (found.tables_learning_rate, found.tables_momentum) == (0.7, 0.5)
    given = replace(asked, tables_momentum=0.9)
    assert choose(Recommending(), given, Population(160)).tables_momentum == 0.9
    assert [(aim.tables, aim.tables_momentum) for aim in seen] == [("lazy", None), ("lazy", 0.9)]
    plain = choose(words, replace(asked, tables_momentum=0.0), Population(160))
    rate = choose(words, given, Population(160)).tables_learning_rate
    assert rate == pytest.approx(plain.tables_learning_rate / 10, rel=0.03)


def test_an_aim_without_tables_is_that_of_a_dense_run():
    fields = {field.name: field.default for field in dataclasses.fields(Aim)}
    assert (fields["tables"], fields["tables_momentum"]) == ("dense", None)
