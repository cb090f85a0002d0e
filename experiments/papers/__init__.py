"""Theory of the papers beyond certified costs: estimates, limits of sampling, users' caps."""
