"""A command waits for nothing that its answer does not need: what each imports, by name."""

import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import dpsgd
from dpsgd import Mechanism, Segment
from dpsgd.runs.ledger import Ledger
from dpsgd.runs.terms import Terms
from experiments import cli
from experiments.cli import commands
from experiments.tasks.clicks.synthetic.rows import write_store
from samplers import Deterministic

TRAINING = {"jax", "flax", "optax", "matplotlib", "pyarrow", "rich"}
PRICING = {"numpy", "scipy", "accounting.profile", "samplers"}
OF_RUNS = ("runs", "costs", "audit")
SAMPLING = {name for name, (subject, _) in cli.COMMANDS.items() if subject in OF_RUNS}
"""Commands about runs, whose options are those of the samplers."""

SLOW_SCIPY = {"scipy.optimize", "scipy.stats", "scipy.sparse"}

ASK = """
import sys
from experiments import cli
for words in {questions!r}:
    try:
        assert cli.main(words) == {status}, words
    except SystemExit as end:
        assert not end.code, words
    loaded = {unwanted!r} & set(sys.modules)
    assert not loaded, (words, loaded)
"""


def ask(questions: list[list[str]], unwanted: set[str], status: int = 0) -> None:
    """Asks in a process of its own, and checks what it has imported after each answer."""
    code = ASK.format(questions=questions, unwanted=unwanted, status=status)
    root = Path(__file__).parents[3]
    # The tests' type checks, which a user does not have, stay out.
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.long
def test_help_and_version_import_nothing_that_computes():
    ask([["--help"], ["--version"]], {*TRAINING, *PRICING, "experiments.cli.questions"})
    ask(
        [[*name.split(), "--help"] for name in cli.COMMANDS if name not in SAMPLING],
        {*TRAINING, *PRICING},
    )
    ask([[name, "--help"] for name in SAMPLING], {*TRAINING, "scipy.special", "scipy.optimize"})


@pytest.mark.long
def test_a_price_is_answered_without_what_only_training_needs(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text(json.dumps({}))
    terms = Terms(Segment(Mechanism(Deterministic(100, 10, 1), 1.0, 1.0)), 1e-2)
    Ledger.create(run / "ledger.jsonl", terms).close()
    sizes = ["sampler:poisson", "--num-examples", "100", "--batch-size", "10", "--epochs", "1"]
    questions = [
        ["ledger", str(run)],
        ["epsilon", *sizes, "--noise-multiplier", "5"],
        ["calibrate", "sampler:balls-and-bins", *sizes[1:], "--target-epsilon", "5"],
    ]
    ask(questions, TRAINING | SLOW_SCIPY)


@pytest.mark.long
def test_impossible_runs_are_refused_before_training_is_imported(tmp_path):
    write_store(tmp_path / "store", 300, 0)
    words = ["train", str(tmp_path / "store"), "sampler:poisson", "--noise-multiplier", "1"]
    out = ["--out", str(tmp_path / "run")]
    questions = [
        [*words, "--out", str(tmp_path / "store" / "manifest.json" / "run")],
        [*words, *out, "--batch-size", "0"],
        [*words, *out, "--batch-size", "241"],
        [*words, *out, "--lr", "1"],
    ]
    ask(questions, TRAINING, status=2)


def test_every_module_of_answers_is_a_subject():
    subjects = {subject for subject, _ in cli.COMMANDS.values()}
    assert {module.name for module in pkgutil.iter_modules(commands.__path__)} <= subjects


def test_a_closed_output_pipe_prints_no_error():
    code = "import sys; from experiments import cli; sys.exit(cli.main())"
    command = [sys.executable, "-c", code, "--help"]
    read, write = os.pipe()
    os.close(read)
    root = os.pathsep.join([str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": root}
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, env=env)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_the_version_is_told(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"dpsgd {dpsgd.__version__}\n"
