"""Of a selection the best model stays, under the guarantee of the whole, and nothing else."""

import contextlib
import json
import os
import shutil
import stat
from dataclasses import dataclass, replace

import jax
import pytest
from tiny_task import (
    SUMS,
    Line,
    Words,
    calibrated,
    config_of,
    contents,
    ended,
    few_rows_are_calibrated,
    line,
    params_of,
)
from toy_trials import (
    COUNT,
    RATES,
    SCORE,
    candidate,
    content,
    grid,
    guarantees,
    scripted,
    select,
    so_many,
    stopped,
)

from accounting import SelectionProfile, TrialCount, attack_advantage, epsilon
from dpsgd import Mechanism, Segment, cost, resume
from dpsgd.files import destroy
from dpsgd.models.model import export, read_model
from dpsgd.runs import job
from dpsgd.runs.directory import SECRETS, RunDirectory
from dpsgd.runs.history import LedgerError, line_of
from dpsgd.runs.mechanism import resolved
from dpsgd.runs.result import FinishedRun
from dpsgd.runs.stop import Stopped
from dpsgd.runs.terms import Selection, Terms
from dpsgd.selection import engine
from dpsgd.selection.candidates import Candidates, spec_of_trial
from dpsgd.selection.vault import Vault, VaultSecret
from samplers import Deterministic, Poisson, Population
from samplers.settings import SETTINGS, settings_of

RELEASED = {
    "config.json", "data_not_private.json", "environment.json", "guarantee.json",
    "ledger.jsonl", "params.npz", "report.json", "report.md",
}  # fmt: skip


def profile_of_trial():
    return resolved(candidate(), Population(160)).mechanism.privacy()


def cost_of_trial():
    return epsilon(profile_of_trial(), 1e-5).upper


def cost_of_whole():
    return epsilon(SelectionProfile(profile_of_trial(), COUNT), 1e-5).upper


def test_the_best_trial_is_released_with_the_joint_guarantee(tmp_path):
    out = tmp_path / "out"
    lines = []
    with so_many(2):
        record = select(str(out), lines=lines)
    assert set(os.listdir(tmp_path)) == {"out"}
    assert set(os.listdir(out)) == RELEASED
    assert record["epsilon_upper"] == cost_of_whole() > 1.2 * cost_of_trial()
    run = FinishedRun.read(out)
    assert run.record == record
    assert run.mechanism is None  # its cost at another delta is not the selection's
    assert run.spec.optimizer.learning_rate in RATES
    assert record["selection"] == {
        "mean_trials": 3.0, "trials_shape": 0.0, "score": SCORE, "better": "lower", "candidates": 3,
    }  # fmt: skip
    assert select(out, lines=lines) == resume(out) == record  # said again, nothing is done again
    assert lines.count("releasing the best") == 1


@dataclass(frozen=True)
class Open(Words):
    """Words with a setting that a run chooses."""

    scale: float | None = None

    def settle(self, request):
        return replace(self, scale=self.scale or 2.0), {}


def test_the_selected_parameters_are_trained_and_named(tmp_path):
    out = tmp_path / "out"
    with so_many(2):
        select(out, grid(train="table", insecure_seed=None), task=Open())
    assert contents(out, "config.json")["task"]["settings"]["scale"] == 2.0
    assert (params_of(out)["['w']"] == 1).all()
    export(out, tmp_path / "model", task=Open(scale=2.0))
    for folder in (out, tmp_path / "model"):
        assert read_model(folder, task=Open(scale=2.0)).guarantee["trained"] == ["table"]


