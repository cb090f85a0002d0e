"""BERT's and GPT-2's files are read as they are published: their numbers come out, to 1e-5."""

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy.special import erf

from dpsgd.runs.initial import initial_params
from experiments.cli import main
from experiments.tasks.text.layouts import LAYOUTS
from experiments.tasks.text.model import Sizes, functions
from experiments.tasks.text.task import Text

sys.path.insert(0, str(Path(__file__).parents[3] / "dpsgd" / "runs"))
from test_mapping import safetensors

TOKENS, LENGTH, DIM, HEADS, LAYERS, CLASSES = 24, 7, 8, 2, 2, 3
PHRASES = np.array(
    [[3, 1, 7, 7, 20, -1, -1], [5, 2, 23, 0, 11, 13, 4], [9, -1, -1, -1, -1, -1, -1]]
)


# The published definitions, in float64, phrase by phrase, without padding. Source: see `layouts`.


def normalised(x, scale, bias, epsilon):
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + epsilon) * scale + bias


def attended(q, k, v, sees):
    """Multi-head attention of float64[tokens, dim] each; `sees` is bool[tokens, tokens]."""
    heads = []
    for part in np.split(np.arange(DIM), HEADS):
        scores = np.where(sees, q[:, part] @ k[:, part].T / np.sqrt(len(part)), -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        heads.append(weights / weights.sum(-1, keepdims=True) @ v[:, part])
    return np.hstack(heads)


def bert(file, tokens):
    def dense(x, name):  # torch.nn.Linear
        return x @ file[f"{name}.weight"].T.astype(float) + file[f"{name}.bias"]

    def norm(x, name):
        return normalised(x, file[f"{name}.weight"], file[f"{name}.bias"], 1e-12)

    e = "bert.embeddings."
    x = file[f"{e}word_embeddings.weight"][tokens].astype(float)
    x = x + file[f"{e}position_embeddings.weight"][: len(tokens)]
    x = norm(x + file[f"{e}token_type_embeddings.weight"][0], f"{e}LayerNorm")
    for k in range(LAYERS):
        at = f"bert.encoder.layer.{k}."
        q, key, v = (dense(x, f"{at}attention.self.{name}") for name in ("query", "key", "value"))
        mixed = attended(q, key, v, np.ones((len(x), len(x)), bool))
        x = norm(x + dense(mixed, f"{at}attention.output.dense"), f"{at}attention.output.LayerNorm")
        wide = dense(x, f"{at}intermediate.dense")
        wide = wide * 0.5 * (1 + erf(wide / np.sqrt(2)))
        x = norm(x + dense(wide, f"{at}output.dense"), f"{at}output.LayerNorm")
    return dense(np.tanh(dense(x[0], "bert.pooler.dense")), "classifier")


def gpt2(file, tokens):
    def dense(x, name):  # Conv1D
        return x @ file[f"{name}.weight"].astype(float) + file[f"{name}.bias"]

    def norm(x, name):
        return normalised(x, file[f"{name}.weight"], file[f"{name}.bias"], 1e-5)

    x = file["transformer.wte.weight"][tokens].astype(float)
    x = x + file["transformer.wpe.weight"][: len(tokens)]
    for k in range(LAYERS):
        at = f"transformer.h.{k}."
        q, key, v = np.split(dense(norm(x, f"{at}ln_1"), f"{at}attn.c_attn"), 3, -1)
        mixed = attended(q, key, v, np.tri(len(x), dtype=bool))
        x = x + dense(mixed, f"{at}attn.c_proj")
        wide = dense(norm(x, f"{at}ln_2"), f"{at}mlp.c_fc")
        cubed = np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)
        x = x + dense(0.5 * wide * (1 + np.tanh(cubed)), f"{at}mlp.c_proj")
    return norm(x, "transformer.ln_f")[-1] @ file["score.weight"].T


def filled(shapes):
    """Returns random arrays of these shapes, float32."""
    rng = np.random.default_rng(1)
    return {name: rng.normal(0, 0.5, shape).astype("<f4") for name, shape in shapes.items()}


def vectors(name, size):
    return {f"{name}.weight": (size,), f"{name}.bias": (size,)}


def linear(name, inputs, outputs, conv=False):
    weight = (inputs, outputs) if conv else (outputs, inputs)
    return {f"{name}.weight": weight, f"{name}.bias": (outputs,)}


