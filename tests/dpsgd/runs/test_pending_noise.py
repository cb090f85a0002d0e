"""However runs die, move, are copied and changed: pending noise is drawn once, or twice alike.

Directories are played here: their ledgers are real, and so is what decides where a run goes on.
"""

import os
import random
import shutil
from types import SimpleNamespace

import pytest

from dpsgd import Mechanism
from dpsgd.core.state import Table, TrainState
from dpsgd.runs import plan
from dpsgd.runs.checkpoint import KEPT, Checkpoint
from dpsgd.runs.directory import RunDirectory
from dpsgd.runs.history import History
from dpsgd.runs.job import Job
from dpsgd.runs.ledger import Ledger
from dpsgd.runs.processes import Processes
from dpsgd.runs.terms import Terms
from samplers import Poisson

STEPS, BLOCK, FLUSH = 24, 2, 6
MECHANISM = Mechanism(Poisson(48, 4, epochs=2), 1.0, 1.0)


class DrawnTwice(AssertionError):
    """Noise of one step that was drawn with two keys, or of another law than declared."""


class Saved(SimpleNamespace):
    """The checkpoints of a directory: the newest two, and the newest without pending noise."""

    def save(self, checkpoint):
        self.all.insert(0, checkpoint)
        whole = [one for one in self.all if not one.state.pending][:1]
        self.all = [one for k, one in enumerate(self.all) if k < KEPT or one in whole]

    def latest(self, like, pending=None):
        found = (one for one in self.all if pending or not one.state.pending)
        return next(found, None)

    def destroy_after(self, step):
        self.all = [one for one in self.all if one.state.step <= step]


class Lazy(Job):
    """A job of which nothing is looked at but that its tables are lazy."""

    def __init__(self):
        object.__setattr__(self, "algorithm", SimpleNamespace(tables="lazy"))

    def shapes(self):
        return covered(0, ()), pending(0, (), "")


class Directory(RunDirectory):
    """What there is of a run in one place."""

    checkpoints = None

    def __init__(self, path, checkpoints=(), config="config 0", code="code 0", is_copy=False):
        super().__init__(path)
        self.checkpoints = Saved(all=list(checkpoints))
        self.config, self.code, self.is_copy = config, code, is_copy


class World:
    """Directories of one run, and who drew what is pending in which state."""

    def __init__(self, folder, actions, repeats):
        self.folder, self.actions, self.repeats = folder, actions, repeats
        self.drawn, self.taken, self.count = {}, set(), 0
        path = self.new_path()
        Ledger.create(path, self.terms("code 0", "config 0")).close()
        self.directories = [Directory(path)]

    def new_path(self):
        self.count += 1
        return self.folder / f"{self.count}.jsonl"

    def terms(self, code, config):
        return Terms(MECHANISM, 1e-3, False, {"code": code, "config": config, "tables": "lazy"})

    def act(self):
        one = self.actions.choice(self.directories)
        kind = self.actions.choice(["go on", "go on", "go on", "copy", "lose", "code", "config"])
        if kind == "copy" and len(self.directories) < 3:
            copy = Directory(self.new_path(), one.checkpoints.all, one.config, one.code, True)
            shutil.copy(one.path, copy.path)
            self.directories.append(copy)
        elif kind == "lose":
            del one.checkpoints.all[:1]
        elif kind in ("code", "config"):
            setattr(one, kind, f"{kind} {self.actions.randrange(3)}")
        else:
            self.go_on(one)

    def go_on(self, one):
        terms, job = self.terms(one.code, one.config), Lazy()
        how = plan.how_to_repeat(job, alone=not one.is_copy)
        with Ledger.open(one.path) as ledger:
            before = len(ledger.history.attempts)
            told = job, one, ledger.history, terms, lambda line: None

            def resume(terms, *, step, **where):
                left = [saved.state.step for saved in one.checkpoints.all]
                found = Ledger.resume(ledger, terms, step=step, **where)
                if len(ledger.history.attempts) > before and max(left, default=0) > step:
                    raise DrawnTwice("a state of the attempt before is left to go on from")
                return found

            ledger.resume = resume
            checkpoint = plan.last_checkpoint(*told, **how)
            attempt = plan.next_attempt(one, ledger, terms, checkpoint, Processes(), **how)
            one.is_copy = one.is_copy and len(ledger.history.attempts) == before
            state = checkpoint.state if checkpoint else covered(0, ("start",))
            for _ in range(self.actions.randrange(1, 5)):
                if state.step == STEPS:
                    return
                first, stop = (
                    state.step,
                    min(state.step + BLOCK, state.step - state.step % FLUSH + FLUSH),
                )
                ledger.declare(range(first, stop))
                state = self.step(state, stop, attempt.key, one.config)
                if self.actions.random() < 0.25:
                    return  # killed: no checkpoint tells
                one.checkpoints.save(Checkpoint(state, ledger.history.head, 0.0))

    def step(self, state, stop, key, config):
        """Returns the state after a block; the pending noise is drawn by this key in it."""
        path = (*path_of(state), (key, stop))
        if not self.repeats:
            if (key, stop) in self.taken:
                raise DrawnTwice("the same keys for sums that differ in their last bits")
            self.taken.add((key, stop))
        if state.pending:
            name = path_of(state)
            promised = self.drawn.setdefault(name, (key, state.opt_state))
            if promised != (key, config):
                raise DrawnTwice(f"at step {state.step}")
        return covered(stop, path) if stop % FLUSH == 0 else pending(stop, path, config)


def covered(step, path):
    return TrainState(step, path, ())


def pending(step, path, config):
    """A state with the configuration by whose law noise is pending."""
    return TrainState(step, path, config, (), {0: Table(None, None, steps=step)})


def path_of(state):
    return state.raw_params


def play(folder, monkeypatch, repeats=True):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr("dpsgd.runs.plan.repeats_exactly", lambda: repeats)
    for seed in range(60):
        (folder / f"{seed}").mkdir()
        world = World(folder / f"{seed}", random.Random(seed), repeats)
        for _ in range(25):
            world.act()


@pytest.mark.short("on a CPU")
@pytest.mark.parametrize("repeats", [True, False], ids=["on a CPU", "on a GPU"])
def test_noise_that_is_pending_is_drawn_by_one_key_with_the_law_that_was_declared(
    tmp_path, monkeypatch, repeats
):
    play(tmp_path, monkeypatch, repeats)


def always(self, *terms, **where):
    return True


def also_for_copies(self, terms, *, alone, **where):
    return MAY_DRAW_ANEW(self, terms, alone=True, **where)


def also_where_more_was_declared(self, terms, *, step, origin, alone):
    last = self.attempts[-1].terms.fingerprint["config"]
    return alone and self._made(step, origin) and terms.fingerprint["config"] == last


def also_with_other_settings(self, terms, **where):
    return MAY_DRAW_ANEW(self, self.attempts[-1].terms, **where)


MAY_DRAW_ANEW = History.may_draw_anew
RULES = [always, also_for_copies, also_where_more_was_declared, also_with_other_settings]


@pytest.mark.parametrize("rule", RULES)
def test_the_play_finds_rules_that_let_it_be_drawn_twice(tmp_path, monkeypatch, rule):
    monkeypatch.setattr(History, "may_draw_anew", rule)
    with pytest.raises(DrawnTwice):
        play(tmp_path, monkeypatch)
