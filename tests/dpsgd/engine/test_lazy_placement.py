"""Several devices train lazy tables as one does, each its own rows; only what is read travels."""

from pathlib import Path

import pytest
from placements import LAZY_BUGS, driven

pytestmark = pytest.mark.timeout(900)  # the first test waits for the driver

DRIVER = Path(__file__).with_name("lazy_placement_driver.py")
R, WIDTH, DENSE, DIAGNOSTICS, WATCHED = 2048, 6, 6, 4, 128
"""Of the driver's model, of what a step says of its batch, and of what it shows of each leaf."""


@pytest.fixture(scope="module")
def short():
    return driven(DRIVER, "short")


@pytest.fixture(scope="module")
def equal(short):
    return short["equal"]


@pytest.mark.long
def test_states_of_eight_devices_are_those_of_one_whether_noise_is_due_or_not(equal):
    assert equal["pending"] == [True, True, False]
    assert max(equal["off"]) <= 1e-6


@pytest.mark.long
def test_without_a_planted_bug_eight_devices_do_what_one_does(short):
    assert short["planted"].keys() == {"none", *LAZY_BUGS}
    assert short["planted"]["none"] <= 1e-6


@pytest.mark.long
@pytest.mark.parametrize("bug", LAZY_BUGS)
def test_a_planted_bug_of_devices_moves_their_states_from_those_of_one(short, bug):
    assert not short["planted"][bug] <= 1e-3


@pytest.mark.long
def test_a_step_exchanges_what_a_batch_reads_and_its_gradients_alone(equal):
    look_ups = 4 * equal["places"]
    names, values, sums, shown = equal["collectives"]
    assert names == {"kind": "all-gather", "size": 4 * look_ups, "depth": 1}
    assert values == {"kind": "all-reduce", "size": 4 * look_ups * WIDTH, "depth": 1}
    size = 4 * (look_ups * WIDTH + DENSE + DIAGNOSTICS)
    assert sums == {"kind": "all-reduce", "size": size, "depth": 1}
    assert shown == {"kind": "all-reduce", "size": 4 * WATCHED, "depth": 1}


@pytest.mark.long
def test_a_flush_exchanges_nothing(equal):
    assert equal["flush"] == []


@pytest.mark.long
def test_no_device_makes_a_table_that_is_sharded_whole_and_its_rows_stay_in_place(equal):
    assert equal["whole"] == [False, False]
    block, flush = equal["given_away"]
    assert block >= 4 * R // 8 * (WIDTH + 1)  # with the steps that are in each row
    assert flush >= 4 * R // 8 * WIDTH


@pytest.fixture(scope="module")
def long():
    return driven(DRIVER, "long")


@pytest.mark.long
def test_tables_with_momentum_lie_whole_on_each_device_unless_their_rows_divide(long):
    found = long["equal"]
    assert found["where"] == {"table": "P('devices',)", "odd": "P()", "w": "P()"}
    assert max(found["off"]) <= 1e-6


@pytest.mark.long
def test_a_look_up_beyond_a_table_reads_its_nearest_row_on_eight_devices_as_well(long):
    values, momenta = long["nearest"]
    assert values <= 1e-6
    assert momenta <= 2e-6  # in which more cancels, in the sums of eight devices or of one


@pytest.mark.long
@pytest.mark.parametrize("name", ["streamed", "a key", "shards", "units", "flushed in between"])
def test_states_of_every_layout_are_those_of_one_device(long, name):
    assert max(long["layouts"][name]) <= 1e-6


@pytest.mark.long
@pytest.mark.parametrize("devices", ["1", "2", "4", "8"])
def test_where_nothing_but_noise_moves_them_no_number_differs_from_those_of_one_device(
    long, devices
):
    *due, flushed = long["noise"][devices]
    assert flushed == 0
    # On eight devices the last bits of a row that a step has caught up differ; why is not known.
    # No guarantee needs them to be one: another placement is another attempt.
    assert max(due) <= 8


@pytest.mark.long
def test_eight_devices_repeat_their_bits_and_go_on_in_them_from_rows_whose_noise_is_due(long):
    assert long["repeats"]["numbers"] == [0, 0]


@pytest.mark.long
def test_states_are_read_back_whole_and_what_is_on_every_device_is_the_same(long):
    assert long["repeats"]["whole"] == [0, 0]
    assert long["repeats"]["unlike"] is None


@pytest.mark.long
def test_of_85_million_parameters_a_device_holds_an_eighth_and_no_temporary_grows_with_them(long):
    found = long["large"]
    for size, given, temporary, of_twice in zip(
        (found["shard"],) * 2,
        found["given_away"],
        found["temporary"],
        found["of_twice"],
        strict=True,
    ):
        assert size <= given <= size + 8_192
        assert temporary < size
        assert of_twice <= temporary + 8_192
    assert max(one["size"] for one in found["exchanged"]) < found["shard"] / 4
    assert found["fitting"] is None


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("psum", "unbound axis name"),
        ("psum of a state", "examples could mix"),
        ("a dense leaf", "others lie whole on every device: leave out shard_rows_from"),
    ],
)
def test_what_cannot_be_is_refused(long, name, message):
    assert message in long["refused"][name]
