"""A transformer over the tokens of one phrase, without any batch statistics."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from experiments.tasks.models import Functions, functions_of
from experiments.tasks.text.bag import Bag
from experiments.tasks.text.layouts import LAYOUTS


@dataclass(frozen=True)
class Sizes:
    """What decides the shapes of the transformer's parameters, and which of them are trained."""

    tokens: int
    """Number of tokens of the vocabulary."""
    length: int
    """Most tokens of a phrase."""
    classes: int
    """Number of classes."""
    dim: int
    """Dimension of a token's vector."""
    heads: int
    """Heads of attention, which share that dimension."""
    layers: int
    """Blocks of attention and two dense layers; with 0 there is the bag of words alone."""
    lora_rank: int = 0
    """Of the adapters beside the matrices of the blocks; 0 for none."""
    trained: Literal["all", "lora", "head"] = "all"
    """Which parameters have derivatives; the last layer and the bag of words always have."""
    layout: Literal["own", "bert", "gpt2"] = "own"
    """See `LAYOUTS`."""
    bag: int = 0
    """Buckets of a bag of words, whose logits are added to the transformer's; 0 for none."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """What the model reads of a row."""
        return ("tokens",) * (self.layers > 0) + ("words",) * (self.bag > 0)

    def __post_init__(self) -> None:
        least = {"tokens": 1, "length": 1, "classes": 2, "dim": 1, "heads": 1}
        for name, low in {**least, "lora_rank": 0, "bag": 0, "layers": int(not self.bag)}.items():
            if getattr(self, name) < low:
                raise ValueError(f"{name} must be at least {low}, got {getattr(self, name)}")
        if self.dim % self.heads:
            raise ValueError(f"dim must be a multiple of heads, got {self.dim} and {self.heads}")
        if not self.layers and (self.lora_rank or self.trained != "all" or self.layout != "own"):
            raise ValueError(
                "a bag of words alone has no adapters, last layer or layout of another model: "
                "give the model transformer or wide-and-deep"
            )
        if self.trained == "lora" and not self.lora_rank:
            raise ValueError("trained is lora, and lora_rank is 0: there are no adapters to train")


class Block(nnx.Module):
    """Adds attention, then two dense layers, to the vectors of tokens; each is normalised once."""

    def __init__(self, sizes: Sizes, rngs: nnx.Rngs):
        d, self.heads, self.layout = sizes.dim, sizes.heads, LAYOUTS[sizes.layout]
        self.attention_norm, self.dense_norm = _norm(sizes, rngs), _norm(sizes, rngs)

        def linear(m: int, n: int) -> nnx.Linear:
            if sizes.lora_rank:
                return nnx.LoRALinear(m, n, lora_rank=sizes.lora_rank, rngs=rngs)
            return nnx.Linear(m, n, rngs=rngs)

        self.qkv, self.out = linear(d, 3 * d), linear(d, d)
        self.widen, self.narrow = linear(d, 4 * d), linear(4 * d, d)

    def __call__(self, x: jax.Array, is_token: jax.Array) -> jax.Array:
        """Returns float32[length, dim] for such vectors and bool[length]; padding is not read."""
        for norm, layer in ((self.attention_norm, self.attend), (self.dense_norm, self.dense)):
            if self.layout.post_norm:
                x = norm(x + layer(x, is_token))
            else:
                x = x + layer(norm(x), is_token)
        return x

    def attend(self, x: jax.Array, is_token: jax.Array) -> jax.Array:
        """Returns the sum of what each token takes from the tokens that it sees."""
        q, k, v = jnp.moveaxis(self.qkv(x).reshape(len(x), 3, self.heads, -1), 1, 0)
        scores = jnp.einsum("ihd,jhd->hij", q, k) / q.shape[-1] ** 0.5
        sees = jnp.tril(jnp.tile(is_token, (len(x), 1))) if self.layout.causal else is_token
        weights = jax.nn.softmax(jnp.where(sees, scores, -1e9))
        return self.out(jnp.einsum("hij,jhd->ihd", weights, v).reshape(x.shape))

    def dense(self, x: jax.Array, _: jax.Array) -> jax.Array:
        """Returns two dense layers of each vector."""
        return self.narrow(jax.nn.gelu(self.widen(x), approximate=not self.layout.exact_gelu))


def _norm(sizes: Sizes, rngs: nnx.Rngs) -> nnx.LayerNorm:
    epsilon = LAYOUTS[sizes.layout].epsilon
    return nnx.LayerNorm(sizes.dim, epsilon=epsilon, use_fast_variance=False, rngs=rngs)


class Transformer(nnx.Module):
    """Maps the tokens of one phrase to the logits of its classes."""

    def __init__(self, sizes: Sizes, rngs: nnx.Rngs):
        self.layout = LAYOUTS[sizes.layout]
        small, zeros = nnx.initializers.normal(0.1), nnx.initializers.zeros
        self.tokens = nnx.Embed(sizes.tokens, sizes.dim, embedding_init=small, rngs=rngs)
        self.positions = nnx.Embed(sizes.length, sizes.dim, embedding_init=zeros, rngs=rngs)
        self.blocks = nnx.List(Block(sizes, rngs) for _ in range(sizes.layers))
        self.norm = _norm(sizes, rngs)
        self.head = nnx.Linear(sizes.dim, sizes.classes, kernel_init=zeros, rngs=rngs)
        if self.layout.pooler:
            self.segments = nnx.Embed(2, sizes.dim, embedding_init=zeros, rngs=rngs)
            self.pooler = nnx.Linear(sizes.dim, sizes.dim, rngs=rngs)

    def __call__(self, tokens: Any) -> jax.Array:
        """Returns float32[classes] for int32[length], in which -1 is padding."""
        is_token = jnp.asarray(tokens) >= 0
        x = self.tokens(jnp.maximum(tokens, 0)) + self.positions(jnp.arange(len(tokens)))
        if self.layout.pooler:
            x = x + self.segments(jnp.zeros(len(tokens), int))
        x = self.norm(x) if self.layout.post_norm else x
        for block in self.blocks:
            x = block(x, is_token)
        x = x if self.layout.post_norm else self.norm(x)
        count = jnp.maximum(is_token.sum(), 1)
        if self.layout.reads == "mean":
            read = jnp.where(is_token[:, None], x, 0.0).sum(0) / count
        else:
            read = x[0] if self.layout.reads == "first" else x[count - 1]
        return self.head(jnp.tanh(self.pooler(read)) if self.layout.pooler else read)


class WideAndDeep(Transformer):
    """Adds the logits of a bag of words to those of the transformer."""

    def __init__(self, sizes: Sizes, rngs: nnx.Rngs):
        super().__init__(sizes, rngs)
        self.bag = Bag(sizes.bag, sizes.classes, rngs)

    def __call__(self, tokens: Any, words: Any) -> jax.Array:  # type: ignore[override]
        """Returns float32[classes] for the tokens and the words of a phrase."""
        return super().__call__(tokens) + self.bag(words)


def made(sizes: Sizes, rngs: nnx.Rngs) -> nnx.Module:
    """Returns the model of these sizes: it maps its `Sizes.inputs` of one phrase to logits."""
    if not sizes.layers:
        return Bag(sizes.bag, sizes.classes, rngs)
    return WideAndDeep(sizes, rngs) if sizes.bag else Transformer(sizes, rngs)


@functools.cache
def functions(sizes: Sizes) -> Functions:
    """Returns the same functions for equal sizes, so that what is compiled of them is shared."""
    head = nnx.Any(nnx.PathContains("head"), nnx.PathContains("bag"))
    trained = {"all": nnx.Param, "lora": nnx.Any(nnx.LoRAParam, head), "head": head}[sizes.trained]
    return functions_of(lambda rngs: made(sizes, rngs), sizes.inputs, trained)[0]
