"""The tests of the noise's law are calibrated."""

import numpy as np
import pytest
from scipy import stats

from dpsgd.audit.noise import _correlation_pvalue, _variance_pvalue

pytestmark = pytest.mark.audit


@pytest.mark.parametrize("size", [2, 3, 100])
@pytest.mark.parametrize(
    "pvalue",
    [_variance_pvalue, lambda draws: _correlation_pvalue(draws, draws[::-1] * 0 + 1)],
    ids=["variance", "correlation"],
)
def test_p_values_of_normal_draws_are_uniform(pvalue, size):
    rng = np.random.default_rng(1)
    found = [pvalue(rng.normal(size=size)) for _ in range(2_000)]
    assert stats.kstest(found, "uniform").pvalue > 1e-6
