"""Which cases of a test are long, and how long tests are run in parts.

They are begun anywhere, left at a time, or gone on with.

`scripts/test` says when. A test that is left is skipped and counted as such, and is no failure.
"""

import time
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

LEFT = "left: the time for long tests is over"


def pytest_addoption(parser):
    group = parser.getgroup("long tests, in parts")
    group.addoption("--begin", type=int, help="the number of the test to begin with, modulo all")
    group.addoption("--until", type=float, help="when the rest is left, in seconds since 1970")
    group.addoption("--passed", type=Path, help="file of tests that passed: not run again")


SHORT = "short(*cases): the cases of the short tier, by name or pattern; all others are long"


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector, name):
    """The cases that the mark `short` does not name become long; a pattern names at least one."""
    found = yield
    for item in found if isinstance(found, list) else ():
        for mark in item.iter_markers("short"):
            cases = [each.callspec.id for each in found]
            for pattern in mark.args:
                if not any(fnmatchcase(case, pattern) for case in cases):
                    told = f"{collector.nodeid}::{name} has no case {pattern!r}: it has {cases}"
                    raise pytest.UsageError(told)
            if not any(fnmatchcase(item.callspec.id, pattern) for pattern in mark.args):
                item.add_marker(pytest.mark.long)
    return found


def pytest_configure(config):
    config.addinivalue_line("markers", SHORT)
    begin, until, passed = map(config.getoption, ("begin", "until", "passed"))
    if begin is not None:
        config.pluginmanager.register(Begin(begin))
    if until is not None:
        config.pluginmanager.register(Until(until))
    if passed is not None:
        config.pluginmanager.register(Passed(passed, keeps=not hasattr(config, "workerinput")))


class Begin:
    """Begins with one test, goes on in order, and comes to those before it in the end."""

    def __init__(self, number):
        self.number = number

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        first = self.number % max(len(items), 1)
        items[:] = items[first:] + items[:first]


class Until:
    """Leaves the test that runs at a time, and all after it; says what ran and what is left."""

    def __init__(self, until):
        self.until = until

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
        own = item.get_closest_marker("timeout")
        limit = own.args[0] if own else float(item.config.getini("timeout") or "inf")
        remaining = self.until - time.time()
        if remaining > 0:
            item.add_marker(pytest.mark.timeout(min(limit, remaining)), append=False)
        try:
            return (yield)
        except pytest.fail.Exception:  # the limit came between two phases of the test
            if time.time() < self.until:
                raise
            return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self):
        if time.time() >= self.until:
            pytest.skip(LEFT)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        if report.failed and time.time() >= self.until:  # it was cut short: it shows nothing
            report.outcome, report.longrepr = "skipped", (str(item.path), None, LEFT)
        return report

    def pytest_terminal_summary(self, terminalreporter):
        ran, left = Counter(), Counter()
        for kind in ("passed", "failed", "error", "skipped"):
            for report in terminalreporter.stats.get(kind, ()):
                is_left = kind == "skipped" and LEFT in report.longrepr[2]
                (left if is_left else ran)[report.nodeid.partition("::")[0]] += 1
        terminalreporter.section(f"{ran.total()} long tests ran, {left.total()} are left")
        for file, count in ran.items():
            terminalreporter.write_line(f"{count:4} ran, {left.pop(file, 0):4} left: {file}")
        terminalreporter.write_line(f"{left.total():9} left in {len(left)} others")


class Passed:
    """Leaves out the tests that a file names, and adds the names of those that pass."""

    def __init__(self, file, *, keeps):
        self.file, self.keeps = file, keeps
        self.names = set(file.read_text().splitlines()) if file.exists() else set()
        self.failed = set()

    def pytest_collection_modifyitems(self, config, items):
        done = [item for item in items if item.nodeid in self.names]
        items[:] = [item for item in items if item.nodeid not in self.names]
        config.hook.pytest_deselected(items=done)

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.failed.add(report.nodeid)
        elif self.keeps and report.when == "teardown" and report.nodeid not in self.failed:
            with self.file.open("a") as file:
                file.write(f"{report.nodeid}\n")
