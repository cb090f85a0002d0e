"""What a run leaves open is chosen once, by public numbers; what has no proof is refused."""

import functools
import itertools
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_task import (
    SUMS,
    Line,
    Words,
    calibrated,
    config_of,
    few_rows_are_calibrated,
    kinds,
    line,
    words,
)

from accounting import epsilon
from dpsgd import (
    BandedToeplitz,
    Independent,
    Lazy,
    Mechanism,
    RunSpec,
    Segment,
    Settings,
    cost,
    run,
)
from dpsgd.noise.correlated import banded_square_root
from dpsgd.runs.job import rows_of
from dpsgd.runs.mechanism import resolved
from dpsgd.runs.recommendation import RecommendationRequest, generic, sentence, table_step_size
from dpsgd.runs.resolve import ADAM, choose, resolve
from dpsgd.runs.spec import Dense
from dpsgd.runs.support import (
    COLUMNS,
    SAMPLERS,
    UNSUPPORTED,
    check,
    example_data,
    support_matrix,
)
from samplers import BallsAndBins, Deterministic, Population
from samplers.settings import SETTINGS

ROWS = Population(160)
NO_NOISE = {"noise_multiplier": None, "non_private": True}
SIZES = {"batch_size": 16, "epochs": 3}
BINS, ORDER = SETTINGS["balls-and-bins"], SETTINGS["deterministic"]
OPEN = RunSpec.of(SETTINGS["shuffle"](), noise_multiplier=1.0, audit=False)
RECOMMENDED = Settings(batch_size=16, epochs=3, l2_clip_norm=2.0, learning_rate=0.05)
ALL = ["batch_size", "epochs", "l2_clip_norm", "learning_rate"]
MANY = Words(words=4000)
"""So many that auto has their noise deferred."""


def sgd(**options):
    return config_of(**{"optimizer": "sgd", "momentum": 0.9, "learning_rate": 0.01, **options})


def chosen(spec, task=line, **how):
    """The spec with its choices, and the record of them."""
    spec, _, record = choose(spec, task, rows_of(task), **how)
    return spec, record


# --- The support table ---------------------------------------------------------------------------


def test_the_document_is_the_table():
    document = Path(__file__).parents[3] / "docs" / "reference" / "support_matrix.md"
    assert document.read_text().endswith(f"\n\n{support_matrix()}")


@functools.cache  # what is computed with lazy tables costs the same as without
def priced(mechanism):
    return mechanism.privacy().delta(1.0, tolerance=0.1)


@pytest.mark.parametrize(("sampler", "column"), [*itertools.product(SAMPLERS, COLUMNS)])
def test_supported_pairs_have_a_cost_and_others_are_refused(sampler, column):
    (row,) = (one for one in support_matrix().splitlines() if one.startswith(f"| {sampler} |"))
    supported = row.split("|")[2 + [*COLUMNS].index(column)].strip() == "yes"
    name, settings = SAMPLERS[sampler]
    options = {"noise_multiplier": 2.0, "l2_clip_norm": 1.0, "calibration": "none"}
    population = example_data()

    def mechanism():
        spec = RunSpec.of(SETTINGS[name](**settings), **{**options, **COLUMNS[column]})
        check(spec)
        return resolved(spec, population).mechanism

    with few_rows_are_calibrated():
        if supported:
            assert priced(mechanism()).upper < 1.0
            return
        with pytest.raises(
            ValueError, match=r"; (take|leave|use)|cycle_length|here one user"
        ) as why:
            mechanism()
    assert "\n" not in str(why.value)


OPTIONS = {
    "non_private": NO_NOISE,
    "bands": {"bands": 2},
    "tables lazy": {"tables": "lazy"},
    "average_tail": {"average_tail": 0.5},
    "average_decay": {"average_decay": 0.5},
    "clipping": {"clipping": "automatic"},
    "calibration": {"calibration": "platt"},
    "overflow accumulate": {"sampler": SETTINGS["poisson"](**SIZES, overflow="accumulate")},
}
"""Options of a run with a trait; the other traits are of samplers, as in the matrix."""
PAIRS = {
    (one, other): rule
    for rule in UNSUPPORTED
    for one, other in itertools.product(rule.first, rule.second)
    if {one, other} <= OPTIONS.keys()
}


