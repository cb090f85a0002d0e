"""Text: what is read, which phrases train, what is refused, and what the model makes of them."""

import gzip
from pathlib import Path

import jax
import numpy as np
import pytest

from dpsgd.gradients.frozen import frozen_leaves
from experiments.tasks.text import sources
from experiments.tasks.text.model import Sizes, functions, initial
from experiments.tasks.text.task import DescribedText, Text

SMALL = {"dim": 4, "heads": 2, "layers": 1, "length": 6, "buckets": 32}


def phrases(count=400, words=12, seed=0):
    rng = np.random.default_rng(seed)
    return [" ".join(f"w{i}" for i in rng.integers(0, words, rng.integers(1, 9)))
            for _ in range(count)]  # fmt: skip


def written(path, texts):
    rows = "".join(f"{i % 2}\t{text}\n" for i, text in enumerate(texts))
    data = ("label\tsentence\n" + rows).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def shared(one, other):
    words, others = one.split(), other.split()
    if min(len(words), len(others)) < 4:
        return words == others
    runs = {tuple(others[i : i + 4]) for i in range(len(others) - 3)}
    return any(tuple(words[i : i + 4]) in runs for i in range(len(words) - 3))


def test_no_training_phrase_shares_four_words_in_a_row_with_one_that_is_held_out():
    texts = phrases()
    masks = sources.split(texts)
    held = [texts[i] for i in np.flatnonzero(masks["validation"] | masks["test"])]
    assert held
    by_number = sources.random_masks(np.arange(len(texts)), sources.FRACTIONS)["train"]
    left_out = by_number & ~masks["train"]
    assert left_out.any()
    for i, text in enumerate(texts):
        if by_number[i]:
            assert left_out[i] == any(shared(text, other) for other in held)


def test_a_training_phrase_moves_no_other():
    texts = phrases()
    masks = sources.split(texts)
    changed = [i for i in np.flatnonzero(masks["train"])][:5]
    others = np.ones(len(texts), bool)
    others[changed] = False
    again = sources.split([text if others[i] else "w1 w2 w3 w4 w5" for i, text in enumerate(texts)])
    for name, mask in masks.items():
        np.testing.assert_array_equal(mask[others], again[name][others])


def test_public_and_private_rows_are_the_training_phrases_once(tmp_path):
    data = written(tmp_path / "some.tsv.gz", phrases())
    whole = Text(data, **SMALL).columns()
    parts = [Text(data, **SMALL, public_share=0.3, rows=rows).columns()
             for rows in ("public", "private")]  # fmt: skip
    assert 0.2 < len(parts[0]["label"]) / len(whole["label"]) < 0.4
    rows = np.concatenate([part["tokens"] for part in parts])
    np.testing.assert_array_equal(np.sort(rows, axis=0), np.sort(whole["tokens"], axis=0))


def test_padding_is_inert_and_a_phrase_without_tokens_has_a_prediction():
    short, longer = (Sizes(32, n, 2, 4, 2, 2) for n in (3, 6))
    params = initial(longer, 0)
    params["head"]["kernel"] = params["head"]["kernel"].replace(np.ones((4, 2), np.float32))
    params = jax.tree.map(lambda x: x + 0.1 * np.arange(x.size).reshape(x.shape) % 1, params)
    cut = jax.tree.map(lambda x: x[:3] if x.shape == (6, 4) else x, params)
    tokens = np.array([[3, 1, 7, -1, -1, -1], [-1] * 6], np.int32)
    padded = functions(longer).logits(params, {"tokens": tokens})
    bare = functions(short).logits(cut, {"tokens": tokens[:1, :3]})
    np.testing.assert_allclose(padded[:1], bare, rtol=1e-5)
    assert np.isfinite(padded).all()
    assert not np.allclose(padded[0], padded[1])


@pytest.mark.parametrize(("trained", "expected"), [("lora", {"lora", "head"}), ("head", {"head"})])
def test_the_parts_that_are_not_trained_have_no_derivative(trained, expected):
    sizes = Sizes(32, 6, 2, 4, 2, 1, 2, trained)
    params = initial(sizes, 0)
    example = jax.tree.map(lambda x: x[0], DescribedText(sizes, sources.Tokens(32)).generated(1))
    frozen = frozen_leaves(functions(sizes).loss, params, example)
    paths = [jax.tree_util.keystr(at) for at, _ in jax.tree_util.tree_leaves_with_path(params)]
    for k, path in enumerate(paths):
        assert (k in frozen) != any(name in path for name in expected), path


def test_a_vocabulary_of_a_file_is_kept_with_the_model(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"[UNK]": 0, "w1": 1, "w2": 2}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "words.json"))
    data = written(tmp_path / "some.tsv", phrases())
    task = Text(data, **SMALL, vocabulary=tmp_path / "words.json")
    assert task.sizes.tokens == 3
    again = DescribedText.described(task.describe())
    found = again.encode({"sentence": ["w2 w9 w1"]})["tokens"]
    np.testing.assert_array_equal(found, [[2, 0, 1, -1, -1, -1]])
    (tmp_path / "words.json").write_text("{}")
    with pytest.raises(ValueError, match="the vocabulary is no JSON of tokenizers"):
        Text(data, vocabulary=tmp_path / "words.json").columns()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: expected the name of one column sentence"),
        ("sentence\nfine\n", "line 1: expected the name of one column label"),
        ("label\tsentence\n1\n", "line 2: 1 columns, not 2"),
        ("label\tsentence\n2\tfine\n", "line 2, column label: found '2', expected a class from 0"),
    ],
)
def test_a_file_without_phrases_is_refused_by_its_line(tmp_path, text, message):
    (tmp_path / "some.tsv").write_text(text)
    with pytest.raises(sources.SourceError, match=message):
        Text(tmp_path / "some.tsv").columns()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dim": 5}, "dim must be a multiple of heads"),
        ({"trained": "lora"}, "lora_rank is 0"),
        ({"rows": "public"}, "public_share is 0"),
        ({"public_share": 1.0}, r"public_share must be in \[0, 1\)"),
    ],
)
def test_settings_that_make_no_model_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        _ = Text(Path("none.tsv"), **settings).sizes
