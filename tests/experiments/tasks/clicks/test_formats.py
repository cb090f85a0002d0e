"""Rows without labels, of a file or of a table, become the columns of the same rows with labels."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.tasks.clicks.criteo import display, search
from experiments.tasks.clicks.formats import format_of
from experiments.tasks.clicks.raw import format as raw
from experiments.tasks.clicks.raw.files import DataError
from experiments.tasks.clicks.schema import sponsored_search

SEARCH = [name for name in search.FORMAT.columns]
OUTCOMES = ["Sale", "SalesAmountInEuro", "time_delay_for_conversion", "product_price"]

DISPLAY_ROWS = [
    ["1", *["7", "-2", "", "0", *["12345"] * 9], *["68fd1e64", "", *["0000000A"] * 24]],
    ["0", *["", "5", "999", "-1", *["1"] * 9], *["", "ffffffff", *["05db9164"] * 24]],
]
SEARCH_ROW = dict.fromkeys(SEARCH, "4C90FD52FC53D2C1") | {
    "Sale": "0", "SalesAmountInEuro": "-1.0", "time_delay_for_conversion": "-1",
    "click_timestamp": "1596439471", "nb_clicks_1week": "50", "product_price": "0.0",
    "user_id": "-1", "product_title": "A B",
}  # fmt: skip


def write(path, rows):
    path.write_text("".join("\t".join(row) + "\n" for row in rows))
    return path


def only(blocks):
    (block,) = blocks
    return block


def assert_same_features(got, expected):
    assert "label" not in got
    assert set(got) == set(expected) - {"label"}
    for name, column in got.items():
        assert column.dtype == expected[name].dtype
        np.testing.assert_array_equal(column, expected[name], err_msg=name)


@pytest.mark.parametrize("first", [0, 1], ids=["labelled", "unlabelled"])
def test_a_display_file_is_read_for_its_features_whether_it_has_labels_or_not(tmp_path, first):
    labelled = only(display.read(write(tmp_path / "train.txt", DISPLAY_ROWS), hash_seed=3))
    path = write(tmp_path / "test.txt", [row[first:] for row in DISPLAY_ROWS])
    assert_same_features(only(display.read(path, hash_seed=3, labelled=False)), labelled)


@pytest.mark.parametrize("absent", [0, 1, 3, 4])
def test_a_search_file_lacks_the_sale_or_all_that_is_known_after_one(tmp_path, absent):
    rows = [SEARCH_ROW, {**SEARCH_ROW, "user_id": "X", "nb_clicks_1week": ""}]
    labelled = only(search.FORMAT.read(write(tmp_path / "log", [r.values() for r in rows])))
    kept = [name for name in SEARCH if name not in OUTCOMES[:absent]]
    path = write(tmp_path / "new", [[row[name] for name in kept] for row in rows])
    assert_same_features(only(search.FORMAT.read(path, labelled=False)), labelled)


def test_labels_are_not_looked_at_where_they_are_not_needed(tmp_path):
    path = write(tmp_path / "rows.txt", [["?", *row[1:]] for row in DISPLAY_ROWS])
    assert len(only(display.read(path, labelled=False))["integers"]) == 2
    with pytest.raises(DataError, match=r"rows.txt, line 1, column label: found '\?'"):
        list(display.read(path))


def test_a_file_without_a_feature_of_the_model_is_refused_with_what_it_may_hold(tmp_path):
    with_price = format_of(sponsored_search(("product_price",)))
    path = write(tmp_path / "new", [[SEARCH_ROW[n] for n in SEARCH if n not in OUTCOMES]])
    expected = r"new, line 1: found 19 columns, expected 23 .*; or 22: .*; or 20: time, clicks, "
    with pytest.raises(DataError, match=expected):
        list(with_price.read(path, labelled=False))
    short = write(tmp_path / "short", [row[2:] for row in DISPLAY_ROWS])
    with pytest.raises(DataError, match=r"line 1: found 38 columns, .*; or 39: I1-I13, C1-C26$"):
        list(display.read(short, labelled=False))


def test_a_later_line_of_an_unlabelled_file_is_held_to_the_first(tmp_path):
    path = write(tmp_path / "test.txt", [DISPLAY_ROWS[0][1:], DISPLAY_ROWS[1]])
    with pytest.raises(DataError, match=r"line 2: found 40 columns, expected 39 .*: I1-I13, C1"):
        list(display.read(path, labelled=False))
    path = write(tmp_path / "bad.txt", [DISPLAY_ROWS[0][1:], ["x", *DISPLAY_ROWS[1][2:]]])
    with pytest.raises(DataError, match="line 2, column I1: found 'x', expected an integer"):
        list(display.read(path, labelled=False))


def table(rows, columns):
    return {name: [row[i] for row in rows] for i, name in enumerate(columns)}


integers = st.one_of(st.just(""), st.integers(-(10**6), 10**17).map(str))
hexadecimals = st.one_of(st.just(""), st.integers(0, 2**32 - 1).map("{:08x}".format))


@settings(max_examples=settings().max_examples // 3)
@given(
    st.lists(
        st.tuples(st.just("0"), *[integers] * 13, *[hexadecimals] * 26), min_size=1, max_size=5
    )
)
def test_a_table_of_texts_has_the_columns_of_the_file(rows):
    text = "".join("\t".join(row) + "\n" for row in rows).encode()
    expected = display.FORMAT.parse(text, 5)
    got = display.FORMAT.encode(table(rows, display.FORMAT.columns), hash_seed=5)
    assert_same_features(got, expected)


@pytest.mark.parametrize("missing", [None, float("nan"), np.float32("nan"), ""])
def test_numbers_stand_for_their_digits_and_what_is_missing_for_nothing(missing):
    texts = {name: ["12", ""] for name in display.FORMAT.schema.integers}
    texts |= {name: ["0000000a", ""] for name in display.FORMAT.schema.categories}
    expected = display.FORMAT.encode(texts)
    for twelve in (12, 12.0, np.int32(12), np.float32(12), b"12"):
        values = {name: [twelve, missing] for name in display.FORMAT.schema.integers}
        values |= {
            name: np.array(["0000000a", missing], dtype=object)
            for name in display.FORMAT.schema.categories
        }
        assert_same_features(display.FORMAT.encode(values), {**expected, "label": None})


def test_a_table_of_any_length_is_encoded_and_a_fault_in_it_found(monkeypatch):
    rows = table(DISPLAY_ROWS * 5, display.FORMAT.columns)
    whole = display.FORMAT.encode(rows)
    monkeypatch.setattr(raw, "BLOCK_ROWS", 4)
    assert_same_features(display.FORMAT.encode(rows), whole)
    rows["C3"][9] = "?"
    with pytest.raises(ValueError, match=r"^row 9, column C3: found '\?'"):
        display.FORMAT.encode(rows)
    rows["C2"][5] = 7
    with pytest.raises(ValueError, match=r"^row 5, column C2: found 7"):
        display.FORMAT.encode(rows)


def test_no_rows_are_no_rows():
    columns = display.FORMAT.encode({name: [] for name in display.FORMAT.columns})
    assert columns["integers"].shape == (0, 13)
    assert columns["categories"].shape == (0, 26)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("I2", "1\t2", r"row 1, column I2: found '1\\t2', expected an integer"),
        ("I2", "1\n2", r"row 1, column I2: found '1\\n2'"),
        ("I2", 1.5, "row 1, column I2: found 1.5"),
        ("I2", True, "row 1, column I2: found True"),
        ("I2", float("inf"), "row 1, column I2: found inf"),
        ("C1", "xyz", "row 1, column C1: found 'xyz', expected eight hexadecimal digits"),
        ("C1", 12345678, "row 1, column C1: found 12345678, expected eight"),
        ("C1", "\ud800", r"row 1, column C1: found "),
        ("C26", ["05db9164"], "row 1, column C26: found "),
    ],
)
def test_a_value_that_no_file_holds_is_refused_with_its_row_and_column(name, value, expected):
    rows = table(DISPLAY_ROWS, display.FORMAT.columns)
    rows[name][1] = value
    with pytest.raises(ValueError, match=expected):
        display.FORMAT.encode(rows)


def test_a_float_stands_for_no_identifier_since_nobody_knows_how_it_was_written():
    rows = {name: [value] for name, value in SEARCH_ROW.items()}
    search.FORMAT.encode({**rows, "partner_id": [17]})
    with pytest.raises(ValueError, match=r"row 0, column partner_id: found 17\.0, expected"):
        search.FORMAT.encode({**rows, "partner_id": [17.0]})


def test_a_table_without_a_feature_or_with_columns_of_other_lengths_is_refused():
    rows = table(DISPLAY_ROWS, display.FORMAT.columns)
    del rows["label"]
    display.FORMAT.encode({**rows, "anything": []})
    with pytest.raises(ValueError, match="not of one length: I1 has 2, I2 has 1"):
        display.FORMAT.encode({**rows, "I2": ["1"]})
    del rows["I3"], rows["C9"]
    with pytest.raises(ValueError, match=r"the rows have no column I3, C9$"):
        display.FORMAT.encode(rows)
