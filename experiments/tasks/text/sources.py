"""Phrases with their classes, their tokens, and which of them train."""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.tasks.splitmix import outputs
from experiments.tasks.splits import random_masks

FRACTIONS = (0.9, 0.05, 0.05)
"""Parts that train, validate and test, before training phrases that share words are left out."""
SHARED_WORDS = 4
"""As many words in a row has no training phrase in common with one that validates or tests."""


class SourceError(ValueError):
    """Phrases or a vocabulary that cannot be read."""


@dataclass(frozen=True)
class Tokens:
    """How a phrase becomes tokens, by public rules alone."""

    buckets: int
    """Of hashed words, where there is no vocabulary."""
    vocabulary: str | None = None
    """A tokenizer of the library `tokenizers`, as JSON."""

    @cached_property
    def _tokenizer(self) -> Any:
        from tokenizers import Tokenizer

        try:
            found = Tokenizer.from_str(self.vocabulary or "")
        except Exception as error:  # the library has no type of its own
            raise SourceError(f"the vocabulary is no JSON of tokenizers: {error}") from None
        found.no_padding()
        return found

    @property
    def count(self) -> int:
        """Number of different tokens."""
        return self.buckets if self.vocabulary is None else self._tokenizer.get_vocab_size()

    @property
    def special(self) -> int:
        """Number of tokens that the vocabulary adds to each text, such as [CLS] and [SEP]."""
        return 0 if self.vocabulary is None else self._tokenizer.num_special_tokens_to_add(False)

    def encode(self, texts: Sequence[str], length: int) -> np.ndarray:
        """Returns the first tokens of each text, special ones too, then -1: int32[texts, length].

        Without a vocabulary a token is the CRC-32 of a lower-case word, modulo `buckets`.

        Raises:
          SourceError: if special tokens alone take the whole length.
        """
        if self.vocabulary is not None:
            if length <= self.special:
                raise SourceError(
                    f"length must be more than the {self.special} tokens that the vocabulary adds "
                    f"to each text, got {length}"
                )
            self._tokenizer.enable_truncation(length)
        found = np.full((len(texts), length), -1, np.int32)
        for row, text in zip(found, texts, strict=True):
            if self.vocabulary is None:
                words = re.findall(r"\w+|[^\w\s]", text.lower())[:length]
                ids = [zlib.crc32(word.encode()) % self.buckets for word in words]
            else:
                ids = self._tokenizer.encode(text).ids[:length]
            row[: len(ids)] = ids
        return found


class Phrases(NamedTuple):
    """The rows of a file."""

    texts: list[str]
    label: np.ndarray | None
    """Of each, int32; None if the file has none and need not."""


def load(path: Path, classes: int, labelled: bool = True) -> Phrases:
    """Returns the phrases of a file.

    Args:
      path: Of tab-separated UTF-8, plain or .gz; its first line names "sentence" and "label".
      classes: Labels are whole numbers from 0, less than this.
      labelled: Whether labels must be there, and are read.

    Raises:
      SourceError: if it is no such file; the line names file, line and column.
    """
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        lines = raw.decode().splitlines()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise SourceError(f"{path} cannot be read as text: {error}") from None
    names = lines[0].split("\t") if lines else []
    for name in ("sentence", "label")[: 1 + labelled]:
        if names.count(name) != 1:
            raise SourceError(f"{path}, line 1: expected the name of one column {name}: {names}")
    texts, labels = [], []
    for number, line in enumerate(lines[1:], 2):
        fields = line.split("\t")
        if len(fields) != len(names):
            raise SourceError(f"{path}, line {number}: {len(fields)} columns, not {len(names)}")
        texts.append(fields[names.index("sentence")])
        if labelled:
            label = fields[names.index("label")]
            if not (label.isascii() and label.isdecimal() and int(label) < classes):
                raise SourceError(
                    f"{path}, line {number}, column label: found {label!a:.40}, expected a class "
                    f"from 0 to {classes - 1}"
                )
            labels.append(int(label))
    return Phrases(texts, np.array(labels, np.int32) if labelled else None)


def split(texts: Sequence[str]) -> dict[str, np.ndarray]:
    """Returns which phrases are "train", "validation" and "test", bool[texts].

    A public hash of a phrase's number decides. Then a training phrase is left out of all three if
    it has four words in a row in common with one that validates or tests; one of fewer words, if it
    is the same as one of them. So held-out phrases alone decide whether a phrase trains: no
    training phrase moves another, and adding one adds at most one.
    """
    masks = random_masks(np.arange(len(texts)), FRACTIONS)
    held = {gram for i in np.flatnonzero(~masks["train"]).tolist() for gram in _grams(texts[i])}
    for i in np.flatnonzero(masks["train"]).tolist():
        masks["train"][i] = held.isdisjoint(_grams(texts[i]))
    return masks


def public(numbers: np.ndarray, share: float) -> np.ndarray:
    """Returns which of the phrases of these numbers are declared public, by another public hash."""
    return outputs(outputs(numbers)) < np.float64(share) * 2.0**64


def _grams(text: str) -> set[tuple[str, ...]]:
    words = tuple(text.lower().split())
    starts = range(max(1, len(words) - SHARED_WORDS + 1))
    return {words[i : i + SHARED_WORDS] for i in starts}
