"""Training: the step, its parameter groups, feed and placement."""
