"""Options of commands: a flat table, built from dataclasses, for argparse."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import itertools
import re
import sys
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
"""Annotation of a positional argument."""

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
"""Names of options, each followed by its synonyms in other libraries."""


@dataclass(frozen=True)
class Option:
    """One option of a command.

    Attributes:
      name: Name in Python.
      hint: Type annotation of its values.
      default: Default value; MISSING if the option is required.
      text: Description.
      group: Heading in the help.
      place: Whether it is a positional argument.

    >>> option = Option("batch_size", int | None, 1024, "Batch size b.")
    >>> option.flag, option.metavar, option.help
    ('--batch-size', 'INT', 'Batch size b. (default: 1024)')
    """

    name: str
    hint: Any
    default: Any = MISSING
    text: str = ""
    group: str = "options"
    place: bool = False

    @property
    def flag(self) -> str:
        """Name on the command line: `--batch-size`; `DATA` if positional."""
        return self.name.upper() if self.place else f"--{self.name.replace('_', '-')}"

    @property
    def switch(self) -> bool:
        """True if the option takes no value."""
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
        """Type of the values, as the help shows it."""
        return "" if self.switch else _metavar(self.hint)

    @property
    def help(self) -> str:
        """Description with the default."""
        if self.default is MISSING:
            return f"{self.text} (required)"
        if self.default is None or self.default is False or self.default == () or self.place:
            return self.text
        is_list = isinstance(self.default, tuple)
        default = " ".join(map(str, self.default)) if is_list else self.default
        return f"{self.text} (default: {default})"


def _parts(hint: Any) -> tuple[Any, ...]:
    """Returns the members of a union within annotations, without None."""
    if typing.get_origin(hint) is Annotated:
        return _parts(typing.get_args(hint)[0])
    if typing.get_origin(hint) in (Union, UnionType):
        members = [member for member in typing.get_args(hint) for member in _parts(member)]
        return tuple(member for member in members if member is not type(None))
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
      kind: Dataclass; each field whose type is a dataclass becomes a group of options.
      group: Heading of the other fields.

    >>> @dataclass
    ... class Run:
    ...     epochs: int = 3
    >>> [option.flag for option in options_of(Run)]
    ['--epochs']
    """
    texts, hints, options = field_texts(kind), field_types(kind), []
    for name, attribute in named(kind).items():
        hint, field = hints[attribute], kind.__dataclass_fields__[attribute]  # type: ignore[attr-defined]
        if attribute in getattr(kind, "MADE", ()) or not field.init:
            continue
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            options += options_of(hint, f"{attribute} options")
        else:
            factory = field.default_factory
            default = field.default if factory is MISSING else factory()
            place = PLACE in getattr(hint, "__metadata__", ())
            options.append(Option(name, hint, default, texts.get(attribute, ""), group, place))
    return options


def build(kind: type[_T], values: Mapping[str, Any], **others: Any) -> _T:
    """Builds a dataclass, with its groups, from option values.

    Args:
      kind: Dataclass to build.
      values: Values of options by name; names without a field are ignored.
      **others: Values of fields that are no options.

    >>> @dataclass
    ... class Run:
    ...     epochs: int = 3
    >>> build(Run, {"epochs": 5}).epochs
    5
    """
    fields = dict(others)
    for name, attribute in named(kind).items():
        hint = field_types(kind)[attribute]
        if attribute in others:
            continue
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            fields[attribute] = build(hint, values)
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
    """Parses words to option values by name, with defaults.

    Args:
      options: Options of the command.
      words: Words after the command.
      command: Words of the command, for messages.
      elsewhere: Returns a sentence on where an unknown option belongs, or "".

    Raises:
      ValueError: If an option is unknown, missing or has a wrong value; the message names it.

    >>> parse([Option("epochs", int, 3), Option("out", str, None)], ["--out=run"], "dpsgd train")
    {'epochs': 3, 'out': 'run'}
    """
    check_removed(words)
    parser = _Parser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    add_arguments(parser, [option for option in options if not option.place], {})
    try:
        namespace, remaining_words = parser.parse_known_args(list(words))
    except ValueError as error:
        raise ValueError(f"{error}; `{command} --help` lists the options") from None
    words_by_name = vars(namespace)
    for word in remaining_words:
        if word.startswith("--"):
            flag = word.partition("=")[0]
            place = elsewhere(flag.removeprefix("--").replace("-", "_"))
            raise ValueError(unknown(flag, options, command, place))
    words_by_name |= _placed(
        [option for option in options if option.place], remaining_words, command
    )
    if missing := [o for o in options if o.default is MISSING and o.name not in words_by_name]:
        missing.sort(key=lambda option: not option.place)
        needed = " and ".join(o.flag if o.place else f"{o.flag} {o.metavar}" for o in missing)
        raise ValueError(f"{command} needs {needed}; `{command} --help` lists the options")
    defaults = {option.name: option.default for option in options if option.default is not MISSING}
    try:
        values = {
            option.name: read(option.hint, words_by_name[option.name], (option.name,), words=True)
            for option in options
            if option.name in words_by_name
        }
    except Refused as error:
        raise ValueError(with_flags(error, options)) from None
    return defaults | values