def test_every_reader_of_the_model_states_the_joint_cost(trained, tmp_path):
    out, bundle = tmp_path / "out", tmp_path / "model"
    with scripted(trained), so_many(3):
        record = select(out)
    left_out = " ".join(record["not_covered"])
    for words in ("how long the selection took", f"the rows of {SCORE}", "they are not protected"):
        assert words in left_out
    assert "best of a secret number of trials" in record["guarantee"]
    times = "stage_seconds", "training_seconds", "examples_per_second"
    assert [record[name] for name in times] == [None] * 3
    export(out, bundle)
    whole = cost_of_whole()
    assert {*guarantees(out), record["epsilon_upper"]} == {whole}
    assert json.loads((bundle / "guarantee.json").read_text())["epsilon_upper"] == whole
    assert RunDirectory(out).history().guarantee().epsilon.upper == whole
    sentence = RunDirectory(out).history().guarantee().sentence()
    assert sentence in (out / "report.md").read_text()
    assert sentence in (bundle / "guarantee.json").read_text()
    # Also to any caller that asked for the cost of a run of the very same mechanism before.
    alone = RunDirectory(trained[0.02]).history().guarantee()
    assert alone.epsilon.upper == pytest.approx(cost_of_trial(), rel=1e-3)
    assert RunDirectory(out).history().guarantee().epsilon.upper == whole
    digits = alone.epsilon.format_upper()
    assert not any(digits.encode() in held for held in content(tmp_path).values())


def leftovers(folder, trials):
    """Returns what a released folder shows of losers, of the trials' number, or of the secrets."""
    found = [name for name in content(folder) if name not in RELEASED]
    found += [str(path) for path in folder.rglob("*") if path.is_dir()]
    for name, held in content(folder).items():
        losers = *trials.texts, b"0.323232", b"0.4545"
        found += [f"{name}: {text}" for text in losers if text in held]
    return found


SCORES = dict(zip(RATES, (0.323232, 0.2, 0.454545), strict=True))


def test_nothing_of_losers_or_their_number_remains(trained, tmp_path, capfd, monkeypatch):
    """One trial and seven leave equal names, sizes, modes, times and lines, but for the model."""
    shown = {}
    monkeypatch.setattr(VaultSecret, "generate", lambda: VaultSecret(b"s" * 32))
    for count in (1, 7):
        out, lines = tmp_path / str(count) / "out", []
        out.parent.mkdir()
        # Whatever else is tried, the first trial is the best.
        monkeypatch.setattr(Vault, "candidate", lambda self, trial, n: 1 if trial == 1 else 0)
        with scripted(trained, SCORES) as trials, so_many(count):
            select(out, lines=lines)
        assert len(trials.begun) == count
        assert not leftovers(out, trials)
        assert not list(out.parent.glob(".*"))
        files = {
            path.name: (path.stat().st_size, stat.S_IMODE(path.stat().st_mode))
            for path in (out, *out.iterdir())
        }
        times = len({path.stat().st_mtime_ns for path in out.iterdir()})
        shown[count] = (files, times, lines, capfd.readouterr())
    assert shown[1] == shown[7]
    assert shown[1][3] == ("", "")


def test_secret_files_are_overwritten_and_trials_leave_no_trace(trained, tmp_path):
    """Of every secret file that there was, a second name shows zeros; the folder is as it was."""
    out, kept, seen, finish = tmp_path / "out", tmp_path / "kept", [], Vault.finish
    kept.mkdir()

    def linking(self, score):
        found = self.path.stat()
        seen.append((found.st_mtime_ns, found.st_ctime_ns, found.st_nlink, found.st_size))
        for path in self.path.rglob("*"):
            if path.is_file() and not (kept / f"{path.parent.name}-{path.name}").exists():
                os.link(path, kept / f"{path.parent.name}-{path.name}")
        finish(self, score)

    with scripted(trained), so_many(3), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Vault, "finish", linking)
        select(out)
    assert len(seen) == 3
    assert len(set(seen)) == 1
    held = content(kept)
    assert {"secret-selection.key", "secret-journal.jsonl", "1-params.npz", "2-ledger.jsonl"} <= {
        *held
    }
    assert not any(any(one) for one in held.values())


def test_a_folder_that_is_destroyed_twice_or_holds_links_is_gone(tmp_path):
    outside = tmp_path / "outside"
    outside.write_bytes(b"stays")
    folder = tmp_path / "folder"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "secret").write_bytes(b"x" * 3_000_000)
    (folder / "link").symlink_to(outside)
    (folder / "dangling").symlink_to(tmp_path / "nowhere")
    destroy(folder)
    destroy(folder)
    assert not folder.exists()
    assert outside.read_bytes() == b"stays"


