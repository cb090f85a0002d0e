"""A click model, exported or not, is asked: for rows of a table, or of a file, labelled or not."""

import gzip
import io
import json
import os
import shutil
import tracemalloc
import zipfile
from dataclasses import replace

import jax
import numpy as np
import pytest

from dpsgd import Run, RunSpec, load_exported
from dpsgd.models import predictions
from dpsgd.models.model import export
from dpsgd.runs.initial import read_arrays
from dpsgd.runs.result import Bundle
from experiments.tasks.clicks.formats import DISPLAY
from experiments.tasks.clicks.model import pure_functions
from experiments.tasks.clicks.schema import Schema
from experiments.tasks.clicks.sizes import ModelConfig
from experiments.tasks.clicks.store import Store
from experiments.tasks.clicks.synthetic import rows as synthetic
from experiments.tasks.clicks.task import ClickModels, Clicks
from samplers import Deterministic

ROWS = 200


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with train.txt, its store, a run on it and the model that was exported."""
    home = tmp_path_factory.mktemp("home")
    synthetic.write_raw(home / "train.txt", ROWS, seed=0)
    replace(DISPLAY, hash_seed=5).prepare(home / "train.txt", home / "store")
    task = Clicks(home / "store", embedding_dim=2, max_buckets=16, hidden=(4,))
    config = RunSpec.of(Deterministic(ROWS * 4 // 5, 40, 2), noise_multiplier=1.0, audit=False)
    Run.create(task, config, home / "run", name="clicks").train()
    export(home / "run", home / "model")
    return home


@pytest.fixture(scope="module")
def table(home):
    lines = [line.split("\t") for line in (home / "train.txt").read_text().splitlines()]
    return {name: [line[i] for line in lines] for i, name in enumerate(DISPLAY.layouts[0])}


@pytest.fixture(scope="module")
def expected(home):
    """The probabilities of all rows, by the store, the run's parameters and no shared code."""
    store = Store.open(home / "store")
    functions = pure_functions(ModelConfig(2, 16, (4,)), store.schema)
    params = read_arrays(home / "run" / "params.npz", functions.init(0))
    splits = [store.load(split) for split in ("train", "validation", "test")]
    rows = {name: np.concatenate([columns[name] for columns in splits]) for name in splits[0]}
    logits = jax.jit(jax.vmap(functions.logit, in_axes=(None, 0)))(params, rows)
    return 1 / (1 + np.exp(-np.asarray(logits, np.float64)))


def scores_of(path):
    content = path.read_bytes()
    text = gzip.decompress(content) if path.suffix == ".gz" else content
    header, *lines = text.decode().splitlines()
    assert header == "probability"
    return np.array([float(line) for line in lines])


# --- As a library --------------------------------------------------------------------------------


def test_a_loaded_model_predicts_raw_rows_like_the_trained_one(home, table, expected):
    model = load_exported(home / "model")
    predicted = model.predict(table)
    assert predicted.shape == (ROWS,)
    np.testing.assert_allclose(predicted, expected, rtol=1e-6)
    assert len(set(predicted)) > ROWS / 2
    first = {name: values[:1] for name, values in table.items() if name != "label"}
    np.testing.assert_allclose(model.predict(first), expected[:1], rtol=1e-6)
    assert model.predict({name: [] for name in table}).shape == (0,)


def test_rows_that_are_not_columns_are_refused_by_what_they_are(home, table):
    model = load_exported(home / "model")
    one = {name: values[0] for name, values in table.items()}
    with pytest.raises(TypeError, match=r"^rows must map each column name .* got list$"):
        model.task.encode([one])
    with pytest.raises(
        TypeError, match=r"^column \w+: expected a list of values, one per row, got "
    ):
        model.predict(one)


@pytest.fixture
def bundle(home, tmp_path):
    return shutil.copytree(home / "model", tmp_path / "bundle")


def edit(bundle, **fields):
    record = json.loads((bundle / "model.json").read_text())
    (bundle / "model.json").write_text(json.dumps({**record, **fields}))


def other_guarantee(bundle):
    record = json.loads((bundle / "guarantee.json").read_text())
    (bundle / "guarantee.json").write_text(json.dumps({**record, "epsilon_upper": 0.1}))


def other_params(bundle):
    with np.load(bundle / "params.npz") as saved:
        arrays = {name: array + 1 for name, array in saved.items()}
    np.savez(bundle / "params.npz", **arrays)


