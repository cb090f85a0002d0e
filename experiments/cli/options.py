"""Options of commands: one flat table, made of dataclasses, that argparse and the help read."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import inspect
import itertools
import re
import shutil
import sys
import textwrap
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, NoReturn, TypeVar, Union

from accounting.records import (
    Refused,
    field_texts,
    field_types,
    named,
    read,
)
from dpsgd.removed import removal_notice

_T = TypeVar("_T")
PLACE = "place"
"""Mark of a field that is given by its place, without its name."""

_NAMES = (
    "target-epsilon epsilon eps",
    "target-delta delta",
    "learning-rate lr step-size rate",
    "noise-multiplier noise-multipliers noise sigma noise-scale",
    "l2-clip-norm clip clip-norm clipping-norm max-grad-norm l2-norm-clip C",
    "batch-size batch lot-size expected-batch-size",
    "epochs num-epochs passes",
    "steps num-steps iterations max-steps",
    "num-examples num-rows examples dataset-size sample-size rows n",
    "non-private no-privacy disable-dp",
    "insecure-seed seed",
    "num-devices devices gpus",
    "bands num-bands bandwidth",
    "out output output-dir logdir plot",
    "plot out figure",
    "label target labels",
    "categories categorical categoricals",
    "numbers numeric numerical",
)
"""Names of options, each followed by its names in other libraries."""


@dataclass(frozen=True)
class Option:
    """One option of a command.

    Attributes:
      name: Name in Python.
      hint: Annotation of its values.
      default: Value if it is not given; MISSING if it must be given.
      text: Description.
      group: Heading in the help.
      place: Whether it is given by its place.
    """

    name: str
    hint: Any
    default: Any = MISSING
    text: str = ""
    group: str = "options"
    place: bool = False

    @property
    def flag(self) -> str:
        """Words that give it: `--batch-size`, or `DATA` by its place."""
        return self.name.upper() if self.place else f"--{self.name.replace('_', '-')}"

    @property
    def switch(self) -> bool:
        """Whether it takes no value."""
        return self.hint is bool

    @property
    def length(self) -> int | str | None:
        """Number of values: None for one, "*" for a list."""
        for kind in (self.hint, *_parts(self.hint)):
            if typing.get_origin(kind) is tuple:
                items = typing.get_args(kind)
                return "*" if items[1:] == (...,) else len(items)
        return None

    @property
    def metavar(self) -> str:
        """Kind of the values in the help."""
        return "" if self.switch else _metavar(self.hint)

    @property
    def help(self) -> str:
        """Description with the default."""
        if self.default is MISSING:
            return f"{self.text} (required)"
        if self.default is None or self.default is False or self.default == () or self.place:
            return self.text
        many = isinstance(self.default, tuple)
        shown = " ".join(map(str, self.default)) if many else self.default
        return f"{self.text} (default: {shown})"


def _parts(hint: Any) -> tuple[Any, ...]:
    """Returns the members of a union within annotations, without None."""
    if typing.get_origin(hint) is Annotated:
        return _parts(typing.get_args(hint)[0])
    if typing.get_origin(hint) in (Union, UnionType):
        parts = [part for one in typing.get_args(hint) for part in _parts(one)]
        return tuple(part for part in parts if part is not type(None))
    return (hint,)


def _metavar(hint: Any) -> str:
    kinds = []
    for kind in _parts(hint):
        items = typing.get_args(kind)
        if typing.get_origin(kind) is Literal:
            kinds.append(f"{{{','.join(map(str, items))}}}")
        elif typing.get_origin(kind) is tuple:
            kinds.append(_metavar(items[0]))
        else:
            kinds.append(
                {str: "TEXT", bool: "{true,false}"}.get(
                    kind, getattr(kind, "__name__", "VALUE").upper()
                )
            )
    return "|".join(dict.fromkeys(kinds))


def options_of(kind: type, group: str = "options") -> list[Option]:
    """Returns the options of a dataclass.

    Args:
      kind: Dataclass; a field that is a dataclass makes a group.
      group: Heading of the other fields.
    """
    texts, hints, options = field_texts(kind), field_types(kind), []
    for name, attribute in named(kind).items():
        hint, field = hints[attribute], kind.__dataclass_fields__[attribute]  # type: ignore[attr-defined]
        if attribute in getattr(kind, "MADE", ()) or not field.init:
            continue
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            options += options_of(hint, f"{attribute} options")
        else:
            made = field.default_factory
            default = field.default if made is MISSING else made()
            place = PLACE in getattr(hint, "__metadata__", ())
            options.append(Option(name, hint, default, texts.get(attribute, ""), group, place))
    return options


def made(kind: type[_T], values: Mapping[str, Any], **others: Any) -> _T:
    """Returns a dataclass made of the values of its options, and of its groups.

    Args:
      kind: Dataclass to make.
      values: Values of options by name; others are left out.
      **others: Values of fields that are no options.
    """
    fields = dict(others)
    for name, attribute in named(kind).items():
        hint = field_types(kind)[attribute]
        if attribute in others:
            continue
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            fields[attribute] = made(hint, values)
        elif name in values:
            fields[attribute] = values[name]
    return kind(**fields)


# --- Words of a command ---------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message.removeprefix("argument "))


def parse(
    options: Sequence[Option],
    words: Sequence[str],
    command: str,
    elsewhere: Callable[[str], str] = lambda name: "",
) -> dict[str, Any]:
    """Returns the values that words give to options, by name, defaults included.

    Args:
      options: Options of the command.
      words: Words after the command.
      command: Words of the command, for messages.
      elsewhere: Returns where an unknown option belongs, in words.

    Raises:
      ValueError: If an option is unknown, missing or has a wrong value; the line names it.
    """
    check_removed(words)
    parser = _Parser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    _add(parser, [option for option in options if not option.place], {})
    try:
        given, rest = parser.parse_known_args(list(words))
    except ValueError as error:
        raise ValueError(f"{error}; `{command} --help` lists the options") from None
    found = vars(given)
    for word in rest:
        if word.startswith("--"):
            flag = word.partition("=")[0]
            more = elsewhere(flag.removeprefix("--").replace("-", "_"))
            raise ValueError(unknown(flag, options, command, more))
    found |= _placed([option for option in options if option.place], rest, command)
    if missing := [o for o in options if o.default is MISSING and o.name not in found]:
        missing.sort(key=lambda one: not one.place)
        needed = " and ".join(o.flag if o.place else f"{o.flag} {o.metavar}" for o in missing)
        raise ValueError(f"{command} needs {needed}; `{command} --help` lists the options")
    defaults = {one.name: one.default for one in options if one.default is not MISSING}
    try:
        values = {
            one.name: read(one.hint, found[one.name], (one.name,), words=True)
            for one in options
            if one.name in found
        }
    except Refused as error:
        raise ValueError(with_flags(error, options)) from None
    return defaults | values


def asked_of(kind: type[_T], words: Sequence[str], command: str, about: str = "") -> _T:
    """Returns the dataclass that the words of a program make, or prints its help.

    Args:
      kind: Dataclass of the program's options.
      words: Words after the program's name.
      command: Name of the program.
      about: Text of the help; by default the dataclass's docstring.

    Raises:
      ValueError: If an option is unknown, missing or has a wrong value; the line names it.
      SystemExit: After the help.
    """
    options = options_of(kind)
    if {"--help", "-h"} & {*words}:
        print(help_text(options, command, about or kind.__doc__ or ""))
        raise SystemExit
    return made(kind, parse(options, words, command))


def _placed(options: Sequence[Option], words: list[str], command: str) -> dict[str, Any]:
    """Returns the words in the places of options; a list takes the remaining ones."""
    found: dict[str, Any] = {}
    for number, option in enumerate(options, 1):
        count = len(words) - (len(options) - number) if option.length else min(1, len(words))
        if count > 0:
            found[option.name] = words[:count] if option.length else words[0]
            words = words[count:]
    if words:
        raise ValueError(f"{command} takes no {words[0]}; `{command} --help` lists the options")
    return found


def word_of(words: Sequence[str], name: str) -> str | None:
    """Returns the value of one option, before the others are known; None if it is absent.

    Args:
      words: Words of a command.
      name: Name of the option, without dashes.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument(f"--{name}", metavar="NAME")
    return getattr(parser.parse_known_args(list(words))[0], name)


