"""A run that stops goes on as if it had not, is counted exactly, and tells nobody its secrets."""

import dataclasses
import errno
import hashlib
import importlib
import inspect
import json
import math
import os
import shutil
import signal
import stat
import sys
from pathlib import Path

import numpy as np
import pytest
from tiny_task import (
    Line,
    Scaled,
    assert_same,
    config_of,
    contents,
    declared,
    ended,
    line,
    run_and_stop,
    watched,
    weights,
)

from accounting import epsilon
from dpsgd import BandedToeplitz, Independent, Mechanism, Run, resume, run
from dpsgd.core.guarantee import IF_INDEPENDENT
from dpsgd.core.segments import Segment
from dpsgd.engine.feed import BLOCK_STEPS
from dpsgd.files import file_sha256
from dpsgd.models.model import export
from dpsgd.noise.correlated import banded_square_root
from dpsgd.runs import job, report
from dpsgd.runs.attempts import STOP
from dpsgd.runs.checkpoint import Checkpoints
from dpsgd.runs.directory import DATA, DIAGNOSTICS, RunDirectory
from dpsgd.runs.drawing import drawing_digest
from dpsgd.runs.history import LedgerError, read
from dpsgd.runs.ledger import Ledger
from dpsgd.runs.report import comparison
from dpsgd.runs.result import FinishedRun
from dpsgd.runs.stop import stop_requests
from dpsgd.runs.terms import Terms, mechanism_from_record, mechanism_record
from samplers import (
    BallsAndBins,
    BatchSource,
    Deterministic,
    Poisson,
    Shuffle,
    UnitsThenPoisson,
    UnitTree,
)
from samplers.registry import UnknownPart
from samplers.settings import SETTINGS, settings_of

# --- Stopping and going on -----------------------------------------------------------------------


