"""`dpsgd audit`: whoever asks can audit more than a run does."""

from pathlib import Path

import pytest

from dpsgd import AutomaticClipping
from dpsgd.gradients import norms

pytestmark = pytest.mark.audit

SHUFFLE = ["sampler:shuffle", "--num-examples", "1000", "--batch-size", "50"]
SHUFFLE += ["--epochs", "2", "--noise-multiplier", "1"]
TINY = ["--embedding-dim", "2", "--max-buckets", "16", "--hidden", "4"]


@pytest.mark.long
def test_the_step_of_clicks_is_audited_without_a_store(command):
    assert command("audit", *SHUFFLE, *TINY).splitlines()[-1].startswith("audit: passed ")


def to_twice_c(rule, group_norms, l2_clip_norm, counts):
    return [norms.clip_factor(group_norms[0], 2 * l2_clip_norm, counts, gamma=rule.gamma)]


@pytest.mark.long
def test_the_audited_program_has_the_requested_clipping(command, monkeypatch):
    asked = ["audit", *SHUFFLE, *TINY, "--clipping", "automatic", "--compute", "bfloat16"]
    asked += ["--train", "logit"]
    assert command(*asked).splitlines()[-1].startswith("audit: passed ")
    monkeypatch.setattr(AutomaticClipping, "factors", to_twice_c)
    assert "FAIL" in command(*asked, "--microbatch-size", "9", status=1)  # a program of its own


@pytest.mark.long
@pytest.mark.parametrize(
    ("task", "calibration"), [("Calibrated", "platt"), ("Kinds", "temperature")]
)
def test_the_sums_of_a_calibration_are_audited_too(task, calibration, command, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "dpsgd" / "runs")  # of `tiny_task`
    question = ["audit", "--task", f"tiny_task:{task}", "--calibration", calibration]
    question += ["sampler:deterministic", "--num-examples", "20000", "--batch-size", "500"]
    lines = command(*question, "--epochs", "1", "--noise-multiplier", "1").strip().splitlines()
    assert sum("sums over all rows: " in line for line in lines) > 10
    assert lines[-1].startswith("audit: passed ")


@pytest.mark.long
def test_the_audit_passes_right_claims_and_refutes_wrong_ones(command, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "dpsgd" / "runs")  # of `tiny_task`
    bands = ["sampler:balls-and-bins", "--bands", "4"]
    question = ["audit", "--task", "tiny_task:Line", *bands, *SHUFFLE[1:]]
    assert command(*question).splitlines()[-1].startswith("audit: passed ")
    found = command(*question, "--claim", "poisson", status=1)
    assert "FAIL  examples and steps are drawn at the rates of the law" in found
    assert "nowhere cannot be imported" in command.refuses(
        "audit", "--task", "nowhere:task", *SHUFFLE
    )


@pytest.mark.long
def test_black_box_draws_a_plot_and_prints_its_detection_limit(tmp_path, command):
    plot = tmp_path / "audit.png"
    words = "audit sampler:deterministic --num-examples 4 --batch-size 4 --epochs 1 --black-box"
    how = ["--noise-multiplier", "1", "--target-delta", "0.01", "--trials", "600", "--plot"]
    out = command(*words.split(), *how, plot)
    for said in ("epsilon >= ", "claimed: epsilon <= ", "detection limit: ", f"plot: {plot}"):
        assert said in out
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_claim_of_infinity_is_refused(command):
    words = "audit sampler:balls-and-bins --num-examples 1000 --batch-size 100 --epochs 1"
    how = "--noise-multiplier 0.001 --max-batch-size 101 --black-box"
    assert "no finite epsilon is claimed" in command.refuses(*words.split(), *how.split())
