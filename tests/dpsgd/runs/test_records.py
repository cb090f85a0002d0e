"""Records come back from JSON as they were, or are refused at their place and by their field.

Which values an annotation allows is tested where it is decided, in tests/accounting.
"""

import json
from dataclasses import dataclass
from typing import ClassVar

import pytest

from dpsgd.removed import NOTICE
from dpsgd.runs.records import build, checked, fields_of, stated, to_json


@dataclass(frozen=True)
class Sizes:
    """What a record holds."""

    LEAST: ClassVar[int] = 1
    width: int
    depths: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.width < self.LEAST:
            raise ValueError("width must be at least 1")


@pytest.mark.parametrize("sizes", [Sizes(2, (3, 4)), Sizes(2)])
def test_records_come_back_from_json(sizes):
    assert build(Sizes, json.loads(json.dumps(to_json(sizes))), "here") == sizes
    short = stated(sizes, ("width", "depths"))
    assert ("depths" in short) == (sizes.depths != ())
    assert Sizes(**fields_of(Sizes, {**json.loads(json.dumps(short)), "more": 1})) == sizes


REFUSED = [
    ({}, "here: width is missing"),
    ({"width": 0}, "here: width must be at least 1"),
    ({"width": True}, "here: width must be an integer, got True"),
    ({"width": 1, "height": 2}, "here: height is unknown; there are width, depths"),
    ({"width": 1, "LEAST": 0}, "here: LEAST is unknown; there are width, depths"),
    ({"width": 1, "weights": 0}, f"here: weights was {NOTICE}"),
    ([1], "here: must be a table, got [1]"),
]


@pytest.mark.parametrize(("fields", "why"), REFUSED)
def test_unfit_fields_are_refused_by_name(fields, why):
    with pytest.raises(ValueError, match=r"^here") as error:
        build(Sizes, fields, "here")
    assert str(error.value) == why
    if {"missing", "integer,"} & set(why.split()):  # of single fields
        with pytest.raises(ValueError, match=r"^here") as error:
            fields_of(Sizes, fields, where="here")
        assert str(error.value) == why


def test_unfit_values_are_refused_at_their_place():
    with pytest.raises(ValueError, match=r"^here: a\[1\] must be an integer, got '5'$"):
        checked({"a": [0, "5"]}, dict[str, list[int]], "here")
    with pytest.raises(TypeError, match="records cannot hold values of the type"):
        checked((1, "a"), ClassVar[int], "here")
