"""Raw files, and workers as bad as a pipeline's may be."""

import random

import pytest

from experiments.tasks.clicks.formats import DISPLAY, SEARCH, table_format, table_schema
from experiments.tasks.clicks.synthetic import rows as synthetic

FORMATS = {"criteo-display": DISPLAY, "criteo-search": SEARCH}
TABLE = table_format(table_schema("y", categories=("c",), numbers=("x",)))
OF_USERS = table_format(table_schema("y", numbers=("x",), user="c"))


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    """Pieces are flushed to the disk one by one: that costs these tests most of their time."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


@pytest.fixture(scope="session")
def raw_files(tmp_path_factory):
    """Three raw files of each format, of 160, 1 and 60 rows."""
    folder = tmp_path_factory.mktemp("raw")
    files = {}
    for name in FORMATS:
        synthetic.write_raw(folder / name, 221, seed=0, log=synthetic.LOGS[name])
        lines = (folder / name).read_bytes().splitlines(keepends=True)
        files[name] = [folder / f"{name}-{number}.txt" for number in range(3)]
        for path, start, stop in zip(files[name], (0, 160, 161), (160, 161, 221), strict=True):
            path.write_bytes(b"".join(lines[start:stop]))
    return files


@pytest.fixture(scope="session")
def table_files(tmp_path_factory):
    """Two tables with values in common; some hold a line end."""
    folder = tmp_path_factory.mktemp("tables")
    one, two = folder / "may.csv", folder / "june.csv"
    one.write_text("y,c,x,z\n" + "".join(f'{i % 2},"a\n{i % 37}",{i},0\n' for i in range(100)))
    two.write_text("x,y,c\n" + "".join(f'{i},{i % 2},"a\n{i % 41}"\n' for i in range(50)))
    return [one, two]


class Workers:
    """Carry out the work of a store in a random order, dying and beginning anew as they go.

    What a dead worker returned is lost; the task is given to another, also where the first did it.
    """

    def __init__(self, seed=0):
        self.random = random.Random(seed)

    def __call__(self, work):
        self.every(work.parse, work.ranges)

    def every(self, function, tasks):
        tasks = self.random.sample(list(tasks), len(tasks))
        results = []
        for task in tasks:
            attempts = [self.attempt(function, task) for _ in range(self.random.choice([1, 1, 2]))]
            results.append(self.random.choice(attempts))  # the others are lost with their workers
        return results

    def attempt(self, function, task):
        return function(task)


def contents(store):
    return {path.name: path.read_bytes() for path in store.iterdir()}
