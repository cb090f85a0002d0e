"""Options as projections: of what a command asks, of `RunSpec`, of samplers and of tasks.

tyro parses them. Each value refuses what is wrong with it, and the command says that in one line.
Runs and samplers are imported for commands about them: the help of others waits for no NumPy.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import difflib
import functools
import inspect
import io
import itertools
import math
import re
import shutil
import sys
import textwrap
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, is_dataclass
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Union

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from accounting.records import field_texts
from dpsgd.removed import removal_notice
from dpsgd.runs.records import field_types

if TYPE_CHECKING:
    from dpsgd.runs.spec import RunSpec

ORDER = [
    *("privacy", "optimizer", "settings", "run", "clipping", "average", "noise", "tables"),
    *("devices", "processes"),
]
"""Groups of options, as the help shows them: what a newcomer needs first, and clusters last."""

_GROUPS = {"target_delta": "privacy", "l2_clip_norm": "optimizer"}
"""Where options of no part of `RunSpec` stand; all others stand in "run"."""

_LEFT_OPEN = "Default: chosen by the task in `dpsgd train`, else {}"
"""Words that follow those on sizes that a run may choose."""

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
    "bands-memory memory",
    "out output output-dir logdir plot",
    "plot out figure",
    "label target labels",
    "categories categorical categoricals",
    "numbers numeric numerical",
)
"""The name of an option, and names of it elsewhere: a command that lacks these has that one."""


# --- What can be asked ---------------------------------------------------------------------------


def command(
    base: type,
    words: Sequence[str] = (),
    *,
    options: Mapping[str, Any] | None = None,
    groups: Mapping[str, type] | None = None,
    settings: type | None = None,
    place: bool = True,
) -> type:
    """Returns the command `base` as tyro parses it, with options of a run beside its own.

    Args:
      base: Frozen dataclass of what can be asked. Its field `sampler` becomes a subcommand for each
        sampler of the package, and for those of other modules that `words` name.
      words: Of the command line.
      options: Of `known_options`, with their defaults (see `run_options`); they come in a group for
        each part of `RunSpec`.
      groups: Further groups by name, dataclasses of what can be asked.
      settings: A dataclass of tasks, whose fields are a group, and of which none is made.
      place: As for `fields_of`.

    Raises:
      ValueError: if there is no such sampler.
    """
    made = _parts(options) if options else {}
    made |= {name: _parsed(kind) for name, kind in (groups or {}).items()}
    if settings is not None:
        about_task = inspect.getdoc(settings) or ""
        if about_task.startswith(f"{settings.__name__}("):  # made of its fields, for want of any
            about_task = ""
        made["settings"] = _dataclass("settings", fields_of(settings, place), about_task)
    asks = any(one.name == "sampler" for one in dataclasses.fields(base))
    fields = fields_of(base, types={"sampler": _samplers(words)} if asks else None)
    for name in sorted(made, key=lambda name: ORDER.index(name if name in ORDER else "run")):
        fields.append(_field(name, made[name], MISSING, made[name].__doc__ or ""))
    return _dataclass(base.__name__, fields, base.__doc__, base)


def _parts(options: Mapping[str, Any]) -> dict[str, type]:
    """Returns a dataclass of options for each part of `RunSpec` that has some, with its words."""
    from dpsgd.runs.spec import PARTS, RunSpec, known_options

    parts: dict[str, list[Any]] = {}
    for name, default in options.items():
        option = known_options()[name]
        kinds = (part for part, kinds in PARTS.items() if option.owner in kinds.values())
        part = name if name in PARTS else next(kinds, _GROUPS.get(name, "run"))
        below = words_on_fields(option.owner).get(option.field, option.owner.__doc__ or "")
        below = re.sub(r"\b[a-z0-9]+(_[a-z0-9]+)+\b", lambda found: _option(found[0]), below)
        parts.setdefault(part, []).append(_field(name, option.type, default, below))
    about = {**words_on_fields(RunSpec), **dict.fromkeys(options, "")}
    return {name: _dataclass(name, fields, about.get(name)) for name, fields in parts.items()}


def run_options(*names: str, **defaults: Any) -> dict[str, Any]:
    """Returns options of a run with their defaults, or others; MISSING is of one that is required.

    >>> run_options("target_delta", calibration="none")
    {'target_delta': None, 'calibration': 'none'}
    """
    from dpsgd.runs.spec import known_options

    return {**{name: known_options()[name].default for name in names}, **defaults}


def fields_of(
    kind: type, place: bool | None = None, types: Mapping[str, Any] | None = None
) -> list[Any]:
    """Returns the fields of a dataclass as tyro parses them.

    Args:
      kind: The dataclass.
      place: Whether a field `data` is given by its place; or by its option, or not at all. By
        default as it says itself.
      types: Of fields that have others here.
    """
    try:
        hints: Mapping[str, Any] = typing.get_type_hints(kind, include_extras=True)
    except NameError:  # annotations for type checkers alone, of what is no field
        hints = field_types(kind)
    below, found = words_on_fields(kind), []
    for one in dataclasses.fields(kind):
        if one.init:
            made = one.default_factory
            default = one.default if made is MISSING else made()
            hint = (types or {}).get(one.name) or _parsed(hints[one.name])
            if one.name == "data" and place is False and default is MISSING:
                default, hint = None, hint | None
            default = MISSING if is_dataclass(default) else default
            found.append(_field(one.name, hint, default, below.get(one.name, "")))
            if one.name == "data" and place:
                found[-1] = ("data", Annotated[found[-1][1], tyro.conf.Positional], found[-1][2])
    return found


def words_on_fields(kind: type) -> dict[str, str]:
    """Returns the docstrings below the fields of a dataclass and its bases, each in one line.

    Args:
      kind: The dataclass; settings of a sampler have the words of the sampler.
    """
    words: dict[str, str] = {}
    drawn = getattr(kind, "sampler", None)
    for one in reversed((drawn if isinstance(drawn, type) else kind).__mro__):
        body = _classes(one.__module__).get(one.__qualname__, []) if one is not object else []
        for field, below in itertools.pairwise(body):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
            ):
                words[field.target.id] = " ".join(str(below.value.value).split())
    words |= field_texts(drawn if isinstance(drawn, type) else kind)
    if isinstance(drawn, type):
        from samplers.settings import DEFAULTS

        for name in words.keys() & DEFAULTS.keys():
            words[name] = f"{words[name].rstrip('.')}. {_LEFT_OPEN.format(DEFAULTS[name])}."
    return words


@functools.cache
def _classes(module: str) -> dict[str, list[ast.stmt]]:
    """Returns the statements of each class of a module; nothing if there is no source."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError, KeyError, SyntaxError):  # as in a prompt
        return {}
    return {node.name: node.body for node in tree.body if isinstance(node, ast.ClassDef)}


