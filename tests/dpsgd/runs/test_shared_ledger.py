"""No process takes part in a block that the ledger, which all of them see, does not declare."""

import shutil

import pytest
from several import together

from dpsgd import Mechanism, Segment
from dpsgd.runs import ledger as module
from dpsgd.runs.history import LedgerError, read
from dpsgd.runs.ledger import Ledger
from dpsgd.runs.processes import Lost
from dpsgd.runs.terms import Terms
from samplers import Deterministic


def terms():
    mechanism = Mechanism(Deterministic(num_examples=640, batch_size=64, epochs=4), 2.0, 1.0)
    return Terms(Segment(mechanism), 1e-4)


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_VISIBLE_SECONDS", 0.2)
    path = tmp_path / "ledger.jsonl"
    Ledger.create(path, terms()).close()
    return path


def shared(work, *paths, count=2):
    """Calls `work(ledger, processes)` in each process, the last path being that of all further."""

    def join(processes):
        path = paths[min(processes.index, len(paths) - 1)]
        try:
            with Ledger.open(path, processes) as ledger:
                return work(ledger, processes)
        except LedgerError as error:
            if processes.index:  # process 0 would wait three seconds
                processes.fail(str(error))
            raise

    return together(count, join)


def test_all_see_what_is_declared_before_they_go_on(path):
    def work(ledger, processes):
        for start in range(0, 24, 8):
            ledger.declare(range(start, start + 8))
            assert read(path).attempts[-1].steps.stop >= start + 8
        return ledger.history

    histories = shared(work, path, count=3)
    assert histories == [read(path)] * 3


def test_an_attempt_that_the_first_begins_is_that_of_all(path):
    def work(ledger, processes):
        ledger.declare(range(8))
        return ledger.begin(terms(), step=0, drawing="", environment={})

    found = shared(work, path)
    assert found[0] == found[1]
    assert found[0].index == 1


def test_undeclared_steps_are_taken_by_no_process(path):
    """As in a process 0 that writes its line when the sum is made."""

    def work(ledger, processes):
        if processes.first:
            ledger._append = lambda body: None
        ledger.declare(range(8))

    found = shared(work, path, count=3)
    assert all(isinstance(error, LedgerError) for error in found)
    assert "process 0 takes range(0, 8) without having declared them" in str(found[1])


@pytest.mark.parametrize("other", ["another", "a copy", "none"])
def test_processes_that_do_not_share_the_directory_take_no_step(path, tmp_path, other):
    elsewhere = tmp_path / "other" / "ledger.jsonl"
    elsewhere.parent.mkdir()
    if other == "another":
        Ledger.create(elsewhere, terms()).close()
    elif other == "a copy":
        shutil.copy(path, elsewhere)
    _, found = shared(lambda ledger, processes: ledger.declare(range(8)), path, elsewhere)
    assert isinstance(found, LedgerError)
    assert "must share one run directory" in str(found)


def test_a_line_that_could_not_be_written_lets_nobody_go_on(path, monkeypatch):
    monkeypatch.setattr("dpsgd.runs.processes._LEAVING_SECONDS", 0)

    def work(ledger, processes):
        try:
            if processes.first:
                ledger._append = full
            ledger.declare(range(8))
        except OSError as error:
            processes.fail(str(error))
            raise

    def full(body):
        raise OSError("the disk is full")

    first, second = shared(work, path)
    assert type(first) is OSError
    assert isinstance(second, Lost)
    assert "process 0: the disk is full" in str(second)
    assert not read(path).attempts[-1].steps