DAMAGES = {
    r"by another version: .*; export its run again": lambda b: edit(b, version=4),
    r"by another version: .*; export its run": lambda b: edit(b, format=None),
    "guarantee.json is damaged, or of another export": other_guarantee,
    "params.npz is damaged, or of another export": other_params,
    "model.json is damaged, or of another": lambda b: edit(
        b, task={**Bundle.read(b).task, "settings": {}}
    ),
    "model.json is damaged: task: name": lambda b: edit(b, task={"name": 3}),
    "model.json is damaged: Exp": lambda b: (b / "model.json").write_text("{"),
    "No such file or directory: .*params.npz": lambda b: (b / "params.npz").unlink(),
    "is not an exported model: it has no model.json": lambda b: (b / "model.json").unlink(),
}


@pytest.mark.parametrize("says", DAMAGES)
def test_a_damaged_or_older_bundle_is_refused_and_its_file_named(bundle, says):
    DAMAGES[says](bundle)
    with pytest.raises((ValueError, FileNotFoundError), match=says):
        load_exported(bundle)


def forge(bundle, params):
    """Gives a bundle other parameters, and checksums that agree: anybody can."""
    task = Bundle.read(bundle).task
    (bundle / "params.npz").write_bytes(params)
    manifest = Bundle.manifest(bundle, task)
    (bundle / "model.json").write_text(json.dumps(manifest))


def written(save, *arrays, **named):
    save(file := io.BytesIO(), *arrays, **named)
    return file.getvalue()


def zeros_that_take_no_room(name, numbers):
    file, header = io.BytesIO(), {"descr": "<f4", "fortran_order": False, "shape": (numbers,)}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as packed:
        with packed.open(f"{name}.npy", "w") as member:
            np.lib.format.write_array_header_1_0(member, header)
            for _ in range(0, numbers, 1 << 20):
                member.write(bytes(1 << 22))
        packed.writestr("padding", os.urandom(1 << 16))
    return file.getvalue()


NAMES = [f"['hidden'][0]['{name}'].value" for name in ("bias", "kernel")]
FORGERIES = {
    "another type": lambda: written(np.savez, **dict.fromkeys(NAMES, np.array(["a"] * 4))),
    "other numbers": lambda: written(np.savez, **dict.fromkeys(NAMES, np.zeros(4, complex))),
    "one array": lambda: written(np.save, np.zeros(4, np.float32)),
    "objects": lambda: written(np.savez, **dict.fromkeys(NAMES, np.array([{}] * 4))),
    "a bomb": lambda: zeros_that_take_no_room(NAMES[0], 1 << 24),
    "a bomb beside": lambda: zeros_that_take_no_room("beside", 1 << 24),
}


@pytest.mark.parametrize("params", FORGERIES.values(), ids=FORGERIES)
def test_untrusted_parameters_are_refused_without_using_memory(bundle, params):
    forge(bundle, params())
    tracemalloc.start()
    try:
        with pytest.raises(
            ValueError, match=r"params\.npz (is damaged|lacks the parameter)"
        ) as error:
            load_exported(bundle)
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
    finally:
        tracemalloc.stop()
    assert "\n" not in str(error.value)


# --- dpsgd score ---------------------------------------------------------------------------------


def score(home, out, progress=lambda rows: None, file="train.txt"):
    model = load_exported(home / "model")
    predictions.write_predictions(out, model.predictions(home / file), progress=progress)


def cut_label(line):
    return line.split("\t", 1)[1]


@pytest.mark.parametrize("model", ["model", "run"])
@pytest.mark.parametrize("labelled", [True, False])
@pytest.mark.parametrize("packed", ["", ".gz"])
def test_a_file_is_scored_row_by_row_with_labels_or_without(
    home, tmp_path, expected, model, labelled, packed, command
):
    lines = (home / "train.txt").read_text().splitlines(keepends=True)
    text = "".join(lines if labelled else map(cut_label, lines)).encode()
    file, out = tmp_path / f"rows{packed}", tmp_path / f"scores.csv{packed}"
    file.write_bytes(gzip.compress(text) if packed else text)
    command("score", home / model, file, "--out", out)
    np.testing.assert_allclose(scores_of(out), expected, rtol=1e-6)