def _parsed(hint: Any) -> Any:
    """Returns a type in which dataclasses are as tyro parses them."""
    if isinstance(hint, type) and is_dataclass(hint):
        return _dataclass(hint.__name__, fields_of(hint), hint.__doc__, hint)
    if typing.get_origin(hint) is Annotated:
        return Annotated[(_parsed(hint.__origin__), *hint.__metadata__)]
    if isinstance(hint, UnionType) or typing.get_origin(hint) is Union:
        return Union[tuple(map(_parsed, typing.get_args(hint)))]  # noqa: UP007
    return hint


def _field(name: str, hint: Any, default: Any, words: str) -> Any:
    """Returns a field with its help: the first paragraph of `words`."""
    if type(None) in typing.get_args(hint):  # tyro is slow for None at the end
        kinds = [one for one in typing.get_args(hint) if one is not type(None)]
        hint = Union[tuple([*([None] if default is None else []), *kinds])]  # noqa: UP007
    words = " ".join(words.partition("\n\n")[0].split())
    hint = Annotated[hint, tyro.conf.arg(help=words)]
    if default is False:
        hint = Annotated[hint, tyro.conf.FlagCreatePairsOff]
    return name, hint, dataclasses.field(default=default)


def _option(name: str) -> str:
    """Returns an option of a run or of a sampler as it is given; any other name as it is."""
    from dpsgd.runs.spec import known_options
    from samplers.settings import SETTINGS

    of_samplers = (one.name for kind in SETTINGS.values() for one in dataclasses.fields(kind))
    known = name in known_options() or name in of_samplers
    return f"--{name.replace('_', '-')}" if known else name


