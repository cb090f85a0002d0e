"""Images: what is read, what is refused, and what the network makes of them."""

import io
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from dpsgd import Mechanism, dpsgd, train
from experiments.tasks.classes import few_shot_metrics
from experiments.tasks.images import sources
from experiments.tasks.images.model import ConvNet, prototypical_loss
from experiments.tasks.images.sources import Sizes
from experiments.tasks.images.task import ImageModels, Images
from experiments.tasks.splits import random_masks
from experiments.tasks.tfds import SourceError
from samplers import Multistage
from tests.experiments.tasks.built import built


def test_digits_are_split_by_row_number():
    found = sources.digits()
    assert (found.shape, found.classes) == ((8, 8, 1), 10)
    sizes = {split: len(rows["label"]) for split, rows in found.splits.items()}
    assert sizes == {name: m.sum() for name, m in random_masks(np.arange(1797)).items()}
    whole = found.rows(None)
    assert whole["image"].shape == (1797, 8, 8, 1)
    assert whole["image"].dtype == np.uint8
    assert (whole["image"].min(), whole["image"].max()) == (0, 255)
    assert set(whole["label"]) == set(range(10))


def images(tmp_path, splits, *, shape=(6, 4, 3), label="kind", names=("picture",)):
    """The directory of a data set of PNGs."""
    kinds = pytest.importorskip("tensorflow_datasets").features
    features = {name: kinds.Image(shape=shape) for name in names}
    features["kind"] = kinds.ClassLabel(num_classes=3)
    return built(tmp_path, "tiny", features, splits, ("picture", label))


def png(pixels):
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="PNG")
    return file.getvalue()


def pictures(count, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, 6, 4, 3), np.uint8)


def records(pixels, **fields):
    return [{"picture": png(x), "kind": i % 3, **fields} for i, x in enumerate(pixels)]


def test_images_of_tensorflow_datasets_are_read_without_it(tmp_path):
    pixels = pictures(30)
    folder = images(tmp_path, {"train": records(pixels), "test": records(pixels[:9])})
    task = Images(folder, channels=(4,))
    assert task.sizes == Sizes((6, 4, 3), 3, (4,))
    np.testing.assert_array_equal(task.columns()["image"], pixels)
    np.testing.assert_array_equal(task.columns()["label"], np.arange(30) % 3)
    sizes = {split: len(rows["label"]) for split, rows in task.source.splits.items()}
    assert sizes["validation"] + sizes["test"] == 9
    task.check()
    again = ImageModels.described(task.describe())
    assert again.sizes == task.sizes
    [block] = again.read(folder, labelled=False, split="train")
    assert list(block) == ["image"]
    assert jax.eval_shape(again.predict, task.init(0), block).shape == (30, 3)
    with pytest.raises(
        SourceError, match=r"tfds:tiny/1.0.0 has no split 'tset'; it has train, val"
    ):
        again.read(folder, split="tset")
    with pytest.raises(ValueError, match=r"\(6, 4, 3\) and 3 classes, but the model needs"):
        ImageModels(Sizes((8, 8, 1), 10, (4,))).read(folder)


@pytest.mark.parametrize(
    ("fields", "options", "message"),
    [
        ({"kind": -1}, {}, "split train, record 0, feature kind: found -1, expected a class from"),
        (
            {},
            {"shape": (None, None, 3)},
            r"feature picture: found images of shape \(None, None, 3\)",
        ),
        ({}, {"label": "sort"}, "has no feature 'sort'; it has kind, picture"),
        ({}, {"label": "picture"}, "feature picture: expected a class label"),
        (
            {"back": png(pictures(1)[0])},
            {"names": ("picture", "back")},
            "has 2 image features, exp",
        ),
    ],
)
def test_data_sets_that_do_not_fit_are_refused_by_feature(tmp_path, fields, options, message):
    folder = images(tmp_path, {"train": records(pictures(3), **fields)}, **options)
    with pytest.raises(SourceError, match=message):
        Images(folder).columns()


def test_missing_directories_and_empty_splits_are_refused(tmp_path):
    with pytest.raises(SourceError, match="mnist is not a directory; name the version"):
        Images(Path("mnist")).columns()
    folder = images(tmp_path, {"train": records(pictures(2))})  # both train
    with pytest.raises(ValueError, match="has no validation images"):
        Images(folder).check()


X, Y = pictures(40), np.arange(40) % 4


def archive(folder, **arrays):
    path = folder / "some.npz"
    np.savez(path, **arrays)
    return path