def test_a_selection_has_owner_only_secrets_and_a_public_ledger(trained, tmp_path):
    out = tmp_path / "out"
    seen = {}

    def look(self, score):
        seen.update({path: stat.S_IMODE(path.stat().st_mode) for path in self.path.iterdir()})
        seen[self.path] = stat.S_IMODE(self.path.stat().st_mode)
        history = RunDirectory(out).history()
        assert not history.attempts
        assert history.guarantee().epsilon.upper == cost_of_whole()
        with pytest.raises(FileNotFoundError, match="repeat the command that began it"):
            FinishedRun.read(out)
        with pytest.raises(FileNotFoundError, match="repeat the command that began it"):
            resume(out)
        raise Stopped("at trial 1 of 4")

    with scripted(trained), so_many(4), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Vault, "finish", look)
        with pytest.raises(
            Stopped, match=r"^stopped, and all is saved: repeat the command to resume$"
        ):
            select(out)
    secrets = out / SECRETS
    assert seen[secrets] == 0o700
    assert seen[secrets / "selection.key"] == seen[secrets / "journal.jsonl"] == 0o600
    assert stat.S_IMODE((out / "ledger.jsonl").stat().st_mode) == 0o644
    assert set(os.listdir(out)) == {"ledger.jsonl", SECRETS}


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"configs": grid()[:2]}, "candidates"),
        ({"configs": grid(target_delta=1e-3)}, "candidates"),
        ({"task": Line(seed=1)}, "task, data"),
        ({"count": TrialCount(4.0, 0.0)}, "law of the number of trials"),
        ({"better": "higher"}, "score"),
    ],
)
@pytest.mark.parametrize("finished", [False, True])
def test_another_selection_does_not_go_on_in_its_place(changed, named, finished, trained, tmp_path):
    out = tmp_path / "out"
    with scripted(trained), so_many(2):
        if finished:
            select(out)
        else:
            with stopped():
                select(out)
        before = content(out)
        with pytest.raises(ValueError, match=f"another {named}, which stays unchanged") as error:
            select(out, **changed)
        assert "\n" not in str(error.value)
        assert content(out) == before


def test_other_folders_and_copies_are_refused(trained, tmp_path):
    (tmp_path / "file").write_text("mine")
    with scripted(trained), so_many(2):
        for name in ("file", "."):
            with pytest.raises(FileExistsError, match="left as it is"):
                select(tmp_path / name)
        with pytest.raises(FileExistsError, match="left as it is"):
            select(trained[0.01])
        with stopped():
            select(tmp_path / "out")
        shutil.copytree(tmp_path / "out", tmp_path / "copy")
        with pytest.raises(ValueError, match="is a copy of an unfinished selection"):
            select(tmp_path / "copy")
        destroy(tmp_path / "out" / SECRETS)
        with pytest.raises(ValueError, match="secrets are missing"):
            select(tmp_path / "out")


def asks(**privacy):
    return config_of(noise_multiplier=None, **privacy)


class Unfit(Line):
    def loss(self, params, example):
        raise TypeError("of the wrong shape")


REFUSED = [
    ({"configs": []}, "at least one candidate"),
    ({"configs": [asks(non_private=True)]}, "candidates must be private"),
    ({"configs": [config_of(insecure_seed=1)]}, "insecure_seed voids"),
    ({"configs": [config_of(init_from="model")]}, "init_from is not supported"),
    ({"configs": [asks(target_epsilon=3.0, optimistic=True)]}, "optimistic noise may miss"),
    ({"configs": [config_of(), asks(target_epsilon=3.0)]}, "or all target_epsilon"),
    (
        {"configs": [asks(target_epsilon=e) for e in (3.0, 4.0)]},
        "target_epsilon holds for the whole",
    ),
    ({"configs": [config_of(target_delta=1e-3), config_of()]}, "target_delta holds for the whole"),
    ({"task": Unfit()}, "of the wrong shape"),
    ({"score": "train_error"}, "score 'train_error' is measured on protected rows"),
    ({"score": "validation_auc"}, "score 'validation_auc' is not a metric"),
]


@pytest.mark.parametrize(("asked", "message"), REFUSED)
def test_impossible_selections_are_refused_before_noise_search(
    asked, message, tmp_path, monkeypatch
):
    monkeypatch.setattr(Candidates, "planned", lambda *_: pytest.fail("noise was searched"))
    with pytest.raises((ValueError, TypeError), match=message):
        select(tmp_path / "out", **asked)
    assert not list(tmp_path.iterdir())


