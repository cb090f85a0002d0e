"""The command line: the main job works, and bad input ends in one clear line and exit status 2."""

import functools
import json
import re

import numpy as np
import pytest

from accounting import implied_advantage
from experiments import cli, demo
from experiments.tasks.clicks.criteo import display
from experiments.tasks.clicks.synthetic import rows as synthetic

TINY = ["--embedding-dim", "2", "--max-buckets", "16", "--hidden", "4"]
LONG = [pytest.param(name, marks=pytest.mark.long) for name in ("deterministic", "balls-and-bins")]
SAMPLERS = ["shuffle", "poisson", *LONG]


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    path = tmp_path_factory.mktemp("raw") / "train.txt"
    synthetic.write_raw(path, 3_000, seed=1)
    return path


@pytest.fixture(scope="module")
def store(raw):
    path = raw.parent / "store"
    display.prepare(raw, path)
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


@pytest.mark.short("shuffle")
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


def test_target_epsilon_is_met_by_the_upper_bound(store, tmp_path):
    out = tmp_path / "run"
    assert run(*train_words(store, out, "balls-and-bins", "--target-epsilon", 3, "--no-audit")) == 0
    record = json.loads((out / "report.json").read_text())
    assert 2.9 < record["epsilon_upper"] <= 3


@pytest.mark.long
def test_target_advantage_is_met_by_the_upper_bound_and_every_report_says_so(store, tmp_path):
    out = tmp_path / "run"
    target = "--target-advantage", 0.2, "--no-audit"
    assert run(*train_words(store, out, "balls-and-bins", *target)) == 0
    record = json.loads((out / "report.json").read_text())
    assert 0.199 < record["attack_advantage_lower"] <= record["attack_advantage_upper"] <= 0.2
    assert record["attack_accuracy_upper"] == pytest.approx(
        (1 + record["attack_advantage_upper"]) / 2
    )
    assert record["guarantee"].endswith("a fair prior has an accuracy of at most 0.6000")
    planned = json.loads((out / "guarantee.json").read_text())
    assert planned["attack_advantage_upper"] == record["attack_advantage_upper"]
    text = (out / "report.md").read_text()
    assert "is right\nwith probability 0.6000 at most" in text
    assert "| attack advantage [lower, upper] | [0.199" in text


def test_an_evaluated_run_gives_back_the_metrics_of_its_own_test_rows(
    raw, trained, tmp_path, capsys
):
    out = trained("shuffle")
    test_rows = tmp_path / "test.txt"
    test_rows.write_text("".join(raw.read_text().splitlines(keepends=True)[2700:]))
    capsys.readouterr()
    assert run("evaluate", out, test_rows) == 0
    printed = dict(line.split(": ") for line in capsys.readouterr().out.splitlines())
    record = json.loads((out / "report.json").read_text())
    assert float(printed["auc"]) == pytest.approx(record["metrics"]["test_auc"], abs=1e-6)
    assert float(printed["log_loss"]) == pytest.approx(record["metrics"]["test_log_loss"], abs=1e-5)


@pytest.mark.long
def test_epsilon_and_calibrate_answer_each_other(capsys):
    words = [
        "sampler:balls-and-bins",
        "--num-examples",
        100_000,
        "--epochs",
        1,
        "--target-delta",
        1e-6,
    ]
    assert run("calibrate", *words, "--target-epsilon", 2) == 0
    sigma = capsys.readouterr().out.split()[2]
    assert run("epsilon", *words, "--noise-multiplier", sigma) == 0
    upper = float(re.search(r"epsilon in \[[\d.]+, ([\d.]+)\]", capsys.readouterr().out)[1])
    assert 1.99 < upper <= 2.002


@pytest.mark.long
def test_the_noise_for_an_attack_advantage_keeps_it(capsys):
    words = [
        "sampler:balls-and-bins",
        "--num-examples",
        100_000,
        "--epochs",
        1,
        "--target-delta",
        1e-6,
    ]
    assert run("calibrate", *words, "--target-advantage", 0.1) == 0
    printed = capsys.readouterr().out
    assert "gives attack advantage <= 0.1: epsilon <= " in printed
    assert printed.endswith("a fair prior has an accuracy of at most 0.5500\n")
    assert run("epsilon", *words, "--noise-multiplier", printed.split()[2]) == 0
    assert capsys.readouterr().out.endswith("has an accuracy of at most 0.5500\n")
    assert run("epsilon", *words, "--noise-multiplier", 0.98 * float(printed.split()[2])) == 0
    assert float(capsys.readouterr().out.split()[-1]) > 0.55


