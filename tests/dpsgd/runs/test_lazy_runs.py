"""Runs with lazy tables go on as others do, and pending noise is never drawn twice."""

import jax
import numpy as np
import pytest
from tiny_task import assert_same, config_of, contents, declared, ended, words

from dpsgd import resume, run
from dpsgd.audit.report import AuditReport
from dpsgd.runs import job
from dpsgd.runs.checkpoint import Checkpoints
from samplers.settings import SETTINGS


@pytest.fixture(autouse=True)
def shorter(short, monkeypatch):
    monkeypatch.setattr(job, "BLOCK_STEPS", 4)


def lazy(**settings):
    given = {"tables": "lazy", "tables_learning_rate": 1.0, "tables_momentum": 0.0}
    return config_of(flush_every=12, checkpoint_seconds=0.0, **given, **settings)


def begun(out, step, how="stopped", **settings):
    with ended(how, step // 4 - 1):
        run(words, lazy(**settings), out, name="tiny_task:words")
    return out


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job, "BLOCK_STEPS", 4)
        run(words, lazy(insecure_seed=3), out, name="tiny_task:words")
    return out


@pytest.mark.short("20-killed")
@pytest.mark.parametrize(("step", "how"), [(12, "stopped"), (20, "killed")])
def test_a_resumed_lazy_run_ends_in_the_undisturbed_bits(tmp_path, whole, step, how):
    out = begun(tmp_path / "run", step, how, insecure_seed=3)
    resume(out)
    assert_same(out, whole)
    assert not (out / "checkpoints").exists()
    assert contents(out, "guarantee.json")["lazy_tables"]
    assert contents(out, "report.json")["lazy_tables"]


def test_checkpoints_and_clean_stops_have_no_pending_noise(tmp_path, monkeypatch):
    saved, save = [], Checkpoints.save

    def saving(self, checkpoint):
        assert not checkpoint.state.pending
        saved.append(int(checkpoint.state.step))
        save(self, checkpoint)

    monkeypatch.setattr(Checkpoints, "save", saving)
    cheap = SETTINGS["poisson"](batch_size=16, epochs=3, max_batch_size=160)  # a third of bins
    resume(begun(tmp_path / "stopped", 20, sampler=cheap))
    killed = begun(tmp_path / "killed", 20, "killed", sampler=cheap)
    resume(killed)
    assert saved == [12, 20, 24, 30, 12, 24, 30]
    assert declared(tmp_path / "stopped") == [range(30)]
    assert declared(killed) == [range(20), range(12, 30)]


def test_an_audit_sees_where_a_run_goes_on_and_none_of_its_rows(tmp_path, monkeypatch):
    seen = []

    def audit_program(*run, state, **how):
        seen.append(jax.tree.map(np.array, state))
        return AuditReport(())

    monkeypatch.setattr(job, "audit_program", audit_program)
    with ended(number=4):
        run(words, lazy().but(audit=True), tmp_path / "run", name="tiny_task:words")
    resume(tmp_path / "run")
    assert [int(state.step) for state in seen] == [0, 20]
    for state in seen:
        assert np.array_equal(state.params["table"], words.init(0)["table"])