def test_failed_trials_rank_worst_and_hide_their_reason(trained, tmp_path, capfd, monkeypatch):
    failed = ValueError("row 17 holds 42"), OverflowError("row 17 holds 42")
    for better, bad, error in (("lower", 1e30, failed[0]), ("higher", -1e30, failed[1])):
        out = tmp_path / better
        scores = dict(zip(RATES, (None, bad, error), strict=True))
        monkeypatch.setattr(Vault, "candidate", lambda self, t, n: (0, 2, 1, 2)[t - 1])
        with scripted(trained, scores) as trials, so_many(4):
            record = select(out, better=better)
        assert record["metrics"][SCORE] == bad
        assert len(trials.begun) == 4  # none is tried again
        assert "row 17" not in "".join(capfd.readouterr())
        assert not leftovers(out, trials)


ERRORS = {
    "memory": jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: row 17 holds 42"),
    "types": TypeError("row 17 holds 42"),
    "keys": KeyError("row 17 holds 42"),
}


@pytest.mark.parametrize("kind", ERRORS)
def test_an_error_of_the_program_stops_with_what_it_cost(kind, trained, tmp_path, capfd):
    out, error = tmp_path / "out", ERRORS[kind]
    with scripted(trained, dict.fromkeys(RATES, error)) as trials, so_many(3):
        with pytest.raises(ValueError, match="repeat the command to resume") as stop:
            select(out)
        assert f"a trial ended in {type(error).__name__}" in str(stop.value)
        assert RunDirectory(out).history().guarantee().sentence() in str(stop.value)
        assert ("RESOURCE_EXHAUSTED" in str(stop.value)) == (kind == "memory")
        assert "row 17" not in f"{stop.value}{capfd.readouterr()}"
        assert len(trials.begun) == 1
        assert set(os.listdir(out)) == {"ledger.jsonl", SECRETS}
        trials.scores = SCORES
        assert select(out)["metrics"][SCORE] in SCORES.values()


@pytest.mark.parametrize("kind", [ValueError, TypeError])
def test_an_error_before_a_trial_is_trained_is_no_result(kind, trained, tmp_path):
    def refused(*_, **__):
        raise kind("no such setting")

    # Undone before `scripted` is: in another order its trials would stay in place.
    with scripted(trained), so_many(2), pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "run", refused)
        with pytest.raises(ValueError, match=f"a trial ended in {kind.__name__}"):
            select(tmp_path / "out")


def test_a_damaged_file_of_a_trial_does_not_tell_which_trial(trained, tmp_path):
    def damaged(task, spec, path, **_):
        path.mkdir(parents=True)
        (path / "ledger.jsonl").write_text("{}\n")
        raise ValueError(f"{path} is damaged")

    with scripted(trained), so_many(2), pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "run", damaged)
        with pytest.raises(ValueError, match="a trial ended in ValueError") as error:
            select(tmp_path / "out")
    assert f"{SECRETS}/" not in str(error.value)


def test_a_damaged_best_trial_stays_unnamed(trained, tmp_path):
    out, release = tmp_path / "out", engine.release

    def of_damaged(wanted, terms, best, *rest):
        (best / "config.json").write_text("{")
        release(wanted, terms, best, *rest)

    with scripted(trained), so_many(2), pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "release", of_damaged)
        with pytest.raises(ValueError, match="a file of a trial is damaged, and nothing") as error:
            select(out)
    assert f"{SECRETS}/" not in str(error.value)


def test_a_selection_of_failed_trials_releases_nothing_for_good(trained, tmp_path):
    out = tmp_path / "out"
    scores = dict.fromkeys(RATES)
    with scripted(trained, scores) as trials, so_many(3):
        for _ in range(2):
            with pytest.raises(ValueError, match="nothing is released; the privacy cost remains"):
                select(out)
    assert len(trials.begun) == 3
    assert set(os.listdir(out)) == {"ledger.jsonl", "nothing_released.json"}
    assert RunDirectory(out).history().guarantee().epsilon.upper == cost_of_whole()


