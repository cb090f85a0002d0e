"""Help of commands: usage, description and options by group."""

from __future__ import annotations

import argparse
import inspect
import re
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import MISSING
from typing import Any, TypeVar

from experiments.cli.options import Option, add_arguments, build, options_of, parse

_T = TypeVar("_T")


def asked_of(kind: type[_T], words: Sequence[str], command: str, about: str = "") -> _T:
    """Parses a program's words to a dataclass, or prints help.

    Args:
      kind: Dataclass of the program's options.
      words: Words after the program's name.
      command: Name of the program.
      about: Description in the help; by default the dataclass's docstring.

    Raises:
      ValueError: If an option is unknown, missing or has a wrong value; the message names it.
      SystemExit: After the help was printed.
    """
    options = options_of(kind)
    if {"--help", "-h"} & {*words}:
        print(help_text(options, command, about or kind.__doc__ or ""))
        raise SystemExit
    return build(kind, parse(options, words, command))


def help_text(options: Sequence[Option], command: str, about: str) -> str:
    """Returns the help of a command.

    Args:
      options: All options of the command.
      command: Words of the command.
      about: Docstring of the command's question, as its description.
    """
    width = shutil.get_terminal_size().columns
    needed = [f"{option.flag} {option.metavar}" for option in options if _needed(option)]
    places = [_place(option) for option in options if option.place]
    usage = " ".join(["usage:", command, *needed, "[OPTIONS]", *places])
    indent = " " * len("usage: ")
    lines = textwrap.wrap(usage, width, subsequent_indent=indent, break_on_hyphens=False)
    parser = argparse.ArgumentParser(
        add_help=False, usage=argparse.SUPPRESS, formatter_class=_formatter(width)
    )
    parser.description = paragraphs(about, width)
    groups: dict[str, Any] = {}
    for option in (option for option in options if option.place):
        first = parser.add_argument_group("arguments") if not groups else groups["arguments"]
        groups["arguments"] = first
        first.add_argument(option.name, metavar=option.flag, help=option.help.replace("%", "%%"))
    groups["options"] = parser.add_argument_group("options")
    groups["options"].add_argument("-h", "--help", action="store_true", help="Show this help.")
    add_arguments(parser, [option for option in options if not option.place], groups)
    return "\n".join([*lines, "", parser.format_help().strip()])


def _needed(option: Option) -> bool:
    return option.default is MISSING and not option.place


def _place(option: Option) -> str:
    name = f"{option.flag} [...]" if option.length else option.flag
    return name if option.default is MISSING else f"[{name}]"


def _formatter(width: int) -> Any:
    return lambda prog: argparse.RawDescriptionHelpFormatter(
        prog, width=width, max_help_position=24
    )


def paragraphs(text: str, width: int) -> str:
    """Fills the paragraphs of a docstring, without its attributes.

    Args:
      text: Docstring.
      width: Width of the terminal in columns.

    >>> paragraphs("Train a task. Write a run directory.", 20)
    'Train a task. Write\\na run directory.'
    """
    text = inspect.cleandoc(text).partition("\nAttributes:")[0]
    blocks = []
    for block in re.split(r"\n{2,}", text.strip()):
        plain = not block.startswith(" ")
        blocks.append(textwrap.fill(" ".join(block.split()), width) if plain else block)
    return "\n\n".join(blocks)
