"""Interactions of embeddings: features of a network's first layer from vectors and numbers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dpsgd.engine.closures import public

CROSS_LAYERS = 2
"""Number of cross layers."""

CROSS_RANK = 16
"""Rank of a cross layer's matrix."""


class Concatenation(nnx.Module):
    """Features x_0: embeddings e_1 ... e_C and numbers x, side by side.

    Args:
      categories: Number C of embeddings.
      width: Length d of an embedding.
      numbers: Number of entries of x.
      rngs: Random streams of the initial parameters.
    """

    def __init__(self, categories: int, width: int, numbers: int, rngs: nnx.Rngs) -> None:
        del rngs
        self.features = categories * width + numbers

    def __call__(self, embeddings: jax.Array, numbers: jax.Array) -> jax.Array:
        """Returns the features of one example, float32[features].

        Args:
          embeddings: Embeddings of its categories, float32[C, d].
          numbers: Encoded numbers, float32[numbers].
        """
        return jnp.concatenate([embeddings.ravel(), numbers])


class DotProducts(Concatenation):
    """Features x_0, and the dot products of all pairs of vectors.

    The vectors are e_1 ... e_C and, if there are numbers, e_{C+1} = P x + p. The products e_i e_j,
    i < j, are in the order of (1, 2), (1, 3), ...

    Source: Naumov et al., "Deep Learning Recommendation Model for Personalization and
    Recommendation Systems" (DLRM), 2019, arXiv:1906.00091.
    """

    def __init__(self, categories: int, width: int, numbers: int, rngs: nnx.Rngs) -> None:
        super().__init__(categories, width, numbers, rngs)
        self.projection = nnx.Linear(numbers, width, rngs=rngs) if numbers else None
        vectors = categories + (numbers > 0)
        self.features += vectors * (vectors - 1) // 2

    def __call__(self, embeddings: jax.Array, numbers: jax.Array) -> jax.Array:
        """Returns the features of one example, see `Concatenation`."""
        vectors = embeddings
        if self.projection is not None:
            vectors = jnp.concatenate([embeddings, self.projection(numbers)[None]])
        first, second = public(np.triu_indices(len(vectors), 1))
        products = (vectors @ vectors.T)[first, second]
        return jnp.concatenate([super().__call__(embeddings, numbers), products])


class CrossLayers(Concatenation):
    """Features x_L of L low-rank cross layers.

    x_{l+1} = x_0 * (U_l V_l x_l + b_l) + x_l, with * entry by entry and V_l of `CROSS_RANK` rows.
    U_l and b_l are 0 initially, so that the layers begin as the identity.

    Source: Wang et al., "DCN V2: Improved Deep & Cross Network", WWW 2021, arXiv:2008.13535.
    """

    def __init__(self, categories: int, width: int, numbers: int, rngs: nnx.Rngs) -> None:
        super().__init__(categories, width, numbers, rngs)
        zeros, layers = nnx.initializers.zeros, range(CROSS_LAYERS)
        self.down = nnx.List(
            nnx.Linear(self.features, CROSS_RANK, use_bias=False, rngs=rngs) for _ in layers
        )
        self.up = nnx.List(
            nnx.Linear(CROSS_RANK, self.features, kernel_init=zeros, rngs=rngs) for _ in layers
        )

    def __call__(self, embeddings: jax.Array, numbers: jax.Array) -> jax.Array:
        """Returns the features of one example, see `Concatenation`."""
        x = start = super().__call__(embeddings, numbers)
        for down, up in zip(self.down, self.up, strict=True):
            x = start * up(down(x)) + x
        return x


INTERACTIONS = {"none": Concatenation, "dot": DotProducts, "cross": CrossLayers}
"""Modules by `ModelConfig.interaction`."""
