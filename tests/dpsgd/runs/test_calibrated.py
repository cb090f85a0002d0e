"""A run may end in a calibration of its model: part of its cost, of its ledger and of its end."""

import dataclasses
import os
import shutil
import signal

import numpy as np
import pytest
from tiny_task import (
    SUMS,
    Calibrated,
    calibrated,
    config_of,
    contents,
    declared,
    few_rows_are_calibrated,
    short_blocks,
    weights,
)

from dpsgd import Segment, cost, resume, run
from dpsgd.audit import audit as coupled
from dpsgd.audit.report import AuditReport, CheckResult
from dpsgd.core import gaussian
from dpsgd.runs import audit, job
from dpsgd.runs.checkpoint import Checkpoints
from dpsgd.runs.directory import CALIBRATION, DIAGNOSTICS
from dpsgd.runs.history import read
from dpsgd.runs.ledger import Ledger
from dpsgd.runs.stop import Stopped
from samplers.settings import SETTINGS

RELEASED = ("params.npz", "ledger.jsonl", "guarantee.json", CALIBRATION, DIAGNOSTICS)
STEPS, WHOLE = 30, 33
ORDERED = SETTINGS["deterministic"](batch_size=16, epochs=3)  # priced at once


@pytest.fixture(autouse=True)
def few_rows():
    with few_rows_are_calibrated():
        yield


def config(**settings):
    return config_of(sampler=ORDERED, **settings)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("calibrated") / "run"
    with few_rows_are_calibrated(), short_blocks():
        run(calibrated, config(insecure_seed=3), out)
    return out


# --- Part of the model and of its cost -----------------------------------------------------------


def test_the_model_is_what_the_sums_make_of_the_trained_one(whole, tmp_path):
    plain = run(calibrated, config(insecure_seed=3, calibration="none"), tmp_path / "plain")
    slope = contents(whole, CALIBRATION)["slope"]
    np.testing.assert_allclose(weights(whole), slope * weights(tmp_path / "plain"), rtol=1e-6)
    assert abs(slope - 1.0) > 0.01
    found = contents(whole, "report.json")
    assert found["metrics"]["test_error"] == pytest.approx(
        calibrated.metrics({"w": weights(whole)})["test_error"]
    )
    assert found["calibration"] == {"slope": slope}
    assert plain["calibration"] is None
    assert not (tmp_path / "plain" / CALIBRATION).exists()
    text = (whole / "report.md").read_text()
    assert f"slope {slope:.4f}" in text
    assert f"{STEPS}, then {SUMS.count} sums over all rows" in text


# --- Stopped and killed --------------------------------------------------------------------------


class Death(BaseException):
    """What no code expects."""


def dies(*of, **how):
    raise Death


def killed(out, where, monkeypatch, **settings):
    """A run that ended at a moment, as a crash ends it, or SIGTERM."""
    with monkeypatch.context() as patch:
        MOMENTS[where](patch)
        with pytest.raises(Stopped if where == "asked to stop" else Death):
            run(calibrated, config(**settings), out)
    return out


def after_declaring(patch):
    sound = Ledger.declare

    def declare(ledger, steps):
        sound(ledger, steps)
        if steps.start == STEPS:
            dies()

    patch.setattr(Ledger, "declare", declare)


def before_the_second_checkpoint(patch):
    sound = Checkpoints.save

    def save(checkpoints, checkpoint):
        if checkpoint.state.step == WHOLE:
            dies()
        sound(checkpoints, checkpoint)

    patch.setattr(Checkpoints, "save", save)


def asked_to_stop(patch):
    sound = job.refine

    def stopping(*of, **how):
        os.kill(os.getpid(), signal.SIGTERM)
        return sound(*of, **how)

    patch.setattr(job, "refine", stopping)


MOMENTS = {
    "asked to stop": asked_to_stop,
    "before the sums": lambda patch: patch.setattr(job, "refine", dies),
    "declared and not released": after_declaring,
    "released and not saved": before_the_second_checkpoint,
    "evaluating": lambda patch: patch.setattr(Calibrated, "metrics", dies),
}
DECLARED = dict(zip(MOMENTS, (STEPS, STEPS, WHOLE, WHOLE, WHOLE), strict=True))
KILLED = ("before the sums", "declared and not released", "released and not saved")


