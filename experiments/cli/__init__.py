"""The command `dpsgd`: prepare data, train, evaluate, and ask what a sampler costs.

Its first words choose a question, a dataclass in `experiments.cli.questions`; the other words fill
its options. Only then is the module of `experiments.cli.commands` imported that answers it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Sequence
from typing import Any

import dpsgd
from accounting.records import near
from dpsgd.removed import removal_notice
from dpsgd.runs.stop import INTERRUPTED
from experiments.cli import options
from experiments.cli.console import going_on
from experiments.cli.errors import in_one_line
from experiments.cli.program_cache import keep_programs

COMMANDS = {
    "prepare csv": ("prepare", "Turn your own table into a store that `dpsgd train` reads."),
    "prepare criteo-display": ("prepare", "Turn the Criteo Display Ads data into a store."),
    "prepare criteo-search": ("prepare", "Turn the Criteo Sponsored Search log into a store."),
    "prepare tfds": ("prepare", "Turn a data set of TensorFlow Datasets into a store."),
    "prepare synthetic": ("prepare", "Generate rows like those of a Criteo data set."),
    "train": ("runs", "Train a task privately and write a run directory with its guarantee."),
    "batches": ("directories", "Draw the batches of a run ahead, for rows without random access."),
    "resume": ("directories", "Resume a run that was stopped, from its last checkpoint."),
    "sweep": ("results", "Carry out every run that a file asks for; write table and figure."),
    "ledger": ("directories", "Print what a run has released so far and what that costs."),
    "evaluate": ("models", "Score labelled rows with a model; compare with their labels."),
    "score": ("models", "Write the probabilities that a model gives to the rows of a file."),
    "export": ("models", "Write the model and the guarantee of a finished run to a new folder."),
    "results": ("results", "Print, export and draw the table of finished runs."),
    "report": ("results", "Write one self-contained HTML page about finished runs and sweeps."),
    "epsilon": ("costs", "Print the certified epsilon of a run, as [lower, upper]."),
    "calibrate": ("costs", "Print the smallest noise multiplier for an epsilon."),
    "compare": ("costs", "Print and draw the certified epsilon of every sampler over the noise."),
    "contributions": ("contributions", "Look at how much users contribute, and what a cap costs."),
    "choose": ("contributions", "Choose a linear model of ratings from a finite class, privately."),
    "audit": ("audit", "Look for evidence that a run costs more than its guarantee says."),
}
"""Each command: its subject, and its summary.

