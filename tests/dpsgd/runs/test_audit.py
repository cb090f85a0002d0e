"""Every run is audited before it starts, by its own task's loss on rows that are nobody's."""

import json

import jax
import numpy as np
import pytest
from tiny_task import Line, config_of, line

from dpsgd import Mechanism, RootKey, RunConfig, dpsgd, resume, run
from dpsgd.audit.checks import AuditReport, Check
from dpsgd.audit.step import recorder
from dpsgd.noise import gaussian
from dpsgd.runs import audit, engine
from samplers import Deterministic, Population

pytestmark = pytest.mark.audit


@pytest.fixture(autouse=True)
def nothing_is_remembered():
    """A process audits a mechanism once; each test here is a process of its own."""
    audit._audited.cache_clear()


@pytest.fixture
def half_noise(monkeypatch):
    """A bug in what is added to the sums of every step that is compiled from here on."""
    sound = gaussian.add_gaussian_noise
    monkeypatch.setattr(
        gaussian,
        "add_gaussian_noise",
        lambda total, key, step, stddev, **more: sound(total, key, step, stddev / 2, **more),
    )


def test_a_run_with_too_little_noise_is_refused_and_leaves_nothing(half_noise, tmp_path):
    with pytest.raises(ValueError, match=r"noise has standard deviation .*do not train it"):
        run(Line(width=499), config_of(audit=True), tmp_path / "run")
    assert not list(tmp_path.iterdir())


def test_the_audit_says_what_it_found_changes_no_bit_and_can_be_switched_off(tmp_path, monkeypatch):
    keys = []
    derive = RootKey.noise_key
    monkeypatch.setattr(
        RootKey,
        "noise_key",
        lambda root, generation: keys.append(derive(root, generation)) or keys[-1],
    )
    lines = {
        name: run(line, config_of(insecure_seed=3, audit=name == "audited"), tmp_path / name)[
            "audit"
        ]
        for name in ("audited", "trusted")
    }
    assert lines["audited"].startswith("passed: step and sampler keep what the guarantee assumes")
    assert lines["trusted"] == "not made: it was switched off"
    assert lines["audited"] in (tmp_path / "audited" / "report.md").read_text()
    assert json.loads((tmp_path / "audited" / "audit.json").read_text())["audit"] in lines.values()
    params = [(tmp_path / name / "params.npz").read_bytes() for name in ("audited", "trusted")]
    assert params[0] == params[1]
    # Three keys were derived: the audit's, which is nobody else's, and twice the runs'.
    assert len(keys) == 3
    assert not np.array_equal(keys[0], keys[1])
    assert np.array_equal(keys[1], keys[2])


def test_a_resumed_run_is_audited_again_only_if_something_changed(tmp_path, monkeypatch):
    class Died(Exception):
        pass

    def die(*arguments):
        raise Died

    audits = []
    monkeypatch.setattr(engine, "audit_run", lambda *arguments: audits.append(arguments) or "made")
    monkeypatch.setattr(engine, "_train", die)
    with pytest.raises(Died):
        run(line, config_of(audit=True), tmp_path / "run")
    with pytest.raises(Died):
        resume(tmp_path / "run")
    assert len(audits) == 1
    monkeypatch.setattr("dpsgd.runs.fingerprint.code_digest", lambda: "other code")
    with pytest.raises(Died):
        resume(tmp_path / "run")
    assert len(audits) == 2


@pytest.mark.parametrize(
    ("batch_size", "settings", "scans"),
    [
        (2048, {}, False),
        (2048, {"microbatch_size": 1000}, True),
        (2048, {"microbatch_size": 2048}, False),
        (64, {"secure_noise": True}, False),
        (2048, {"secure_noise": True}, True),
    ],
    ids=repr,
)
def test_the_audit_scans_microbatches_exactly_where_the_run_does(
    batch_size, settings, scans, monkeypatch
):
    wide = Line(width=200_000)
    sampler = Deterministic(10_000, batch_size)
    config = RunConfig(sampler, noise_multiplier=1.0, **settings)
    mechanism = config.mechanism(Population(10_000))

    def shaped(count):
        return {
            "x": jax.ShapeDtypeStruct((count, wide.width), np.float32),
            "y": jax.ShapeDtypeStruct((count,), np.float32),
        }

    def scans_of(program, width):
        shapes = {"w": jax.ShapeDtypeStruct((wide.width,), np.float32)}
        weights = jax.ShapeDtypeStruct((width,), np.float32)
        scales = mechanism.scales()
        traced = jax.make_jaxpr(lambda *of: program.clipped_sum(*of, scales))(
            shapes, shaped(width), weights
        )
        return sum(eqn.primitive.name == "scan" for eqn in traced.eqns) > 0

    def counted(build, mechanism, params, rows, *, claimed, max_batch_size):
        audited.append(scans_of(build(recorder()), max_batch_size))
        return AuditReport(())

    audited = []
    monkeypatch.setattr(audit, "coupled_audit", counted)
    monkeypatch.setattr(Line, "generated", lambda task, count: shaped(count))
    audit.audit_step(
        wide, {"w": jax.ShapeDtypeStruct((wide.width,), np.float32)}, mechanism,
        config.microbatch_size,
    )  # fmt: skip
    own = dpsgd(wide.loss, recorder(), microbatch_size=config.microbatch_size)
    assert audited == [scans] == [scans_of(own, batch_size)]


def test_the_sentence_names_what_was_small_and_what_was_left_out(monkeypatch):
    class Made(Line):
        def small(self, secure):
            return Line(width=2 if secure else 3)

    left_out = AuditReport((Check("the other", True, "too large", made=False),))
    monkeypatch.setattr(audit, "coupled_audit", lambda *of, **more: left_out)
    passed = (
        "passed: step and sampler keep what the guarantee assumes, on generated rows, batches of 64"
    )
    rest = "Not checked: the other (too large)"
    for secure, task, small in [
        (False, line, ""),
        (False, Made(width=1000), ", a model of 3 parameters in place of 1,000"),
        (True, Made(width=1000), ", a model of 2 parameters in place of 1,000"),
    ]:
        mechanism = Mechanism(Deterministic(160, 16), 1.0, 4.0)
        if secure:
            mechanism = config_of(secure_noise=True).mechanism(Population(160))
        assert audit.audit_run(task, task.init(0), mechanism, None) == f"{passed}{small}. {rest}"


def test_where_there_is_no_noise_there_is_nothing_to_audit():
    mechanism = config_of(noise_multiplier=None, non_private=True).mechanism(Population(160))
    assert audit.audit_run(line, line.init(0), mechanism, None) == "not made: there is no noise"


def test_a_run_on_more_rows_than_are_drawn_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("dpsgd.audit.sampler._LARGEST_PLAN", 159)
    text = run(line, config_of(audit=True), tmp_path / "run")["audit"]
    assert text.startswith("passed: ")
    assert text.endswith(
        "Not checked: the batches are the rows that were claimed "
        "(not drawn for more than 159 examples)"
    )
