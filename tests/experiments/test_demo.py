"""The demo: its table fits a terminal, and it says which sampler to choose."""

import pytest

from dpsgd.core.noise import Independent
from dpsgd.runs import report
from experiments import demo
from experiments.cli.console import Console


@pytest.mark.parametrize("sigma", ["0.5", "0.9862"])
def test_the_table_of_the_demo_fits_80_columns(sigma, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    records = [
        {
            "sampler": name,
            "guarantee": f"epsilon <= {epsilon}",
            "noise": Independent().record(),
            "noise_multiplier": float(sigma),
            "epsilon_lower": None if epsilon is None else 0.9871234 * epsilon,
            "epsilon_upper": epsilon,
            "delta": 1 / 96_000,
            "metrics": {**dict.fromkeys(demo.METRICS, 0.74321), "test_num_positives": 29},
            "stage_seconds": {"train": 1234.56},
        }
        for name, epsilon in zip(demo.COMPARED, (None, 1234.567, 12.34567, 0.0123456), strict=True)
    ]
    header, rows, caption = report.comparison(records, demo.METRICS)
    assert header == ["sampler", "sigma", "epsilon", "AUC", "log loss", "pred/obs", "seconds"]
    assert report.comparison(records)[0] == header  # counts are not compared
    Console().table(header, rows)
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in said] == ["sampler", *demo.COMPARED]
    assert "at delta 1.05e-05" in caption
    assert "on the test rows" in caption
    assert "Choose balls-and-bins: " in demo.choice(records)
    assert "No sampler has a guarantee" in demo.choice(records[:1])


def test_the_demo_names_a_missing_file_in_one_line(tmp_path, capsys):
    assert demo.main([str(tmp_path / "missing.txt"), "--out", str(tmp_path / "demo")]) == 2
    error = capsys.readouterr().err
    assert "missing.txt" in error
    assert len(error.strip().splitlines()) == 1
