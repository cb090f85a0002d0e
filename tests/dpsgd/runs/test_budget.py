"""How many epochs fit into a time: of the program that trains, and of nobody's rows."""

import json
from dataclasses import dataclass, replace

import jax
import numpy as np
import pytest
from test_settings import OPEN, Recommending
from tiny_task import Line, config_of

from dpsgd import Settings, run
from dpsgd.runs import budget
from dpsgd.runs.job import Job
from dpsgd.runs.settings import choose
from dpsgd.training import programs
from dpsgd.training.loop import Layout
from samplers import BallsAndBins, Population
from samplers.settings import SETTINGS


class Clock:
    """Goes forward where something takes time, and at no other moment."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def takes(self, seconds, returns):
        def work(*args):
            self.now += seconds
            return returns

        return work


def chosen(minutes, *, epoch, timing=0.0, task=Recommending):
    clock = Clock()
    choice = lambda most: choose(task(), OPEN, Population(160), most_epochs=most)  # noqa: E731
    config, seconds = budget.within(minutes, choice, clock.takes(timing, epoch), clock=clock)
    assert seconds == epoch
    return config.sampler.epochs


def test_the_most_epochs_are_chosen_for_which_there_is_time():
    a_minute = 60 * (1 - budget.RESERVE)
    assert chosen(1, epoch=a_minute / 7.5) == 7
    assert chosen(1, epoch=a_minute / 7.5, timing=a_minute / 4) == 3  # of the same time, twice
    assert chosen(2, epoch=a_minute / 7.5) == 15
    assert chosen(1, epoch=1e-6) == 50  # no more than the rule takes for any time


@dataclass(frozen=True)
class Larger(Line):
    """Recommends larger batches for fewer epochs."""

    def recommend(self, aim):
        epochs = min(aim.most_epochs, 50)
        return Settings(batch_size=16 if epochs > 20 else 80, epochs=epochs)


@pytest.mark.parametrize(
    ("seconds", "epochs", "sizes"),
    [
        (110.0, 50, [16]),
        (30.0, 15, [16, 80]),  # in which 20 of larger batches fit too, and 50 of smaller do not
        (5.0, 10, [16, 80]),
        (0.6, 1, [16, 80]),
    ],
)
def test_where_fewer_epochs_go_with_other_batches_these_are_timed_too(seconds, epochs, sizes):
    timed = []

    def epoch_seconds(config):
        timed.append(config.sampler.batch_size)
        return {16: 2.0, 80: 0.5}[config.sampler.batch_size]

    choice = lambda most: choose(Larger(), OPEN, Population(160), most_epochs=most)  # noqa: E731
    minutes = seconds / 60 / (1 - budget.RESERVE)
    config, found = budget.within(minutes, choice, epoch_seconds, clock=Clock())
    assert timed == sizes  # each once
    assert found == (2.0 if sizes == [16] else 0.5)
    assert config.sampler.epochs == epochs


def test_the_audit_is_taken_to_last_as_long_as_the_latest_timing_alone():
    clock = Clock()

    def epoch_seconds(config):
        clock.now += {16: 10.0, 80: 4.0}[config.sampler.batch_size]
        return 1.0

    choice = lambda most: choose(Larger(), OPEN, Population(160), most_epochs=most)  # noqa: E731
    minutes = 36.0 / 60 / (1 - budget.RESERVE)
    config, _ = budget.within(minutes, choice, epoch_seconds, clock=clock)
    assert config.sampler.epochs == 18  # of 36 s, 10 + 4 are spent, and 4 are kept


@pytest.mark.parametrize("minutes", [0, -1, float("nan"), float("inf")])
def test_a_budget_must_be_a_time(minutes):
    with pytest.raises(ValueError, match="budget_minutes must be finite and > 0"):
        chosen(minutes, epoch=1.0)


def test_a_budget_without_time_for_an_epoch_is_refused_in_a_line():
    with pytest.raises(ValueError, match="and not even one epoch fits: here it") as refused:
        chosen(0.5, epoch=20.0, timing=10.0)
    assert "budget_minutes is 0.5" in str(refused.value)
    assert "here it takes 20.0 s, and compiling, timing and auditing 20.0 s" in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("epochs", "data_on"),
    [
        (1, "device"),
        (5, "host"),
        pytest.param(1, "host", marks=pytest.mark.long),
        pytest.param(5, "device", marks=pytest.mark.long),
    ],
)
def test_an_epoch_is_timed_on_generated_rows_with_the_program_of_the_run(
    data_on, epochs, monkeypatch
):
    sampler = SETTINGS["balls-and-bins"](batch_size=16, epochs=epochs)
    config = choose(Line(), config_of(sampler=sampler, data_on=data_on), Population(160))
    job = Job.of(Line(), config)
    program = job.program_digest()
    compiled = []
    inner = budget.train_blocks

    def train_blocks(algorithm, mechanism, state, rows, **options):
        layout = Layout.of(
            mechanism.sampler, rows, block_steps=options["block_steps"], data_on=options["data_on"]
        )
        shapes = jax.eval_shape(lambda: state)
        compiled.append(programs.digest(layout.program(algorithm, mechanism, shapes, rows)))
        return inner(algorithm, mechanism, state, rows, **options)

    monkeypatch.setattr(budget, "train_blocks", train_blocks)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), job.data)
    parts = job.algorithm, job.mechanism, job.start(), job.layout
    seconds = budget.epoch_seconds(*parts, shapes, Line().generated)
    assert 0 < seconds < 60
    assert set(compiled) == {program}


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
    job = Job.of(Line(), choose(Line(), config_of(sampler=sampler), Population(160)))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), job.data)
    parts = job.algorithm, job.mechanism, job.start(), job.layout
    how = {"flush_every": flush_every, "clock": clock}
    seconds = budget.epoch_seconds(*parts, shapes, Line().generated, **how)
    assert seconds == pytest.approx(0.5 * times + 2.0 * job.mechanism.sampler.steps_per_epoch)


def test_rows_that_are_timed_are_copies_and_where_they_are_streamed_zeros():
    shape, part = jax.ShapeDtypeStruct((7, 2), np.float32), np.arange(4.0).reshape(2, 2)
    filled = budget._filled(shape, part, streamed=False)
    assert filled.dtype == np.float32
    assert filled.tolist() == [part[i % 2].tolist() for i in range(7)]
    filled = budget._filled(shape, part, streamed=True)
    assert filled.tolist() == [*part.tolist(), *[[0.0, 0.0]] * 5]


def test_a_run_with_a_budget_records_it_and_its_choice(tmp_path):
    lines = []
    config = replace(OPEN, learning_rate=0.1)
    out = tmp_path / "run"
    run(Recommending(), config, out, budget_minutes=1, progress=lines.append)
    record = json.loads((out / "config.json").read_text())
    assert record["chosen"]["budget_minutes"] == 1
    assert record["chosen"]["epoch_seconds"] > 0
    assert record["sampler"]["epochs"] == record["chosen"]["settings"]["epochs"] == 50
    assert any(line.startswith("chosen: ") and "for 1 minutes, in which" in line for line in lines)


@pytest.mark.parametrize(
    "sampler", [SETTINGS["shuffle"](epochs=3), BallsAndBins(160, 16, 2)], ids=["epochs", "object"]
)
def test_a_budget_beside_epochs_that_are_given_is_refused(sampler, tmp_path):
    config = replace(OPEN, sampler=sampler)
    with pytest.raises(ValueError, match="budget_minutes is the time by which epochs are chosen"):
        run(Recommending(), config, tmp_path / "run", budget_minutes=1)
    assert not list(tmp_path.iterdir())
