"""The published theorem of episodic training is refuted, and is never printed as a guarantee."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import special

from accounting import (
    Bound,
    GaussianProfile,
    MultistageProfile,
    PoissonProfile,
    PrivacyProfile,
    UnitsThenPoissonProfile,
)
from accounting.worst_leaf import worst_leaf
from experiments.papers.episodic import Estimate, PublishedTheorem3, add_remove_profile, compare

DELTA = 1e-5


def test_a_pair_of_data_sets_exceeds_the_published_theorem():
    # 10 of 100 at sigma 1, x = 1 and all others -1: the theorem says 4.7e-6 at 1.85.
    published = PublishedTheorem3(1.0, 1, (10,), (100,)).estimate_delta(1.85)
    assert published.value == pytest.approx(4.7e-6, rel=0.02)
    edges = np.concatenate([[-np.inf], np.linspace(-20, 0, 400_000), [np.inf]])
    laws = [
        0.9 * np.diff(special.ndtr(edges + 10)) + 0.1 * np.diff(special.ndtr(edges - mean))
        for mean in (-8.0, -9.0)
    ]
    true = np.maximum(laws[0] - math.exp(1.85) * laws[1], 0).sum()
    assert true == pytest.approx(1.76e-3, rel=0.01)
    bound = MultistageProfile(1.0, 1, (10,), (100,)).delta(1.85)
    assert bound.lower <= true * (1 + 1e-6)
    assert true <= bound.upper
    assert add_remove_profile(1.0, 1, (10,), (100,)).delta(1.85).upper == pytest.approx(
        8.5e-3, rel=0.01
    )


def test_one_add_or_remove_stage_is_poisson_at_half_the_noise():
    assert add_remove_profile(3.0, 200, (50,), (1000,)) == PoissonProfile(1.5, 0.05, 200)


def test_the_labels_of_a_scheme_name_units_and_adjacency():
    one, two = (compare(4.0, 2, (1,) * n, (10,) * n, DELTA) for n in (1, 2))
    assert next(iter(one)) == next(iter(two)) == "examples clipped"
    assert "units of level 1 clipped" in two
    whole = MultistageProfile(4.0, 2, (1, 1), (10, 10), clipped_level=0).epsilon(DELTA)
    assert two["whole episodes clipped"] == whole
    added = one["examples clipped, by adding or removing one (not zero-out)"]
    assert added == add_remove_profile(4.0, 2, (1,), (10,)).epsilon(DELTA)
    assert not any("adding" in name for name in two)  # a unit may run empty: there is none


def test_the_published_theorem_can_not_be_printed_as_a_guarantee():
    published = PublishedTheorem3(2.0, 100, (1, 5), (10, 10))
    assert not isinstance(published, PrivacyProfile)
    assert not hasattr(published, "epsilon")
    assert not hasattr(published, "delta")
    estimate = published.estimate_epsilon(DELTA)
    assert isinstance(estimate, Estimate)
    assert not isinstance(estimate, (float, Bound))
    assert "NO GUARANTEE" in str(estimate)
    for profile in (
        MultistageProfile(1.0, 1, (1,), (2,)),
        worst_leaf(1.0, 1, (1,), ((2,),)),
        UnitsThenPoissonProfile(1.0, 1, 0.5, 0.5),
    ):
        assert isinstance(profile, PrivacyProfile)


def test_the_published_theorem_is_its_formula():
    published = PublishedTheorem3(1.0, 1, (1,), (20,))
    base = GaussianProfile(1.0)
    for eps in (0.5, 2.0):
        amplified = math.log1p(0.05 * math.expm1(eps))
        assert published.estimate_delta(amplified).value == pytest.approx(
            0.05 * base.delta(eps).upper, rel=1e-9
        )
    value = published.estimate_epsilon(1e-4).value
    assert published.estimate_delta(value).value == pytest.approx(1e-4, rel=1e-6)
