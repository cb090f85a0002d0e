"""What is no certified guarantee: Monte Carlo, a published theorem, limits of amplification."""
