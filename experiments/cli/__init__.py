"""The command `dpsgd`: prepare data, train, evaluate, and ask what a sampler costs.

The first words choose a question, a dataclass in `experiments.cli.questions` with the options of
the command; the other words set them. Then the module in `experiments.cli.commands` that carries
out the command is imported.
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
from experiments.cli.help import help_text
from experiments.cli.program_cache import keep_programs

COMMANDS = {
    "prepare csv": ("prepare", "Turn your own table into a store that `dpsgd train` reads."),
    "prepare criteo-display": ("prepare", "Turn the Criteo Display Ads data into a store."),
    "prepare criteo-search": ("prepare", "Turn the Criteo Sponsored Search log into a store."),
    "prepare tfds": ("prepare", "Turn a data set of TensorFlow Datasets into a store."),
    "prepare synthetic": ("prepare", "Generate rows like those of a Criteo data set."),
    "train": ("runs", "Train a task privately and write a run directory with its guarantee."),
    "batches": ("directories", "Draw the batches in advance, for rows without random access."),
    "resume": ("directories", "Resume a run that was stopped, from its last checkpoint."),
    "sweep": ("results", "Train every run of a sweep file; write their table and figure."),
    "ledger": ("directories", "Print the releases of a run so far, and their privacy cost."),
    "evaluate": ("models", "Score labelled rows with a model; print metrics."),
    "score": ("models", "Write the probabilities that a model gives to the rows of a file."),
    "export": ("models", "Write the model and the guarantee of a finished run to a new folder."),
    "results": ("results", "Print, export and draw the table of finished runs."),
    "report": ("results", "Write one self-contained HTML page about finished runs and sweeps."),
    "epsilon": ("costs", "Print the certified epsilon of a run, as [lower, upper]."),
    "calibrate": ("costs", "Print the smallest noise multiplier for an epsilon."),
    "compare": ("costs", "Print and draw the certified epsilon of every sampler over the noise."),
    "contributions": ("contributions", "Print how much users contribute, and what a cap costs."),
    "choose": ("contributions", "Choose a linear model of ratings from a finite class, privately."),
    "audit": ("audit", "Look for evidence that a run costs more than its guarantee says."),
}
"""Subject and summary of each command.

`experiments.cli.questions.SUBJECT` has the question, a class named by all words of the command.
`experiments.cli.commands.SUBJECT`, or the module that the class names, has the function that
carries it out, named by the first word.
"""

started = time.monotonic()
"""Start of the command on the monotonic clock, in seconds; initially the time of this import."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status.

    Errors that a user can mend are printed in one line, with exit status 2.

    Args:
      argv: Words after `dpsgd`. Default: the arguments of the process, which Ctrl-C then ends at
        once, because XLA crashes if the interpreter shuts down during compilation.
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
            name, question, flags = parse(words)
        finally:
            if collecting:
                gc.enable()
        return answer_to(name, question, flags)

    status = in_one_line("dpsgd", run)
    if argv is None and status == INTERRUPTED:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(status)
    return status


def answer_to(name: str, question: Any, flags: Sequence[options.Option]) -> int:
    """Runs a command and returns its exit status.

    Args:
      name: Name of the command.
      question: Options of the command with their values.
      flags: Options that errors may name; their names are printed as `--name`.
    """
    try:
        question.check()
        with going_on("starting"):
            subject = question.ANSWERED_BY or COMMANDS[name][0]
            module = importlib.import_module(f"experiments.cli.commands.{subject}")
        return getattr(module, name.split()[0])(question) or 0
    except ValueError as error:
        if flags:
            raise ValueError(options.with_flags(error, flags)) from error
        raise


