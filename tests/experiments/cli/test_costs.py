"""`dpsgd epsilon` and `calibrate`: what runs of all samplers cost, by public sizes alone."""

import re

import numpy as np
import pytest

from accounting import MultistageProfile, epsilon
from accounting.attack import implied_advantage
from dpsgd import Mechanism, Segment, cost
from samplers import Multistage, Poisson, UnitsThenPoisson, UnitTree, UserPoisson

NOISE = ["--noise-multiplier", "2", "--target-delta", "1e-5"]


def upper(line):
    return float(line.split("[")[1].split("]")[0].split(",")[1])


TREE = UnitTree.from_columns({"partner": np.repeat(np.arange(10), 10)})
OF_TREE = "--sizes 10 10 --steps 100 --num-examples 100 --draws 1"
FEW_STEPS = OF_TREE.replace("100", "5", 1)
USERS = "--num-examples 5000 --batch-size 50 --epochs 1 --max-contributions 5 --max-batch-size 5000"
ASKED = {
    f"sampler:multistage {FEW_STEPS} 5 --clipped-level 1 --protected-level 1 --units partner": (
        Multistage(TREE, (1, 5), steps=5, clipped_level=1, protected_level=1), "partner"),
    f"sampler:units-then-poisson {FEW_STEPS} --sampling-prob 0.2 --max-batch-size 10": (
        UnitsThenPoisson(TREE, (1,), 0.2, steps=5, max_batch_size=10), "example"),
    f"sampler:user-poisson {USERS}": (
        UserPoisson(5000, 50, 1, max_contributions=5, max_batch_size=5000), "user"),
    "sampler:poisson --num-examples 1000 --batch-size 50 --epochs 2 --unit user": (
        Poisson(1000, 50, 2, target_delta=1e-5), "user"),
    "sampler:poisson --num-examples 1000 --batch-size 50 --epochs 2 --cycle-length 4": (
        Poisson(1000, 200, 2, target_delta=1e-5), "example"),
}  # fmt: skip


@pytest.mark.parametrize("words", ASKED)
def test_a_run_by_its_sizes_costs_what_its_sampler_does(words, command):
    sampler, unit = ASKED[words]
    line = command("epsilon", *words.split(), *NOISE).splitlines()[0]
    assert line == cost([Segment(Mechanism(sampler, 2.0, 1.0), unit=unit)], 1e-5).sentence()


@pytest.mark.long
def test_episodes_are_told_what_could_be_done_in_their_place(command):
    words = f"sampler:multistage {OF_TREE} 5".split()
    first, *rest = command("epsilon", *words, *NOISE).splitlines()
    of_tree = epsilon(Multistage(TREE, (1, 5), steps=100).privacy(2.0), 1e-5)
    assert str(of_tree) in first
    assert any("another unit in the place of a drawn one moves the sum" in line for line in rest)
    assert "NO GUARANTEE: published Theorem 3" in rest[-1]
    clipped = next(line for line in rest if "units of level 1 clipped" in line)
    alone = MultistageProfile(2.0, 100, (1, 5), (10, 10), clipped_level=1).epsilon(1e-5)
    assert upper(clipped) == pytest.approx(alone.upper, rel=1e-2)


def test_a_calibration_is_paid_for_out_of_the_same_target(command):
    words = ["sampler:deterministic", "--num-examples", "88000", "--epochs", "5"]
    found = {}
    for calibration in ("none", "platt", "temperature", "affine"):
        both = [*words, "--calibration", calibration]
        line = command("calibrate", *both, "--target-epsilon", "3")
        sigma = float(line.split("noise multiplier ")[1].split()[0].strip(","))
        first, *notes = command("epsilon", *both, "--noise-multiplier", sigma).splitlines()
        assert 2.99 < upper(first) <= 3.0
        found[calibration] = sigma
        named = " over all rows" in line and any("noisy sum" in note for note in notes)
        assert named == (calibration != "none")
        if named:
            assert sigma > 1.001 * found["none"]


def test_a_printed_delta_is_never_smaller_than_the_certified_one(command):
    words = ["--num-examples", 37_000_000, "--epochs", 1, "--noise-multiplier", 1]
    words += ["--target-delta", 1 / 37e6]  # 2.7027e-8
    assert "at delta 2.71e-08" in command("epsilon", "sampler:deterministic", *words)


def test_shuffling_costs_more_than_poisson_and_notes_its_claim(command):
    words = ["--num-examples", 1_000_000, "--epochs", 1, "--noise-multiplier", 0.6]
    poisson = upper(command("epsilon", "sampler:poisson", *words))
    cost, *notes = command("epsilon", "sampler:shuffle", *words).splitlines()
    assert float(cost.split("[")[1].split(",")[0]) > 2 * poisson
    assert any(note.startswith("note: Poisson accounting") for note in notes)


def test_private_search_costs_more_than_one_run_less_than_all(command):
    words = ["sampler:deterministic", "--num-examples", 5000, "--epochs", 1]
    words += ["--noise-multiplier", 2, "--target-delta", 1e-5, "--mean-trials", 10]
    said = command("epsilon", *words)
    one, best = upper(said), float(re.findall(r"epsilon <= ([\d.]+)", said)[-1])
    assert one < best < 3 * one
    alone, search = (float(x) / 100 for x in re.findall(r"at most ([\d.]+) % of the time", said))
    # The search's is bounded by the chance that one of so many trials differs, not by its epsilon.
    assert alone == pytest.approx(0.5987, abs=1e-3)
    assert alone < search < (1 + implied_advantage(best, 1e-5)) / 2 < 0.95
    assert said.count("zero-out adjacency, unit: one example") == 2
