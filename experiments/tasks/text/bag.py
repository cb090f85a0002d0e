"""A bag of words: the weights of a phrase's words and of their beginnings, in each class."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

BEGINNINGS = (3, 4, 5)
"""Letters of a word that are read beside the whole: words of one stem learn from one another."""
FEATURES = 1 + len(BEGINNINGS)
"""Of a word, at most."""


def words(texts: Sequence[str], buckets: int, length: int) -> np.ndarray:
    """Returns the hashed words of each text and their beginnings, then -1: int32[texts, ...].

    They are CRC-32 modulo `buckets`, of the first `length` lower-case words of two letters or more.
    """
    found = np.full((len(texts), FEATURES * length), -1, np.int32)
    for row, text in zip(found, texts, strict=True):
        read = re.findall(r"\w\w+", text.lower())[:length]
        parts = [
            f
            for word in read
            for f in (word, *(f"{word[:n]}-" for n in BEGINNINGS if len(word) >= n))
        ]
        row[: len(parts)] = [zlib.crc32(part.encode()) % buckets for part in parts]
    return found


class Bag(nnx.Module):
    """Maps what `words` read of one phrase to logits: a linear model of features of norm 1."""

    def __init__(self, buckets: int, classes: int, rngs: nnx.Rngs):
        zeros = nnx.initializers.zeros
        self.weights = nnx.Embed(buckets, classes, embedding_init=zeros, rngs=rngs)
        self.bias = nnx.Param(jnp.zeros(classes))

    def __call__(self, words: jax.Array) -> jax.Array:
        """Returns float32[classes] for int32[features], in which -1 is padding."""
        is_word = jnp.asarray(words) >= 0
        found = jnp.where(is_word[:, None], self.weights(jnp.maximum(words, 0)), 0.0)
        return found.sum(0) / jnp.sqrt(jnp.maximum(is_word.sum(), 1)) + self.bias[...]