def test_the_split_of_a_store_is_scored_in_its_order(home, tmp_path, expected, command):
    out = tmp_path / "scores.csv"
    command("score", home / "model", home / "store", "--split", "test", "--out", out)
    np.testing.assert_allclose(scores_of(out), expected[-ROWS // 10 :], rtol=1e-6)


def test_what_is_there_is_never_overwritten(home, tmp_path, command, monkeypatch):
    out = tmp_path / "scores.csv"
    out.write_text("mine")
    line = command.refuses("score", home / "model", home / "train.txt", "--out", out)
    assert "exists already and is left as it is" in line
    out.unlink()
    monkeypatch.setattr(predictions, "BATCH", 64)

    def appear(rows):
        out.write_text("somebody's")

    with pytest.raises(FileExistsError):
        score(home, out, appear)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["somebody's"]


REFUSED = {  # words after `score` -> what is said of them
    ("model", "short.txt"): r"short.txt, line 201: found 2 columns, expected 40",
    ("model", "word.txt"): r"word.txt, line 201, column I1: found 'q', expected an integer",
    (
        "model",
        "train.txt",
        "--split",
        "test",
    ): "is a file, which has no splits; leave out --sp",
    ("empty", "train.txt"): "neither an exported model nor a run directory",
    ("model", "train.txt", "no"): "is not a folder; create it for scores.csv",
}


@pytest.mark.parametrize("words", REFUSED)
def test_impossible_scores_are_refused_and_write_nothing(home, tmp_path, command, words):
    (tmp_path / "empty").mkdir()
    for name, line in (("short.txt", "x\ty"), ("word.txt", "1" + "\tq" * 39)):
        (tmp_path / name).write_text((home / "train.txt").read_text() + line + "\n")
    before = sorted(tmp_path.rglob("*"))
    more = list(words[2:])
    places = [(home if name in ("model", "train.txt") else tmp_path) / name for name in words[:2]]
    out = tmp_path / ("no" if more == ["no"] else "") / "scores.csv"
    options = more if more != ["no"] else []
    assert REFUSED[words] in command.refuses("score", *places, *options, "--out", out)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.long
def test_memory_does_not_grow_with_the_file(home, tmp_path, monkeypatch):
    lines = (home / "train.txt").read_bytes()
    monkeypatch.setattr(predictions, "BATCH", 256)
    monkeypatch.setattr("experiments.tasks.files.BLOCK_BYTES", 1 << 15)

    def peak(copies):
        file = tmp_path / f"rows{copies}"
        file.write_bytes(lines * copies)
        tracemalloc.start()
        try:
            score(home, tmp_path / f"scores{copies}.csv", file=file)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(1)  # what is made once
    assert peak(64) < 1.2 * peak(32)  # Arrow reads some thirty blocks ahead


# --- dpsgd evaluate ------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["model", "run"])
def test_a_split_of_a_store_is_evaluated_alone(home, command, model):
    record = json.loads((home / "run" / "report.json").read_text())
    for split in ("validation", "test"):
        said = command("evaluate", home / model, home / "store", "--split", split)
        metrics = dict(line.split(": ") for line in said.splitlines())
        assert float(metrics["auc"]) == pytest.approx(record["metrics"][f"{split}_auc"], rel=1e-5)
        assert int(metrics["num_examples"]) == record["metrics"][f"{split}_num_examples"]
    said = command("evaluate", home / model, home / "store").splitlines()
    assert ("trained the model" in said[0]) == (model == "run")
    metrics = dict(line.split(": ") for line in said[model == "run" :])
    assert int(metrics["num_examples"]) == ROWS


def test_the_clearest_difference_of_store_and_model_is_named(home):
    store = Store.open(home / "store")
    schema = store.schema
    assert store.schema_mismatch(schema, 5) is None
    fewer = replace(schema, integers=schema.integers[:-1], bounds=())
    one = Schema(schema.name, ("I1",), (), ())
    buckets = replace(schema, buckets=(4, *schema.buckets[1:]))
    for other, says in {
        replace(one, name="other"): "holds rows of criteo-display, not of other",
        fewer: "was prepared with other columns (I13)",
        one: "was prepared with other columns (C1, C10, C11, C12, C13, ...)",
        buckets: "was prepared with other buckets",
        replace(schema, label="y"): "was prepared with other label",
        replace(schema, transform="none"): "was prepared with other transform",
    }.items():
        assert store.schema_mismatch(other, 6) == says
    assert store.schema_mismatch(replace(schema, bounds=()), 5) is None  # the rows are the same
    with pytest.raises(ValueError, match=r"hash seed \d+, not 6.*, so the model cannot read"):
        ClickModels(ModelConfig(2, 16, (4,)), schema, 6).read(home / "store")
