"""Converts dataclasses to JSON values, and reads them back with checked types."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

from accounting import records
from accounting.records import STATED, field_types, named, read
from dpsgd.removed import removal_notice

__all__ = [
    "build",
    "checked",
    "field_types",
    "fields_of",
    "is_path",
    "near",
    "stated",
    "to_json",
    "without_paths",
]

_T = TypeVar("_T")


def to_json(value: Any) -> Any:
    """Returns dataclasses, mappings, paths and tuples as JSON values.

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
    if isinstance(value, numbers.Real):  # NumPy's numbers
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    raise ValueError(f"JSON has no {type(value).__name__}")


def checked(value: Any, kind: Any, where: str) -> Any:
    """Returns `value` converted to its annotation, see `accounting.records.read`.

    Args:
      value: Value to check.
      kind: Type annotation.
      where: Prefix of the error message, such as a file's name.

    Raises:
      ValueError: if the annotation does not allow the value.

    >>> checked([1, "2"], list[int], "steps")
    Traceback (most recent call last):
    ValueError: steps: [1] must be an integer, got '2'
    """
    try:
        return read(kind, value)
    except records.Refused as error:
        raise ValueError(f"{where}: {error}") from None


def stated(record: Any, names: Iterable[str]) -> dict[str, Any]:
    """Returns fields of a dataclass as JSON values, without defaults.

    `fields_of` reads them back.

    Args:
      record: Dataclass; a field annotated with `STATED` is returned even at its default.
      names: Names of the fields.

    >>> from accounting import TrialCount
    >>> stated(TrialCount(mean=10.0), ("mean", "shape"))  # shape has its default, 1.0
    {'mean': 10.0}
    """
    defaults = {field.name: field.default for field in dataclasses.fields(record)}
    values, hints = {name: getattr(record, name) for name in names}, field_types(type(record))
    return to_json(
        {name: x for name, x in values.items() if x != defaults[name] or _is_stated(hints[name])}
    )


def _is_stated(hint: Any) -> bool:
    return STATED in getattr(hint, "__metadata__", ())


def fields_of(
    kind: Any, body: Mapping[str, Any], names: Iterable[str] | None = None, where: str = ""
) -> dict[str, Any]:
    """Returns fields of a dataclass, read from a mapping.

    Fields with a default may be absent, unless annotated with `STATED`; other entries of the
    mapping are ignored.

    Args:
      kind: Dataclass.
      body: Mapping of field names to JSON values.
      names: Names of the fields; by default all.
      where: Prefix of the error message, such as a file's name.

    Raises:
      ValueError: If a field is missing, or its annotation does not allow the value.
    """
    values, hints, fields = dict[str, Any](), field_types(kind), kind.__dataclass_fields__
    prefix, missing = f"{where}: " if where else "", dataclasses.MISSING
    for name in hints if names is None else names:
        field = fields[name]
        if name in body:
            try:
                values[name] = read(hints[name], body[name], (name,))
            except records.Refused as error:
                raise ValueError(f"{prefix}{error}") from None
        elif _is_stated(hints[name]) or field.default is field.default_factory is missing:
            raise ValueError(f"{prefix}{name} is missing")
    return values


def near(name: str, known: Iterable[str]) -> str:
    """Returns a hint at a similar or removed name, or "".

    >>> near("batchsize", ["batch_size", "epochs"])
    ': did you mean batch_size?'

    Args:
      name: Name that is unknown.
      known: Names that exist.
    """
    if notice := removal_notice(name):
        return f": {notice}"
    hint = records.near(name, known)
    return hint if hint.startswith(":") else ""


def build(kind: type[_T], fields: Any, where: str) -> _T:
    """Returns a dataclass from JSON fields.

    An absent field gets its default, as in records of earlier versions.

    Args:
      kind: Dataclass.
      fields: Mapping of field names to JSON values.
      where: Prefix of error messages, such as a file's name.

    Raises:
      ValueError: if a field is missing, unknown, not allowed or refused by `kind`; the message
        begins with `where` and names the field.
    """
    values = checked(fields, Mapping[str, Any], where)
    for name in values.keys() - named(kind).keys():
        if notice := removal_notice(name):
            raise ValueError(f"{where}: {name} was {notice}")
    try:
        return records.build(kind, values)
    except records.Refused as error:
        raise ValueError(f"{where}: {error}") from None


def is_path(hint: Any) -> bool:
    """Returns True if a field of this type may be a path."""
    return hint is Path or Path in get_args(hint)


def without_paths(settings: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """Returns a task's settings that are no paths.

    Args:
      settings: Settings by name, as JSON values.
      kind: Class of the task, whose fields of paths are left out, as `data` is.
    """
    hints = field_types(kind) if dataclasses.is_dataclass(kind) else {}
    return {
        name: value
        for name, value in settings.items()
        if name != "data" and not is_path(hints.get(name))
    }
