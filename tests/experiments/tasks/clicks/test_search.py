"""The search log is read as a slow reader reads it, split at random, without its outcomes."""

import gzip
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.tasks.clicks.criteo import search
from experiments.tasks.clicks.formats import format_of
from experiments.tasks.clicks.raw.files import DataError
from experiments.tasks.clicks.schema import (
    DISPLAY_ADS,
    SEARCH_OUTCOMES,
    SPONSORED_SEARCH,
    Schema,
    sponsored_search,
)
from experiments.tasks.clicks.synthetic import rows as synthetic
from experiments.tasks.splits import random_split

COLUMNS = list(search.FORMAT.columns)
WORD = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def split_mix(x: int) -> int:
    """Finalise as SplitMix64 does, in Python integers."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & WORD
    return x ^ (x >> 31)


def slow_value(name: str, field: str) -> int | None:
    """Return the number that stands for a feature's field, None if it is missing."""
    if field in ("", "-1") or (name == "SalesAmountInEuro" and field == "-1.0"):
        return None
    if name == "click_timestamp":
        return int(field) // 3600 % 168
    if name == "nb_clicks_1week":
        return int(field) & WORD
    text = field.encode()
    state = len(text) * GOLDEN & WORD
    for at in range(0, len(text), 8):
        state = split_mix(state ^ int.from_bytes(text[at : at + 8], "little"))
    return state


def assert_columns_are(columns, lines, schema=SPONSORED_SEARCH, hash_seed=0):
    rows = [dict(zip(COLUMNS, line.split("\t"), strict=True)) for line in lines]
    assert columns["label"].tolist() == [int(row["Sale"]) for row in rows]
    assert columns["integers"].shape == columns["integers_missing"].shape == (len(rows), 0)
    for j, name in enumerate(schema.categories):
        values = [slow_value(name, row[name]) for row in rows]
        known = np.array([v or 0 for v in values], dtype=np.uint64)
        expected = schema.hash(known, j, hash_seed)
        expected[[v is None for v in values]] = 0
        np.testing.assert_array_equal(columns["categories"][:, j], expected, err_msg=name)


def read_all(path, format=search.FORMAT, **options):
    blocks = list(format.read(path, **options))
    return {name: np.concatenate([b[name] for b in blocks]) for name in blocks[0]}


HASH = "4C90FD52FC53D2C1C205844CB69575AB"
VALID = dict.fromkeys(COLUMNS, HASH) | {
    "Sale": "0",
    "SalesAmountInEuro": "-1.0",
    "time_delay_for_conversion": "-1",
    "click_timestamp": "1596439471",
    "nb_clicks_1week": "17",
    "product_price": "0.0",
    "product_title": f"{HASH} {HASH}",
    "product_gender": "-1",
}


def row(**fields) -> str:
    return "\t".join((VALID | fields).values())


identifiers = st.one_of(
    st.sampled_from(["", "-1", "-2", "0", HASH]),
    st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=40),
)
rows_ = st.fixed_dictionaries(
    {
        "Sale": st.sampled_from("01"),
        "click_timestamp": st.one_of(
            st.just("-1"), st.integers(-(10**18) + 1, 10**18 - 1).map(str)
        ),
        "nb_clicks_1week": st.one_of(st.sampled_from(["", "-1", "-7"]), st.integers(0).map(str)),
        **{name: identifiers for name in COLUMNS if name not in ("Sale", *COLUMNS[3:5])},
    }
).map(lambda fields: "\t".join(fields[name] for name in COLUMNS))


@pytest.mark.long
@given(
    st.lists(rows_, min_size=1, max_size=8),
    st.sampled_from(["\n", "\r\n"]),
    st.sampled_from(["", "\n", "\n\n"]),
    st.integers(0, 2**64 - 1),
    st.integers(1, 3000),
)
def test_every_valid_file_is_read_as_the_slow_reader_reads_it(
    tmp_path_factory, lines, line_end, end, hash_seed, block_bytes
):
    lines = [line for line in lines if len(line.split("\t")[4]) <= 18] or [row()]
    path = tmp_path_factory.getbasetemp() / "valid.tsv"
    path.write_bytes((line_end.join(lines) + end).encode())
    columns = read_all(path, hash_seed=hash_seed, block_bytes=block_bytes)
    assert_columns_are(columns, lines, hash_seed=hash_seed)


