"""Values read back from JSON are of the type they had, or are refused by name."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import pytest

from dpsgd.runs.records import build, checked

OF_THE_TYPE = [
    (None, None),
    (None, int | None),
    (3, int),
    (3, float),
    (3.5, float),
    (True, bool),
    ("a", str),
    ("a", Literal["a", "b"]),
    ({"a": [1]}, dict[str, Any]),
    ({"a": [0, 5]}, Mapping[str, list[int]]),
    ([], list[int]),
    (["a", None], list[str | None]),
    ((1, 2.5), float | tuple[float, ...]),
    ([{}, 1], list),
]
OF_ANOTHER = [
    (None, int, "NoneType is not an instance of int"),
    ("3", int, "str is not an instance of int"),
    (3.0, int, "float is not an instance of int"),
    (True, int, "bool is not an instance of int"),
    (False, float, "bool is not an instance of float"),
    (-(10**400), float, "it is too large for a float"),
    (1, bool, "int is not an instance of bool"),
    ("c", Literal["a", "b"], "'c' is none of 'a', 'b'"),
    (True, Literal[1], "True is none of 1"),
    ([1, None], list[int], "item 1 of list: NoneType is not an instance of int"),
    ({"a": 1}, dict[str, str], "value of key 'a' of dict: int is not an instance of str"),
    ({1: "a"}, Mapping[str, str], "key 1 of dict: int is not an instance of str"),
    ({"a": [0, "5"]}, Mapping[str, list[int]], "value of key 'a' of dict: item 1 of list: str"),
    ("3", int | None, "str is not an instance of int, and str is not an instance of None"),
    ((1, "2"), float | tuple[float, ...], "item 1 of tuple: str is not an instance of float"),
]


@pytest.mark.parametrize(("value", "kind"), OF_THE_TYPE)
def test_a_value_of_the_type_is_returned(value, kind):
    assert checked(value, kind, "here") is value


@pytest.mark.parametrize(("value", "kind", "why"), OF_ANOTHER)
def test_a_value_of_another_type_is_refused_in_a_line_that_says_where(value, kind, why):
    with pytest.raises(ValueError, match=r"^here: ") as error:
        checked(value, kind, "here")
    assert why in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", [tuple[int, str], set[int], ClassVar[int]])
def test_a_type_that_is_not_known_is_never_taken_for_one_that_fits(kind):
    with pytest.raises(TypeError, match="records hold nothing of the type"):
        checked(set() if kind == set[int] else (1, "a"), kind, "here")


@dataclass(frozen=True)
class Sizes:
    """What a record holds."""

    LEAST: ClassVar[int] = 1
    width: int
    depths: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.width < self.LEAST:
            raise ValueError("width must be at least 1")


def test_a_dataclass_is_built_of_lists_and_defaults():
    assert build(Sizes, {"width": 2, "depths": [3, 4]}, "here") == Sizes(2, (3, 4))
    assert build(Sizes, {"width": 2}, "here") == Sizes(2)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({}, "here: width is missing"),
        ({"width": 0}, "here: width must be at least 1"),
        ({"width": True}, "here, width: bool is not an instance of int"),
        ({"width": 1, "height": 2}, "here: 'height' is unknown"),
        ({"width": 1, "LEAST": 0}, "here: 'LEAST' is unknown"),
        ([1], "here: list is not an instance of Mapping"),
    ],
)
def test_fields_that_do_not_fit_a_dataclass_are_refused_by_name(fields, why):
    with pytest.raises(ValueError, match=r"^here") as error:
        build(Sizes, fields, "here")
    assert str(error.value) == why
