"""A spec refuses what is wrong with itself, and its options and records say all of it."""

import itertools
import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from tiny_task import config_of

from accounting.records import Bound
from dpsgd import (
    SGD,
    Adam,
    AdamW,
    Auto,
    Banded,
    Independent,
    Lazy,
    NoiseMultiplier,
    NonPrivate,
    RunSpec,
    TailAverage,
    TargetEpsilon,
)
from dpsgd.runs.directory import Configuration
from dpsgd.runs.spec import Dense, known_options
from samplers import Deterministic, Population
from samplers.settings import SETTINGS

ORDERED = SETTINGS["deterministic"](batch_size=16, epochs=3)

PRIVACY = NoiseMultiplier(1.0), TargetEpsilon(3.0), NonPrivate()
NOISE = (
    Independent(),
    Banded(1),
    Banded(2, coefficients=(1.0, 0.5)),
)
TABLES = Dense(), Lazy(0.5, 0.0, 8)
OPTIMIZERS = Adam(0.1), AdamW(0.1, 0.01), SGD(0.1, 0.9)
SAMPLERS = (
    ORDERED,
    SETTINGS["poisson"](batch_size=16, epochs=3, overflow="accumulate"),
    Deterministic(160, 16, 2),
)


def spec_of(privacy=PRIVACY[0], noise=NOISE[0], tables=TABLES[0], optimizer=OPTIMIZERS[0], **more):
    how = {"sampler": ORDERED, "l2_clip_norm": 1.0, "calibration": "none", **more}
    return RunSpec(privacy=privacy, noise=noise, tables=tables, optimizer=optimizer, **how)


EVERY = [
    spec_of(*parts, sampler=sampler)
    for *parts, sampler in itertools.product(PRIVACY, NOISE, TABLES, OPTIMIZERS, SAMPLERS)
]
OPEN = {
    "l2_clip_norm": spec_of(l2_clip_norm=None),
    "calibration": spec_of(calibration=None),
    "learning_rate": spec_of(optimizer=SGD(momentum=0.9)),
    "tables": spec_of(tables=Auto(0.5, 0.0, flush_every=8)),
    "tables_learning_rate": spec_of(tables=Lazy(momentum=0.0, flush_every=8)),
    "tables_momentum": spec_of(tables=Lazy(0.5, flush_every=8)),
    "flush_every": spec_of(tables=Lazy(0.5, 0.0)),
    "bands": spec_of(noise=Banded("auto")),
    "batch_size": spec_of(sampler=SETTINGS["shuffle"](epochs=3)),
    "epochs": spec_of(sampler=SETTINGS["shuffle"](batch_size=16)),
}


def test_options_and_records_give_every_spec_again():
    for spec in [*EVERY, *OPEN.values()]:
        assert RunSpec.of(**spec.options()) == spec
    for spec in EVERY:
        assert not spec.open
        record = json.loads(json.dumps(spec.record()))
        assert RunSpec.from_record({**record, "task": {}, "chosen": {}}, "here") == spec


def test_a_run_differs_from_all_specs_but_the_requested_one():
    specs = [*EVERY[:18], *OPEN.values(), spec_of(average=TailAverage(0.5))]
    for requested in specs:
        record = json.loads(json.dumps({"requested": requested.record()}))
        begun = Configuration(Path("config.json"), record)
        assert [spec for spec in specs if not begun.differing(spec)] == [requested]
        assert not begun.differing(replace(requested, init_from="elsewhere"))


@pytest.mark.parametrize("name", OPEN)
def test_a_record_that_leaves_a_choice_open_is_refused(name):
    assert OPEN[name].open == [name]
    record = json.loads(json.dumps(OPEN[name].record()))
    with pytest.raises(ValueError, match=f"^here: {name} has no value$"):
        RunSpec.from_record(record, "here")


def test_options_may_state_defaults_of_choices_that_are_not_made():
    """As the records of version 0.1.0 do, and the command line."""
    stated = {"momentum": 0.0, "bands": None}
    assert config_of(**stated, non_private=False) == config_of()


REFUSED = [
    ({"sigma": 1.0}, "sigma is unknown"),
    ({"tabels": "lazy"}, "tabels is unknown: did you mean tables"),
    ({"noise_multiplier": None}, "give exactly one of noise_multiplier, target_epsi"),
    ({"target_epsilon": 3.0}, "give exactly one of noise_multiplier, target_epsi"),
    ({"target_delta": 0.0}, "target_delta must"),
    ({"momentum": 0.9}, "momentum goes with optimizer sgd"),
    ({"weight_decay": 0.1}, "weight_decay goes with optimizer adamw"),
    ({"tables_learning_rate": 1.0}, "tables_learning_rate goes with tables lazy or auto: give it"),
    ({"flush_every": 8}, "flush_every goes with tables lazy or auto"),
    (
        {"bands": 4, "coefficients": (1.0, 0.5)},
        "coefficients must have 4 entries, one per band, got 2",
    ),
    ({"bands": 2, "coefficients": (1.0, 2.0)}, r"coefficients=\(1.0, 2.0\) give noise"),
    ({"coefficients": (1.0,)}, "coefficients goes with bands"),
    ({"train": "("}, r"train must be a regular expression, got"),
]