def _placed(options: Sequence[Option], words: list[str], command: str) -> dict[str, Any]:
    """Returns the words of positional arguments by name; a list takes the remaining words."""
    placed_words: dict[str, Any] = {}
    for number, option in enumerate(options, 1):
        count = len(words) - (len(options) - number) if option.length else min(1, len(words))
        if count > 0:
            placed_words[option.name] = words[:count] if option.length else words[0]
            words = words[count:]
    if words:
        raise ValueError(f"{command} takes no {words[0]}; `{command} --help` lists the options")
    return placed_words


def word_of(words: Sequence[str], name: str) -> str | None:
    """Returns the value of one option, or None if absent.

    Args:
      words: Words of a command, whose other options may be unknown.
      name: Name of the option, without dashes.

    >>> word_of(["store", "--task", "images", "--model=small"], "task")
    'images'
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument(f"--{name}", metavar="NAME")
    return getattr(parser.parse_known_args(list(words))[0], name.replace("-", "_"))


def add_arguments(parser: Any, options: Iterable[Option], groups: dict[str, Any]) -> None:
    """Adds options to a parser.

    Args:
      parser: Parser of argparse.
      options: Options to add, without positional arguments.
      groups: The parser's groups of arguments by heading; missing groups are added.
    """
    for option in options:
        if (group := groups.get(option.group)) is None:
            group = groups[option.group] = parser.add_argument_group(option.group)
        arguments: dict[str, Any] = {"help": option.help.replace("%", "%%")}
        if option.switch:
            switch_action = argparse.BooleanOptionalAction if option.default else "store_true"
            group.add_argument(option.flag, action=switch_action, **arguments)
        else:
            arguments |= {"nargs": option.length, "metavar": option.metavar}
            group.add_argument(option.flag, **arguments)


def check_removed(words: Sequence[str]) -> None:
    """Raises ValueError for an option or value that was removed.

    >>> check_removed(["--secure-noise"])
    Traceback (most recent call last):
    ValueError: --secure-noise was removed in 0.3.0; see CHANGELOG.md
    """
    for word, following in itertools.pairwise([*words, ""]):
        option, equals, value = word.partition("=")
        if option.startswith("--") and (
            notice := removal_notice(option, value if equals else following)
        ):
            raise ValueError(f"{option} was {notice}")


def unknown(flag: str, options: Sequence[Option], command: str, more: str = "") -> str:
    """Returns the message about an unknown option.

    Args:
      flag: Unknown option, such as `--clip`.
      options: Options of the command.
      command: Words of the command.
      more: Sentence on where the option belongs, or "".

    >>> unknown("--clip", [Option("l2_clip_norm", float, None)], "dpsgd train")
    'dpsgd train has no option --clip: did you mean --l2-clip-norm?'
    """
    names = {synonyms.flag.removeprefix("--") for synonyms in options if not synonyms.place}
    name = flag.removeprefix("--")
    if more:
        return f"{command} has no option {flag}; {more}"
    meant = [
        synonyms.split()[0]
        for synonyms in _NAMES
        if name in synonyms.split() and synonyms.split()[0] in names
    ]
    meant = meant or difflib.get_close_matches(name.replace("_", "-"), sorted(names), 1, 0.7)
    hint = f": did you mean --{meant[0]}?" if meant else f"; `{command} --help` lists them"
    return f"{command} has no option {flag}{hint}"


def with_flags(error: ValueError, options: Iterable[Option]) -> str:
    """Returns an error's message with options as `--name`.

    Replaces the first word of the message, and names with an underscore that are not part of a
    path.

    Args:
      error: Error whose message has names in Python's spelling.
      options: Options of the command.

    >>> with_flags(ValueError("epochs: must be above 0"), [Option("epochs", int, 3)])
    '--epochs: must be above 0'
    """
    flags = {option.name: option.flag for option in options}
    line = str(error)
    first = re.match(r"\w+", line)
    if first and "_" not in first[0]:
        line = flags.get(first[0], first[0]) + line[first.end() :]
    return re.sub(r"(?<![\w/.-])\w+_\w+\b", lambda match: flags.get(match[0], match[0]), line)


def look_in_the_current_folder() -> None:
    """Appends the current folder to Python's path."""
    if (folder := str(Path.cwd())) not in sys.path:
        sys.path.append(folder)
