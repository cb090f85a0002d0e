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
        "--noise-multiplier must be finite and > 0 (dpsgd train --non-private asks for no "
        "guarantee), got -1",
    ),
    "noise of zero": (
        ["epsilon", "sampler:poisson", *SIZES, "--noise-multiplier", "0"],
        "--noise-multiplier must be finite and > 0 (dpsgd train --non-private asks for no "
        "guarantee), got 0",
    ),
    "noise that is no number": (
        ["audit", "sampler:poisson", *SIZES, "--noise-multiplier", "nan"],
        "--noise-multiplier must be a finite number, got nan",
    ),
    "a name of another command": (
        ["calibrate", "sampler:poisson", *SIZES, "--epsilon", "1"],
        "dpsgd calibrate has no option --epsilon: did you mean --target-epsilon?",
    ),
    "another name": (
        ["train", "nowhere", "sampler:poisson", *OUT, "--lr=1"],
        "dpsgd train has no option --lr: did you mean --learning-rate?",
    ),
    "a name of another command, in a run": (
        ["train", "nowhere", "sampler:poisson", "--epsilon", "3", "--out", "nowhere"],
        "dpsgd train has no option --epsilon: did you mean --target-epsilon?",
    ),
    "a misspelt option of a sampler": (
        ["epsilon", "sampler:poisson", *SIZES, "--noise-multiplier", "1", "--overflw", "truncate"],
        "dpsgd epsilon has no option --overflw: did you mean --overflow?",
    ),
    "a misspelt option of a task": (
        ["train", "nowhere", "sampler:poisson", *OUT, "--hiden", "3"],
        "dpsgd train has no option --hiden: did you mean --hidden?",
    ),
    "a misspelt option of a topic": (
        ["plan", "noise", "sampler:poisson", *SIZES, "--momentun", "1"],
        "dpsgd plan noise has no option --momentun",
    ),
    "an option of nobody": (
        ["score", "model", "rows", "--out", "nowhere", "--qqq"],
        "dpsgd score has no option --qqq; `dpsgd score --help` lists them",
    ),
    "a batch of nothing": (
        ["train", "nowhere", "sampler:poisson", *OUT, "--batch-size", "0"],
        "--batch-size must be at least 1, got 0",
    ),
    "no epochs, before any row is read": (
        ["train", "--task", "images", "sampler:shuffle", *OUT, "--epochs", "0"],
        "--epochs must be at least 1, got 0",
    ),
    "a run in a file": (
        ["train", "nowhere", "sampler:poisson", *OUT[:2], "--out", f"{__file__}/run"],
        f"{__file__}/run cannot be written: {__file__}: Not a directory",
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
    "default batch, noise wanted": (["calibrate", *NO_BATCH, "--target-epsilon", "1"], BATCH),
    "default batch, all samplers": (["compare", "--num-examples", "1000"], BATCH),
    "no examples": (
        ["calibrate", "sampler:poisson", "--num-examples", "0", "--target-epsilon", "1"],
        "--num-examples must be at least 1, got 0",
    ),
    "epsilon of zero": (
        ["calibrate", "sampler:poisson", *SIZES, "--target-epsilon", "0"],
        "--target-epsilon must be finite and > 0, got 0.0",
    ),
    "no target": (
        ["calibrate", "sampler:poisson", *SIZES],
        "give exactly one of --target-epsilon and --target-advantage",
    ),
    "two targets": (
        [
            "calibrate",
            "sampler:poisson",
            *SIZES,
            "--target-epsilon",
            "1",
            "--target-advantage",
            "0.1",
        ],
        "give exactly one of --target-epsilon and --target-advantage",
    ),
    "advantage of one": (
        ["calibrate", "sampler:poisson", *SIZES, "--target-advantage", "1"],
        "--target-advantage must lie in (0, 1), got 1.0",
    ),
    "delta of two": (
        ["epsilon", "sampler:poisson", *SIZES, "--noise-multiplier", "1", "--target-delta", "2"],
        "--target-delta must lie in (0, 0.1), got 2.0",
    ),
    "compare at delta of zero": (
        ["compare", *SIZES, "--target-delta", "0"],
        "--target-delta must lie in (0, 0.1), got 0.0",
    ),
    "compare without noise": (
        ["compare", *SIZES, "--noise-multiplier", "1", "0"],
        "--noise-multiplier must be finite and > 0",
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
    "calibrate": ["calibrate", "sampler:poisson", *SIZES, "--target-epsilon", "1"],
    "audit": ["audit", "sampler:poisson", *SIZES, "--noise-multiplier", "1"],
    "compare": ["compare", *SIZES],
    "plan": ["plan", "noise", *NO_BATCH, "--target-epsilon", "1", "--optimizer", "sgd"],
    "train": ["train", "--task", "images", "sampler:poisson", *OUT],
}


@pytest.mark.parametrize("command", DELTAS)
def test_every_command_refuses_a_delta_that_permits_a_failure(command, capsys):
    option = "--target-delta"
    assert cli.main([*DELTAS[command], option, "0.1"]) == 2
    assert capsys.readouterr().err.startswith(f"dpsgd: {option} must lie in (0, 0.1), got 0.1: ")


NUMBERS = [
    ["epsilon", "sampler:units-then-poisson", *TREE[2:], "--sampling-prob", "0.5"],
    ["calibrate", "sampler:user-poisson", *SIZES, "--target-epsilon", "1"],
    ["audit", "sampler:poisson", *SIZES, "--noise-multiplier", "1"],
    ["plan", "noise", "sampler:poisson", *SIZES, "--optimizer", "sgd"],
    ["plan", "devices", "sampler:poisson", *SIZES, "--num-devices", "2"],
    ["compare", *SIZES],
    ["train", "nowhere", "sampler:poisson", *OUT],
    ["contributions", "nowhere.csv", "--user", "u"],
    ["prepare", "csv", "a", "b", "--label", "y"],
]
NUMBERS[0] += ["--draws", "3", "--steps", "5"]


@pytest.mark.short("plan*", "audit*")
@pytest.mark.parametrize("words", NUMBERS[1:5], ids=lambda words: " ".join(words[:2]))
def test_a_sampler_of_ones_own_is_asked_about_like_any_other(words, tmp_path, monkeypatch, capsys):
    (tmp_path / "mine_asked.py").write_text(
        "from dataclasses import dataclass\nfrom samplers import Poisson\n\n\n"
        "@dataclass(frozen=True)\nclass Mine(Poisson):\n    'Mine.'\n\n    often: int = 1\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    mine = ["sampler:mine_asked:Mine" if word.startswith("sampler:") else word for word in words]
    _, config = cli.parse([*mine, "--often", "2"])
    assert config.sampler.name == "mine_asked:Mine"
    assert config.sampler.often == 2
    if words[0] == "calibrate":
        said = []
        for one in (mine, ["calibrate", "sampler:poisson", *words[2:]]):
            assert cli.main(one) == 0
            said.append(capsys.readouterr().out)
        assert said[0] == said[1]


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
