"""What lanes cost is measured in processes of their own, and padding is what was predicted."""

from experiments.benchmarks import scale_lanes
from samplers import Poisson


def test_padding_by_lanes_is_what_was_predicted():
    rows = scale_lanes.padding_rows()
    assert len(rows) == 8
    assert all(row.holds for row in rows)
    assert {row.bar for row in rows} >= {"<= 32.5", "<= 98.5", "<= 338.5", "<= 35.5"}


def test_a_draw_is_measured_from_the_first_line_of_its_process():
    sampler = Poisson(200_000, 1000, lanes=4)
    time, memory = scale_lanes._alone("draw", scale_lanes._draw, sampler)
    assert 0.01 < time.value < 60
    assert 0.02 < memory.value < 2
    assert time.holds
    assert memory.holds