def test_real_rows_are_read(tmp_path, real_search_rows):
    lines = real_search_rows.read_text().splitlines()
    assert_columns_are(read_all(real_search_rows), lines)


@pytest.mark.parametrize(
    ("line", "column", "says"),
    [
        (row(Sale="2"), "Sale", "found '2', expected 0 or 1"),
        (row(Sale="-1"), "Sale", "found '-1', expected 0 or 1"),
        (row(Sale="Sale"), "Sale", "found 'Sale', expected 0 or 1"),
        (row(click_timestamp="2020-08-03"), "click_timestamp", "expected a time in seconds"),
        (row(click_timestamp="1" * 19), "click_timestamp", "of at most 18 digits"),
        (row(nb_clicks_1week="1.5"), "nb_clicks_1week", "found '1.5', expected an integer"),
        (row(user_id="caf\u00e9"), "user_id", "expected printable ASCII text"),
        (row(product_price="\u20ac 3"), "product_price", "expected printable ASCII text"),
        (row(product_brand="a\rb"), "product_brand", r"found 'a\rb', expected printable"),
        (row(product_brand="a\x7fb"), "product_brand", r"found 'a\x7fb', expected printable"),
        (row(product_brand="a\0b"), "product_brand", r"found 'a\x00b', expected printable"),
        (row() + "\t", None, "found 24 columns, expected 23 separated by tabs: Sale"),
        (row().replace("\t", ","), None, "found 1 column, expected 23"),
        ("", None, "a blank line between rows, expected 23 columns"),
    ],
)
@pytest.mark.parametrize("before", [0, 19])
def test_bad_lines_are_named_by_file_line_and_column(tmp_path, line, column, says, before):
    path = tmp_path / "log.tsv"
    lines = [row()] * before + [line] + [row()] * 3 + [row(Sale="9")]
    path.write_bytes("\n".join(lines).encode())
    with pytest.raises(DataError) as caught:
        search.FORMAT.prepare(path, tmp_path / "store")
    place = f"{path}, line {before + 1}" + (f", column {column}" if column else "")
    assert str(caught.value).startswith(f"{place}: ")
    assert says in str(caught.value)
    assert str(caught.value).isprintable()
    assert [p.name for p in tmp_path.iterdir()] == ["log.tsv"]


# --- What is read, and what is not ---------------------------------------------------------------


def test_outcomes_change_nothing_unless_they_are_asked_for(tmp_path):
    """Rows that differ in sales amount, delay and price alone are one row to the model."""
    lines = [
        row(SalesAmountInEuro=amount, time_delay_for_conversion=delay, product_price=price)
        for amount, delay, price in [("-1.0", "-1", "0.0"), ("20.5", "3600", "19.99")]
    ]
    path = tmp_path / "log.tsv"
    path.write_text("\n".join(lines))
    ids = read_all(path)["categories"]
    np.testing.assert_array_equal(ids[0], ids[1])
    included = sponsored_search(tuple(SEARCH_OUTCOMES))
    block = read_all(path, format=format_of(included))
    assert_columns_are(block, lines, schema=included)
    np.testing.assert_array_equal(block["categories"][:, : ids.shape[1]], ids)
    assert (block["categories"][0, ids.shape[1] :] != block["categories"][1, ids.shape[1] :]).all()


def test_only_outcomes_can_be_included_and_each_once():
    for include in (("Sale",), ("user_id",), ("product_price", "product_price")):
        with pytest.raises(ValueError, match="can include each of SalesAmountInEuro, "):
            sponsored_search(include)


def test_every_column_is_a_feature_an_outcome_or_the_label_and_buckets_fit_the_cardinalities():
    assert sorted(COLUMNS) == sorted([*SPONSORED_SEARCH.categories, *SEARCH_OUTCOMES, "Sale"])
    assert SPONSORED_SEARCH.integers == ()
    assert all(b & (b - 1) == 0 and b <= 1 << 20 for b in SPONSORED_SEARCH.buckets)


