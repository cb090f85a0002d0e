"""Every option of every command: what its help shows, and one line for a value that cannot be."""

import random
import re

import pytest

from experiments import cli
from experiments.cli.console import counted
from experiments.tasks import TASKS
from samplers.settings import SETTINGS

SIZES = ["--num-examples", "1000", "--batch-size", "10"]
OF_SAMPLER = {
    "multistage": ["--draws", "1", "--steps", "9"],
    "units-then-poisson": ["--draws", "1", "--steps", "9", "--sampling-prob", "0.5"],
}
CALLS = {
    f"train --task {task}": ["train", "--task", task, "d", "sampler:poisson", "--out", "o"]
    for task in TASKS
}
CALLS |= {
    f"epsilon sampler:{name}": [
        *("epsilon", f"sampler:{name}", "--num-examples", "9", "--noise-multiplier", "1"),
        *OF_SAMPLER.get(name, []),
    ]
    for name in SETTINGS
}
CALLS |= {
    "calibrate": ["calibrate", "sampler:deterministic", *SIZES, "--target-epsilon", "1"],
    "plan noise": ["plan", "noise", "sampler:poisson", *SIZES, "--optimizer", "sgd"],
    "plan devices": ["plan", "devices", "sampler:poisson", *SIZES, "--num-devices", "2"],
    "audit": ["audit", "sampler:poisson", *SIZES, "--noise-multiplier", "1"],
    "compare": ["compare", *SIZES],
    "prepare criteo-display": ["prepare", "criteo-display", "a", "b"],
    "prepare criteo-search": ["prepare", "criteo-search", "a", "b"],
    "prepare csv": ["prepare", "csv", "a", "b", "--label", "y"],
    "prepare tfds": ["prepare", "tfds", "a", "b"],
    "prepare synthetic": ["prepare", "synthetic", "a"],
    "batches": ["batches", "a", "b"],
    "resume": ["resume", "a"],
    "sweep": ["sweep", "a", "b", "--out", "o"],
    "ledger": ["ledger", "a"],
    "evaluate": ["evaluate", "a", "b"],
    "score": ["score", "a", "b", "--out", "o"],
    "export": ["export", "a", "b"],
    "report": ["report", "a"],
    "results": ["results", "a"],
    "contributions": ["contributions", "a", "--user", "u"],
    "choose": ["choose"],
}
"""Words that each command can be given, before any is looked at."""

NUMBERS = ["x", "nan", "-inf", "1e999", "", "0x10", "1,2"]


def said(capsys, *words):
    """Returns the one line that refuses words."""
    assert cli.main([*words]) == 2, words
    captured = capsys.readouterr()
    (line,) = (one for one in captured.err.splitlines() if not one.endswith(" s in all)"))
    assert line.startswith("dpsgd: "), line
    assert line.isprintable()
    assert not captured.out
    return line


def help_of(capsys, *words):
    with pytest.raises(SystemExit) as end:
        cli.main([*words, "--help"])
    assert not end.value.code
    return capsys.readouterr().out


def options_of(text):
    """Returns the options that a help shows, and what follows each: '' if nothing does."""
    return dict(re.findall(r"^  (--[a-z0-9-]+)(?: ([A-Z{\[][^ ]*))?", text, re.MULTILINE))


def test_all_commands_are_called():
    assert {name.split()[0] for name in CALLS} == set(cli.COMMANDS)


