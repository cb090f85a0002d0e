"""Data sets of TensorFlow Datasets, without TensorFlow: rows of single-valued features."""

import json
import sys

import numpy as np
import pytest

pytest.importorskip("array_record", reason="array_record has no wheel for this Python or system")

import tensorflow_datasets as tfds

from experiments import cli
from experiments.tasks.clicks.formats import format_of, prepare_tfds
from experiments.tasks.clicks.schema import Schema, log_transform
from experiments.tasks.splits import random_halves, random_split
from experiments.tasks.tfds import SourceError
from tests.experiments.tasks.built import built


@pytest.fixture(autouse=True)
def several_reads(monkeypatch):
    monkeypatch.setattr("experiments.tasks.tfds.ROWS_PER_READ", 6)


def person(i, **fields):
    return {
        "age": np.float32(np.nan if i % 7 == 0 else i / 3),
        "visits": i - 5,
        "name": ["", "Ada", "Grace Hopper", "Zoë"][i % 4],
        "city": i % 3,
        "member": i % 2 == 0,
        "bought": i % 5 == 0,
    } | fields


FEATURES = {
    "age": np.float32,
    "visits": np.int64,
    "name": tfds.features.Text(),
    "city": tfds.features.ClassLabel(names=["Basel", "Uri", "Zug"]),
    "member": np.bool_,
    "bought": tfds.features.ClassLabel(num_classes=2),
}


def people(tmp_path, splits, more=None):
    return str(built(tmp_path / "data", "people", FEATURES | (more or {}), splits))


def prepare(folder, out, **options):
    return prepare_tfds(folder, out, **{"label": "bought"} | options)


def test_numbers_are_transformed_and_categories_are_hashed(tmp_path):
    rows = {"train": [person(i) for i in range(40)], "validation": [person(7)]}
    rows["test"] = [person(i) for i in range(9)]
    folder = people(tmp_path, rows)
    store = prepare(folder, tmp_path / "store", text_buckets=512, hash_seed=4)
    assert store.schema == Schema(
        "tfds:people", ("age", "visits"), ("city", "member", "name"), (1024, 1024, 512), "bought"
    )
    assert store.splits == {"train": 40, "validation": 1, "test": 9}
    columns = store.load("train")
    i = np.arange(40)
    np.testing.assert_array_equal(columns["label"], i % 5 == 0)
    age = np.where(i % 7 == 0, 0, (i / 3).astype(np.float32))
    np.testing.assert_array_equal(columns["integers"][:, 0], log_transform(age))
    np.testing.assert_array_equal(columns["integers"][:, 1], log_transform(i - 5))
    np.testing.assert_array_equal(columns["integers_missing"][:, 0], i % 7 == 0)
    assert not columns["integers_missing"][:, 1].any()
    table = {name: [row[name] for row in rows["train"]] for name in rows["train"][0]}
    words = {"city": [str(c) for c in table["city"]], "member": ["true", "false"] * 20}
    encoded = format_of(store.schema, 4).encode(table | words)
    for name, column in encoded.items():
        np.testing.assert_array_equal(columns[name], column)
    city, member, name = columns["categories"].T
    assert [len({*ids}) for ids in (city, member, name)] == [3, 2, 4]
    assert (name[0::4] == 0).all()  # the empty text is missing
    assert "tensorflow" not in sys.modules


def test_a_class_that_is_not_known_is_missing(tmp_path):
    rows = [person(i, city=-1 if i < 20 else 2, bought=i % 2) for i in range(40)]
    store = prepare(people(tmp_path, {"train": rows}), tmp_path / "s")
    ids = [int(i) for split in store.splits for i in store.load(split)["categories"][:, 0]]
    assert ids.count(0) == 20


