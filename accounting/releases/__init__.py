"""Releases beside training, and what they cost: a private choice, a cap, the best of many runs."""
