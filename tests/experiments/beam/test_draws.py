"""Whoever draws which rows, and whoever dies: the batches of one process, bit for bit."""

import dataclasses
from functools import partial

import numpy as np
import pytest

from dpsgd.engine.batch_files import BatchFiles, Draw, draw_here, write_manifest
from experiments.beam import draws
from experiments.beam.draws import check_sampler, drawn_by
from samplers import BallsAndBins, Deterministic, FullBatch, Multistage, Poisson, Shuffle, UnitTree
from samplers.plans import CHUNK
from tests.experiments.beam.conftest import Workers, contents

ROWS = CHUNK + 5_000
SEED = 4321


@pytest.fixture(autouse=True)
def small_tasks(monkeypatch):
    """One chunk each, of the two that there are."""
    monkeypatch.setattr(draws, "CHUNKS", 1)


def columns():
    return {
        "x": np.arange(2 * ROWS, dtype=np.float32).reshape(ROWS, 2),
        "y": np.arange(ROWS, dtype=np.int64) % 251 == 0,
    }


class DrawingWorkers(Workers):
    """The same, for batches."""

    def __call__(self, work):
        parts = self.every(lambda task: list(work.part(*task)), work.tasks())
        files = {file: [] for file in range(work.draw.num_files)}
        flat = [pair for found in parts for pair in found]
        for file, part in self.random.sample(flat, len(flat)):
            files[file].append(part)
        self.every(lambda file: work.write(file, files[file]), files)


class Mortal(DrawingWorkers):
    """Die in the midst of writing a file, which others write again."""

    def __init__(self, seed, monkeypatch):
        super().__init__(seed)
        self.deaths, usual = 0, draws.write_file

        def dying(*arguments):
            digest = usual(*arguments)
            if self.random.random() < 0.4:
                self.deaths += 1
                raise KeyboardInterrupt
            return digest

        monkeypatch.setattr(draws, "write_file", dying)

    def attempt(self, function, task):
        while True:
            try:
                return function(task)
            except KeyboardInterrupt:
                continue


def drawn(folder, draw, write):
    folder.mkdir(0o700)
    write_manifest(folder, draw, SEED, write(folder, draw, SEED, columns()), columns())
    return contents(folder)


def draw_of(sampler, first_step=0, files=4):
    draw = Draw.plan(sampler, columns(), run="a run", attempt=0, first_step=first_step)
    return dataclasses.replace(draw, steps_per_file=-(-(sampler.num_steps - first_step) // files))


CASES = [
    (Poisson(ROWS, 9_000, 2, max_batch_size=9_050), 0),
    (Poisson(ROWS, 9_000, 2, max_batch_size=4_000, overflow="accumulate"), 3),
    (Poisson(ROWS, 9_000, 2, max_batch_size=4_000, overflow="accumulate"), 11),
    (BallsAndBins(ROWS, 9_000, 2, max_batch_size=9_100), 0),
    (BallsAndBins(ROWS, 9_000, 2, assignment="fixed", max_batch_size=9_100), 5),
    (Deterministic(ROWS, 9_000, 2), 1),
    (Shuffle(ROWS, 9_000), 0),
    (FullBatch(ROWS, 2), 0),
]


@pytest.mark.parametrize(("sampler", "first_step"), CASES, ids=lambda value: f"{value!r:.40}")
def test_batches_of_many_workers_are_those_of_one_process(tmp_path, sampler, first_step):
    draw = draw_of(sampler, first_step)
    local = drawn(tmp_path / "local", draw, draw_here)
    assert drawn(tmp_path / "many", draw, drawn_by(DrawingWorkers(1), columns)) == local
    files = BatchFiles(tmp_path / "many", draw, SEED, columns())
    read = [steps for steps, _, _ in files.blocks(first_step, 64)]
    assert [step for steps in read for step in steps] == list(range(first_step, sampler.num_steps))


def test_workers_that_die_lose_and_double_nothing(tmp_path, monkeypatch):
    draw = draw_of(CASES[0][0])
    local = drawn(tmp_path / "local", draw, draw_here)
    workers = Mortal(2, monkeypatch)
    assert drawn(tmp_path / "many", draw, drawn_by(workers, columns)) == local
    assert workers.deaths > 0


def test_a_file_in_which_nobody_takes_part_is_a_file(tmp_path):
    sampler = Poisson(ROWS, 1, 1)
    draw = dataclasses.replace(draw_of(sampler), first_step=sampler.num_steps - 7, steps_per_file=1)
    local = drawn(tmp_path / "local", draw, draw_here)
    assert drawn(tmp_path / "many", draw, drawn_by(DrawingWorkers(), columns)) == local
    assert len(local) == 7 + 2


def test_a_file_that_was_not_written_is_named(tmp_path):
    class Losing(DrawingWorkers):
        def __call__(self, work):
            super().__call__(work)
            (work.path / "00000002.batches.sha256").unlink()

    with pytest.raises(ValueError, match=r"without writing 00000002.batches"):
        drawn(tmp_path / "many", draw_of(CASES[0][0]), drawn_by(Losing(), columns))


def test_what_travels_to_workers_holds_no_secret(tmp_path):
    import pickle

    seen = []

    def keep(work):
        seen.append(pickle.dumps(work))
        assert (tmp_path / "many" / "seed").stat().st_mode & 0o777 == 0o600
        DrawingWorkers()(work)

    drawn(tmp_path / "many", draw_of(CASES[0][0]), drawn_by(keep, partial(columns)))
    assert str(SEED).encode() not in seen[0]
    assert SEED.to_bytes(2, "little") not in seen[0]
    assert not (tmp_path / "many" / "seed").exists()


def test_units_whose_rows_hang_together_are_refused():
    tree = UnitTree.from_columns({"user": np.repeat(np.arange(10), 4)})
    with pytest.raises(ValueError, match="draws whole units"):
        check_sampler(Multistage(tree, (2, 2), clipped_level=1))
