"""Frozen dataclasses whose annotations state types and ranges, and one checker of their values.

A value may come from Python, from the words of a command, from TOML or from JSON. `read` returns it
as its annotation says, or raises `Refused`: one line with the place, the allowed values and the
value.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import math
import numbers
import operator
import re
import reprlib
import sys
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from accounting.annotations import STATED as STATED
from accounting.annotations import Bound as Bound
from accounting.annotations import Count as Count
from accounting.annotations import Ge as Ge
from accounting.annotations import Gt as Gt
from accounting.annotations import Le as Le
from accounting.annotations import Lt as Lt
from accounting.annotations import Must as Must
from accounting.annotations import Named as Named
from accounting.annotations import Positive as Positive
from accounting.annotations import Seed as Seed
from accounting.annotations import described as described

_T = TypeVar("_T")
Place = tuple[str | int, ...]
"""Names and indices that lead to a value."""


class Refused(ValueError):
    """A value that its annotation does not allow.

    Attributes:
      place: Names and indices that lead to the value.
      reason: Allowed values and the value, such as "must be an integer >= 1, got 0".
    """

    def __init__(self, place: Place, reason: str) -> None:
        self.place, self.reason = place, reason
        super().__init__(f"{format_place(place)} {reason}".lstrip())


def format_place(place: Place) -> str:
    """Returns a place in words.

    >>> format_place(("grid", 0, "noise_multiplier"))
    'grid[0].noise_multiplier'
    """
    words = (f"[{name}]" if isinstance(name, int) else f".{_line(str(name))}" for name in place)
    return "".join(words).removeprefix(".")


def near(name: str, known: Iterable[str]) -> str:
    """Returns the nearest known name as a question.

    It returns all names where none is near and they are few.

    >>> near("adm", ["adam", "sgd"]), near("x", ["adam", "sgd"])
    (': did you mean adam?', '; there are adam, sgd')

    Args:
      name: Name that is not known.
      known: Known names.
    """
    known = list(known)
    if matches := difflib.get_close_matches(name[:100], known, 1):
        return f": did you mean {matches[0]}?"
    return f"; there are {', '.join(known)}" if 0 < len(known) < 20 else ""


# --- Values ---------------------------------------------------------------------------------------

_INTEGER = re.compile(r"[+-]?[0-9]{1,400}")
_SCIENTIFIC = re.compile(r"([+-]?[0-9]{1,9})(?:\.([0-9]{1,9}))?[eE]\+?([0-9]{1,2})")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


def read(hint: Any, value: Any, place: Place = (), *, words: bool = False) -> Any:
    """Returns `value` as its annotation says.

    Numbers of NumPy become Python's, lists become tuples, mappings become dataclasses.

    >>> read(tuple[Count, ...], [1, 2])
    (1, 2)
    >>> read(Count | Literal["auto"], "0", ("bands",), words=True)
    Traceback (most recent call last):
    accounting.records.Refused: bands must be an integer >= 1 or auto, got 0

    Args:
      hint: Any, None, a class, a dataclass, or a union, literal, list, tuple or mapping of hints;
        `Annotated` with `Bound` and `Must`.
      value: Value to check.
      place: Names and indices that lead to the value.
      words: Whether strings are the words of a command: "3" is then an integer, too.

    Raises:
      Refused: If the annotation does not allow the value.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin is Annotated:
        marks = [mark for mark in arguments[1:] if isinstance(mark, Bound | Must)]
        try:
            checked = read(arguments[0], value, place, words=words)
        except Refused as error:
            if error.place != place or not marks:
                raise
            raise _wrong(hint, value, place, words) from None
        for mark in marks:
            if isinstance(mark, Bound) and not isinstance(checked, int | float):
                continue  # None is not compared
            if not mark.allows(checked):
                raise _wrong(hint, value, place, words)
        return checked
    if origin in (Union, types.UnionType):
        return _read_union(hint, value, place, words)
    if origin is Literal:
        for choice in arguments:
            if (type(choice) is type(value) or words) and choice == value:
                return choice
        meant = near(value, map(str, arguments)) if isinstance(value, str) else ""
        raise _wrong(hint, value, place, words, meant if meant.startswith(":") else "")
    if origin in (list, tuple):
        return _read_items(hint, value, place, words)
    if isinstance(origin, type) and not isinstance(value, origin):
        raise _wrong(hint, value, place, words)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        key, item = arguments
        return {
            read(key, k, place, words=words): read(item, x, (*place, format_value(k)), words=words)
            for k, x in value.items()
        }
    if isinstance(origin, type):
        return value
    if isinstance(hint, type) and dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
        return build(hint, value, place, words=words)
    return _read_plain(hint, value, place, words)


