"""What was written as JSON, read back with every value checked against the type it had."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

import typeguard

_T = TypeVar("_T")


def checked(value: Any, kind: Any, where: str) -> Any:
    """Returns `value` if it is of the type `kind`, all of its items included.

    Raises:
      ValueError: if it is not; the line begins with `where`.
    """
    try:
        return typeguard.check_type(
            value, kind, collection_check_strategy=typeguard.CollectionCheckStrategy.ALL_ITEMS
        )
    except typeguard.TypeCheckError as error:
        raise ValueError(f"{where}: {' '.join(str(error).split())}") from None


def build(kind: type[_T], fields: Any, where: str) -> _T:
    """Returns the dataclass `kind` with these fields, lists having been tuples before JSON.

    A field that is absent has its default, as in the record of a version that did not know it.

    Raises:
      ValueError: if a field is missing, unknown, of another type or refused by `kind`; the line
        begins with `where` and names the field.
    """
    given = dict(checked(fields, Mapping[str, Any], where))
    hints = typing.get_type_hints(kind)
    for name, value in given.items():
        if name not in hints:
            raise ValueError(f"{where}: {name!a} is unknown")
        value = tuple(value) if isinstance(value, list) else value
        given[name] = checked(value, hints[name], f"{where}, {name}")
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        required = field.default is field.default_factory is dataclasses.MISSING
        if required and field.name not in given:
            raise ValueError(f"{where}: {field.name} is missing")
    try:
        return kind(**given)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
