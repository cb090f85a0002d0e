"""Every run is audited before it starts, and whoever asks can audit more."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from accounting import Bound
from dpsgd import Independent, Mechanism, RootKey, Secure, dpsgd
from dpsgd.audit.black_box import bound_epsilon
from dpsgd.audit.coupled import AuditReport, recorder
from dpsgd.audit.sampler import Check
from dpsgd.training import algorithm
from experiments import audit, programs
from experiments import train as training
from experiments.cli import config, main
from experiments.tasks.clicks import model
from experiments.tasks.clicks.model import ClickModel, functional
from experiments.tasks.clicks.schema import DISPLAY_ADS
from experiments.tasks.clicks.sizes import PRESETS
from experiments.tasks.clicks.store import columns_of
from experiments.tasks.clicks.synthetic.uniform import uniform_rows
from samplers import Population

pytestmark = pytest.mark.audit


@pytest.fixture(autouse=True)
def nothing_is_remembered():
    """A process audits a mechanism once; each test here is a process of its own."""
    audit._audited.cache_clear()


def arguments(store, out, *more):
    return [
        "train", str(store), "--out", str(out), "--noise-multiplier", "1", "--embedding-dim", "2",
        "--max-buckets", "8", "--hidden", "4", *more,
        "sampler:balls-and-bins", "--batch-size", "16", "--epochs", "1",
    ]  # fmt: skip


@pytest.fixture
def half_noise(monkeypatch):
    """A bug in what is added to the sums of every run from here on."""
    sound = algorithm.add_gaussian_noise
    programs._shared.cache_clear()
    monkeypatch.setattr(
        algorithm,
        "add_gaussian_noise",
        lambda total, key, step, stddev, **more: sound(total, key, step, stddev / 2, **more),
    )
    yield
    programs._shared.cache_clear()


def test_a_run_with_too_little_noise_is_refused_and_leaves_nothing(
    half_noise, store, tmp_path, capsys
):
    assert main(arguments(store, tmp_path / "run")) == 2
    said = capsys.readouterr().err
    assert "noise has standard deviation sigma C, in every leaf" in said
    assert "do not train it" in said
    assert len(said.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_the_audit_says_what_it_found_changes_no_bit_and_can_be_switched_off(
    store, tmp_path, capsys, monkeypatch
):
    keys = []
    derive = RootKey.noise_key
    monkeypatch.setattr(
        RootKey,
        "noise_key",
        lambda root, generation: keys.append(derive(root, generation)) or keys[-1],
    )
    for name, more in (("audited", []), ("trusted", ["--no-audit"])):
        assert main(arguments(store, tmp_path / name, "--insecure-seed", "3", *more)) == 0
    audited, trusted = (tmp_path / name for name in ("audited", "trusted"))
    said = {
        run: json.loads((run / "report.json").read_text())["audit"] for run in (audited, trusted)
    }
    assert said[audited].startswith("passed: step and sampler keep what the price assumes")
    assert said[trusted] == "not made: it was switched off"
    assert f"audit: {said[audited]}" in capsys.readouterr().out
    assert said[audited] in (audited / "report.md").read_text()
    with np.load(audited / "params.npz") as a, np.load(trusted / "params.npz") as b:
        assert all(np.array_equal(a[leaf], b[leaf]) for leaf in a.files)
    # Three keys were derived: the audit's, which is nobody else's, and twice the runs'.
    assert len(keys) == 3
    assert not np.array_equal(keys[0], keys[1])
    assert np.array_equal(keys[1], keys[2])


def test_a_resumed_run_is_audited_again_only_if_something_changed(store, tmp_path, monkeypatch):
    class Died(Exception):
        pass

    def die(*arguments):
        raise Died

    audits = []
    monkeypatch.setattr(
        training, "audit_run", lambda *arguments: audits.append(arguments) or "made"
    )
    asked = config.TrainConfig(
        data=store, sampler=config.Deterministic(batch_size=16, epochs=1), out=tmp_path / "run",
        noise_multiplier=1.0, embedding_dim=2, max_buckets=8, hidden=(4,),
    )  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(training, "_train", die)
        with pytest.raises(Died):
            training.train(asked)
        with pytest.raises(Died):
            training.resume(tmp_path / "run")
        assert len(audits) == 1
        patch.setattr("experiments.fingerprint.code_digest", lambda: "other code")
        with pytest.raises(Died):
            training.resume(tmp_path / "run")
    assert len(audits) == 2


def test_generated_rows_are_rows_of_a_store():
    rows = uniform_rows(DISPLAY_ADS, 50)
    for name, (dtype, width) in columns_of(DISPLAY_ADS).items():
        assert rows[name].dtype == dtype
        assert rows[name].shape == ((50,) if width is None else (50, width))
    assert (rows["categories"] <= DISPLAY_ADS.buckets).all()
    bare = dataclasses.replace(DISPLAY_ADS, integers=())
    assert uniform_rows(bare, 3)["integers"].shape == (3, 0)


def asked_for(sampler=None, **options):
    asked = config.TrainConfig(
        data=Path("data"), sampler=sampler or config.Deterministic(), out=Path("run"), **options
    )
    sampler = asked.sampler.build(Population(20_000))
    noise = Secure() if asked.secure_noise else Independent()
    return asked, Mechanism(sampler, asked.noise_multiplier or 0.0, 4.0, noise)


@pytest.mark.parametrize(
    ("options", "batch_size", "scans"),
    [
        ({}, 8192, False),
        ({"microbatch_size": 1000}, 8192, True),
        ({"microbatch_size": 8192}, 8192, False),
        ({"secure_noise": True}, 1024, False),
        ({"secure_noise": True}, 8192, True),
        ({"secure_noise": True, "model": "paper"}, 1024, True),
        ({"model": "paper"}, 1024, False),
    ],
    ids=repr,
)
def test_the_audit_scans_microbatches_exactly_where_the_run_does(
    options, batch_size, scans, monkeypatch
):
    asked, mechanism = asked_for(
        config.Deterministic(batch_size=batch_size), noise_multiplier=1.0, **options
    )

    def counted(build, mechanism, params, rows, *, claimed, max_batch_size):
        audited.append(scans_of(build(recorder()), params, max_batch_size))
        return AuditReport(())

    def scans_of(program, params, width):
        rows, weights = uniform_rows(DISPLAY_ADS, width), np.ones(width, np.float32)
        traced = jax.make_jaxpr(program.clipped_sum)(params, rows, weights, mechanism.scales())
        return sum(eqn.primitive.name == "scan" for eqn in traced.eqns) > 0

    def zeros(sizes, schema, key):  # nothing here is run, and drawing takes a program a size
        shapes = nnx.eval_shape(lambda: ClickModel(sizes, schema, nnx.Rngs(0)))
        return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)

    audited = []
    monkeypatch.setattr(model, "_initialised", zeros)
    monkeypatch.setattr(audit, "coupled_audit", counted)
    sizes = asked.model_config()
    audit._audited(sizes, DISPLAY_ADS, mechanism, asked.microbatch_size)
    assert audited == [scans]
    # So does the run's own program, which is quick to trace at the small preset.
    if asked.model == "small":
        params, _, loss_fn = functional(sizes, DISPLAY_ADS, 0)
        own = dpsgd(loss_fn, recorder(), microbatch_size=asked.microbatch_size)
        assert scans_of(own, params, mechanism.sampler.padded_batch_size) == scans


def test_the_sentence_names_what_was_small_and_what_was_left_out():
    _, mechanism = asked_for(noise_multiplier=1.0)
    _, secure = asked_for(noise_multiplier=1.0, secure_noise=True)
    small, paper = PRESETS["small"], PRESETS["paper"]
    made = Check("one thing", True, "seen")
    left_out = Check("the other", True, "too large", made=False)
    passed = (
        "passed: step and sampler keep what the price assumes, on generated rows, batches of 64"
    )
    assert audit._sentence(AuditReport((made,)), small, mechanism) == passed
    assert (
        audit._sentence(AuditReport((made, left_out)), paper, mechanism)
        == f"{passed}, hash tables of 1,024 rows. Not checked: the other (too large)"
    )
    assert (
        audit._sentence(AuditReport((made,)), paper, secure)
        == f"{passed}, hash tables of 64 rows, layers of 64 units at most"
    )


@pytest.mark.long  # short: that the check says so, and that the sentence names it
def test_a_run_on_more_rows_than_are_drawn_says_so(monkeypatch):
    monkeypatch.setattr("dpsgd.audit.sampler._LARGEST_PLAN", 19_999)
    asked, mechanism = asked_for(noise_multiplier=1.0, embedding_dim=2, max_buckets=8, hidden=(4,))
    said = audit.audit_run(asked, DISPLAY_ADS, mechanism)
    assert said.startswith("passed: ")
    assert said.endswith(
        "Not checked: the batches are the rows that were priced "
        "(not drawn for more than 19,999 examples)"
    )


def test_where_there_is_no_noise_there_is_nothing_to_audit():
    asked, mechanism = asked_for(non_private=True)
    assert audit.audit_run(asked, DISPLAY_ADS, mechanism) == "not made: there is no noise"


def test_the_command_passes_a_right_claim_and_refutes_a_wrong_one(capsys):
    question = [
        "audit", "sampler:shuffle", "--num-examples", "1000", "--batch-size", "50",
        "--epochs", "2", "--noise-multiplier", "1",
    ]  # fmt: skip
    assert main(question) == 0
    assert capsys.readouterr().out.strip().endswith("coupled audit: consistent")
    assert main([*question, "--claim", "poisson"]) == 1
    assert "FAIL  how often an example takes part is binomial" in capsys.readouterr().out


def test_the_black_box_command_draws_a_plot_and_prints_what_it_could_have_seen(tmp_path, capsys):
    plot = tmp_path / "audit.png"
    status = main([
        "audit", "sampler:deterministic", "--num-examples", "4", "--batch-size", "4", "--epochs",
        "1", "--noise-multiplier", "1", "--delta", "0.01", "--black-box", "--trials", "600",
        "--plot", str(plot),
    ])  # fmt: skip
    out = capsys.readouterr().out
    assert status == 0
    for said in ("epsilon >= ", "claimed: epsilon <= ", "detection limit: ", f"plot: {plot}"):
        assert said in out
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_claim_of_infinity_is_refused(capsys):
    assert main([
        "audit", "sampler:balls-and-bins", "--num-examples", "1000", "--batch-size", "100",
        "--epochs", "1", "--noise-multiplier", "0.001", "--max-batch-size", "101", "--black-box",
    ]) == 2  # fmt: skip
    assert "no finite epsilon is claimed" in capsys.readouterr().err


def test_a_violation_can_be_drawn(tmp_path):
    rng = np.random.default_rng(0)

    def play(others, trials):
        return {"sum": rng.standard_normal(trials) + 1}, {"sum": rng.standard_normal(trials)}

    report = bound_epsilon(play, Bound(0.0, 0.1), delta=0.01, trials=600)
    assert report.violation
    audit.plot(report, tmp_path / "audit.svg")
    assert (tmp_path / "audit.svg").read_text().startswith("<?xml")