def _wrong(hint: Any, value: Any, place: Place, words: bool = False, question: str = "") -> Refused:
    allowed, shown = described(hint), format_value(value, words=words)
    return Refused(place, f"must be {allowed}, got {shown}{question}")


def _read_union(hint: Any, value: Any, place: Place, words: bool) -> Any:
    deeper, questions = None, ""
    kinds = get_args(hint)
    for kind in (type(None),) if value is None and type(None) in kinds else kinds:
        try:
            return read(kind, value, place, words=words)
        except Refused as error:
            if len(error.place) > len(place):  # an item of the kind that is meant
                deeper = deeper or error
            _, colon, question = error.reason.partition(": did you mean")
            questions = questions or colon + question
    raise deeper or _wrong(hint, value, place, words, questions)


def _read_items(hint: Any, value: Any, place: Place, words: bool) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if not isinstance(value, list | tuple):
        raise _wrong(hint, value, place, words)
    kinds = arguments
    if origin is list or arguments[1:] == (...,):
        kinds = arguments[:1] * len(value)
    if len(kinds) != len(value):
        raise _wrong(hint, value, place, words)
    items = zip(kinds, value, strict=True)
    return origin(read(item, x, (*place, i), words=words) for i, (item, x) in enumerate(items))


def _read_plain(hint: Any, value: Any, place: Place, words: bool) -> Any:
    kind = type(None) if hint is None else hint
    if not isinstance(kind, type):
        raise TypeError(f"records cannot hold values of the type {hint}")
    if words and kind is bool and value in ("true", "false"):
        return value == "true"
    if words and isinstance(value, str) and kind in (int, float):
        digits = _whole_number(value) if kind is int else value
        if (_INTEGER if kind is int else _NUMBER).fullmatch(digits):
            value = kind(digits)
    if kind in (int, float):
        number = numbers.Integral if kind is int else numbers.Real
        if isinstance(value, number) and not isinstance(value, bool):
            try:
                converted = operator.index(value) if kind is int else float(value)  # type: ignore[arg-type]
                if kind is int or math.isfinite(converted):
                    return converted
            except (OverflowError, ValueError):
                pass
    elif kind is Path and isinstance(value, str) and "\0" not in value:
        return Path(value)
    elif isinstance(value, kind):
        return value
    raise _wrong(hint, value, place, words)


def _whole_number(text: str) -> str:
    """Returns the digits of a whole number such as 46e6, or any other text unchanged."""
    if not (match := _SCIENTIFIC.fullmatch(text)):
        return text
    digits, fraction, exponent = match[1], (match[2] or "").rstrip("0"), int(match[3])
    zeros = exponent - len(fraction)
    return text if zeros < 0 else digits + fraction + "0" * zeros


def format_value(value: Any, *, words: bool = False) -> str:
    """Returns a value on one short line.

    Args:
      value: Value to show.
      words: Whether strings are a command's words, which are not quoted.
    """
    plain = isinstance(value, str) and re.fullmatch(r"[!-~]{1,80}", value)
    if plain and (words or not _NUMBER.fullmatch(value)):
        return str(value)
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = 60
    try:
        return _line(short.repr(value))
    except Exception:  # an error in __repr__
        return f"a {type(value).__name__}"


def _line(text: str) -> str:
    words = " ".join(text[:1000].split())
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in words)


# --- Dataclasses ----------------------------------------------------------------------------------


