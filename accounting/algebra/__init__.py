"""Likelihood ratios, their sums and compositions: the algebra of certified profiles."""
