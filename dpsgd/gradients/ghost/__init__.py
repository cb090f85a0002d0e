"""Exact per-example clipping in one backward pass, without per-example gradients.

For a use y = a W of a parameter, with cotangent g of y, the gradient is a^T g: norms and clipped
sums follow from a and g. Rules and sources: docs/explanation/ghost-clipping.md.
"""

from dpsgd.gradients.ghost.backward import Gradients, gradients
from dpsgd.gradients.ghost.routes import FROZEN, Route, choose_route

__all__ = ["FROZEN", "Gradients", "Route", "choose_route", "gradients"]
