"""Every data set goes all the way: raw file, store, training with every sampler, evaluation."""

import json

import numpy as np
import pytest

from experiments import cli
from experiments.tasks.clicks.metrics import auc
from experiments.tasks.clicks.store import Store
from experiments.tasks.clicks.synthetic import rows as synthetic

TINY = ["--embedding-dim", "2", "--max-buckets", "16", "--hidden", "4", "--batch-size", "200"]
OTHERS = [
    pytest.param(name, marks=pytest.mark.long) for name in ("shuffle", "poisson", "balls-and-bins")
]
SAMPLERS = ["deterministic", *OTHERS]


def run(*argv) -> int:
    return cli.main([str(word) for word in argv])


def made(name, folder):
    """Return (name, raw file, the store that `dpsgd prepare` makes of it)."""
    words = ["--like", name, "--num-rows", 3_000, "--seed", 1]
    assert run("prepare", "synthetic", folder / "raw", "--raw", *words) == 0
    assert run("prepare", name, folder / "raw", folder / "store") == 0
    return name, folder / "raw", folder / "store"


@pytest.fixture(scope="module")
def search_log(tmp_path_factory):
    return made("criteo-search", tmp_path_factory.mktemp("search"))


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
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_sampler_trains_on_the_search_log_and_a_raw_file_of_it_is_evaluated(
    search_log, sampler, tmp_path, capsys
):
    _, raw, store = search_log
    out = tmp_path / "run"
    words = ["--out", out, "--epochs", 1, "--noise-multiplier", 1.0, *TINY]
    if sampler in ("poisson", "balls-and-bins"):
        words += ["--max-batch-size", 300]  # one width, and so one program
    if sampler != "balls-and-bins":  # the audit of one will do
        words += ["--no-audit"]
    assert run("train", store, f"sampler:{sampler}", *words) == 0
    record = json.loads((out / "report.json").read_text())
    first, last = Store.open(store).splits["train"]
    assert record["num_examples"] == last - first
    assert 0 < record["epsilon_lower"] <= record["epsilon_upper"] < 100
    assert np.isfinite(record["metrics"]["test_log_loss"])
    capsys.readouterr()
    printed = []
    for data in (raw, store):  # the same rows, in other orders
        assert run("evaluate", out, data) == 0
        lines = capsys.readouterr().out.splitlines()
        printed.append({k: float(v) for k, v in (line.split(": ") for line in lines)})
    assert printed[0] == pytest.approx(printed[1], rel=1e-4)


@pytest.mark.long
def test_who_sees_the_price_reads_the_sale(tmp_path):
    """Why outcomes are left out: how often each price was sold at, learned on the training rows."""
    raw = tmp_path / "raw"
    assert (
        run("prepare", "synthetic", raw, "--raw", "--like", "criteo-search", "--num-rows", 6_000)
        == 0
    )
    assert run("prepare", "criteo-search", raw, tmp_path / "s", "--include", "product_price") == 0
    store = Store.open(tmp_path / "s")
    assert store.schema.categories[-1] == "product_price"
    train, test = store.load("train"), store.load("test")
    prices = {name: rows["categories"][:, -1] for name, rows in (("train", train), ("test", test))}
    most = 1 + store.schema.buckets[-1]
    shown = np.bincount(prices["train"], minlength=most)
    sold = np.bincount(prices["train"], train["label"], minlength=most)
    assert auc(((sold + 0.5) / (shown + 1))[prices["test"]], test["label"]) > 0.97


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
