"""How a run resumes, held against a model of ten lines over thousands of random histories."""

import dataclasses
import itertools
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from own_sampler import Coins

from dpsgd import Independent, Mechanism, Segment
from dpsgd.runs.attempts import Continue, EpochSeeds, NewAttempt, Stop, decide, stop_at
from dpsgd.runs.checkpoint import Checkpoint
from dpsgd.runs.history import History, LedgerError, line_of
from dpsgd.runs.terms import Terms
from samplers import BallsAndBins

STEPS = 12
PLAN = Segment(Mechanism(BallsAndBins(24, 8, epochs=4), 1.0, 1.0))
TERMS = Terms(PLAN, 1e-3, config="a")


def saved_at(step, attempt, head):
    """The checkpoint of a step."""
    return Checkpoint(SimpleNamespace(step=step, attempt=attempt), head, 0.0)


class Folder:
    """Files of a run, and what every process has drawn with which seed."""

    def __init__(self, terms=TERMS):
        self.terms, self.history, self.saved, self.stop = terms, History(), [], None
        self.drawing, self.drawn, self.names = "one", [], itertools.count()
        self.append({"attempt": 0, "first_step": 0, "nonce": "n", **terms.record()})

    def append(self, body):
        if "attempt" in body:
            body |= {"drawing": self.drawing, "environment": {}}
        self.history.read_on(line_of(body, self.history.head)[0], Path("ledger"))

    def resume(self, rng):
        """Goes on until it is killed or stops; returns the decision, and what it was made of."""
        history = self.history
        saved = next(iter(self.saved), None)
        found = decide(history, saved, self.stop, self.terms, self.drawing)
        step = saved.step if saved else 0
        if isinstance(found, NewAttempt):
            self.append({"attempt": len(history.attempts), "first_step": step})
        seed = found.stop.seed if isinstance(found, Continue) and found.stop else next(self.names)
        self.stop = None
        while step < STEPS:
            if rng.random() < 0.2:
                return found  # killed
            stop = min(STEPS, step + int(rng.integers(1, 4)))
            self.append({"declare": [step, stop]})
            if rng.random() < 0.2:
                return found
            self.drawn += [(len(self.history.attempts) - 1, seed, k) for k in range(step, stop)]
            step = stop
            if rng.random() < 0.5:
                self.saved.insert(0, saved_at(step, len(history.attempts) - 1, history.head))
                if rng.random() < 0.4:
                    begun = history.attempts[-1].head
                    self.stop = Stop(begun, step, 0, seed)
                    return found
        return found


def model(folder):
    """Continues what has drawn nothing beyond its checkpoint by the same code and seed."""
    last, index = folder.history.attempts[-1], len(folder.history.attempts) - 1
    step, by = (folder.saved[0].step, folder.saved[0].state.attempt) if folder.saved else (0, -1)
    if not last.steps and step == last.steps.start and last.drawing == folder.drawing:
        return Continue
    if by != index or step != last.steps.stop:
        return NewAttempt
    kept = folder.stop is not None and folder.stop.step == step
    alike = last.drawing == folder.drawing
    return Continue if step == STEPS or (kept and alike) else NewAttempt


@pytest.mark.short("0")
@pytest.mark.parametrize("seed", range(5))
def test_random_histories_are_resumed_as_the_model_does(seed):
    rng = np.random.default_rng(seed)
    decided = set()
    for _ in range(150):
        folder = Folder()
        for _ in range(12):
            act = rng.random()
            if act < 0.1 and folder.saved:
                folder.saved.pop(0)  # the newest checkpoint is damaged
            elif act < 0.2:
                folder.drawing = str(rng.choice(["one", "another"]))
            elif act < 0.25:
                folder.stop = None
            else:
                expected = model(folder)
                found = folder.resume(rng)
                assert type(found) is expected
                decided.add(expected)
        counted = {(g.index, step) for g in folder.history.attempts for step in g.steps}
        assert {(index, step) for index, _, step in folder.drawn} <= counted
        # No seed draws a step twice, and an attempt that takes a step once takes it by one seed.
        by_seed = [(seed, step) for _, seed, step in folder.drawn]
        assert len(by_seed) == len(set(by_seed))
        taken = [(index, step) for index, _, step in folder.drawn]
        assert len(taken) == len(set(taken))
    assert decided == {Continue, NewAttempt}


def stopped(at=8, terms=TERMS):
    """A folder of one attempt that stopped cleanly."""
    folder = Folder(terms)
    for first in range(0, at, 4):
        stop = min(first + 4, at)
        folder.append({"declare": [first, stop]})
        folder.saved.insert(0, saved_at(stop, 0, folder.history.head))
    folder.stop = Stop(folder.history.name, at, 2, 2**200 + 7)
    return folder


def decided(folder, **changes):
    newest = next(iter(folder.saved), None)
    how = {"saved": newest, "stop": folder.stop, "terms": folder.terms, "drawing": "one"} | changes
    return decide(folder.history, **how)


