"""Evidence is of the rows that are said, beside peers on the same rows, or says why it is not."""

import gzip

import numpy as np
import pytest

from experiments.benchmarks import evidence
from experiments.benchmarks.case import cases
from experiments.benchmarks.record import Record, read
from experiments.figures.evidence import points


@pytest.fixture
def folder(tmp_path):
    """A folder with a table of the columns of Adult, in which age is the number of the row."""
    table = evidence.ADULT
    rng = np.random.default_rng(0)
    lines = [",".join([*table.bounds, *table.categories, table.label])]
    for number in range(60):
        cells = [str(17 + number), *("1" for _ in list(table.bounds)[1:])]
        cells += [f"v{rng.integers(3)}" for _ in table.categories]
        lines.append(",".join([*cells, (table.positive, table.negative)[rng.integers(2)]]))
    with gzip.open(tmp_path / "adult.csv.gz", "wt") as file:
        file.write("\n".join(lines) + "\n")
    return tmp_path


def test_peers_learn_and_are_tested_on_the_rows_that_our_models_are(folder):
    rows, labels, train = evidence._rows(folder / "adult.csv.gz", evidence.ADULT)
    with evidence.DATA["adult"].opened(folder) as task:
        np.testing.assert_array_equal(task.columns()["label"], labels[:train])
        assert 0 < len(labels) - train < train
    ages = [int(row[0]) - 17 for row in rows]
    assert ages[:train] == sorted(ages[:train])
    assert len({*ages}) == len(ages)


@pytest.mark.parametrize("measure", [evidence.evidence, evidence.peers])
def test_a_file_that_is_not_there_leaves_its_case_out_and_says_so(measure, tmp_path):
    file = tmp_path / "record.json"
    told = Record(file, "evidence")
    for case in cases(measure, over={"data": ["bank"]}, needs=("--files",)):
        told.run(case, "command", {"files": str(tmp_path)})
    (entry,) = read(file)["cases"]
    assert (entry["status"], entry["rows"]) == ("left out", [])
    assert "bank.csv.gz is not in the folder" in entry["why"]
    assert told.status() == 2


def test_a_peer_that_is_not_installed_is_a_row_without_a_value(folder, monkeypatch):
    monkeypatch.setattr(evidence, "PEERS", "print('{\"DP-EBM\": null}', flush=True)")
    (row,) = evidence.peers("adult", files=str(folder))
    assert row.value is None
    assert "DP-EBM" in row.name
    assert "not installed" in row.name


def test_what_papers_report_is_drawn_at_its_epsilon_beside_what_was_measured():
    rows = [vars(row) for row in evidence.published()]
    rows += [{"name": "accuracy, test rows, mnist, no privacy", "value": 0.99, "error": None}]
    rows += [{"name": "AUC, test rows, adult: the peer is not installed", "value": None}]
    found = points({"cases": [{"rows": rows}]})
    drawn = [(d, p.epsilon, p.value) for d, curves in found.items() for of in curves.values()
             for p in of if p.epsilon is not None]  # fmt: skip
    assert sorted(drawn) == sorted((p.data, p.epsilon, p.value) for p in evidence.PUBLISHED)
    assert [p.epsilon for p in found["mnist"]["ours"]] == [None]
    assert all(one.source and one.delta for one in evidence.PUBLISHED)
