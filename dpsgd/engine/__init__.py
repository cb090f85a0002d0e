"""Training: the step, its lazy tables, feed and placement."""
