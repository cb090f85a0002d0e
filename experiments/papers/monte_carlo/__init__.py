"""The sampling estimators of balls-and-bins' privacy, as published: an independent check.

They hold with a confidence below one and are never a guarantee. Claims, proofs and sources:
docs/explanation/monte-carlo-estimates.md.
"""

from experiments.papers.monte_carlo.losses import geometric_ranks
from experiments.papers.monte_carlo.profile import MonteCarloProfile

__all__ = ["MonteCarloProfile", "geometric_ranks"]
