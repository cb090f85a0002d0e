"""Removed options and fields are refused with the version that removed them."""

import pytest

from dpsgd.removed import NOTICE, REMOVED
from dpsgd.runs.spec import RunSpec
from experiments.cli import parse
from experiments.estimators import DPClassifier
from samplers import Deterministic

COMMANDS = sorted(entry for entry in REMOVED if entry.startswith("command="))


@pytest.mark.parametrize("entry", COMMANDS)
@pytest.mark.parametrize("words", [[], ["--help"], ["devices", "--num-devices", "8"]], ids=str)
def test_removed_commands_are_refused_with_the_version(entry, words):
    command = entry.removeprefix("command=")
    with pytest.raises(ValueError, match=f"^dpsgd {command} was {NOTICE}$"):
        parse([command, *words])


@pytest.mark.parametrize("entry", sorted(REMOVED.difference(COMMANDS)))
def test_removed_options_are_refused_with_the_version(entry):
    name, _, value = entry.partition("=")
    words = ["--" + name.replace("_", "-"), *([value] if value else [])]
    with pytest.raises(ValueError, match=NOTICE) as refused:
        parse(["train", "store", "sampler:poisson", *words])
    assert "\n" not in str(refused.value)
    with pytest.raises(ValueError, match=NOTICE):
        RunSpec.of(None, **{name: value or True})
    record = RunSpec.of(Deterministic(64, 8), noise_multiplier=1.0).record() | {name: value or True}
    with pytest.raises(ValueError, match=rf"^config\.json: .*{NOTICE}"):
        RunSpec.from_record(record, "config.json")


@pytest.mark.parametrize("name", ["bounds_epsilon", "outer_bounds", "weight_bound"])
def test_removed_estimator_arguments_are_refused_with_version(name):
    with pytest.raises(ValueError, match=f"^{name}: {NOTICE}$"):
        DPClassifier(**{name: 1.0})
    with pytest.raises(ValueError, match=f"^sample_weight: {NOTICE}$"):
        DPClassifier().fit([[0.0]], [0], sample_weight=[1.0])