def test_images_of_a_numpy_archive_are_split_by_their_numbers(tmp_path):
    task = Images(
        archive(tmp_path, x=X[..., 0], y=Y.astype(np.uint8)), channels=(2,), num_classes=4
    )
    assert task.describe()["sizes"]["shape"] == [6, 4, 1]
    masks = random_masks(np.arange(40))
    np.testing.assert_array_equal(task.columns()["image"][..., 0], X[masks["train"], ..., 0])
    np.testing.assert_array_equal(task.source.rows("test")["label"], Y[masks["test"]])


def test_a_damaged_archive_is_refused_in_one_line(tmp_path):
    path, one_array = tmp_path / "some.npz", io.BytesIO()
    np.save(one_array, X)
    for content in (b"", one_array.getvalue(), archive(tmp_path, x=X, y=Y).read_bytes()[:-99]):
        path.write_bytes(content)
        with pytest.raises(SourceError, match=r"some\.npz is not a NumPy archive"):
            Images(path, num_classes=4).columns()


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": X}, "some.npz is not a NumPy archive with arrays x and y"),
        ({"x": X / 255, "y": Y}, r"x: expected uint8.*found float64\(40, 6, 4, 3\)"),
        ({"x": X, "y": Y[1:]}, r"y: expected one class per image.*int64\(39,\)"),
        ({"x": X, "y": Y - 1}, "y: expected one class per image.* from -1"),
        ({"x": X, "y": Y + 1}, "integers from 0 to 3, found .* to 4"),
    ],
)
def test_an_archive_that_holds_no_images_is_refused_by_array(tmp_path, arrays, message):
    with pytest.raises(SourceError, match=message):
        Images(archive(tmp_path, **arrays), num_classes=4).columns()


def test_an_archive_requires_a_declared_number_of_classes(tmp_path):
    path = archive(tmp_path, x=X, y=Y)
    with pytest.raises(SourceError, match="an archive needs --num-classes"):
        Images(path).columns()
    assert Images(path, num_classes=9).sizes.classes == 9
    with pytest.raises(ValueError, match="--num-classes 9: digits has 10 classes; leave it out"):
        Images(num_classes=9).columns()


def test_a_test_archive_is_tested_and_all_other_images_train(tmp_path):
    (tmp_path / "held").mkdir()
    held = archive(tmp_path / "held", x=pictures(30, seed=1), y=Y[:30])
    task = Images(archive(tmp_path, x=X, y=Y), test=held, channels=(2,), num_classes=4)
    tested = [task.source.rows(split)["image"] for split in ("validation", "test")]
    for found, expected in ((task.columns()["image"], X), (tested, pictures(30, seed=1))):
        whole = np.concatenate(found) if isinstance(found, list) else found
        assert sorted(x.tobytes() for x in whole) == sorted(x.tobytes() for x in expected)
    task.check()
    np.savez(held, x=X[5:], y=Y[5:])
    with pytest.raises(SourceError, match=r"held.*: all its images are also in some.npz"):
        Images(tmp_path / "some.npz", test=held, num_classes=4).columns()
    np.savez(held, x=X[:, :4], y=Y)
    with pytest.raises(SourceError, match=r"held.* has images of shape \(4, 4, 3\), some"):
        Images(tmp_path / "some.npz", test=held, num_classes=4).columns()


# ------------------------------------------------------------------------------------- few-shot


def test_new_classes_are_tested_and_only_other_classes_train():
    task = Images(new_classes=3, tasks=20)
    rows, plain = task.source.splits, Images().source.splits
    assert set(rows["train"]["label"]) == set(rows["validation"]["label"]) == set(range(7))
    assert set(rows["test"]["label"]) == {7, 8, 9}
    assert len(rows["test"]["label"]) == sum((p["label"] > 6).sum() for p in plain.values())
    data = task.columns()
    assert data.population.tree.shape.names == ("task", "class")
    np.testing.assert_array_equal(data.columns["image"], rows["train"]["image"])
    counts = np.unique(data.population.tree.sizes(2))
    assert np.ptp(counts) <= 2  # as many images of each class in each task
    assert Images(new_classes=3).columns().population.tree.shape.names == ("class",)


