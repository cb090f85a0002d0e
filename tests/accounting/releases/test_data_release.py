"""Noisy counts of which some texts are kept cost no more than a Gaussian release that may fail."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import ndtr

from accounting import DataRelease, GaussianProfile, WithFailureProfile


def outcomes(counts, cells, least):
    """The exact law of which texts are kept: P(c + round(s Z) >= T) for each that is counted."""
    kept = [float(ndtr((c + 0.5 - least) / cells)) if c else 0.0 for c in counts]
    return {
        which: math.prod(p if keep else 1 - p for p, keep in zip(kept, which, strict=True))
        for which in itertools.product((False, True), repeat=len(counts))
    }


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3), min_size=1, max_size=3),
    st.integers(1, 6),
    st.integers(2, 12),
    st.floats(0.0, 3.0),
)
def test_kept_texts_cost_at_most_what_is_counted(columns, cells, least, eps):
    # The row holds the first text of each column, and no other data set has more of it.
    with_row = [[column[0] + 1, *column[1:]] for column in columns]
    first = outcomes([*itertools.chain(*with_row)], cells, least)
    second = outcomes([*itertools.chain(*columns)], cells, least)
    alone = sum(column[0] == 0 for column in columns)  # texts of this row alone
    failure = alone * float(ndtr((1.5 - least) / cells))
    if failure >= 1:
        return
    release = DataRelease(cells / math.sqrt(len(columns)), failure)
    bound = release.privacy().delta(eps).upper
    for p, q in ((first, second), (second, first)):
        exact = sum(max(0.0, p[which] - math.exp(eps) * q[which]) for which in p)
        assert exact <= bound * (1 + 1e-12) + 1e-15


@pytest.mark.parametrize("failure", [0.0, 1e-9, 1e-6])
@pytest.mark.parametrize("delta", [1e-5, 1e-3])
def test_epsilon_is_where_delta_is_reached(failure, delta):
    profile = WithFailureProfile(GaussianProfile(2.0), failure)
    found = profile.epsilon(delta)
    assert profile.delta(found.upper).upper <= delta * (1 + 1e-9)
    assert found.upper <= GaussianProfile(2.0).epsilon(delta - failure).upper + 1e-6
    assert found.lower <= GaussianProfile(2.0).epsilon(delta).upper


def test_a_failure_that_leaves_nothing_of_delta_has_no_epsilon():
    found = WithFailureProfile(GaussianProfile(2.0), 1e-5).epsilon(1e-5)
    assert found.upper == math.inf
    assert "leaves nothing of delta" in found.note


def test_a_release_and_a_run_cost_more_than_each_and_no_more_than_their_sum():
    run, release = GaussianProfile(1.0), DataRelease(3.0, 1e-8)
    both = release.before(run).epsilon(1e-5)
    alone = run.epsilon(1e-5), release.privacy().epsilon(1e-5)
    assert (
        max(one.upper for one in alone)
        < both.upper
        < sum(profile.epsilon(5e-6).upper for profile in (run, release.privacy()))
    )
    assert both.lower == alone[0].lower


MAKERS = {
    "release": lambda failure: DataRelease(1.0, failure),
    "profile": lambda failure: WithFailureProfile(GaussianProfile(1.0), failure),
}


@pytest.mark.parametrize("failure", [-1e-9, 1.0, np.nan])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_failure_is_a_probability_below_one(make, failure):
    with pytest.raises(ValueError, match=r"failure must be in \[0, 1\)"):
        make(failure)
