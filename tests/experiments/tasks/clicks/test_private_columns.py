"""Bounds and values chosen privately: of training rows alone, at a cost that every run counts."""

from __future__ import annotations

import csv
import json
import math

import numpy as np
import pytest
from scipy import stats

import dpsgd
from accounting import DataRelease, GaussianProfile
from dpsgd.noise.secure import rounded_gaussian
from dpsgd.runs.ledger import read
from experiments import cli
from experiments.tasks.clicks.store import Store
from experiments.tasks.clicks.tabular.format import TableFormat, table_schema
from experiments.tasks.clicks.tabular.private import PrivateColumns
from experiments.tasks.clicks.task import Clicks
from experiments.tasks.splits import Split, random_masks
from samplers import Poisson

COLUMNS = {"categories": ("city", "device"), "numbers": ("age", "sum"), "missing": ("NA",)}
FORMAT = TableFormat(table_schema("y", **COLUMNS))
ASKED = PrivateColumns({"age": (0.0, 1000.0), "sum": (-1e6, 1e6)}, ("city",), epsilon=1.0)
ROWS = 6000
KEY = bytes(range(32))


def rows():
    rng = np.random.default_rng(0)
    city = rng.choice(["Uri", "Zug", "Bern", "", "NA"], ROWS, p=[0.5, 0.3, 0.1, 0.05, 0.05])
    ages = [f"{x:.1f}" if i % 10 else "" for i, x in enumerate(rng.uniform(20, 60, ROWS))]
    columns = [rng.integers(0, 2, ROWS), city, rng.integers(0, 9, ROWS), ages]
    return [list(map(str, row)) for row in zip(*columns, rng.normal(0, 50, ROWS), strict=True)]


def write(path, found):
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([["y", "city", "device", "age", "sum"], *found])
    return path


def counts(path, order="random", asked=ASKED):
    format = TableFormat(FORMAT.schema, split=Split(order))
    return format._counts([format.open(path)], asked)


@pytest.mark.parametrize("order", ["random", "chronological"])
def test_training_rows_are_counted_and_no_others(tmp_path, order):
    found = rows()
    is_train = np.arange(ROWS) < 0.8 * ROWS
    if order == "random":
        is_train = random_masks(np.arange(ROWS, dtype=np.uint64))["train"]
    whole = counts(write(tmp_path / "all.csv", found), order)
    assert whole.num_rows == is_train.sum()
    train = [row for row, kept in zip(found, is_train, strict=True) if kept]
    for text in ("Uri", "Zug", "Bern"):
        assert whole.texts["city"][text] == sum(row[1] == text for row in train)
    assert set(whole.texts["city"]) == {"Uri", "Zug", "Bern"}  # what is missing is no value
    assert whole.bins["age"].sum() == sum(row[3] != "" for row in train)
    other = [row if kept else ["0", "Rome", "1", "999", "1"] for row, kept in
             zip(found, is_train, strict=True)]  # fmt: skip
    same = counts(write(tmp_path / "other.csv", other), order)
    assert same.texts == whole.texts
    assert all(np.array_equal(same.bins[name], whole.bins[name]) for name in whole.bins)


def test_a_row_moves_one_count_by_one_in_each_column(tmp_path):
    found = rows()
    number = int(np.flatnonzero(random_masks(np.arange(ROWS, dtype=np.uint64))["train"])[5])
    whole = counts(write(tmp_path / "all.csv", found))
    found[number] = [found[number][0], "", "", "", ""]  # the null row
    without = counts(write(tmp_path / "without.csv", found))
    moved = [np.abs(whole.bins[name] - without.bins[name]).sum() for name in whole.bins]
    texts = whole.texts["city"]
    moved.append(sum(abs(texts[text] - without.texts["city"][text]) for text in texts))
    assert max(moved) <= 1
    assert whole.num_rows == without.num_rows


def test_bounds_hold_almost_all_rows_and_frequent_values_are_kept(tmp_path):
    schema, record = counts(write(tmp_path / "all.csv", rows())).released(ASKED, KEY)
    low, high = schema.bounded["age"]
    assert 15 <= low <= 21
    assert 58 <= high <= 75
    low, high = schema.bounded["sum"]
    assert -500 <= low <= -60
    assert 60 <= high <= 500
    assert schema.declared == {"city": ("Bern", "Uri", "Zug")}
    assert schema.buckets == (3, FORMAT.schema.buckets[1])
    assert record["epsilon"] == 1.0
    release = DataRelease(record["noise_multiplier"], record["failure"], record["name"])
    assert release.privacy().epsilon(record["delta"]).upper <= 1.0
    # One row moves three counts: the noise of each is larger by sqrt(3), and drawn in whole rows.
    cells = round(record["noise_multiplier"] * math.sqrt(3))
    assert GaussianProfile((cells - 2) / math.sqrt(3)).epsilon(record["delta"]).upper > 1.0