def test_an_error_of_the_disk_names_no_trial_and_loses_none(trained, tmp_path):
    out = tmp_path / "out"
    with scripted(trained) as trials, so_many(3):
        finish = Vault.finish

        def full(self, score):
            if self.done == 1:
                raise OSError(28, "No space left on device", str(self.folder(2)))
            finish(self, score)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Vault, "finish", full)
            with pytest.raises(OSError, match=r"No space left.*nothing is lost") as error:
                select(out)
        assert f"{SECRETS}/" not in str(error.value)
        select(out)
    assert len(trials.begun) == 3


def test_a_partly_written_journal_line_is_removed(tmp_path):
    write, vault = os.write, Vault(tmp_path, VaultSecret(bytes(32)), COUNT, "higher")
    with contextlib.closing(vault), pytest.MonkeyPatch.context() as patch:
        before = (tmp_path / "journal.jsonl").read_bytes()
        patch.setattr(os, "write", lambda file, content: write(file, content[:5]))
        with pytest.raises(OSError, match="No space left"):
            vault.finish(0.5)
        assert (vault.done, (tmp_path / "journal.jsonl").read_bytes()) == (0, before)


def test_a_trial_that_was_destroyed_in_part_is_begun_anew(trained, tmp_path, monkeypatch):
    out, declared = tmp_path / "out", iter([False])
    monkeypatch.setattr(engine, "_as_declared", lambda *_: next(declared, True))

    def killed(path):
        (path / "config.json").unlink()
        raise Stopped

    with scripted(trained) as trials, so_many(2):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine, "destroy", killed)
            with pytest.raises(Stopped):
                select(out)
        select(out)
    assert len(trials.begun) == 3
    assert set(os.listdir(out)) == RELEASED


@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_a_trial_resumes_after_a_stop_and_restarts_after_a_kill(how, tmp_path, monkeypatch):
    begun, train_blocks, out = [], job.train_blocks, tmp_path / "out"

    def told(algorithm, mechanism, state, *rest, keys, **more):
        begun.append((int(state.step), keys.noise.tobytes()))
        return train_blocks(algorithm, mechanism, state, *rest, keys=keys, **more)

    monkeypatch.setattr(job, "train_blocks", told)
    monkeypatch.setattr(job, "BLOCK_STEPS", 8)
    configs = [candidate(checkpoint_seconds=0.0)]
    with so_many(1):
        with ended(how):
            select(out, configs)
        record = select(out, configs)
    assert [step for step, _ in begun] == [0, 16 if how == "stopped" else 0]
    assert begun[0][1] != begun[1][1]
    assert record["attempts"] == 1


def test_a_trial_of_an_undeclared_mechanism_is_never_released(trained, tmp_path):
    with scripted(trained) as trials, so_many(1):
        trials.trained = {rate: trained[0.01] for rate in RATES}  # whatever was asked for
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Vault, "candidate", lambda self, t, n: 1)
            with pytest.raises(AssertionError, match="otherwise than declared"):
                select(tmp_path / "out")
    assert not (tmp_path / "out" / "report.json").exists()


UNEQUAL = {
    "noise": [Mechanism(Deterministic(1000, 100), sigma, 1.0) for sigma in (9.0, 3.0)],
    "epochs": [Mechanism(Deterministic(1000, 100, epochs), 9.0, 1.0) for epochs in (1, 9)],
    "sampler": [Mechanism(kind(1000, 100), 3.0, 1.0) for kind in (Poisson, Deterministic)],
    "sums": [Mechanism(Deterministic(1000, 100), 9.0, 1.0, full_sums=s) for s in (None, SUMS)],
}


@pytest.mark.short("sums-*", "noise-*", "epochs-*")
@pytest.mark.parametrize("dearest", ["first", "last"])
@pytest.mark.parametrize("differing", UNEQUAL)
def test_unequal_candidates_cost_what_the_dearest_does(differing, dearest):
    cheap, dear = UNEQUAL[differing]
    upper = [epsilon(SelectionProfile(m.privacy(), COUNT), 1e-5).upper for m in (cheap, dear)]
    assert upper[0] < 0.9 * upper[1]
    order = [dear, cheap] if dearest == "first" else [cheap, dear]
    terms = tuple(Terms(Segment(m), 1e-5, str(m)) for m in order)
    found = cost([Selection(COUNT, terms, ({}, {}), SCORE, "lower", {}).trials()], 1e-5)
    assert found.epsilon.upper == pytest.approx(upper[1], rel=1e-6)
    assert found.total_variation.upper >= attack_advantage(dear.privacy()).upper


