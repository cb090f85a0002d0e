"""Images: what is read, what is refused, and what the network makes of them."""

import io
from pathlib import Path

import jax
import numpy as np
import pytest

from experiments.tasks.images import sources
from experiments.tasks.images.metrics import class_metrics
from experiments.tasks.images.model import Sizes
from experiments.tasks.images.task import DescribedImages, Images
from experiments.tasks.splits import random_masks
from experiments.tasks.tfds import SourceError


def test_the_digits_are_split_by_their_numbers_into_pixels_and_classes():
    found = sources.digits()
    assert (found.shape, found.classes) == ((8, 8, 1), 10)
    sizes = {split: len(rows["label"]) for split, rows in found.splits.items()}
    assert sizes == {name: m.sum() for name, m in random_masks(np.arange(1797)).items()}
    whole = found.rows(None)
    assert whole["image"].shape == (1797, 8, 8, 1)
    assert whole["image"].dtype == np.uint8
    assert (whole["image"].min(), whole["image"].max()) == (0, 255)
    assert set(whole["label"]) == set(range(10))


def images(tmp_path, splits, *, shape=(6, 4, 3), label=None, more=None):
    """The directory of a data set of PNGs, built without TensorFlow."""
    pytest.importorskip("array_record", reason="array_record has no wheel here")
    import tensorflow_datasets as tfds

    from experiments.tasks.clicks.tfds.builders import LocalInfo

    kinds = tfds.features

    class Tiny(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        name = "tiny"
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            features = {
                "picture": kinds.Image(shape=shape),
                "kind": kinds.ClassLabel(num_classes=3),
            }
            return LocalInfo(
                builder=self,
                features=kinds.FeaturesDict(features | (more or {})),
                supervised_keys=("picture", label or "kind"),
                disable_shuffling=True,
            )

        def _split_generators(self, dl_manager):
            return {split: enumerate(rows) for split, rows in splits.items()}

        def _generate_examples(self):
            raise NotImplementedError

    Tiny(data_dir=tmp_path, file_format="array_record").download_and_prepare()
    return tmp_path / "tiny" / "1.0.0"


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
    assert task.describe()["sizes"] == {"shape": [6, 4, 3], "classes": 3, "channels": [4]}
    np.testing.assert_array_equal(task.columns()["image"], pixels)
    np.testing.assert_array_equal(task.columns()["label"], np.arange(30) % 3)
    sizes = {split: len(rows["label"]) for split, rows in task.source.splits.items()}
    assert sizes["validation"] + sizes["test"] == 9
    task.check()
    again = DescribedImages.described(task.describe())
    assert again.sizes == task.sizes
    [block] = again.read(folder, labelled=False, split="train")
    assert list(block) == ["image"]
    assert jax.eval_shape(again.predict, task.init(0), block).shape == (30, 3)
    with pytest.raises(SourceError, match=r"tfds:tiny/1.0.0 has no split 'tset': train, val"):
        again.read(folder, split="tset")
    with pytest.raises(ValueError, match=r"of shape \(6, 4, 3\) of 3 classes: the model takes"):
        DescribedImages(Sizes((8, 8, 1), 10, (4,))).read(folder)


@pytest.mark.parametrize(
    ("fields", "options", "message"),
    [
        ({"kind": -1}, {}, "split train, record 0, feature kind: found -1, expected a class from"),
        ({}, {"shape": (None, None, 3)}, r"feature picture: images of shape \(None, None, 3\)"),
        ({}, {"label": "sort"}, "has no feature 'sort'; it has kind, picture"),
        ({}, {"label": "picture"}, "feature picture: expected the number of a class"),
        ({"back": png(pictures(1)[0])}, {"more": "back"}, "has 2 features that are images, exp"),
    ],
)
def test_data_sets_that_do_not_fit_are_refused_by_feature(tmp_path, fields, options, message):
    if "more" in options:
        import tensorflow_datasets as tfds

        options = {"more": {"back": tfds.features.Image(shape=(6, 4, 3))}}
    folder = images(tmp_path, {"train": records(pictures(3), **fields)}, **options)
    with pytest.raises(SourceError, match=message):
        Images(folder).columns()


def test_a_path_that_is_no_directory_and_a_split_without_rows_are_refused(tmp_path):
    with pytest.raises(SourceError, match="mnist is no directory: name that of the version"):
        Images(Path("mnist")).columns()
    folder = images(tmp_path, {"train": records(pictures(2))})  # both train
    with pytest.raises(ValueError, match="has no validation images"):
        Images(folder).check()


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"channels": (0,)}, "--channels must each be"), ({"classes": 1}, "at least two classes")],
)
def test_sizes_that_make_no_network_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Sizes(**{"shape": (8, 8, 1), "classes": 10, "channels": (16,), **settings})


@pytest.mark.long
@pytest.mark.parametrize("shape", [(7, 5, 3), (1, 1, 2)])
def test_the_network_takes_images_of_any_size_and_begins_without_an_opinion(shape):
    task = DescribedImages(Sizes(shape, 4, (3, 5)))
    rows = task.generated(6)
    assert rows["image"].shape == (6, *shape)
    params = task.init(0)
    np.testing.assert_allclose(jax.jit(task.predict)(params, rows), 0.25)
    one = jax.tree.map(lambda leaf: leaf[0], rows)
    assert jax.jit(task.loss)(params, one) == pytest.approx(np.log(4))
    assert task.loss is DescribedImages(Sizes(shape, 4, (3, 5))).loss  # what is compiled is shared


def test_metrics_are_what_they_are_called_and_undefined_where_training_diverged():
    logits = np.array([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0], [-2000.0, 0.0]])
    labels = np.array([0, 0, 1, 0])
    found = class_metrics([(logits[:3], labels[:3]), (logits[3:], labels[3:])])
    assert (found["accuracy"], found["num_examples"]) == (0.25, 4)
    expected = (np.log1p(np.exp(-2)) + np.log1p(np.exp(1)) + np.log1p(np.exp(3)) + 2000) / 4
    assert found["log_loss"] == pytest.approx(expected)
    logits[1, 1] = np.inf
    diverged = class_metrics([(logits, labels)])
    assert np.isnan(diverged["accuracy"])
    assert np.isnan(diverged["log_loss"])
    with pytest.raises(ValueError, match="no rows"):
        class_metrics([])