def _add(parser: Any, options: Iterable[Option], groups: dict[str, Any]) -> None:
    for option in options:
        if (group := groups.get(option.group)) is None:
            group = groups[option.group] = parser.add_argument_group(option.group)
        how: dict[str, Any] = {"help": option.help.replace("%", "%%")}
        if option.switch:
            both = argparse.BooleanOptionalAction if option.default else "store_true"
            group.add_argument(option.flag, action=both, **how)
        else:
            how |= {"nargs": option.length, "metavar": option.metavar}
            group.add_argument(option.flag, **how)


def check_removed(words: Sequence[str]) -> None:
    """Raises ValueError for an option, or a value, that was removed."""
    for word, following in itertools.pairwise([*words, ""]):
        option, equals, value = word.partition("=")
        if option.startswith("--") and (
            notice := removal_notice(option, value if equals else following)
        ):
            raise ValueError(f"{option} was {notice}")


def unknown(flag: str, options: Sequence[Option], command: str, more: str = "") -> str:
    """Returns the line about an unknown option.

    Args:
      flag: Word that names it.
      options: Options of the command.
      command: Words of the command.
      more: Where the option belongs, in words.
    """
    known = {one.flag.removeprefix("--") for one in options if not one.place}
    name = flag.removeprefix("--")
    if more:
        return f"{command} has no option {flag}; {more}"
    meant = [one.split()[0] for one in _NAMES if name in one.split() and one.split()[0] in known]
    meant = meant or difflib.get_close_matches(name.replace("_", "-"), sorted(known), 1, 0.7)
    hint = f": did you mean --{meant[0]}?" if meant else f"; `{command} --help` lists them"
    return f"{command} has no option {flag}{hint}"