@pytest.mark.parametrize(("pair", "rule"), PAIRS.items(), ids=map(" and ".join, PAIRS))
def test_exclusive_options_are_refused_before_rows_are_read(pair, rule):
    one, other = pair
    for trait in pair:
        check(config_of(**OPTIONS[trait]))
    spec = config_of(**OPTIONS[one], **OPTIONS[other])
    with pytest.raises(ValueError, match=f"^{one} and {other}: {rule.reason}; {rule.mend}$"):
        check(spec)
    if one == "tables lazy":
        found, record = chosen(spec.but(tables="auto"), words)
        assert isinstance(found.tables, Dense)
        assert record["tables"]["why"] == f"{one} and {other}: {rule.reason}"


# --- Settings ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recommending(Line):
    """The line, with a rule of its own."""

    def recommend(self, request):
        return RECOMMENDED


@dataclass(frozen=True)
class Settling(Line):
    """The line, with a setting of its own that it chooses."""

    settled: bool = False

    def settle(self, request):
        assert (request.num_examples, request.noise_multiplier) == (160, 1.0)
        return replace(self, settled=True), {"settled": "it is asked"}


def test_a_task_settles_its_own_settings_and_the_run_records_why(tmp_path):
    lines = []
    run(Settling(), OPEN, tmp_path / "run", progress=lines.append)
    assert "chosen: settled True, as it is asked" in lines
    record = json.loads((tmp_path / "run" / "config.json").read_text())
    assert record["task"]["settings"]["settled"] is True
    assert record["chosen"]["task"] == {"settled": {"value": True, "why": "it is asked"}}
    assert "settled True, as it is asked" in (tmp_path / "run" / "report.md").read_text()


@dataclass(frozen=True)
class Listening(Line):
    """The line, which keeps what it was asked."""

    requests: tuple = ()

    def recommend(self, request):
        object.__setattr__(self, "requests", (*self.requests, request))
        return Settings(batch_size=16, tables_learning_rate=0.7, tables_momentum=0.5)


def test_a_task_without_a_rule_gets_constants_within_its_rows():
    few = generic(RecommendationRequest(300, 1e-2))
    assert (few.batch_size, few.epochs, few.l2_clip_norm, few.learning_rate) == (300, 10, 4.0, 3e-3)
    assert generic(RecommendationRequest(88_000, 1e-5)).batch_size == 1024


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
def test_open_settings_take_the_recommendation_of_the_task(given, names):
    asked = OPEN.but(**given)
    found, record = chosen(asked, Recommending())
    assert found.open == []
    assert record == (
        {"settings": {name: getattr(RECOMMENDED, name) for name in names}} if names else {}
    )
    values, before = ({**vars(s.sampler), **s.options()} for s in (found, asked))
    for name in ALL:
        assert values[name] == (getattr(RECOMMENDED, name) if name in names else before[name])


def test_a_rule_receives_rows_guarantee_and_chosen_sizes():
    task = Listening()
    target = OPEN.but(noise_multiplier=None, target_epsilon=3.0)
    without = OPEN.but(noise_multiplier=None, non_private=True)
    sized = [SETTINGS["shuffle"](epochs=7), BallsAndBins(160, 16, 2)]
    for spec in (target, target.but(target_delta=0.05), *(OPEN.but(sampler=s) for s in sized)):
        choose(spec, task, rows_of(line))
    choose(without, task, rows_of(line))
    assert task.requests == (
        RecommendationRequest(160, 1e-5, target_epsilon=3.0),
        RecommendationRequest(160, 0.05, target_epsilon=3.0),
        RecommendationRequest(160, 1e-5, noise_multiplier=1.0, epochs=7),
        RecommendationRequest(160, 1e-5, noise_multiplier=1.0, batch_size=16, epochs=2),
        RecommendationRequest(160, 1e-5),
    )
    assert [request.private for request in task.requests] == [True, True, True, True, False]


@pytest.mark.parametrize(("target", "part"), [(0.5, 0.5), (1.0, 0.5), (3.0, 0.7), (8.0, 0.7)])
def test_a_warm_start_takes_shorter_default_steps(target, part):
    fresh = OPEN.but(noise_multiplier=None, target_epsilon=target)
    warm = fresh.but(init_from="earlier")
    usual = chosen(fresh)[0].optimizer.learning_rate
    spec, record = chosen(warm)
    assert spec.optimizer.learning_rate == pytest.approx(part * usual, rel=0.02)
    assert record["settings"]["learning_rate"] == spec.optimizer.learning_rate
    assert f"as {record['warm']['why']}" in sentence(record)
    given, record = chosen(warm.but(learning_rate=usual))
    assert given.optimizer.learning_rate == usual
    assert not {"warm"} & {*record, *chosen(fresh)[1]}


@dataclass(frozen=True)
class Wrong(Line):
    """The line, with a rule that may be none."""

    recommended: Any = None

    def recommend(self, request):
        return self.recommended


