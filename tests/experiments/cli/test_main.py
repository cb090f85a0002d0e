"""The command line: the main job works, and bad input ends in one clear line and exit status 2."""

import functools
import json
import re

import numpy as np
import pytest

from experiments import cli
from experiments.cli.errors import in_one_line
from experiments.tasks.clicks.formats import DISPLAY
from experiments.tasks.clicks.synthetic import rows as synthetic

TINY = ["--embedding-dim", "2", "--max-buckets", "16", "--hidden", "4"]
SAMPLERS = ["shuffle", "poisson", "deterministic", "balls-and-bins"]


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    path = tmp_path_factory.mktemp("raw") / "train.txt"
    synthetic.write_raw(path, 3_000, seed=0)
    return path


@pytest.fixture(scope="module")
def store(raw):
    path = raw.parent / "store"
    DISPLAY.prepare(raw, path)
    return path


def run(*argv) -> int:
    try:
        return cli.main([str(word) for word in argv])
    except SystemExit as stopped:
        return int(stopped.code or 0)


def train_words(store, out, sampler="balls-and-bins", *words):
    sizes = ["--batch-size", 200, "--epochs", 2, *TINY]
    return ["train", store, f"sampler:{sampler}", "--out", out, *sizes, *words]


@pytest.fixture(scope="module")
def trained(store):
    """Returns a finished run of a sampler; of one of them the step was audited."""

    @functools.cache
    def train(sampler):
        out = store.parent / f"run-{sampler}"
        noise = ["--noise-multiplier", 1.0, *["--no-audit"] * (sampler != "shuffle")]
        assert run(*train_words(store, out, sampler, *noise)) == 0
        return out

    return train


@pytest.mark.short("poisson")
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_training_writes_a_report_with_every_promised_field(trained, sampler):
    out = trained(sampler)
    record = json.loads((out / "report.json").read_text())
    assert record["sampler"] == sampler
    assert record["noise_multiplier"] == 1.0
    assert 0 < record["epsilon_lower"] <= record["epsilon_upper"] < 100
    assert record["delta"] == 1e-5
    assert (record["adjacency"], record["unit"]) == ("zero-out", "example")
    for name in (
        "test_auc",
        "test_log_loss",
        "test_predicted_over_observed",
        "examples_per_second",
    ):
        assert np.isfinite({**record, **record["metrics"]}[name])
    report = (out / "report.md").read_text()
    assert record["guarantee"] in report
    upper = float(re.match(r"epsilon <= (\S+) at delta", record["guarantee"])[1])
    assert record["epsilon_upper"] <= upper <= 1.01 * record["epsilon_upper"]
    assert re.search(r"^Finished on 20\d\d-\d\d-\d\d at \d\d:\d\d UTC by:\n\n    \S", report, re.M)
    assert "{" not in report  # what programs read is in files of its own
    assert all(item in report for item in record["not_covered"])
    assert (
        json.loads((out / "guarantee.json").read_text())["epsilon_upper"] == record["epsilon_upper"]
    )


def test_diagnostics_lie_apart_and_are_called_not_private(trained):
    out = trained("poisson")
    lines = (out / "diagnostics_not_private.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(24))
    for covered in ("report.json", "report.md", "guarantee.json", "config.json"):
        assert "loss_sum" not in (out / covered).read_text()


def test_evaluate_repeats_the_metrics_of_the_test_rows(raw, trained, tmp_path, capsys):
    out = trained("poisson")
    test_rows = tmp_path / "test.txt"
    test_rows.write_text("".join(raw.read_text().splitlines(keepends=True)[2700:]))
    capsys.readouterr()
    assert run("evaluate", out, test_rows) == 0
    printed = dict(line.split(": ") for line in capsys.readouterr().out.splitlines())
    record = json.loads((out / "report.json").read_text())
    assert float(printed["auc"]) == pytest.approx(record["metrics"]["test_auc"], abs=1e-6)
    assert float(printed["log_loss"]) == pytest.approx(record["metrics"]["test_log_loss"], abs=1e-5)


def test_a_run_without_finite_epsilon_is_refused_before_training(store, tmp_path, command):
    out = tmp_path / "run"
    cap = ["--noise-multiplier", 1, "--max-batch-size", 200]
    assert "no finite epsilon" in command.refuses(*train_words(store, out, "poisson", *cap))
    assert not out.exists()


def test_an_insecure_seed_repeats_a_run_and_voids_its_guarantee(store, trained, tmp_path):
    runs = [tmp_path / "a", tmp_path / "b", trained("poisson")]
    for out in runs[:2]:
        seed = ["--insecure-seed", 7, "--no-audit"]
        assert run(*train_words(store, out, "poisson", "--noise-multiplier", 1.0, *seed)) == 0
    saved = [dict(np.load(out / "params.npz")) for out in runs]
    assert all((saved[0][name] == saved[1][name]).all() for name in saved[0])
    assert any((saved[0][name] != saved[2][name]).any() for name in saved[0])
    record = json.loads((runs[0] / "report.json").read_text())
    assert record["epsilon_upper"] is None
    assert record["guarantee"].startswith("NO GUARANTEE: reproducible noise")


BAD_TRAINING = {
    "batch above the data": (["--batch-size", "2401"], "--batch-size must be at most the 2,400"),
    "noise that float32 takes for none": (
        ["--l2-clip-norm", "1e-38"],
        "--noise-multiplier * --l2-clip-norm = 1e-38 must be in",
    ),
    "buckets not a power of two": (["--max-buckets", "10"], "power"),
    "layer without units": (["--hidden", "0"], "hidden[0] must be an integer >= 1"),
    "seed beyond 64 bits": (
        ["--insecure-seed", str(2**70)],
        "--insecure-seed must be an integer >= 0 and < 2",
    ),
}


@pytest.mark.parametrize(("words", "said"), BAD_TRAINING.values(), ids=BAD_TRAINING)
def test_a_bad_run_is_refused_in_one_line_and_leaves_nothing(store, tmp_path, command, words, said):
    out = tmp_path / "run"
    # The last of two equal flags wins, so each case overrides what `train_words` gives.
    noise = ["--noise-multiplier", 1]
    assert said in command.refuses(*train_words(store, out, "balls-and-bins", *noise, *words))
    assert not out.exists()


@pytest.mark.short("declared")
@pytest.mark.parametrize("declared", [False, True], ids=["hashed", "declared"])
def test_groups_of_a_table_are_named_by_its_values(declared, tmp_path, command):
    rows = [f"{i % 2},{('Rome', 'Oslo', '')[i % 3]},{i}" for i in range(120)]
    (tmp_path / "rows.csv").write_text("\n".join(["clicked,city,age", *rows]))
    values = ["--values", "city=Rome,Oslo"] if declared else []
    columns = ["--label", "clicked", "--categories", "city", "--numbers", "age", *values]
    command("prepare", "csv", tmp_path / "rows.csv", tmp_path / "store", *columns)
    words = ["--epochs", 1, "--model", "linear", "--non-private", "--out", tmp_path / "run"]
    command("train", tmp_path / "store", "sampler:poisson", *words)
    said = command("evaluate", tmp_path / "run", tmp_path / "rows.csv", "--by", "city")
    groups = said.split("by city:")[1].split("\n\n")[0]
    assert all(name in groups for name in ("Rome", "Oslo", "missing"))
    assert "bucket" not in said


def test_a_bug_under_generated_code_keeps_its_traceback():
    with pytest.raises(KeyError):
        in_one_line("dpsgd", lambda: exec("{}['missing']"))  # as in a dataclass's own __init__
