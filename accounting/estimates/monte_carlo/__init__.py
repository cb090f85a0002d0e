"""The sampling estimators of balls-and-bins' privacy, as published: an independent check.

They hold with a confidence below one and are never a guarantee. Claims, proofs and sources:
docs/explanation/monte-carlo-estimates.md.
"""

from accounting.estimates.monte_carlo.confidence import (
    bennett_upper_bound,
    hockey_stick_upper_bound,
    kl_upper_bound,
    mean_upper_bound,
)
from accounting.estimates.monte_carlo.losses import (
    event_probability,
    geometric_ranks,
    log_order_statistics,
    sample_losses,
)
from accounting.estimates.monte_carlo.profile import MonteCarloProfile

__all__ = [
    "MonteCarloProfile",
    "bennett_upper_bound",
    "event_probability",
    "geometric_ranks",
    "hockey_stick_upper_bound",
    "kl_upper_bound",
    "log_order_statistics",
    "mean_upper_bound",
    "sample_losses",
]