def test_a_printed_delta_is_never_smaller_than_the_certified_one(capsys):
    words = ["--num-examples", 37_000_000, "--epochs", 1, "--noise-multiplier", 1]
    assert run("epsilon", "sampler:deterministic", *words, "--target-delta", 1 / 37e6) == 0
    assert "at delta 2.71e-08" in capsys.readouterr().out  # 1 / 37e6 = 2.7027e-8


def test_a_run_that_no_finite_epsilon_covers_is_refused_before_it_starts(store, tmp_path, capsys):
    out = tmp_path / "run"
    cap = ["--noise-multiplier", 1, "--max-batch-size", 200]
    assert run(*train_words(store, out, "poisson", *cap)) == 2
    assert "no finite epsilon" in capsys.readouterr().err
    assert not out.exists()


def test_the_demo_names_a_missing_file_in_one_line(tmp_path, capsys):
    assert demo.main([str(tmp_path / "missing.txt"), "--out", str(tmp_path / "demo")]) == 2
    error = capsys.readouterr().err
    assert "missing.txt" in error
    assert len(error.strip().splitlines()) == 1


BAD_QUESTIONS = {
    "noise below all floats' squares": ["--num-examples", 1000, "--noise-multiplier", 1e-200],
    "delta below all floats": [
        "--num-examples",
        1000,
        "--noise-multiplier",
        1,
        "--target-delta",
        1e-310,
    ],
    "delta of zero": ["--num-examples", 1000, "--noise-multiplier", 1, "--target-delta", 0],
    "no examples": ["--num-examples", 0, "--noise-multiplier", 1],
    "noise of zero": ["--num-examples", 1000, "--noise-multiplier", 0],
    "noise that is no number": ["--num-examples", 1000, "--noise-multiplier", "nan"],
    "batch above the data": ["--num-examples", 1000, "--noise-multiplier", 1, "--batch-size", 2000],
}


@pytest.mark.parametrize("words", BAD_QUESTIONS.values(), ids=BAD_QUESTIONS)
def test_a_bad_question_is_answered_in_one_line(words, capsys):
    # The last of two equal flags wins.
    assert run("epsilon", "sampler:poisson", "--batch-size", 100, *words) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_shuffling_is_never_priced_as_poisson_and_says_what_that_would_claim(capsys):
    words = ["--num-examples", 1_000_000, "--epochs", 1, "--noise-multiplier", 0.6]
    assert run("epsilon", "sampler:poisson", *words) == 0
    poisson = float(re.search(r"epsilon in \[[\d.]+, ([\d.]+)\]", capsys.readouterr().out)[1])
    assert run("epsilon", "sampler:shuffle", *words) == 0
    price, *notes = capsys.readouterr().out.splitlines()
    assert float(price.split("[")[1].split(",")[0]) > 2 * poisson
    assert any(note.startswith("note: taken for Poisson") for note in notes)


def test_an_insecure_seed_reproduces_the_run_and_voids_its_guarantee(store, trained, tmp_path):
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


@pytest.mark.long
def test_a_run_without_noise_says_so(store, tmp_path):
    out = tmp_path / "run"
    assert run(*train_words(store, out, "shuffle", "--non-private")) == 0
    record = json.loads((out / "report.json").read_text())
    assert record["epsilon_upper"] is None
    report = (out / "report.md").read_text()
    assert "NO GUARANTEE" in report
    assert "Nothing bounds what the trained parameters tell" in report
    assert "is the guarantee" not in report


