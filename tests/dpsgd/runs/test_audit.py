"""Every run is audited before it starts, by its own task's loss on rows that are nobody's."""

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest
from tiny_task import Line, config_of, line, run_and_stop, short_blocks

from dpsgd import resume, run
from dpsgd.audit import conformance
from dpsgd.audit.report import UNSEEN, AuditReport, CheckResult
from dpsgd.audit.runtime.differential import ADDS_UP, STEP
from dpsgd.core import gaussian
from dpsgd.core.noise import Independent
from dpsgd.core.segments import Segment
from dpsgd.engine import feed, loop, programs
from dpsgd.gradients.rules import FlatClipping
from dpsgd.noise.keys import RootKey
from dpsgd.runs import audit, job
from dpsgd.runs.history import read
from dpsgd.runs.job import Job
from dpsgd.runs.mechanism import resolved
from dpsgd.runs.spec import Optimizer
from samplers import Population
from samplers.settings import SETTINGS

pytestmark = pytest.mark.audit


@pytest.fixture(autouse=True)
def nothing_is_remembered():
    """A process audits a mechanism once; each test here is a process of its own."""
    audit._passed.clear()


@pytest.fixture
def half_noise(monkeypatch):
    """A bug in what is added to the sums of every step that is compiled from here on."""
    sound = gaussian.add_gaussian_noise
    monkeypatch.setattr(
        gaussian,
        "add_gaussian_noise",
        lambda total, key, step, stddev, **more: sound(total, key, step, stddev / 2, **more),
    )


@pytest.mark.long
def test_a_run_with_too_little_noise_leaves_no_files(half_noise, tmp_path):
    with pytest.raises(ValueError, match=r"a step releases what the definition.*do not train it"):
        run(Line(width=499), config_of(audit=True), tmp_path / "run")
    assert not list(tmp_path.iterdir())


@dataclasses.dataclass(frozen=True)
class Free(Independent):
    """Noise that is priced as nine times as much."""

    def privacy(self, sampler, noise_multiplier):
        return super().privacy(sampler, 9 * noise_multiplier)


@dataclasses.dataclass(frozen=True)
class FreeAtDelta(Independent):
    """Noise that is priced as nine times as much, but at delta 1e-6."""

    def privacy(self, sampler, noise_multiplier):
        sound, cheap = (sampler.privacy(k * noise_multiplier) for k in (1, 9))

        class ByDelta(type(sound)):
            def epsilon(self, delta, tolerance=1e-3):
                return (sound if delta == 1e-6 else cheap).epsilon(delta, tolerance)

        return ByDelta(**{f.name: getattr(sound, f.name) for f in dataclasses.fields(sound)})


@dataclasses.dataclass(frozen=True)
class Loud(FlatClipping):
    """A rule that clips to twice the norm."""

    def factors(self, group_norms, l2_clip_norm, counts):
        return super().factors(group_norms, 2 * l2_clip_norm, counts)


LOUD = Loud()  # one, and so one program
OWN = {
    "noise": (Free(), "the cost of a noise is proved.*a run under BallsAndBins"),
    "noise at the run's delta": (FreeAtDelta(), "the cost of a noise is proved.*a run under"),
    "clipping": (LOUD, "a step releases what the definition of DP-SGD does"),
}


@pytest.mark.short("noise at*", "clipping")
@pytest.mark.parametrize("kind", OWN)
def test_an_own_part_that_breaks_its_claim_is_refused(kind, tmp_path):
    (part, wrong), setting = OWN[kind], kind.split()[0]
    with pytest.raises(ValueError, match=wrong):
        run(line, config_of(audit=True, **{setting: part}), tmp_path / "run")
    assert not list(tmp_path.iterdir())


@dataclasses.dataclass(frozen=True)
class Plain(Optimizer):
    """SGD as an optimizer from another package."""

    def transformation(self, step_size):
        return optax.sgd(step_size)