`experiments.cli.questions.SUBJECT` has a class, called as all words of the command, of what it can
be asked; `experiments.cli.commands.SUBJECT`, or another that the class names, has a function,
called as the first word, that answers.
"""

started = time.monotonic()
"""Time at which the command began, by the monotonic clock; at first that of this import."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; errors that a user can mend end in one line and exit status 2.

    Args:
      argv: Words after `dpsgd`. Default: those of the process, which Ctrl-C then ends at once: XLA
        crashes if the interpreter shuts down while it compiles.
    """
    global started
    words = list(sys.argv[1:] if argv is None else argv)
    started = started if argv is None else time.monotonic()

    def run() -> int:
        if argv is None:
            keep_programs()
        collecting = gc.isenabled()
        gc.disable()  # imports and options leave no garbage, and are a fifth faster for it
        try:
            if (answer := help_of(words)) is not None:
                print(answer)
                return 0
            name, asked, flags = parse(words)
        finally:
            if collecting:
                gc.enable()
        return answer_to(name, asked, flags)

    status = in_one_line("dpsgd", run)
    if argv is None and status == INTERRUPTED:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(status)
    return status


def answer_to(name: str, asked: Any, known: Sequence[options.Option]) -> int:
    """Runs a command; errors name options as the command has them.

    Args:
      name: Name of the command.
      asked: Question.
      known: Options of the command whose names errors may have.
    """
    try:
        asked.check()
        with going_on("starting"):
            subject = asked.ANSWERED_BY or COMMANDS[name][0]
            module = importlib.import_module(f"experiments.cli.commands.{subject}")
        return getattr(module, name.split()[0])(asked) or 0
    except ValueError as error:
        if known:
            raise ValueError(options.with_flags(error, known)) from error
        raise


def question_of(words: Sequence[str]) -> tuple[str, Any, list[str]]:
    """Returns the name of a command, the class of its question, and its further words.

    Raises:
      ValueError: If the first words are no command.
    """
    first, *rest = words or [""]
    if notice := removal_notice("command", first):
        raise ValueError(f"dpsgd {first} was {notice}")
    topics = [name.split()[1] for name in COMMANDS if name.startswith(f"{first} ")]
    if topics:
        if rest[:1] and rest[0] not in topics:
            raise ValueError(f"dpsgd {first} takes no {rest[0]}{near(rest[0], topics)}")
        if not rest:
            raise ValueError(f"dpsgd {first} needs one of {', '.join(topics)}")
        first, rest = f"{first} {rest[0]}", rest[1:]
    if first not in COMMANDS:
        names = list(dict.fromkeys(name.split()[0] for name in COMMANDS))
        wrong = f"there is no command {first!r}" if first else "name a command"
        raise ValueError(f"{wrong}{near(first, names)}")
    subject = COMMANDS[first][0]
    module = importlib.import_module(f"experiments.cli.questions.{subject}")
    return first, getattr(module, first.title().replace("-", "").replace(" ", "")), rest


def parse(words: Sequence[str]) -> tuple[str, Any, list[options.Option]]:
    """Returns the name of a command, its question, and the options that errors may name.

    Raises:
      ValueError: If the words name no command, or no values of its options.
    """
    name, kind, rest = question_of(words)
    options.check_removed(rest)
    rest = with_sampler(rest)
    known = kind.options(rest)
    values = options.parse(known, rest, f"dpsgd {name}", kind.elsewhere)
    named = [
        one for one in known if one.group not in ("options", "task options") or "_" in one.name
    ]
    try:
        return name, kind.of(values), named if kind.ABOUT_RUN else []
    except ValueError as error:
        raise ValueError(options.with_flags(error, named)) from None


def with_sampler(words: Sequence[str]) -> list[str]:
    """Returns the words of a command with `--sampler=NAME` in place of `sampler:NAME`."""
    prefix = "sampler:"
    return [f"--sampler={w.removeprefix(prefix)}" if w.startswith(prefix) else w for w in words]


def help_of(words: Sequence[str]) -> str | None:
    """Returns the help, or the version, that words ask for; None if they ask for neither."""
    if words[:1] == ["--version"]:
        return f"dpsgd {dpsgd.__version__}"
    if not {"--help", "-h"} & {*words}:
        return None
    rest = [word for word in words if word not in ("--help", "-h")]
    if not rest or (len(rest) == 1 and f"{rest[0]} csv" in COMMANDS):
        return usage(rest[0] if rest else "")
    name, kind, rest = question_of(rest)
    known = kind.options(with_sampler(rest))
    return options.help_text(known, f"dpsgd {name}", kind.__doc__ or "")


def usage(first: str) -> str:
    """Returns the commands, or those that begin with a word, with their summaries."""
    shown = {name: what for name, (_, what) in COMMANDS.items() if name.startswith(first)}
    room = max(map(len, shown))
    lines = [
        f"usage: dpsgd {first or 'COMMAND'} ...",
        "",
        "Private training with a guarantee that the batch sampler has earned.",
        "",
        *(f"  {name:{room}}  {what}" for name, what in shown.items()),
        "",
        "`dpsgd COMMAND --help` lists the options of a command.",
    ]
    width = shutil.get_terminal_size().columns
    below = {True: " " * (room + 4), False: ""}
    return "\n".join(
        textwrap.fill(line, width, subsequent_indent=below[line[:1] == " "]) for line in lines
    )
