"""Every data set goes all the way: raw file, store, training with every sampler, evaluation."""

import json

import pytest

from experiments import cli
from experiments.tasks.clicks.store import Store
from experiments.tasks.clicks.synthetic import rows as synthetic

TINY = ["--embedding-dim", "2", "--max-buckets", "16", "--hidden", "4", "--batch-size", "200"]


def run(*argv) -> int:
    return cli.main([str(word) for word in argv])


def made(name, folder):
    """Return (name, raw file, the store that `dpsgd prepare` makes of it)."""
    words = ["--like", name, "--num-rows", 3_000, "--seed", 1]
    assert run("prepare", "synthetic", folder / "raw", "--raw", *words) == 0
    assert run("prepare", name, folder / "raw", folder / "store") == 0
    return name, folder / "raw", folder / "store"


@pytest.fixture(scope="module", params=synthetic.LOGS)
def data_set(request, tmp_path_factory):
    return made(request.param, tmp_path_factory.mktemp(request.param))


def test_a_store_can_be_generated_at_once_and_says_the_best_auc(data_set, tmp_path, capsys):
    name, _, store = data_set
    words = ["--like", name, "--num-rows", 3_000, "--seed", 1]
    assert run("prepare", "synthetic", tmp_path / "store", *words) == 0
    direct, prepared = Store.open(tmp_path / "store"), Store.open(store)
    assert direct.shards == prepared.shards
    assert direct.splits == prepared.splits
    printed = capsys.readouterr().out
    assert f"best reachable AUC: {direct.source['bayes_auc']:.4f}" in printed
    assert f"on the test rows: {direct.source['test_bayes_auc']:.4f}" in printed


@pytest.mark.long
def test_outcomes_of_the_search_log_can_be_included_and_give_the_answer_away(tmp_path, capsys):
    """Why they are left out: with the price a model of seconds knows who buys."""
    raw, aucs = tmp_path / "raw", {}
    rows = ["--like", "criteo-search", "--num-rows", 6_000]
    assert run("prepare", "synthetic", raw, "--raw", *rows) == 0
    for name, include in {"without": [], "with": ["--include", "product_price"]}.items():
        store, out = tmp_path / f"{name} store", tmp_path / name
        assert run("prepare", "criteo-search", raw, store, *include) == 0
        words = ["--non-private", "--epochs", 6, "--learning-rate", 0.03, *TINY]
        words += ["--max-buckets", 1024, "--batch-size", 128, "--insecure-seed", 2]
        assert run("train", store, "sampler:shuffle", "--out", out, *words) == 0
        aucs[name] = json.loads((out / "report.json").read_text())["metrics"]["test_auc"]
    assert aucs["without"] < 0.85 < 0.97 < aucs["with"]
    capsys.readouterr()
    assert run("evaluate", tmp_path / "with", raw) == 0
    assert float(capsys.readouterr().out.splitlines()[0].split(": ")[1]) > 0.97


def test_the_file_of_another_data_set_is_refused_in_one_line(data_set, tmp_path, capsys):
    name, raw, _ = data_set
    other = {"criteo-display": "criteo-search", "criteo-search": "criteo-display"}[name]
    assert run("prepare", other, raw, tmp_path / "s") == 2
    error = capsys.readouterr().err
    assert f"{raw}, line 1: found" in error
    assert len(error.strip().splitlines()) == 1
    assert not (tmp_path / "s").exists()
