"""Oracle of gap laws: the recursion of a table's optimizer, one step after another."""

import numpy as np

from dpsgd.engine.lazy.gaps import GapLaw


def stepwise_law(run, start, stop):
    """Law of m' = mu m + z and theta' = theta - a m' over consecutive steps."""
    transition, covariance = np.eye(2), np.zeros((2, 2))
    for size in run.step_sizes[start:stop]:
        step = np.array([[run.momentum, 0.0], [-size * run.momentum, 1.0]])
        noise = np.array([1.0, -size])
        covariance = step @ covariance @ step.T + np.outer(noise, noise)
        transition = step @ transition
    order = slice(-run.order, None)
    return GapLaw(transition[order, order], covariance[order, order])
