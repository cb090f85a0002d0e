"""What trains: the step, its groups of parameters, its feed, and where it is computed."""
