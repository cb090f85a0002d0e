"""Options of every command: golden helps, one line for each value that cannot be, any order.

`python tests/experiments/cli/test_options.py` writes the helps anew.
"""

import contextlib
import itertools
import os
import random
import re
import sys
from pathlib import Path

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments import cli
from experiments.tasks import TASKS
from samplers.settings import SETTINGS

HELP = Path(__file__).parent / "help"
SIZES = "--num-examples 1000 --batch-size 10"
OF_SAMPLER = {
    "multistage": "--draws 1 --steps 9",
    "units-then-poisson": "--draws 1 --steps 9 --sampling-prob 0.5",
}
CALLS = {
    "train": "train d sampler:poisson --out o",
    **{f"train --task {task}": f"train --task {task} d sampler:poisson --out o" for task in TASKS},
    **{
        f"epsilon sampler:{name}": f"epsilon sampler:{name} --num-examples 9 --noise-multiplier 1 "
        + OF_SAMPLER.get(name, "")
        for name in SETTINGS
    },
    "epsilon": f"epsilon sampler:poisson {SIZES} --noise-multiplier 1",
    "calibrate": f"calibrate sampler:deterministic {SIZES} --target-epsilon 1",
    "audit": f"audit sampler:poisson {SIZES} --noise-multiplier 1",
    "compare": f"compare {SIZES}",
    "prepare criteo-display": "prepare criteo-display a b",
    "prepare criteo-search": "prepare criteo-search a b",
    "prepare csv": "prepare csv a b --label y",
    "prepare tfds": "prepare tfds a b",
    "prepare synthetic": "prepare synthetic a",
    "batches": "batches a b",
    "resume": "resume a",
    "sweep": "sweep a b --out o",
    "ledger": "ledger a",
    "evaluate": "evaluate a b",
    "score": "score a b --out o",
    "export": "export a b",
    "report": "report a",
    "results": "results a",
    "contributions": "contributions a --user u",
    "choose": "choose",
}
"""Words that each command can be given, before any is looked at."""

HELPS = ["", "prepare", *cli.COMMANDS, "train sampler:poisson", "train --task images"]


def file_of(words):
    return HELP / f"{re.sub('[^a-z]+', '-', words) or 'dpsgd'}.txt"


def shown(words, capsys):
    assert cli.main([*words.split(), "--help"]) == 0
    return capsys.readouterr().out


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")


def test_every_command_is_called():
    assert {*cli.COMMANDS} <= {*CALLS}


@pytest.mark.parametrize("words", HELPS)
def test_help_is_the_golden_one(words, capsys):
    assert shown(words, capsys) == file_of(words).read_text()


