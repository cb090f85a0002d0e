"""Long tests run in parts: what is left when time is over is no failure, and what fails is one."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SLOW = """
import time
def test_a(pytestconfig):
    [until] = [x for x in pytestconfig.pluginmanager.get_plugins() if hasattr(x, "until")]
    until.until = time.time() + 0.2
def test_b(): time.sleep(60)
def test_c(): pass
"""
WRAPPED = SLOW.replace(
    ": time.sleep(60)",
    """:
    try: time.sleep(60)
    except BaseException: raise ValueError from None""",
)
BETWEEN = """
import time
class Slow:
    def pytest_runtest_logstart(self): time.sleep(60)
def test_a(pytestconfig):
    pytestconfig.pluginmanager.register(Slow())
    [until] = [x for x in pytestconfig.pluginmanager.get_plugins() if hasattr(x, "until")]
    until.until = time.time() + 0.2
def test_b(): pass
"""
CASES = """
import pytest
@pytest.mark.short("one", "t*")
@pytest.mark.parametrize("case", ["one", "two", "four", "five"])
def test_it(case): assert case in ("one", "two")
"""
BROKEN = "def test_a(): pass\ndef test_b(): assert 0\ndef test_c(): pass\n"


def ran(folder, text, *options):
    """(status, what is printed) of pytest in a folder with one file of tests."""
    (folder / "test_it.py").write_text(text)
    options = ["-q", "-p", "long_tier", "-p", "no:cacheprovider", "-p", "no:xdist", *options]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--rootdir", folder, *options, "test_it.py"],
        cwd=folder,
        env=os.environ
        | {"PYTHONPATH": str(Path(__file__).parent), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("text", "begin", "expected"),
    [
        pytest.param(SLOW, 0, (0, "1 passed, 2 skipped"), marks=pytest.mark.long),
        pytest.param(WRAPPED, 0, (0, "1 passed, 2 skipped"), marks=pytest.mark.long),
        # The last and the first pass, the second is cut short, and the third is not begun.
        (f"{WRAPPED}def test_d(): pass\n", 3, (0, "2 passed, 2 skipped")),
        (BROKEN, 0, (1, "1 failed, 2 passed")),
    ],
)
def test_what_is_left_is_no_failure_and_what_fails_is_one(tmp_path, text, begin, expected):
    options = "-p", "pytest_timeout", "-o", "timeout=300", "--begin", str(begin), "--until", "1e10"
    status, printed = ran(tmp_path, text, *options)
    assert (status, re.match(r"(\d \w+, )*\d \w+", printed.splitlines()[-1]).group()) == expected
    left = expected[1].count("skipped") and int(expected[1].split(", ")[1][0])
    assert f"{text.count('def test_') - left} long tests ran, {left} are left" in printed


def test_timeout_between_phases_ends_only_that_test(tmp_path):
    options = "-p", "pytest_timeout", "-o", "timeout=300", "--until", "1e10"
    status, printed = ran(tmp_path, BETWEEN, *options)
    assert (status, printed.splitlines()[-1][:8]) == (0, "1 passed")
    assert "INTERNALERROR" not in printed


@pytest.mark.long
def test_tests_that_passed_are_not_run_again(tmp_path):
    passed = tmp_path / "passed"
    assert ran(tmp_path, BROKEN, "--passed", passed)[0] == 1
    status, printed = ran(tmp_path, BROKEN.replace("0", "1"), "--passed", passed)
    assert status == 0
    assert "1 passed, 2 deselected" in printed


def test_unnamed_cases_are_long_and_unknown_names_are_errors(tmp_path):
    options = "-o", "markers=long", "--strict-markers"
    status, printed = ran(tmp_path, CASES, *options, "-m", "not long")
    assert status == 0
    assert "2 passed, 2 deselected" in printed
    status, printed = ran(tmp_path, CASES.replace('"t*"', '"six"'), *options)
    assert status
    assert "test_it.py::test_it has no case 'six': it has ['one', 'two', 'four', 'five']" in printed
