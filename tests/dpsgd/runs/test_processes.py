"""Several processes are one run: they agree, or they say in what they do not, and end together."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import several
from drivers import passed
from jax._src import distributed
from several import Store

from dpsgd.runs.processes import Lost, Processes, launched_by_cluster, together


def test_all_get_what_the_first_gives_and_what_all_give_in_order():
    def work(processes):
        asked = [processes.any(processes.index == 1 and turn == 2) for turn in range(4)]
        return processes.share({"of": processes.index}), processes.gather(processes.index), asked

    given = {"of": 0}, [0, 1, 2], [False, False, True, False]  # known to all in the same turn
    assert several.together(3, work) == [given] * 3


def test_one_process_alone_is_given_back_what_it_gives():
    alone = Processes()
    alone.fail("nobody is told")
    alone.check_alike({"data": 1})
    assert (alone.share("a"), alone.gather("b"), alone.any(True), alone.any(False)) == (
        "a", ["b"], True, False
    )  # fmt: skip


def test_messages_that_all_have_read_are_not_kept():
    store = Store()
    several.together(2, lambda one: [one.any(False) or one.share(1) for _ in range(99)], store)
    assert 0 < len(store.values) < 10


@pytest.mark.parametrize("differs", ["configuration", "data"])
def test_processes_name_a_difference_from_single_use_digests(differs):
    stores = Store(), Store()

    def work(processes):
        parts = {"configuration": {"epochs": 3}, "data": "a secret", "code": "5"}
        if processes.index == 2:
            parts[differs] = "another"
        processes.check_alike(parts)

    for store in stores:
        found = several.together(3, work, store)
        (line,) = {str(error) for error in found if type(error) is ValueError}
        assert f"process 2 and process 0 differ in {differs}:" in line
        assert "a secret" not in str(store.values)
    assert dict(stores[0].values) != dict(stores[1].values)


def test_whoever_waits_for_one_that_failed_is_told_why():
    def work(processes):
        if processes.index == 1:
            processes.fail("the disk is full")
            return None
        return processes.gather(0)

    first, _, third = several.together(3, work)
    for error in (first, third):
        assert isinstance(error, Lost)
        assert str(error) == "another process ended; process 1: the disk is full"


def test_one_that_does_not_come_is_named():
    def work(processes):
        if processes.index != 1:
            processes.gather(None, patience=0.1)

    first, _, third = several.together(3, work)
    assert str(first) == "another process did not answer for 0 s: process 1 of 3"
    assert isinstance(third, Lost)


def test_a_run_after_the_processes_parted_waits_for_nobody(monkeypatch):
    state = distributed.global_state
    for count, client in ((2, object()), (3, object()), (1, None)):
        monkeypatch.setattr(state, "client", client)
        monkeypatch.setattr(state, "process_id", count - 1)
        monkeypatch.setattr(state, "num_processes", count)
        current = Processes.current()
        assert (current.index, current.count) == (count - 1, count)
        assert Processes.current() is current


# --- Whole runs, of real processes ---------------------------------------------------------------

DRIVER = Path(__file__).with_name("process_driver.py")


@pytest.mark.long
@pytest.mark.processes
def test_two_killed_processes_resume_to_the_bits_of_two_devices():
    passed(f"{DRIVER}::test_killed")


@pytest.mark.processes
@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "scenario",
    [
        "asked_to_stop", "between_line_and_sum", "calibrated", "lazy", "mutants", "other_number",
        "sharded", "shards", "stands_still", "what_differs",
    ],
)  # fmt: skip
def test_what_becomes_of_several_processes(scenario):
    passed(f"{DRIVER}::test_{scenario}")


CLUSTERS = [
    {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2"},
    {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"},
]
ALONE = [
    {},
    {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
    {"SLURM_NTASKS": "4"},  # a shell of an allocation
    {"KUBERNETES_SERVICE_HOST": "10.0.0.1"},  # a pod by itself
]


@pytest.mark.parametrize("variables", [*CLUSTERS, *ALONE], ids=str)
def test_cluster_launches_of_several_processes_are_detected(variables, monkeypatch):
    for name in {name for one in (*CLUSTERS, *ALONE) for name in one}:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert launched_by_cluster() == (variables in CLUSTERS)


@pytest.mark.parametrize("given", [(None, None, None), ("127.0.0.1:1", 1, 0)])
def test_one_process_has_no_watchdog_and_meets_nobody(given, tmp_path, monkeypatch):
    monkeypatch.setattr("dpsgd.runs.processes.launched_by_cluster", lambda: False)
    with together(*given, watchdog_seconds=1.0, out=tmp_path) as processes:
        assert (processes.index, processes.count) == (0, 1)


@pytest.mark.processes
@pytest.mark.long
def test_a_port_that_is_taken_ends_the_command_in_one_line(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        command = "from experiments.cli import main; raise SystemExit(main())"
        words = ["resume", str(tmp_path / "run"), "--process", f"0/2@{place}"]
        done = subprocess.run(
            [sys.executable, "-c", command, *words],
            cwd=DRIVER.parents[3],
            env=dict(os.environ, PYTHONPATH=str(DRIVER.parents[3]), JAX_PLATFORMS="cpu"),
            capture_output=True,
            text=True,
        )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert f"process 0 of 2 did not meet the others at {place}" in line
