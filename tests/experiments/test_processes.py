"""Worker processes end with the process that started them, however it ends."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiments.processes import each
from experiments.tasks.streams import DataError

STARTED = """
import os, time
from pathlib import Path

def work(name):
    Path(name).write_text(str(os.getpid()))
    time.sleep(600)
"""
STARTS = {
    "each": "from experiments.processes import each; [*each(work, ['0', '1', '2'], 2)]",
    "alone": "from experiments.benchmarks.case import alone; alone(work, '0')",
    "a sweep": """from experiments.sweeps import workers
    worker = workers._Worker({}, set())
    Path("0").write_text(str(worker.process.pid))
    time.sleep(600)""",
}


def is_running(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are listed in /proc")
@pytest.mark.parametrize("how", STARTS)
def test_workers_end_with_a_parent_that_is_killed(tmp_path, how):
    script, workers = tmp_path / "script.py", 2 if how == "each" else 1
    script.write_text(f'{STARTED}\nif __name__ == "__main__":\n    {STARTS[how]}\n')
    root = Path(__file__).parents[2]
    parent = subprocess.Popen(
        [sys.executable, script], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(root)}
    )
    until = time.monotonic() + 120
    names = [tmp_path / str(number) for number in range(workers)]
    while not all(name.exists() and name.read_text() for name in names):
        assert time.monotonic() < until
        assert parent.poll() is None
        time.sleep(0.05)
    pids = [int(name.read_text()) for name in names]
    assert all(map(is_running, pids))
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    until = time.monotonic() + 30
    try:
        while any(map(is_running, pids)):
            assert time.monotonic() < until, "a worker goes on without its parent"
            time.sleep(0.05)
    finally:
        for pid in filter(is_running, pids):
            os.kill(pid, signal.SIGKILL)


def refused(line):
    raise DataError(Path("u.data"), "found 9", line=line)


def test_an_error_of_a_worker_keeps_its_message():
    with pytest.raises(ValueError, match=r"^u\.data, line 3: found 9$"):
        list(each(refused, [3], 1))
