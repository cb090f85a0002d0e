"""A dry run measures a run on generated rows, reads no private row and writes nothing."""

import math
from dataclasses import dataclass

import pytest
from test_resolve import OPEN
from tiny_task import Line, Words, config_of

from accounting import epsilon
from dpsgd.runs import dry_run as module
from dpsgd.runs.dry_run import Resized, dry_run, time_steps
from dpsgd.runs.job import Job, rows_of
from dpsgd.runs.resolve import resolve
from samplers.settings import SETTINGS


class Unreadable:
    """A column that has a shape and a dtype, and refuses to give a row."""

    def __init__(self, column):
        self.shape, self.dtype, self.ndim = column.shape, column.dtype, column.ndim

    def __len__(self):
        return self.shape[0]

    def __getitem__(self, rows):
        raise AssertionError("a private row is read")

    def __array__(self, *args, **kwargs):
        raise AssertionError("the private rows are read")


@dataclass(frozen=True)
class ClosedLine(Line):
    def columns(self):
        return {name: Unreadable(column) for name, column in super().columns().items()}


@dataclass(frozen=True)
class ClosedWords(Words):
    def columns(self):
        return {name: Unreadable(column) for name, column in super().columns().items()}


CASES = {
    "given": (ClosedLine(), config_of()),
    "open": (ClosedLine(), OPEN.but(target_delta=1e-3)),
    "lazy": (ClosedWords(), config_of(tables="lazy", tables_learning_rate=0.5)),
    "size not there": (Resized(Line(rows=3), 160), config_of()),
}


@pytest.mark.short("open", "given")
@pytest.mark.parametrize(("task", "spec"), CASES.values(), ids=CASES)
def test_a_dry_run_reads_no_row_and_prices_the_run(task, spec, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = dry_run(task, spec)
    open_task = Words() if isinstance(task, Words) else Line()
    mechanism = resolve(spec, open_task, rows_of(open_task)).mechanism
    assert (found.steps, found.parameters > 2) == (mechanism.sampler.num_steps, True)
    assert found.padded_batch_size == mechanism.sampler.padded_batch_size
    assert found.program_bytes > 0
    assert 0 < found.timing.step <= 3600 * found.hours
    expected = epsilon(mechanism.privacy(), found.guarantee.delta)
    assert found.guarantee.epsilon.upper == expected.upper
    assert not list(tmp_path.iterdir())


SAMPLERS = [SETTINGS["balls-and-bins"](48, 1), SETTINGS["poisson"](48, 1)]


@pytest.mark.short("4-1000-poisson", "1-1000-balls-and-bins")
@pytest.mark.parametrize("sampler", SAMPLERS, ids=["balls-and-bins", "poisson"])
@pytest.mark.parametrize(("num_devices", "num_examples"), [(4, 160), (1, 1000), (4, 1000)])
def test_what_is_not_there_is_timed_by_a_share(num_devices, num_examples, sampler, monkeypatch):
    clock, places = Clock(), set()

    def train_blocks(algorithm, mechanism, state, rows, **options):
        places.add(mechanism.sampler.padded_batch_size)
        assert {len(column) for column in rows.values()} == {mechanism.sampler.num_examples}
        added = mechanism.sampler.num_examples - num_examples
        assert 0 <= added < mechanism.sampler.padded_batch_size
        clock.now += 0.5 + 2.0 * (mechanism.sampler.num_steps - int(state.step))
        yield type("Block", (), {"state": state})

    monkeypatch.setattr(module, "train_blocks", train_blocks)
    spec = config_of(sampler=sampler)
    task = Line(rows=num_examples)
    assumed = task if num_devices > 1 else Resized(Line(), num_examples)
    found = dry_run(assumed, spec, placement=num_devices, clock=clock)
    mechanism = resolve(spec, task, rows_of(task)).mechanism
    assert found.steps == mechanism.sampler.num_steps
    assert found.padded_batch_size == mechanism.sampler.padded_batch_size
    assert places == {math.ceil(found.padded_batch_size / num_devices)}
    assert found.guarantee.epsilon == epsilon(mechanism.privacy(), found.guarantee.delta)
    assert found.hours * 3600 == pytest.approx(2.5 + 2.0 * found.steps)


class Clock:
    """Goes forward where something takes time, and at no other moment."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.mark.parametrize(
    ("steps", "flush_every", "times"), [(1, None, 1), (3, None, 1), (40, 64, 1), (40, 8, 5)]
)
def test_epoch_time_includes_startup_and_final_work(steps, flush_every, times, monkeypatch):
    clock = Clock()

    def train_blocks(algorithm, mechanism, state, rows, **options):
        left = mechanism.sampler.num_steps - int(state.step)
        clock.now += 0.5 + 2.0 * left
        yield type("Block", (), {"state": state})

    monkeypatch.setattr(module, "train_blocks", train_blocks)
    sampler = SETTINGS["shuffle"](batch_size=160 // steps, epochs=1)
    job = Job.of_task(Line(), resolve(config_of(sampler=sampler), Line(), rows_of(Line())))
    found = time_steps(job, flush_every=flush_every, clock=clock)
    assert found.first == 2.5
    assert found.epoch == pytest.approx(0.5 * times + 2.0 * job.mechanism.sampler.steps_per_epoch)