def _dataclass(name: str, fields: Sequence[Any], words: str | None, *bases: type) -> type:
    return dataclasses.make_dataclass(
        name, fields, bases=bases, frozen=True, kw_only=True, namespace={"__doc__": words or " "}
    )


def _samplers(words: Sequence[str]) -> Any:
    """Returns a type of one subcommand for each sampler."""
    from samplers.settings import SETTINGS, kind_of, settings_of

    kinds = dict(SETTINGS)
    for word in words:
        prefix, colon, name = word.partition(":")
        if prefix == "sampler" and ":" in name:
            look_in_the_current_folder()
            kinds[name] = settings_of(kind_of(name, execute=True))
        elif prefix == "sampler" and colon and name not in kinds:
            near = difflib.get_close_matches(name, kinds, 1)
            hint = f"did you mean sampler:{near[0]}?" if near else f"there are {', '.join(kinds)}."
            raise ValueError(f"{word}: {hint} One of your own is named sampler:module:name")
    for kind in kinds.values():  # tyro reads the words on fields there
        below = words_on_fields(kind)
        lines = [
            f"  {f.name}: {below[f.name]}" for f in dataclasses.fields(kind) if f.name in below
        ]
        summary = (kind.__doc__ or "").partition("\n")[0]
        kind.__doc__ = "\n".join([summary, *(["", "Attributes:", *lines] if lines else [])])
    commands = (
        Annotated[kind, tyro.conf.subcommand(f"sampler:{name}", prefix_name=False)]
        for name, kind in kinds.items()
    )
    return Union[tuple(commands)]  # noqa: UP007


def look_in_the_current_folder() -> None:
    """Has modules found in the folder that the command is given in, after all others."""
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)


# --- What is asked -------------------------------------------------------------------------------


def parse(kind: type, words: Sequence[str], command: str) -> Any:
    """Returns what words ask of `command`, whose options are the fields of `kind`.

    Raises:
      ValueError: if they are no such options; the line names the one that is wrong.
      SystemExit: where they ask for help, once that is printed.
    """
    shown, refused = io.StringIO(), io.StringIO()
    said = contextlib.redirect_stdout(shown), contextlib.redirect_stderr(refused)
    try:
        with said[0], said[1], _defaults_taken_as_they_are():
            return tyro.cli(kind, prog=command, args=words, config=_STYLE, registry=_NUMBERS)
    except SystemExit as end:
        if not end.code:
            print(_help(shown.getvalue()))
            raise
    asks = any(one.name == "sampler" for one in dataclasses.fields(kind))
    names = {*_names(kind)}
    hints = typing.get_type_hints(kind, include_extras=True).values()
    named = {getattr(one, "name", None) for hint in hints for one in _within(hint)}
    if not asks and words and words[0] in named:  # a subcommand, whose help lists its options
        command = f"{command} {words[0]}"
    for word, following in zip_longest(words, words[1:]):
        option, equals, value = word.partition("=")
        if not option.startswith("--"):
            continue
        if notice := removal_notice(option, value if equals else following):
            raise ValueError(f"{option} was {notice}")
        name = word.partition("=")[0].removeprefix("--").replace("_", "-")
        if name == "sampler" and asks:
            meant = value if equals else following or "NAME"
            raise ValueError(f"{command} has no option --sampler: write sampler:{meant}")
        if word.startswith("--") and name and name not in names | {f"no-{one}" for one in names}:
            raise ValueError(f"{command} has no option --{name}{_hint(name, names, command)}")
    if asks:
        _check_sampler(words)
    raise ValueError(_one_line(refused.getvalue(), command))


