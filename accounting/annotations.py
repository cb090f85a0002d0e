"""Type annotations with ranges of values, and their text in messages."""

from __future__ import annotations

import functools
import math
import operator
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

_SIGNS = {">=": operator.ge, ">": operator.gt, "<=": operator.le, "<": operator.lt}


class Bound(NamedTuple):
    """Limit of a number, as `Annotated[int, Ge(1)]`; None is not compared."""

    sign: str
    limit: float

    def allows(self, value: Any) -> bool:
        """Returns whether `value` is within the limit."""
        return _SIGNS[self.sign](value, self.limit)

    def __str__(self) -> str:
        power = math.log2(abs(self.limit) or 1)
        in_words = f"2^{power:g}" if power > 19 and power.is_integer() else f"{self.limit:g}"
        return f"{self.sign} {in_words}"


Ge = functools.partial(Bound, ">=")
Gt = functools.partial(Bound, ">")
Le = functools.partial(Bound, "<=")
Lt = functools.partial(Bound, "<")


class Must(NamedTuple):
    """Condition on a value with its words, as `Must("a size such as 8GB", is_size)`."""

    words: str
    holds: Any

    def allows(self, value: Any) -> bool:
        """Returns whether the condition holds."""
        return bool(self.holds(value))


class Named(NamedTuple):
    """Name of a field in commands, files and messages, if it is not the attribute's."""

    name: str


STATED = "stated"
"""Mark of a field that a record states even at its default, `Annotated[bool, STATED]`."""

Count = Annotated[int, Ge(1), Lt(2**63)]
Positive = Annotated[float, Gt(0)]
Seed = Annotated[int, Ge(0), Lt(2**64)]

_NOUNS: dict[Any, str] = {
    int: "an integer",
    float: "a finite number",
    str: "text",
    bool: "true or false",
    Path: "a path",
    type(None): "null",
}


def described(hint: Any) -> str:
    """Returns the values that an annotation allows, in words.

    >>> described(Annotated[float, Ge(0), Lt(1)] | None), described(Literal["adam", "sgd"])
    ('a finite number >= 0 and < 1', 'adam or sgd')
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        conditions = [mark.words for mark in arguments if isinstance(mark, Must)]
        bounds = " and ".join(str(m) for m in arguments if isinstance(m, Bound) and m != Lt(2**63))
        return " and ".join(conditions) or f"{described(arguments[0])} {bounds}".rstrip()
    if origin is Literal:
        return _either(list(map(str, arguments)))
    if origin in (Union, types.UnionType):
        kinds = [kind for kind in arguments if kind is not type(None)] or list(arguments)
        return _either(list(dict.fromkeys(map(described, kinds))))
    if origin in (list, tuple):
        any_length = origin is list or arguments[1:] == (...,)
        return "a list" if any_length else f"{len(arguments)} values"
    if isinstance(origin, type):
        return "a table" if issubclass(origin, Mapping) else f"a {origin.__name__}"
    if hint in _NOUNS or hint is None:
        return _NOUNS[hint if hint is not None else type(None)]
    return hint.__name__


def _either(choices: list[str]) -> str:
    *first_choices, last = choices
    return f"{', '.join(first_choices)} or {last}" if first_choices else last
