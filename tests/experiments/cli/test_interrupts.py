"""Ctrl-C: one line and exit status 130, wherever it comes; nothing half-written is left.

A terminal sends it to all processes of a command at once; so do these tests, at set moments.
"""

import os
import signal
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path

import pytest

from experiments.processes import each
from experiments.tasks.clicks.synthetic import rows as synthetic

CTRL_C = """
import os, signal, sys, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored behind a shell's &
def ctrl_c(*args, **kwargs):
    os.killpg(0, signal.SIGINT)
    time.sleep(10)
"""

WHILE_IMPORTING = """
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            ctrl_c()
sys.meta_path.insert(0, Finder())
"""

WHILE_COMPUTING = """
import importlib
*owner, name = {function!r}.split(":")[1].split(".")
module = importlib.import_module({function!r}.split(":")[0])
for part in owner:
    module = getattr(module, part)
setattr(module, name, ctrl_c)
"""

MAIN = """
from experiments import cli
sys.argv[1:] = {words!r}
sys.exit(cli.main())
"""


def run(script: Path, code: str, words: list, place: Path) -> subprocess.CompletedProcess:
    """Runs `dpsgd WORDS` in the folder `place` after `code`, in a session of its own."""
    code = CTRL_C + code + MAIN.format(words=[str(word) for word in words])
    # The processes that it spawns import the script as well.
    script.write_text('if __name__ == "__main__":\n' + textwrap.indent(code, "    "))
    path = os.pathsep.join([str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, script],
        cwd=place,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        start_new_session=True,
    )
    lines = done.stderr.splitlines(keepends=True)  # on a busy machine some say what goes on
    done.stderr = "".join(line for line in lines if not line.endswith(" s in all)\n"))
    return done


PRICE = ["epsilon", "sampler:poisson", "--num-examples", "10000", "--noise-multiplier", "1"]
ALL = ["compare", "--num-examples", "10000", "--noise-multiplier", "0.3", "0.4"]
ALL += ["--plot", "page.png"]

CONVERTED = """
def converted(*args):
    try:
        ctrl_c()
    except KeyboardInterrupt:
        raise RuntimeError("INTERNAL: a callback failed") from None
module.epsilon = converted
"""

MOMENTS = {
    "importing the parser": (
        WHILE_IMPORTING.format(module="experiments.cli.questions.costs"),
        PRICE,
    ),
    "importing JAX": (WHILE_IMPORTING.format(module="jax"), ["report", "RUN"]),
    "pricing": (WHILE_COMPUTING.format(function="accounting:epsilon"), PRICE),
    "pricing in a library that converts errors": (
        WHILE_COMPUTING.format(function="accounting:epsilon") + CONVERTED,
        PRICE,
    ),
    "preparing": (
        WHILE_COMPUTING.format(function="experiments.tasks.clicks.writer:StoreWriter.complete"),
        ["prepare", "synthetic", "STORE", "--num-rows", "200"],
    ),
}


QUICK = {"importing JAX", "pricing", "preparing"}


@pytest.mark.short("preparing")
@pytest.mark.parametrize(
    ("code", "words"),
    [
        pytest.param(*moment, id=name, marks=() if name in QUICK else pytest.mark.long)
        for name, moment in MOMENTS.items()
    ],
)
def test_ctrl_c_is_one_line_and_leaves_nothing_half_written(code, words, tmp_path):
    script, place = tmp_path / "command.py", tmp_path / "place"
    place.mkdir()
    done = run(script, code, words, place)
    assert done.stderr == "dpsgd: interrupted\n"
    assert done.returncode == 130
    assert not list(place.iterdir())


ANSWERED_BY = """
import threading
from experiments import cli
cli.answer_to = lambda name, asked, known: answer(asked)
"""

LOST = """
class Lost:
    def __del__(self):
        ctrl_c()
def answer(config):
    Lost()
    threading.Event().wait(20)
    print("went on")
"""

PRINTED = """
def answer(config):
    try:
        ctrl_c()
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())  # as PyErr_Print of C does, in many an import
        raise ImportError("core failed to import")
"""


CRASHING = """
import atexit
def answer(config):
    atexit.register(os.abort)  # as XLA does, where the process ends while it compiles
    ctrl_c()
"""


@pytest.mark.parametrize("code", [LOST, PRINTED, CRASHING])
def test_ctrl_c_in_a_callback_interrupts_without_a_traceback(code, tmp_path):
    done = run(tmp_path / "interrupted.py", code + ANSWERED_BY, PRICE, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "dpsgd: interrupted\n")


def test_worker_processes_block_ctrl_c_from_their_start():
    (blocked,) = each(partial(signal.pthread_sigmask, signal.SIG_BLOCK), [()], 1)
    assert blocked == {signal.SIGINT}
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()


SOON_AFTER = """
import {module} as module
original = module.{function}
def then(*args, **kwargs):
    if module.{function} is then:  # the first time
        module.{function} = original
        threading.Timer(0.3, os.killpg, (0, signal.SIGINT)).start()
    return original(*args, **kwargs)
module.{function} = then
"""


SWEEP = """
title = "One run"
repetitions = 2
[[grid]]
x = "noise_multiplier"
sampler = "poisson"
noise_multiplier = 1
batch_size = 20
epochs = 1
"""
SWEPT = ["sweep", "one.toml", "store", "--out", "found", "--workers", "1"]
GOES_ON = "stopped with 2 runs left: the same command resumes"


@pytest.mark.long
@pytest.mark.parametrize(
    ("module", "function", "words", "said", "status"),
    [
        ("concurrent.futures", "ProcessPoolExecutor.submit", ALL, "interrupted", 130),
        ("experiments.sweeps.workers", "_Worker._start", SWEPT, GOES_ON, 75),
    ],
)
def test_importing_processes_print_nothing_at_ctrl_c(
    module, function, words, said, status, tmp_path
):
    synthetic.write_store(tmp_path / "store", 200, seed=0)
    (tmp_path / "one.toml").write_text(SWEEP)
    code = SOON_AFTER.format(module=module, function=function)
    done = run(tmp_path / "command.py", code, words, tmp_path)
    assert (done.stderr, done.returncode) == (f"dpsgd: {said}\n", status)
    assert not (tmp_path / "page.png").exists()