def test_each_count_has_the_noise_that_its_key_and_its_column_say():
    asked = PrivateColumns(ASKED.ranges, ("city", "device"), epsilon=1.0)
    whole = asked.counts(FORMAT.schema)
    exact = np.arange(1, 401)
    for texts in whole.texts.values():
        texts.update({f"{i:03}": int(i) for i in exact})
    whole.num_rows = int(exact.sum())
    schema, record = whole.released(asked, KEY)
    # One row moves four counts by one: by 2 in the L2 norm, and the noise is as much larger.
    cells, share = round(2 * record["noise_multiplier"]), record["failure"] / 2
    least = next(t for t in range(2, 10_000) if stats.norm.sf((t - 1.5) / cells) <= share)
    for leaf, column in ((2, "city"), (3, "device")):
        noisy = exact + rounded_gaussian(KEY, 0, leaf, exact.shape, cells)
        assert schema.declared[column] == tuple(f"{i:03}" for i in exact[noisy >= least])
    fresh = [whole.released(asked)[0].declared for _ in range(2)]
    assert fresh[0] != fresh[1]  # no key is used twice


def test_a_value_of_one_row_alone_comes_out_no_more_often_than_is_claimed(tmp_path):
    found = rows()[:50]
    path = write(
        tmp_path / "few.csv", [[row[0], f"own {i}", *row[2:]] for i, row in enumerate(found)]
    )
    asked = PrivateColumns({}, ("city",), epsilon=2.0, delta=0.09)
    whole = counts(path, asked=asked)
    kept = trials = 0
    for seed in range(400):
        schema, record = whole.released(asked, seed.to_bytes(32, "little"))
        kept += len(schema.declared.get("city", ()))
        trials += whole.num_rows
    # Hoeffding's bound on the excess of a mean of independent trials: 1e-6.
    most = record["failure"] + math.sqrt(math.log(1e6) / (2 * trials))
    assert 0 < kept / trials <= most


def test_where_no_count_is_clear_the_public_range_stays_and_texts_are_hashed(tmp_path):
    path = write(tmp_path / "few.csv", rows()[:40])
    schema, _ = counts(path).released(PrivateColumns(ASKED.ranges, ("city",), 0.01), KEY)
    assert schema.bounded == {"age": (0.0, 1000.0), "sum": (-1e6, 1e6)}
    assert schema.declared == {}
    assert schema.buckets == FORMAT.schema.buckets


def run(*words):
    return cli.main([str(word) for word in words])


PREPARE = ("--label", "y", "--categories", "city", "device", "--numbers", "age", "sum")
PRIVATE = ("--private-bounds", "age=0:1000", "--private-values", "city", "--private-epsilon", "0.5")


def test_every_run_on_a_store_counts_what_was_released_of_its_rows(tmp_path, capsys):
    data = write(tmp_path / "rows.csv", rows())
    store = tmp_path / "store"
    assert run("prepare", "csv", data, store, *PREPARE, *PRIVATE) == 0
    printed = capsys.readouterr().out
    assert "chosen privately, at epsilon 0.5 and delta 1e-05, which every run" in printed
    assert "values of city: 4" in printed
    opened = Store.open(store)
    assert opened.data_release.privacy().epsilon(1e-5).upper <= 0.5
    out = tmp_path / "run"
    sizes = ("--batch-size", "500", "--epochs", "1", "--no-audit")
    words = ("train", store, "sampler:poisson", "--target-epsilon", "2", "--out", out, *sizes)
    assert run(*words) == 0
    record = json.loads((out / "report.json").read_text())
    assert record["data_release"]["noise_multiplier"] == opened.released["noise_multiplier"]
    assert 1.9 < record["epsilon_upper"] <= 2
    little = ("--target-epsilon", "0.4", "--out", tmp_path / "none", *sizes)
    assert run("train", store, "sampler:poisson", *little) == 2
    assert "by itself, and --target-epsilon is 0.4: give more" in capsys.readouterr().err
    sampler, sigma = Poisson(opened.rows("train"), 500), record["noise_multiplier"]
    assert sampler.privacy(sigma).epsilon(1e-5).upper < record["epsilon_upper"]
    capsys.readouterr()
    assert run("ledger", out) == 0
    assert "were released before the run" in capsys.readouterr().out
    spec = dpsgd.RunSpec.of(sampler, noise_multiplier=1.0)
    with pytest.raises(ValueError, match="no proof covers a selection after that"):
        dpsgd.select(
            Clicks(store), [spec], tmp_path / "best", score="validation_auc", better="higher"
        )


