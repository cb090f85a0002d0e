"""What is no certified price: Monte Carlo, a published theorem, limits of amplification."""
