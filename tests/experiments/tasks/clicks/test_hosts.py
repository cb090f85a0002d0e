"""A store whose shards lie on several hosts, each of which has those of its shards."""

import numpy as np
import pytest

from dpsgd import RunSpec, run
from dpsgd.core.queries import FullSums
from dpsgd.engine import calibration as calibrations
from dpsgd.engine.feed import Layout
from experiments.tasks.clicks.store import Store
from experiments.tasks.clicks.task import Clicks
from experiments.tasks.clicks.writer import StoreWriter
from samplers.settings import SETTINGS


@pytest.fixture
def whole(store, tmp_path):
    """A store of 160 training rows, 20 to validate and 20 to test, in shards of 40."""
    rows = Store.open(store)
    with StoreWriter(tmp_path / "store", rows.schema, hash_seed=0, rows_per_shard=40) as writer:
        for split in rows.splits:
            for block in rows.blocks(split):
                writer.append(block)
        return writer.finish(splits=rows.splits, source={"by": "test"})


def without(whole, shard):
    """The task as it is for one of several processes which lacks files of a shard."""
    for column in ("label", "categories"):
        (whole.path / whole.shards[shard].files[column]["name"]).unlink()
    task = Clicks(whole.path, model="small", embedding_dim=2, max_buckets=8, hidden=(4,))
    task.__dict__["store"] = Store.open(whole.path, in_part=True)
    return task


def refused(task, out, **settings):
    sampler = SETTINGS["balls-and-bins"](batch_size=16, epochs=3, num_shards=2)
    config = RunSpec.of(sampler, noise_multiplier=1.0, audit=False, **settings)
    with pytest.raises(ValueError, match="is incomplete: 00002") as caught:
        run(task, config, out)
    assert not out.exists()
    return str(caught.value)


def test_a_run_that_is_to_read_rows_of_other_hosts_is_refused_before_it_begins(whole, tmp_path):
    line = refused(without(whole, 2), tmp_path / "run", calibration="none")
    assert "and this process trains on rows 0 to 159" in line


def test_a_calibration_by_sums_over_rows_of_other_hosts_is_refused(whole, tmp_path, monkeypatch):
    monkeypatch.setattr(
        Layout, "process_shards", lambda self, sampler: range(1)
    )  # their rows are here
    monkeypatch.setattr(calibrations, "calibration_sums", lambda *which, **about: FullSums(3, 4.0))
    line = refused(without(whole, 2), tmp_path / "run", calibration="platt")
    assert "begin it with --calibration none" in line


def test_whoever_evaluates_needs_the_rows_for_it(whole):
    task = without(whole, -1)
    assert np.sum(task.columns()["label"]) > 0
    with pytest.raises(ValueError, match=r"is incomplete: 00004.* is missing"):
        task.check()