def bounds_of(hint):
    """The limits in an annotation, wherever they stand in it."""
    found = [mark for mark in getattr(hint, "__metadata__", ()) if isinstance(mark, Bound)]
    return found + [bound for kind in get_args(hint) for bound in bounds_of(kind)]


RANGES = {
    "noise_multiplier": "> 0",
    "target_epsilon": "> 0",
    "bands": ">= 1 < 2^63",
    "tables_learning_rate": "> 0 <= 1e+15",
    "tables_momentum": ">= 0 < 1",
    "flush_every": ">= 1 < 2^63",
    "learning_rate": "> 0",
    "weight_decay": ">= 0",
    "momentum": ">= 0 < 1",
    "average_tail": "> 0 <= 1",
    "average_decay": ">= 0 <= 0.999999",
    "l2_clip_norm": "> 0",
    "microbatch_size": ">= 1 < 2^63",
    "checkpoint_seconds": ">= 0",
    "init_seed": ">= 0 < 2^32",
    "insecure_seed": ">= 0 < 2^64",
}


def test_options_have_these_ranges():
    bounds = {name: bounds_of(option.type) for name, option in known_options().items()}
    texts = {name: " ".join(dict.fromkeys(map(str, found))) for name, found in bounds.items()}
    assert {name: text for name, text in texts.items() if text} == RANGES


BEYOND = {">=": -1, ">": 0, "<=": 1, "<": 0}
OUT_OF_RANGE = [
    ({name: type(bound.limit)(bound.limit + BEYOND[bound.sign])}, f"{name} must be ")
    for name, option in known_options().items()
    for bound in dict.fromkeys(bounds_of(option.type))
]
OF_NO_TYPE = [({name: {1: 2}}, f"{name} must be ") for name in known_options()]


@pytest.mark.parametrize(("options", "named"), REFUSED + OUT_OF_RANGE + OF_NO_TYPE, ids=str)
def test_what_no_run_has_is_refused_by_its_option(options, named):
    with pytest.raises(ValueError, match=f"^{named}") as refused:
        config_of(**options)
    assert "\n" not in str(refused.value)


class Eager(Lazy):
    """Tables of another kind."""


def test_a_part_that_resolve_does_not_know_is_refused():
    with pytest.raises(ValueError, match=r"^tables must be one of Dense, Lazy, Auto"):
        spec_of(tables=Eager())


def untyped(**values):
    """The spec of a caller whose arguments nothing holds against annotations, as tests do."""
    spec = object.__new__(RunSpec)
    init = getattr(RunSpec.__init__, "__wrapped__", RunSpec.__init__)
    init(spec, ORDERED, NoiseMultiplier(1.0), **values)
    return spec


@pytest.mark.parametrize("number", [float, np.float64, np.float32, Fraction])
def test_a_delta_is_the_number_that_was_given_of_whichever_kind(number):
    spec = untyped(delta=number(1e-6))
    assert type(spec.delta) is float
    assert spec.delta_of(Population(64)) == spec.delta == float(number(1e-6))


UNFIT = [
    ({"delta": np.float32(0.5)}, r"target_delta must lie in \(0, 0\.1\)"),
    ({"delta": np.float32("nan")}, "target_delta must be a finite number"),
    ({"delta": (1e-6,)}, "target_delta must be a finite number or 1/n"),
    ({"delta": "1/m"}, "target_delta must be a finite number or 1/n"),
    ({"calibration": "foo"}, "calibration must be none, platt, temperature or affine, got foo"),
    ({"data_on": "disk"}, "data_on must be device or host, got disk"),
]


@pytest.mark.parametrize(("values", "named"), UNFIT, ids=str)
def test_values_of_a_spec_are_checked_as_options_are(values, named):
    with pytest.raises(ValueError, match=f"^{named}"):
        untyped(**values)


@pytest.mark.parametrize("sampler", ["poisson", None, Deterministic])
def test_a_sampler_that_is_none_is_refused_with_the_spec(sampler):
    with pytest.raises(
        ValueError, match=r"^sampler must be settings, such as .*, or a BatchSampler"
    ):
        RunSpec.of(sampler, noise_multiplier=1.0)
