"""Private sums, means and histograms: what they release, at which noise, with which guarantee."""

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from accounting import GaussianProfile
from dpsgd import (
    RootKey,
    private_histogram,
    private_mean,
    private_sum,
    statistics,
)
from dpsgd.audit.report import AuditReport, CheckResult
from dpsgd.engine.queries import Refined
from samplers import FullBatch

N = 500
ROWS = np.random.default_rng(7).normal(size=(N, 3))
EXACT = {"epsilon": 1e5, "delta": 0.05, "audit": False}  # next to no noise


def test_sum_and_mean_are_of_rows_clipped_to_c():
    rows = ROWS.copy()
    rows[0, 0], rows[1, 2], rows[2] = np.nan, np.inf, 1e30
    norms = np.linalg.norm(rows[2:], axis=1, keepdims=True)
    expected = (rows[2:] * np.minimum(1, 1.5 / norms)).sum(0)
    for release, divisor in ((private_sum, 1), (private_mean, N)):
        found = release(rows, l2_clip_norm=1.5, **EXACT).value
        np.testing.assert_allclose(found * divisor, expected, rtol=1e-3, atol=0.05)


BINS = np.array([0, 0, 2, 5, -1, 2**40, -(2**40), 3, 3, 3])


@pytest.mark.long
def test_a_histogram_counts_rows_and_none_beyond_its_bins():
    found = private_histogram(BINS, 4, **EXACT).value
    np.testing.assert_allclose(found, [2, 0, 1, 3], atol=0.05)


def test_noise_has_the_deviation_of_its_guarantee_and_is_no_other_release_s():
    size, clip = 2_000, 2.0
    zeros = np.zeros((N, size))
    one, two = (
        private_sum(zeros, l2_clip_norm=clip, epsilon=1.0, delta=1e-3, audit=False)
        for _ in range(2)
    )
    sigma = one.guarantee.mechanism.noise_multiplier
    assert GaussianProfile(sigma).epsilon(1e-3).upper <= 1.0
    assert GaussianProfile(sigma * 0.999).epsilon(1e-3).lower > 0.99
    for value, stddev in ((one.value, 1), (two.value, 1), (one.value - two.value, np.sqrt(2))):
        total = float(np.sum((value / (sigma * clip * stddev)) ** 2))
        assert min(stats.chi2.cdf(total, size), stats.chi2.sf(total, size)) > 1e-6
    assert one.guarantee.mechanism.l2_clip_norm == clip


def test_a_root_serves_one_release_and_one_of_a_seed_gives_no_guarantee():
    root = RootKey.from_entropy()
    private_histogram(BINS, 4, root=root, **EXACT)
    with pytest.raises(ValueError, match="a run was already begun under this root"):
        private_histogram(BINS + 1, 4, root=root, **EXACT)
    seeded = private_histogram(BINS, 4, root=RootKey.from_insecure_seed(1), **EXACT)
    assert seeded.guarantee.epsilon is None
    assert seeded.guarantee.sentence().startswith("NO GUARANTEE: reproducible noise")


@pytest.mark.parametrize("passed", [True, False])
def test_what_is_released_is_audited_before_and_never_released_if_that_fails(monkeypatch, passed):
    seen, report = [], AuditReport((CheckResult("sums add up", passed, "as wanted"),))
    monkeypatch.setattr(statistics, "audit_program", lambda *of, **how: seen.append(of) or report)
    monkeypatch.setattr(statistics, "release", lambda *of, **how: Refined(np.zeros(3), {}))
    how = {"l2_clip_norm": 0.5, "epsilon": 1.0}
    if not passed:
        with pytest.raises(ValueError, match="checks failed: 'sums add up'"):
            private_mean(ROWS, **how)
        return
    note = private_mean(ROWS, **how).guarantee.notes[-1]
    assert "the draws keep what the guarantee assumes, by 1 checks" in note
    _, mechanism, params, rows = seen[0]
    assert (mechanism.sampler, mechanism.l2_clip_norm) == (FullBatch(N), 0.5)
    assert rows.shape[1:] == (3,)
    assert not np.isin(rows, ROWS.astype(np.float32)).any()
    assert set(params) == {"state", "sum"}
    assert "not made" in private_mean(ROWS, audit=False, **how).guarantee.notes[-1]
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("release", "message"),
    [
        (lambda: private_mean([], l2_clip_norm=1, epsilon=1), "there are no rows"),
        (lambda: private_mean(ROWS[0], l2_clip_norm=1, epsilon=1), r"vectors, .* float64\(3,\)"),
        (lambda: private_sum(ROWS > 0, l2_clip_norm=1, epsilon=1), "rows must be vectors"),
        (lambda: private_sum(ROWS, l2_clip_norm=0, epsilon=1), "l2_clip_norm must be > 0"),
        (lambda: private_sum(ROWS, l2_clip_norm=1, epsilon=-1), "epsilon"),
        (lambda: private_sum(ROWS, l2_clip_norm=1, epsilon=1, delta=1), "delta"),
        (lambda: private_histogram(ROWS[0], 3, epsilon=1), "bins must be whole numbers"),
        (lambda: private_histogram(jnp.zeros(3, int), 0, epsilon=1), "count must be at least 1"),
    ],
)
def test_what_cannot_be_released_is_refused_in_a_line(release, message):
    with pytest.raises(ValueError, match=message) as refused:
        release()
    assert "\n" not in str(refused.value)
