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
    (None, int, "must be an integer, got None"),
    ("3", int, "must be an integer, got '3'"),
    (3.0, int, "must be an integer, got 3.0"),
    (True, int, "must be an integer, got True"),
    (False, float, "must be a finite number, got False"),
    (-(10**400), float, "must be a finite number, got -1000"),
    (1, bool, "must be true or false, got 1"),
    ("c", Literal["a", "b"], "must be a or b, got c"),
    (True, Literal[1], "must be 1, got True"),
    ([1, None], list[int], "[1] must be an integer, got None"),
    ({"a": 1}, dict[str, str], "a must be text, got 1"),
    ({1: "a"}, Mapping[str, str], "must be text, got 1"),
    ({"a": [0, "5"]}, Mapping[str, list[int]], "a[1] must be an integer, got '5'"),
    ("3", int | None, "must be an integer, got '3'"),
    ((1, "2"), float | tuple[float, ...], "[1] must be a finite number, got '2'"),
    ((1, 2), tuple[int, str], "[1] must be text, got 2"),
    ((1,), tuple[int, str], "must be 2 values, got (1,)"),
]


@pytest.mark.parametrize(("value", "kind"), OF_THE_TYPE)
def test_a_value_of_the_type_is_returned(value, kind):
    assert checked(value, kind, "here") == value


@pytest.mark.parametrize(("value", "kind", "why"), OF_ANOTHER)
def test_a_value_of_another_type_is_refused_in_a_line_that_says_where(value, kind, why):
    with pytest.raises(ValueError, match=r"^here: ") as error:
        checked(value, kind, "here")
    assert why in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", [ClassVar[int]])
def test_a_type_that_is_not_known_is_never_taken_for_one_that_fits(kind):
    with pytest.raises(TypeError, match="records hold nothing of the type"):
        checked((1, "a"), kind, "here")


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
        ({"width": True}, "here: width must be an integer, got True"),
        ({"width": 1, "height": 2}, "here: height is unknown; there are width, depths"),
        ({"width": 1, "LEAST": 0}, "here: LEAST is unknown; there are width, depths"),
        ([1], "here: must be a table, got [1]"),
    ],
)
def test_fields_that_do_not_fit_a_dataclass_are_refused_by_name(fields, why):
    with pytest.raises(ValueError, match=r"^here") as error:
        build(Sizes, fields, "here")
    assert str(error.value) == why