@pytest.mark.short("secret-*re*", "secret-asked*")
@pytest.mark.parametrize("where", MOMENTS)
@pytest.mark.parametrize("insecure", [True, False], ids=["of a seed", "secret"])
def test_a_run_killed_around_its_sums_resumes_or_recounts_them(
    whole, tmp_path, monkeypatch, where, insecure
):
    out = killed(tmp_path / "run", where, monkeypatch, insecure_seed=3 if insecure else None)
    assert declared(out) == [range(DECLARED[where])]
    with monkeypatch.context() as patch:
        patch.setattr(job, "train_blocks", dies)  # no step is left
        resume(out, calibrated)
    if not insecure and where in KILLED:  # between a checkpoint and the next, or its end
        assert declared(out) == [range(DECLARED[where]), range(STEPS, WHOLE)]
        return
    assert declared(out) == [range(WHOLE)]
    if not insecure:
        return
    for name in RELEASED:
        assert (out / name).read_bytes() == (whole / name).read_bytes(), name
    assert {path.name for path in out.iterdir()} == {path.name for path in whole.iterdir()}


@pytest.mark.long
def test_sums_that_are_taken_again_have_other_noise(tmp_path, monkeypatch):
    stopped = killed(tmp_path / "run", "declared and not released", monkeypatch)
    copy = shutil.copytree(stopped, tmp_path / "copy")
    for out in (stopped, copy):
        resume(out, calibrated)
    one, other = (contents(out, CALIBRATION)["slope"] for out in (stopped, copy))
    assert one != other


def test_a_resumed_run_chooses_no_sums_again_and_counts_its_own(tmp_path, monkeypatch):
    out = killed(tmp_path / "run", "before the sums", monkeypatch)
    monkeypatch.setattr("dpsgd.engine.calibration.calibration_sums", dies)
    record = resume(out, calibrated)
    assert record["full_sums"] == dataclasses.asdict(SUMS)
    mechanism = read(out / "ledger.jsonl").attempts[0].terms.mechanism
    assert record["epsilon_upper"] == cost([Segment(mechanism)], 1e-5).epsilon.upper
    alone = cost([Segment(dataclasses.replace(mechanism, full_sums=None))], 1e-5)
    assert record["epsilon_upper"] > alone.epsilon.upper + 0.1


# --- The audit -----------------------------------------------------------------------------------


def test_the_sums_are_audited_before_training_and_resuming(tmp_path, monkeypatch):
    audit._passed.clear()
    made, sound = [], coupled.audit_program
    passed = AuditReport((CheckResult("sums add up", True, "as wanted"),))

    def counted(*of, **how):
        made.append(of[1])
        return sound(*of, **how) if len(made) > 2 else passed  # the last one is carried out

    for module in (job, coupled):
        monkeypatch.setattr(module, "audit_program", counted)
    out = killed(tmp_path / "run", "before the sums", monkeypatch, audit=True)
    assert [mechanism.full_sums for mechanism in made] == [SUMS, None]
    assert made[1] == made[0].sums_mechanism()
    audit._passed.clear()
    record = resume(out, calibrated)
    assert [mechanism.full_sums for mechanism in made[2:]] == [None]  # no step is left
    assert record["audit"].startswith("passed: the sums over all rows keep what the guarantee")


@pytest.mark.long
def test_a_run_with_too_little_noise_on_sums_leaves_no_files(tmp_path, monkeypatch):
    audit._passed.clear()
    sound = gaussian.add_gaussian_noise

    def cut(total, key, step, stddev, **more):
        of_sums = "sum" in total  # and not of the model
        return sound(total, key, step, stddev / 100 if of_sums else stddev, **more)

    monkeypatch.setattr(gaussian, "add_gaussian_noise", cut)
    with pytest.raises(ValueError, match=r"audit found .*sums over all rows.*do not train it"):
        # Compiled anew, and of weights enough to be audited by few releases.
        run(Calibrated(width=64, divisor=21.0), config(audit=True), tmp_path / "run")
    assert not list(tmp_path.iterdir())
