"""Annotated values are returned as annotated, or refused in one line that names the place."""

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accounting.records import (
    Count,
    Ge,
    Gt,
    Le,
    Lt,
    Must,
    Named,
    Positive,
    Record,
    Refused,
    Seed,
    build,
    field_texts,
    read,
)
from samplers.settings import SETTINGS


@dataclass(frozen=True)
class Inner(Record):
    """Settings within settings.

    Attributes:
      rate: Step
        size.
    """

    rate: Annotated[Positive, Named("step_size")] = 1.0
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outer(Record):
    """Settings of every kind.

    Attributes:
      count: Number of things.
    """

    count: Count
    share: Annotated[float, Ge(0), Le(1)] = 0.5
    bands: Annotated[int, Gt(0), Lt(9)] | Literal["auto"] | None = None
    even: Annotated[int, Must("an even number", lambda x: x % 2 == 0)] = 0
    switch: bool = False
    seed: Seed | None = None
    pair: tuple[int, str] = (0, "")
    table: dict[str, tuple[float, ...]] | None = None
    path: Path = Path()
    inner: Inner = Inner()


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
ODD = st.sampled_from(
    [-(10**400), "9" * 5000, "\ud800", "a\nb", "\x1b[2K", np.float32(2), np.int8(3),
     np.arange(3), object(), b"1", complex(1), float("nan"), Ellipsis, int]
) | st.just(5000).map(lambda power: 10**power)  # fmt: skip
VALUES = st.recursive(
    SCALARS | ODD,
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text() | st.integers(), x, max_size=2),
    max_leaves=4,
)
HINTS = [
    *(Count, Seed, float, str, bool, None, Any, Path, list[int], tuple[Positive, ...], Outer),
    *(tuple[int, str], dict[str, Count], Literal["a", 1], int | Literal["auto"] | None),
]


def returned(make):
    """Returns a value, or None if it was refused in one line."""
    line = ""
    try:
        return make()
    except Refused as refusal:
        line = str(refusal)
    assert line.isprintable()
    assert len(line) < 1000
    return None


@given(st.sampled_from(HINTS), VALUES, st.booleans())
def test_any_value_is_read_or_refused_in_one_line(hint, value, words):
    found = returned(lambda: read(hint, value, ("place",), words=words))
    if found is not None and hint is not Any:
        assert read(hint, found) == found


@given(st.sampled_from([Outer, *SETTINGS.values()]), st.data())
def test_any_table_is_built_or_refused_in_one_line(kind, data):
    names = st.sampled_from([*kind.__dataclass_fields__, "step_size"]) | st.text()
    table = data.draw(st.dictionaries(names, VALUES, max_size=4))
    found = returned(lambda: build(kind, table, ("file.toml",)))
    if found is not None:
        assert build(kind, vars(found)) == found


NUMBERS = st.integers() | st.floats() | st.text(st.sampled_from("0123456789.eE+-_ax"), max_size=9)


@given(NUMBERS)
def test_words_are_numbers_as_json_has_them(number):
    word = str(number)
    try:
        meant = json.loads(word.lstrip("+"), parse_constant=lambda constant: None)
    except ValueError:
        meant = None
    for kind in (int, float):
        found = returned(lambda kind=kind: read(kind, word, words=True))
        assert type(found) in (kind, type(None))
        if isinstance(meant, kind) and abs(meant) < 1e300 and not word.startswith("+"):
            assert found == meant


@pytest.mark.parametrize("word", ["46e6", "4.6e7", "46000000", "4.60e+07", "046e6"])
def test_a_count_is_a_whole_number_and_may_have_an_exponent(word):
    assert read(int, word, words=True) == 46_000_000
    for fraction in ("1.5e0", "46e-6", "1e999", "e6", "4.6"):
        with pytest.raises(Refused):
            read(int, fraction, words=True)


REFUSED = {
    "count must be an integer >= 1, got 0": {"count": 0},
    "count must be an integer >= 1, got '3'": {"count": "3"},
    "count must be an integer >= 1, got True": {"count": True},
    "count is missing": {},
    "cuont is unknown: did you mean count?": {"cuont": 1},
    "share must be a finite number >= 0 and <= 1, got nan": {"share": float("nan")},
    "share must be a finite number >= 0 and <= 1, got 1.5": {"share": 1.5},
    "bands must be an integer > 0 and < 9 or auto, got 9": {"bands": 9},
    "bands must be an integer > 0 and < 9 or auto, got aut: did you mean auto?": {"bands": "aut"},
    "even must be an even number, got 3": {"even": 3},
    "seed must be an integer >= 0 and < 2^64, got -1": {"seed": -1},
    "pair must be 2 values, got [1]": {"pair": [1]},
    "pair[1] must be text, got 2": {"pair": [1, 2]},
    "table.a[1] must be a finite number, got x": {"table": {"a": [1, "x"]}},
    "inner.step_size must be a finite number > 0, got 0": {"inner": {"step_size": 0}},
    "inner.rate is unknown; there are step_size, names": {"inner": {"names": [], "rate": 1}},
    "inner must be Inner, got 'a b'": {"inner": "a b"},
}


@pytest.mark.parametrize(("line", "table"), REFUSED.items(), ids=list(REFUSED))
def test_a_refusal_names_the_place_the_range_and_the_value(line, table):
    count = {} if not table or {"count", "cuont"} & table.keys() else {"count": 1}
    with pytest.raises(Refused) as refusal:
        build(Outer, count | table)
    assert str(refusal.value).startswith(line)


def test_python_gets_the_same_refusals_and_plain_values():
    with pytest.raises(Refused, match=r"^count must be an integer >= 1, got 0$"):
        Outer(0)
    found = Outer(np.int64(3), share=np.float32(0.5), table={"a": [1, 2]}, inner=Inner(2))
    assert (type(found.count), type(found.share), type(found.inner.rate)) == (int, float, float)
    assert found.table == {"a": (1.0, 2.0)}


def test_texts_of_fields_are_those_of_the_class_and_its_bases():
    @dataclass(frozen=True)
    class Deep(Outer):
        """More.

        Attributes:
          depth: Number of
            levels, at least: one.

        Raises:
          ValueError: Never.
        """

        depth: int = 1

    assert field_texts(Deep) == {
        "count": "Number of things.",
        "depth": "Number of levels, at least: one.",
    }


@pytest.mark.parametrize("kind", SETTINGS.values(), ids=list(SETTINGS))
def test_every_setting_of_a_sampler_has_a_text(kind):
    assert {field.name for field in fields(kind)} <= set(field_texts(kind.sampler))
