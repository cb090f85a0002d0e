"""Tasks: a data set, a model and metrics each."""
