"""The command `dpsgd`: prepare data, train, evaluate, and ask what a sampler costs.

The first word chooses the module of `experiments.cli.commands` that is imported, and each imports
what it computes with only when it runs: an answer waits for nothing that it does not need.
"""

from __future__ import annotations

import contextlib
import difflib
import gc
import importlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, get_type_hints

import dpsgd
from dpsgd.removed import removal_notice
from dpsgd.runs.stop import INTERRUPTED
from experiments.cli.errors import in_one_line
from experiments.cli.program_cache import NOT_KEPT, keep_programs

COMMANDS = {
    "prepare": "Turn raw data into a store that `dpsgd train` reads.",
    "train": "Train a task privately and write a run directory with its guarantee.",
    "batches": "Draw the batches of a run ahead, for rows that only a scan can read.",
    "resume": "Resume a run that was stopped, from its last checkpoint.",
    "sweep": "Carry out every run that a file asks for; write their table and figure.",
    "ledger": "Print what a run has released so far and what that costs.",
    "evaluate": "Score labelled rows, raw or prepared, with a model; compare with their labels.",
    "score": "Write the probabilities that a model gives to the rows of a file.",
    "export": "Write the model and the guarantee of a finished run to a new folder.",
    "results": "Print, export and draw the table of finished runs.",
    "report": "Write one self-contained HTML page about finished runs and sweeps.",
    "epsilon": "Print the certified epsilon of a run, as [lower, upper].",
    "calibrate": "Print the smallest noise multiplier for an epsilon.",
    "compare": "Print and draw the certified epsilon of every sampler over the noise.",
    "contributions": "Look at how much users contribute, and at what a cap would cost.",
    "choose": "Choose a linear model of ratings from a finite class, private for users.",
    "audit": "Look for evidence that a run costs more privacy than its guarantee says.",
}
"""What `dpsgd --help` says of each module of `experiments.cli.commands`.

Such a module has a function `run`: the type of its argument is what can be asked, or `command` of
the words returns it. One with several topics names them in `TOPICS`.
"""


started = time.monotonic()
"""When the present command began: that of the process itself, when this is imported."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; what a user can mend ends in one clear line and exit status 2.

    Where the command is the process's own, Ctrl-C ends the process as well: XLA goes on with what
    it compiles, and crashes where the interpreter is taken down under it.
    """
    global started
    words = list(sys.argv[1:] if argv is None else argv)
    started = started if argv is None else time.monotonic()

    def run() -> int:
        if words[:1] in (["--help"], ["-h"]):
            print(usage())
            return 0
        if words[:1] == ["--version"]:
            print(f"dpsgd {dpsgd.__version__}")
            return 0
        if argv is None:
            keep_programs(words)
        collecting = gc.isenabled()
        gc.disable()  # imports and options leave no garbage, and are a fifth faster for it
        try:
            answer, config = parse([word for word in words if word != NOT_KEPT])
        finally:
            if collecting:
                gc.enable()
        return answer(config) or 0

    status = in_one_line("dpsgd", run)
    if argv is None and status == INTERRUPTED:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(status)
    return status


def parse(words: Sequence[str]) -> tuple[Callable[[Any], int | None], Any]:
    """Returns the function that answers `dpsgd WORDS`, and what it is asked.

    Raises:
      ValueError: if the first word is no command.
      SystemExit: where the others ask for help, or are wrong, once that is said.
    """
    name, *rest = words or [""]
    if notice := removal_notice("command", name):
        raise ValueError(f"dpsgd {name} was {notice}")
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, 1)
        hint = f": did you mean {near[0]}?" if near else f"; there are {', '.join(COMMANDS)}"
        raise ValueError(f"there is no command {name!r}{hint}" if name else f"name a command{hint}")
    from experiments.cli import options

    module = importlib.import_module(f"experiments.cli.commands.{name}")
    if hasattr(module, "command"):  # what can be asked depends on what is asked
        kind = module.command(rest)
    else:
        hints = get_type_hints(module.run)
        kind = options.command(next(hint for name, hint in hints.items() if name != "return"))
    topic = [word for word in rest[:1] if word in getattr(module, "TOPICS", ())]
    command = " ".join(["dpsgd", name, *topic])
    return module.run, options.parse(kind, rest, command)


def usage() -> str:
    """Returns what can be asked."""
    import shutil
    import textwrap

    lines = [
        "usage: dpsgd COMMAND ...",
        "",
        "Private training with a guarantee that the batch sampler has earned.",
        "",
        *(f"  {name:13}  {what}" for name, what in COMMANDS.items()),
        "",
        "`dpsgd COMMAND --help` lists the settings of a command.",
        f"{NOT_KEPT}, with any of them, keeps no compiled program for the next one.",
    ]
    width = shutil.get_terminal_size().columns
    below = {True: " " * 17, False: ""}
    return "\n".join(
        textwrap.fill(line, width, subsequent_indent=below[line[:1] == " "]) for line in lines
    )