def test_only_a_clean_stop_continues_with_its_seed():
    folder = stopped()
    assert decided(folder) == Continue(folder.stop)
    stop = folder.stop
    assert str(stop.seed) not in repr(decided(folder))  # as tracebacks with variables print it
    for other in (
        None,
        stop._replace(attempt="of another attempt"),
        stop._replace(step=4),
    ):
        assert decided(folder, stop=other) == NewAttempt()
    assert decided(folder, saved=folder.saved[1]) == NewAttempt()
    assert decided(folder, saved=None) == NewAttempt()
    folder.append({"declare": [8, 12]})
    assert decided(folder) == NewAttempt()


@pytest.mark.parametrize(("assignment", "length"), [("redrawn", 3), ("fixed", STEPS)])
def test_a_stop_has_the_seed_of_an_unfinished_draw_alone(assignment, length):
    sampler = BallsAndBins(24, 8, epochs=4, assignment=assignment)
    seeds = EpochSeeds(7, {})
    for step in range(STEPS + 1):
        draw = step // length if step % length else None
        expected = Stop("head", step, draw, None if draw is None else seeds(draw))
        assert stop_at(step, "head", sampler, seeds) == expected


def test_every_epoch_has_a_seed_of_its_own():
    epochs = {*range(1_000), *(2**k for k in range(64))}
    assert len(set(map(EpochSeeds(7, {}), epochs))) == len(epochs)


def test_a_ledger_that_is_older_than_its_stop_is_refused():
    folder = stopped()
    with pytest.raises(LedgerError, match=r"^the run stopped at step 9, which its ledger does not"):
        decided(folder, saved=None, stop=folder.stop._replace(step=9))


def test_a_later_attempt_ignores_the_state_of_an_earlier_one():
    folder = stopped()
    folder.append({"attempt": 1, "first_step": 4})
    folder.append({"declare": [4, 8]})
    stop = folder.stop._replace(attempt=folder.history.attempts[1].head)
    assert decided(folder, stop=stop) == NewAttempt()
    own = saved_at(8, 1, folder.history.head)
    assert decided(folder, saved=own, stop=stop) == Continue(stop)


def test_an_insecure_seed_always_continues():
    folder = Folder(REPRODUCIBLE)
    folder.append({"declare": [0, 8]})
    folder.saved = [saved_at(4, 0, folder.history.head)]
    assert decided(folder, stop=None) == Continue()


def with_noise(sigma):
    mechanism = dataclasses.replace(TERMS.mechanism, noise_multiplier=sigma)
    return dataclasses.replace(TERMS, plan=Segment(mechanism))


REPRODUCIBLE = dataclasses.replace(TERMS, plan=Segment(PLAN.mechanism, reproducible_noise=True))


REFUSED = {
    "configuration": ({"terms": dataclasses.replace(TERMS, config="b")}, "another config"),
    "noise": ({"terms": with_noise(2.0)}, "line 1: .*another noise_multiplier"),
    "seed": ({"terms": REPRODUCIBLE}, "reproducible_noise"),
    "older ledger": ({"saved": saved_at(8, 0, "ab" * 32)}, "rolled back or replaced"),
    "step not declared": ({"saved": saved_at(9, 0, "head 2")}, "did not declare"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "why"), REFUSED.values(), ids=REFUSED)
def test_what_no_guarantee_covers_is_refused(changes, why):
    folder = stopped()
    if saved := changes.get("saved"):
        heads = {f"head {k}": head for k, head in enumerate(folder.history.lines)}
        head = heads.get(saved.ledger_head, saved.ledger_head)
        changes = {"saved": saved._replace(ledger_head=head)}
    with pytest.raises(LedgerError, match=why) as refused:
        decided(folder, **changes)
    assert "\n" not in str(refused.value)


def test_a_closed_ledger_is_not_trained_on():
    folder = stopped(12)
    folder.append({"released": "digest"})
    assert decided(folder) == Continue()
    with pytest.raises(LedgerError, match="has released its model"):
        decided(folder, saved=folder.saved[1])


@dataclasses.dataclass(frozen=True)
class Fresh(Independent):
    """Independent noise by another name."""


OWN = {
    "sampler own_sampler:Coins": Mechanism(Coins(24, 8, epochs=4), 1.0, 1.0),
    f"noise {__name__}:Fresh": dataclasses.replace(PLAN.mechanism, noise=Fresh()),
}


@pytest.mark.parametrize(("name", "mechanism"), OWN.items(), ids=["sampler", "noise"])
def test_an_own_part_never_changes_once_steps_are_declared(name, mechanism):
    terms = dataclasses.replace(TERMS, plan=Segment(mechanism))
    folder = Folder(terms)
    assert decided(folder, drawing="another") == NewAttempt()
    for at in (1, 8, 12):  # 12: only the report is missing
        folder = stopped(at, terms)
        assert decided(folder) == Continue(folder.stop if folder.stop.step < 12 else None)
        folder.append({"attempt": 1, "first_step": folder.stop.step})
        for changes in ({}, {"stop": None}, {"saved": None}):
            with pytest.raises(LedgerError, match=f"the {name} draws differently") as refused:
                decided(folder, drawing="another", **changes)
            assert "\n" not in str(refused.value)
        folder.drawing = "another"  # an attempt without steps, drawn otherwise, mends nothing
        folder.append({"attempt": 2, "first_step": folder.stop.step})
        with pytest.raises(LedgerError, match="draws differently"):
            decided(folder, drawing="another")
    assert decided(stopped(), drawing="another") == NewAttempt()  # the package prices its versions
