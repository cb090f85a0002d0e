"""Exact per-example clipping in one backward pass, without per-example gradients.

For one example, a use of a parameter as y = a W, with cotangent g of y, gives W the gradient
a^T g. So one backward pass that stops at the outputs y, with the activations a of the forward
pass, holds everything (book-keeping: Bu, Wang, Zha and Karypis, 2023, "Differentially Private
Optimization on Large Model at Small Cost", arXiv:2210.00038):

  * norms, by ||a^T g||_F^2 = ||a||^2 ||g||^2 without a sequence axis (Goodfellow, 2015, "Efficient
    per-example gradient computations", arXiv:1510.01799); with one of length S, of a [S, c] and
    g [S, n], by the Gram product sum_{s,t} (a_s . a_t) (g_s . g_t) (Li et al., 2022,
    arXiv:2110.05679) or from a^T g itself, whichever takes fewer operations: S^2 (c + n) or S c n.
    The memory of the cheaper one never exceeds S (c + n) numbers an example, the activations
    themselves. For look-ups, the cotangents of a row that occurs repeatedly are summed, then
    squared. Parameters used several times get their cross terms;
  * the clipped sum, by the transpose of the operation over the whole batch applied to the scaled
    cotangents: one contraction, one convolution, or one scatter-add.

A parameter with a use that has no rule is differentiated by vmap(grad), it alone; see
`dpsgd.explain`.
"""

from dpsgd.gradients.ghost.backward import Gradients, gradients
from dpsgd.gradients.ghost.routes import Route, choose_route

__all__ = ["Gradients", "Route", "choose_route", "gradients"]