UNFIT = [
    (line, {"bands": 4, "sampler": SETTINGS["shuffle"](**SIZES)}, "bands and no minimum "),
    (line, {"bands": 4, "sampler": BINS(**SIZES, cycle_length=2)}, "bands=4 exceeds 2"),
    (line, {"bands": 11, "sampler": ORDER(**SIZES)}, "bands=11 exceeds 10"),
    (line, {"bands": 11}, "bands 11: cycle_length must be at most the 10 steps"),
    (line, {"bands": "auto", "sampler": BINS(**SIZES, cycle_length=2)}, "cycle_length must equal"),
    (line, {"bands": "auto"}, "bands=auto needs target_epsilon"),
    (line, {"tables": "lazy"}, "tables lazy: the loss declares no look-ups"),
    (
        words,
        {"tables": "lazy", "train": "^w"},
        "tables lazy: no derivative of the loss reaches a declared table",
    ),
    (words, {"train": "logit"}, ".*'logit' matches no parameter; choose among table, w"),
    (Line(rows=0), {}, ".*equally many rows, one per example, got 0"),
    (Line(rows=10), {}, ".*batch"),
    (words, {"tables": "lazy", "sampler": BINS(**SIZES, cycle_length=11)}, "cycle_length must"),
    (Wrong(recommended={"epochs": 3}), {"learning_rate": None}, ".*dpsgd.Settings, got dict"),
    (Wrong(recommended=Settings(learning_rate=math.nan)), {"learning_rate": None}, "learning_rate"),
]


@pytest.mark.parametrize(("task", "options", "why"), UNFIT, ids=str)
def test_impossible_runs_are_refused_before_the_directory_exists(task, options, why, tmp_path):
    with pytest.raises(ValueError, match=f"^{why}") as refused:
        run(task, sgd(**options), tmp_path / "run")
    assert "\n" not in str(refused.value)
    assert not list(tmp_path.iterdir())


# --- Tables --------------------------------------------------------------------------------------


AUTO = {
    "many rows": (MANY, {}, "lazy", "they have 50 times the rows that a batch looks up"),
    "few rows": (words, {}, "dense", "they have 5 times the rows that a batch looks up"),
    "no tables": (line, {}, "dense", "the loss declares no look-ups, so its tables cannot be lazy"),
}


@pytest.mark.parametrize(("task", "options", "expected", "why"), AUTO.values(), ids=AUTO)
def test_auto_tables_are_chosen_by_public_sizes_with_a_reason(task, options, expected, why):
    given = {"tables_learning_rate": 0.5, "tables_momentum": 0.9}
    asked = config_of(tables="auto", sampler=BINS(**SIZES), **given, **options)
    found, record = chosen(asked, task)
    assert record["tables"]["tables"] == found.options()["tables"] == expected
    assert record["tables"]["why"] == why  # without a remedy, as nothing is wrong
    assert {**given, **found.options()} == {**found.options(), **given}
    assert sentence({"tables": record["tables"]}).startswith(f"chosen: tables {expected}, as ")


def test_open_lazy_table_settings_are_chosen_once_and_recorded():
    lines = []
    asked = config_of(tables="auto", sampler=BINS(**SIZES))
    found, record = chosen(asked, MANY, progress=lines.append)
    rate = table_step_size(RecommendationRequest(160, 1e-5, noise_multiplier=1.0), Settings(16, 3))
    assert found.tables == Lazy(rate, 0.0, 384)
    expected = {"tables_learning_rate": rate, "tables_momentum": 0.0, "flush_every": 384}
    assert record["settings"] == expected
    assert any("tables lazy, as they have 50 times" in one for one in lines)


def test_a_rule_receives_lazy_tables_and_recommends_their_steps():
    class RecommendingWords(Words, Listening):
        pass

    task, asked = RecommendingWords(), config_of(tables="lazy", l2_clip_norm=None)
    found, _ = chosen(asked, task)
    assert (found.tables.learning_rate, found.tables.momentum) == (0.7, 0.5)
    assert chosen(asked.but(tables_momentum=0.9), task)[0].tables.momentum == 0.9
    assert [(r.tables, r.tables_momentum) for r in task.requests] == [("lazy", None), ("lazy", 0.9)]
    rates = [
        chosen(asked.but(tables_momentum=momentum), words)[0].tables.learning_rate
        for momentum in (0.9, 0.0)
    ]
    assert rates[0] == pytest.approx(rates[1] / 10, rel=0.03)