def with_flags(error: ValueError, options: Iterable[Option]) -> str:
    """Returns the line of an error with the names of options as a command has them.

    Renamed are the first word of the line, and names with an underscore that are no part of a path.

    Args:
      error: Error whose line has names in Python's spelling.
      options: Options of the command.
    """
    flags = {one.name: one.flag for one in options}
    line = str(error)
    first = re.match(r"\w+", line)
    if first and "_" not in first[0]:
        line = flags.get(first[0], first[0]) + line[first.end() :]
    return re.sub(r"(?<![\w/.-])\w+_\w+\b", lambda found: flags.get(found[0], found[0]), line)


# --- Help -----------------------------------------------------------------------------------------


def help_text(options: Sequence[Option], command: str, about: str) -> str:
    """Returns the help of a command: required options, description and all options.

    Args:
      options: All options of the command.
      command: Words of the command.
      about: Docstring that describes the command.
    """
    width = shutil.get_terminal_size().columns
    needed = [f"{one.flag} {one.metavar}" for one in options if _needed(one)]
    places = [_place(one) for one in options if one.place]
    usage = " ".join(["usage:", command, *needed, "[OPTIONS]", *places])
    indent = " " * len("usage: ")
    lines = textwrap.wrap(usage, width, subsequent_indent=indent, break_on_hyphens=False)
    parser = _Parser(add_help=False, usage=argparse.SUPPRESS, formatter_class=_formatter(width))
    parser.description = paragraphs(about, width)
    groups: dict[str, Any] = {}
    for option in (one for one in options if one.place):
        first = parser.add_argument_group("arguments") if not groups else groups["arguments"]
        groups["arguments"] = first
        first.add_argument(option.name, metavar=option.flag, help=option.help.replace("%", "%%"))
    groups["options"] = parser.add_argument_group("options")
    groups["options"].add_argument("-h", "--help", action="store_true", help="Show this help.")
    _add(parser, [one for one in options if not one.place], groups)
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
    """Returns a docstring without its attributes, with paragraphs filled.

    Args:
      text: Docstring.
      width: Width of the terminal in columns.
    """
    text = inspect.cleandoc(text).partition("\nAttributes:")[0]
    blocks = []
    for block in re.split(r"\n{2,}", text.strip()):
        plain = not block.startswith(" ")
        blocks.append(textwrap.fill(" ".join(block.split()), width) if plain else block)
    return "\n\n".join(blocks)


def look_in_the_current_folder() -> None:
    """Adds the current folder to the end of Python's path."""
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
