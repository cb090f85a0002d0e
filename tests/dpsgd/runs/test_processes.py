"""Several processes are one run: they agree, or they say in what they do not, and end together."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from several import Store, together

from dpsgd.runs.processes import Lost, Processes


def test_all_get_what_the_first_gives_and_what_all_give_in_order():
    def work(processes):
        return processes.share({"of": processes.index}), processes.gather(processes.index)

    assert together(3, work) == [({"of": 0}, [0, 1, 2])] * 3


def test_one_process_alone_is_given_back_what_it_gives():
    alone = Processes()
    alone.barrier()
    alone.fail("nobody is told")
    alone.check_alike({"data": 1})
    assert (alone.share("a"), alone.gather("b"), alone.any(True), alone.any(False)) == (
        "a", ["b"], True, False
    )  # fmt: skip


def test_a_request_that_one_has_is_known_to_all_in_the_same_turn():
    def work(processes):
        return [processes.any(processes.index == 1 and turn == 2) for turn in range(4)]

    assert together(3, work) == [[False, False, True, False]] * 3


def test_messages_that_all_have_read_are_not_kept():
    store = Store()
    together(
        2, lambda processes: [processes.any(False) or processes.share(1) for _ in range(99)], store
    )
    assert len(store.values) < 10


@pytest.mark.parametrize("differs", ["configuration", "data"])
def test_what_differs_is_named_by_all_alike_and_only_digests_travel(differs):
    store = Store()

    def work(processes):
        parts = {"configuration": {"epochs": 3}, "data": "a secret", "code": "5"}
        if processes.index == 2:
            parts[differs] = "another"
        processes.check_alike(parts)

    found = together(3, work, store)
    lines = {str(error) for error in found if type(error) is ValueError}
    assert len(lines) == 1
    assert f"process 2 has not what process 0 has: {differs};" in lines.pop()
    assert "a secret" not in str(store.values)


def test_equal_secrets_have_other_digests_the_next_time():
    stores = Store(), Store()
    for store in stores:
        assert together(2, lambda p: p.check_alike({"data": "a secret"}), store) == [None, None]
    first, second = (dict(store.values) for store in stores)
    assert first != second


def test_whoever_waits_for_one_that_failed_is_told_why():
    def work(processes):
        if processes.index == 1:
            processes.fail("the disk is full")
            return None
        return processes.gather(0)

    first, _, third = together(3, work)
    for error in (first, third):
        assert isinstance(error, Lost)
        assert str(error) == "another process ended; process 1: the disk is full"


def test_one_that_does_not_come_is_named():
    def work(processes):
        if processes.index != 1:
            processes.barrier(patience=0.1)

    first, _, third = together(3, work)
    assert str(first) == "another process did not answer for 0 s: process 1 of 3"
    assert isinstance(third, Lost)


# --- Whole runs, of real processes ---------------------------------------------------------------

DRIVER = Path(__file__).with_name("process_driver.py")


def drive(folder, *arguments):
    done = subprocess.run(
        [sys.executable, DRIVER, *map(str, (folder, *arguments))],
        cwd=DRIVER.parents[3],
        env=dict(os.environ, PYTHONPATH=str(DRIVER.parents[3])),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.processes
def test_two_processes_that_are_killed_go_on_to_the_bits_of_one_with_two_devices(tmp_path):
    assert len(drive(tmp_path, "killed")) == 3