def test_too_few_images_for_few_shot_accuracy_are_refused_first(tmp_path):
    x, y = np.zeros((3000, 2, 2), np.uint8), np.arange(3000) % 10
    task = Images(archive(tmp_path, x=x, y=y), new_classes=4, num_classes=10)
    task.check()
    archive(tmp_path, x=x[:200], y=y[:200])
    few = Images(task.data, new_classes=4, num_classes=10)
    with pytest.raises(ValueError, match=r"some\.npz, validation images: few-shot accuracy needs"):
        few.check()


def test_an_episode_loss_follows_distances_from_prototypes():
    embeddings = np.random.default_rng(0).normal(size=(3, 6, 4)).astype(np.float32)
    losses = []
    for label in range(3):
        for query in embeddings[label, 3:]:
            near = -np.square(query - embeddings[:, :3].mean(1)).sum(-1)
            losses.append(np.log(np.exp(near).sum()) - near[label])
    assert jax.jit(prototypical_loss)(embeddings) == pytest.approx(np.mean(losses), rel=1e-5)
    task = Images(new_classes=3, channels=(2,))
    with pytest.raises(ValueError, match="use sampler:multistage"):
        task.loss({}, {"image": X[0]})


@pytest.mark.parametrize("shape", [(6, 5, 3), pytest.param((7, 4, 1), marks=pytest.mark.long)])
def test_an_embedding_is_what_the_convolutions_give(shape):
    net = ConvNet(Sizes(shape, 4, (3, 2), new_classes=2), nnx.Rngs(0))
    image = np.random.default_rng(0).integers(0, 256, shape, np.uint8)

    @jax.jit
    def both(image):
        x = image / 127.5 - 1
        for layer in net.convolutions:
            x = nnx.relu(layer(x))
        return x.ravel(), net(image)

    np.testing.assert_allclose(*both(image), atol=1e-5)


def test_few_shot_accuracy_is_of_the_nearest_prototype():
    labels = np.repeat([3, 7], 12)
    told = few_shot_metrics((np.eye(8)[some], some) for some in (labels[:9], labels[9:]))
    assert told == {"accuracy": 1.0, "num_examples": 24}
    same = few_shot_metrics([(np.ones((24, 2)), labels)])
    assert same["accuracy"] == 0.5  # all as near: the first class
    assert np.isnan(few_shot_metrics([(np.full((24, 2), np.nan), labels)])["accuracy"])
    for few in (labels[:12], labels[:15], labels[:0]):
        with pytest.raises(ValueError, match="more than 5 images each"):
            few_shot_metrics([(np.eye(8)[few], few)] * bool(few.size))


@pytest.mark.long
def test_a_few_shot_run_is_audited_and_learns_new_classes():
    task = Images(new_classes=3, tasks=14, channels=(8, 16))
    data, params = task.columns(), task.init(0)
    of = {"clipped_level": 1}
    private = Multistage(data.population.tree, (7, 5, 4), steps=4, **of)
    found = train(
        dpsgd(task.loss, optax.adam(0.01)), Mechanism(private, 4.0, 1.0), params, data, delta=1e-3
    )
    assert found.guarantee.unit == "example"
    assert "passed: the compiled program and the draws" in found.guarantee.notes[-1]
    sampler = Multistage(data.population.tree, (7, 5, 4), steps=80, **of)
    trained = train(
        dpsgd(task.loss, optax.adam(0.01)), Mechanism(sampler, 0.1, 1.0), params, data,
        insecure_seed=0, audit=False,
    )  # fmt: skip
    accuracy = [task.metrics(p)["validation_accuracy"] for p in (params, trained.params)]
    assert accuracy[1] > accuracy[0] + 0.02


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"channels": (0,)}, r"channels\[0\] must be an integer >= 1"),
        ({"classes": 1}, "classes must be an integer >= 2"),
        ({"new_classes": 9}, "--new-classes must be 0, or between 2 and 8 with 10 classes"),
    ],
)
def test_sizes_that_make_no_network_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Sizes(**{"shape": (8, 8, 1), "classes": 10, "channels": (16,), **settings})


@pytest.mark.long
@pytest.mark.parametrize("shape", [(7, 5, 3), (1, 1, 2)])
def test_the_network_takes_any_image_size_and_starts_uniform(shape):
    task = ImageModels(Sizes(shape, 4, (3, 5)))
    rows = task.generated(6)
    assert rows["image"].shape == (6, *shape)
    params = task.init(0)
    np.testing.assert_allclose(jax.jit(task.predict)(params, rows), 0.25)
    one = jax.tree.map(lambda leaf: leaf[0], rows)
    assert jax.jit(task.loss)(params, one) == pytest.approx(np.log(4))
