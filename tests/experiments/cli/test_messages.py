"""What a newcomer mistypes is answered by the name that was typed, and by nothing never given."""

import pytest

from experiments import cli

SIZES = ["--num-examples", "1000", "--batch-size", "10"]
NO_BATCH = ["sampler:poisson", "--num-examples", "1000"]
TREE = ["epsilon", "sampler:multistage", "--num-examples", "1000", "--noise-multiplier", "1"]
TREE += ["--sizes", "30", "10"]
OUT = ["--noise-multiplier", "1", "--out", "nowhere"]
BATCH = "--batch-size is 1024 by default, which is more than the 1000 training examples"

QUESTIONS = {
    "noise first": (
        ["epsilon", *NO_BATCH, "--noise-multiplier", "-1"],
        "--noise-multiplier must be finite and > 0, got -1.0; without noise there is no guarantee",
    ),
    "noise of zero": (
        ["epsilon", "sampler:poisson", *SIZES, "--noise-multiplier", "0"],
        "--noise-multiplier must be finite and > 0, got 0.0",
    ),
    "noise that is no number": (
        ["audit", "sampler:poisson", *SIZES, "--noise-multiplier", "nan"],
        "--noise-multiplier must be finite and > 0, got nan",
    ),
    "default batch": (["epsilon", *NO_BATCH, "--noise-multiplier", "1"], BATCH),
    "default batch, users": (
        [
            "epsilon",
            "sampler:user-poisson",
            *NO_BATCH[1:],
            "--max-contributions",
            "9",
            "--noise-multiplier",
            "1",
        ],
        BATCH,
    ),
    "default batch, noise wanted": (["calibrate", *NO_BATCH, "--epsilon", "1"], BATCH),
    "default batch, all samplers": (["compare", "--num-examples", "1000"], BATCH),
    "no examples": (
        ["calibrate", "sampler:poisson", "--num-examples", "0", "--epsilon", "1"],
        "--num-examples must be at least 1, got 0",
    ),
    "epsilon of zero": (
        ["calibrate", "sampler:poisson", *SIZES, "--epsilon", "0"],
        "--epsilon must be finite and > 0, got 0.0",
    ),
    "no target": (
        ["calibrate", "sampler:poisson", *SIZES],
        "give exactly one of --epsilon and --target-advantage",
    ),
    "two targets": (
        ["calibrate", "sampler:poisson", *SIZES, "--epsilon", "1", "--target-advantage", "0.1"],
        "give exactly one of --epsilon and --target-advantage",
    ),
    "advantage of one": (
        ["calibrate", "sampler:poisson", *SIZES, "--target-advantage", "1"],
        "--target-advantage must lie in (0, 1), got 1.0",
    ),
    "delta of two": (
        ["epsilon", "sampler:poisson", *SIZES, "--noise-multiplier", "1", "--delta", "2"],
        "--delta must lie in (0, 0.1), got 2.0",
    ),
    "compare at delta of zero": (
        ["compare", *SIZES, "--delta", "0"],
        "--delta must lie in (0, 0.1), got 0.0",
    ),
    "compare without noise": (
        ["compare", *SIZES, "--noise-multipliers", "1", "0"],
        "--noise-multipliers must be finite and > 0, number 2 is 0.0",
    ),
    "search of half a run": (
        ["epsilon", "sampler:poisson", *SIZES, "--noise-multiplier", "1", "--mean-trials", "0.5"],
        "the mean number of trials must be in (1, 1e9], got 0.5",
    ),
    "search of no runs": (
        ["epsilon", "sampler:poisson", *SIZES, "--noise-multiplier", "1", "--trials-shape", "1"],
        "--trials-shape is of the search of --mean-trials: give both",
    ),
    "no steps": (
        [*TREE, "--draws", "3", "2", "--steps", "0"],
        "--steps must be at least 1, got 0",
    ),
    "a level short": (
        [*TREE, "--draws", "3", "--steps", "5"],
        "--draws needs 2 entries, one per level of",
    ),
    "a level too many": (
        [
            *("epsilon", "sampler:units-then-poisson", *TREE[2:], "--sampling-prob", "0.5"),
            *("--draws", "3", "2", "--steps", "5"),
        ],
        "--draws needs 1 entries, one per level of",
    ),
    "a sampler's name": (
        ["epsilon", "sampler:poison", *SIZES, "--noise-multiplier", "1"],
        "sampler:poison: did you mean sampler:poisson? One of your own is named sampler:module:",
    ),
    "a sampler's name, where a path may stand": (
        ["train", "--task", "images", "sampler:dice", "--out", "nowhere"],
        "sampler:dice: there are deterministic, shuffle, poisson, balls-and-bins, multistage",
    ),
    "a file that is not there": (
        [*("train", "--task", "ratings", "no.data", "sampler:poisson"), *OUT],
        "no.data: No such file or directory",
    ),
    "no table": (["contributions", "nowhere.csv", "--user", "u"], "nowhere.csv is no file"),
}


@pytest.mark.parametrize(("words", "said"), QUESTIONS.values(), ids=QUESTIONS)
def test_a_wrong_question_is_answered_by_the_option_that_was_given(words, said, capsys):
    assert cli.main(words) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"dpsgd: {said}")
    assert captured.err.count("\n") == 1
    assert not captured.out


DELTAS = {
    "epsilon": ["epsilon", "sampler:poisson", *SIZES, "--noise-multiplier", "1"],
    "calibrate": ["calibrate", "sampler:poisson", *SIZES, "--epsilon", "1"],
    "audit": ["audit", "sampler:poisson", *SIZES, "--noise-multiplier", "1"],
    "compare": ["compare", *SIZES],
    "plan": ["plan", "noise", *NO_BATCH, "--target-epsilon", "1", "--optimizer", "sgd"],
    "train": ["train", "--task", "images", "sampler:poisson", *OUT],
}


@pytest.mark.parametrize("command", DELTAS)
def test_every_command_refuses_a_delta_that_permits_a_failure(command, capsys):
    option = "--target-delta" if command == "train" else "--delta"
    assert cli.main([*DELTAS[command], option, "0.1"]) == 2
    assert capsys.readouterr().err.startswith(f"dpsgd: {option} must lie in (0, 0.1), got 0.1: ")


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