@dataclass(frozen=True)
class Own(Deterministic):
    """A known order by another name."""


def test_a_selection_is_not_priced_by_changed_own_code(trained, tmp_path, monkeypatch):
    out, candidates = tmp_path / "out", grid(sampler=settings_of(Own)(batch_size=16, epochs=3))
    with scripted(trained), stopped():
        select(out, candidates)
    assert RunDirectory(out).history().guarantee().epsilon.upper == cost_of_whole()
    again = tmp_path / "again"
    monkeypatch.setattr(engine, "price_of", lambda terms: {"price": [0.0, 0.1]})
    with scripted(trained), pytest.raises(LedgerError, match="Own states another price"):
        select(again, candidates)  # before any trial
    with pytest.raises(LedgerError, match="Own states another price"):
        RunDirectory(again).history().guarantee()


def test_a_ledger_that_releases_what_was_not_declared_is_refused(trained, tmp_path):
    out = tmp_path / "out"
    with scripted(trained), so_many(1):
        select(out)
    lines = (out / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    bodies = [json.loads(line) for line in lines]
    for change in ({"noise_multiplier": 9.0}, {"delta": 1e-6}, {"unit": "user"}):
        head, held = bodies[0]["hash"], lines[0]
        for body in bodies[1:]:
            body = {key: value for key, value in body.items() if key != "hash"}
            line_, head = line_of({**body, **(change if "attempt" in body else {})}, head)
            held += line_
        (out / "ledger.jsonl").write_bytes(held)
        with pytest.raises(LedgerError, match="none of the declared candidates"):
            RunDirectory(out).history()


def test_a_trial_is_calibrated_and_the_whole_counts_it():
    config = candidate(noise_multiplier=None, target_epsilon=8.0)
    with few_rows_are_calibrated():
        asked = Candidates(calibrated, None, (config,), SCORE, "lower", COUNT)
        selection = asked.planned({})
        (terms,) = selection.candidates
        assert terms.mechanism == resolved(spec_of_trial(selection, 0), asked.rows[1]).mechanism
    assert terms.mechanism.full_sums == SUMS
    whole = SelectionProfile(terms.mechanism.privacy(), COUNT)
    upper = epsilon(whole, terms.delta).upper
    assert 7.9 < upper <= 8.0
    assert cost([selection.trials()], 1e-5).epsilon.upper == upper


ORDER = SETTINGS["deterministic"](batch_size=16, epochs=3)
BANDS = [{"bands": b, "learning_rate": r} for b, r in ((None, 0.1), (5, 0.1), (5, 0.2))]
EPOCHS = [{"sampler": SETTINGS["deterministic"](batch_size=16, epochs=e)} for e in (3, 9)]


@pytest.mark.parametrize(
    ("kinds", "same"),
    [(BANDS, [0, 0, 0]), (EPOCHS, [0, 1])],  # in a known order bands cost nothing
    ids=["bands", "epochs"],
)
def test_each_trial_has_the_noise_that_it_needs(kinds, same):
    wanted = {"noise_multiplier": None, "target_epsilon": 8.0}
    configs = [candidate(**{"sampler": ORDER, **wanted, **kind}, optimizer="sgd") for kind in kinds]
    asked = Candidates(line, None, tuple(configs), SCORE, "lower", COUNT)
    selection = asked.planned({})
    mechanisms = [terms.mechanism for terms in selection.candidates]
    trials = (spec_of_trial(selection, number) for number in range(len(kinds)))
    assert mechanisms == [resolved(trial, asked.rows[1]).mechanism for trial in trials]
    assert [m.noise.bands for m in mechanisms] == [kind.get("bands") or 1 for kind in kinds]
    sigmas = [m.noise_multiplier for m in mechanisms]
    for sigma, one in zip(sigmas, same, strict=True):
        assert (sigma == pytest.approx(sigmas[0], rel=1e-4)) == (one == 0)
    assert 7.9 < cost([selection.trials()], 1e-5).epsilon.upper <= 8.0
