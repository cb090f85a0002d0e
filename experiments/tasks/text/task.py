"""Text as a task: rows of phrases, a bag of words or a transformer, accuracy and log loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from experiments.tasks.models import ClassModels, Functions, HeldOut

if TYPE_CHECKING:  # a command's help reads the fields alone, and waits for no array
    from dpsgd.runs.recommendation import RecommendationRequest, Settings
    from experiments.tasks.splits import Columns
    from experiments.tasks.text.model import Sizes
    from experiments.tasks.text.sources import Tokens

PyTree = Any


class TextModels(ClassModels):
    """What a model of phrases needs beside rows to be trained on: its sizes and its tokens."""

    sizes: Sizes
    tokens: Tokens

    @property
    def init_map(self) -> tuple[str, ...]:
        """Rules by which arrays of published files are parameters of this layout."""
        from experiments.tasks.text.layouts import LAYOUTS

        return LAYOUTS[self.sizes.layout].init_map

    @property
    def functions(self) -> Functions:
        """See `model.functions`."""
        from experiments.tasks.text.model import functions

        return functions(self.sizes)

    def encode(self, rows: Mapping[str, Any]) -> PyTree:
        """Returns tokens, hashed words or both of the texts in the column "sentence"."""
        from experiments.tasks.text.bag import words

        if "sentence" not in rows:
            raise ValueError(f"expected a column sentence, found {', '.join(rows) or 'none'}")
        sizes, texts = self.sizes, list(rows["sentence"])
        read = {
            "tokens": lambda: self.tokens.encode(texts, sizes.length),
            "words": lambda: words(texts, sizes.bag, sizes.length),
        }
        return {name: read[name]() for name in sizes.inputs}

    def read(
        self, path: Path, *, labelled: bool = True, split: str | None = None
    ) -> Iterator[PyTree]:
        """Returns the phrases of a file or of a `split`, block by block, see `Text.data`.

        Raises:
          ValueError: if the phrases cannot be read, or there is no such split.
        """
        from experiments.tasks.splits import blocks_of, taken
        from experiments.tasks.text import sources

        found = sources.load(path, self.sizes.classes, labelled)
        rows = self.encode({"sentence": found.texts})
        if found.label is not None:
            rows["label"] = found.label
        if split is not None:
            masks = sources.split(found.texts)
            if split not in masks:
                raise ValueError(f"{path} has no split {split!a}: {', '.join(masks)}")
            rows = taken(rows, masks[split])
        return blocks_of(rows)

    def generated(self, count: int) -> PyTree:
        """Returns `count` phrases of uniform tokens, lengths and labels: synthetic probe rows."""
        import numpy as np

        from experiments.tasks.text.bag import FEATURES

        sizes, rng, found = self.sizes, np.random.default_rng(0), {}
        most = {"tokens": (sizes.tokens, 1), "words": (sizes.bag, FEATURES)}
        lengths = rng.integers(1, sizes.length + 1, (count, 1))
        for name in sizes.inputs:
            values, of_each = most[name]
            column = rng.integers(0, values, (count, of_each * sizes.length), np.int32)
            column[np.arange(column.shape[1]) >= of_each * lengths] = -1
            found[name] = column
        return {**found, "label": rng.integers(0, sizes.classes, count, np.int32)}

    def recommend(self, request: RecommendationRequest) -> Settings:
        """Returns the settings of a run where its user gives none, see `recommendation`."""
        from experiments.tasks.text.recommendation import recommended

        return recommended(request, self.sizes)

    def describe(self) -> dict[str, Any]:
        """Returns sizes and tokens: all that `described` needs, the public vocabulary with it."""
        from dpsgd.runs.records import to_json

        said = {"sizes": to_json(self.sizes), "tokens": to_json(self.tokens)}
        return {**said, "headline": "test_accuracy", "better": "higher"}

    @staticmethod
    def described(description: Mapping[str, Any], where: str = "task") -> DescribedText:
        """Returns the models of a task that was described so; its phrases need not be there.

        Raises:
          ValueError: if `description` is none; `where` begins its line.
        """
        from dpsgd.runs.records import build
        from experiments.tasks.text.model import Sizes
        from experiments.tasks.text.sources import Tokens

        return DescribedText(
            build(Sizes, description.get("sizes"), f"{where}: sizes"),
            build(Tokens, description.get("tokens"), f"{where}: tokens"),
        )


@dataclass(frozen=True)
class DescribedText(TextModels):
    """Models without rows: of a run or an export that is read back."""

    sizes: Sizes
    tokens: Tokens


@dataclass(frozen=True)
class Text(HeldOut, TextModels):
    """Phrases of some classes, a bag of words or a transformer, accuracy.

    Epsilon is per phrase: several phrases of one sentence, or of one author, are protected one at a
    time.
    """

    data: Path
    """Tab-separated file, plain or .gz, whose first line names the columns: "sentence", and
    "label", whole numbers from 0. No phrase that validates or tests shares four words in a row
    with one that trains; so how many train depends on their words, and no epsilon covers that
    number."""
    vocabulary: Path | None = None
    """Public vocabulary, never learned from private rows: a JSON file of the library tokenizers. By
    default words are hashed."""
    buckets: int = 8192
    """Of hashed words of the transformer."""
    classes: int = 2
    """Number of classes, declared."""
    length: int = 32
    """Tokens and words of a phrase that are read."""
    dim: int = 64
    """Dimension of a token's vector."""
    heads: int = 4
    """Heads of attention."""
    layers: int = 2
    """Blocks of the transformer."""
    lora_rank: int = 0
    """Rank of adapters (LoRA) beside the matrices of the blocks; 0 for none."""
    trained: Literal["all", "lora", "head"] = "all"
    """Which parameters are trained: all, adapters and last layer, or the last layer."""
    public_share: float = 0.0
    """Share of the training phrases, by a public hash of their numbers, that is declared public."""
    rows: Literal["private", "public"] = "private"
    """Which of them train: those that are not declared public, or, to start a private run from
    (--init-from), those that are."""
    layout: Literal["own", "bert", "gpt2"] = "own"
    """Of the transformer: a small one of its own, or those of BERT and GPT-2, whose published files
    --init-from then reads; with the --vocabulary of the same model (tokenizer.json), and its dim,
    heads and layers."""
    model: Literal["bag", "transformer", "wide-and-deep"] | None = None
    """A linear model of words and their beginnings, a transformer, or the sum of both. By default
    the bag; the transformer where a vocabulary or a part to train is given."""
    bag: int = 2**16
    """Of hashed words and beginnings of the bag."""

    def __post_init__(self) -> None:
        if self.layout != "own" and self.vocabulary is None:
            raise ValueError(f"layout is {self.layout}, which needs the vocabulary of its model")
        if not 0 <= self.public_share < 1:
            raise ValueError(f"public_share must be in [0, 1), got {self.public_share}")
        if self.rows == "public" and not self.public_share:
            raise ValueError("rows is public, and public_share is 0: no phrase is declared public")
        for name in ("buckets", "bag"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.model is None:  # the run's record holds what is chosen
            part = self.vocabulary is not None or self.lora_rank or self.trained != "all"
            object.__setattr__(self, "model", "transformer" if part else "bag")

    @cached_property
    def tokens(self) -> Tokens:  # type: ignore[override]
        """How phrases become tokens."""
        from experiments.tasks.text.sources import SourceError, Tokens

        if self.vocabulary is None:
            return Tokens(self.buckets)
        try:
            return Tokens(self.buckets, self.vocabulary.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise SourceError(f"vocabulary: {self.vocabulary} cannot be read: {error}") from None

    @cached_property
    def sizes(self) -> Sizes:  # type: ignore[override]
        """Of the model, by settings alone."""
        from experiments.tasks.text.model import Sizes

        return Sizes(
            self.tokens.count, self.length, self.classes, self.dim, self.heads,
            0 if self.model == "bag" else self.layers, self.lora_rank, self.trained,
            self.layout, 0 if self.model == "transformer" else self.bag,
        )  # fmt: skip

    @cached_property
    def source(self) -> dict[str, Columns]:
        """Tokens, words and labels of each split, read when they are first needed."""
        import numpy as np

        from experiments.tasks.splits import taken
        from experiments.tasks.text import sources

        found = sources.load(self.data, self.classes)
        masks, numbers = sources.split(found.texts), np.arange(len(found.texts))
        masks["train"] &= sources.public(numbers, self.public_share) == (self.rows == "public")
        whole = {**self.encode({"sentence": found.texts}), "label": found.label}
        return {name: taken(whole, mask) for name, mask in masks.items()}

    def columns(self) -> PyTree:
        """Returns the training phrases: tokens or words, int32[rows, ...], and labels."""
        return self.source["train"]

    def held_out(self, split: str) -> Iterator[PyTree]:
        """Returns the phrases of a split, block by block."""
        from experiments.tasks.splits import blocks_of

        return blocks_of(self.source[split])

    def check(self, begun: Mapping[str, Any] | None = None) -> None:
        """Raises ValueError if a split is empty, or model or vocabulary are not as a run began."""
        if self.layout == "bert" and not self.tokens.special:
            raise ValueError(
                f"vocabulary: {self.vocabulary} adds no special tokens, and BERT classifies by its "
                "first one, [CLS]: give the tokenizer.json of the model"
            )
        for split, rows in self.source.items():
            if not len(rows["label"]):
                raise ValueError(f"{self.data} has no {split} phrases")
        if begun is not None and begun != self.describe():
            raise ValueError("the vocabulary, or the sizes of the model, are not as they were")
