"""Which candidate is released, and how a selection goes on that was killed: the theory's law."""

import contextlib
import os
import shutil
from collections import Counter

import numpy as np
import pytest
from scipy import stats
from toy_trials import COUNT, RATES, content, scripted, select, so_many

from accounting import TrialCount
from dpsgd.runs.directory import SECRETS
from dpsgd.selection import engine
from dpsgd.selection.vault import Vault, VaultSecret

CANDIDATES = (None, 0.2, 0.5, 0.5)
"""Scores of four candidates: one fails, two are equally good."""


def weights(count):
    """P(K = 1), P(K = 2), ...: the law of the number of trials, by its recurrence."""
    k = np.arange(1, 100_000)
    steps = np.log((1 - count.gamma) * (k + count.shape) / (k + 1))
    found = np.exp(np.concatenate([[0.0], np.cumsum(steps)]))
    return found / found.sum()


def law_of_released(count):
    """P(the candidate is released): f is the generating function of K, by its own series."""
    law = weights(count)

    def f(x):
        return float(law @ x ** np.arange(1, law.size + 1))

    good = 1 - f(0.5)
    return [f(0.25), f(0.5) - f(0.25), good / 2, good / 2]


@contextlib.contextmanager
def vault_of(folder, seed, count, better="lower"):
    folder.mkdir(exist_ok=True)
    vault = Vault(folder, VaultSecret(seed.to_bytes(32)), count, better)
    try:
        yield vault
    finally:
        vault.close()


def released(folder, seed, count):
    """Goes through a selection among candidates whose scores are fixed; returns who is released."""
    with vault_of(folder, seed, count, "higher") as vault:
        while vault.done < vault.count:
            vault.finish(CANDIDATES[vault.candidate(vault.done + 1, len(CANDIDATES))])
        return vault.candidate(vault.best.number, len(CANDIDATES))


