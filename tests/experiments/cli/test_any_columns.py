"""A store is trained on by the command whatever columns it has, and whatever it was made of.

That files of every format become the same stores is tested beside their readers.
"""

import random

import pytest

from experiments.cli import main

ROWS = 120
PRIVATE = ["--noise-multiplier", "1"]
RUNS = {
    "private": PRIVATE,
    "non-private": ["--non-private"],
    "lazy-tables": [*PRIVATE, "--tables", "lazy"],
}
NUMBERS, CATEGORIES = ["age", "price"], ["city", "device"]
COLUMNS = {
    "numbers": ["--numbers", *NUMBERS],
    "categories": ["--categories", *CATEGORIES],
    "both": ["--numbers", *NUMBERS, "--categories", *CATEGORIES],
    "search log": ["--like", "criteo-search"],
}


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """Returns the store of some columns, which is prepared once."""
    folder, draw = tmp_path_factory.mktemp("stores"), random.Random(0)
    lines = [",".join(["clicked", *NUMBERS, *CATEGORIES])]
    for i in range(ROWS):
        lines.append(f"{i % 2},{draw.randrange(80)},{draw.random():.3f},c{i % 9},d{i % 3}")
    (folder / "rows.csv").write_text("\n".join(lines))

    def store(name):
        if not (path := folder / name).exists():
            table = ["csv", folder / "rows.csv", path, "--label", "clicked"]
            generated = ["synthetic", path, "--num-rows", 10 * ROWS]
            words = generated if "--like" in COLUMNS[name] else table
            assert main(["prepare", *map(str, words), *COLUMNS[name]]) == 0
        return path

    return store


@pytest.mark.parametrize("declared", [False, True], ids=["hashed", "declared"])
def test_groups_of_a_table_are_named_by_its_values(declared, tmp_path, command):
    rows = [f"{i % 2},{('Rome', 'Oslo', '')[i % 3]},{i}" for i in range(120)]
    (tmp_path / "rows.csv").write_text("\n".join(["clicked,city,age", *rows]))
    values = ["--values", "city=Rome,Oslo"] if declared else []
    columns = ["--label", "clicked", "--categories", "city", "--numbers", "age", *values]
    command("prepare", "csv", tmp_path / "rows.csv", tmp_path / "store", *columns)
    words = ["--batch-size", 20, "--epochs", 1, "--non-private", "--out", tmp_path / "run"]
    command("train", tmp_path / "store", "sampler:poisson", *words)
    said = command("evaluate", tmp_path / "run", tmp_path / "rows.csv", "--by", "city")
    groups = said.split("by city:")[1].split("\n\n")[0]
    assert all(name in groups for name in ("Rome", "Oslo", "missing"))
    assert "bucket" not in said


@pytest.mark.long
@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize("run", RUNS)
def test_any_columns_are_trained_on(name, run, stores, tmp_path, capsys):
    words = ["train", str(stores(name)), "sampler:poisson", "--batch-size", "20", "--epochs", "1"]
    words += ["--hidden", "2", "--embedding-dim", "2", "--max-buckets", "4", *RUNS[run]]
    status = main([*words, "--out", str(tmp_path / "run")])
    out, err = capsys.readouterr()
    if run == "lazy-tables" and name == "numbers":
        assert status == 2
        assert "the loss has no tables" in err
        return
    assert status == 0, err
    report = (tmp_path / "run" / "report.md").read_text()
    for text in (out, report):
        assert ("NO GUARANTEE: no noise was added" in text) == (run == "non-private")
    assert ("Nothing bounds what the trained parameters tell" in report) == (run == "non-private")
    assert ("audit: passed" in out) == (run != "non-private")
    assert ("lazy tables" in out) == (run == "lazy-tables")