def test_a_schema_without_a_raw_format_is_refused():
    assert format_of(DISPLAY_ADS).schema is DISPLAY_ADS
    with pytest.raises(ValueError, match="'other' have no raw format"):
        format_of(Schema("other", ("x",), (), ()))
    with pytest.raises(ValueError, match="criteo-search files have no column colour"):
        format_of(Schema("criteo-search", (), ("colour",), (1024,)))


# --- The split -----------------------------------------------------------------------------------


def test_the_random_split_keeps_order_depends_on_row_numbers_alone_and_is_80_10_10():
    """Binomial counts, within six standard deviations: a false alarm has a probability of 1e-8."""
    num_rows = 200_000
    whole = random_split({"label": np.arange(num_rows)}, 0)
    for part, share in {"train": 0.8, "validation": 0.1, "test": 0.1}.items():
        rows = whole[part]["label"]
        assert (np.diff(rows) > 0).all()
        assert abs(len(rows) - share * num_rows) < 6 * np.sqrt(num_rows * share * (1 - share))
    assert sum(len(part["label"]) for part in whole.values()) == num_rows
    drawn = [split_mix((i + 1) * GOLDEN & WORD) for i in range(1000)]
    expected = {"test": [], "validation": [], "train": []}
    for i, x in enumerate(drawn):
        expected["test" if x < 2**64 // 10 else "validation" if x < 2**64 // 5 else "train"] += [i]
    for part, rows in expected.items():
        assert whole[part]["label"][: len(rows)].tolist() == rows
    for first in (1, 777):
        rest = random_split({"label": np.arange(first, num_rows)}, first)
        for part in whole:
            rows = whole[part]["label"]
            np.testing.assert_array_equal(rest[part]["label"], rows[rows >= first])


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    path = tmp_path_factory.mktemp("raw") / "log.tsv"
    synthetic.write_raw(path, 30_000, 1, log=synthetic.SEARCH)
    return path


@pytest.mark.long
def test_a_store_holds_every_row_once_split_as_promised_plain_or_gzip(raw, tmp_path):
    store = search.FORMAT.prepare(raw, tmp_path / "plain", hash_seed=5)
    store.verify()
    parts = random_split(read_all(raw, hash_seed=5), 0)
    assert list(store.splits) == list(parts) == ["train", "validation", "test"]
    for name, part in parts.items():
        for column, values in store.load(name).items():
            np.testing.assert_array_equal(values, part[column])
    (tmp_path / "log.gz").write_bytes(gzip.compress(raw.read_bytes(), 1))
    zipped = search.FORMAT.prepare(tmp_path / "log.gz", tmp_path / "zipped", hash_seed=5)
    assert (zipped.shards, zipped.splits) == (store.shards, store.splits)
    assert store.source == {"format": "criteo-search", "file": "log.tsv"}


def test_changing_or_appending_a_row_moves_no_other(raw, tmp_path):
    lines = raw.read_text().splitlines()[:1000]
    before = prepared(tmp_path / "a", lines)
    changed = prepared(tmp_path / "b", [*lines[:5], row(Sale="1"), *lines[6:], row()])
    assert changed.schema == before.schema
    for split, (begin, end) in before.splits.items():
        old, now = before.load(split), changed.load(split)
        differs = [
            (old[name] != now[name][: end - begin]).reshape(end - begin, -1).any(axis=1)
            for name in ("label", "categories")
        ]
        assert np.any(differs, axis=0).sum() == (split == "train")  # row 5 trains


def prepared(out, lines):
    source = out.parent / f"{out.name}.tsv"
    source.write_text("\n".join(lines))
    return search.FORMAT.prepare(source, out)


def test_summary_and_names_of_columns_are_those_of_the_publishers():
    assert COLUMNS[:6] == [
        *("Sale", "SalesAmountInEuro", "time_delay_for_conversion"),
        *("click_timestamp", "nb_clicks_1week", "product_price"),
    ]
    assert re.fullmatch(r"product_category_[1-7]", COLUMNS[11])
    assert COLUMNS[-5:] == [
        *("product_country", "product_id", "product_title", "partner_id", "user_id")
    ]
