"""Users of a table: one number and one split each, a cap by their own rows, a price for users."""

import csv
import json
from collections import defaultdict

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from accounting import UserPoissonProfile, epsilon
from experiments import cli
from experiments.tasks.clicks.formats import table_format, table_schema
from experiments.tasks.clicks.store import Store
from experiments.tasks.clicks.task import Clicks
from experiments.tasks.streams import DataError

NAMES = ["ann", "Ann", " ann", "a,b", 'quo"te', "line\nend", "Zoë", "0", "00", "x" * 40, "-1", "é"]
FORMAT = table_format(table_schema("y", numbers=["row"], transform="none", user="who"))


def logged(count=900, seed=0):
    """Rows of (label, row number, user): a few users have most rows."""
    rng = np.random.default_rng(seed)
    names = NAMES + [f"user {i}" for i in range(40)]
    places = np.minimum(rng.zipf(1.4, count) - 1, len(names) - 1)
    return [(i * i % 7 < 3, i, names[place]) for i, place in enumerate(places)]


def write_csv(path, rows):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("y", "row", "who"), *((int(y), i, u) for y, i, u in rows)])
    return path


def write_parquet(path, rows):
    columns = zip(*rows, strict=True)
    pq.write_table(pa.table(dict(zip(("y", "row", "who"), columns, strict=True))), path)
    return path


def prepared(folder, rows):
    """A store of rows from a text file and a Parquet file."""
    half = len(rows) // 2
    paths = write_csv(folder / "a.csv", rows[:half]), write_parquet(folder / "b.pq", rows[half:])
    return FORMAT.prepare(paths, folder / "store")


def users_by_split(store, rows):
    """{split: {user: numbers of rows}}, after a check that numbers stand for users one to one."""
    names, numbers, splits = {i: user for _, i, user in rows}, {}, {}
    for split in store.splits:
        splits[split] = defaultdict(list)
        of_rows = store.load(split)["integers"].ravel().astype(int).tolist()
        for row, number in zip(of_rows, store.users(split).tolist(), strict=True):
            assert numbers.setdefault(names[row], number) == number
            splits[split][names[row]].append(row)
    assert len(set(numbers.values())) == len(numbers)
    return splits


def test_users_keep_one_number_and_one_split_across_files(tmp_path):
    rows = logged()
    store = prepared(tmp_path, rows)
    splits = users_by_split(store, rows)
    assert sum(map(len, splits.values())) == len({user for *_, user in rows})
    assert all(splits.values())
    assert "user" not in store.load("train")
    (tmp_path / "fewer").mkdir()
    fewer = [row for row in rows if row[2] not in ("ann", "0")]
    others = users_by_split(prepared(tmp_path / "fewer", fewer), fewer)
    for split, users in others.items():  # nobody else's rows decide on a split
        assert users == {name: x for name, x in splits[split].items() if name not in ("ann", "0")}


@pytest.mark.parametrize("cap", [1, 3, 10_000])
def test_a_cap_keeps_the_first_rows_of_each_user(tmp_path, cap):
    rows = logged()
    users = users_by_split(prepared(tmp_path, rows), rows)["train"]
    columns, population = Clicks(tmp_path / "store", max_contributions=cap).columns()
    kept = sorted(row for own in users.values() for row in own[:cap])
    assert columns["integers"].ravel().tolist() == kept
    assert (population.row, population.max_contributions) == ("example", cap)
    assert (population.num_examples, population.num_users) == (len(kept), len(users))


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    folder = tmp_path_factory.mktemp("users")
    write_csv(folder / "t.csv", logged(3_000))
    columns = ["--label", "y", "--numbers", "row", "--bounds", "row=0:3000"]
    for name, user in (("s", ["--user", "who"]), ("plain", [])):
        words = ["prepare", "csv", str(folder / "t.csv"), str(folder / name), *columns, *user]
        assert cli.main(words) == 0
    return folder


TRAIN = ["--batch-size", 16, "--epochs", 2, "--noise-multiplier", 2, "--no-audit"]
TRAIN += ["--model", "linear"]
LAZY = ["--tables", "lazy"]


@pytest.mark.long
def test_a_command_trains_at_the_price_of_users(table, command):
    words = [table / "s", "sampler:user-poisson", "--max-contributions", 4, *TRAIN]
    assert "unit: one user" in command("train", *words, "--out", table / "run")
    record = json.loads((table / "run" / "report.json").read_text())
    users = np.unique(Store.open(table / "s").users("train"), return_counts=True)[1]
    rows = np.minimum(users, 4).sum()
    steps = 2 * -(-rows // 16)
    assert (record["unit"], record["num_examples"]) == ("user", rows)
    price = epsilon(UserPoissonProfile(2.0, int(steps), 16 / rows, 4), record["delta"])
    # Truncated batches cost a little of delta.
    assert price.lower <= record["epsilon_upper"] <= 1.02 * price.upper
    config = json.loads((table / "run" / "config.json").read_text())
    assert config["task"]["description"]["kept"] == (
        "the first 4 rows of each user, as the files have them"
    )
    write_csv(table / "new.csv", logged(50))
    (table / "anonymous.csv").write_text("y,row\n0,1\n1,2\n")
    for rows in ("s", "plain", "new.csv", "anonymous.csv"):  # a model reads no user
        command("evaluate", table / "run", table / rows)


@pytest.mark.parametrize(
    ("write", "user", "where"),
    [
        (write_csv, None, "line 3, column who: found nothing, expected a user"),
        (write_parquet, None, "row 2, column who: found nothing, expected a user"),
        (write_parquet, 0.5, "column who: holds double, expected texts"),
    ],
)
def test_missing_users_and_decimal_numbers_are_refused(tmp_path, write, user, where):
    rows = [(1, 1, "a" if user is None else 1.0), (0, 2, user)]
    with pytest.raises(DataError, match=f"t, {where}"):
        FORMAT.prepare(write(tmp_path / "t", rows), tmp_path / "store")
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("plain sampler:user-poisson --max-contributions 3", "plain has no user column"),
        ("s sampler:user-poisson", "with --user and give --max-contributions"),
        ("s sampler:user-poisson --max-contributions 0", "--max-contributions must be an"),
        ("s sampler:poisson --max-contributions 3", "it belongs to sampler user-poisson"),
    ],
)
def test_a_cap_is_for_users_and_samplers_of_users(table, monkeypatch, command, words, why):
    monkeypatch.chdir(table)
    line = command.refuses("train", *words.split(), *TRAIN, "--out", "x")
    assert why in line
    if "column" in why or "give" in why:  # whatever the tables
        assert command.refuses("train", *words.split(), *TRAIN, *LAZY, "--out", "x") == line
    assert not (table / "x").exists()
