"""What shards cost is measured in processes of their own, and padding is what was predicted."""

from experiments.benchmarks import scale_shards
from samplers import Poisson


def test_padding_by_shards_is_what_was_predicted():
    rows = scale_shards.padding_rows()
    assert len(rows) == 8
    assert all(row.holds for row in rows)
    assert {row.bar for row in rows} >= {"<= 32.5", "<= 98.5", "<= 338.5", "<= 35.5"}


def test_a_draw_is_measured_from_the_first_line_of_its_process():
    sampler = Poisson(200_000, 1000, num_shards=4)
    time, memory = scale_shards._alone("draw", scale_shards._draw, sampler)
    assert 0.01 < time.value < 60
    assert 0.02 < memory.value < 2
    assert time.holds
    assert memory.holds