@pytest.mark.parametrize("width", [60, 80])
def test_help_is_as_wide_as_the_terminal(width, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    for words in ("", "train", "results", "prepare csv"):
        assert max(map(len, shown(words, capsys).splitlines())) <= width


def test_help_of_a_run_has_few_options_in_the_newcomers_order(capsys):
    text = shown("train sampler:poisson", capsys)
    assert len(re.findall(r"^  --", text, re.MULTILINE)) <= 45
    order = ["DATA", "--out", "--target-epsilon", "--model", "--bands", "--num-devices"]
    places = [re.search(rf"^  {name}\b", text, re.MULTILINE).start() for name in order]
    assert places == sorted(places)


def options_of(name):
    """The options of a command, and the words of a call of it."""
    words = CALLS[name].split()
    _, kind, rest = cli.question_of(words)
    return words, kind.options(cli.with_sampler(rest))


@pytest.mark.parametrize("name", CALLS)
def test_every_option_has_a_text_and_stands_in_its_commands_help(name, capsys):
    words, options = options_of(name)
    text = shown(" ".join(words), capsys)
    for option in options:
        if option.name == "sampler" and " sampler:" in text:
            continue  # named in the usage
        assert len(option.text) > 9
        assert option.metavar or option.switch
        assert re.search(
            rf"^  {option.flag.lower() if option.place else option.flag}\b", text, re.M | re.I
        )


WRONG = {"INT": ["x", "nan", "1.5", "", "0x10"], "FLOAT": ["x", "nan", "1e999", "", "1,2"]}


@pytest.mark.parametrize("examples", [2, pytest.param(None, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", CALLS)
def test_every_option_refuses_a_wrong_value_in_one_line(name, examples, command):
    words, options = options_of(name)
    drawn, valued = random.Random(name), [o for o in options if not o.switch and not o.place]
    for option in drawn.sample(valued, k=min(examples or len(valued), len(valued))):
        wrong = WRONG.get(option.metavar, ["none of these"] if "{" in option.metavar else [])
        for value in drawn.sample(wrong, k=min(examples or len(wrong), len(wrong))):
            count = option.length if isinstance(option.length, int) else 1
            line = command.refuses(*words, option.flag, *[value] * count)
            assert line.startswith(f"dpsgd: {option.flag}")
            assert " must be " in line
        if option.length is None:
            assert option.flag in command.refuses(*words, option.flag)
        misspelt = f"{option.flag}q"
        line = command.refuses(*words, misspelt, "1")
        assert f"has no option {misspelt}" in line
        assert re.search(r"did you mean --|--help` lists them$", line)


@pytest.mark.long
def test_options_stand_in_any_order():
    parts = [["store"], ["--batch-size", "512"], ["--epochs=1"], ["--noise-multiplier", "1"]]
    parts += [["--out", "o"], ["--hidden", "4", "8", "--audit"]]
    for number, order in enumerate(itertools.permutations(parts)):
        sampler = ["sampler:poisson"] if number % 2 else ["--sampler", "poisson"]
        words = [word for part in [*order[:3], sampler, *order[3:]] for word in part]
        _, asked, _ = cli.parse(["train", *words])
        assert (asked.spec.sampler.batch_size, asked.spec.sampler.epochs) == (512, 1)
        assert (asked.settings["data"], asked.settings["hidden"]) == (Path("store"), (4, 8))


FLAGS = sorted({one.flag for name in CALLS for one in options_of(name)[1] if not one.place})
ODD = st.sampled_from(
    ["", "-", "--", "---", "--=", "=", "-1", "1e999", "\ud800", "a\nb", "\x00", "%s"]
)
NAMED = st.sampled_from(["sampler:poisson", "sampler:", "--task=images", "1", "poisson", "{0}"])
WORD = st.sampled_from(FLAGS) | ODD | NAMED | st.text(max_size=9)
WORDS = st.lists(WORD | st.tuples(WORD, WORD).map("=".join), max_size=9)


@given(st.sampled_from([*CALLS]), WORDS)
def test_any_words_are_a_question_or_refused(name, words):
    with contextlib.suppress(ValueError):  # whose line `in_one_line` escapes
        cli.parse([*CALLS[name].split(), *words])


ALIKE = {
    "epsilon": ("calibrate", "--epsilon", "--target-epsilon"),
    "delta": ("audit", "--delta", "--target-delta"),
    "a learning rate": ("train --task images", "--lr=1", "--learning-rate"),
    "noise": ("compare", "--noise-multipliers", "--noise-multiplier"),
    "a picture": ("compare", "--figure", "--plot"),
    "an option of a sampler": ("epsilon sampler:poisson", "--overflw", "--overflow"),
    "an option of a task": ("train --task clicks", "--hiden", "--hidden"),
}


@pytest.mark.parametrize(("name", "given", "meant"), ALIKE.values(), ids=ALIKE)
def test_another_name_of_an_option_is_answered_by_its_own(name, given, meant, command):
    said = command.refuses(*CALLS[name].split(), given, "1")
    assert said.endswith(f": did you mean {meant}?")


TINY = "--embedding-dim 2 --max-buckets 16 --hidden 4"
PLATT = "sampler:deterministic --num-examples 88000 --noise-multiplier 3 --calibration platt"
PRICE = "epsilon sampler:poisson --num-examples 9 --noise-multiplier 1 {}"
REFUSED = {
    "{}": {
        "": "name a command; there are prepare, train",
        "trian": "there is no command 'trian': did you mean train?",
        "frobnicate": "there is no command 'frobnicate'; there are prepare",
        "ledger a b": "dpsgd ledger takes no b; `dpsgd ledger --help` lists",
        "prepare": "dpsgd prepare needs one of csv, criteo-display, criteo-search,",
        "prepare cvs": "dpsgd prepare takes no cvs: did you mean csv?",
        "prepare csv a b": "dpsgd prepare csv needs --label TEXT; `dpsgd prepare csv --help` lists",
        "prepare csv a --label y": "dpsgd prepare csv needs FILES; `dpsgd prepare csv --help`",
        "prepare csv a b --label c --frob 1": "no option --frob; `dpsgd prepare csv --help` lists",
        "prepare criteo-search a b --user c": "prepare criteo-search has no option --user",
        "train a sampler:poisson --user b": "has no option --user; `dpsgd train --help` lists them",
        "export": "dpsgd export needs RUN and OUT; `dpsgd export --help` lists",
        "train": "dpsgd train needs DATA and --out PATH and --sampler TEXT; `dpsgd train --help`",
        "train --sampler": "--sampler: expected one argument",
        "train --dry-run sampler:poisson": "dpsgd train needs DATA; `dpsgd train --help`",
        "train a sampler:poisson --non-private --out o --num-examples 9": "it goes with --dry-run",
        "train --task": "--task: expected one argument",
        "resume a --num-devices 0": "--num-devices must be an integer >= 1, got 0",
        "resume a --process 3/3@h:1": "--process must be INDEX/COUNT@HOST:PORT, INDEX below COUNT",
        "resume a --process 0/2@h:99999": "--process must be INDEX/COUNT@HOST:PORT",
        "resume a --coordinator h:1": "--coordinator was removed in 0.3.0; see CHANGELOG",
        "train sampler:dice": "--sampler: unknown sampler 'dice'; there are determ",
        "epsilon --num-examples 1000 --sampler poison": "'poison': did you mean poisson?",
        "epsilon --num-examples 1000 --noise-multiplier 1": "epsilon needs --sampler TEXT",
        "choose --max-ratings 0": "--max-ratings must be an integer >= 1, got 0",
        "choose --caps 5 -1": "--caps[1] must be an integer >= 1, got -1",
        "choose --target-epsilon 0.1": "0.1 leaves nothing for the model, after 0.1 for the choice",
        "choose --cap-epsilon -1": "--cap-epsilon must be a finite number > 0, got -1",
        "choose --cap-quantile 1.1": "--cap-quantile must be a finite number >= 0 and <= 1, got",
        "choose --max-ratings 9 --caps 5": "give --max-ratings (a public cap) or --caps",
        "choose --caps": "--caps needs a number, or give --max-ratings",
        "sweep f.toml": "--out is missing: name the folder of the sweep, or give --dry-run",
        "sweep f.toml --private": "--out is missing: name the folder of the sweep, or give --dry-",
        "results a --by x": "--by needs --x, its axis",
        "compare --num-examples 9 --batch-size 3 --learning-rate 1":
            "--learning-rate changes no privacy cost; leave it out, or pass --train STORE",
        "report a --out {tmp}/a.html --by x": "--by is about labelled rows: name them with --data",
    },
    PRICE: {
        "--noise-multiplier 0": "--noise-multiplier must be a finite number > 0, got 0",
        "--target-delta 0.1": "--target-delta must",  # which permits a failure
        "--num-examples 0": "--num-examples must be an integer >= 1, got 0",
        "--num-examples 1000": "--batch-size is 1024 by default",
        "--sizes 3 3": "sampler:poisson takes no",
        "--draws 3": "--draws; it belongs to sampler multistage or units-then-poisson",
        "--trials-shape 1": "--trials-shape needs --mean-trials",
    },
    PRICE.replace("poisson", "shuffle"): {
        "--batch-size 3 --peer dp_accounting": "no event for sampler:shuffle with these options",
    },
    PRICE.replace("poisson", "user-poisson"): {"": "sampler:user-poisson needs --max-contribut"},
    "calibrate sampler:deterministic --num-examples 1000 {}": {"": "needs --target-epsilon FLOAT"},
    "train --task images sampler:poisson --out o {}": {
        "": "give exactly one of --noise-multiplier, --target-epsilon and --non-private",
        "--non-private --batch-size 0": "--batch-size must be an integer >= 1, got 0",
        "--non-private --momentum 0.5": "--momentum goes with optimizer sgd",
        "--non-private --optimizer adm": "unknown optimizer 'adm': did you mean adam?",
        "--noise-multiplier 1 --tables lazy --bands 2": "--tables lazy and bands: deferred noise",
        "--noise-multiplier 1 --train (": "--train must be a regular expression, got (",
        "--noise-multiplier 1 --hidden 4": "has no option --hidden; `dpsgd train --help` lists",
        "--noise-multiplier 1 --flush-every 4": "only Python and sweep files can set flush_every",
        f"--non-private --out {__file__}/run": f"{__file__}/run cannot be written",
    },
    "train --task ratings {} sampler:poisson --out o --non-private": {
        "no.data": "no.data: cannot be read: No such file",
    },
    "audit {} --num-examples 1000 --batch-size 50 --epochs 2 --noise-multiplier 1 " + TINY: {
        "sampler:shuffle --bands 4": "--bands and no minimum separation: ",
        "sampler:poisson --bands 21": "--bands 21: cycle_length must be at most the 20",
        "sampler:poisson --tables auto": "--tables auto is resolved by the rows",
        "sampler:poisson --claim dice": "--claim: unknown sampler 'dice'; there are",
    },
    "audit {} " + PLATT: {
        "--black-box": "--black-box audits dense steps alone; leave out --calibration",
        "--task images": "a Images, offers none",
    },
    "calibrate {} --target-epsilon 1 --calibration platt": {
        "sampler:deterministic --num-examples 2000":
            "on 2,000 training rows, at epsilon 1, the calibration's noise adds more error",
        "sampler:user-poisson --num-examples 88000 --max-contributions 3":
            "the protected units have several (here one user)",
    },
    "epsilon sampler:multistage {} --steps 9 --num-examples 100 --noise-multiplier 2": {
        "--draws 1 11 --sizes 10 10": "has 10 children, fewer than",
        "--draws 1 5 --sizes 10 0": "--sizes[1] must be an integer >= 1, got 0",
        "--draws 1 --sizes 10 10": "--draws needs 2 entries, one per level",
        "--draws 1 5 --sizes 10 10 --units a b": "--units needs 1",
        "--draws 1 5 --sizes 10 10 --unit user": "--unit user: the rows of --sizes are examples",
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (of.replace("{}", words), why)
        for of, found in REFUSED.items()
        for words, why in found.items()
    ],
)
def test_what_cannot_be_is_refused_in_one_line(words, why, command, tmp_path):
    jax.devices()  # of this process, which are as many as there are
    assert why in command.refuses(*words.replace("{tmp}", str(tmp_path)).split())


@pytest.mark.parametrize("name", ["calibrate", pytest.param("audit", marks=pytest.mark.long)])
def test_a_sampler_of_ones_own_is_asked_about_like_any_other(name, tmp_path, monkeypatch, command):
    (tmp_path / "mine_asked.py").write_text(
        "from dataclasses import dataclass\nfrom samplers import Deterministic\n\n\n"
        "@dataclass(frozen=True)\nclass Mine(Deterministic):\n    'Mine.'\n\n    often: int = 1\n"
        "\n\n@dataclass(frozen=True)\nclass Clash(Mine):\n    bands: int = 2\n"
        "\n\n@dataclass(frozen=True)\nclass Unread(Mine):\n    lost: 'Nowhere' = None\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    mine, (first, _, *others) = "sampler:mine_asked:Mine", CALLS[name].split()
    _, asked, _ = cli.parse([first, mine, *others, "--often", "2"])
    assert (asked.spec.sampler.name, asked.spec.sampler.often) == ("mine_asked:Mine", 2)
    for kind, why in (
        ("Clash", "its setting bands has the name of"),
        ("Unread", "lost has an annot"),
    ):
        with pytest.raises(ValueError, match=why):
            cli.parse(["audit", f"sampler:mine_asked:{kind}"])
    answers = []
    for sampler in (mine, "sampler:deterministic"):
        answer = command(first, sampler, *others)
        answers.append(re.sub(r"[\d.,e-]*\d", "#", answer))  # a part has its own seed and blocks
    own, built_in = (answer.splitlines() for answer in answers)
    costs = "pass  the sampler's cost"  # only an own part's cost is checked
    assert [line for line in own if not line.startswith(costs)] == built_in


if __name__ == "__main__":
    os.environ["COLUMNS"] = "100"
    HELP.mkdir(exist_ok=True)
    for words in HELPS:
        text = cli.help_of([*words.split(), "--help"])
        file_of(words).write_text(f"{text}\n")
    sys.exit()