@pytest.fixture
def unsynced(monkeypatch):
    """Nobody waits for the disk."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.mark.parametrize(
    ("count", "runs"),
    [
        (COUNT, 400),
        pytest.param(COUNT, 3000, marks=pytest.mark.long),
        pytest.param(TrialCount(10.0, 0.0), 1000, marks=pytest.mark.long),
        pytest.param(TrialCount(3.0, 1.0), 3000, marks=pytest.mark.long),
        pytest.param(TrialCount(3.0, -0.5), 3000, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_the_released_candidate_has_the_law_of_the_theory(count, runs, tmp_path, unsynced):
    seen = Counter(released(tmp_path / str(seed), seed, count) for seed in range(runs))
    expected = np.array(law_of_released(count)) * runs
    found = stats.chisquare([seen[i] for i in range(len(CANDIDATES))], expected)
    assert found.pvalue > 1e-6  # fixed seeds; over all seeds the false alarm is 1e-6


def test_equal_scores_are_told_apart_by_fair_lots(tmp_path, unsynced):
    """Of two trials with equal scores each is released half the time; false alarm 1e-6."""
    wins = 0
    for seed in range(200):
        with vault_of(tmp_path / str(seed), seed, COUNT) as vault:
            vault.finish(0.5)
            vault.finish(0.5)
            wins += vault.best.number == 1
    assert stats.binomtest(wins, 200).pvalue > 1e-6


def test_many_trials_are_as_frequent_as_the_law_says(tmp_path, unsynced):
    """Of 300 selections by default; false alarm 1e-6 over all seeds."""
    numbers = []
    for seed in range(300):
        with vault_of(tmp_path / str(seed), seed, engine.DEFAULT_COUNT) as vault:
            numbers.append(vault.count)
    shares = np.cumsum(weights(engine.DEFAULT_COUNT))
    seen = [stats.binomtest(sum(n <= k for n in numbers), 300, shares[k - 1]) for k in (1, 3, 25)]
    assert 3 * min(found.pvalue for found in seen) > 1e-6


def test_the_number_of_trials_is_drawn_once_and_then_read(tmp_path, unsynced):
    numbers = []
    for seed in range(40):
        for attempt in range(3):  # killed before the number was written down, and after
            if attempt == 1:
                (tmp_path / str(seed) / "journal.jsonl").unlink()
            law = COUNT if attempt < 2 else TrialCount(1000.0, 1.0)  # as by another version
            with vault_of(tmp_path / str(seed), seed, law) as vault:
                numbers.append(vault.count)
        assert len(set(numbers[-3:])) == 1
    assert len(set(numbers)) > 3
    refused = pytest.raises(ValueError, match="another process is selecting")
    with vault_of(tmp_path / "0", 0, COUNT), refused, vault_of(tmp_path / "0", 0, COUNT):
        pass


class Snapshots:
    """Copies a folder before every file operation: what a kill at that moment would leave."""

    def __init__(self, folder, to, every):
        self.folder, self.to, self.every, self.count, self.open = folder, to, every, 0, True

    def __enter__(self):
        self.patch = pytest.MonkeyPatch()
        for name in ("fsync", "replace", "rename", "unlink", "rmdir", "write"):
            self.patch.setattr(os, name, self.before(getattr(os, name)))
        return self

    def __exit__(self, *error):
        self.patch.undo()

    def before(self, operation):
        def snapped(*args, **options):
            self.count += self.open
            if self.open and self.count % self.every == 0:
                self.open = False  # not of copying itself
                shutil.copytree(self.folder, self.to / f"{self.count:04d}")
                self.open = True
            return operation(*args, **options)

        return snapped


@pytest.mark.long
@pytest.mark.crash
@pytest.mark.parametrize("every", [19, pytest.param(1, marks=pytest.mark.long)])
def test_a_selection_killed_at_any_write_releases_the_same_model(
    every, trained, tmp_path, monkeypatch
):
    here, to = tmp_path / "here", tmp_path / "snapshots"
    here.mkdir()
    to.mkdir()
    secret = VaultSecret(b"r" * 32)
    monkeypatch.setattr(VaultSecret, "generate", lambda: secret)
    # These copies stand for the folder itself.
    monkeypatch.setattr(VaultSecret, "load", lambda path, selection: secret)
    with so_many(4), scripted(trained) as undisturbed, Snapshots(here, to, every):
        select(here / "out")
    assert len(undisturbed.begun) == 4
    expected = content(here)
    finished = 0
    for at in sorted(to.iterdir()):
        journal = at / "out" / SECRETS / "journal.jsonl"
        lines = journal.read_bytes().count(b"\n") if journal.exists() else 0
        over = (at / "out" / "report.json").exists()
        with so_many(4 if lines == 0 else 9), scripted(trained) as trials:
            select(at / "out")
        found = {name: held for name, held in content(at).items() if ".unfinished-" not in name}
        assert found == expected, at.name
        assert not any(path.is_dir() for path in (at / "out").iterdir())
        # What stands in the journal is not tried again, nor is a trial that came to its end.
        begun = 0 if over else 4 - max(0, lines - 1)
        assert len(trials.begun) in (begun, begun - 1)
        assert trials.begun == undisturbed.begun[4 - len(trials.begun) :]
        finished += over
    assert finished >= 1
    assert len(list(to.iterdir())) > 5


def test_a_resumed_selection_runs_the_remaining_trials(trained, tmp_path, monkeypatch):
    out, stop = tmp_path / "out", iter([False, False, False, True])
    monkeypatch.setattr(VaultSecret, "stream", lambda self, purpose, number: 7 * number)
    with so_many(4), scripted(trained) as trials:
        with monkeypatch.context() as patch:
            asked = contextlib.nullcontext(lambda: next(stop))
            patch.setattr(engine, "stop_requests", lambda: asked)
            with pytest.raises(engine.Stopped):
                select(out)
        assert len(trials.begun) == 3
        with so_many(9):
            select(out)
    assert trials.begun[3:] == [RATES[7 * 4 % 3]]