def test_rows_that_were_prepared_twice_had_two_releases(tmp_path):
    data, stores = write(tmp_path / "rows.csv", rows()[:1000]), []
    for name in ("monday", "tuesday"):
        store, out = tmp_path / name, tmp_path / f"run-{name}"
        assert run("prepare", "csv", data, store, *PREPARE, *PRIVATE) == 0
        sizes = ("--batch-size", "800", "--epochs", "1", "--no-audit", "--model", "linear")
        noise = ("--noise-multiplier", "9", "--calibration", "none")
        assert run("train", store, "sampler:deterministic", *noise, *sizes, "--out", out) == 0
        stores.append(Store.open(store))
    releases = [store.data_release for store in stores]
    assert releases[0].noise_multiplier == releases[1].noise_multiplier
    first, second = (read(tmp_path / f"run-{x}" / "ledger.jsonl") for x in ("monday", "tuesday"))
    square = 2 * (1 / 9**2 + 1 / releases[0].noise_multiplier ** 2)
    exact = GaussianProfile(1 / math.sqrt(square)).epsilon(first.guarantee().delta)
    assert second.guarantee(first).epsilon.upper >= exact.lower
    manifest = stores[0].path / "manifest.json"
    content = json.loads(manifest.read_text())
    del content["released"]["name"]
    manifest.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="released: name is missing: prepare the data again"):
        Store.open(stores[0].path)


@pytest.mark.parametrize(
    "label",
    [("--label", "y"), ("--label", "device", "--classes", "0,1,2,3,4,5,6,7,8"),
     ("--label", "sum", "--label-bounds", "-99:99"), ("--label", "y", "--weight", "device")],
    ids=["two values", "classes", "a number", "weights"],
)  # fmt: skip
def test_what_is_chosen_does_not_depend_on_the_kind_of_label(tmp_path, label, capsys):
    data, store = write(tmp_path / "rows.csv", rows()[:1000]), tmp_path / "store"
    columns = ("--categories", "city", "--numbers", "age")
    assert run("prepare", "csv", data, store, *label, *columns, *PRIVATE) == 0
    opened = Store.open(store)
    assert opened.data_release.noise_multiplier > 1
    assert set(opened.schema.bounded) == {"age"}
    assert Clicks(store).columns().population.data_release == opened.data_release


ONE = ("--private-epsilon", "1")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (ONE, "--private-delta are of private bounds and values"),
        (PRIVATE[:-2], "private bounds and values cost privacy: say how much"),
        ((*PRIVATE[:-1], "0"), "epsilon of a private choice must be > 0"),
        ((*PRIVATE[:-1], "1e-9", "--private-delta", "1e-8"), "raise it"),
        ((*PRIVATE, "--private-delta", "0.5"), "delta"),
        ((*PRIVATE, "--beam"), "no --beam"),
        (("--private-bounds", "age=9", *ONE), "'age' has no private-bounds LOW:HIGH"),
        (("--private-bounds", "age=9:1", *ONE), "bounds of age must be finite"),
        (("--private-bounds", "city=0:1", *ONE), "'city' is no number of the table"),
        (("--private-values", "age", *ONE), "'age' is no category of the table"),
        ((*PRIVATE, "--bounds", "age=0:9"), "public bounds or values: give these or have them"),
    ],
)  # fmt: skip
def test_what_cannot_be_chosen_is_said_in_one_line_and_nothing_is_released(
    tmp_path, words, says, capsys
):
    data = write(tmp_path / "rows.csv", rows()[:200])
    assert run("prepare", "csv", data, tmp_path / "store", *PREPARE, *words) == 2
    error = capsys.readouterr().err
    assert len(error.strip().splitlines()) == 1
    assert says in error
    assert not (tmp_path / "store").exists()


def test_a_damaged_row_is_named_before_anything_is_released(tmp_path, capsys, monkeypatch):
    found = rows()[:200]
    found[150][4] = "many"
    data = write(tmp_path / "rows.csv", found)
    monkeypatch.setattr("experiments.tasks.clicks.tabular.private.rounded_gaussian", None)
    assert run("prepare", "csv", data, tmp_path / "store", *PREPARE, *PRIVATE) == 2
    assert "line 152" in capsys.readouterr().err