def bert_file():
    e = "bert.embeddings."
    shapes = {f"{e}word_embeddings.weight": (TOKENS, DIM)} | vectors(f"{e}LayerNorm", DIM)
    shapes |= {
        f"{e}position_embeddings.weight": (16, DIM),
        f"{e}token_type_embeddings.weight": (2, DIM),
    }
    for at in (f"bert.encoder.layer.{k}." for k in range(LAYERS)):
        for name in ("self.query", "self.key", "self.value", "output.dense"):
            shapes |= linear(f"{at}attention.{name}", DIM, DIM)
        shapes |= linear(f"{at}intermediate.dense", DIM, 4 * DIM)
        shapes |= linear(f"{at}output.dense", 4 * DIM, DIM)
        shapes |= vectors(f"{at}attention.output.LayerNorm", DIM) | vectors(
            f"{at}output.LayerNorm", DIM
        )
    shapes |= linear("bert.pooler.dense", DIM, DIM) | linear("classifier", DIM, CLASSES)
    left = {"bert.embeddings.position_ids": np.arange(16), "cls.predictions.bias": np.zeros(TOKENS)}
    return {**filled(shapes), **left}


def gpt2_file():
    shapes = {"transformer.wte.weight": (TOKENS, DIM), "transformer.wpe.weight": (16, DIM)}
    shapes |= vectors("transformer.ln_f", DIM) | {"score.weight": (CLASSES, DIM)}
    for at in (f"transformer.h.{k}." for k in range(LAYERS)):
        shapes |= vectors(f"{at}ln_1", DIM) | vectors(f"{at}ln_2", DIM)
        shapes |= linear(f"{at}attn.c_attn", DIM, 3 * DIM, True)
        shapes |= linear(f"{at}attn.c_proj", DIM, DIM, True)
        shapes |= linear(f"{at}mlp.c_fc", DIM, 4 * DIM, True)
        shapes |= linear(f"{at}mlp.c_proj", 4 * DIM, DIM, True)
    return {**filled(shapes), "transformer.h.0.attn.bias": np.ones((1, 1, 16, 16))}


PUBLISHED = {
    "bert": (
        bert,
        bert_file(),
        (r"classifier\.weight=head.kernel:T", r"classifier\.bias=head.bias"),
    ),
    "gpt2": (gpt2, gpt2_file(), (r"score\.weight=head.kernel:T",)),
}
SIZES = {
    name: Sizes(TOKENS, LENGTH, CLASSES, DIM, HEADS, LAYERS, layout=name) for name in PUBLISHED
}


def params_of(name, path, rules):
    return initial_params(functions(SIZES[name]).init(0), str(path), rules, LAYOUTS[name].init_map)


@pytest.mark.parametrize("renamed", [False, True])
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_says_what_its_definition_says(name, renamed, tmp_path):
    reference, file, rules = PUBLISHED[name]
    stored = file
    if renamed:  # as the base model alone, and older files, name them
        stored = {
            key.removeprefix("bert.").removeprefix("transformer.")
            .replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): array
            for key, array in file.items()
        }  # fmt: skip
    params = params_of(name, safetensors(tmp_path / "model", stored), rules)[0]
    found = functions(SIZES[name]).logits(params, {"tokens": PHRASES})
    expected = [reference(file, row[row >= 0]) for row in PHRASES]
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("name", PUBLISHED)
def test_nothing_but_the_head_and_adapters_starts_fresh(name, tmp_path):
    _, file, rules = PUBLISHED[name]
    path = safetensors(tmp_path / "model", {k: v for k, v in file.items() if "c_fc.bias" not in k})
    with pytest.raises(ValueError, match=r"arrays of no parameter: (classifier|score)"):
        params_of(name, path, ())
    if name == "gpt2":
        with pytest.raises(
            ValueError, match=r"does not hold the parameter blocks.0.widen.bias \(32"
        ):
            params_of(name, path, rules)
    else:
        record = params_of(name, path, ("classifier.*=",))[1]
        assert record["fresh"] == ["head.bias", "head.kernel"]
        at = "bert.encoder.layer.1.attention.self"
        assert record["taken"]["blocks.1.qkv.kernel"] == [
            f"{at}.query.weight", f"{at}.key.weight", f"{at}.value.weight",
        ]  # fmt: skip


def test_a_bag_of_words_beside_a_published_model_starts_fresh(tmp_path):
    _, file, rules = PUBLISHED["gpt2"]
    both = functions(dataclasses.replace(SIZES["gpt2"], bag=16, lora_rank=2)).init(0)
    path = str(safetensors(tmp_path / "model", file))
    fresh = initial_params(both, path, rules, LAYOUTS["gpt2"].init_map)[1]["fresh"]
    assert {name.split(".")[0] for name in fresh} == {"bag", "blocks", "head"}
    assert all(".lora." in name for name in fresh if name.startswith("blocks"))


