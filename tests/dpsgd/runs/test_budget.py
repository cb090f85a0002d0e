"""How many epochs fit into a time: of the program that trains, and of synthetic rows."""

import json
import time
from dataclasses import dataclass

import pytest
from test_resolve import OPEN, Recommending
from tiny_task import Line, config_of

from accounting import epsilon
from dpsgd import Settings, run
from dpsgd.runs import budget, report
from dpsgd.runs.budget import Timing
from dpsgd.runs.job import Job, rows_of
from dpsgd.runs.ledger import read
from dpsgd.runs.log import WORDS
from dpsgd.runs.resolve import choose, resolve
from dpsgd.runs.run import Run
from samplers.settings import SETTINGS


class Clock:
    """Goes forward where something takes time, and at no other moment."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def chosen(seconds, timing, *, task=Recommending, clock=None, started=None, asked=OPEN):
    """Returns the epochs for which there is time after what `timing(config)` says."""
    limit = budget.Budget(seconds / 60, timing, started, clock or Clock())
    minutes = asked.but(budget_minutes=seconds / 60)
    spec, record = choose(minutes, task(), rows_of(Line()), limit.choose)
    assert record["epoch_seconds"] == timing(spec).epoch
    return spec.sampler.epochs


def epochs_of(seconds, step=0.0, first=0.0):
    return lambda config: Timing(seconds, step, first)


def test_the_most_epochs_are_chosen_for_which_there_is_time():
    assert chosen(60, epochs_of(6)) == 8  # half an epoch and a tenth are kept for what follows
    assert chosen(120, epochs_of(6)) == 17
    assert chosen(60, epochs_of(1e-6)) == 50  # no more than the rule takes for any time
    assert chosen(60, epochs_of(6), started=-20.0) == 5  # of which 20 s are gone
    # An audit takes hundreds of steps, and the search for the noise some compilations.
    asked = OPEN.but(audit=True)
    assert chosen(120, epochs_of(6, step=0.1, first=10.0), asked=asked) == 8
    assert chosen(120, epochs_of(6, step=0.1)) == 17


@dataclass(frozen=True)
class Larger(Line):
    """Recommends larger batches for fewer epochs."""

    def recommend(self, request):
        epochs = min(request.most_epochs, 50)
        return Settings(batch_size=16 if epochs > 20 else 80, epochs=epochs)


@pytest.mark.parametrize(
    ("seconds", "epochs", "sizes"),
    [
        (110.0, 50, [16]),
        (30.0, 20, [16, 80]),  # of larger batches, and 50 of smaller do not fit
        (5.0, 10, [16, 80]),
        (0.6, 1, [16, 80]),
    ],
)
def test_where_fewer_epochs_go_with_other_batches_these_are_timed_too(seconds, epochs, sizes):
    timed = dict()

    def timing(config):
        size = config.sampler.batch_size
        timed[size] = Timing({16: 2.0, 80: 0.5}[size], 0.0, 0.0)
        return timed[size]

    after = 0.5 * 2.0 if epochs > 10 else 0.5 * 0.5
    seconds = seconds / (1 - budget.RESERVE) + after
    assert chosen(seconds, timing, task=Larger) == epochs
    assert list(timed) == sizes


def prepared(limit, clock, seconds, asked=OPEN):
    """Returns the epochs that are chosen, and whether fewer should be, once prepared."""
    spec, _ = choose(asked.but(budget_minutes=1.0), Recommending(), rows_of(Line()), limit.choose)
    clock.now += seconds
    return spec.sampler.epochs, limit.exceeded(spec)


@pytest.mark.parametrize(
    ("seconds", "found"),
    [
        (5.0, [(8, False)]),  # of 60 s, 52 are left for steps, and 48 are needed
        (20.0, [(8, True), (2, False)]),  # 37 are left, 20 of which it takes once more
        (40.0, [(8, False)]),  # to choose anew would take as long as the run
    ],
)
def test_what_takes_longer_than_was_thought_leaves_fewer_epochs(seconds, found):
    clock = Clock()
    limit = budget.Budget(1, epochs_of(6), clock=clock)
    for one in found:
        assert prepared(limit, clock, seconds) == one
    assert clock.now + 6 * found[-1][0] <= 60 or seconds == 40.0


def test_a_budget_without_time_for_an_epoch_is_refused_in_a_line():
    with pytest.raises(ValueError, match="and not even one epoch fits: here it") as refused:
        chosen(30, epochs_of(20.0, first=4.0))
    assert "budget_minutes is 0.5" in str(refused.value)
    assert "here it takes 20.0 s, and all else about 19 s" in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("steps", "flush_every", "times"), [(1, None, 1), (3, None, 1), (40, 64, 1), (40, 8, 5)]
)
def test_the_time_of_an_epoch_is_that_of_its_steps_and_of_what_precedes_and_follows_them(
    steps, flush_every, times, monkeypatch
):
    clock = Clock()

    def train_blocks(algorithm, mechanism, state, rows, **options):
        left = mechanism.sampler.num_steps - int(state.step)
        clock.now += 0.5 + 2.0 * left
        yield type("Block", (), {"state": state})

    monkeypatch.setattr(budget, "train_blocks", train_blocks)
    sampler = SETTINGS["shuffle"](batch_size=160 // steps, epochs=1)
    job = Job.of(Line(), resolve(config_of(sampler=sampler), Line(), rows_of(Line())))
    found = budget.time_steps(job, flush_every=flush_every, clock=clock)
    assert found.first == 2.5
    assert found.epoch == pytest.approx(0.5 * times + 2.0 * job.mechanism.sampler.steps_per_epoch)


def test_a_run_of_which_fewer_epochs_are_chosen_is_planned_and_audited_for_these(
    tmp_path, monkeypatch
):
    epochs, exceeded = iter([9, 4]), iter([True, False])
    monkeypatch.setattr(budget.Budget, "choose", lambda self, choice: (choice(next(epochs)), 1.0))
    monkeypatch.setattr(budget.Budget, "exceeded", lambda self, config: next(exceeded))
    monkeypatch.setattr(Job, "audit", lambda job, *_, **__: f"of {job.mechanism.sampler}")
    out = tmp_path / "run"
    Run.create(Recommending(), OPEN.but(learning_rate=0.1, budget_minutes=1.0), out)
    history = read(out / "ledger.jsonl")
    mechanism = history.attempts[0].terms.mechanism
    assert mechanism.sampler.epochs == 4
    assert history.audit == f"of {mechanism.sampler}"
    planned = json.loads((out / "guarantee.json").read_text())
    assert planned["epsilon_upper"] == epsilon(mechanism.privacy(), planned["delta"]).upper
    assert json.loads((out / "config.json").read_text())["sampler"]["epochs"] == 4


@pytest.mark.long
def test_the_stages_of_a_run_take_all_of_its_time_and_the_report_lists_them(tmp_path):
    before, out = time.monotonic(), tmp_path / "run"
    spec = OPEN.but(learning_rate=0.1, audit=True, budget_minutes=1.0)
    record = run(Recommending(), spec, out, started=before - 3.0)
    stages, taken = record["stage_seconds"], time.monotonic() - before + 3.0
    assert list(stages) == [name for name in WORDS if name != "calibrate"]
    assert min(stages.values()) >= 0
    assert stages["read"] >= 3.0
    assert 0.9 * taken - 0.5 <= sum(stages.values()) <= taken
    text = (out / "report.md").read_text()
    for name, seconds in stages.items():
        assert f"| {WORDS[name]} | {seconds:.1f} |" in text
    assert f"| in all | {sum(stages.values()):.1f} |" in text
    (cells,) = report.comparison([record])[1]
    assert cells[-1] == f"{sum(stages.values()):.1f}"
