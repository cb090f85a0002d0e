"""`dpsgd plan noise` answers in numbers that suffice, says why where 1 is best, and draws them."""

import re

import pytest

from accounting import attack_advantage, epsilon
from samplers import BallsAndBins

SIZES = ["--num-examples", "3000", "--batch-size", "100", "--target-delta", "1e-4"]
BALLS = ["plan", "noise", "sampler:balls-and-bins", *SIZES, "--overflow", "accumulate"]
BALLS += ["--epochs", "1"]  # batches that are never cut cost many times less time to calibrate
BALLS += ["--target-epsilon", "8"]


def mechanism_of(out):
    """The mechanism that the printed lines for Python make."""
    lines = out.partition("With dpsgd.train")[2].partition("\n")[2].splitlines()[:4]
    names = {"l2_clip_norm": 1.0}
    exec("\n".join(line.strip() for line in lines), names)
    return names["mechanism"]


@pytest.mark.long
def test_the_lines_for_python_make_the_mechanism_of_the_best_answer(command, tmp_path):
    plot = tmp_path / "plan.png"
    words = ["--optimizer", "sgd", "--momentum", "0.9", "--bands", "2", "6", "--plot", str(plot)]
    out = command(*BALLS, *words)
    assert plot.read_bytes().startswith(b"\x89PNG")
    rows = {int(b): float(e) for b, e in re.findall(r"^(\d+) +[\d.]+ +([\d.]+)", out, re.MULTILINE)}
    assert list(rows) == [1, 2, 6]
    assert rows[1] == 1.0
    best = min(rows, key=rows.__getitem__)
    assert best > 1
    assert f"b = {best} is best: its noise leaves {rows[best]:.3g}" in out
    assert f"With `dpsgd train`: --optimizer sgd --momentum 0.9 --bands {best}\n" in out
    mechanism = mechanism_of(out)
    assert mechanism.noise.bands == mechanism.sampler.cycle_length == best
    assert 7.95 < epsilon(mechanism.privacy(), 1e-4).upper <= 8


@pytest.mark.long
def test_a_plan_for_an_attack_advantage_has_the_noise_of_it(command):
    words = [*BALLS[:-2], "--target-advantage", "0.2", "--optimizer", "sgd", "--bands", "4"]
    out = command(*words)
    assert "each with attack advantage <= 0.2 (zero-out adjacency, unit: one example):" in out
    sigmas = dict(re.findall(r"^(\d+) +([\d.]+)", out, re.MULTILINE))
    for b, sigma in sigmas.items():
        sampler = BallsAndBins(3000, 100, cycle_length=int(b), overflow="accumulate")
        assert 0.199 < attack_advantage(sampler.privacy(float(sigma))).upper <= 0.2
    assert list(sigmas) == ["1", "4"]


def test_a_fixed_order_is_offered_buffers_and_the_lines_for_python_make_them(command, tmp_path):
    words = ["plan", "noise", "sampler:deterministic", *SIZES, "--target-epsilon", "8"]
    plot = tmp_path / "plan.png"
    words += ["--optimizer", "sgd", "--bands", "8", "30", "--buffers", "2", "--plot", str(plot)]
    out = command(*words)
    assert plot.read_bytes().startswith(b"\x89PNG")
    (row,) = (line for line in out.splitlines() if line.startswith("BLT 2 "))
    assert row.rstrip().endswith("2 x parameters")
    assert "BLT of 2 buffers leaves" in out
    assert "keeps 2 vectors in place of 29" in out
    out = command(*words[:-2], "--bands", "8")
    assert "BLT of 2 buffers is best" in out
    assert "With `dpsgd train`: --optimizer sgd --buffers 2\n" in out
    mechanism = mechanism_of(out)
    assert mechanism.noise.kept == 2
    assert 7.95 < epsilon(mechanism.privacy(), 1e-4).upper <= 8


def test_adam_is_answered_by_1_and_the_reason(command):
    out = command(*BALLS, "--optimizer", "adam")
    assert "b = 1 is best, independent noise: Adam gains nothing" in out
    assert "divides by" in out
    assert "With dpsgd.train" not in out


@pytest.mark.long
def test_where_few_steps_gain_nothing_it_says_so(command):
    words = [*BALLS[:-1], "0.2", "--optimizer", "sgd", "--batch-size", "500", "--bands", "2"]
    out = command(*words)
    assert "b = 1 is best, independent noise: with b = 2 sampling amplifies" in out
    assert "few steps an epoch and a small epsilon" in out


def test_memory_limits_what_is_tried_and_a_smaller_b_that_is_nearly_as_good_is_named(command):
    words = ["plan", "noise", "sampler:deterministic", *SIZES, "--target-epsilon", "8"]
    words += ["--optimizer", "sgd", "--num-params", "1000000", "--bands-memory", "80MB"]
    out = command(*words)
    assert "\n21 " in out
    assert "80 MB" in out
    assert "b is at most 21: 80MB holds no more." in out
    assert "\n32 " not in out


@pytest.mark.long
@pytest.mark.parametrize(
    "sampler", ["shuffle", pytest.param("user-poisson", marks=pytest.mark.long)]
)
def test_other_samplers_have_independent_noise_alone_and_one_line_says_so(sampler, command):
    words = ["plan", "noise", f"sampler:{sampler}", *SIZES, "--target-epsilon", "8"]
    words += ["--max-contributions", "2"] if sampler == "user-poisson" else []
    out = command(*words, "--optimizer", "sgd")
    (line,) = (line for line in out.splitlines() if "keeps no two steps" in line)
    assert line.startswith("b is at most 1: ")
    assert line.endswith("balls-and-bins, poisson and deterministic can.")


DEVICES = ["plan", "devices", "sampler:deterministic", "--num-examples", "3000"]
DEVICES += ["--batch-size", "100", "--embedding-dim", "2", "--max-buckets", "16", "--hidden", "4"]


@pytest.mark.long
def test_devices_are_planned_for_without_any(command):
    out = command(*DEVICES, "--num-devices", "1")
    assert "batches of b = 100, 1 device on 1 host; nothing sharded" in out
    assert "nothing is exchanged" in out
    assert "a batch takes 100 places, 100 on each device: 0.0% of b are padding" in out
    assert "efficiency 100%" in out
    assert "assumed, and not measured: memory 4.3TB/s" in out