def vocabulary(path, layout):
    """Writes the tokenizer.json of a model: word pieces, or pairs of bytes."""
    tokenizers = pytest.importorskip("tokenizers")
    if layout == "bert":
        pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "good", "bad", "##ly", "film", "a", "b"]
        made = tokenizers.Tokenizer(
            tokenizers.models.WordPiece({p: k for k, p in enumerate(pieces)}, unk_token="[UNK]")
        )
        made.normalizer = tokenizers.normalizers.BertNormalizer()
        made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
        made.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
        made.enable_padding(length=9, pad_token="[PAD]")
    else:
        letters = sorted({*"agodbfilmGy", "Ġ"})
        made = tokenizers.Tokenizer(
            tokenizers.models.BPE({p: k for k, p in enumerate([*letters, "oo"])}, [("o", "o")])
        )
        made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.post_processor = tokenizers.processors.ByteLevel()
    made.save(str(path))
    return made


@pytest.mark.parametrize(
    ("layout", "text", "expected"),
    [
        ("bert", "Goodly film", [2, 4, 6, 7, 3, -1, -1]),
        ("bert", "a b a b a b a b", [2, 8, 9, 8, 9, 8, 3]),
        ("gpt2", "good a", ["g", "oo", "d", "Ġ", "a", -1, -1]),
        ("gpt2", "good good", ["g", "oo", "d", "Ġ", "g", "oo", "d"]),
    ],
)
def test_a_phrase_keeps_the_special_tokens_of_its_model(layout, text, expected, tmp_path):
    made = vocabulary(tmp_path / "tokenizer.json", layout)
    task = Text(Path("none"), tmp_path / "tokenizer.json", length=LENGTH, layout=layout)
    ids = [made.token_to_id(one) if isinstance(one, str) else one for one in expected]
    assert task.encode({"sentence": [text]})["tokens"].tolist() == [ids]


def test_a_layout_without_its_vocabulary_is_refused(tmp_path):
    with pytest.raises(ValueError, match="layout is bert, which needs the vocabulary"):
        Text(Path("none"), layout="bert")
    vocabulary(tmp_path / "bert.json", "bert")
    with pytest.raises(ValueError, match="length must be more than the 2 tokens"):
        Text(Path("none"), tmp_path / "bert.json", length=2).encode({"sentence": ["a"]})
    vocabulary(tmp_path / "bytes.json", "gpt2")
    with pytest.raises(ValueError, match=r"bytes.json adds no special tokens, and BERT"):
        Text(Path("none"), tmp_path / "bytes.json", layout="bert").check()


@pytest.mark.long
@pytest.mark.parametrize("layout", PUBLISHED)
def test_adapters_of_a_published_model_are_trained_by_the_command(layout, tmp_path, capsys):
    made = vocabulary(tmp_path / "tokenizer.json", layout)
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(["a", "b", "film"], 3)) for _ in range(300)]
    rows = "".join(f"{k % 2}\t{t} {('bad', 'good')[k % 2]}\n" for k, t in enumerate(texts))
    (tmp_path / "rows.tsv").write_text("label\tsentence\n" + rows)
    _, file, _ = PUBLISHED[layout]
    words = (
        "bert.embeddings.word_embeddings.weight" if layout == "bert" else "transformer.wte.weight"
    )
    file = {**file, words: file[words][: made.get_vocab_size()]}
    model = safetensors(tmp_path / "tiny.safetensors", file)
    head = {"bert": "classifier", "gpt2": "score"}[layout]
    main([
        "train", str(tmp_path / "rows.tsv"), "--task", "text", "sampler:balls-and-bins",
        "--batch-size", "50", "--epochs", "2", "--noise-multiplier", "0.5", "--layout", layout,
        "--vocabulary", str(tmp_path / "tokenizer.json"), "--dim", str(DIM), "--heads", str(HEADS),
        "--layers", str(LAYERS), "--length", str(LENGTH), "--lora-rank", "2", "--trained", "lora",
        "--init-from", str(model), "--init-map", rf"{head}\..*=", "--out", str(tmp_path / "out"),
    ])  # fmt: skip
    assert "NO GUARANTEE (public rows need none)" in capsys.readouterr().out
    with np.load(tmp_path / "out" / "params.npz") as found:
        np.testing.assert_array_equal(found["['tokens']['embedding'].value"], file[words])
        assert (found["['blocks'][0]['qkv']['lora']['lora_b'].value"] != 0).any()
        assert (found["['head']['kernel'].value"] != 0).all()
    record = json.loads((tmp_path / "out" / "config.json").read_text())["initial"]
    assert {name.split(".")[-1] for name in record["fresh"]} == {
        "lora_a",
        "lora_b",
        "kernel",
        "bias",
    }