def question_of(words: Sequence[str]) -> tuple[str, Any, list[str]]:
    """Returns a command's name, question class and remaining words.

    Raises:
      ValueError: If the first words are no command.

    >>> question_of(["prepare", "csv", "log.csv"])
    ('prepare csv', <class 'experiments.cli.questions.prepare.PrepareCsv'>, ['log.csv'])
    """
    first, *further_words = words or [""]
    if notice := removal_notice("command", first):
        raise ValueError(f"dpsgd {first} was {notice}")
    topics = [name.split()[1] for name in COMMANDS if name.startswith(f"{first} ")]
    if topics:
        if further_words[:1] and further_words[0] not in topics:
            raise ValueError(
                f"dpsgd {first} takes no {further_words[0]}{near(further_words[0], topics)}"
            )
        if not further_words:
            raise ValueError(f"dpsgd {first} needs one of {', '.join(topics)}")
        first, further_words = f"{first} {further_words[0]}", further_words[1:]
    if first not in COMMANDS:
        names = list(dict.fromkeys(name.split()[0] for name in COMMANDS))
        wrong = f"there is no command {first!r}" if first else "name a command"
        raise ValueError(f"{wrong}{near(first, names)}")
    subject = COMMANDS[first][0]
    module = importlib.import_module(f"experiments.cli.questions.{subject}")
    return first, getattr(module, first.title().replace("-", "").replace(" ", "")), further_words


def parse(words: Sequence[str]) -> tuple[str, Any, list[options.Option]]:
    """Returns a command's name, its question and options for errors.

    Raises:
      ValueError: If a command or an option is unknown, or an option has a wrong value.
    """
    name, kind, further_words = question_of(words)
    options.check_removed(further_words)
    further_words = with_sampler(further_words)
    command_options = kind.options(further_words)
    values = options.parse(command_options, further_words, f"dpsgd {name}", kind.elsewhere)
    named = [
        option
        for option in command_options
        if option.group not in ("options", "task options") or "_" in option.name
    ]
    try:
        return name, kind.build(values), named if kind.ABOUT_RUN else []
    except ValueError as error:
        raise ValueError(options.with_flags(error, named)) from None


def with_sampler(words: Sequence[str]) -> list[str]:
    """Replaces `sampler:NAME` by `--sampler=NAME`.

    >>> with_sampler(["store", "sampler:poisson"])
    ['store', '--sampler=poisson']
    """
    prefix = "sampler:"
    return [f"--sampler={w.removeprefix(prefix)}" if w.startswith(prefix) else w for w in words]


def help_of(words: Sequence[str]) -> str | None:
    """Returns the requested help or version text, or None."""
    if words[:1] == ["--version"]:
        return f"dpsgd {dpsgd.__version__}"
    if not {"--help", "-h"} & {*words}:
        return None
    other_words = [word for word in words if word not in ("--help", "-h")]
    if not other_words or (len(other_words) == 1 and f"{other_words[0]} csv" in COMMANDS):
        return usage(other_words[0] if other_words else "")
    name, kind, other_words = question_of(other_words)
    command_options = kind.options(with_sampler(other_words))
    if sampler := [word for word in other_words if word.startswith("sampler:")]:
        command_options = [option for option in command_options if option.name != "sampler"]
    return help_text(command_options, " ".join(["dpsgd", name, *sampler]), kind.__doc__ or "")


def usage(first: str) -> str:
    """Returns the list of commands with their summaries.

    Args:
      first: First word of the listed commands, such as "prepare"; "" lists all.
    """
    summaries = {name: summary for name, (_, summary) in COMMANDS.items() if name.startswith(first)}
    room = max(map(len, summaries))
    lines = [
        f"usage: dpsgd {first or 'COMMAND'} ...",
        "",
        "Train models with differential privacy, at the certified cost of the batch sampler.",
        "",
        *(f"  {name:{room}}  {summary}" for name, summary in summaries.items()),
        "",
        "`dpsgd COMMAND --help` lists the options of a command.",
    ]
    width = shutil.get_terminal_size().columns
    below = {True: " " * (room + 4), False: ""}
    return "\n".join(
        textwrap.fill(line, width, subsequent_indent=below[line[:1] == " "]) for line in lines
    )