def _check_sampler(words: Sequence[str]) -> None:
    """Raises ValueError unless words name a sampler, and its options after it."""
    from samplers.settings import SETTINGS

    at = next((i for i, word in enumerate(words) if word.startswith("sampler:")), None)
    if at is None:
        raise ValueError(f"name a sampler, one of sampler:{', sampler:'.join(SETTINGS)}")
    if kind := SETTINGS.get(words[at].removeprefix("sampler:")):
        options = {f"--{name}" for name in _names(kind)}
        before = [one for word in words[:at] if (one := word.partition("=")[0]) in options]
        if before:
            raise ValueError(
                f"{' and '.join(before)}: options of a sampler are written after {words[at]}"
            )


@contextlib.contextmanager
def _defaults_taken_as_they_are() -> Iterator[None]:
    """Spares tyro the check of defaults that are tuples, for which it imports typeguard.

    That takes a twelfth of the time of a help, and these defaults are those of typed fields.
    """
    instead: Any = SimpleNamespace(check_type=lambda value, kind: value, TypeCheckError=TypeError)
    ours = sys.modules.setdefault("typeguard", instead) is instead
    try:
        yield
    finally:
        if ours:
            del sys.modules["typeguard"]


_STYLE = (
    tyro.conf.CascadeSubcommandArgs,
    tyro.conf.DisallowNone,
    tyro.conf.OmitArgPrefixes,
    tyro.conf.PositionalMetavarFromFieldName,
)
_NUMBERS = ConstructorRegistry()
_NOUNS = {"INT": "an integer", "FLOAT": "a finite number"}


@_NUMBERS.primitive_rule
def _number(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
    """Has numbers be finite, and refused by what they must be."""
    kind: Any = info.type
    if kind not in (int, float):
        return None
    metavar = kind.__name__.upper()

    def number(words: list[str]) -> Any:
        with contextlib.suppress(ValueError):
            found = kind(words[0])
            if kind is int or math.isfinite(found):
                return found
        raise ValueError(f"must be {_NOUNS[metavar]}, got {words[0]}")

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=number,
        is_instance=lambda one: isinstance(one, (int, kind)) and not isinstance(one, bool),
        str_from_instance=lambda one: [str(one)],
    )


def flat(config: Any) -> Iterator[tuple[str, Any]]:
    """Yields names and values of all that was asked, with those of its groups and its sampler."""
    for one in dataclasses.fields(config):
        value = getattr(config, one.name)
        if one.name == "sampler" or not is_dataclass(value):
            yield one.name, value
        if is_dataclass(value):
            yield from flat(value)


def spec_of(config: Any, **others: Any) -> RunSpec:
    """Returns the run that a command was asked about, with `others` in place of its own options.

    Raises:
      ValueError: for options that no run has, or that have no proof together.
    """
    from dpsgd.runs.spec import PARTS, RunSpec, known_options
    from dpsgd.runs.support import check

    given = {name: value for name, value in flat(config) if name in known_options()} | others
    goals = [name for name in PARTS["privacy"] if name in given]
    if sum(given[name] is not None and given[name] is not False for name in goals) != 1:
        *names, last = map(_option, goals)  # those that the command offers
        raise ValueError(f"give exactly one of {', '.join(names)} and {last}")
    with naming(config):
        check(spec := RunSpec.of(**given))
    return spec


@contextlib.contextmanager
def naming(config: Any) -> Iterator[None]:
    """Has what is wrong with an option of a run, or of its sampler, named as it is given.

    That is the word at the line's begin, and names with an underscore, which are no words, in all
    of it. Other words, which a path may begin with, stay: `data`, for example.
    """
    try:
        yield
    except ValueError as error:
        names = [name for name, _ in flat(config) if "_" in name or _option(name) != name]
        first, anywhere = "|".join(names), "|".join(name for name in names if "_" in name)
        line = re.sub(
            rf"^({first})\b|\b({anywhere})\b",
            lambda found: "--" + found[0].replace("_", "-"),
            str(error),
        )
        raise ValueError(line) from error


