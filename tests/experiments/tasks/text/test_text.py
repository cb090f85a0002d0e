"""Text: what is read, which phrases train, what is refused, and what the model makes of them."""

import gzip
import zlib
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from dpsgd.gradients.clipping import clipped_grad
from dpsgd.gradients.frozen import frozen_leaves
from dpsgd.runs.recommendation import RecommendationRequest as Request
from dpsgd.runs.recommendation import Settings, generic
from experiments.tasks.text import sources
from experiments.tasks.text.bag import words
from experiments.tasks.text.model import Sizes, functions
from experiments.tasks.text.task import DescribedText, Text

SMALL = {"dim": 4, "heads": 2, "layers": 1, "length": 6, "buckets": 32, "bag": 64}
MODELS = {
    "bag": Sizes(32, 6, 3, 4, 2, 0, bag=64),
    "transformer": Sizes(32, 6, 3, 4, 2, 1),
    "wide-and-deep": Sizes(32, 6, 3, 4, 2, 1, bag=64),
}


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
    rows = np.concatenate([part["words"] for part in parts])
    np.testing.assert_array_equal(np.sort(rows, axis=0), np.sort(whole["words"], axis=0))


def test_padding_is_inert_and_a_phrase_without_tokens_has_a_prediction():
    short, longer = (Sizes(32, n, 2, 4, 2, 2) for n in (3, 6))
    params = functions(longer).init(0)
    params["head"]["kernel"] = params["head"]["kernel"].replace(np.ones((4, 2), np.float32))
    params = jax.tree.map(lambda x: x + 0.1 * np.arange(x.size).reshape(x.shape) % 1, params)
    cut = jax.tree.map(lambda x: x[:3] if x.shape == (6, 4) else x, params)
    tokens = np.array([[3, 1, 7, -1, -1, -1], [-1] * 6], np.int32)
    padded = functions(longer).logits(params, {"tokens": tokens})
    bare = functions(short).logits(cut, {"tokens": tokens[:1, :3]})
    np.testing.assert_allclose(padded[:1], bare, rtol=1e-5)
    assert np.isfinite(padded).all()
    assert not np.allclose(padded[0], padded[1])


def moved(params):
    """Returns parameters of which none is zero, so that no layer hides another."""
    return jax.tree.map(lambda x: x + 0.1 * (1 + np.arange(x.size).reshape(x.shape)) % 1, params)


def test_words_are_read_with_their_beginnings():
    found = words(["A Wonderful, ad", ""], 2**20, 4)
    assert found.shape == (2, 16)
    parts = ["wonderful", "won-", "wond-", "wonde-", "ad"]
    np.testing.assert_array_equal(found[0, :5], [zlib.crc32(x.encode()) % 2**20 for x in parts])
    assert (found[0, 5:] == -1).all()
    assert (found[1] == -1).all()
    cut = words(["no word is read behind the first four"], 2**20, 4)
    np.testing.assert_array_equal(cut, words(["no word is read"], 2**20, 4))


def test_the_features_of_a_phrase_have_norm_one_and_padding_is_inert():
    params, tables = moved(functions(MODELS["bag"]).init(0)), functions(MODELS["bag"])
    table, bias = params["weights"]["embedding"][...], params["bias"][...]
    rows = np.array([[5, 9, -1, -1], [7, 7, 7, 7], [-1] * 4], np.int32)
    expected = np.stack([(table[5] + table[9]) / 2**0.5, 2 * table[7], 0 * table[0]]) + bias
    np.testing.assert_allclose(tables.logits(params, {"words": rows}), expected, rtol=1e-5)


def test_wide_and_deep_is_the_sum_of_both():
    params = {name: moved(functions(sizes).init(0)) for name, sizes in MODELS.items()}
    both = params["transformer"] | {"bag": params["bag"]}
    rows = DescribedText(MODELS["wide-and-deep"], sources.Tokens(32)).generated(5)
    apart = [functions(MODELS[name]).logits(params[name], rows) for name in ("bag", "transformer")]
    summed = functions(MODELS["wide-and-deep"]).logits(type(params["transformer"])(both), rows)
    np.testing.assert_allclose(summed, sum(apart), rtol=1e-4, atol=1e-5)


def test_ghost_norms_clip_each_phrase_of_the_bag_as_its_own_gradient_does():
    rows = DescribedText(MODELS["bag"], sources.Tokens(32)).generated(6)
    params, loss = moved(functions(MODELS["bag"]).init(0)), functions(MODELS["bag"]).loss
    sums = []
    for method in ("ghost", "vmap"):
        found, said = clipped_grad(loss, l2_clip_norm=0.1, method=method)(params, rows, np.ones(6))
        assert said.clipped_count == 6
        sums.append(found)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6), *sums)


def test_the_model_is_the_bag_of_words_where_no_part_of_a_transformer_is_asked_for():
    given = [{}, {"lora_rank": 1}, {"trained": "head"}, {"vocabulary": Path("some.json")}]
    found = [Text(Path("none.tsv"), **settings).model for settings in given]
    assert found == ["bag", "transformer", "transformer", "transformer"]


def test_settings_follow_from_public_numbers_alone(tmp_path):
    task = Text(tmp_path / "absent.tsv")
    private = Request(35_327, 1e-5, target_epsilon=3.0)
    assert task.recommend(private) == Settings(4096, 30, 0.7, 0.07)
    averaged = Settings(4096, 30, 0.7, 0.049, average_tail=0.5)
    assert task.recommend(replace(private, may_average=True)) == averaged
    assert task.recommend(Request(35_327, 1e-5, may_average=True)) == task.recommend(
        Request(35_327, 1e-5)
    )
    assert task.recommend(Request(35_327, 1e-5)) == Settings(512, 20, 0.7, 0.02)
    given = task.recommend(replace(private, num_examples=10, epochs=2, batch_size=7))
    assert (given.epochs, given.batch_size) == (2, 7)
    assert task.recommend(replace(private, num_examples=10)).batch_size <= 10
    for model in ("transformer", "wide-and-deep"):
        assert replace(task, model=model).recommend(private) == generic(private)


@pytest.mark.parametrize(("trained", "expected"), [("lora", {"lora", "head"}), ("head", {"head"})])
def test_the_parts_that_are_not_trained_have_no_derivative(trained, expected):
    sizes = Sizes(32, 6, 2, 4, 2, 1, 2, trained)
    params = functions(sizes).init(0)
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
        ({"dim": 5, "model": "transformer"}, "dim must be a multiple of heads"),
        ({"trained": "lora"}, "lora_rank is 0"),
        ({"trained": "head", "model": "bag"}, "has no adapters, last layer or layout"),
        ({"bag": 0}, "bag must be at least 1"),
        ({"rows": "public"}, "public_share is 0"),
        ({"public_share": 1.0}, r"public_share must be in \[0, 1\)"),
    ],
)
def test_settings_that_make_no_model_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        _ = Text(Path("none.tsv"), **settings).sizes