def test_a_run_trained_by_another_object_resumes_at_its_stop(tmp_path, monkeypatch):
    made = Run.create(line, config_of(insecure_seed=3), tmp_path / "run", name="tiny_task:line")
    with ended():
        resume(tmp_path / "run")
    blocks = []
    monkeypatch.setattr(job, "train_blocks", watched(lambda *block: blocks.append(block)))
    made.train()
    assert len(blocks) == 2  # of four
    run(line, config_of(insecure_seed=3), tmp_path / "whole", name="tiny_task:line")
    assert_same(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize(
    ("argument", "why"),
    [
        ({"name": "zz"}, "name of the task: 'zz' is not of the form module:object"),
        ({"name": "tiny_task:zz"}, "name of the task: module tiny_task has no 'zz'"),
        ({"placement": 2}, "placement must be a Placement, such as .*, got 2"),
    ],
)
def test_what_names_no_task_or_devices_is_refused(argument, why, tmp_path):
    """Such a run could not be resumed by its name, or ended in an AttributeError."""
    create, reopen = (inspect.unwrap(f.__func__) for f in (Run.create, Run.open))
    with pytest.raises((TypeError, ValueError), match=f"^{why}"):
        create(Run, line, config_of(insecure_seed=3), tmp_path / "run", **argument)
    assert not (tmp_path / "run").exists()
    if "placement" in argument:
        with pytest.raises(TypeError, match=f"^{why}"):
            reopen(Run, tmp_path / "run", **argument)


def test_a_run_under_way_is_read_without_a_false_alarm(tmp_path, monkeypatch):
    """The reader took its checkpoint for one of a ledger that was rolled back."""
    Run.create(line, config_of(insecure_seed=3), tmp_path / "run", name="tiny_task:line")
    folder = RunDirectory(tmp_path / "run")

    def declared_meanwhile(checkpoints):
        with Ledger.open(folder.ledger_path) as ledger:
            ledger.declare(range(4))
            return ledger.history.head

    monkeypatch.setattr(Checkpoints, "latest_head", declared_meanwhile)
    assert folder.history().attempts[-1].steps == range(4)


@pytest.mark.parametrize(
    ("other", "why"),
    [((line, {"noise_multiplier": 4.0}), "another noise_mult"), ((Line(seed=1), {}), "other rows")],
    ids=["noise", "rows"],
)
def test_a_run_directory_that_was_replaced_is_refused(tmp_path, other, why):
    made, (task, changes) = Run.create(line, config_of(), tmp_path / "run"), other
    shutil.rmtree(tmp_path / "run")
    Run.create(task, config_of(**changes), tmp_path / "run")
    before = files_of(tmp_path / "run")
    with pytest.raises(ValueError, match=why):
        made.train()
    assert files_of(tmp_path / "run") == before


@pytest.mark.parametrize("handler", [signal.SIG_DFL, signal.default_int_handler])
def test_the_signals_mean_again_what_they_meant(handler):
    before = signal.signal(signal.SIGINT, handler)
    try:
        with stop_requests() as stop:
            assert not stop()
            signal.raise_signal(signal.SIGINT)
            assert stop()
            assert signal.getsignal(signal.SIGINT) is handler  # a second one is not held up
        assert signal.getsignal(signal.SIGINT) is handler
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with stop_requests() as stop:
            signal.raise_signal(signal.SIGINT)
            assert not stop()
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_stopped_run_keeps_its_files_and_knows_its_cost(stopped):
    assert {path.name for path in stopped.iterdir()} == {
        "config.json", "environment.json", "guarantee.json", "ledger.jsonl",
        STOP, "checkpoints", DATA, DIAGNOSTICS,
    }  # fmt: skip
    history = RunDirectory.open(stopped, finished=False).history()
    (attempt,) = history.attempts
    assert attempt.steps == range(16)
    sampler = attempt.terms.mechanism.sampler
    price = epsilon(sampler.privacy_of(1.0, [range(16)]), 1e-5)
    assert price.lower > 0.0
    assert price.upper < epsilon(sampler.with_epochs(2).privacy(1.0), 1e-5).upper
    assert f"epsilon in {price}" in history.guarantee().sentence()
    whole = epsilon(sampler.privacy(1.0), 1e-5)
    assert any(
        f"by looking at the model costs what the whole run costs (epsilon in {whole})" in note
        for note in history.guarantee().notes
    )


def test_what_a_crash_may_leave_is_mended_without_a_trace(stopped, finished):
    with open(stopped / "ledger.jsonl", "ab") as file:
        file.write(b'{"declare": [16, 2')
    for name in (".000000000024.checkpoint.unfinished", ".reserved-0"):
        (stopped / "checkpoints" / name).write_bytes(b"PK")
    RunDirectory.open(stopped, finished=False).history()
    assert resume(stopped)["attempts"] == 1
    assert {path.name for path in stopped.iterdir()} == {path.name for path in finished.iterdir()}


def test_a_finished_run_costs_what_was_promised_and_is_tidied_up(finished):
    promised = contents(finished, "guarantee.json")
    report = contents(finished, "report.json")
    assert {name: report[name] for name in promised} == promised
    guarantee = RunDirectory.open(finished).history().guarantee()
    assert guarantee.sentence() == promised["guarantee"]
    assert report["attempts"] == 1
    assert not (finished / STOP).exists()
    assert not (finished / "checkpoints").exists()
    assert resume(finished) == report
    lines = []
    assert resume(finished, Line(seed=1), progress=lines.append) == report
    assert any("finished" in text and "no data are read" in text for text in lines)


def kill(out, steps=0):
    """Has a stopped run be one that was killed, after it had declared some further steps."""
    (out / STOP).unlink()
    if steps:
        with Ledger.open(out / "ledger.jsonl") as ledger:
            ledger.declare(range(16, 16 + steps))
    return out


@pytest.mark.short("8")
@pytest.mark.parametrize("lost", [0, 8])
def test_a_killed_run_starts_an_attempt_and_counts_lost_steps(stopped, lost):
    lines = []
    report = resume(kill(stopped, lost), progress=lines.append)
    first, second = declared(stopped)
    assert (first, second) == (range(16 + lost), range(16, 30))
    sampler = read(stopped / "ledger.jsonl").attempts[0].terms.mechanism.sampler
    price = epsilon(sampler.privacy_of(1.0, [first, second], same_rows=True), 1e-5)
    assert (report["epsilon_lower"], report["epsilon_upper"]) == (price.lower, price.upper)
    assert epsilon(sampler.privacy(1.0), 1e-5).upper < price.upper
    entered = [range(-(-first.stop // 10) * 10), range(10, 30)]
    otherwise = epsilon(sampler.privacy_of(1.0, entered, same_rows=True), 1e-5).upper
    assert report["epsilon_upper_otherwise"] == otherwise > price.upper
    assert report["attempts"] == 2
    assert f"Both hold {IF_INDEPENDENT};" in (stopped / "report.md").read_text()
    assert f"; of a run of several attempts, {IF_INDEPENDENT}" in comparison([report])[2]


def test_planned_guarantee_is_withdrawn_by_a_new_attempt(stopped, monkeypatch):
    monkeypatch.setattr(job.Training, "train", stop_there)
    damaged = stopped / "checkpoints" / "000000000024.checkpoint"  # of a later step
    damaged.write_bytes(b"PK")
    with pytest.raises(KeyboardInterrupt):
        resume(kill(stopped))
    assert declared(stopped) == [range(16), range(16, 16)]
    assert not damaged.exists()
    assert not (stopped / "guarantee.json").exists()


@pytest.mark.long
def test_a_kill_at_half_an_epoch_costs_its_lost_steps():
    """At the noise and bins of the page on partial epochs, with two blocks of steps lost."""
    sampler = BallsAndBins(625 * 8, 8)
    ends = [range(312 + 2 * BLOCK_STEPS), range(312, 625)]
    assert BLOCK_STEPS == 64
    assert epsilon(sampler.privacy(0.5), 1e-5).upper == pytest.approx(3.59, abs=0.01)
    assert epsilon(sampler.privacy_of(0.5, ends, same_rows=True), 1e-5).upper <= 3.80


def train_blocks_told(monkeypatch, tell):
    """Has `tell(state, keys)` called when steps are about to be taken."""
    train_blocks = job.train_blocks

    def told(algorithm, mechanism, state, *rest, **how):
        tell(state, how["keys"])
        return train_blocks(algorithm, mechanism, state, *rest, **how)

    monkeypatch.setattr(job, "train_blocks", told)


def test_correlated_noise_restarts_only_in_a_new_attempt(tmp_path, monkeypatch):
    sampler = SETTINGS["deterministic"](batch_size=16, epochs=3)
    config = config_of(sampler=sampler, bands=2, coefficients=(1.0, 0.5))
    out = run_and_stop(line, config, tmp_path / "run")
    killed = kill(shutil.copytree(out, tmp_path / "killed"))
    begun = []
    train_blocks_told(
        monkeypatch, lambda state, keys: begun.append([np.asarray(x).any() for x in state.noise])
    )
    # A process that dies before anything is saved begins as the one before it.
    with monkeypatch.context() as patch:
        patch.setattr("dpsgd.engine.loop.keys_of", stop_there)
        with pytest.raises(KeyboardInterrupt):
            resume(killed)
    report = resume(killed)
    assert resume(out)["attempts"] == 1
    assert begun == [[False], [False], [True]]
    first = read(killed / "ledger.jsonl").attempts[0]
    assert declared(killed) == [range(16), range(16, 30)]
    independent = dataclasses.replace(first.terms.mechanism, noise=Independent())
    segments = independent.privacy_of(declared(killed), same_rows=True)
    assert report["epsilon_upper"] == epsilon(segments, 1e-5).upper


def drawn_by(seeds, sampler, steps):
    """The examples that a process draws in each of some steps."""
    source = BatchSource(sampler, seeds)
    return [np.concatenate(source.passes_by_shard(step)[0]) for step in steps]


@pytest.mark.short("shuffle")
@pytest.mark.parametrize("name", ["balls-and-bins", "balls-and-bins, fixed", "shuffle", "poisson"])
def test_each_example_takes_part_once_an_epoch_over_a_clean_stop(tmp_path, monkeypatch, name):
    kind, _, fixed = name.partition(", ")
    more = {"assignment": "fixed"} if fixed else {}
    sampler = SETTINGS[kind](batch_size=16, epochs=3, **more)
    told = []
    train_blocks_told(monkeypatch, lambda state, keys: told.append((int(state.step), keys)))
    out = run_and_stop(line, config_of(sampler=sampler), tmp_path / "run")
    kept = json.loads((out / STOP).read_text())
    killed = kill(shutil.copytree(out, tmp_path / "killed"))
    for folder in (out, killed):
        resume(folder)
    (_, first), (at, second), (_, anew) = told
    assert at == 16
    sampler = read(out / "ledger.jsonl").attempts[0].terms.mechanism.sampler
    begin, end = 10 * bool(not fixed), 20  # of the epoch that was interrupted
    before, after, other = (
        drawn_by(keys.sampling, sampler, range(*steps))
        for keys, steps in ((first, (begin, 16)), (second, (16, end)), (anew, (16, end)))
    )
    if kind == "poisson":
        assert kept["seed"] is None  # steps are drawn one by one: no seed is kept
    else:
        whole = np.sort(np.concatenate([*before[-6:], *after]))
        assert np.array_equal(whole, np.arange(160))
    assert not all(map(np.array_equal, after, other))
    # No seed of another epoch was on the disk, and none serves two attempts.
    seeds = [{keys.sampling(epoch) for epoch in range(3)} for keys in (first, second, anew)]
    shared = seeds[0] & seeds[1]
    assert shared == (set() if kind == "poisson" else {int(kept["seed"], 16)})
    assert not seeds[2] & (seeds[0] | seeds[1])


def test_no_two_processes_draw_equal_noise_also_from_copies(stopped, tmp_path, monkeypatch):
    copy = shutil.copytree(stopped, tmp_path / "copy")
    killed = [kill(shutil.copytree(stopped, tmp_path / f"killed {k}")) for k in (1, 2)]
    noise = []
    train_blocks_told(
        monkeypatch, lambda state, keys: noise.extend([keys.noise, keys.of_sums.noise, keys.loss])
    )
    for out in (stopped, copy, *killed):
        resume(out)
    assert len({key.tobytes() for key in noise}) == len(noise) == 12
    params = [weights(out) for out in (stopped, copy, *killed)]
    for k, one in enumerate(params):
        assert not any(np.array_equal(one, other) for other in params[:k])


def test_a_seed_is_stored_only_from_stop_to_next_declaration(tmp_path, monkeypatch):
    seen, declare = [], Ledger.declare

    def declaring(self, steps):
        seen.append((self.path.parent / STOP).exists())
        return declare(self, steps)

    monkeypatch.setattr(Ledger, "declare", declaring)
    out = run_and_stop(line, config_of(), tmp_path / "run")
    assert stat.S_IMODE((out / STOP).stat().st_mode) == 0o600
    kept = (out / STOP).read_bytes()
    resume(out)
    assert seen == [False] * 4
    assert not (out / STOP).exists()
    assert kept  # and nobody who restores it continues a finished run
    (out / STOP).write_bytes(kept)
    assert resume(out)["attempts"] == 1
    assert not (out / STOP).exists()


def test_a_half_written_seed_is_destroyed_before_declaring_steps(tmp_path, monkeypatch):
    seen, declare = [], Ledger.declare

    def declaring(self, steps):
        seen.append(any(b'"seed"' in path.read_bytes() for path in self.path.parent.glob(".s*")))
        return declare(self, steps)

    def killed(path, renamed):
        if renamed.name == STOP:
            raise SystemExit
        return replace(path, renamed)

    replace = os.replace
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        patch.setattr(Path, "unlink", lambda *of, **how: None)  # nor does it tidy up
        with pytest.raises(SystemExit):
            run_and_stop(line, config_of(), tmp_path / "run")
    left = tmp_path / "run" / f".{STOP}.unfinished"
    assert b'"seed"' in left.read_bytes()
    monkeypatch.setattr(Ledger, "declare", declaring)
    assert resume(tmp_path / "run")["attempts"] == 2
    assert seen == [False] * 2
    assert not left.exists()


@pytest.mark.parametrize(
    "changes",
    [{"epoch": [1]}, {"epoch": 2}, {"seed": None}, {"seed": "-5"}, {"step": 16.0}],
    ids=str,
)
def test_a_stop_without_its_samplers_seed_is_not_continued(stopped, changes):
    record = json.loads((stopped / STOP).read_text()) | changes
    del record["sha256"]
    record["sha256"] = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
    (stopped / STOP).write_text(json.dumps(record))
    sampler = read(stopped / "ledger.jsonl").attempts[0].terms.mechanism.sampler
    assert RunDirectory(stopped).stop_file.read(sampler) is None


def test_a_stop_with_another_digit_in_its_seed_is_not_continued(stopped):
    record = json.loads((stopped / STOP).read_text())
    record["seed"] = f"{int(record['seed'], 16) ^ 1:x}"
    (stopped / STOP).write_text(json.dumps(record))
    sampler = read(stopped / "ledger.jsonl").attempts[0].terms.mechanism.sampler
    assert RunDirectory(stopped).stop_file.read(sampler) is None


@pytest.mark.parametrize("when", ["declared", "saved"])
def test_a_full_disk_costs_nothing(stopped, monkeypatch, when):
    def full(*of, **how):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        if when == "declared":
            patch.setattr(Ledger, "_append", full)
        else:
            patch.setattr(RunDirectory, "append_diagnostics", full)
        with pytest.raises(OSError, match="the disk is full; nothing is lost"):
            resume(stopped)
    assert (stopped / STOP).exists()
    assert resume(stopped)["attempts"] == 1


@dataclasses.dataclass(frozen=True)
class LaterScaled(Independent):
    """Noise whose steps from the 40th on have another scale."""

    scale: float = 1.0

    def whiten(self, noises):
        return np.concatenate([noises[:40], noises[40:] / self.scale])


def test_drawing_digests_are_repeatable_and_differ_by_law(monkeypatch):
    kinds = [BallsAndBins(160, 16, epochs=2, assignment=mode) for mode in ("redrawn", "fixed")]
    kinds += [kind(160, 16) for kind in (BallsAndBins, Poisson, Shuffle, Deterministic)]
    kinds += [Poisson(160, 16, max_batch_size=18)]
    laws = [Mechanism(sampler, 1.0, 1.0) for sampler in kinds]
    laws += [Mechanism(Deterministic(160, 16, 2), 1.0, 1.0, banded_square_root(b)) for b in (2, 3)]
    noises = [BandedToeplitz((1.0, *[0.5] * 98, last)) for last in (0.1, 0.2)]  # of 100 bands
    noises += [LaterScaled(), LaterScaled(2.0)]
    laws += [Mechanism(Deterministic(1600, 16, 2), 1.0, 1.0, noise) for noise in noises]
    assert len({drawing_digest(one) for one in laws}) == len(laws)
    assert [drawing_digest(one) for one in laws] == [drawing_digest(one) for one in laws]
    louder = dataclasses.replace(laws[0], noise_multiplier=2.0)
    assert drawing_digest(louder) == drawing_digest(laws[0])
    banded, before = laws[7], drawing_digest(laws[7])
    monkeypatch.setattr(BandedToeplitz, "whiten", lambda self, noises: noises)
    assert drawing_digest(banded) != before


OWN = """
from dataclasses import dataclass
import numpy as np
import own_sampler
from dpsgd import Independent
from samplers import Participations

@dataclass(frozen=True)
class Coins(own_sampler.Coins):
    def participations(self, seed, epoch, chunk):
        drawn = super().participations(seed, epoch, chunk)
        return Participations(drawn.examples, drawn.steps)

@dataclass(frozen=True)
class Fresh(Independent):
    pass
"""
EDITED = OWN.replace(
    "    def part", "    def privacy(self, sigma):\n        return 0\n\n    def part"
)


def written_part(tmp_path, monkeypatch, text, name="edited_parts"):
    """The module of own parts, imported anew."""
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.delitem(sys.modules, name, raising=False)
    importlib.invalidate_caches()
    return importlib.import_module(name)


SOURCES = {
    "this": "from own_sampler import Coins\nclass Base(Coins): ...",  # as a module of Python
    "edited_sampler": "import dataclasses, this\n@dataclasses.dataclass(frozen=True)\n"
    "class Batches(this.Base): ...",
    "edited_noise": "import dataclasses, dpsgd\n@dataclasses.dataclass(frozen=True)\n"
    "class Fresh(dpsgd.Independent): ...",
}


def test_a_price_needs_the_own_code_that_its_run_used(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def mechanism(edited=""):
        _, batches, noise = (
            written_part(tmp_path, monkeypatch, SOURCES[x] + "  # edited" * (x == edited), x)
            for x in SOURCES
        )
        return Mechanism(batches.Batches(160, 16), 1.0, 1.0, noise.Fresh())

    began = mechanism()
    record = mechanism_record(began)
    (tmp_path / "edited_noise.py").write_text("")  # during the run
    assert mechanism_from_record(mechanism_record(began)) == began
    for name in SOURCES:
        mechanism(edited=name)
        kind = "noise" if name == "edited_noise" else "sampler"
        with pytest.raises(UnknownPart, match=f"the file of the {kind} edited_"):
            mechanism_from_record(record)
    restored = mechanism()
    assert mechanism_from_record(record) == restored


HELPED = """import dataclasses, helping
from samplers import Poisson

@dataclasses.dataclass(frozen=True)
class Helped(Poisson):
    def privacy(self, sigma):
        return super().privacy(helping.WHOLE * sigma)

    def privacy_of(self, sigma, attempts, **how):
        return super().privacy_of(helping.PARTS * sigma, attempts, **how)
"""


def test_a_ledger_is_not_priced_by_a_changed_own_module(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def helped(whole, parts):
        written_part(tmp_path, monkeypatch, f"WHOLE, PARTS = {whole}, {parts}", "helping")
        return written_part(tmp_path, monkeypatch, HELPED, "edited_helped")

    part, path = helped(1, 1), tmp_path / "ledger.jsonl"
    plan = Segment(Mechanism(part.Helped(160, 16, max_batch_size=160), 1.0, 1.0), rows="r")
    Ledger.create(path, Terms(plan, 1e-5)).close()
    with Ledger.open(path) as ledger:
        ledger.declare(range(plan.mechanism.num_steps))
    epsilon = read(path).guarantee().epsilon
    for changed in ((9, 1), (1, 1.0001)):
        helped(*changed)
        with pytest.raises(LedgerError, match="edited_helped:Helped states another price"):
            read(path).guarantee()
        with pytest.raises(LedgerError, match="states another price"):
            Ledger.open(path)  # and no further step is declared
    helped(1, 1)
    assert read(path).guarantee().epsilon == epsilon


def test_a_ledger_has_the_infinite_price_of_an_own_sampler(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    written_part(tmp_path, monkeypatch, "WHOLE, PARTS = 1, 1", "helping")
    part = written_part(tmp_path, monkeypatch, HELPED, "edited_helped")
    sampler, path = part.Helped(160, 16, max_batch_size=16), tmp_path / "ledger.jsonl"  # often cut
    Ledger.create(path, Terms(Segment(Mechanism(sampler, 4.0, 1.0), rows="r"), 1e-5)).close()
    with Ledger.open(path) as ledger:
        ledger.declare(range(sampler.num_steps))
    assert read(path).guarantee().epsilon.upper == math.inf


@pytest.mark.long
def test_a_ledger_prices_an_own_noise_on_draws_from_a_tree(tmp_path):
    tree = UnitTree.even((20, 8), ("store",))
    sampler = UnitsThenPoisson(tree, (4,), 0.5, steps=20)
    costs = []
    for number, noise in enumerate((Independent(), LaterScaled())):
        plan = Segment(Mechanism(sampler, 2.0, 1.0, noise), rows="r")
        path = tmp_path / f"{number}.jsonl"
        Ledger.create(path, Terms(plan, 1e-5), drawing_digest(plan.mechanism)).close()
        with Ledger.open(path) as ledger:
            ledger.declare(range(5))
        costs.append(read(path).guarantee().epsilon)
    assert costs[0].upper == costs[1].upper > 0


@pytest.mark.short("sampler")
@pytest.mark.parametrize("kind", ["sampler", "noise"])
def test_an_own_part_edited_after_a_stop_is_refused(tmp_path, monkeypatch, kind):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    parts = written_part(tmp_path, monkeypatch, OWN)
    sampler = settings_of(parts.Coins)(batch_size=16, epochs=3)
    own = {"sampler": sampler} if kind == "sampler" else {"noise": parts.Fresh()}
    out = run_and_stop(line, config_of(**own), tmp_path / "run")
    before = files_of(out)
    written_part(tmp_path, monkeypatch, EDITED)
    with pytest.raises(LedgerError, match=f"the {kind} edited_parts:.* changed"):
        resume(out)
    (tmp_path / "edited_parts.py").unlink()
    monkeypatch.delitem(sys.modules, "edited_parts")
    with pytest.raises(ValueError, match=r"edited_parts cannot be imported.*PYTHONPATH") as why:
        resume(out)
    assert "damaged" not in str(why.value)
    assert "\n" not in str(why.value)
    assert files_of(out) == before
    written_part(tmp_path, monkeypatch, OWN)
    assert resume(out)["attempts"] == 1
    epsilon = read(out / "ledger.jsonl").guarantee().epsilon
    written_part(tmp_path, monkeypatch, EDITED)
    with pytest.raises(LedgerError, match=f"the {kind} edited_parts:.* changed"):
        read(out / "ledger.jsonl")
    written_part(tmp_path, monkeypatch, OWN)
    assert read(out / "ledger.jsonl").guarantee().epsilon == epsilon


def test_diagnostics_have_each_step_once(finished, tmp_path):
    lines = (finished / DIAGNOSTICS).read_text().splitlines()
    assert [json.loads(one)["step"] for one in lines] == list(range(30))
    folder = RunDirectory(shutil.copytree(finished, tmp_path / "run"))
    for step in (25, 9, 0):
        folder.cut_diagnostics(step)
        kept = (folder.path / DIAGNOSTICS).read_text().splitlines()
        assert kept == lines[:step]
    (folder.path / DIAGNOSTICS).write_text("\n".join(lines[:3]) + '\n{"step": 3, "lo')
    folder.cut_diagnostics(4)
    assert (folder.path / DIAGNOSTICS).read_text().splitlines() == lines[:3]


# --- Refusals ------------------------------------------------------------------------------------


class Picky(Line):
    """Says by itself which rows it refuses."""

    def check(self, begun):
        raise ValueError(f"no such rows as those of {begun}")


def changed(name, before, after):
    """Puts another text in a file of a run."""

    def change(out, patch):
        text = (out / name).read_text()
        assert before in text
        (out / name).write_text(text.replace(before, after))

    return change


def stopped_again(out, patch):
    """Goes on to another stop, and puts the stop before in its place."""
    kept = (out / STOP).read_bytes()
    with ended(number=0):
        resume(out)
    (out / STOP).write_bytes(kept)


def rolled_back(out, patch):
    lines = (out / "ledger.jsonl").read_text().splitlines(keepends=True)
    (out / "ledger.jsonl").write_text("".join(lines[:-1]))


def linked(name):
    """Moves a file or a folder of a run elsewhere."""

    def link(out, patch):
        (out / name).rename(out.with_name("elsewhere"))
        (out / name).symlink_to(out.with_name("elsewhere"))

    return link


def patched(*what):
    return lambda out, patch: patch.setattr(*what)


def written(name, text):
    return lambda out, patch: (out / name).write_text(text)


def unchanged(out, patch): ...


OTHERWISE = "of the task differs from the start of the run in"
STORIES = {
    "a kill": (lambda out, patch: kill(out), None, 2),
    "the stop of an earlier step": (stopped_again, None, 2),
    "other drawing code": (
        patched("dpsgd.runs.job.drawing_digest", lambda sampler: "other"), None, 2,
    ),
    "another loss": (unchanged, Scaled(), 1),
    "another start": (
        patched(Line, "init", lambda task, seed: {"w": np.ones(3, np.float32)}), None, 1,
    ),
    "another rate": (changed("config.json", "0.003", "0.004"), None, "config.json"),
    "other noise": (changed("config.json", '_multiplier": 1.0', '_multiplier": 2.0'), None, "conf"),
    "other rows": (unchanged, Line(seed=1), f"{DATA} is missing, or the run began on other rows"),
    "more rows": (unchanged, Line(rows=240), "has 240 training examples, but .* began on 160"),
    "another model": (unchanged, Line(width=4), rf"{OTHERWISE} width"),
    "another description": (
        patched(Line, "describe", lambda task: {"headline": "other"}), None,
        rf"{OTHERWISE} headline, better, width",
    ),
    "rows that the task refuses": (unchanged, Picky(), "no such rows as those of {'headline': 't"),
    "no digest": (lambda out, patch: (out / DATA).unlink(), None, f"{DATA} is missing"),
    "a ledger of before": (rolled_back, None, "rolled back or replaced"),
    "no JSON": (written("config.json", "{"), None, "config.json"),
    "no task": (written("config.json", '{"task": "x"}'), None, "config.json"),
    "no object": (written("config.json", "[]"), None, "config.json"),
    **{
        f"{name} elsewhere": (linked(name), None, f"{name} is a symbolic link to .*[:;] move th")
        for name in ("ledger.jsonl", "checkpoints", DIAGNOSTICS, STOP)
    },
}  # fmt: skip


def files_of(out):
    return {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("change", "task", "becomes"), STORIES.values(), ids=STORIES)
def test_a_changed_run_continues_restarts_or_is_refused(
    stopped, monkeypatch, change, task, becomes
):
    change(stopped, monkeypatch)
    if isinstance(becomes, int):
        assert resume(stopped, task)["attempts"] == becomes
        return
    before = files_of(stopped)
    with pytest.raises(ValueError, match=becomes) as refused:
        resume(stopped, task)
    assert "\n" not in str(refused.value)
    assert files_of(stopped) == before


@pytest.mark.parametrize("story", ["a ledger of before", "no JSON", "no object"])
def test_a_changed_finished_run_is_not_believed(finished, tmp_path, monkeypatch, story):
    change, _, becomes = STORIES[story]
    change(done := shutil.copytree(finished, tmp_path / "done"), monkeypatch)
    for use in (resume, FinishedRun.read):
        with pytest.raises(ValueError, match=becomes):
            use(done)


def often(task, out):
    """A stopped run with checkpoints of steps 8 and 16."""
    return run_and_stop(task, config_of(checkpoint_seconds=0.0), out)


def damage_an_array(path):
    content = bytearray(path.read_bytes())
    content[8] ^= 1
    path.write_bytes(content)


@pytest.mark.short("newest gone")
@pytest.mark.parametrize("damaged", [True, False], ids=["newest damaged", "newest gone"])
def test_a_checkpoint_of_another_run_is_refused(tmp_path, damaged):
    ours, theirs = (often(line, tmp_path / name) for name in ("ours", "theirs"))
    older, newest = sorted((ours / "checkpoints").iterdir())
    shutil.copy(theirs / "checkpoints" / older.name, older)
    if damaged:
        damage_an_array(newest)
    else:
        newest.unlink()
    before = (ours / "ledger.jsonl").read_bytes()
    with pytest.raises(LedgerError, match=r"lacks the last line that the .*checkpoint"):
        resume(ours)
    assert (ours / "ledger.jsonl").read_bytes() == before
    shutil.rmtree(ours / "checkpoints")  # its own beginning is still there
    assert resume(ours)["attempts"] == 2


def test_a_run_killed_after_its_release_still_gets_a_report(stopped, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(report, "markdown", stop_there)
        with pytest.raises(KeyboardInterrupt):
            resume(stopped)
    closed = (stopped / "ledger.jsonl").read_bytes()
    copy = shutil.copytree(stopped, stopped.with_name("copy"))
    shutil.rmtree(copy / "checkpoints")
    with pytest.raises(ValueError, match="has released its model"):
        resume(copy)  # which is not trained again
    assert (copy / "ledger.jsonl").read_bytes() == closed
    record = resume(stopped)
    assert (stopped / "ledger.jsonl").read_bytes() == closed
    assert record["params_sha256"] == file_sha256(stopped / "params.npz")
    assert record["attempts"] == 1


def test_a_second_process_and_a_missing_run_are_refused(stopped, tmp_path):
    with Ledger.open(stopped / "ledger.jsonl"):
        with pytest.raises(LedgerError, match="another process is training"):
            resume(stopped)
        RunDirectory.open(stopped, finished=False).history()
    with pytest.raises(FileNotFoundError, match="is not a run directory"):
        resume(tmp_path / "nothing")


# --- Secrets -------------------------------------------------------------------------------------


@pytest.mark.short("0")
@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_run_files_are_owner_only_unless_public(tmp_path, umask):
    before = os.umask(umask)
    try:
        out = run_and_stop(line, config_of(), tmp_path / "new" / "runs" / "run")
        owns = {out / STOP, out / "checkpoints", *(out / "checkpoints").iterdir()}
        owns |= {out / DATA, out / DIAGNOSTICS}
        for path in (out, out.parent, out.parent.parent, *out.rglob("*")):
            most = 0o700 if path in owns or umask else 0o755
            assert stat.S_IMODE(path.stat().st_mode) & ~most == 0, path
        resume(out)
        for path in out.rglob("*"):
            assert stat.S_IMODE(path.stat().st_mode) & 0o133 == 0, path
    finally:
        os.umask(before)


def test_only_a_stop_file_holds_a_secret(finished, tmp_path, monkeypatch):
    told = []
    train_blocks_told(monkeypatch, lambda state, keys: told.append(keys))
    stopped = run_and_stop(line, config_of(), tmp_path / "run")
    (keys,) = told
    files = {path.name: path.read_bytes() for path in stopped.rglob("*") if path.is_file()}

    def holders(number):
        """The files with a secret number, in some form."""
        raw = [number.to_bytes(32, end) for end in ("little", "big")]
        forms = [*raw, f"{number:x}".encode(), str(number).encode()]
        return {name for name, content in files.items() if any(x in content for x in forms)}

    root = int.from_bytes(keys.root._secret, "little")
    secret = [root, keys.root.sampling_seed(), *(keys.sampling(epoch) for epoch in (0, 2))]
    secret += [int.from_bytes(key.tobytes(), "little") for key in (keys.noise, keys.of_sums.noise)]
    assert not set().union(*map(holders, secret))
    assert holders(keys.sampling(1)) == {STOP}
    out = tmp_path / "out"
    export(finished, out)  # the same run
    assert {path.name for path in out.rglob("*")} == {"params.npz", "model.json", "guarantee.json"}
    with np.load(out / "params.npz") as bundle, np.load(finished / "params.npz") as whole:
        assert bundle.files == whole.files == ["['w']"]
        np.testing.assert_array_equal(bundle["['w']"], whole["['w']"])
    stated = contents(finished, "guarantee.json")
    exported = contents(out, "guarantee.json")
    assert set(exported.pop("segments")[0]) == {
        "sampler", "noise_multiplier", "l2_clip_norm", "noise", "full_sums", "adjacency", "unit",
        "steps", "rows", "reproducible_noise",
    }  # fmt: skip
    assert exported == {**stated, "audit": contents(finished, "report.json")["audit"]}
    for word in (b"root", b"step", b"fingerprint", b"opt_state", b"digest", b"ledger"):
        assert word not in (out / "model.json").read_bytes() + (out / "params.npz").read_bytes()
    with pytest.raises(FileNotFoundError, match="finish it by `dpsgd resume"):
        export(stopped, tmp_path / "other")


def test_what_a_run_writes_depends_on_a_row_by_the_model_alone(tmp_path, monkeypatch):
    """On data sets that differ in one row, with the same noise and the same batches."""
    runs, ledgers, usual = [tmp_path / "a", tmp_path / "b"], [], Line.columns

    def changed(task):
        rows = {name: np.array(column) for name, column in usual(task).items()}
        rows["x"][17], rows["y"][17] = 9.0, -9.0
        return rows

    for out, columns in zip(runs, (usual, changed), strict=True):
        monkeypatch.setattr(Line, "columns", columns)
        run(line, config_of(insecure_seed=5), out)
        digest = RunDirectory(out).data()
        text = (out / "ledger.jsonl").read_text()
        assert digest not in text
        lines = [json.loads(one) for one in text.splitlines()]
        for one in lines:
            del one["hash"]
        assert lines.pop() == {"released": file_sha256(out / "params.npz")}
        ledgers.append(lines)
    assert ledgers[0] == ledgers[1]
    a, b = (np.load(out / "params.npz") for out in runs)
    assert any(not np.array_equal(a[name], b[name]) for name in a.files)  # the row took part
    names = [{path.name for path in out.rglob("*")} for out in runs]
    assert names[0] == names[1]
    for name in ("params.npz", "ledger.jsonl"):
        assert len({(out / name).stat().st_size for out in runs}) == 1, name
    for name in ("guarantee.json", "environment.json", "config.json"):
        assert contents(runs[0], name) == contents(runs[1], name)
    a, b = (contents(out, "report.json") for out in runs)
    assert a.keys() == b.keys()
    clock = {"stage_seconds", "training_seconds", "examples_per_second"}
    different = {name for name in a if a[name] != b[name]}
    assert different <= clock | {"metrics", "ledger_head", "params_sha256"}
    assert a["metrics"]["test_num_examples"] == b["metrics"]["test_num_examples"]


def stop_there(*of, **how):
    raise KeyboardInterrupt
