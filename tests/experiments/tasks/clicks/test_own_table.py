"""The README's commands on a table of one's own, and what they refuse."""

import contextlib
import csv
import gzip
import io
import json
import shlex
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dpsgd import load_exported
from experiments import cli
from experiments.tasks.clicks.formats import table_schema
from experiments.tasks.clicks.store import Store


def write(path, rows, names=None, **how):
    """Writes rows, dictionaries, as a text file."""
    names, text = names or [*rows[0]], io.StringIO(newline="")
    writer = csv.writer(text, **how)
    writer.writerow(names)
    for row in rows:
        values = [int(x) if isinstance(x := row[name], bool) else x for name in names]
        writer.writerow(["" if x is None else x for x in values])
    data = text.getvalue().encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def write_parquet(path, rows):
    columns = {name: pa.array([row[name] for row in rows]) for name in rows[0]}
    columns["city"] = columns["city"].dictionary_encode()
    pq.write_table(pa.table(columns), path)


README = (Path(__file__).resolve().parents[4] / "README.md").read_text()
TINY = ["--model", "linear", "--max-buckets", "16", "--batch-size", "100", "--epochs", "1"]
TINY += ["--no-audit"]


def clicks(count, first=0):
    return [
        {
            "clicked": (i * i) % 7 < 3,
            "city": ["", "Uri", 'a "b"\n, c', "Zoë"][i % 4],
            "device": i % 11,
            "age": None if i % 5 == 0 else i / 7,
            "note": "",
            "other": i % 2,
        }
        for i in range(first, first + count)
    ]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(the folder in which the README's commands on one's own data ran, what they printed)."""
    folder = tmp_path_factory.mktemp("trained")
    write(folder / "may.csv", clicks(700))
    write(folder / "june.tsv.gz", clicks(300, 700), [*clicks(1)[0]][::-1], delimiter="\t")
    write_parquet(folder / "july.parquet", clicks(200, 1_000))
    write(folder / "august.csv", clicks(50, 2_000), names=["age", "device", "other", "city"])
    section = README.split("## Your own data")[1].split("```")[1]
    commands = [
        shlex.split(line, comments=True)[1:]
        for line in section.replace("\\\n", "").strip().splitlines()
    ]
    assert [words[0] for words in commands] == ["prepare", "train", "evaluate", "export", "score"]
    commands[1] += TINY
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.chdir(folder):
        for words in commands:
            assert cli.main(words) == 0
    return folder, printed.getvalue()


def test_readme_commands_prepare_train_evaluate_export_and_score(trained):
    folder, printed = trained
    assert "left out: note, other\n1,000 rows in store" in printed
    assert "num_examples: 200\n" in printed
    store = Store.open(folder / "store")
    columns = {"categories": ("city", "device"), "numbers": ("age",)}
    schema = table_schema("clicked", **columns, bounds={"age": (0, 120)})
    assert store.schema == schema
    assert store.schema.buckets == (65_536, 65_536)
    assert store.source == {"format": "table", "files": ["may.csv", "june.tsv.gz"]}
    assert 750 < store.rows("train") < 850
    record = json.loads((folder / "run" / "report.json").read_text())
    assert 2.99 < record["epsilon_upper"] <= 3
    scores = [float(line) for line in (folder / "scores.csv").read_text().split()[1:]]
    august = {name: [row[name] for row in clicks(50, 2_000)] for name in ("city", "age", "device")}
    model = load_exported(folder / "model")
    np.testing.assert_allclose(model.predict(august), scores, rtol=1e-6)
    assert len(set(scores)) > 2


def test_scores_are_written_beside_a_key_column_of_a_table(trained, tmp_path, command):
    folder, _ = trained
    rows, out = [{**row, "note": f"k, {i}"} for i, row in enumerate(clicks(50))], tmp_path / "s.csv"
    ask = ["score", folder / "run", write(tmp_path / "t", rows), "--out", out, "--key"]
    command(*ask, "note")
    with out.open(newline="") as file:
        assert [row[0] for row in csv.reader(file)] == ["note", *(f"k, {i}" for i in range(50))]
    out.unlink()
    for path, key, says in [
        (tmp_path / "t", "no", "has no column no"),
        (folder / "store", "note", "keys need a table in a CSV, TSV or Parquet file"),
    ]:
        assert says in command.refuses("score", folder / "run", path, "--out", out, "--key", key)
    assert not out.exists()


AGE = ["t.csv", "s", "--label", "y", "--numbers", "age"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["t.csv", "--label", "y", "--numbers", "age"], "dpsgd prepare csv needs FILES"),
        (["t.csv", "t.csv", "--label", "y", "--numbers", "age"], "t.csv is a file; the last path"),
        (
            [*AGE, "--order", "chronological", "--split", "0.98", "0.01", "0.01"],
            "would have no validation rows of 30; give more rows",
        ),
        ([*AGE, "--positive", "1"], "--positive and --negative are given together"),
        ([*AGE, "--bounds", "age=1"], "--bounds: 'age' needs bounds of the form LOW:HIGH"),
        ([*AGE, "--bounds", "age=0:1", "age=0:2"], "age is given twice, with different"),
        ([*AGE, "--bounds", "age"], "age: No such file"),
        ([*AGE, "--bounds", "t.csv"], "t.csv is not TOML"),
        ([*AGE, "--values", "v.toml"], "v.toml: 'city' needs values of the form ["),
        ([*AGE, "--user", "who"], "t.csv: has no column who; it has y, city, age"),
        ([*AGE, "--user", ""], "--user is empty"),
        ([*AGE, "--user", "city", "--order", "chronological"], "users who trained it; leave out"),
    ],
)
def test_a_command_that_cannot_be_carried_out_is_one_line(
    tmp_path, monkeypatch, command, words, says
):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "t.csv", [{"y": i % 3 == 0, "city": "Uri", "age": i} for i in range(30)])
    (tmp_path / "v.toml").write_text("city = [1, 2]")
    assert says in command.refuses("prepare", "csv", *words)
    assert not (tmp_path / "s").exists()