def field_types(kind: Any) -> Mapping[str, Any]:
    """Returns the annotations of a dataclass's fields, with their bounds."""
    return _field_types(kind)


@functools.lru_cache(maxsize=256)
def _field_types(kind: Any) -> Mapping[str, Any]:
    hints: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        owner = next(base for base in kind.__mro__ if field.name in inspect.get_annotations(base))
        annotated = types.SimpleNamespace(__annotations__={field.name: field.type})
        scope = vars(sys.modules[owner.__module__]), dict(vars(owner))
        try:
            hints |= get_type_hints(annotated, *scope, include_extras=True)
        except (NameError, AttributeError, SyntaxError, TypeError) as error:
            place = f"{kind.__module__}:{kind.__qualname__}.{field.name}"
            raise ValueError(f"{place} has an annotation that is not defined: {error}") from None
    return types.MappingProxyType(hints)


def named(kind: type) -> Mapping[str, str]:
    """Returns each field's attribute by its name in files."""
    return {name: attribute for attribute, name in _names(kind).items()}


@functools.lru_cache(maxsize=256)
def _names(kind: Any) -> Mapping[str, str]:
    """Returns each field's name in files by its attribute."""
    names = {}
    for attribute, hint in field_types(kind).items():
        marks = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
        names[attribute] = next((x.name for x in marks if isinstance(x, Named)), attribute)
    return types.MappingProxyType(names)


def build(kind: type[_T], values: Any, place: Place = (), *, words: bool = False) -> _T:
    """Returns a dataclass made of a mapping.

    Args:
      kind: Dataclass to make.
      values: Mapping of field names to values; absent fields have their defaults.
      place: Names and indices that lead to the mapping.
      words: As for `read`.

    Raises:
      Refused: If a field is missing, unknown or not allowed, or `kind` refuses them together.
    """
    if not isinstance(values, Mapping):
        raise _wrong(kind, values, place)
    attributes, hints, arguments = named(kind), field_types(kind), dict[str, Any]()
    for name, value in values.items():
        if name not in attributes:
            raise Refused(
                (*place, format_value(name)), f"is unknown{near(format_value(name), attributes)}"
            )
        attribute = attributes[name]
        arguments[attribute] = read(hints[attribute], value, (*place, name), words=words)
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]  # of a dataclass
        required = field.default is field.default_factory is dataclasses.MISSING
        if field.init and required and field.name not in arguments:
            name = next(x for x, attribute in attributes.items() if attribute == field.name)
            raise Refused((*place, name), "is missing")
    try:
        return kind(**arguments)
    except Refused as error:
        raise Refused((*place, *error.place), error.reason) from None
    except ValueError as error:
        raise Refused(place, _line(str(error))) from None


def check(record: Any) -> None:
    """Replaces the fields of a dataclass by checked values.

    Raises:
      Refused: If an annotation does not allow a value.
    """
    kind: Any = type(record)
    names = _names(kind)
    for attribute, hint in field_types(kind).items():
        checked = read(hint, getattr(record, attribute), (names[attribute],))
        object.__setattr__(record, attribute, checked)


class Record:
    """Base of frozen dataclasses that hold only values that their annotations allow.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Step(Record):
    ...     size: Count
    >>> Step(0)
    Traceback (most recent call last):
    accounting.records.Refused: size must be an integer >= 1, got 0
    """

    def __post_init__(self) -> None:
        check(self)


@functools.lru_cache(maxsize=256)
def field_texts(kind: type) -> Mapping[str, str]:
    """Returns the descriptions of a dataclass's fields.

    They stand under "Attributes:" in its docstring and in the docstrings of its bases.

    >>> field_texts(Refused)["place"]
    'Names and indices that lead to the value.'
    """
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        doc = inspect.cleandoc(base.__doc__ or "") + "\n"
        if section := re.search(r"^Attributes:\n((?:  .*\n|\n)+)", doc, re.MULTILINE):
            entries = re.findall(r"^  (\w+): (.+\n(?:   .*\n)*)", section[1], re.MULTILINE)
            texts |= {name: " ".join(text.split()) for name, text in entries}
    return types.MappingProxyType(texts)
