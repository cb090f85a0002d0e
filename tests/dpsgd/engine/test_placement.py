"""Several devices train what one does: the same sums, noise and state, and little is exchanged."""

import json
from pathlib import Path

import jax
import pytest
from placements import driven

from dpsgd import Placement

pytestmark = pytest.mark.timeout(900)  # the first test waits for the driver

DRIVER = Path(__file__).with_name("placement_driver.py")
NUMBERS, DIAGNOSTICS = 1024 * 6 + 6, 4
"""Of the driver's model, and of what a step says of its batch."""

SHORT = ("8", "8, sharded")
LONG = ("1", "2", "4, streamed", "8, exact", "4, sharded", "8, sharded, bands")


@pytest.fixture(scope="module")
def short():
    return driven(DRIVER, "short")


@pytest.fixture(scope="module")
def long():
    return driven(DRIVER, "long")


def check_parameters(found, name):
    assert found["steps"] == 20
    assert found["off"] <= 1e-6
    assert found["table"] == ("P('devices',)" if "sharded" in name else "P()")


@pytest.mark.long
@pytest.mark.parametrize("name", SHORT)
def test_parameters_after_20_steps_are_those_of_one_device(short, name):
    check_parameters(short["parameters"][name], name)


@pytest.mark.long
@pytest.mark.parametrize("name", LONG)
def test_parameters_after_20_steps_are_those_of_one_device_in_each_layout(long, name):
    check_parameters(long["parameters"][name], name)


@pytest.mark.long
def test_a_step_of_replicated_parameters_has_one_reduction_behind_all_passes(short):
    # At depth 1: in the loop over steps, and in none over passes or microbatches.
    [only] = short["parameters"]["8"]["collectives"]
    size = 4 * (NUMBERS + DIAGNOSTICS)
    assert only == {"kind": "all-reduce", "size": size, "depth": 1}


@pytest.mark.long
@pytest.mark.parametrize("name", SHORT)
def test_each_device_computes_its_part_of_a_batch(short, name):
    # 11 places of a pass are 16 on 8 devices: 2 microbatches of 1 on each.
    assert 2 in short["parameters"][name]["trips"]


@pytest.mark.long
def test_nothing_of_the_size_of_a_table_that_is_sharded_is_exchanged(short):
    collectives = short["parameters"]["8, sharded"]["collectives"]
    assert collectives
    assert max(one["size"] for one in collectives) < NUMBERS


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    ["psum", "pmean", "all_gather", "ppermute", "axis_index", "psum of gradients"],
)
def test_a_loss_that_reaches_for_other_devices_is_refused(short, name):
    assert "examples could mix" in short["refused"][name]


@pytest.mark.long
def test_a_loss_that_reaches_for_other_devices_finds_none_where_tables_are_sharded(short):
    assert "unbound axis name" in short["refused"]["psum, sharded"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("rows", "['table'] is to be sharded by rows, and 1,022 do not divide by 8 devices"),
        ("exact, sharded", "leave out shard_rows_from"),
    ],
)
def test_what_cannot_be_sharded_is_refused(short, name, message):
    assert message in short["refused"][name]


FAILED = {
    "noise once a device": "noise is what key, step and place give, in every leaf",
    "noise on the first alone": "every device has the same state",
    "the batch on every device": "an example moves the sum by at most C",
    "parts that are not added up": "every device has the same state",
    "padding that counts": "padding is inert",
    "rows of another device": "a NaN example moves the sum by at most C",
}


@pytest.mark.long
@pytest.mark.audit
def test_an_audit_finds_out_what_devices_do_wrong(short):
    name = "the batch on every device"
    assert FAILED[name] in short["audits"][name]


@pytest.mark.audit
@pytest.mark.long
@pytest.mark.parametrize("name", ["sound", "sound, streamed, several passes", "sound, sharded"])
def test_an_audit_passes_what_devices_do_right(long, name):
    assert not long["audits"][name]


@pytest.mark.audit
@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        "noise once a device",
        "noise on the first alone",
        "parts that are not added up",
        "padding that counts",
        "rows of another device",
    ],
)
def test_an_audit_finds_out_whatever_devices_do_wrong(long, name):
    assert FAILED[name] in long["audits"][name]


@pytest.mark.long
@pytest.mark.parametrize("name", ["replicated", "sharded"])
def test_a_layout_repeats_its_bits_and_goes_on_in_them(long, name):
    assert long["repeats"][name]["same"] == [True, True]


@pytest.mark.long
@pytest.mark.parametrize("name", ["replicated", "sharded"])
def test_the_state_that_training_is_given_stays_the_callers(long, name):
    assert long["repeats"][name]["kept"]


@pytest.mark.long
@pytest.mark.parametrize("law", ["independent", "bands", "buffered", "exact"])
def test_noise_is_bit_equal_on_every_layout(long, law):
    assert all(long["noise"][law])


@pytest.mark.long
@pytest.mark.parametrize("law", ["independent", "bands", "buffered"])
def test_noise_and_update_exchange_nothing(long, law):
    assert long["silent"][law] == []


@pytest.mark.long
def test_of_85_million_parameters_a_device_holds_an_eighth_and_exchanges_less_than_a_quarter(long):
    found = long["large"]
    table, dense = found["table"], found["dense"]
    dealt = found["sharded"]
    assert max(one["size"] for one in dealt["collectives"]) < table / 4
    state = 3 * table / 8 + dense
    assert state <= dealt["given_away"] <= state + 4_096
    assert dealt["temporary"] < found["alone"]["temporary"] / 2


@pytest.mark.long
def test_of_85_million_parameters_on_every_device_there_is_one_reduction(long):
    found = long["large"]
    [only] = found["8"]["collectives"]
    assert only["size"] == found["table"] + found["dense"] // 3 + 4 * DIAGNOSTICS
    assert only["depth"] == 1


@pytest.mark.long
def test_of_a_batch_of_8192_each_device_has_1024(long):
    # In microbatches of 512; activations have 256 columns, and so has a dense layer of 364 rows.
    found = long["large"]
    assert 16 in found["alone"]["trips"]
    for name in ("8", "sharded"):
        assert 2 in found[name]["trips"]
        assert 16 not in found[name]["trips"]
        assert 512 in found[name]["rows"]
        assert max(found[name]["rows"]) <= 512


def test_a_placement_of_one_device_is_what_it_says():
    placement = Placement.default()
    assert placement.devices == tuple(jax.devices())
    assert placement.num_processes == 1
    assert placement == Placement(tuple(jax.devices()))
    assert json.loads(json.dumps(placement.describe())) == placement.describe()
    assert Placement.default(shard_rows_from=1).describe() != placement.describe()


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
