"""Figures of stores and batches by many workers are measured, and equality is compared."""

import pytest

from experiments.benchmarks import scale_beam


@pytest.mark.long
def test_every_way_of_a_store_and_of_batches_is_compared_with_one_process(monkeypatch):
    monkeypatch.setattr(scale_beam, "find_spec", lambda name: None)
    rows = scale_beam.beam_rows(200, kills=0)
    compared = [row for row in rows if row.unit == "yes"]
    assert len(compared) == 4
    assert all(row.value == 1 and row.holds for row in compared)


@pytest.mark.parametrize("change", ["a byte", "a file"])
def test_folders_that_differ_are_told(tmp_path, change):
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        folder.mkdir()
        (folder / "a").write_bytes(b"1")
    assert scale_beam._same(one, other) == 1
    (other / ("a" if change == "a byte" else "b")).write_bytes(b"2")
    assert scale_beam._same(one, other) == 0