# --- Correlated noise ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["balls-and-bins", "poisson"])
def test_an_open_sampler_cycle_takes_the_number_of_bands(name):
    asked = sgd(sampler=SETTINGS[name](**SIZES), bands=4)
    found, record = chosen(asked)
    assert (found.sampler.cycle_length, found.noise.bands) == (4, 4)
    assert record == {}
    mechanism = resolved(found, ROWS).mechanism
    assert mechanism.noise == banded_square_root(4)
    longer, _ = chosen(sgd(sampler=SETTINGS[name](**SIZES, cycle_length=5), bands=4))
    assert resolved(longer, ROWS).mechanism.sampler.cycle_length == 5


@pytest.mark.parametrize("sampler", [SETTINGS["deterministic"], SETTINGS["shuffle"]])
def test_an_order_that_is_fixed_needs_no_cycle(sampler):
    order = {"order": "fixed"} if sampler.name == "shuffle" else {}
    found, _ = chosen(sgd(sampler=sampler(**SIZES, **order), bands=10))
    assert found.sampler == sampler(**SIZES, **order)
    assert resolved(found, ROWS).mechanism.noise.bands == 10


def test_adam_is_answered_by_independent_noise_and_told_why():
    lines = []
    asked = config_of(bands="auto", noise_multiplier=None, target_epsilon=3.0)
    found, record = chosen(asked)
    assert found.noise == Independent()
    assert record["noise"] == {"bands": 1, "why": ADAM}
    given, _ = chosen(config_of(bands=2), progress=lines.append)
    assert given.noise.bands == 2
    assert f"note: {ADAM}" in lines


WANTED = {"noise_multiplier": None, "target_epsilon": 8.0}


@pytest.mark.short("options[2-7]*")
@pytest.mark.parametrize(
    ("options", "bands", "why"),
    [
        pytest.param({}, 4, "its error is about 0.", marks=pytest.mark.long),
        ({"target_epsilon": 3.0}, 2, "its error is about 0."),
        ({"sampler": SETTINGS["shuffle"](**SIZES)}, 1, "shuffle has no minimum separation"),
        (
            {"sampler": BINS(batch_size=80, epochs=1), "target_epsilon": 0.2},
            1,
            "more bands would need",
        ),
        ({"sampler": ORDER(**SIZES)}, 8, "its error is about 0."),
        ({"sampler": ORDER(**SIZES), "target_epsilon": None, "noise_multiplier": 2.0}, 8, "it"),
    ],
)
def test_auto_bands_leave_least_error_at_the_guarantee_and_fit(options, bands, why):
    asked = sgd(**{**WANTED, "bands": "auto", **options})
    found, record = chosen(asked)
    assert found.noise.bands == bands
    assert record["noise"]["bands"] == bands
    assert why in record["noise"]["why"]


# --- Calibration, and targets of the whole -----------------------------------------------------

CALIBRATED = {
    "offered": (calibrated, {}, SUMS, "platt", ""),
    "given": (calibrated, {"calibration": "platt"}, SUMS, "platt", ""),
    "left out": (calibrated, {"calibration": "none"}, SUMS, "none", ""),
    "not offered": (line, {}, SUMS, "none", "the task, a Line, offers none"),
    "of another kind": (kinds, {}, SUMS, "temperature", "the task, a Kinds, offers temperature"),
    "not private": (calibrated, NO_NOISE, SUMS, "none", "without privacy nothing is clipped"),
    "few rows": (calibrated, {}, None, "none", "on 160 training rows, at epsilon .*calibration's"),
}


@pytest.mark.parametrize(
    ("task", "options", "sums", "expected", "why"), CALIBRATED.values(), ids=CALIBRATED
)
def test_private_runs_are_calibrated_if_offered_and_worthwhile(
    task, options, sums, expected, why, monkeypatch
):
    monkeypatch.setattr("dpsgd.engine.calibration.calibration_sums", lambda *which, **about: sums)
    lines = []
    found, _ = chosen(config_of(**options), task, progress=lines.append)
    assert found.calibration == expected
    assert any(text.startswith("no calibration: on 160") for text in lines) == (sums is None)
    if why:
        with pytest.raises(ValueError, match=f"^calibration.*: .*{why}") as refused:
            chosen(config_of(**options, calibration="platt"), task)
        assert "\n" not in str(refused.value)


class CalibratedWords(Words):
    """The words, which private runs calibrate."""

    def calibration(self):
        return calibrated.calibration()


@pytest.mark.parametrize("tables", ["lazy", "auto", "dense"])
def test_calibration_of_users_is_refused_whatever_the_tables(tables):
    population = Population(160, max_contributions=2, num_users=80)
    sampler = SETTINGS["user-poisson"](**SIZES)
    spec = config_of(tables=tables, sampler=sampler, calibration="platt")
    why = "its sums clip single rows, but the protected units have several"
    with pytest.raises(ValueError, match=f"^calibration=platt is not possible: {why} "):
        choose(spec, CalibratedWords(), (rows_of(words)[0], population))