@pytest.mark.parametrize(
    ("option", "part", "check"),
    [("clipping", LOUD, "check_rule"), ("optimizer", Plain(), "check_optimizer")],
    ids=["a rule of a large model", "an optimizer"],
)
def test_own_parts_that_fail_conformance_are_refused(option, part, check, tmp_path, monkeypatch):
    checked = []
    monkeypatch.setattr(audit, "LARGE", 0)
    monkeypatch.setattr(conformance, check, lambda *of: checked.append(of) or 1 / 0)
    with pytest.raises(ValueError, match=rf"{type(part).__name__} passes its conformance check"):
        run(line, config_of(audit=True, **{option: part}), tmp_path / "run")
    assert len(checked) == 1
    assert not list(tmp_path.iterdir())


@dataclasses.dataclass(frozen=True)
class Listed(FlatClipping):
    """A clipping rule without a hash, as one of its fields is a list."""

    names: list


def test_a_rule_without_a_hash_is_checked_once(monkeypatch):
    checked = []
    monkeypatch.setattr(audit, "LARGE", 0)
    monkeypatch.setattr(conformance, "check_rule", lambda *of: checked.append(of))
    spec, params = config_of(clipping=Listed([1])), {"w": np.ones(3, np.float32)}
    for _ in range(2):  # before a run has a folder, and in its folder
        assert len(audit.conformance(spec, params).checks) == 1
    assert len(checked) == 1


def test_the_audit_is_reported_optional_and_changes_no_bit(tmp_path, monkeypatch):
    keys = []
    derive = RootKey.noise_key
    monkeypatch.setattr(
        RootKey,
        "noise_key",
        lambda root, attempt=0: keys.append(derive(root, attempt)) or keys[-1],
    )
    lines = {
        name: run(line, config_of(insecure_seed=3, audit=name == "audited"), tmp_path / name)[
            "audit"
        ]
        for name in ("audited", "trusted")
    }
    assert lines["audited"].startswith(
        "passed: the compiled program and the draws keep what the guarantee assumes"
    )
    assert lines["audited"].endswith(UNSEEN)
    assert lines["trusted"].startswith("not made: ")
    assert lines["audited"] in (tmp_path / "audited" / "report.md").read_text()
    assert read(tmp_path / "audited" / "ledger.jsonl").audit == lines["audited"]
    params = [(tmp_path / name / "params.npz").read_bytes() for name in ("audited", "trusted")]
    assert params[0] == params[1]
    # Both runs draw by one key, and no audit by that.
    ours = derive(RootKey.from_insecure_seed(3), 0)
    assert sum(np.array_equal(key, ours) for key in keys) == 2
    assert len(keys) > 2


@pytest.fixture
def quiet_beginnings(monkeypatch):
    """A bug of the host: the first block of what goes on at a later step has next to no noise."""
    sound = feed.plan_blocks
    started = []

    def planned(source, *, first_step, **how):
        started[:] = [first_step]
        return sound(source, first_step=first_step, **how)

    run_block = loop.compiled_block

    def planted(*of):
        block = run_block(*of)

        def called(state, inputs):
            if started and started.pop() > 0:
                faint = dataclasses.replace(inputs.scales, noise_stddev=np.float32(2.0**-90))
                inputs = inputs._replace(scales=faint)
            return block(state, inputs)

        return called

    monkeypatch.setattr(feed, "plan_blocks", planned)
    monkeypatch.setattr(loop, "compiled_block", planted)
    monkeypatch.setattr(programs, "digest", lambda program: "of what is no program")


def test_a_run_that_goes_on_is_audited_where_it_goes_on(tmp_path, monkeypatch, request):
    with short_blocks():
        out = run_and_stop(line, config_of(audit=True), tmp_path / "run")
        assert read(out / "ledger.jsonl").audit.startswith("passed")
        request.getfixturevalue("quiet_beginnings")
        with pytest.raises(ValueError, match=r"blocks .*do not train it"):
            resume(out)
        monkeypatch.undo()
        found = resume(out)["audit"]
    assert found.startswith("passed")
    assert read(out / "ledger.jsonl").audit == found


def test_where_there_is_no_noise_there_is_nothing_to_audit(tmp_path):
    config = config_of(noise_multiplier=None, non_private=True, audit=True)
    assert run(line, config, tmp_path / "run")["audit"] == "not made: there is no noise"


def audits(monkeypatch):
    """A list that grows with every audit of a program, each of which passes."""
    made, empty = [], audit.AuditReport(())
    monkeypatch.setattr(job, "audit_program", lambda *run, **how: made.append(run) or empty)
    return made