@pytest.mark.parametrize("examples", [1, pytest.param(None, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", CALLS)
def test_every_option_refuses_a_wrong_value_in_one_line_that_names_it(name, examples, capsys):
    words = CALLS[name]
    shown = options_of(help_of(capsys, *words))
    drawn = random.Random(name)
    valued = [(option, kind) for option, kind in shown.items() if kind]
    for option, kind in drawn.sample(valued, k=min(examples or len(valued), len(valued))):
        wrong = {"INT": [*NUMBERS, "1.5"], "FLOAT": NUMBERS}.get(kind.strip("[]"), [])
        if re.fullmatch(r"\{[a-z0-9,_-]+\}", kind):
            wrong = ["none of these", ""]
        for value in drawn.sample(wrong, k=min(examples or len(wrong), len(wrong))):
            assert option in said(capsys, *words, option, value), (option, value)
        if not kind.startswith(("[", "{[")):  # which may be empty
            assert option in said(capsys, *words, option)
        misspelt = f"{option}q"
        line = said(capsys, *words, misspelt, "1")
        assert f"has no option {misspelt}" in line
        assert re.search(r"did you mean --|--help` lists them$", line)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("width", [60, pytest.param(100, marks=pytest.mark.long)])
def test_help_is_as_wide_as_the_terminal_and_its_usage_has_what_must_be_given(
    name, width, capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", str(width))
    shown = help_of(capsys, *CALLS[name])
    usage, _, rest = shown.partition("\n\n")
    assert usage.startswith(f"usage: dpsgd {name.split()[0]}")
    assert max(map(len, shown.splitlines())) <= width + 2
    assert "typing." not in shown
    assert "(default: None)" not in shown
    entries = [one.strip() for one in re.split(r"\n(?=  -|\n)", rest)]
    required = {one.split()[0] for one in entries if "(required)" in one}
    given = set(re.findall(r"--[a-z-]+", usage))
    assert given >= {one for one in required if one.startswith("--")}
    assert given <= required or "[OPTIONS]" not in usage
    others = {"--epsilon", "--delta", "--sigma", "--noise-multipliers", "--memory", "--lr"}
    assert not others & set(options_of(rest)), "the name of an option in another command"
    undescribed = re.findall(r"^  (--\S+) [^ ]+\n(?=  --|\n)", rest, re.MULTILINE)
    assert not undescribed, counted(len(undescribed), "option")


def test_the_help_of_a_run_begins_with_what_a_newcomer_needs_and_ends_with_clusters(capsys):
    shown = help_of(capsys, "train")
    order = ["DATA", "--out", "--target-epsilon", "--optimizer", "--bands", "--coordinator"]
    places = [re.search(rf"^  {name}\b", shown, re.MULTILINE).start() for name in order]
    assert places == sorted(places)
    assert "Preset of the model" in shown
    assert "user-poisson" in shown


ALIKE = {
    "epsilon": ("calibrate", "--epsilon", "--target-epsilon"),
    "delta": ("audit", "--delta", "--target-delta"),
    "a learning rate": ("train --task images", "--lr=1", "--learning-rate"),
    "noise": ("compare", "--noise-multipliers", "--noise-multiplier"),
    "a picture": ("compare", "--out", "--plot"),
    "an option of a sampler": ("epsilon sampler:poisson", "--overflw", "--overflow"),
    "an option of a task": ("train --task clicks", "--hiden", "--hidden"),
}


@pytest.mark.parametrize(("name", "given", "meant"), ALIKE.values(), ids=ALIKE)
def test_another_name_of_an_option_is_answered_by_its_own(name, given, meant, capsys):
    assert said(capsys, *CALLS[name], given, "1").endswith(f": did you mean {meant}?")


RUN = ["train", "--task", "images", "sampler:poisson", "--out", "o"]
EPSILON = CALLS["epsilon sampler:poisson"]
REFUSED = {
    "the noise of a run": ([*EPSILON, "--noise-multiplier", "0"], "--noise-multiplier must be"),
    "a delta that permits a failure": ([*EPSILON, "--target-delta", "0.1"], "--target-delta must"),
    "a size of a sampler": ([*RUN, "--non-private", "--batch-size", "0"], "--batch-size must be"),
    "a size of no data": ([*EPSILON, "--num-examples", "0"], "--num-examples must be at least 1"),
    "the default size": ([*EPSILON, "--num-examples", "1000"], "--batch-size is 1024 by default"),
    "two goals": ([*CALLS["calibrate"], "--target-advantage", "0.1"],
                  "give exactly one of --target-epsilon and --target-advantage"),
    "no goal": (RUN, "give exactly one of --noise-multiplier, --target-epsilon, --target-adv"),
    "an option of another choice": ([*RUN, "--non-private", "--momentum", "0.5"],
                                    "--momentum goes with optimizer sgd"),
    "no proof": ([*RUN, "--noise-multiplier", "1", "--tables", "lazy", "--bands", "2"],
                 "--tables lazy and bands: deferred noise"),
    "a name of no sampler": (["epsilon", "sampler:poison", *SIZES], "sampler:poison: did you mean"),
    "another name of no sampler": (["train", "sampler:dice"], "sampler:dice: there are determ"),
    "no sampler": (["epsilon", *SIZES, "--noise-multiplier", "1"], "name a sampler"),
    "data that a sampler needs": (["epsilon", "sampler:user-poisson", *SIZES,
                                   "--noise-multiplier", "1"],
                                  "sampler:user-poisson needs --max-contributions"),
    "data that a sampler lacks": ([*EPSILON, "--sizes", "3", "3"], "sampler:poisson takes no"),
    "devices": (["resume", "a", "--num-devices", "0"], "--num-devices must be at least 1, got 0"),
    "a place": ([*RUN[:-1], f"{__file__}/run", "--non-private"],
                f"{__file__}/run cannot be written"),
    "a file": (["train", "--task", "ratings", "no.data", *RUN[3:], "--non-private"],
               "no.data: No such file or directory"),
    "no command": (["trian"], "there is no command 'trian': did you mean train?"),
    "no word": ([], "name a command; there are prepare, train"),
    "like no command": (["frobnicate"], "there is no command 'frobnicate'; there are prepare"),
    "no topic": (["plan", "device"], "plan: name what is planned first, noise or devices"),
    "too many words": (["ledger", "a", "b"], "Unrecognized options: b"),
}  # fmt: skip


@pytest.mark.parametrize(("words", "why"), REFUSED.values(), ids=REFUSED)
def test_what_no_run_has_is_refused_by_the_option_that_was_given(words, why, capsys):
    assert said(capsys, *words).startswith(f"dpsgd: {why}")


@pytest.mark.parametrize("name", ["calibrate", pytest.param("audit", marks=pytest.mark.long)])
def test_a_sampler_of_ones_own_is_asked_about_like_any_other(name, tmp_path, monkeypatch, capsys):
    (tmp_path / "mine_asked.py").write_text(
        "from dataclasses import dataclass\nfrom samplers import Deterministic\n\n\n"
        "@dataclass(frozen=True)\nclass Mine(Deterministic):\n    'Mine.'\n\n    often: int = 1\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    mine, others = "sampler:mine_asked:Mine", CALLS[name][2:]
    _, asked = cli.parse([CALLS[name][0], mine, *others, "--often", "2"])
    assert (asked.sampler.name, asked.sampler.often) == ("mine_asked:Mine", 2)
    answers = []
    for sampler in (mine, "sampler:deterministic"):
        assert cli.main([CALLS[name][0], sampler, *others]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1]
