"""Transformers as they are published: what differs between them, and the names of their arrays.

BERT: J. Devlin, M. Chang, K. Lee, K. Toutanova, BERT (2018), section 3, after A. Vaswani et al.,
Attention Is All You Need (2017). GPT-2: A. Radford et al., Language Models are Unsupervised
Multitask Learners (2019), section 2.3. Constants and names of arrays are those of the classes
`BertModel` and `GPT2Model` of the library transformers (modeling_bert.py, modeling_gpt2.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Layout:
    """What differs between transformers of one kind of block."""

    post_norm: bool = False
    """Whether sums are normalised, those of embeddings too; or what attention, the two dense layers
    and the reader take in."""
    causal: bool = False
    """Whether a token sees no token after it."""
    exact_gelu: bool = False
    """Whether GELU is by the error function; or by a hyperbolic tangent."""
    epsilon: float = 1e-6
    """Added to the variance by which vectors are normalised."""
    reads: Literal["mean", "first", "last"] = "mean"
    """Of which tokens the vector is classified."""
    pooler: bool = False
    """Whether that vector goes through a dense layer and a hyperbolic tangent, and vectors of
    segments, of which a phrase is the first, are added to the tokens'."""
    init_map: tuple[str, ...] = ()
    """Rules by which arrays of published files are parameters."""


_BERT, _BERT_BLOCK, _GPT2 = (
    r"(?:bert\.)?",
    r"(?:bert\.)?encoder\.layer\.(\d+)\.",
    r"(?:transformer\.)?",
)
_FRESH = (r"=(?:head|bag)\..*", r"=.*\.lora\..*")
"""Parameters that no published file has, nor a model without adapters, or without either part."""


def _norm(array: str, name: str) -> tuple[str, str]:
    return rf"{array}\.(?:weight|gamma)={name}.scale", rf"{array}\.(?:bias|beta)={name}.bias"


def _linear(array: str, name: str, weight: str = "", part: str = "") -> tuple[str, str]:
    return rf"{array}\.weight={name}.kernel{weight}{part}", rf"{array}\.bias={name}.bias{part}"


_BERT_MAP = (
    rf"{_BERT}embeddings\.word_embeddings\.weight=tokens.embedding",
    rf"{_BERT}embeddings\.position_embeddings\.weight=positions.embedding:first",
    rf"{_BERT}embeddings\.token_type_embeddings\.weight=segments.embedding",
    *_norm(rf"{_BERT}embeddings\.LayerNorm", "norm"),
    *_linear(rf"{_BERT_BLOCK}attention\.self\.query", r"blocks.\1.qkv", ":T", ":1/3"),
    *_linear(rf"{_BERT_BLOCK}attention\.self\.key", r"blocks.\1.qkv", ":T", ":2/3"),
    *_linear(rf"{_BERT_BLOCK}attention\.self\.value", r"blocks.\1.qkv", ":T", ":3/3"),
    *_linear(rf"{_BERT_BLOCK}attention\.output\.dense", r"blocks.\1.out", ":T"),
    *_norm(rf"{_BERT_BLOCK}attention\.output\.LayerNorm", r"blocks.\1.attention_norm"),
    *_linear(rf"{_BERT_BLOCK}intermediate\.dense", r"blocks.\1.widen", ":T"),
    *_linear(rf"{_BERT_BLOCK}output\.dense", r"blocks.\1.narrow", ":T"),
    *_norm(rf"{_BERT_BLOCK}output\.LayerNorm", r"blocks.\1.dense_norm"),
    *_linear(rf"{_BERT}pooler\.dense", "pooler", ":T"),
    rf"{_BERT}embeddings\.position_ids=",
    r"cls\..*=",
    *_FRESH,
)
"""Left out are the heads that predict words and the next sentence. Matrices are transposed."""

_GPT2_MAP = (
    rf"{_GPT2}wte\.weight=tokens.embedding",
    rf"{_GPT2}wpe\.weight=positions.embedding:first",
    *_norm(rf"{_GPT2}ln_f", "norm"),
    *_norm(rf"{_GPT2}h\.(\d+)\.ln_1", r"blocks.\1.attention_norm"),
    *_norm(rf"{_GPT2}h\.(\d+)\.ln_2", r"blocks.\1.dense_norm"),
    *_linear(rf"{_GPT2}h\.(\d+)\.attn\.c_attn", r"blocks.\1.qkv"),
    *_linear(rf"{_GPT2}h\.(\d+)\.attn\.c_proj", r"blocks.\1.out"),
    *_linear(rf"{_GPT2}h\.(\d+)\.mlp\.c_fc", r"blocks.\1.widen"),
    *_linear(rf"{_GPT2}h\.(\d+)\.mlp\.c_proj", r"blocks.\1.narrow"),
    rf"{_GPT2}h\.\d+\.attn\.(?:bias|masked_bias)=",
    r"lm_head\.weight=",
    *_FRESH,
)
"""Left out are masks, and the head that predicts words. Matrices are as ours (Conv1D)."""

LAYOUTS = {
    "own": Layout(init_map=_FRESH),
    "bert": Layout(
        post_norm=True, exact_gelu=True, epsilon=1e-12, reads="first", pooler=True,
        init_map=_BERT_MAP,
    ),
    "gpt2": Layout(causal=True, epsilon=1e-5, reads="last", init_map=_GPT2_MAP),
}  # fmt: skip
