"""Dataclasses as JSON values, and read back with every value checked against the type it had."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import numbers
import sys
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from dpsgd.removed import removal_notice

_T = TypeVar("_T")


def to_json(value: Any) -> Any:
    """Returns dataclasses, mappings, paths and tuples as JSON's own types; `build` reads them back.

    >>> to_json((Path("a/b"), [1.0, None]))
    ['a/b', [1.0, None]]

    Raises:
      ValueError: if JSON has no such value.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {name: to_json(item) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return [to_json(item) for item in value]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, numbers.Real):  # of NumPy
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    raise ValueError(f"JSON has no {type(value).__name__}")


def checked(value: Any, kind: Any, where: str) -> Any:
    """Returns `value` if it is of the type `kind`, all of its items included.

    Args:
      value: What is checked.
      kind: A class, or one of Any, None, unions, literals, lists, tuples and mappings of such. An
        integer is a float as well, and a boolean neither: JSON tells them apart.
      where: Begins the line of an error.

    Raises:
      ValueError: if it is not.
      TypeError: for any other kind of type.

    >>> checked([1, 2], list[int] | None, "steps")
    [1, 2]
    >>> checked([1, "2"], list[int], "steps")
    Traceback (most recent call last):
    ValueError: steps: item 1 of list: str is not an instance of int
    """
    if wrong := _misfit(value, kind):
        raise ValueError(f"{where}: {wrong}")
    return value


def _misfit(value: Any, kind: Any) -> str | None:
    """Returns why `value` is not of the type `kind`, or None if it is."""
    origin, arguments = typing.get_origin(kind) or kind, typing.get_args(kind)
    if kind is Any:
        return None
    if origin is Literal:
        found = any(type(value) is type(one) and value == one for one in arguments)
        return None if found else f"{value!a:.60} is none of {', '.join(map(ascii, arguments))}"
    if origin in (typing.Union, types.UnionType):
        wrong = [_misfit(value, one) for one in arguments]
        return None if None in wrong else ", and ".join(dict.fromkeys(map(str, wrong)))
    if kind is None:
        origin = types.NoneType
    if not isinstance(origin, type):
        raise TypeError(f"records hold nothing of the type {kind}")
    accepted = (int, float) if origin is float else origin
    if not isinstance(value, accepted) or (isinstance(value, bool) and origin in (int, float)):
        wanted = "None" if origin is types.NoneType else origin.__name__
        return f"{type(value).__name__} is not an instance of {wanted}"
    if origin is float and isinstance(value, int) and abs(value) > sys.float_info.max:
        return "it is too large for a float"
    if not arguments:
        return None
    return _misfit_of_items(value, origin, arguments, kind)


def _misfit_of_items(value: Any, origin: type, arguments: tuple, kind: Any) -> str | None:
    """Returns which item of a list, tuple or mapping is not of its type, and why."""
    if issubclass(origin, Mapping):
        key, of = arguments
        items = [(f"key {k!a:.60}", k, key) for k in value]
        items += [(f"value of key {k!a:.60}", v, of) for k, v in value.items()]
    elif origin is list or (origin is tuple and arguments[1:] == (...,)):
        items = [(f"item {i}", item, arguments[0]) for i, item in enumerate(value)]
    else:
        raise TypeError(f"records hold nothing of the type {kind}")
    for place, item, of in items:
        if wrong := _misfit(item, of):
            return f"{place} of {type(value).__name__}: {wrong}"
    return None


def near(name: str, known: Iterable[str]) -> str:
    """Returns a question after the known name that is meant, or the notice about a removed one."""
    if notice := removal_notice(name):
        return f": {notice}"
    found = difflib.get_close_matches(name, known, 1)
    return f": did you mean {found[0]}?" if found else ""


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


@functools.lru_cache(maxsize=256)
def field_types(kind: type) -> Mapping[str, Any]:
    """Returns the types of a dataclass's fields: of these alone, whatever else is annotated."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        owner = next(base for base in kind.__mro__ if field.name in inspect.get_annotations(base))
        one = types.SimpleNamespace(__annotations__={field.name: field.type})
        found |= typing.get_type_hints(one, vars(sys.modules[owner.__module__]), dict(vars(owner)))
    return types.MappingProxyType(found)


def build(kind: type[_T], fields: Any, where: str) -> _T:
    """Returns the dataclass `kind` with these fields, lists having been tuples before JSON.

    A field that is absent has its default, as in the record of a version that did not know it.

    Raises:
      ValueError: if a field is missing, unknown, of another type or refused by `kind`; the line
        begins with `where` and names the field.
    """
    given = dict(checked(fields, Mapping[str, Any], where))
    hints = field_types(kind)  # type: ignore[arg-type]
    names = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for name, value in given.items():
        if name not in names:
            raise ValueError(f"{where}: {name!a} is unknown{near(str(name), names)}")
        given[name] = checked(_tuples(value), hints[name], f"{where}, {name}")
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        required = field.default is field.default_factory is dataclasses.MISSING
        if required and field.name not in given:
            raise ValueError(f"{where}: {field.name} is missing")
    try:
        return kind(**given)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