def job_of(**changed):
    return Job.of_task(line, resolved(config_of(audit=True, **changed), Population(160)))


UNSHARED = {
    "sigma": {"noise_multiplier": 2.0},
    "clip norm": {"l2_clip_norm": 2.0},
    "sampler": {"sampler": SETTINGS["shuffle"](batch_size=16, epochs=3)},
    "noise": {"bands": 2},
    "delta": {"target_delta": 1e-7},
    "optimizer": {"optimizer": "sgd"},
}


def test_runs_of_other_claims_are_audited_again(monkeypatch):
    made, sampler = audits(monkeypatch), SETTINGS["deterministic"](batch_size=16, epochs=3)
    for count, (kind, changed) in enumerate({"none": {}, **UNSHARED}.items(), start=1):
        job = job_of(**{"sampler": sampler, **changed})
        job.audit(job.start())
        assert len(made) == count, kind


def test_runs_that_differ_in_values_of_the_state_share_an_audit(monkeypatch):
    made = audits(monkeypatch)
    for changed in ({}, {}, {"init_seed": 1}, {"learning_rate": 0.5}):
        job = job_of(**changed)
        job.audit(job.start())
        assert len(made) == 1
    job.audit(job.start()._replace(step=np.int32(1)))  # it draws other batches and noise
    with jax.default_matmul_precision("bfloat16"):
        job.audit(job.start())
    assert len(made) == 3


@dataclasses.dataclass(frozen=True)
class Flat(Line):
    """A line whose first weights, and the gradients there, are 0 in runs of seed 0."""

    def init(self, seed):
        return jax.tree.map(lambda x: x * np.float32(seed), super().init(seed))

    def loss(self, params, example):
        return sum(jax.numpy.sum(x**2) for x in jax.tree.leaves(params)) * example["y"]


def test_an_audit_without_gradients_is_not_shared(monkeypatch):
    made, sound, flat = [], job.audit_program, Flat()
    monkeypatch.setattr(job, "audit_program", lambda *x, **y: made.append(0) or sound(*x, **y))
    for seed, count in ((0, 1), (1, 2), (2, 2)):
        planned = Job.of_task(
            flat, resolved(config_of(audit=True, init_seed=seed), Population(160))
        )
        verdict = planned.audit(planned.start())
        assert ("no example adds to the sum" in verdict) == (seed == 0), verdict
        assert len(made) == count


def test_an_audit_of_sums_without_gradients_is_not_shared():
    for name, shared in ((STEP, False), (ADDS_UP, True)):
        skipped = (CheckResult.skipped(f"sums over all rows: {name}", "why"),)
        make = functools.partial(AuditReport, skipped)
        first, second = (audit.once(make, {}, run, (name,)) for _ in range(2))
        assert (first is second) == shared


def test_an_audit_of_a_state_of_other_shapes_is_not_shared():
    states = np.zeros(2), np.zeros(3), np.zeros(2, int), [np.zeros(2)]
    reports = [audit.once(lambda: AuditReport(()), state, run, ("shapes",)) for state in states]
    assert len({*map(id, reports)}) == len(states)


def test_audit_is_repeated_for_a_program_that_is_compiled_again(monkeypatch):
    """A task that is changed in place trains another program once its first is dropped."""
    made, job = audits(monkeypatch), job_of()
    job.audit(job.start())
    job.audit(job.start())
    assert len(made) == 1
    for power in range(programs.MOST_PROGRAMS):  # push the run's program out
        programs.program(pow, (power,), (3.0,))
    job.audit(job.start())
    assert len(made) == 2


def test_no_audit_is_cached_for_samplers_with_extra_attributes(monkeypatch):
    made, job = audits(monkeypatch), job_of()

    class Held(type(job.mechanism.sampler)):
        """May hold more than its fields."""

    fields = dataclasses.fields(job.mechanism.sampler)
    values = {field.name: getattr(job.mechanism.sampler, field.name) for field in fields}
    mechanism = dataclasses.replace(job.mechanism, sampler=Held(**values))
    of_held = dataclasses.replace(job, plan=Segment(mechanism))
    for held in (1, 2):  # of one sampler, and of one program
        object.__setattr__(mechanism.sampler, "held", held)
        of_held.audit(of_held.start())
    assert len(made) == 2
