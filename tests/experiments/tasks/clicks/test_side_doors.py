"""Private data reach what is published through the noised sums alone: there is no side door."""

import jax
import numpy as np
import pytest

from dpsgd import RunSpec
from dpsgd.engine.feed import Layout
from dpsgd.engine.programs import digest
from dpsgd.runs.job import Job, rows_of
from dpsgd.runs.resolve import resolved
from experiments.tasks.clicks.criteo import display
from experiments.tasks.clicks.synthetic import rows as synthetic
from experiments.tasks.clicks.task import Clicks
from samplers.settings import SETTINGS

CHANGED = 17  # a training row
NEIGHBOUR = "\t".join(["{label}", *["987654321"] * 13, *["feedbeef"] * 26])


@pytest.fixture(scope="module")
def neighbours(tmp_path_factory):
    """Two stores that differ in one row: its label, all its numbers, and tokens never seen."""
    folder = tmp_path_factory.mktemp("neighbours")
    synthetic.write_raw(folder / "a.txt", 200, seed=0)
    lines = (folder / "a.txt").read_text().splitlines(keepends=True)
    assert "feedbeef" not in "".join(lines)
    lines[CHANGED] = NEIGHBOUR.format(label=1 - int(lines[CHANGED][0])) + "\n"
    (folder / "b.txt").write_text("".join(lines))
    return [display.prepare(folder / f"{name}.txt", folder / name) for name in "ab"]


def test_a_new_row_changes_no_shape_and_no_compiled_program(neighbours):
    programs, shapes = [], []
    for store in neighbours:
        task = Clicks(store.path, embedding_dim=2, max_buckets=8, hidden=(4,))
        sampler = SETTINGS["poisson"](batch_size=16)
        config = RunSpec.of(sampler, noise_multiplier=1.0, l2_clip_norm=1.0, learning_rate=0.1)
        job = Job.of(task, resolved(config, rows_of(task)[1]))
        state = job.algorithm.init(job.params)
        layout = Layout.choose(job.mechanism.sampler, job.data, block_steps=4)
        program = layout.program(job.algorithm, job.mechanism, state, job.data)
        programs.append(digest(program))
        shapes.append(jax.tree.map(np.shape, state))
    assert programs[0] == programs[1]
    assert shapes[0] == shapes[1]
