"""A small convolutional network, without the batch statistics that no clipping bounds."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from dpsgd import split_module

PyTree = Any


@dataclass(frozen=True)
class Sizes:
    """What decides the shapes of the network's parameters."""

    shape: tuple[int, ...]
    """Height, width and channels of an image."""
    classes: int
    """Number of classes."""
    channels: tuple[int, ...]
    """Of each convolution; each halves height and width."""

    def __post_init__(self) -> None:
        if len(self.shape) != 3 or min(self.shape) < 1:
            raise ValueError(f"images have height, width and channels >= 1, got {self.shape}")
        if self.classes < 2:
            raise ValueError(f"images need at least two classes, got {self.classes}")
        if min(self.channels, default=1) < 1:
            raise ValueError(f"--channels must each be at least 1, got {self.channels}")


class ConvNet(nnx.Module):
    """Maps one image to the logits of its classes: convolutions of 3 x 3 and stride 2, one layer.

    Strides in place of pooling: of each example's gradient they cost a sixth on a CPU, and the
    digits are told apart better under noise.
    """

    def __init__(self, sizes: Sizes, rngs: nnx.Rngs):
        widths = [sizes.shape[2], *sizes.channels]
        self.convolutions = nnx.List(
            nnx.Conv(m, n, (3, 3), strides=2, rngs=rngs) for m, n in itertools.pairwise(widths)
        )
        halved = 2 ** len(sizes.channels)
        pixels = math.prod(-(-side // halved) for side in sizes.shape[:2])
        self.logits = nnx.Linear(
            pixels * widths[-1], sizes.classes, kernel_init=nnx.initializers.zeros, rngs=rngs
        )

    def __call__(self, image: Any) -> jax.Array:
        """Returns float32[classes] for uint8[height, width, channels]."""
        x = jnp.asarray(image, jnp.float32) / 127.5 - 1.0  # a public scale
        for layer in self.convolutions:
            x = nnx.relu(layer(x))
        return self.logits(x.ravel())


class Functions(NamedTuple):
    """The network as pure functions of its parameters."""

    loss: Callable[[PyTree, PyTree], jax.Array]
    """(params, example) -> cross entropy in nats of "image" and its "label"."""
    predict: Callable[[PyTree, PyTree], jax.Array]
    """(params, rows) -> probabilities of the classes, float32[rows, classes], of "image"."""
    logits: Callable[[PyTree, PyTree], jax.Array]
    """(params, rows) -> their logarithms, up to a constant a row; compiled."""


def initial(sizes: Sizes, seed: int) -> PyTree:
    """Returns fresh parameters."""
    return split_module(ConvNet(sizes, nnx.Rngs(seed)))[0]


@functools.cache
def functions(sizes: Sizes) -> Functions:
    """Returns the same functions for equal sizes, so that what is compiled of them is shared."""
    _, network = split_module(nnx.eval_shape(lambda: ConvNet(sizes, nnx.Rngs(0))))

    def loss(params, example):
        found = network(params, example["image"])
        return optax.softmax_cross_entropy_with_integer_labels(found, example["label"])

    def logits(params, rows):
        return jax.vmap(network, (None, 0))(params, rows["image"])

    def predict(params, rows):
        return jax.nn.softmax(logits(params, rows))

    return Functions(loss, predict, jax.jit(logits))
