"""The sampling estimators of balls-and-bins' privacy, as published: an independent check.

The certified interval of `accounting.profiles.balls_and_bins` needs no samples. These estimators do
not share a line with it, so that their agreement is evidence, and they reproduce the curves of
their papers. What they return holds with a confidence below one and is never a guarantee.

Source: L. Chua et al., Balls-and-Bins Sampling for DP-SGD, AISTATS 2025, arXiv:2412.16802
(Algorithms 4, 5, 6, 10 and 11, Appendix B).
"""

from accounting.estimates.monte_carlo.confidence import hockey_stick_upper_bound, kl_upper_bound
from accounting.estimates.monte_carlo.losses import (
    event_probability,
    geometric_ranks,
    log_order_statistics,
    sample_losses,
)
from accounting.estimates.monte_carlo.profile import MonteCarloProfile

__all__ = [
    "MonteCarloProfile",
    "event_probability",
    "geometric_ranks",
    "hockey_stick_upper_bound",
    "kl_upper_bound",
    "log_order_statistics",
    "sample_losses",
]
