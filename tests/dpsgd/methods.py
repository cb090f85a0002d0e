"""Two ways to one clipped sum: by taps of the loss, or by a gradient formed for each example."""

import jax

from dpsgd.gradients.losses import takes_key

METHODS = "ghost", "vmap"


@jax.custom_jvp
def _without_rule(x):
    return x


_without_rule.defjvps(lambda tangent, output, x: tangent)


def loss_by(method, loss_fn):
    """The loss; by "vmap" one with a derivative rule of its own in front of each parameter.

    Ghost clipping has no rule for it, and forms the gradients of all leaves.
    """
    if method == "ghost":
        return loss_fn

    def formed(params, example):
        return loss_fn(jax.tree.map(_without_rule, params), example)

    def formed_with_key(params, example, key):
        return loss_fn(jax.tree.map(_without_rule, params), example, key)

    return formed_with_key if takes_key(loss_fn) else formed
