"""What is misspelt in the file of a sweep is named, with what is meant."""

import pytest

from experiments import cli

GRID = """
title = "t"
repetitions = 1
[[grid]]
x = "noise_multiplier"
sampler = "poisson"
noise_multiplier = [1]
"""

SWEEPS = {
    "the axis of the panel": (
        ('x = "noise_multiplier"', 'x = "noise_multiplyer"'),
        "grid 1, x: 'noise_multiplyer' is none of 'noise_multiplier', 'target_epsilon'",
    ),
    "an axis": (
        ("noise_multiplier = [1]", "noise_multiplyer = [1]"),
        "grid 1: 'noise_multiplyer' is unknown: did you mean noise_multiplier?",
    ),
    "what is tuned": (
        ("noise_multiplier = [1]", 'noise_multiplier = [1]\ntune = "learnin_rate"'),
        "grid 1, tune: 'learnin_rate' is none of 'noise_multiplier'",
    ),
    "a setting of a sampler": (
        ('"poisson"', '{ name = "poisson", overflw = "accumulate" }'),
        "sampler[0]: 'overflw' is unknown: did you mean overflow?",
    ),
    "a word of the file": (
        ("repetitions", "repititions"),
        "'repititions' is unknown: did you mean repetitions?",
    ),
    "one pair of brackets": (("[[grid]]", "[grid]"), "grid: each begins with [[grid]]"),
}


@pytest.mark.parametrize(("change", "said"), SWEEPS.values(), ids=SWEEPS)
def test_what_is_misspelt_in_a_sweep_is_named(change, said, tmp_path, capsys):
    assert change[0] in GRID
    file = tmp_path / "sweep.toml"
    file.write_text(GRID.replace(*change, 1))
    assert cli.main(["sweep", str(file), "store", "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"dpsgd: {file}")
    assert said in error
    assert error.count("\n") == 1