# --- Help, and what is refused -------------------------------------------------------------------


def _names(kind: Any) -> Iterator[str]:
    """Yields the options of a dataclass, and of its parts."""
    hints = typing.get_type_hints(kind, include_extras=True)
    for one in dataclasses.fields(kind):
        kinds = _within(hints[one.name])
        parts = {part for part in kinds if isinstance(part, type) and is_dataclass(part)}
        for part in parts:
            yield from _names(part)
        if not parts:
            yield one.name.replace("_", "-")


def _within(hint: Any) -> Iterator[Any]:
    yield hint
    for one in typing.get_args(hint):
        yield from _within(one)


def _hint(name: str, known: set[str], command: str) -> str:
    alike = [one.split() for one in _NAMES]
    meant = [names[0] for names in alike if name in names and names[0] in known]
    meant = meant or difflib.get_close_matches(name, sorted(known), 1, 0.7)
    return f": did you mean --{meant[0]}?" if meant else f"; `{command} --help` lists them"


def _one_line(box: str, command: str) -> str:
    """Returns what tyro refuses, which it says between a title and further help."""
    said: list[str] = []
    for row in box.splitlines()[2:]:
        if not row.strip() or row.strip().startswith("--" * 5):
            break
        said.append(row)
    more = f"`{command} --help` lists what it takes"
    if said[:1] and said[0].strip().startswith("Missing from "):  # of each its name, then its words
        names = [row.strip() for row in said[1:] if len(row) - len(row.lstrip()) == 6]
        return f"{command} needs {' and '.join(names)}; {more}"
    line = " ".join(map(str.strip, said)).removeprefix("Error parsing ")
    if found := re.fullmatch(r"Expected one of \{(.*)\}\.", line):
        return f"{command} needs one of {found[1]}"
    line = re.sub(r" \(applied to [^)]*\)", "", line)
    if found := re.fullmatch(r"Unrecognized (?:or misplaced )?options: (.*)", line):
        known = re.search(r"Available subcommands: (.*?) -{5}", " ".join(box.split()))
        return f"{command} takes no {found[1]}; {f'there are {known[1]}' if known else more}"
    line = line.replace(", 'None')", ")")
    line = re.sub(r": no type matching (.*) could be instantiated from (.*)\.$", _must, line)
    line = re.sub(r"^(--\S+): must", r"\1 must", line)
    return re.sub(r"^\w+: (?=--)|(?<=')\w+\.(?=\w+')", "", line)  # the names of groups


def _must(found: re.Match[str]) -> str:
    kinds, given = [_NOUNS.get(kind, kind) for kind in found[1].split("|")], found[2].strip("[]'")
    return f" must be {' or '.join(kinds)}, got {given}"


def _help(text: str) -> str:
    """Returns the help of tyro with what must be given in its usage, as wide as the terminal."""
    if not text.startswith("usage: "):  # but a script for a shell
        return text
    usage, _, rest = re.sub(" +$", "", text, flags=re.MULTILINE).partition("\n")
    entries = [one.strip() for one in re.split(r"\n(?=  -|\n)", rest) if "(required)" in one]
    given = " ".join(re.split(r"\s{2,}", one)[0] for one in entries if one.startswith("--"))
    usage = re.sub(r"\[(\S* )?OPTIONS\]", lambda _: f"{given} [OPTIONS]".lstrip(), usage)
    usage = re.sub(r"\{sampler:.*\}", "sampler:NAME", usage)
    rest = re.sub(r"\s+\(default:\s+(None|False)?\)", "", re.sub(r"\n{3,}", "\n\n", rest))
    width, indent = shutil.get_terminal_size().columns, " " * len("usage: ")
    lines = [textwrap.fill(usage, width, subsequent_indent=indent, break_on_hyphens=False)]
    for line in rest.split("\n"):
        margin = " " * (len(line) - len(line.lstrip()))
        fits = len(line) <= width
        lines += [line] if fits else textwrap.wrap(line, width, subsequent_indent=margin)
    return "\n".join(lines).rstrip()
