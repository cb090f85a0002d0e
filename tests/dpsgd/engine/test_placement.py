"""Several devices train what one does: the same sums, noise and state, and little is exchanged."""

import json
import os
from pathlib import Path

import jax
import pytest
from drivers import passed

from dpsgd import Placement
from dpsgd.engine.placement import check_placement


@pytest.mark.long
@pytest.mark.audit
@pytest.mark.timeout(3600)
def test_eight_devices_do_what_one_does():
    """Tests of a process of their own, as JAX counts its devices once."""
    # Eight devices on a busy machine wait for each other longer than XLA thinks right.
    patience = "--xla_cpu_collective_call_terminate_timeout_seconds=600"
    flags = f"{os.environ.get('XLA_FLAGS', '')} {patience}"
    passed(Path(__file__).with_name("placement_driver.py"), XLA_FLAGS=flags)


def test_a_placement_of_one_device_is_what_it_says():
    placement = Placement.default()
    assert placement.devices == tuple(jax.devices())
    assert placement.num_processes == 1
    assert placement == Placement(tuple(jax.devices()))
    assert json.loads(json.dumps(placement.describe())) == placement.describe()
    assert Placement.default(shard_rows_from=1).describe() != placement.describe()


def test_devices_of_other_processes_alone_are_refused(monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with pytest.raises(ValueError, match=r"no device of this process, 1, only of \[0\]: pass"):
        check_placement(Placement.default())


@pytest.mark.parametrize("size", [1, 7, 8, 9, 1000])
@pytest.mark.parametrize("unit", [1, 3])
def test_places_are_sharded_in_whole_units(size, unit):
    placement = Placement.default()
    width = placement.width(size * unit, unit)
    assert width % (unit * len(placement.devices)) == 0
    assert 0 <= width - size * unit < unit * len(placement.devices)


@pytest.mark.parametrize("devices", [(), tuple(jax.devices()[:1] * 2)])
def test_devices_are_one_or_more_and_each_once(devices):
    with pytest.raises(ValueError, match="one or more, each once"):
        Placement(devices)


def test_a_table_is_sharded_from_a_size_that_is_one():
    with pytest.raises(ValueError, match="at least 1, got 0"):
        Placement.default(shard_rows_from=0)