def test_missing_splits_are_split_off_by_row_number(tmp_path):
    rows = [person(i) for i in range(60)]
    visits = {"visits": log_transform(np.arange(60) - 5)}

    def numbers(store, split):
        return store.load(split)["integers"][:, 1].tolist()

    alone = people(tmp_path / "a", {"train": rows})
    store = prepare(alone, tmp_path / "1")
    expected = random_split({"label": visits["visits"], **visits}, 0)
    for split in ("train", "validation", "test"):
        assert numbers(store, split) == expected[split]["visits"].tolist()
    for other in ("validation", "test"):
        folder = people(tmp_path / other, {"train": rows, other: rows, "unsupervised": rows[:1]})
        store = prepare(folder, tmp_path / f"{other} store")
        assert numbers(store, "train") == visits["visits"].tolist()
        halves = random_halves({"label": visits["visits"], **visits}, 0)
        for split in ("validation", "test"):
            assert numbers(store, split) == halves[split]["visits"].tolist()


def test_features_that_do_not_fit_are_named_and_can_be_left_out(tmp_path):
    more = {"face": tfds.features.Tensor(shape=(2,), dtype=np.float32), "tags": {"a": np.int64}}
    row = person(1, face=np.zeros(2, np.float32), tags={"a": 3})
    folder = people(tmp_path, {"train": [row] * 30}, more)
    with pytest.raises(SourceError, match=r"face \(Tensor\), tags \(FeaturesDict\); leave"):
        prepare(folder, tmp_path / "s")
    with pytest.raises(SourceError, match="has no feature 'fase'; it has age, bought, city"):
        prepare(folder, tmp_path / "s", leave_out=("fase",))
    with pytest.raises(SourceError, match="has no feature 'label'"):
        prepare_tfds(folder, tmp_path / "s")
    store = prepare(folder, tmp_path / "s", leave_out=("face", "tags", "name"))
    assert store.schema.categories == ("city", "member")


@pytest.mark.parametrize(
    ("fields", "label", "says"),
    [
        ({}, "visits", "split train, record 2, feature visits: found 2, expected 0 or 1"),
        ({"age": np.float32(np.inf)}, "bought", "record 7, feature age: found inf, expected a fin"),
        ({"bought": -1}, "bought", "record 7, feature bought: found -1, expected 0 or 1"),
    ],
)
def test_bad_values_are_named_by_split_record_and_feature(tmp_path, fields, label, says):
    rows = [person(i, visits=i) for i in range(20)]
    rows[7] |= fields
    with pytest.raises(SourceError, match=says):
        prepare(people(tmp_path, {"train": rows}), tmp_path / "s", label=label)
    assert not (tmp_path / "s").exists()


def test_other_formats_and_lost_records_are_refused(tmp_path):
    folder = people(tmp_path, {"train": [person(i) for i in range(30)]})
    info = tmp_path / "data" / "people" / "1.0.0" / "dataset_info.json"
    whole = json.loads(info.read_text())
    for account in ("29", "31"):
        whole["splits"][0]["shardLengths"] = [account]
        info.write_text(json.dumps(whole))
        with pytest.raises(SourceError, match=f"has 30 records, but .* declares {account}; build"):
            prepare(folder, tmp_path / "s")
    info.write_text(json.dumps(whole | {"fileFormat": "parquet"}))
    with pytest.raises(
        SourceError, match=r"is stored as parquet in .*; build it with file_format="
    ):
        prepare(folder, tmp_path / "s")
    with pytest.raises(SourceError, match="no_such_data cannot be opened"):
        prepare("no_such_data", tmp_path / "s", data_dir=tmp_path)
    with pytest.raises(SourceError, match=r"mnist:9\.9\.9 cannot be opened"):
        prepare("mnist:9.9.9", tmp_path / "s", data_dir=tmp_path)
    with pytest.raises(SourceError, match=r"titanic cannot be opened.*find dataset files"):
        prepare("titanic", tmp_path / "s", data_dir=tmp_path)
    renamed = people(tmp_path / "renamed", {"rows": [person(1)]})
    with pytest.raises(SourceError, match="has no split 'train'; it has rows"):
        prepare(renamed, tmp_path / "s")


def test_the_command_prepares_a_store(tmp_path, capsys):
    folder = people(tmp_path, {"train": [person(i) for i in range(300)]})
    words = ["prepare", "tfds", folder, str(tmp_path / "store"), "--label", "bought"]
    assert cli.main([*words, "--leave-out", "name", "city"]) == 0
    assert "300 rows in" in capsys.readouterr().out
    assert cli.main(words) == 2
    assert "exists already" in capsys.readouterr().err
