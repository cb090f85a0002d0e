"""Every option of every command: what its help shows, and one line for a value that cannot be."""

import random
import re

import jax
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


def options_of(text):
    """Returns the options that a help shows, and what follows each: '' if nothing does."""
    return dict(re.findall(r"^  (--[a-z0-9-]+)(?: ([A-Z{\[][^ ]*))?", text, re.MULTILINE))


def test_all_commands_are_called():
    assert {name.split()[0] for name in CALLS} == set(cli.COMMANDS)


@pytest.mark.parametrize("examples", [1, pytest.param(None, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", CALLS)
def test_every_option_refuses_a_wrong_value_in_one_line_that_names_it(name, examples, command):
    words = CALLS[name]
    shown = options_of(command.help(*words))
    drawn = random.Random(name)
    valued = [(option, kind) for option, kind in shown.items() if kind]
    for option, kind in drawn.sample(valued, k=min(examples or len(valued), len(valued))):
        wrong = {"INT": [*NUMBERS, "1.5"], "FLOAT": NUMBERS}.get(kind.strip("[]"), [])
        if re.fullmatch(r"\{[a-z0-9,_-]+\}", kind):
            wrong = ["none of these", ""]
        for value in drawn.sample(wrong, k=min(examples or len(wrong), len(wrong))):
            assert option in command.refuses(*words, option, value), (option, value)
        if not kind.startswith(("[", "{[")):  # which may be empty
            assert option in command.refuses(*words, option)
        misspelt = f"{option}q"
        line = command.refuses(*words, misspelt, "1")
        assert f"has no option {misspelt}" in line
        assert re.search(r"did you mean --|--help` lists them$", line)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("width", [60, pytest.param(100, marks=pytest.mark.long)])
def test_help_is_as_wide_as_the_terminal_and_its_usage_has_what_must_be_given(
    name, width, command, monkeypatch
):
    monkeypatch.setenv("COLUMNS", str(width))
    shown = command.help(*CALLS[name])
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


def test_the_help_of_a_run_begins_with_what_a_newcomer_needs_and_ends_with_clusters(command):
    shown = command.help("train")
    order = ["DATA", "--out", "--target-epsilon", "--model", "--bands", "--coordinator"]
    places = [re.search(rf"^  {name}\b", shown, re.MULTILINE).start() for name in order]
    assert places == sorted(places)
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
def test_another_name_of_an_option_is_answered_by_its_own(name, given, meant, command):
    assert command.refuses(*CALLS[name], given, "1").endswith(f": did you mean {meant}?")


TINY = "--embedding-dim 2 --max-buckets 16 --hidden 4"
PLATT = "sampler:deterministic --num-examples 88000 --noise-multiplier 3 --calibration platt"
PRICE = "epsilon sampler:poisson --num-examples 9 --noise-multiplier 1 {}"
REFUSED = {
    "{}": {
        "": "name a command; there are prepare, train",
        "trian": "there is no command 'trian': did you mean train?",
        "frobnicate": "there is no command 'frobnicate'; there are prepare",
        "ledger a b": "dpsgd ledger takes no b; `dpsgd ledger --help` lists",
        "prepare": "dpsgd prepare needs one of criteo-display, criteo-search, csv,",
        "prepare cvs": "dpsgd prepare takes no cvs; there are criteo-display, criteo-search,",
        "prepare csv a b": "dpsgd prepare csv needs --label STR; `dpsgd prepare csv --help` lists",
        "prepare csv a b --label c --frob 1": "no option --frob; `dpsgd prepare csv --help` lists",
        "train --sampler poisson": "dpsgd train has no option --sampler: write sampler:poisson",
        "train a sampler:poisson --user b": "has no option --user; `dpsgd train --help` lists them",
        "train a --batch-size 9 --epochs=1 sampler:poisson --out b": (
            "--batch-size and --epochs: options of a sampler are written after sampler:poisson"
        ),
        "export": "dpsgd export needs RUN and OUT; `dpsgd export --help` lists",
        "train": "name a sampler",
        "audit": "name a sampler",
        "train sampler:poisson": "dpsgd train needs DATA and --out PATH; `dpsgd train --help`",
        "resume a --num-devices 0": "--num-devices must be at least 1, got 0",
        "train sampler:dice": "sampler:dice: there are determ",
        "epsilon sampler:poison --num-examples 1000": "sampler:poison: did you mean",
        "epsilon --num-examples 1000 --batch-size 10 --noise-multiplier 1": "name a sampler",
    },
    PRICE: {
        "--noise-multiplier 0": "--noise-multiplier must be",
        "--target-delta 0.1": "--target-delta must",  # which permits a failure
        "--num-examples 0": "--num-examples must be at least 1",
        "--num-examples 1000": "--batch-size is 1024 by default",
        "--sizes 3 3": "sampler:poisson takes no",
    },
    PRICE.replace("poisson", "user-poisson"): {"": "sampler:user-poisson needs --max-contribut"},
    "calibrate sampler:deterministic --num-examples 1000 {}": {"": "--target-epsilon"},
    "train --task images sampler:poisson --out o {}": {
        "": "give exactly one of --noise-multiplier, --target-epsilon and --non-priv",
        "--non-private --batch-size 0": "batch_size must be",
        "--non-private --momentum 0.5": "--momentum goes with optimizer sgd",
        "--noise-multiplier 1 --tables lazy --bands 2": "--tables lazy and bands: deferred noise",
        f"--non-private --out {__file__}/run": f"{__file__}/run cannot be written",
    },
    "train --task ratings {} sampler:poisson --out o --non-private": {
        "no.data": "no.data: No such file or directory",
    },
    "audit {} --num-examples 1000 --batch-size 50 --epochs 2 --noise-multiplier 1 " + TINY: {
        "sampler:shuffle --bands 4": "--bands and no minimum separation: ",
        "sampler:poisson --bands 4 --cycle-length 2": "--bands must be at most 2 here",
        "sampler:poisson --bands 21": "--bands 21: --cycle-length must be at most the 20",
        "sampler:poisson --tables auto": "--tables auto is what a run resolves",
    },
    "audit {} " + PLATT: {
        "--black-box": "--black-box looks at dense steps alone: leave out --calibration",
        "--task images": "its task, a Images, makes nothing: it has no calibration()",
    },
    "calibrate {} --target-epsilon 1 --calibration platt": {
        "sampler:deterministic --num-examples 2000":
            "on 2,000 training rows, at epsilon 1, its noise would cost more than it mends",
        "sampler:user-poisson --num-examples 88000 --max-contributions 3":
            "other units are protected (here one user)",
    },
    "epsilon sampler:multistage {} --steps 9 --num-examples 100 --noise-multiplier 2": {
        "--draws 1 11 --sizes 10 10": "has 10 children, fewer than",
        "--draws 1 5 --sizes 10 0": "--sizes needs a number >= 1",
        "--draws 1 --sizes 10 10": "--draws needs 2 entries, one per level",
        "--draws 1 5 --sizes 10 10 --units a b": "--units needs 1",
        "--draws 1 5 --sizes 10 10 --unit user": "--unit user: the rows of --sizes are examples",
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("words", "why"),
    [(of.format(words), why) for of, found in REFUSED.items() for words, why in found.items()],
)
def test_what_cannot_be_is_refused_in_one_line(words, why, command):
    jax.devices()  # of this process, which are as many as there are
    assert why in command.refuses(*words.split())


@pytest.mark.parametrize("name", ["calibrate", pytest.param("audit", marks=pytest.mark.long)])
def test_a_sampler_of_ones_own_is_asked_about_like_any_other(name, tmp_path, monkeypatch, command):
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
        answer = command(CALLS[name][0], sampler, *others)
        answers.append(re.sub(r"\d\.\d+e-\d+", "tiny", answer))  # p-values of a part's own seed
    assert answers[0] == answers[1]