@pytest.mark.parametrize("noise", [{}, {"bands": 5}], ids=["independent", "bands"])
def test_a_target_is_met_by_training_and_calibration_together(noise):
    sigmas, most = [], 3.0
    for calibration in ("none", "platt"):
        how = {
            "noise_multiplier": None,
            "calibration": calibration,
            "target_epsilon": most,
            **noise,
        }
        with few_rows_are_calibrated():
            found = resolve(sgd(sampler=ORDER(**SIZES), **how), calibrated, rows_of(calibrated))
        assert 0.98 * most <= epsilon(found.mechanism.privacy(), 1e-5).upper <= most
        if found.mechanism.full_sums:
            assert found.mechanism.sums_mechanism().noise == Independent()
        sigmas.append(found.mechanism.noise_multiplier)
    assert sigmas[1] > 1.01 * sigmas[0]


def test_optimistic_noise_meets_the_lower_and_states_the_upper():
    how = {"sampler": SETTINGS["shuffle"](batch_size=32, epochs=1), "noise_multiplier": None}
    ends = []
    for optimistic in (False, True):
        spec = config_of(**how, target_epsilon=1.0, optimistic=optimistic)
        found = resolve(spec, Line(), rows_of(Line()))
        guarantee = cost([Segment(found.mechanism)], found.delta)
        ends.append((guarantee.epsilon.lower, guarantee.epsilon.upper))
        assert float(guarantee.sentence().split()[2]) >= guarantee.epsilon.upper
    (lower, upper), (optimistic_lower, optimistic_upper) = ends
    assert lower < 0.98 < upper <= 1.0
    assert 0.98 < optimistic_lower <= 1.0 < 1.2 < optimistic_upper


# --- Whole runs ----------------------------------------------------------------------------------

CHOICES = {
    "settings": (Recommending(), OPEN),
    "tables": (MANY, config_of(tables="auto")),
    "bands": (line, sgd(sampler=ORDER(**SIZES), bands=4)),
    "bands of its own": (line, sgd(sampler=ORDER(**SIZES), bands="auto")),
    "calibration": (calibrated, config_of()),
    "nothing": (line, config_of(calibration="none", target_delta=1e-5)),
}


@pytest.mark.parametrize(("task", "asked"), CHOICES.values(), ids=CHOICES)
def test_resolving_is_complete_and_idempotent(task, asked):
    with few_rows_are_calibrated():
        found = resolve(asked, task, rows_of(task))
        again = resolve(found.spec, task, rows_of(task))
    assert found.spec.open == []
    assert (again.spec, again.mechanism, again.delta) == (found.spec, found.mechanism, found.delta)
    assert not again.chosen
    record = json.loads(json.dumps({**found.spec.record(), "chosen": dict(found.chosen)}))
    assert RunSpec.from_record(record, "here") == found.spec


@pytest.mark.parametrize(
    ("noise", "weak"),
    [({"noise_multiplier": 1.0}, True), ({"noise_multiplier": 0.01}, False), (None, False)],
    ids=["much", "little", "none"],
)
def test_dominating_noise_is_noted_at_start_and_in_the_report(tmp_path, noise, weak):
    lines = []
    how = NO_NOISE if noise is None else noise
    spec = config_of(**how, sampler=ORDER(**SIZES))
    record = run(line, spec, tmp_path / "run", progress=lines.append)
    start = next(i for i, text in enumerate(lines) if text.startswith("steps "))
    assert any(text.startswith("note: noise will probably drown") for text in lines[:start]) == weak
    assert (record["signal_to_noise"] is None) == (noise is None)
    text = (tmp_path / "run" / "report.md").read_text()
    assert ("drown the signal of 160 rows" in text) == weak
    assert "hosen" not in text


def test_signal_to_noise_uses_all_steps_and_independent_noise():
    sampler = Deterministic(1000, 100, 4)
    mechanism = Mechanism(sampler, 2.0, 7.0)
    noise = sum(np.random.default_rng(0).normal(0, 2.0 * 7.0, (40, 100_000)))
    assert mechanism.signal_to_noise == pytest.approx(40 * 100 * 7.0 / noise.std(), rel=0.02)
    banded = replace(mechanism, noise=BandedToeplitz((2.0, 1.0)))
    assert banded.signal_to_noise == replace(mechanism, noise_multiplier=0.0).signal_to_noise
    assert math.isinf(banded.signal_to_noise)
