"""Predictions are those of all rows at once, in one program, and their file is whole or absent."""

import gzip

import numpy as np
import pytest

from dpsgd.models import predictions
from dpsgd.models.predictions import write_predictions

W = np.array([[1.0, -2.0, 0.5], [0.0, 1.0, 3.0]], np.float32)


def predict(params, rows):
    return rows["x"] @ params.T


@pytest.mark.parametrize("num_rows", [0, 1, 7, 8, 9, 40])
def test_batches_are_put_together_to_what_all_rows_give_at_once(num_rows):
    x = np.random.default_rng(0).normal(size=(num_rows, 3)).astype(np.float32)
    found = predictions.predictions(predict, W, {"x": x}, batch=8)
    assert found.shape == (num_rows, 2)
    np.testing.assert_allclose(found, x @ W.T, rtol=1e-6)


@pytest.mark.parametrize(
    ("blocks", "lines"),
    [
        ([np.array([0.5, np.nan]), np.array([1.0])], ["p", "0.5", "nan", "1"]),
        ([np.array([[1.0, 2.0]]), np.array([[3.0, np.nan]])], ["p_0,p_1", "1,2", "3,nan"]),
        ([np.array([1, 0])], ["p", "1", "0"]),
        ([], ["p"]),
    ],
)
@pytest.mark.parametrize("packed", ["", ".gz"])
def test_a_line_is_written_for_each_row(tmp_path, blocks, lines, packed):
    out = tmp_path / f"out.csv{packed}"
    rows, undefined = write_predictions(out, blocks, name="p")
    content = out.read_bytes()
    text = gzip.decompress(content) if packed else content
    assert text.decode().splitlines() == lines
    assert (rows, undefined) == (len(lines) - 1, sum("nan" in line for line in lines))
    with pytest.raises(FileExistsError):
        write_predictions(out, blocks)


def test_a_file_that_is_interrupted_is_not_there(tmp_path):
    def blocks():
        yield np.ones(3)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_predictions(tmp_path / "out.csv", blocks())
    assert not list(tmp_path.iterdir())
    with pytest.raises(FileNotFoundError, match=r"is not a folder; create it for out\.csv"):
        write_predictions(tmp_path / "no" / "out.csv", [])
