"""A mechanism is what accounting prices, or it is refused."""

import numpy as np
import pytest

from dpsgd import Mechanism
from samplers import BallsAndBins


@pytest.mark.parametrize("sigma", [1.0, 0.1, 1 / 3, 5.5])
@pytest.mark.parametrize("clip", [1.0, 0.1, 3.7])
def test_rounding_to_float32_never_shortens_the_noise(sigma, clip):
    scales = Mechanism(BallsAndBins(100, 10), sigma, clip).scales()
    assert float(scales.noise_stddev) >= sigma * float(scales.l2_clip_norm)
    assert scales.expected_batch_size == 10


@pytest.mark.parametrize(
    ("sigma", "clip"),
    [(-1, 1), (np.nan, 1), (np.inf, 1), (1, 0), (1, -1), (1, np.nan), (1, np.inf)],
)
def test_impossible_noise_and_clipping_are_refused(sigma, clip):
    with pytest.raises(ValueError, match=r"noise|l2_clip_norm"):
        Mechanism(BallsAndBins(100, 10), sigma, clip).privacy()


def test_without_noise_there_is_no_price():
    with pytest.raises(ValueError, match="no privacy guarantee"):
        Mechanism(BallsAndBins(100, 10), 0.0, np.inf).privacy()