BAD_TRAINING = {
    "zero noise": (["--noise-multiplier", "0"], "--non-private"),
    "negative noise": (["--noise-multiplier", "-1"], "> 0"),
    "noise that is no number": (["--noise-multiplier", "nan"], "a finite number, got nan"),
    "infinite noise": (["--noise-multiplier", "inf"], "finite"),
    "neither noise nor epsilon": ([], "exactly one"),
    "both noise and epsilon": (["--noise-multiplier", "1", "--target-epsilon", "1"], "exactly one"),
    "epsilon of zero": (["--target-epsilon", "0"], "> 0"),
    "both epsilon and advantage": (
        ["--target-epsilon", "1", "--target-advantage", "0.1"],
        "exactly one",
    ),
    "advantage of one": (["--target-advantage", "1"], "--target-advantage must lie in (0, 1)"),
    "delta of one": (["--noise-multiplier", "1", "--target-delta", "1"], "(0, 0.1)"),
    "delta of zero": (["--noise-multiplier", "1", "--target-delta", "0"], "(0, 0.1)"),
    "batch above the data": (["--noise-multiplier", "1", "--batch-size", "2401"], "2401"),
    "no epochs": (["--noise-multiplier", "1", "--epochs", "0"], "epochs"),
    "clipping norm of zero": (["--noise-multiplier", "1", "--l2-clip-norm", "0"], "--l2-clip-norm"),
    "noise that float32 takes for none": (
        ["--noise-multiplier", "1", "--l2-clip-norm", "1e-38"],
        "--noise-multiplier * --l2-clip-norm = 1e-38 must be in",
    ),
    "noise that overflows": (
        ["--target-epsilon", "3", "--l2-clip-norm", "1e38"],
        "--l2-clip-norm 1e+38 and --noise-multiplier",
    ),
    "buckets not a power of two": (["--noise-multiplier", "1", "--max-buckets", "10"], "power"),
    "layer without units": (["--noise-multiplier", "1", "--hidden", "0"], "at least 1 unit"),
    "microbatch of nothing": (["--noise-multiplier", "1", "--microbatch-size", "0"], "microbatch"),
    "embedding of nothing": (["--noise-multiplier", "1", "--embedding-dim", "0"], "at least 1"),
    "seed beyond 32 bits": (["--noise-multiplier", "1", "--init-seed", str(2**70)], "init-seed"),
    "no learning": (["--noise-multiplier", "1", "--learning-rate", "0"], "learning-rate"),
}


@pytest.mark.parametrize(("words", "said"), BAD_TRAINING.values(), ids=BAD_TRAINING)
def test_a_bad_run_is_refused_in_one_line_and_leaves_nothing(store, tmp_path, capsys, words, said):
    out = tmp_path / "run"
    # The last of two equal flags wins, so each case overrides what `train_words` gives.
    assert run(*train_words(store, out, "balls-and-bins", *words)) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.strip().splitlines()) == 1
    assert "Traceback" not in error
    assert not out.exists()


def test_an_existing_run_directory_is_left_as_it_is(store, tmp_path, capsys):
    out = tmp_path / "run"
    out.mkdir()
    (out / "precious").write_text("data")
    assert run(*train_words(store, out, "poisson", "--noise-multiplier", 1)) == 2
    assert "exists already" in capsys.readouterr().err
    assert [file.name for file in out.iterdir()] == ["precious"]


def test_missing_and_malformed_input_is_named(store, tmp_path, capsys):
    out = tmp_path / "out"
    assert run("prepare", "criteo-display", tmp_path / "absent.txt", out) == 2
    assert "absent.txt" in capsys.readouterr().err
    bad = tmp_path / "bad.txt"
    bad.write_text("2" + "\t" * 39 + "\n")
    assert run("prepare", "criteo-display", bad, out) == 2
    error = capsys.readouterr().err
    assert "bad.txt, line 1, column label" in error
    assert run(*train_words(tmp_path / "nowhere", out, "poisson", "--noise-multiplier", 1)) == 2
    assert "nowhere" in capsys.readouterr().err
    assert run("evaluate", tmp_path / "nowhere", store) == 2
    assert "nowhere" in capsys.readouterr().err
    assert not out.exists()


def test_an_unknown_sampler_is_refused(store, tmp_path, capsys):
    assert run("train", store, "sampler:poison", "--out", tmp_path / "run") == 2
    assert "poison" in capsys.readouterr().err


def test_a_store_of_another_version_is_refused(store, tmp_path, capsys):
    other = tmp_path / "store"
    other.mkdir()
    manifest = json.loads((store / "manifest.json").read_text())
    (other / "manifest.json").write_text(json.dumps({**manifest, "version": 999}))
    assert run(*train_words(other, tmp_path / "run", "poisson", "--noise-multiplier", 1)) == 2
    assert "version 999" in capsys.readouterr().err


def test_private_search_costs_more_than_one_run_and_less_than_all(capsys):
    question = ["epsilon", "sampler:deterministic", "--num-examples", "5000", "--epochs", "1"]
    question += ["--noise-multiplier", "2.0", "--target-delta", "1e-5", "--mean-trials", "10"]
    assert cli.main(question) == 0
    said = capsys.readouterr().out
    one = float(re.search(r"epsilon in \[[\d.]+, ([\d.]+)\]", said)[1])
    best = float(re.search(r"epsilon <= ([\d.]+)", said)[1])
    assert one < best < 3 * one
    alone, search = map(float, re.findall(r"fair prior has an accuracy of at most ([\d.]+)", said))
    # The search's is bounded by the chance that one of so many trials differs, not by its epsilon.
    assert alone == pytest.approx(0.5987, abs=1e-4)
    assert alone < search < (1 + implied_advantage(best, 1e-5)) / 2 < 0.95
    assert said.count("zero-out adjacency, unit: one example") == 2
